"""Schedules against torch.distributed.pipelining: recorded orders, live ones, and a run on real processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simpar.schedules import SCHEDULES, Phase, Schedule, build_schedule
from simpar.schedules.communication import with_communication
from simpar.schedules.csv import read_csv, write_csv

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).parent / "data" / "measured" / "schedules" / "torch_orders.jsonl"
BY_TORCH_NAME = {family.torch_class.removeprefix("Schedule"): family for family in SCHEDULES.values()}
BY_TORCH_NAME["InterleavedZeroBubble"] = SCHEDULES["interleaved_zb"]  # zb-h1 is the same class with one stage

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the torch extra is not installed")


def texts(rows: Iterable[Iterable[object]]) -> list[list[str]]:
    """Rows as text, without torch's idle slots."""
    return [[str(action) for action in row if action not in (None, "")] for row in rows]


# --- recorded --------------------------------------------------------------------------------------------------


def recorded() -> list[Any]:
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return [pytest.param(case := json.loads(line), id="-".join(map(str, key(case)))) for line in lines]


def key(case: dict[str, Any]) -> tuple[str, int, int, int]:
    return case["schedule"], case["pp"], case["microbatches"], case["virtual_stages"]


@pytest.mark.parametrize("case", recorded())
def test_order_equals_the_recorded_one(case: dict[str, Any]) -> None:
    name, p, m, v = key(case)
    schedule = BY_TORCH_NAME[name].build(p, m, v)
    schedule.check()
    assert texts(schedule.rows) == texts(row.split(",") for row in case["rows"])
    assert list(schedule.stage_to_rank) == case["stage_to_rank"]
    assert schedule.unit_makespan() == case["unit_makespan"]
    # The recorded peaks count an activation as freed by the input gradient.
    assert list(schedule.peak_in_flight(released_by=Phase.I)) == case["unit_peak_in_flight"]


# --- live ------------------------------------------------------------------------------------------------------


def torch_schedule(name: str, p: int, m: int, v: int) -> Any:
    """torch's own schedule object. It asks its stages for four numbers only, so that no process group is needed."""
    from torch.distributed.pipelining import schedules

    stage = SimpleNamespace(group_rank=0, group_size=p, num_stages=p * v, submod=None)
    return getattr(schedules, name)([stage] * v, m)


def ordered(rows: Iterable[Iterable[object]]) -> list[list[str]]:
    """Rows as text; stages freed at the same moment in one fixed order, as torch frees them in a set's order."""
    result = []
    for row in texts(rows):
        runs = itertools.groupby(row, key=lambda action: action.endswith("RESHARD"))
        result.append([action for freed, run in runs for action in (sorted(run) if freed else run)])
    return result


LIVE = [
    (name, p, m, v)
    for name in ("interleaved", "interleaved_bfs", "interleaved_zb", "zb-h1", "zb-v", "dualpipe-v")
    for p in (1, 3, 5, 6)
    for m in (1, 5, 7, 10, 18)
    for v in ([SCHEDULES[name].virtual_stages] if SCHEDULES[name].virtual_stages else [1, 3, 5])
]


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize(("name", "p", "m", "v"), LIVE)
def test_order_equals_torchs(name: str, p: int, m: int, v: int) -> None:
    family = SCHEDULES[name]
    try:
        theirs = torch_schedule(family.torch_class, p, m, v)
    except ValueError:
        # torch wants equal rounds of zb-h1 too, though with one stage per rank they change nothing.
        assert family.requirements(p, m, v) or name == "zb-h1"
        return
    schedule = family.build(p, m, v)
    assert texts(schedule.rows) == texts(theirs.pipeline_order[rank] for rank in range(p))
    assert dict(enumerate(schedule.stage_to_rank)) == theirs.stage_index_to_group_rank
    with_theirs = [theirs.pipeline_order_with_comms[rank] for rank in range(p)]
    assert ordered(with_communication(schedule)) == ordered(with_theirs)


class RecordingStage:
    """A pipeline stage that computes nothing and remembers the order in which torch runs it."""

    has_backward = True
    is_last = False

    def __init__(self, rank: int, p: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = rank, rank, p, p
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, divisor: int) -> None:
        pass

    def no_transfers(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (3, 3), (5, 11), (6, 7)])
