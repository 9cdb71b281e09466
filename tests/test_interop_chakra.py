"""Chakra traces: read back from the bytes and replayed, they take the predicted step; sends and groups match on every rank."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import simpar
from simpar.cli import main
from simpar.errors import InputError
from simpar.interop import chakra, simai
from simpar.interop.scenario_text import scenario_text
from simpar.parallel.keys import BlockOp
from simpar.parallel.traffic import calls_of
from simpar.specs.scenario import Scenario
from simpar.step import prepare, run


def small(**changes: Any) -> Scenario:
    model = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 1024}  # fmt: skip
    table = {"name": "x", "model": model, "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
             "plan": {"tp": 2, "pp": 2, "dp": 2}, "training": {"sequence_length": 512, "global_batch_size": 8}}  # fmt: skip
    return simpar.load(table, **changes)


def decode(data: bytes) -> list[tuple[int, Any]]:
    """(field, value) pairs of a message."""
    found, at = [], 0
    while at < len(data):
        key, at = integer(data, at)
        if key & 7 == 0:
            value, at = integer(data, at)
            found.append((key >> 3, value))
        else:
            assert key & 7 == 2
            size, at = integer(data, at)
            found.append((key >> 3, data[at : at + size]))
            at += size
    return found


def integer(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def read(path: Path) -> list[dict[str, Any]]:
    """The nodes of a file."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size, at = integer(data, at)
        messages.append(decode(data[at : at + size]))
        at += size
    assert messages[0] == [(1, b"0.0.4")]
    nodes = []
    for fields in messages[1:]:
        plain = dict(fields)
        deps, place = [], 0
        packed = plain.get(5, b"")
        while place < len(packed):
            value, place = integer(packed, place)
            deps.append(value)
        attributes = {}
        for number, value in fields:
            if number == 10:
                name, (_, content) = decode(value)
                attributes[name[1].decode()] = content.decode() if isinstance(content, bytes) else content
        nodes.append({"id": plain[1], "kind": plain[3], "deps": deps, "us": plain.get(7, 0), **attributes})
    return nodes


def replayed_us(files: dict[int, list[dict[str, Any]]]) -> float:
    """When the last node ends: a node starts after its dependencies, a receive ends when its send does."""
    ends: dict[tuple[int, int], float] = {}
    sent: dict[tuple[int, int, int], float] = {}
    left = {rank: list(nodes) for rank, nodes in files.items()}
    while any(left.values()):
        moved = False
        for rank, nodes in left.items():
            rest = []
            for node in nodes:
                key = (node.get("comm_src", -1), node.get("comm_dst", -1), node.get("comm_tag", -1))
                if any((rank, d) not in ends for d in node["deps"]) or (node["kind"] == chakra.RECV and key not in sent):
                    rest.append(node)
                    continue
                moved = True
                begin = max((ends[rank, d] for d in node["deps"]), default=0.0)
                end = begin + node["us"]
                if node["kind"] == chakra.SEND:
                    sent[key] = end
                ends[rank, node["id"]] = sent[key] if node["kind"] == chakra.RECV else end
            left[rank] = rest
        assert moved, "the traces wait for each other"
    return max(ends.values())


