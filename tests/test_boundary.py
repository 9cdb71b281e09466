"""Files from outside: whatever they hold, a reader answers or says what is wrong with them, and nothing else comes out."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simpar.boundary import MOST_DEPTH, parse_json, parse_toml, parse_yaml, read_bytes, read_json, read_records, read_text, reader
from simpar.errors import InputError, SimparError, Violation
from simpar.evidence.collectives import validate_collectives
from simpar.evidence.run_rows import read_runs
from simpar.interop import (
    kineto,
    kineto_step,
    megatron_import,
    nanotron_import,
    nccl_tests,
    nccl_xml,
    nvidia_topo,
    profile_parts,
    slurm,
    torchtitan_import,
)
from simpar.interop.export import export_files
from simpar.parallel.layout import Layout
from simpar.schedules import build_schedule
from simpar.schedules.csv import read_csv, write_csv
from simpar.specs.hardware import read_profile
from simpar.specs.models_io import load_model
from simpar.specs.planfile import make_plan, read_plan_table
from simpar.specs.scenario import Scenario, make_scenario, read_scenario

ROOT: Final = Path(__file__).parent.parent
DATA: Final = Path(__file__).parent / "data"
WHERE: Final = {"hardware": "dgx-h100", "num_nodes": 2}


def _scenario(framework: str, **plan: Any) -> Scenario:
    return make_scenario({
        "name": "x", "model": "llama3.1-8b", "framework": framework, "cluster": WHERE, "plan": plan,
        "training": {"sequence_length": 2048, "global_batch_size": 64},
    })  # fmt: skip


def _event(name: str, category: str, ts: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": 7, "ts": ts, "dur": 30, "args": args}


TRACE: Final = json.dumps({
    "distributedInfo": {"rank": 0, "world_size": 16, "pg_config": [{"pg_name": "1", "pg_desc": "tp", "ranks": [0, 1]}]},
    "traceEvents": [
        _event("ProfilerStep#1", "user_annotation", 1), _event("cudaLaunchKernel", "cuda_runtime", 5, correlation=5),
        _event("aten::mm", "cpu_op", 4, **{"External id": 1, "Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}),
        _event("nvjet_tst", "kernel", 40, correlation=5, stream=7, **{"External id": 1}),
        _event("ncclDevKernel_AllReduce", "kernel", 90, stream=20, **{
            "Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16", "Group size": 2, "Process Group Name": "1",
        }),
    ],
})  # fmt: skip
NCCL_JSON: Final = json.dumps({
    "config": {"devices": [{"group": 0, "hostname": "a"}, {"group": 0, "hostname": "b"}]}, "args": ["all_reduce_perf"],
    "results": [{"size": 8 * n, "out_of_place": {"time": 9.5, "alg_bw": 1.5, "bus_bw": 1.5, "nwrong": 0}} for n in (1, 2, 4)],
})  # fmt: skip
RUNS: Final = json.dumps({
    "id": "x-1", "source": "s", "task": "pretrain", "model_name": "Llama3-8B", "arch": "dense", "layers": 32, "hidden": 4096,
    "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256, "seq_len": 8192, "gpu": "H100", "gpu_mem_gb": 80,
    "n_gpus": 64, "gpus_per_node": 8, "tp": 2, "pp": 4, "dp": 8, "micro_batch": 1, "global_batch": 128, "framework": "Megatron-LM",
    "precision": "bf16", "step_time_s": 5.0,
})  # fmt: skip
COLLECTIVES: Final = (
    "id,hardware,collective,bytes,gpus,nodes,time_us,busbw_gbs\n"
    "a,dgx-h100,all_reduce,1048576,8,1,40.0,45.9\nb,dgx-h100,all_gather,4096,16,2,20.0,0.2\n"
)
LAYOUT: Final = Layout.of(_scenario("megatron-core", tp=2), 1)


def _schedule_text(folder: Path) -> str:
    path = folder / "sample.csv"
    write_csv(build_schedule("1f1b", 2, 4), path)
    return path.read_text()


READERS: Final[dict[str, tuple[str, Callable[[Path], str], Callable[[Path], object]]]] = {
    "scenario": (".toml", lambda _: (ROOT / "scenarios/mixtral-8x22b_h100x128_tp2pp8ep8.toml").read_text(), read_scenario),
    "plan": (
        ".toml",
        lambda _: (ROOT / "scenarios/plans/bloom-176b_a100x384.toml").read_text(),
        lambda path: make_plan(read_plan_table(path)),
    ),
    "profile": (
        ".toml",
        lambda _: (ROOT / "hardware_profiles/dgx-h100.toml").read_text(),
        lambda path: read_profile(str(path)),
    ),
    "config.json": (
        ".json",
        lambda _: (DATA / "hf/deepseek_v3.json").read_text(),
        lambda path: load_model(str(path)),
    ),
    "model table": (".toml", lambda _: (ROOT / "simpar/specs/models/mixtral-8x7b.toml").read_text(), lambda p: load_model(str(p))),
    "schedule": (".csv", _schedule_text, read_csv),
    "megatron": (
        ".sh",
        lambda _: export_files("megatron", _scenario("megatron-core", tp=2))["megatron.sh"],
        lambda path: megatron_import.load(read_text(path), file=str(path), **WHERE),
    ),
    "torchtitan": (
        ".toml",
        lambda _: export_files("torchtitan", _scenario("torchtitan", zero_stage=3, pp=2))["torchtitan.toml"],
        lambda path: torchtitan_import.load(read_text(path), file=str(path), **WHERE),
    ),
    "nanotron": (
        ".yaml",
        lambda _: export_files("nanotron", _scenario("nanotron", tp=2, sequence_parallel=True))["nanotron.yaml"],
        lambda path: nanotron_import.load(read_text(path), file=str(path), **WHERE),
    ),
    "kineto": (".json", lambda _: TRACE, kineto.read),
    "kineto steps": (".json", lambda _: TRACE, lambda path: kineto_step.read_steps(path, LAYOUT)),
    "nccl-tests": (".txt", lambda _: (DATA / "interop/all_reduce_8gpu.txt").read_text(), nccl_tests.read),
    "nccl-tests -J": (".json", lambda _: NCCL_JSON, nccl_tests.read),
    "nvidia-topo": (".txt", lambda _: (DATA / "interop/topo_8gpu_nvswitch.txt").read_text(), nvidia_topo.read),
    "nccl-xml": (".xml", lambda _: (DATA / "interop/nccl_topo_8gpu.xml").read_text(), nccl_xml.read),
    "topology.conf": (".conf", lambda _: (DATA / "interop/topology.conf").read_text(), slurm.read),
    "topology.yaml": (".yaml", lambda _: (DATA / "interop/topology.yaml").read_text(), slurm.read),
    "part": (
        ".toml",
        lambda _: profile_parts.toml_of(slurm.read(DATA / "interop/topology.conf").to_json()),
        profile_parts.read_part,
    ),
    "runs": (".jsonl", lambda _: RUNS, lambda path: list(read_runs(path))),
    "collectives": (".csv", lambda _: COLLECTIVES, validate_collectives),
}  # fmt: skip
"""Name -> ending, a file that is right, what reads it."""

ODD: Final = (
    "", "0", "-1", "1", "3.5", "1e999", "-1e999", "nan", "inf", "true", "null", "[]", "{}", '""', '"x"', "[1, 2]", '{"a": 1}',
    "9" * 30, "9" * 5000, "\x00", "\ufeff", "é", "\u2028", "[[" * 40, "1e-320", "-0.0", "'", '"', ":", "$(x)", "${x", "*", "&a",
    "!!python/name:os",
)  # fmt: skip
TOKEN: Final = re.compile(r'"[^"\n]*"|[\w.+-]+|[^\s\w]')
VALUES: Final = (None, 0, -1, 1, 2.5, 1e308, True, "x", "", [], [1], {}, {"a": 1}, 10**30, [[[]]])


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for name, v in inner for p in [(*path, name), *_paths(v, (*path, name))]]


def mutated(text: str, changes: list[tuple[int, int, int]]) -> str:
    """`text` with tokens replaced, removed or doubled, or with lines or an end missing; JSON also by its values."""
    for kind, where, what in changes:
        if kind == 0 and text.startswith("{"):
            table = json.loads(text) if _is_json(text) else {}
            if paths := _paths(table):
                *above, last = paths[where % len(paths)]
                target: Any = table
                for name in above:
                    target = target[name]
                if what % 4 == 0:
                    del target[last]
                else:
                    target[last] = VALUES[what % len(VALUES)]
                text = json.dumps(table)
            continue
        found = list(TOKEN.finditer(text))
        if not found:
            return text
        token = found[where % len(found)]
        new = {1: "", 2: token[0] * 2}.get(kind, ODD[what % len(ODD)])
        text = text[: token.start()] if kind == 3 and what % 8 == 0 else text[: token.start()] + new + text[token.end() :]
    return text


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", READERS)
def test_a_right_file_is_read(name: str, folder: Path) -> None:
    ending, sample, read = READERS[name]
    path = folder / f"right{ending}"
    path.write_text("\ufeff" + sample(folder), encoding="utf-8")
    assert read(path) is not None


def refusal(read: Callable[[Path], object], path: Path) -> SimparError | None:
    """What the reader says is wrong; anything else that it raises goes on."""
    try:
        read(path)
    except SimparError as error:
        return error
    return None


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=int(os.environ.get("SIMPAR_FUZZ", "25")), deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5000), st.integers(0, 200)), min_size=1, max_size=3))
def test_only_input_errors_come_out(name: str, folder: Path, changes: list[tuple[int, int, int]]) -> None:
    ending, sample, read = READERS[name]
    path = folder / f"wrong{ending}"
    path.write_text(mutated(sample(folder), changes), encoding="utf-8")
    found = refusal(read, path)
    assert found is None or (found.exit_code == 2 and str(found).strip())


OTHER: Final = (
    b"", b"\x00\x01\x02", b"\xff\xfe\x00", b"[" * 50_000, b'{"a":' * 50_000, b"a.b." * 20_000 + b"c = 1",
    gzip.compress(b"\x00" * 2**25),
)  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_files_of_nothing_like_it(name: str, folder: Path) -> None:
    ending, _, read = READERS[name]
    path = folder / f"other{ending}"
    for content in OTHER:
        path.write_bytes(content)
        found = refusal(read, path)
        assert found is None or found.exit_code == 2


# -- the boundary itself ---------------------------------------------------------------------------------------------------


def test_texts_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for data in (b"\xef\xbb\xbfa = 1", "\ufeffa = 1".encode("utf-16-le"), "\ufeffa = 1".encode("utf-16-be"), b"a = 1"):
        path.write_bytes(data)
        assert read_text(path) == "a = 1"


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 1001)
    assert len(read_bytes(path, 1001)) == 1001
    with pytest.raises(InputError, match="is larger than 1000 bytes"):
        read_bytes(path, 1000)
    path.write_bytes(gzip.compress(b"0" * 2**25))
    with pytest.raises(InputError, match=r"gzip file of .* that unpacks to more than 16 MiB"):
        read_bytes(path)
    path.write_bytes(gzip.compress(b"0" * 1001))
    with pytest.raises(InputError, match="unpacks to more than 1000 bytes"):
        read_bytes(path, 1000)
    path.write_bytes(gzip.compress(b"text") + gzip.compress(b" of two members"))
    assert read_text(path) == "text of two members"
    path.write_bytes(gzip.compress(b"text")[:-3])
    with pytest.raises(InputError, match="damaged gzip"):
        read_text(path)


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, rule in ((tmp_path, "is a folder"), (tmp_path / "pipe", "a device or a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(InputError, match=rule):
            read_text(path)
    for path in (tmp_path / "none", Path("a" * 5000), Path("a\0b")):
        with pytest.raises(InputError, match=r"no such file|cannot be read"):
            read_text(path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[1, NaN]", "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[1e999]", "1e999 is too large"),
        ("{\n]", r"t:2: not JSON"),
        ("[" * 5000, "nested too deeply"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_json_that_is_none(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse_json(text, "t")


LAUGHS: Final = "".join(f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 10)}]\n" for c in "bcdefgh")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: [1, 2", r"t:\d: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a: .inf", "a = inf: must be a finite number"),
        ("a:\n- b: .nan", r"a\.0\.b = nan"),
        ("[" * (MOST_DEPTH + 1), "nested too deeply"),
        ("a: \x07", "not valid YAML"),
        (
            "a: &a [1]\n" + "".join(f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 10)}]\n" for c in "bcdefgh"),
            "1,000,000 values",
        ),
    ],
)
def test_yaml_that_is_refused(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse_yaml(text, "t")


def test_yaml_is_plain_data() -> None:
    text = "a: &x {b: [1, 2.5, no, ~, 'q # r']}\nc: *x\nd:\n- e\n"
    assert parse_yaml(text, "t") == {
        "a": {"b": [1, 2.5, False, None, "q # r"]},
        "c": {"b": [1, 2.5, False, None, "q # r"]},
        "d": ["e"],
    }


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 65 + "]" * 65, "a." * 64 + "b = 1", '"a b" . ' * 64 + "c = 1", "a = " + "{b = " * 70 + "1" + "}" * 70]
)
def test_toml_of_any_depth_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="nested too deeply"):
        parse_toml(text, "t")


def test_toml_of_many_floats_is_read() -> None:
    values = ", ".join(f"{i}.5" for i in range(500))
    assert len(parse_toml(f"a = [{values}]\nb.c.d = 1", "t")["a"]) == 500


def test_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1\n\n2,3\n")
    assert list(read_records(path)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]
    path.write_text("a,b\n1,2,3\n")
    with pytest.raises(InputError, match=r"a\.csv:2: has 3 cells; expected 2"):
        list(read_records(path))


def test_a_config_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text("[1]")
    with pytest.raises(InputError, match="holds a list; expected a config"):
        read_json(path, "a config")


def test_the_last_line_names_file_and_expectation() -> None:
    @reader("file", "a thing")
    def read(text: str, *, file: str = "") -> Any:
        return {"a": json.loads(text)}["b" if file else "a"] + 1

    assert read("1") == 2
    with pytest.raises(InputError, match=r"^x: 'b' is missing; expected a thing$"):
        read("1", file="x")
    with pytest.raises(InputError, match=r"^the input: holds a value that cannot be read .*; expected a thing$"):
        read('"1"')


PARTS: Final = "module_fqns_per_model_part = "


# -- what broke once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"),
    [
        ("kineto", '"distributedInfo": {', '"distributedInfo": 5, "x": {', "distributedInfo = 5: must be an object"),
        ("kineto", '"args": {"correlation": 5}', '"args": "x"', r"traceEvents\[1\]\.args = 'x': must be an object"),
        ("kineto steps", '"args": {"correlation": 5}', '"args": 1e300', r"traceEvents\[1\]\.args"),
        ("kineto", '"correlation": 5', '"correlation": [1]', r"traceEvents\[1\]\.args\.correlation"),
        (
            "torchtitan",
            PARTS,
            f"{PARTS}7\nother = ",
            "module_fqns_per_model_part = 7: must be a list",
        ),
        ("torchtitan", PARTS, f"{PARTS}[[1]]\nother = ", "must be a list of lists of names"),
        ("torchtitan", "converters = ", "converters = 2\nother = ", r"model\.converters = 2: must be a list"),
        ("nanotron", "hidden_size:", "width:", r"model\.model_config\.hidden_size: is required"),
        ("nanotron", "tp: 2", "tp: a", r"parallelism\.tp = 'a'"),
        ("nanotron", "tp: 2", "tp:", r"parallelism\.tp = None"),
        ("nanotron", "sequence_length: 2048", "", r"tokens\.sequence_length: is required"),
        ("config.json", '"silu"', '["silu"]', "expected a Hugging Face config.json"),
        ("scenario", 'model = "', 'model = "' + "a" * 5000, "unknown model"),
    ],
)
def test_wrong_types_are_named(name: str, old: str, new: str, rule: str, folder: Path) -> None:
    ending, sample, read = READERS[name]
    text = sample(folder)
    assert old in text
    path = folder / f"typed{ending}"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=rule):
        read(path)


def test_one_expert_is_a_dense_model(folder: Path) -> None:
    _, sample, read = READERS["megatron"]
    path = folder / "dense.sh"
    path.write_text(sample(folder).replace("--num-layers", "--num-experts 1 --moe-router-topk 2 --num-layers", 1))
    found = read(path)
    assert isinstance(found, megatron_import.Imported)
    assert found.scenario.model.moe is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "change",
    ["cluster.nic_bandwidth_scale=inf", "cluster.scale_up_bandwidth_scale=1e300", "cluster.memory_scale=nan",
     "training.dropout=inf",
     "plan.layers_per_stage=" + "[" * 500],
)  # fmt: skip
def test_no_infinite_numbers(change: str) -> None:
    with pytest.raises(InputError):
        read_scenario(ROOT / "scenarios/mixtral-8x22b_h100x128_tp2pp8ep8.toml", [change])


def test_what_two_readers_of_a_field_say_is_said_once() -> None:
    same, other = (Violation("model.hidden_act", value, "must be the name of a function") for value in (["silu"], 3))
    error = InputError([same, same, other])
    assert error.violations == (same, other)
    assert str(error).count("['silu']") == 1
