"""A search cut into parts that any process can do: what is wanted, one part's work, its result as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from simpar.search.branch import Account, Branch, Glimpse, Node
from simpar.search.choice import Choice
from simpar.search.incumbents import Incumbents, Scored
from simpar.search.objective import OBJECTIVES, SIMPLE, Constraint, Measure
from simpar.search.pricing import Pricing
from simpar.search.space import Space
from simpar.simulate import interpret, prepare, run

GLIMPSES = 400
"""Designs of a part that are kept for pages."""


@dataclass(frozen=True)
class Wish:
    """What is wanted of a space.

    Attributes:
        objective: a name in OBJECTIVES.
        keep: layouts to return.
        constraints: limits.
        robust: rank by the upper end of the step time's 80 % interval (its 90th percentile).
        front: all layouts that no other beats in both time and memory.
        within: of a front: layouts this close, relatively, in both are not told apart.
        usd_per_gpu_hour, pue: for cost and energy.
    """

    objective: str = "step_time"
    keep: int = 10
    constraints: tuple[Constraint, ...] = ()
    robust: bool = False
    front: bool = False
    within: float = 0.01
    usd_per_gpu_hour: float = 2.0
    pue: float = 1.25

    @property
    def metric(self) -> str:
        """The metric that the objective ranks by."""
        return OBJECTIVES[self.objective]


@dataclass(frozen=True)
class PartResult:
    """What one part found.

    Attributes:
        part: its number.
        best: simulated layouts that were among its best.
        rejected, evaluated, kept: see `Account`.
        glimpses: the best of its designs, by their bounds.
    """

    part: int
    best: tuple[Scored, ...]
    rejected: dict[str, int]
    evaluated: dict[str, int]
    kept: int
    glimpses: tuple[Glimpse, ...] = ()

    def account(self) -> Account:
        """As an account."""
        found = Account(kept=self.kept)
        found.rejected.update(self.rejected)
        found.evaluated.update(self.evaluated)
        return found

    def to_json(self) -> dict[str, Any]:
        """The account as plain data."""
        return {"rejected": self.rejected, "evaluated": self.evaluated, "kept": self.kept}


def parts_of(branch: Branch, count: int) -> list[list[Node]]:
    """The nodes of a space in `count` parts; nodes that share prices stay together."""
    experts = branch.pricing.has_experts

    def family(node: Node) -> tuple[int, ...]:
        group, batch, _ = node
        return (group.tp, group.cp, batch) if experts else (group.tp, group.cp, group.pp, batch)

    families: dict[tuple[int, ...], list[Node]] = {}
    for node in branch.nodes():
        families.setdefault(family(node), []).append(node)
    # Neighbours cost alike: dealt out in turn, every part gets its share of the hard ones.
    ordered = [families[key] for key in sorted(families)]
    count = min(count, max(len(ordered), 1))
    return [[node for nodes in ordered[k::count] for node in nodes] for k in range(count)]


def measure_of(space: Space, wish: Wish, pricing: Pricing) -> Measure:
    """The metrics of a space's cluster."""
    flops = pricing.model_flops if space.groups else 0.0
    return Measure.of(space.template, flops, wish.usd_per_gpu_hour, wish.pue)


def examiner(space: Space, wish: Wish, measure: Measure) -> Callable[[Choice, float, float], float | None] | None:
    """How a simulated layout is valued where time and memory alone do not say; None where they do."""
    others = [c for c in wish.constraints if c.metric not in SIMPLE]
    simple = [c for c in wish.constraints if c.metric in SIMPLE]
    if not (others or simple or wish.robust):
        return None

    def examine(choice: Choice, time_s: float, device_bytes: float) -> float | None:
        if not all(c.holds(measure.metrics(time_s, device_bytes)) for c in simple):
            return None
        value = device_bytes + min(time_s, 1e6) * 1e-9 if wish.objective == "memory_headroom" else time_s
        if others or wish.robust:
            priced = prepare(choice.scenario(space.template), detail="stage")
            result = interpret(priced, run(priced, interference=True))
            found = result.to_json()
            found["exposed_communication_s"] = sum(result.exposed_communication_s.values())
            if not all(c.holds(found) for c in others):
                return None
            if wish.robust:
                value = result.step_interval.high
        return value

    return examine


def branch_for(
    space: Space, wish: Wish, pricing: Pricing | None = None, shared: Callable[[], float] = lambda: inf, **hooks: Any
) -> Branch:
    """A branch and bound that looks for what is wanted."""
    pricing = pricing or Pricing(space)
    measure = measure_of(space, wish, pricing)
    longest, headroom = measure.limits(wish.constraints)
    incumbents = Incumbents(
        wish.keep, largest_s=longest, by_memory=wish.objective == "memory_headroom", front=wish.front,
        within=wish.within if wish.front else 0.0, shared=shared,
    )  # fmt: skip
    examine = examiner(space, wish, measure)
    return Branch(space, pricing=pricing, incumbents=incumbents, examine=examine, least_headroom=headroom, **hooks)


_CACHE: dict[int, Pricing] = {}


def solve_part(
    space: Space, wish: Wish, part: int, nodes: Sequence[Node], known: Sequence[Scored] = (),
    shared: Callable[[], float] = lambda: inf, **hooks: Any,
) -> PartResult:
    """Search one part, knowing the best found elsewhere.

    The same part under the same knowledge gives the same result in any process; more knowledge only leaves out what cannot win.
    """
    key = hash((space.template.model_dump_json(), repr(sorted(space.restrictions.items())), space.framework))
    pricing = _CACHE.get(key)
    if pricing is None:
        _CACHE.clear()
        pricing = _CACHE[key] = Pricing(space)
    branch = branch_for(space, wish, pricing, shared, **hooks)
    for scored in known:
        branch.incumbents.add(scored)
    branch.run(nodes)
    account = branch.account
    glimpses = sorted(branch.glimpses.values(), key=lambda g: g.bound_s)[:GLIMPSES]
    return PartResult(
        part, tuple(branch.best), dict(account.rejected), dict(account.evaluated), account.kept, tuple(glimpses)
    )


def seed_space(space: Space) -> Space:
    """A small corner of a space in which good layouts usually lie: where a search finds its first value to beat."""
    wanted: dict[str, tuple[Any, ...]] = {
        "micro_batch_size": (1,), "overlap_tp": (True,), "overlap_ep": (True,), "overlap_grad_reduce": (True,),
        "overlap_param_gather": (True,), "shard_size": (None,), "split": ("even",), "cp_style": ("ring",),
        "ep_dispatcher": ("deepep",), "placement": ("tp-cp-ep-dp-pp",), "sequence_parallel": (True,),
        "schedule": ("1f1b", "interleaved"), "recompute": ("none", "full"), "cp": (1, 2),
        "offload_activations": (0.0,), "offload_optimizer": (False,), "virtual_stages": (1, 4, 8), "zero_stage": (1, 3),
        "overlap_p2p": (None,), "etp": (1, 8), "reshard_after_forward": (True, False), "ep": (1, 8, 32, 64),
    }  # fmt: skip
    restrictions = dict(space.restrictions)
    for axis, values in wanted.items():
        given = restrictions.get(axis)
        if given is None:
            restrictions[axis] = values
        elif found := tuple(v for v in given if v in values):
            restrictions[axis] = found
    return Space(space.template, restrictions, space.framework)


__all__ = ["PartResult", "Wish", "branch_for", "measure_of", "parts_of", "seed_space", "solve_part"]