def test_order_equals_what_torch_executes(name: str, p: int, m: int) -> None:
    # torch prints these orders from a second function, which numbers the last rank's forwards of 1F1B from 1.
    from torch.distributed.pipelining import schedules

    rows = []
    for rank in range(p):
        stage = RecordingStage(rank, p)
        runner = getattr(schedules, SCHEDULES[name].torch_class)(stage, m)
        runner._initialize_stage = lambda *args: None
        runner._step_microbatches([()] * m, [{}] * m)
        rows.append(stage.ran)
    assert texts(build_schedule(name, p, m).rows) == rows


# --- files that torch runs -------------------------------------------------------------------------------------

SINGLE_CHAIN = [name for name, family in SCHEDULES.items() if family.replicas == 1]


def runtime(schedule: Schedule) -> Any:
    from torch.distributed.pipelining import schedules

    stage = SimpleNamespace(group_rank=0, group_size=schedule.num_ranks, num_stages=schedule.num_stages, submod=None)
    return schedules._PipelineScheduleRuntime([stage] * len(schedule.stages_of(0)), schedule.num_microbatches)


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize("name", SINGLE_CHAIN)
def test_torch_reads_both_forms(name: str, tmp_path: Path) -> None:
    family = SCHEDULES[name]
    schedule = family.build(3, 6, family.virtual_stages or 2)
    ranks = range(3)
    for form, communication in (("compute_only", False), ("compute_comms", True)):
        path = tmp_path / f"{form}.csv"
        write_csv(schedule, path, communication=communication)
        theirs = runtime(schedule)
        theirs._load_csv(str(path), form)
        # torch lowers the first form itself and takes the second as it is: both must come out the same.
        assert ordered(theirs.pipeline_order_with_comms[rank] for rank in ranks) == ordered(with_communication(schedule))
        assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.stage_to_rank))


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_simpar_reads_what_torch_writes(form: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.csv"
    torch_schedule("ScheduleDualPipeV", 3, 8, 2)._dump_csv(str(path), form)
    assert read_csv(path).rows == build_schedule("dualpipe-v", 3, 8).rows


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize("name", ["zb-h2", "v-half"])
def test_torch_trains_with_a_schedule_it_does_not_have(name: str, tmp_path: Path) -> None:
    """Two gloo processes run simpar's file; their gradients must be those of the model in one process."""
    path = tmp_path / "schedule.csv"
    schedule = build_schedule(name, 2, 6)
    write_csv(schedule, path, communication=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(path), str(tmp_path / "rendezvous")]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        results = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, results, strict=True):
        assert worker.returncode == 0, err
        assert out.split() == ["same"] * len(schedule.stages_of(0))


def train_one_rank(path: str, rendezvous: str, rank: int) -> None:
    """Worker of the test above: run the file on this rank, and compare each stage's gradient with the whole model's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    schedule = read_csv(path)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*[torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(schedule.num_stages)])
    inputs = torch.randn(schedule.num_microbatches, 4, dtype=torch.float64)
    whole(inputs).square().sum().backward()
    expected = [layer.weight.grad.clone() for layer in whole]
    whole.zero_grad()
    stages = [PipelineStage(whole[index], index, schedule.num_stages, torch.device("cpu")) for index in schedule.stages_of(rank)]
    for stage in stages:
        stage.stage_index_to_group_rank = dict(enumerate(schedule.stage_to_rank))
    runner = schedules._PipelineScheduleRuntime(
        stages, schedule.num_microbatches, loss_fn=lambda output, target: output.square().sum(), scale_grads=False
    )
    runner._load_csv(path, "compute_comms")
    first, last = (schedule.stage_to_rank[stage] == rank for stage in (0, -1))
    arguments = (inputs,) if first else ()
    runner.step(*arguments, target=torch.zeros_like(inputs) if last else None)
    for stage in stages:
        torch.testing.assert_close(whole[stage.stage_index].weight.grad, expected[stage.stage_index])
        print("same")
    dist.destroy_process_group()


if __name__ == "__main__":
    train_one_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
