"""Causes of slow runs in real gloo runs of this machine: is each one named first beside a healthy run of the same job?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import simpar
from simpar.runlogs.formats import read_log
from simpar.runlogs.read import read_run
from simpar.site.causes import Job, Verdict, causes_of, diagnose
from simpar.site.signs import Expected, signs_of

pytest.importorskip("torch")
RANKS = 3
SPREAD = 0.1
"""Of a step's logarithm on a machine of two cores, where other programs run."""
CAUSES = {
    "slow-rank": "one slow node or GPU", "data": "data loading",
    "checkpoint": "checkpoints or evaluation inside the time given",
}  # fmt: skip


def ran(cause: str, folder: Path) -> dict[str, Any]:
    """The row of a real run with `cause`."""
    program = Path(__file__).parent / "gloo_causes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(program)]
    subprocess.run([*command, str(folder), cause], check=True, capture_output=True, timeout=300)
    scenario = simpar.load(
        model="qwen3-0.6b", hardware="cpu-gloo", num_nodes=1, num_gpus=RANKS, global_batch_size=RANKS, sequence_length=64,
        precision="fp32",
    )  # fmt: skip
    log = folder / "train.log"
    row = read_run(scenario, [log], traces=sorted(folder.glob("rank*.json"))).row
    if cause == "checkpoint":  # the time of such a run is one that somebody typed: the mean of all its steps
        row["step_time_s"] = mean(i.seconds for i in read_log(log).intervals[2:] if i.seconds)
    return row


def expected(healthy: dict[str, Any]) -> Expected:
    """What a healthy run leads to expect of the next."""
    ranks = healthy["extra"]["traces"]["ranks"]
    compute, exposed, whole, idle = (
        median(rank[key] for rank in ranks) for key in ("compute_s", "exposed_communication_s", "communication_s", "idle_s")
    )
    return Expected(healthy["step_time_s"], SPREAD, compute, exposed, max(whole - exposed, 0.0), idle, 0.0, 2.0**40)


def verdicts(row: dict[str, Any], healthy: Expected) -> list[Verdict]:
    return diagnose(signs_of(row, healthy), healthy, causes_of(healthy, Job()))


@pytest.mark.slow
@pytest.mark.torch
def test_causes_of_real_runs_are_named_first(tmp_path: Path) -> None:
    rows = {}
    for cause in ("none", *CAUSES, "none again"):
        (tmp_path / cause).mkdir()
        rows[cause] = ran(cause.split()[0], tmp_path / cause)
    healthy = expected(rows["none"])
    if not 0.8 < rows["none again"]["step_time_s"] / healthy.step_s < 1.25:
        pytest.skip("other work: the machine does not repeat its own steps")
    found = {cause: verdicts(rows[cause], healthy) for cause in CAUSES}
    named = {cause: [(v.name, round(v.probability, 2)) for v in each[:3]] for cause, each in found.items()}
    assert {cause: each[0].name for cause, each in found.items()} == CAUSES, named


def counted(draws: int = 4) -> None:
    """Print how often each cause is named first, and among three, over real runs."""
    for cause, name in CAUSES.items():
        first = among = 0
        for _ in range(draws):
            with TemporaryDirectory() as before, TemporaryDirectory() as slow:
                found = [v.name for v in verdicts(ran(cause, Path(slow)), expected(ran("none", Path(before))))]
            first, among = first + (found[0] == name), among + (name in found[:3])
        print(f"{name}: {first} of {draws} named first, {among} among the first three", flush=True)


if __name__ == "__main__":
    counted()
