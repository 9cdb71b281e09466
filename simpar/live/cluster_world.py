"""All ranks of a launch: their groups, and what the steps of a layout took, sent and kept in memory."""

from __future__ import annotations

import datetime
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from simpar.host import busy_s
from simpar.live.autograd_collectives import Group
from simpar.live.cluster_layouts import RunLayout
from simpar.live.cluster_measure import Recorder, probe_s, profiled
from simpar.live.cluster_steps import Step
from simpar.live.device import Device

Fault = Callable[[str], None]


class World:
    """All ranks of the launch.

    Args:
        config: model, training, steps, warmup, device, timeout_s, ...
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        cuda = config["device"] == "cuda"
        if cuda:
            if not dist.is_nccl_available():
                raise RuntimeError("this torch has no NCCL")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.timeout = datetime.timedelta(seconds=config["timeout_s"])
        where = {"device_id": torch.device("cuda", torch.cuda.current_device())} if cuda else {}
        dist.init_process_group("nccl" if cuda else "gloo", timeout=self.timeout, **where)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._groups: dict[tuple[int, ...], Any] = {}

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def from_first(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_of(self, value: Any) -> list[Any]:
        """Every rank's value."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def group(self, groups: Any) -> Group:
        """This rank's one of `groups`, which every rank names in the same order; a group of its own where it is in none."""
        own = Group((self.rank,), self.rank, None)
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout)
            if self.rank in ranks:
                own = Group(ranks, self.rank, self._groups.get(ranks))
        return own

    def alone(self) -> Any:
        """A process group of this rank only."""
        for rank in range(self.size):
            if (rank,) not in self._groups:
                self._groups[rank,] = dist.new_group([rank], timeout=self.timeout)
        return self._groups[self.rank,]

    def barrier(self) -> None:
        """All ranks, device idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def reference(self, layout: RunLayout) -> dict[str, Any]:
        """A layout of one rank on all ranks at once, each for itself, without any communication: mean seconds.

        On a CPU the processor's time of the rank, which others that use its core do not lengthen.
        """
        step = Step(self, layout)
        seconds = []
        for index in range(self.config["warmup"] + self.config["steps"]):
            self.barrier()
            begin, used = time.perf_counter(), time.process_time()
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if index >= self.config["warmup"]:
                alone = self.device.type == "cpu"
                seconds.append(time.process_time() - used if alone else time.perf_counter() - begin)
        return self._referred(layout, seconds)

    def split(self, layout: RunLayout) -> dict[str, Any]:
        """What a backward in two parts takes beyond a whole one, seconds a layer: all layers of the model as a stage between
        others, both kinds in turn."""
        step = Step(self, layout)
        stage, x = step.modules[0], step.inputs[: step.micro]
        if stage.embedding is not None:
            x = stage.embedding(x).detach()
        stage.embedding = stage.head = None
        gradient = torch.randn_like(stage(x))
        seconds = []
        for index in range(self.config["warmup"] + self.config["steps"]):
            self.barrier()
            more = sum(_backward_s(stage, x, gradient, split=True) - _backward_s(stage, x, gradient, split=False)
                       for _ in range(step.microbatches))  # fmt: skip
            if index >= self.config["warmup"]:
                seconds.append(more / (step.microbatches * len(stage.layers)))
        return self._referred(layout, seconds)

    def _referred(self, layout: RunLayout, seconds: list[float]) -> dict[str, Any]:
        means = [statistics.fmean(times) for times in zip(*self.all_of(seconds), strict=True)]
        return {"kind": "reference", "layout": layout.as_json(), "world_size": self.size, "seconds": means}

    def measure(self, layout: RunLayout, fault: Fault, *, instrument: bool = True) -> dict[str, Any]:
        """Build `layout`, run its steps, and say what they took; with `instrument` also what it sent and kept in memory."""
        if layout.world_size == 1 and self.size > 1:
            return self.split(layout) if layout.split else self.reference(layout)
        if self.device.type == "cuda":
            # What an earlier layout left is no part of this one's peaks.
            gc.collect()
            torch.cuda.empty_cache()
        step = Step(self, layout)
        config = self.config
        losses = [step() for _ in range(config["warmup"])]
        seconds, busy, cpu, probes = [], [], [], [probe_s(self.device)]
        host: list[float] = []
        if step.busy:
            step.busy.take()
        step.pipeline.take()
        for index in range(config["steps"]):
            fault(f"step {index}")
            self.barrier()
            begin, used, all_busy = time.perf_counter(), time.process_time(), busy_s()
            losses.append(step())
            host.append(time.perf_counter() - begin)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
            cpu.append((time.process_time() - used, busy_s() - all_busy))
            # Read only now: nothing inside a step waits for the device.
            pipeline = step.pipeline.take()
            busy.append((step.busy.take() if step.busy else pipeline, pipeline))
        probes.append(probe_s(self.device))
        known = [None if v is None else float(v) for v in losses]
        record = {
            "kind": "run", "layout": layout.as_json(), "world_size": self.size, "seconds": self.longest(seconds),
            "losses": self.losses(known), **self.idle(busy), "foreign": self.foreign(cpu, seconds),
            "precision": config.get("precision", "fp32"), "host_s": self.longest(host),
            "versions": Device(self.device.type).versions(),
            "cpu_s": self.all_of(statistics.median(c for c, _ in cpu)), "probe_s": self.all_of(statistics.fmean(probes)),
        }  # fmt: skip
        return record | self.instrumented(step) if instrument else record

    def foreign(self, cpu: list[tuple[float, float]], seconds: list[float]) -> list[float]:
        """Cores that processes other than the ranks kept busy in each step, seen from one host; 0 on GPUs."""
        own = [sum(times) for times in zip(*self.all_of([c for c, _ in cpu]), strict=True)]
        if self.device.type == "cuda":
            return [0.0] * len(seconds)
        return [max(busy - o, 0.0) / s for (_, busy), o, s in zip(cpu, own, seconds, strict=True)]

    def longest(self, seconds: list[float]) -> list[float]:
        """Each of `seconds`, the slowest rank's."""
        return [max(times) for times in zip(*self.all_of(seconds), strict=True)]

    def losses(self, own: list[float | None]) -> list[float]:
        """The whole batch's loss of each step: the mean over the ranks that have one."""
        found = [[v for v in values if v is not None] for values in zip(*self.all_of(own), strict=True)]
        return [sum(values) / len(values) for values in found]

    def idle(self, busy: list[tuple[float, float]]) -> dict[str, Any]:
        """Share of the pipeline phase, the longest rank's, that each rank did not compute, in every step."""
        every = self.all_of(busy)
        phases = [max(rank[i][1] for rank in every) for i in range(len(busy))]
        idle = [[1.0 - rank[i][0] / max(phases[i], 1e-9) for i in range(len(busy))] for rank in every]
        return {"idle": idle, "pipeline_s": statistics.median(phases)}

    def instrumented(self, step: Step) -> dict[str, Any]:
        """Three further steps, not timed: collectives with their bytes and the memory, and collectives' seconds."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            stats = Device("cuda").memory()
            memory = {"allocated": stats.pop("allocated_bytes"), "reserved": stats.pop("reserved_bytes"), **stats}
        recorder = Recorder()
        recorder.follow(step.tensors())
        self.barrier()
        with recorder:
            step()
        if not cuda:
            memory = {"allocated": recorder.peak}
        counted: dict[str, list[Any]] = {}
        for name, amount, ranks in recorder.collectives:
            entry = counted.setdefault(f"{name}/{len(ranks)}", [0, 0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + amount
        self.barrier()
        with profiled() as spent:
            step()
        return {"memory": self.all_of(memory), "collectives": self.all_of(counted), "collective_s": self.all_of(dict(spent))}


def _backward_s(stage: Any, x: Any, gradient: Any, *, split: bool) -> float:
    """Seconds of a stage's backward, by torch's pipelining; on a CPU the processor's time of this rank."""
    clock = time.perf_counter if x.device.type == "cuda" else time.process_time
    x = x.clone().requires_grad_()
    out = stage(x)
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    begin = clock()
    if split:
        _, groups = stage_backward_input([out], [gradient], [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        stage_backward(out, gradient, (x,))
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin
