"""Ranks as coordinates of parallel dimensions, and the groups along each, dense and expert (parallel folding).

Dense layers see tp x cp x dp x pp, expert layers etp x ep x edp x pp with edp = world / (etp * ep * pp): two readings
of the same ranks that agree on pp. Both follow one order of the dimensions, fastest first, as in
Megatron-LM's `RankGenerator` (megatron/core/parallel_state.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from simpar.errors import InputError, Violation
from simpar.specs.hardware import HardwareProfile
from simpar.specs.plan import PlanSpec
from simpar.topology.lattice import Axes, Axis, IntArray, base_of, complement, count, merged, points, split
from simpar.topology.levels import check_capacity, levels
from simpar.topology.place import Kinds, place_groups, place_neighbours, place_pairs
from simpar.topology.placement import GroupPlacement

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
ORDER = ("tp", "cp", "ep", "dp", "pp")
SHARDED = ("shard", "replica", "expert_shard", "expert_replica")
"""HSDP: ranks that share one copy of the parameters, and ranks that hold the same piece of different copies."""


@lru_cache(maxsize=1024)
def parse_placement(text: str) -> tuple[str, ...]:
    """The order of dimensions in `text` ("tp-cp-ep-dp-pp"), fastest first; dimensions left out have degree 1.

    Raises:
        InputError: a name that is no dimension, or one named twice.
    """
    names = tuple(text.split("-"))
    right = f"join any of {', '.join(ORDER)} with '-', each once, fastest first"
    found = [Violation("plan.placement", text, f"{n!r} is no dimension", right) for n in names if n not in ORDER]
    found += [Violation("plan.placement", text, f"{n} is named twice", right) for n in ORDER if names.count(n) > 1]
    if found:
        raise InputError(found)
    return names


def _strides(names: Sequence[str], degrees: dict[str, int]) -> dict[str, Axis]:
    """Axes of the mixed-radix number whose digits are `names`, fastest first."""
    axes, stride = {}, 1
    for name in names:
        axes[name] = Axis(degrees[name], stride)
        stride *= degrees[name]
    return axes


def _full_order(order: tuple[str, ...]) -> tuple[str, ...]:
    """`order` with the dimensions it leaves out (degree 1): inside pp where pp is outermost, else outermost."""
    missing = tuple(n for n in ORDER if n not in order)
    return (*order[:-1], *missing, "pp") if order[-1] == "pp" else (*order, *missing)


@dataclass(frozen=True)
class Mesh:
    """tp * cp * dp * pp ranks.

    Attributes:
        tp, cp, dp, pp, ep: degrees; experts live inside tp * cp * dp.
        etp: tensor parallel inside an expert; none = tp when ep = 1, else 1.
        order: the dimensions over consecutive ranks, fastest first (`PlanSpec.placement`).

    Raises:
        InputError: a degree below 1, experts that do not divide, an order that leaves a dimension out or for which the
            dense and the expert reading disagree about the pipeline ranks.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        order = parse_placement(self.order)
        degrees = {name: getattr(self, name) for name in (*ORDER, "etp")}
        found = [
            Violation(f"plan.{name}", value, "must be at least 1")
            for name, value in degrees.items()
            if value is not None and value < 1
        ]
        found += [
            Violation("plan.placement", self.order, f"leaves out {name}, whose degree is {degrees[name]}")
            for name in ORDER
            if name not in order and degrees[name] > 1
        ]
        inside, experts = self.tp * self.cp * self.dp, self.expert_tp * self.ep
        if not found and inside % experts:
            rule = f"etp * ep = {self.expert_tp} * {self.ep} must divide tp * cp * dp = {inside}"
            found.append(Violation("plan.ep", self.ep, rule))
        if not found and self.pp > 1 and len({self._dense["pp"].stride, self._expert["pp"].stride}) > 1:
            rule = "dense and expert layers would disagree about the pipeline ranks"
            found.append(Violation("plan.placement", self.order, rule, "put pp last, or choose etp * ep = tp * cp"))
        if found:
            raise InputError(found)

    @classmethod
    def of(cls, plan: PlanSpec, world_size: int) -> Mesh:
        """The mesh of `plan` on `world_size` ranks; dp is what is left where the plan leaves it out.

        Raises:
            InputError: the degrees do not multiply to the world size, or `Mesh` refuses them.
        """
        model = plan.tp * plan.cp * plan.pp
        dp = plan.dp or max(1, world_size // model)
        if model * dp != world_size:
            rule = f"must equal tp * cp * pp * dp = {plan.tp} * {plan.cp} * {plan.pp} * {dp} = {model * dp}"
            raise InputError([Violation("world size", world_size, rule, f"use a multiple of tp * cp * pp = {model}")])
        return cls(plan.tp, plan.cp, dp, plan.pp, plan.ep, plan.etp, plan.placement)

    @cached_property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel degree inside an expert."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def edp(self) -> int:
        """Data parallel degree of the experts."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    @cached_property
    def _dense(self) -> dict[str, Axis]:
        degrees = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return _strides([n for n in _full_order(parse_placement(self.order)) if n != "ep"], degrees)

    @cached_property
    def _expert(self) -> dict[str, Axis]:
        """Axes of the expert reading; without experts to place it is the dense one, and edp is dp and cp together."""
        if self.ep == 1 and self.expert_tp == self.tp:
            return {"etp": self._dense["tp"], "ep": Axis(1, 1), "pp": self._dense["pp"]}
        degrees = {"etp": self.expert_tp, "ep": self.ep, "edp": self.edp, "pp": self.pp}
        names = {"tp": "etp", "dp": "edp"}
        return _strides([names.get(n, n) for n in _full_order(parse_placement(self.order)) if n != "cp"], degrees)

    @cached_property
    def _cache(self) -> dict[tuple[str, int | None], Axes]:
        return {}

    def axes(self, dim: str, shard_size: int | None = None) -> Axes:
        """The lattice of a group of `dim`, fastest axis first.

        Args:
            dim: tp, cp, dp, pp, etp, ep, edp, any of these joined by "_" within one reading (dp_cp, tp_cp, etp_ep),
                "world", or an HSDP split of dp_cp or edp: shard, replica, expert_shard, expert_replica.
            shard_size: ranks of dp * cp that share one copy; none = all.

        Raises:
            InputError: an unknown dimension, or a shard size that does not divide.
        """
        key = (dim, shard_size if dim in SHARDED else None)
        if key not in self._cache:
            self._cache[key] = self._sharded(*key) if dim in SHARDED else self._joined(dim)
        return self._cache[key]

    def _joined(self, dim: str) -> Axes:
        names = DENSE if dim == "world" else tuple(dim.split("_"))
        if set(names) <= set(DENSE):
            found = [self._dense[n] for n in names]
        elif set(names) <= set(EXPERT):
            both = (self._dense["cp"], self._dense["dp"])
            found = [a for n in names for a in ((self._expert[n],) if n in self._expert else both)]
        else:
            known = ", ".join(dict.fromkeys((*DENSE, *EXPERT, *SHARDED)))
            raise InputError(f"unknown parallel dimension {dim!r}. Known: {known}, and joins such as dp_cp or etp_ep")
        return tuple(sorted({a for a in found if a.size > 1}, key=lambda a: a.stride))

    def _sharded(self, dim: str, shard_size: int | None) -> Axes:
        whole = self.axes("edp" if dim.startswith("expert") else "dp_cp")
        ranks = self.dp * self.cp
        replicas = ranks // (shard_size or ranks)
        fits = replicas > 0 and replicas * (shard_size or ranks) == ranks and count(whole) % replicas == 0
        cut = split(whole, count(whole) // replicas) if fits else None
        if cut is None:
            rule = f"must divide dp * cp = {ranks} and, with expert parallelism, leave whole copies of edp = {self.edp}"
            raise InputError([Violation("plan.shard_size", shard_size, rule)])
        return cut[1] if dim.endswith("replica") else cut[0]

    def size(self, dim: str, shard_size: int | None = None) -> int:
        """Ranks in a group of `dim`."""
        return count(self.axes(dim, shard_size))

    def coordinates(self, rank: int) -> dict[str, int]:
        """tp, cp, dp, pp of `rank` and its etp, ep, edp."""
        self._check_rank(rank)
        both = {**self._dense, **self._expert}
        found = {n: rank // a.stride % a.size for n, a in both.items()}
        return found if "edp" in found else {**found, "edp": self.index_in_group(rank, "edp")}

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at dense coordinates."""
        return sum(c * self._dense[n].stride for n, c in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)))

    def group_of(self, rank: int, dim: str, shard_size: int | None = None) -> tuple[int, ...]:
        """The members of the group of `dim` that `rank` belongs to, ascending."""
        self._check_rank(rank)
        axes = self.axes(dim, shard_size)
        base = int(base_of(np.array([rank], dtype=np.int64), axes)[0])
        return tuple(points(axes, base).tolist())

    def index_in_group(self, rank: int, dim: str, shard_size: int | None = None) -> int:
        """The position of `rank` in its group of `dim`."""
        self._check_rank(rank)
        index, below = 0, 1
        for axis in self.axes(dim, shard_size):
            index += rank // axis.stride % axis.size * below
            below *= axis.size
        return index

    def groups(self, dim: str, shard_size: int | None = None) -> IntArray:
        """Every group of `dim`, int array [groups, members], both ascending; lists all ranks, so for expansion only."""
        axes = self.axes(dim, shard_size)
        bases = points(complement(merged(axes), self.world_size))
        return bases[:, None] + points(axes)

    def placement(self, dim: str, hardware: HardwareProfile, num_nodes: int, shard_size: int | None = None) -> GroupPlacement:
        """The placement of the slowest kind of group of `dim` (most often there is only one kind)."""
        return self.placements(dim, hardware, num_nodes, shard_size)[0][0]

    def placements(self, dim: str, hardware: HardwareProfile, num_nodes: int, shard_size: int | None = None) -> Kinds:
        """Every distinct placement of a group of `dim` with how many groups have it, the slowest first.

        Raises:
            InputError: unknown dimension, or more ranks than GPUs.
        """
        check_capacity(self.world_size, hardware, num_nodes)
        axes = merged(self.axes(dim, shard_size))
        return place_groups(axes, complement(axes, self.world_size), self.world_size, levels(hardware))

    def hops(self, dim: str, hardware: HardwareProfile, num_nodes: int) -> Kinds:
        """Distinct placements of consecutive members of a group, the ring's closing pair included, the slowest first.

        For sends along a pipeline, where a pair may be nearer than the group is wide. Each is a group of 2 whose
        `concurrent_groups` counts the siblings of the whole group.
        """
        check_capacity(self.world_size, hardware, num_nodes)
        axes = merged(self.axes(dim))
        return place_neighbours(axes, complement(axes, self.world_size), self.world_size, levels(hardware))

    def pairs(self, dim: str, hardware: HardwareProfile, num_nodes: int) -> tuple[GroupPlacement, ...]:
        """The placement of each pair of consecutive members, the last with the first at the end: the slowest over all groups.

        Where members sit on several nodes, a pair inside a node counts as the nearest that does not: sends of a pipeline wait for
        their neighbours' in turn, and the bubbles of zero-bubble runs on two and four nodes are met so, not with sends at NVLink's
        rate.
        """
        kinds = self.hops(dim, hardware, num_nodes)
        axes = merged(self.axes(dim))
        if len(kinds) < 2:
            return tuple(placement for placement, _ in kinds) * count(axes)
        found = place_pairs(axes, complement(axes, self.world_size), self.world_size, levels(hardware))
        nearest = next((placement for placement, _ in reversed(kinds) if placement.num_nodes > 1), None)
        return tuple(nearest if nearest and placement.num_nodes == 1 else placement for placement in found)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank {rank} is outside the world of {self.world_size}")
