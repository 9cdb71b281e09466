"""Prices of a layout over machines of several kinds: each key by the pricer of the host that runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from simpar.costs.collectives import CollectiveModel
from simpar.costs.kernels import KernelModel
from simpar.costs.key_price import KeyPrice
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.keys import BlockOp, Gather, Key, OptimizerStep, Overlapped, Reduce, Send, TiedReduce
from simpar.parallel.layout import Layout
from simpar.specs.hardware import HardwareProfile
from simpar.specs.scenario import Scenario

Models = Callable[[Scenario, HardwareProfile], tuple[KernelModel, CollectiveModel]]


class MixedPricer:
    """As `LayoutPricer`, of a layout with hosts.

    What hosts exchange takes as long as on the slowest of them, each with the adapters that reach the others.
    """

    def __init__(self, layout: Layout, models: Models) -> None:
        self.layout = layout
        self.pricers: list[LayoutPricer] = []
        self.links: list[LayoutPricer] = []
        for alone, host in zip(layout.alone, layout.hosts, strict=True):
            kernels, collectives = models(alone.scenario, alone.hardware)
            own = LayoutPricer(alone, kernels, collectives)
            self.pricers.append(own)
            same = host.link is alone.hardware
            self.links.append(own if same else LayoutPricer(alone, kernels, models(alone.scenario, host.link)[1]))

    def bind(self, stage_to_rank: Sequence[int], model_stage: Sequence[int]) -> MixedPricer:
        """Tell which rank holds which model stage; returns itself."""
        for pricer in (*self.pricers, *self.links):
            pricer.bind(stage_to_rank, model_stage)
        # All ranks wait for the norm of all gradients: on every host it takes as long as on the slowest.
        slowest = max(pricer.norm_s for pricer in self.links)
        for pricer in self.pricers:
            pricer.norm_s = slowest
        return self

    @property
    def stages_of_rank(self) -> dict[int, list[int]]:
        """Model stages held by each pipeline rank."""
        return self.pricers[0].stages_of_rank

    def at(self, rank: int) -> LayoutPricer:
        """The pricer of a pipeline rank."""
        return self.pricers[self.layout.host_of(rank)]

    def price(self, key: Key) -> KeyPrice:
        """The price of one key."""
        layout, ranks = self.layout, self.layout.ranks
        if isinstance(key, Gather | Reduce) and layout.replicas_differ:
            return self._slowest(key, range(len(self.links)))
        if isinstance(key, Send | TiedReduce):
            ends = (key.from_stage, key.to_stage) if isinstance(key, Send) else (0, -1)
            return self._slowest(key, {layout.host_of(ranks[stage]) for stage in ends})
        if isinstance(key, OptimizerStep):
            return self.at(key.rank).price(key)
        return self.at(ranks[key.forward_stage if isinstance(key, Overlapped) else key.stage]).price(key)

    def _slowest(self, key: Key, hosts: Collection[int]) -> KeyPrice:
        """Of what these hosts exchange."""
        one_part = len({self.layout.hosts[host].part for host in hosts}) == 1
        pricers = self.pricers if one_part else self.links
        found = max((pricers[host].price(key) for host in sorted(hosts)), key=lambda price: price.seconds)
        network = self.layout.scenario.cluster.parts_network
        if one_part or network is None or not network.latency or not found.seconds:
            return found
        (name, seconds), *terms = found.terms
        far = network.latency
        return replace(found, seconds=found.seconds + far, terms=((name, seconds + far), *terms), latency_s=found.latency_s + far)

    def layer_seconds(self, stage: int) -> list[float]:
        """As `LayoutPricer.layer_seconds`; where hosts hold replicas, the mean of them."""
        if not self.layout.replicas_differ:
            return self.at(self.layout.ranks[stage]).layer_seconds(stage)
        return [sum(row) / len(row) for row in zip(*(own.layer_seconds(stage) for own in self.pricers), strict=True)]

    def exchange_share(self, key: BlockOp) -> float:
        """Of an op's work, what `key` stands for."""
        return self.at(self.layout.ranks[key.stage]).exchange_share(key)
