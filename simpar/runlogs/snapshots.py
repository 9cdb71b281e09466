"""Torch's memory snapshots: the peak of the allocator's trace, what was alive at it, and the predicted tensors beside it.

Fields: torch/cuda/memory.py (_dump_snapshot) and c10/cuda/CUDACachingAllocator.h: segments with blocks, and per device a trace of
alloc, free_requested, free_completed, segment_alloc, segment_free, oom. The trace is a ring, so what lived before it is in the
blocks alone: the moments are rebuilt backwards from the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError
from simpar.interop.inert_pickle import load_plain
from simpar.specs.scenario import Scenario

_EXPECTED: Final = "a file of torch.cuda.memory._dump_snapshot"
_ROUNDED: Final = 512
"""The allocator's unit of size (CUDACachingAllocator.cpp, kMinBlockSize)."""
_SHOWN: Final = 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's.

    Attributes:
        peak_bytes, reserved_bytes: allocated at the highest moment of the trace, and held from the device at its end.
        alive: (bytes, where it was asked for) -> count, of blocks alive at the peak.
        retries: times the allocator gave memory back to the device and asked again.
        out_of_memory: times it failed.
        complete: the trace reaches back to the first request, as far as it can be told.
    """

    file: str
    peak_bytes: int
    reserved_bytes: int
    alive: Counter[tuple[int, str]]
    retries: int
    out_of_memory: int
    complete: bool


@dataclass
class Snapshots:
    """All ranks' against the prediction."""

    peak_bytes: int
    ranks: list[Snapshot]
    tensors: list[dict[str, Any]] = field(default_factory=list)
    predicted_bytes: float = 0.0
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The public object."""
        worst = max(self.ranks, key=lambda s: s.peak_bytes)
        largest = sorted(worst.alive.items(), key=lambda item: -item[0][0] * item[1])[:_SHOWN]
        return {
            "ranks": [
                {"file": s.file, "peak_allocated_gib": round(s.peak_bytes / 2**30, 4),
                 "reserved_gib": round(s.reserved_bytes / 2**30, 4), "allocator_retries": s.retries,
                 "out_of_memory": s.out_of_memory}
                for s in self.ranks
            ],
            "predicted_allocated_gib": round(self.predicted_bytes / 2**30, 4),
            "tensors_at_peak": self.tensors[:_SHOWN],
            "alive_at_peak": [{"bytes": size, "count": n, "where": where} for (size, where), n in largest],
            "text": self.text(),
        }  # fmt: skip

    def text(self) -> list[str]:
        """Lines for people."""
        lines = [f"memory snapshot {self.peak_bytes / 2**30:.4g} GiB at the peak, predicted {self.predicted_bytes / 2**30:.4g} GiB"]
        for row in self.tensors[:8]:
            seen = f"{row['measured_count']} of that size alive" if row["measured_count"] else "none of that size alive"
            lines.append(f"  {row['tensor']}: {row['count']} x {row['each_bytes'] / 2**20:.4g} MiB predicted, {seen}")
        return lines


def read_snapshots(paths: Sequence[Path], scenario: Scenario) -> Snapshots:
    """Snapshots of the ranks of one run beside the prediction of its scenario.

    Raises:
        InputError: a file is no snapshot, or a pickle that wants to run something.
    """
    ranks = [_snapshot(path) for path in paths]
    found = Snapshots(max(s.peak_bytes for s in ranks), ranks)
    worst = max(ranks, key=lambda s: s.peak_bytes)
    if not worst.complete:
        found.notes.append(f"{worst.file}: the trace is a ring that lost its beginning: the peak is that of what it still holds")
    if worst.retries:
        found.notes.append(f"{worst.file}: the allocator gave memory back and asked again {worst.retries} times: near its limit")
    from simpar.step import simulate

    result = simulate(scenario)
    found.predicted_bytes = result.worst_rank.allocated_bytes
    sizes: Counter[int] = Counter()
    for (size, _), count in worst.alive.items():
        sizes[size] += count
    for row in result.tensors_at_peak():
        each = row["bytes"] / row["count"]
        alike = -(-int(each) // _ROUNDED) * _ROUNDED
        found.tensors.append({**row, "each_bytes": each, "measured_count": min(sizes.get(alike, 0), row["count"] * 4)})
    return found


def _snapshot(path: Path) -> Snapshot:
    value = load_plain(path, _EXPECTED)
    if not isinstance(value, Mapping) or not isinstance(value.get("segments"), list):
        raise InputError(f"{path}: holds no segments; expected {_EXPECTED}")
    traces = [t for t in value.get("device_traces") or [] if isinstance(t, list) and t]
    try:
        return _peak(str(path), value["segments"], max(traces, key=len, default=[]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: a segment or an event of the trace lacks what it needs ({error}); expected {_EXPECTED}"
        ) from None


def _peak(file: str, segments: list[Any], trace: list[Any]) -> Snapshot:
    blocks: dict[int, tuple[int, str]] = {}
    for segment in segments:
        at = int(segment["address"])
        for block in segment["blocks"]:
            size = int(block["size"])
            if block["state"] in ("active_allocated", "active_awaiting_free", "active_pending_free"):
                blocks[int(block.get("address", at))] = (size, _where(block))
            at += size
    # Backwards: an alloc was not there before it, what was freed was.
    now = peak = sum(size for size, _ in blocks.values())
    moment, complete = len(trace), True
    asked = {int(e["addr"]): _where(e) for e in trace if e["action"] == "alloc"}
    for index in range(len(trace) - 1, -1, -1):
        event = trace[index]
        action, size = event["action"], int(event.get("size") or 0)
        now += size if action == "free_completed" else -size if action == "alloc" else 0
        if now > peak:
            peak, moment = now, index
    complete = now <= 0.02 * peak or not trace
    alive = dict(blocks)
    for index in range(len(trace) - 1, moment - 1, -1):
        event = trace[index]
        address, size = int(event["addr"]), int(event.get("size") or 0)
        if event["action"] == "free_completed":
            alive[address] = (size, asked.get(address, _where(event)))
        elif event["action"] == "alloc":
            alive.pop(address, None)
    actions = [e["action"] for e in trace]
    retries = sum(a == "segment_free" and "segment_alloc" in actions[i : i + 64] for i, a in enumerate(actions))
    reserved = sum(int(s["total_size"]) for s in segments)
    return Snapshot(file, peak, reserved, Counter(alive.values()), retries, actions.count("oom"), complete)


def _where(entry: Mapping[str, Any]) -> str:
    """The innermost Python frame outside torch that asked for it; the first known one else."""
    frames = (
        entry.get("frames") or next((h.get("frames") for h in entry.get("history") or [] if isinstance(h, Mapping)), None) or []
    )
    named = [f for f in frames if isinstance(f, Mapping) and f.get("name")]
    own = next((f for f in named if str(f.get("filename", "")).endswith(".py") and "/torch/" not in str(f.get("filename"))), None)
    frame = own or next(iter(named), None)
    return f"{frame['name']} ({Path(str(frame.get('filename', ''))).name}:{frame.get('line', 0)})"[:120] if frame else ""
