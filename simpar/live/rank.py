"""`simpar validate rank`: one rank of a layout, run by torch under its fake process group, against simpar's prediction.

A rank alone has no partners: its collectives take no time. What is compared is therefore its memory, the work it does (FLOPs,
bytes on the wire) and, on a GPU, the time of its own kernels and launches.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError
from simpar.live.rank_plan import FORMAT, RankPlan
from simpar.live.rank_shapes import counted, ops_of, unpacked_s
from simpar.live.trace_slices import predicted_slices
from simpar.parallel.traffic import calls_in, calls_of
from simpar.parallel.work import AttentionWork, Gemm, GroupedGemm
from simpar.result.interpret import Priced, interpret
from simpar.specs.calibration import uncalibrated
from simpar.specs.scenario import make_scenario
from simpar.statistics import Comparison, summarize
from simpar.step import prepare, run

TOLERANCE: Final = {
    "parameters": 1e-6, "state_bytes": 1e-6, "saved_bytes": 0.01, "flops": 1e-6, "wire_bytes": 1e-6, "allocated_bytes": 0.02,
    "reserved_bytes": 0.05, "step_time_s": 0.05, "published_time_s": math.inf, "class_time_s": math.inf,
    "block_time_s": 0.1,
}  # fmt: skip
"""Metric -> largest |predicted / measured - 1|; the times of kernel classes, and the step with what published clusters add, are
shown, the sum of the classes is judged."""
CLASSES: Final = ("gemm", "attention", "norm", "loss", "permute", "memory_bound", "optimizer")
"""Kernel classes that are compared."""
ATTENTION: Final = {"flash": "fa2", "cudnn": "cudnn", "math": "unfused"}
"""Backend of scaled_dot_product_attention -> the kernel that prices it; others are priced as the framework's."""
SMALL_CALLS: Final = 1e-4
"""Share of a rank's bytes on the wire below which a difference counts as none: under sequence parallelism torch sums the
gradient of every norm's weight (a few KiB) over the tensor ranks, which simpar leaves out."""
Wire = dict[tuple[str, int], float]
"""(collective, ranks) -> bytes per step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, predicted and measured."""

    layout: str
    metric: str
    part: str
    predicted: float | None
    measured: float | None
    slack: float = 0.0
    """Absolute difference that counts as none."""

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; none where one of them is missing."""
        if self.predicted is None or self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else math.inf
        return self.predicted / self.measured - 1.0

    @property
    def within(self) -> bool:
        """Inside the tolerance of its metric, or not comparable."""
        if self.error is None or self.predicted is None or self.measured is None:
            return True
        return abs(self.error) <= TOLERANCE[self.metric] or abs(self.predicted - self.measured) <= self.slack

    def to_json(self) -> dict[str, Any]:
        """The public row."""
        error = self.error
        return {
            "id": f"{self.layout}:{self.metric}:{self.part}" if self.part else f"{self.layout}:{self.metric}",
            "metric": self.metric, "measured": self.measured, "predicted": self.predicted, "low": None, "high": None,
            "error": None if error is None or math.isinf(error) else error, "within": self.within,
            "group": {"layout": self.layout, "part": self.part},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Predicted:
    """simpar's figures of a rank.

    Attributes:
        parameters: elements at rest; `state_bytes` with the optimizer's moments.
        saved: block name -> bytes kept from forward to backward.
        flops: gemm, attention, per step; the whole score matrix counted.
        wire: bytes on the wire.
        allocated_bytes, reserved_bytes: peaks.
        workspace_bytes: of the former, what cuBLAS takes: nothing of a run on fake tensors.
        seconds: class (CLASSES, launch) -> seconds of the rank's own kernels and launches, without any constant that was
            fitted on published runs.
        published_s: their sum with those constants: what published clusters add to a rank alone.
    """

    parameters: float
    state_bytes: float
    saved: dict[str, float]
    flops: dict[str, float]
    wire: Wire
    allocated_bytes: float
    reserved_bytes: float
    workspace_bytes: float
    seconds: dict[str, float]
    published_s: float


def predict(plan: RankPlan) -> Predicted:
    """What simpar says of the rank."""
    published = sum(class_seconds(prepare(plan.scenario, detail="op"), plan.pipeline_rank).values())
    with uncalibrated():
        return _predict(plan, published)


def class_seconds(priced: Priced, role: int) -> dict[str, float]:
    """Class (CLASSES, launch) -> seconds of the role's own kernels and launches, products one by one as torch runs them."""
    result = interpret(priced, run(priced, "longest_path"))
    seconds: dict[str, float] = defaultdict(float)
    for item in predicted_slices(priced, result, role):
        if item.lane == "compute" and item.kind in ("gemm", "attention", "memory_bound", "optimizer", "launch"):
            seconds[_class(item.kind, item.name)] += item.seconds
    seconds["gemm"] += unpacked_s(priced, role)
    return dict(seconds)