CASES = [
    {}, {"pp": 1, "dp": 4}, {"pp": 4, "dp": 1, "schedule": "interleaved", "virtual_stages": 1, "tp": 2} | {"schedule": "1f1b"},
    {"virtual_stages": 2, "schedule": "interleaved"}, {"zero_stage": 3, "tp": 1, "pp": 1, "dp": 8, "framework": "torchtitan"},
    {"cp": 2, "dp": 1},
]  # fmt: skip


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_traces_replay_the_step(changes: dict[str, Any], tmp_path: Path) -> None:
    scenario = small(**changes)
    *paths, groups = chakra.write(scenario, tmp_path)
    assert len(paths) == scenario.world_size
    files = {rank: read(path) for rank, path in enumerate(paths)}
    priced = prepare(scenario, detail="op")
    timeline = run(priced)
    step_us = float(timeline.finish.max()) * 1e6
    most = max(len(nodes) for nodes in files.values())
    assert replayed_us(files) == pytest.approx(step_us, rel=0.02, abs=most)
    sends = Counter(
        (n["comm_src"], n["comm_dst"], n["comm_tag"], n["comm_size"]) for f in files.values() for n in f if n["kind"] == chakra.SEND
    )
    receives = Counter(
        (n["comm_src"], n["comm_dst"], n["comm_tag"], n["comm_size"]) for f in files.values() for n in f if n["kind"] == chakra.RECV
    )
    assert sends == receives
    assert bool(sends) == (scenario.plan.pp > 1)
    table = {int(k): v for k, v in json.loads(groups.read_text()).items()}
    calls: dict[int, list[Counter[Any]]] = {}
    for rank, nodes in files.items():
        mine: dict[int, Counter[Any]] = {}
        for node in nodes:
            if node["kind"] == chakra.COLL:
                assert rank in table[int(node["pg_name"])]
                mine.setdefault(int(node["pg_name"]), Counter())[node["comm_type"], node["comm_size"]] += 1
            assert node["is_cpu_op"] == 0
        for number, counts in mine.items():
            calls.setdefault(number, []).append(counts)
    for number, counts in calls.items():
        assert len(counts) == len(table[number])
        assert all(c == counts[0] for c in counts)


def test_sizes_are_those_that_astra_sim_takes(tmp_path: Path) -> None:
    """An all-gather's is one rank's share; sharded weights of 4 layers over 8 ranks."""
    *paths, _ = chakra.write(small(zero_stage=3, tp=1, pp=1, dp=8, framework="torchtitan"), tmp_path)
    nodes = read(paths[0])
    gathers = sorted(
        {n["comm_size"] for n in nodes if n.get("comm_type") == chakra.TYPES["all_gather"] and n["kind"] == chakra.COLL}
    )
    layer = (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) * 2
    assert any(size == pytest.approx(layer / 8, rel=0.02) for size in gathers)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.toml"
    path.write_text(scenario_text(small()))
    with pytest.raises(SystemExit) as stop:
        main(["export", "chakra", str(path), "--out", str(tmp_path / "et")])
    assert not stop.value.code
    assert len(list((tmp_path / "et").glob("step.*.et"))) == 8
    assert "step.7.et" in capsys.readouterr().out


def test_too_many_nodes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chakra, "MOST_NODES", 100)
    with pytest.raises(InputError, match="more than the 100"):
        chakra.write(small(), tmp_path / "large")


def test_both_are_among_the_formats_that_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text(scenario_text(small()))
    with pytest.raises(SystemExit) as stop:
        main(["export", "astra-sim", str(path)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("chakra", "simai", "megatron"))


def test_the_workload_of_simai() -> None:
    """Per micro-batch the rows' compute is the first rank's, the collectives those of its layers."""
    scenario = small(dp=1, tp=4)
    head, count, *rows = simai.export(scenario)["simai.txt"].splitlines()
    assert head.startswith("HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 1 pp: 2 vpp: 1 ga: 8 all_gpus: 8 ")
    assert int(count) == len(rows)
    table = [row.split("\t") for row in rows]
    assert {len(row) for row in table} == {12}
    layers = [row for row in table if row[0].startswith("layer")]
    priced = prepare(scenario, detail="op")
    timeline, program = run(priced), priced.program
    wanted = 0.0
    for op in range(program.num_ops):
        key = program.price_keys[program.price[op]]
        if program.role[op] == 0 and isinstance(key, BlockOp) and not calls_of(priced.layout, key):
            wanted += float(timeline.finish[op] - timeline.start[op])
    assert sum(int(r[2]) + int(r[5]) for r in layers) * 1e-9 == pytest.approx(wanted, rel=0.01)
    kinds = Counter(r[3] for r in layers)
    # Two layers on the rank; sequence parallelism gathers and scatters twice in each forward.
    assert (kinds["ALLGATHER"], kinds["REDUCESCATTER"]) == (2 * 2 * 8, 2 * 2 * 8) or kinds["ALLGATHER"] >= 2 * 2 * 8
    with pytest.raises(InputError, match="context-parallel"):
        simai.export(small(cp=2, dp=1))
