"""What one sharding of the states costs for any amount of weights: the pricer's own formulas, each amount priced once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from simpar.costs.key_price import KeyPrice
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import Gather, OptimizerStep, Reduce
from simpar.parallel.layout import Layout
from simpar.program.program import FloatArray


@dataclass
class _Weights:
    """Dense and expert weights that a stage is said to hold."""

    dense: float = 0.0
    expert: float = 0.0


@dataclass(frozen=True, eq=False)
class _OneStage(Layout):
    """A layout of one stage without blocks, of whatever weights `held` says now."""

    held: _Weights = field(default_factory=_Weights)
    stage_blocks = ((),)

    def block_parameters(self, stage: int, first: int, last: int, *, trainable: bool = False) -> tuple[float, float]:
        """Under low-rank adaptation nothing is known of the trained weights: they count as none, which keeps bounds ones."""
        return (0.0, 0.0) if self.options.lora_rank and trainable else (self.held.dense, self.held.expert)


class _AnyWeights:
    """A pricer whose layout has one stage of any weights."""

    def __init__(self, pricer: LayoutPricer) -> None:
        self._weights = _Weights()
        own = {f.name: getattr(pricer.layout, f.name) for f in fields(pricer.layout)}
        self._pricer = copy.copy(pricer)
        self._pricer.layout = _OneStage(**own, held=self._weights)
        self._pricer.stages_of_rank = {0: [0]}

    def price(self, dense: float, expert: float, key: Gather | Reduce | OptimizerStep) -> KeyPrice:
        """The price of `key` if the stage held these weights."""
        self._weights.dense, self._weights.expert = dense, expert
        return self._pricer._price(key)


class StatePricer:
    """Seconds of gathering, reducing and updating under one sharding (what is hidden does not matter).

    Args:
        pricer: of a layout that shards the states this way.
        offloaded: makes the same with the optimizer on the host, if it is asked for.
        dense, expert: float arrays [kinds], weights of each kind of block.
    """

    def __init__(self, pricer: LayoutPricer, offloaded: Callable[[], LayoutPricer], dense: FloatArray, expert: FloatArray) -> None:
        self.layout: Layout = pricer.layout
        self._dense, self._expert = dense, expert
        self._data = self.layout.shares_state and self.layout.training.optimizer != "none"
        self._device, self._make_offloaded = _AnyWeights(pricer), offloaded
        self._known: dict[tuple[str, float, float], float] = {}
        self._losses: dict[bool, float] = {}

    @cached_property
    def _offloaded(self) -> _AnyWeights:
        return _AnyWeights(self._make_offloaded())

    def seconds(self, what: str, dense: float, expert: float) -> float:
        """Seconds to "gather" or "reduce" these weights, for the "update" of them, or the "host update"."""
        name = (what, dense, expert)
        found = self._known.get(name)
        if found is None:
            if what == "gather" or what == "reduce":
                key = Gather(0, 0, 1) if what == "gather" else Reduce(0, 0, 1)
                found = self._device.price(dense, expert, key).seconds if self._data else 0.0
            else:
                own = self._device if what == "update" else self._offloaded
                found = own.price(dense, expert, OptimizerStep(0)).seconds
            self._known[name] = found
        return found

    def each(self, what: str, dense: FloatArray, expert: FloatArray) -> FloatArray:
        """`seconds` of several amounts."""
        return np.array([self.seconds(what, d, e) for d, e in zip(dense.tolist(), expert.tolist(), strict=True)])

    @cached_property
    def gather(self) -> FloatArray:
        """Seconds to gather one block of each kind, float array [kinds]."""
        return self.each("gather", self._dense, self._expert)

    @cached_property
    def reduce(self) -> FloatArray:
        """The same to reduce its gradients."""
        return self.each("reduce", self._dense, self._expert)

    def loss(self, *, gathers: bool) -> float:
        """Share of the time beside data-parallel traffic in which compute makes no progress: f / (1 + f) of the least f."""
        if gathers not in self._losses:
            least = float(self._dense[self._dense > 0].min(initial=np.inf))
            found = []
            if np.isfinite(least):
                found.append(self._device.price(least, 0.0, Reduce(0, 0, 1)).interference)
                if gathers:
                    found.append(self._device.price(least, 0.0, Gather(0, 0, 1)).interference)
            factor = min(found, default=0.0)
            self._losses[gathers] = factor / (1.0 + factor)
        return self._losses[gathers]


__all__ = ["StatePricer"]
