"""What a run left behind (configurations, logs, traces, rows, a site's file): a reader answers or says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_boundary import OTHER, mutated, refusal
from test_interop_resolved import BRIDGE, NEOX, PRIMUS, VERL
from test_run_read_logs import DATA, SCENARIO, iteration, nanotron, titan
from test_run_read_traces import SMALL, device_trace, snapshot
from test_site import TABLES

from simpar.evidence.run_rows import runs_in
from simpar.interop.configs import load_config
from simpar.runlogs.formats import read_log
from simpar.runlogs.read import read_run
from simpar.runlogs.snapshots import read_snapshots
from simpar.runlogs.traces import read_traces
from simpar.site.observed import observe
from simpar.specs.site import read_site

WHERE: Final[dict[str, Any]] = {"hardware": "dgx-h100", "num_nodes": 2}
SITE: Final = """name = "ours"
compute = 1.1
memory = 1.05
residual = 0.02
group = "dense on hopper"
host = 1.2
other_kind = 0.1
reach = 2.0
covariance = [[1e-3, 0, 0, 0, 0], [0, 2e-3, 0, 0, 0], [0, 0, 3e-3, 0, 0], [0, 0, 0, 2e-3, 0], [0, 0, 0, 0, 1e-3]]
[[runs]]
id = "a"
measured_s = 1.0
before_s = 0.9
after_s = 0.99
[[kinds]]
parameters = 8.03e9
sequence_length = 8192
gpus = 64
global_batch_size = 128
precision = "bf16"
factor = 1.05
[[facts]]
fact = "plan.recompute = full"
factor = 0.8
"""
DEEPSPEED: Final = json.dumps({
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True}, "activation_checkpointing": {"partition_activations": False},
})  # fmt: skip
TITAN: Final = json.dumps({
    "model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, "seq_len": 4096, "global_batch_size": 32},
    "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": -1},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}, "compile": {"enable": True},
})  # fmt: skip
ROWS: Final = "".join(json.dumps({"id": t["name"], "scenario": t, "step_time_s": 0.5 + n}) + "\n" for n, t in enumerate(TABLES[:2]))
METRICS: Final = "".join(
    json.dumps({"_step": n, "_runtime": 3.0 * n, "train/loss": 2.0, "perf/step_time": 3.0}) + "\n" for n in range(9)
)
STATE: Final = json.dumps({
    "global_step": 8, "max_steps": 8, "train_batch_size": 4,
    "log_history": [{"step": n, "loss": 2.0, "perf/step_time": 3.0, "epoch": 0.1 * n} for n in range(1, 9)],
})  # fmt: skip


def _observed(path: Path) -> object:
    return [run if run.skipped else observe(run) for run in runs_in([path])]


def _config(path: Path) -> object:
    return load_config(path, **WHERE)


def _deepspeed(path: Path) -> object:
    return load_config(path, **WHERE, model="llama3.1-8b", sequence_length=4096)


def _log(path: Path) -> object:
    return read_run(SCENARIO, [path])


READERS: Final[dict[str, tuple[str, str, Callable[[Path], object]]]] = {
    "site": (".toml", SITE, read_site),
    "rows of adapt": (".jsonl", ROWS, _observed),
    "megatron-bridge": (".yaml", BRIDGE, _config),
    "gpt-neox": (".yml", NEOX, _config),
    "primus": (".yaml", PRIMUS, _config),
    "verl": (".yaml", VERL, _config),
    "deepspeed": (".json", DEEPSPEED, _deepspeed),
    "torchtitan's dump": (".json", TITAN, _config),
    "log of megatron": (".log", "".join(iteration(10 * n, 3000.0 + n) for n in range(1, 9)), _log),
    "log of torchtitan": (".log", "".join(titan(n, "7,000") for n in range(1, 9)), read_log),
    "log of nanotron": (".log", "".join(nanotron(n, "3.01K") for n in range(1, 9)), read_log),
    "log of deepspeed": (".log", (DATA / "deepspeed_0.19.log").read_text()[:20_000], read_log),
    "log of transformers": (".log", (DATA / "trainer_5.23.log").read_text()[:20_000], read_log),
    "metrics of lightning": (".csv", (DATA / "lightning_2.6_metrics.csv").read_text(), read_log),
    "metrics of W&B": (".jsonl", METRICS, read_log),
    "state of the Trainer": (".json", STATE, read_log),
    "trace of a rank": (".json", json.dumps(device_trace(0, 5.0)), lambda path: read_traces([path], SMALL)),
    "flight recorder": (".json", (DATA / "flight_1.json").read_text(), lambda path: read_traces([path], SMALL)),
}
"""Name -> ending, a file that is right, what reads it."""


@pytest.mark.parametrize("name", READERS)
def test_a_right_file_is_read(name: str, tmp_path: Path) -> None:
    ending, sample, read = READERS[name]
    path = tmp_path / f"right{ending}"
    path.write_text(sample, encoding="utf-8-sig")
    assert read(path) is not None


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=int(os.environ.get("SIMPAR_FUZZ", "10")), deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5000), st.integers(0, 200)), min_size=1, max_size=3))
def test_only_input_errors_come_out(name: str, tmp_path: Path, changes: list[tuple[int, int, int]]) -> None:
    ending, sample, read = READERS[name]
    path = tmp_path / f"wrong{ending}"
    path.write_text(mutated(sample, changes), encoding="utf-8")
    found = refusal(read, path)
    assert found is None or (found.exit_code == 2 and str(found).strip())


HUGE: Final = (b"x" * 2**22, b"[1," * 40, b'{"a": ' + b"9" * 20_000 + b"}", b"a: &a [*a]\n", gzip.compress(b"\x00" * 2**25))


@pytest.mark.parametrize("name", READERS)
def test_files_of_nothing_like_it(name: str, tmp_path: Path) -> None:
    ending, _, read = READERS[name]
    path = tmp_path / f"other{ending}"
    for content in (*OTHER, *HUGE):
        path.write_bytes(content)
        found = refusal(read, path)
        assert found is None or found.exit_code == 2


@settings(max_examples=int(os.environ.get("SIMPAR_FUZZ", "25")), deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 200)), min_size=1, max_size=3))
def test_memory_snapshots_of_wrong_types(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    """Each value of a snapshot in turn something else."""
    text = json.dumps(snapshot([("alloc", 1, 4), ("alloc", 2, 8), ("free_requested", 2, 8)], {1: 4}))
    for where, what in changes:
        text = mutated(text, [(0, where, what)])
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(json.loads(text)))
    found = refusal(lambda p: read_snapshots([p], SMALL), path)
    assert found is None or found.exit_code == 2
