"""Predicted and measured ops side by side: compute by its order between attention kernels, collectives by dimension and kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from simpar.live.intervals import union
from simpar.live.trace_partition import exposed
from simpar.live.trace_slices import COMPUTE, DIMENSIONS, Slice


@dataclass(frozen=True, slots=True)
class Pair:
    """Ops that stand for each other; `measured` may be several kernels in a row."""

    predicted: tuple[Slice, ...]
    measured: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op name in one phase over the step."""

    phase: str
    name: str
    kind: str
    count: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind in one dimension; seconds summed over the step."""

    dimension: str
    collective: str
    predicted_count: int
    measured_count: int
    predicted_s: float
    measured_s: float
    predicted_exposed_s: float
    measured_exposed_s: float
    predicted_bytes: float
    measured_bytes: float


@dataclass(frozen=True, slots=True)
class Late:
    """A collective that took much longer than the others of its kind did over their predictions."""

    dimension: str
    collective: str
    index: int
    name: str
    layer: int
    microbatch: int
    start_s: float
    predicted_s: float
    measured_s: float


Segment = tuple[tuple[Slice, ...], list[Slice]]
"""Attention kernels in a row, then the matmuls up to the next ones."""


def _segments(slices: Sequence[Slice]) -> list[Segment]:
    """Matmuls cut at attention; the first segment has no attention in front."""
    found: list[tuple[list[Slice], list[Slice]]] = [([], [])]
    for item in sorted((s for s in slices if s.kind in ("gemm", "attention")), key=lambda s: s.start_s):
        if item.kind == "gemm":
            found[-1][1].append(item)
        elif found[-1][1] or not found[-1][0]:
            # Attention after matmuls opens the next segment; the very first may open the first.
            if found[-1][1] or found[-1][0]:
                found.append(([], []))
            found[-1][0].append(item)
        else:
            found[-1][0].append(item)
    return [(tuple(head), rest) for head, rest in found]


def align_compute(predicted: Sequence[Slice], measured: Sequence[Slice]) -> tuple[list[Pair], str]:
    """Pairs of matmuls and attention, and what kept them from being paired one by one ("" where nothing did)."""
    first, second = _segments(predicted), _segments(measured)
    heads = [sum(bool(head) for head, _ in segments) for segments in (first, second)]
    if len(first) != len(second):
        return [], f"{heads[1]} attention passes in the trace, {heads[0]} predicted: compute is compared by class only"
    pairs, uneven = [], 0
    for (head_a, matmuls_a), (head_b, matmuls_b) in zip(first, second, strict=True):
        if head_a or head_b:
            pairs.append(Pair(head_a, head_b))
        if len(matmuls_a) == len(matmuls_b):
            pairs += [Pair((a,), (b,)) for a, b in zip(matmuls_a, matmuls_b, strict=True)]
        elif apart := _unpacked(matmuls_a, matmuls_b):
            pairs += apart
        elif matmuls_a or matmuls_b:
            uneven += 1
            pairs.append(Pair(tuple(matmuls_a), tuple(matmuls_b)))
    text = f"{uneven} of {len(first)} runs of matmuls differ in number: compared as sums" if uneven else ""
    return pairs, text


PACKED = (("/qkv", 3), ("/fc1", 2))
"""End of the name of a product that frameworks also run as so many: queries, keys and values; gate and up."""


def _unpacked(predicted: Sequence[Slice], measured: Sequence[Slice]) -> list[Pair]:
    """Pairs where the trace runs packed products one by one: a predicted product (its two gradients together) for several.

    Empty where no choice of products that are packed makes the numbers equal.
    """
    units: list[list[Slice]] = []
    for item in predicted:
        same = units and item.name.partition(".")[0] == units[-1][0].name.partition(".")[0] and item.phase == units[-1][0].phase
        units[-1].append(item) if same else units.append([item])
    for packed in (PACKED, PACKED[:1], PACKED[1:]):
        counts = [len(unit) * _parts(unit[0].name, packed) for unit in units]
        if sum(counts) != len(measured):
            continue
        found, at = [], 0
        for unit, count in zip(units, counts, strict=True):
            mine = measured[at : at + count]
            each = count == len(unit)
            found += [Pair((a,), (b,)) for a, b in zip(unit, mine, strict=True)] if each else [Pair(tuple(unit), tuple(mine))]
            at += count
        return found
    return []


def _parts(name: str, packed: Sequence[tuple[str, int]]) -> int:
    return next((count for end, count in packed if name.partition(".")[0].endswith(end)), 1)


def op_rows(pairs: Sequence[Pair]) -> list[OpRow]:
    """Pairs of the same phase and name added up, the largest difference first."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for pair in pairs:
        if not pair.predicted:
            continue
        first = pair.predicted[0]
        names = dict.fromkeys(s.name.partition(".step")[0] for s in pair.predicted)
        name = first.name if len(names) == 1 else f"{first.name} ... {pair.predicted[-1].name}"
        row = sums[first.phase, name, first.kind]
        row[0] += 1
        row[1] += sum(s.seconds for s in pair.predicted)
        row[2] += sum(s.seconds for s in pair.measured)
    rows = [OpRow(phase, name, kind, int(n), a, b) for (phase, name, kind), (n, a, b) in sums.items()]
    return sorted(rows, key=lambda r: -abs(r.measured_s - r.predicted_s))


def _calls(slices: Sequence[Slice]) -> dict[tuple[str, str], list[Slice]]:
    found: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    for item in sorted(slices, key=lambda s: s.start_s):
        if item.kind in DIMENSIONS:
            found[item.kind, item.collective].append(item)
    return found


def collective_rows(predicted: Sequence[Slice], measured: Sequence[Slice]) -> list[CollectiveRow]:
    """Every dimension and kind that either side has."""
    first, second = _calls(predicted), _calls(measured)
    busy = [union((s.start_s, s.end_s) for s in slices if s.kind in COMPUTE) for slices in (predicted, measured)]
    rows = []
    for key in sorted({*first, *second}, key=lambda k: (DIMENSIONS.index(k[0]), k[1])):
        a, b = first.get(key, []), second.get(key, [])
        rows.append(CollectiveRow(
            *key, len(a), len(b), sum(s.seconds for s in a), sum(s.seconds for s in b),
            sum(exposed(s, busy[0]) for s in a), sum(exposed(s, busy[1]) for s in b),
            sum(s.bytes for s in a), sum(s.bytes for s in b),
        ))  # fmt: skip
    return rows


def late_collectives(predicted: Sequence[Slice], measured: Sequence[Slice], at_most: int = 8) -> list[Late]:
    """Collectives paired by order whose excess stands out from the others of their kind, the latest first.

    Stands out: more than half its prediction and 20 us above the median excess, and six median deviations.
    """
    first, second = _calls(predicted), _calls(measured)
    found = []
    for key in first.keys() & second.keys():
        if len(first[key]) != len(second[key]) or key[0] == "pp":
            continue
        over = [b.seconds - a.seconds for a, b in zip(first[key], second[key], strict=True)]
        usual = median(over)
        spread = median(abs(o - usual) for o in over)
        for index, (a, b, excess) in enumerate(zip(first[key], second[key], over, strict=True)):
            if excess - usual > max(0.5 * a.seconds, 6.0 * spread, 20e-6):
                found.append(Late(*key, index, a.name, a.layer, a.microbatch, b.start_s, a.seconds, b.seconds))
    return sorted(found, key=lambda late: late.predicted_s - late.measured_s)[:at_most]
