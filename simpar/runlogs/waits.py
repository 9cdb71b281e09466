"""Who waits for whom: collectives of several ranks laid beside each other.

A collective ends on all its ranks at about the same moment, so the rank whose kernel is shortest came last and the others waited
for it by as much as theirs is longer. No clocks of different hosts are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from simpar.runlogs.rank_trace import Call, RankTrace

_LEAST_S: Final = 100e-6
_LEAST_SHARE: Final = 0.01
"""A wait below both this and this share of the step names nobody."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits within the steps that all ranks traced.

    Attributes:
        pairs: (waiting, late) -> seconds per step.
        first_late: rank -> steps in which it was the first to keep others waiting.
        matched: collectives laid beside each other.
    """

    pairs: dict[tuple[int, int], float]
    first_late: dict[int, int]
    matched: int

    def as_json(self, most: int = 20) -> dict[str, Any]:
        """The public object; the longest waits first."""
        longest = sorted(self.pairs.items(), key=lambda item: -item[1])[:most]
        return {
            "matched_collectives": self.matched,
            "waits": [{"waiting": a, "late": b, "seconds_per_step": t} for (a, b), t in longest],
            "late_first": {str(rank): n for rank, n in sorted(self.first_late.items(), key=lambda item: -item[1])},
        }


def waits_of(ranks: Sequence[RankTrace], steps: Sequence[int]) -> Waits:
    """Waits between `ranks` within `steps`."""
    calls: dict[tuple[int, str, str, int], dict[int, Call]] = defaultdict(dict)
    for trace in ranks:
        seen: Counter[tuple[int, str, str]] = Counter()
        for call in trace.calls:
            if call.step in steps:
                key = (call.step, call.group, call.name)
                calls[(*key, seen[key])][trace.rank or 0] = call
                seen[key] += 1
    pairs: dict[tuple[int, int], float] = defaultdict(float)
    first: dict[int, tuple[float, int]] = {}
    length = {s.number: s.length_s for s in ranks[0].steps}
    matched = 0
    for (step, _, _, _), mine in calls.items():
        if len(mine) < 2:
            continue
        matched += 1
        durations = {rank: call.end_s - call.start_s for rank, call in mine.items()}
        late = min(durations, key=lambda rank: durations[rank])
        for rank, seconds in durations.items():
            if rank != late:
                pairs[rank, late] += (seconds - durations[late]) / len(steps)
        worst = max(durations.values()) - durations[late]
        if worst > max(_LEAST_S, _LEAST_SHARE * length.get(step, 0.0)):
            order = min(call.start_s for call in mine.values())
            if step not in first or order < first[step][0]:
                first[step] = (order, late)
    return Waits(dict(pairs), dict(Counter(rank for _, rank in first.values())), matched)