def _predict(plan: RankPlan, published_s: float) -> Predicted:
    priced = prepare(plan.scenario, detail="op")
    result = interpret(priced, run(priced, "longest_path"))
    layout, role = priced.layout, plan.pipeline_rank
    held = priced.held[role]
    whole, whole_experts = layout.held_parameters(held)
    dense, experts = whole / layout.shard_ranks, whole_experts / layout.expert_shard_ranks
    state = layout.state_bytes
    memory = next(m for m in result.memory if m.rank == role)
    layers = [b for s in held for b in layout.stage_blocks[s] if not b.outside_layers and b.name != "mtp_layer"]
    saved = {"moe_layer" if b.expert_parameters else "layer": b.saved_bytes for b in layers}
    return Predicted(
        dense + experts, (dense + experts) * (state.parameter + state.master + state.moments), saved, _flops(priced, role),
        _wire(priced, role), memory.allocated_bytes, memory.reserved_bytes, dict(memory.static).get("workspaces", 0.0),
        class_seconds(priced, role), published_s,
    )  # fmt: skip


def _class(kind: str, name: str) -> str:
    """Kind of an op, with norms, the loss and permutes apart from other memory-bound ones."""
    if kind != "memory_bound":
        return kind
    return next((part for part in ("norm", "loss", "permute") if part in name), kind)


