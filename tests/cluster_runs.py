"""A small model, and real runs of it, for the tests of `simpar validate cluster`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from simpar.live.cluster import ClusterOptions, run
from simpar.report.cluster_view import cluster_page, print_report

SMALL = """
name = "small"
framework = "plain"
[model]
kind = "transformer"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 8
vocab_size = 64
[cluster]
hardware = "cpu-gloo"
num_nodes = 1
num_gpus = 1
[plan]
dp = 1
zero_stage = 0
[training]
sequence_length = 16
global_batch_size = 4
micro_batch_size = 1
precision = "fp32"
"""


def options(folder: Path, layouts: str, **more: Any) -> ClusterOptions:
    """A run of the small model under the shipped CPU profile: nothing is calibrated."""
    scenario = folder / "small.toml"
    scenario.write_text(SMALL)
    given: dict[str, Any] = {
        "nproc": 2, "layouts": layouts, "scenario": scenario, "profile": Path("cpu-gloo"), "tolerance": 9.0, "device": "cpu",
        "store": folder / "kept.jsonl", "steps": 1, "warmup": 1, "rounds": 1, "timeout_s": 40.0,
    }  # fmt: skip
    return ClusterOptions(**given | more)


def passes(given: ClusterOptions) -> bool:
    """Run and show; whether the error is within the tolerance."""
    report = run(given)
    assert report is not None
    print_report(report)
    assert cluster_page(report).startswith("<!doctype html>")
    return report.passed


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that name `folder`."""
    lines = subprocess.run(["ps", "axww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(folder) in line and "ps axww" not in line]