def _flops(priced: Priced, role: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, count in counted(priced, role):
        for op, _, _ in ops_of(priced, key):
            work = op.work
            if isinstance(work, Gemm):
                found["gemm"] += count * 2.0 * work.m * work.n * work.k
            elif isinstance(work, GroupedGemm):
                found["gemm"] += count * 2.0 * work.tokens * work.n * work.k
            elif isinstance(work, AttentionWork):
                scores = work.batch * work.heads * work.sequence_q * work.sequence_kv
                found["attention"] += count * 2.0 * scores * (work.head_dim + work.v_head_dim) * (2 if work.backward else 1)
    return dict(found)


def _wire(priced: Priced, role: int) -> Wire:
    layout = priced.layout
    found: Wire = defaultdict(float)
    for key, count in counted(priced, role):
        for call in calls_of(layout, key) or [call for op, _, _ in ops_of(priced, key) for call in calls_in(op)]:
            found[call.name, layout.placement(call.dimension).size] += count * call.bytes * call.repeat
    return {k: v for k, v in found.items() if v}


def read_measured(path: Path) -> dict[str, Any]:
    """What the worker wrote.

    Raises:
        InputError: missing, damaged, or of another format.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        right = f"write it with: python -m simpar.live.rank_worker --plan P --out {path}"
        raise InputError(f"{path}: no such file; {right}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a measurement of rank_worker: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("plan"), dict):
        raise InputError(f"{path}: not a measurement of format {FORMAT}; measure again with this simpar")
    return found


def plan_of(measured: dict[str, Any], hardware: str | None = None) -> RankPlan:
    """The plan that was measured.

    Args:
        hardware: profile to predict with instead of the scenario's (of the machine that measured).
    """
    table = measured["plan"]
    raw = dict(table["scenario"])
    if hardware is not None:
        raw["cluster"] = {**raw["cluster"], "hardware": hardware}
    notes = list(table["notes"])
    if kernel := ATTENTION.get(str(measured.get("sdpa_backend", ""))):
        raw["training"] = {**raw["training"], "attention_kernel": kernel}
        notes.append(f"scaled_dot_product_attention ran {measured['sdpa_backend']}, priced as {kernel}")
    return RankPlan(make_scenario(raw), int(table["rank"]), table, tuple(notes))


Classify = Callable[[str], str]
"""Name of a kernel -> its class."""


def compare(plan: RankPlan, measured: dict[str, Any], classify: Classify, frozen: Predicted | None = None) -> list[Row]:
    """Rows of one rank.

    Args:
        frozen: what was predicted before it was measured; none = predict now.
    """
    expected, name, states = frozen or predict(plan), plan.scenario.name, measured["states"]
    rows = [Row(name, "parameters", "", expected.parameters, states["parameters"]),
            Row(name, "state_bytes", "", expected.state_bytes, states["state_bytes"])]  # fmt: skip
    rows += [Row(name, "saved_bytes", b["name"], expected.saved.get(b["name"]), b["saved_bytes"]) for b in measured["blocks"]]
    if measured["flops"]:
        kinds = sorted({*expected.flops, *(k for k, v in measured["flops"].items() if v)})
        rows += [Row(name, "flops", k, expected.flops.get(k, 0.0), measured["flops"].get(k, 0)) for k in kinds]
    rows += _wire_rows(name, expected.wire, measured["wire"], states["padding"]) if measured["mode"] == "fake" else []
    without = expected.workspace_bytes if measured["mode"] == "fake" else 0.0
    rows += [Row(name, "allocated_bytes", "", expected.allocated_bytes - without, measured["allocated_bytes"])]
    if measured["reserved_bytes"] is not None:
        rows.append(Row(name, "reserved_bytes", "", expected.reserved_bytes, measured["reserved_bytes"]))
    if measured["step_s"]:
        own_s = measured["step_median_s"] - measured.get("copies_exposed_s", 0.0)
        rows.append(Row(name, "step_time_s", "", sum(expected.seconds.values()), own_s))
        rows.append(Row(name, "published_time_s", "", expected.published_s, own_s))
        rows += _class_rows(name, expected.seconds, measured["kernels"], classify)
    return rows


def published_note(rows: Sequence[Row]) -> list[str]:
    """What constants of published runs would add to a rank's step, and what its measurement says of them; empty without a time."""
    found = {row.metric: row for row in rows}
    if "step_time_s" not in found:
        return []
    own, published = found["step_time_s"], found["published_time_s"]
    if not own.predicted or not own.measured or published.predicted is None:
        return []
    added, needed = published.predicted / own.predicted - 1.0, own.measured / own.predicted - 1.0
    return [f"what published clusters add: {100 * added:+.1f} % of the step, not used; measured here: {100 * needed:+.1f} %"]


def _wire_rows(name: str, expected: Wire, wire: Sequence[dict[str, Any]], padding: float) -> list[Row]:
    found: Wire = defaultdict(float)
    for call in wire:
        # A receive is the other end of a neighbour's send.
        if call["collective"] != "receive" and call["ranks"] != 1:
            found[call["collective"], call["ranks"]] += call["bytes"]
    # Uneven shards travel padded to even ones.
    slack = (SMALL_CALLS + padding) * sum(found.values())
    return [
        Row(name, "wire_bytes", f"{kind} over {ranks}", expected.get((kind, ranks), 0.0), found.get((kind, ranks), 0.0), slack)
        for kind, ranks in sorted({*expected, *found})
    ]


def _class_rows(name: str, seconds: dict[str, float], kernels: Sequence[dict[str, Any]], classify: Classify) -> list[Row]:
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        found[classify(kernel["name"])] += kernel["seconds"]
    kinds = [k for k in CLASSES if k in seconds or k in found]
    return [Row(name, "class_time_s", k, seconds.get(k, 0.0), found.get(k, 0.0)) for k in kinds]


def to_json(rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """Rows, and one group of errors per metric."""
    groups = []
    for metric in dict.fromkeys(r.metric for r in rows):
        mine = [r for r in rows if r.metric == metric]
        found = summarize(Comparison(r.metric, metric, r.measured, r.predicted) for r in mine if r.measured)
        limit = TOLERANCE[metric] if math.isfinite(TOLERANCE[metric]) else None
        groups.append({"metric": metric, "within": sum(r.within for r in mine), "tolerance": limit, **asdict(found)})
    return {"rows": [row.to_json() for row in rows], "groups": groups, "notes": list(notes)}
