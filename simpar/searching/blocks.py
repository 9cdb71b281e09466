"""Prices and bytes of the distinct blocks of a model under one choice, and how stages are made of them.

Everything is asked of the same layout and pricer that `simulate` uses; only the summing over a stage's blocks happens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import inf
from operator import itemgetter
from typing import Any, Final

import numpy as np

from simpar.costs.pricer import LayoutPricer
from simpar.graph.types import Elementwise, Layer, Norm
from simpar.model.network import EncoderLayer, Network
from simpar.parallel.backward_peak import transient
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.pipeline import StageLayers
from simpar.parallel.work import LocalOp
from simpar.program.program import FloatArray, IntArray
from simpar.result.gathers import held_by_frozen, root_weights
from simpar.result.memory import block_bytes

_COMMUNICATED = ("tp", "cp", "ep", "dp", "pp", "etp")
PHASES = "FBIW"
F, B, I, W = range(4)  # noqa: E741


@dataclass(frozen=True)
class Kinds:
    """The distinct blocks of a network, numbered.

    Kinds 0 .. n-1 are layers with the plan's recomputation, n .. 2n-1 the same without, then what is not a layer.

    Attributes:
        layer: kind of each layer (with recomputation).
        layers: distinct layer blocks n.
        embedding, mtp, mtp_head, head: kinds, -1 where there is none.
        shared_head: the head where a tied matrix is the embedding's on the same rank, -1 where it is not tied.
        mtp_count: multi-token-prediction modules.
        encoders: kind of each layer of encoders beside the decoder.
    """

    layer: tuple[int, ...]
    layers: int
    embedding: int
    mtp: int
    mtp_head: int
    head: int
    shared_head: int
    mtp_count: int
    encoders: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of kinds."""
        ends = (self.embedding, self.mtp, self.mtp_head, self.head, self.shared_head)
        return max(2 * self.layers - 1, *ends, *self.encoders) + 1

    @classmethod
    def of(cls, network: Network) -> Kinds:
        """The kinds of a network (the same numbers for every micro-batch size of a model)."""
        index: dict[Layer, int] = {}
        layer = tuple(index.setdefault(block, len(index)) for block in network.layers)
        numbers, following = [], 2 * len(index)
        for present in (network.embedding, network.mtp, network.mtp_head, network.head, network.tied_head):
            numbers.append(following if present else -1)
            following += bool(present)
        beside: dict[tuple[Layer, bool], int] = {}
        encoders = tuple(beside.setdefault((e.layer, e.frozen), following + len(beside)) for e in network.encoders)
        return cls(layer, len(index), *numbers, mtp_count=len(network.mtp), encoders=encoders)  # type: ignore[misc, arg-type]

    def sequence(self, stage: StageLayers, limit: int | None) -> list[int]:
        """Kinds of a stage's blocks in order; only its first `limit` layers recompute."""
        found = list(self.encoders[slice(*stage.encoders)])
        found += [self.embedding] if stage.embedding and self.embedding >= 0 else []
        for offset in range(stage.count):
            kind = self.layer[stage.first + offset]
            found.append(kind if limit is None or offset < limit else kind + self.layers)
        if stage.head:
            for _ in range(self.mtp_count):
                found += [self.mtp, *([self.mtp_head] if self.mtp_head >= 0 else [])]
            if self.head >= 0:
                found.append(self.shared_head if stage.shares and self.shared_head >= 0 else self.head)
        return found


@dataclass(frozen=True)
class BlockTable:
    """Numbers per kind of block.

    Attributes:
        seconds: float array [4 phases, kinds], on the device, exposed communication included.
        host: float array [4 phases, kinds], to launch, at least: pipelines differ in whether the host runs ahead.
        compute: float array [4 phases, kinds]: compute kernels alone, a bound for passes that overlap.
        kept: float array [kinds], bytes from forward to backward; logits: the same of the logits.
        offloadable: float array [kinds], bytes that activation offloading takes to the host.
        working: bytes that recomputation brings back; transient: of gradients, where weights are fully sharded the other.
        deferred: float array [kinds], bytes that stay from the input gradient to the weight gradient.
        outputs: float array [kinds], bytes that a forward leaves to the end of the step.
        root: float array [kinds], weights that stay gathered under full sharding; held: bytes that a backward keeps there, twice.
        shapes: of each kind, bytes of what stands for weight gradients, by shape.
        dense, expert, lora, lora_expert: float arrays [kinds], weights; the trained ones of low-rank adaptation, of experts' among
            them.
        frozen_dense, frozen_expert: float arrays [kinds], bytes of weights that it leaves frozen.
        pass_s: host seconds of every pass of a stage.
        sharded: the same with what blocks hold where weights are fully sharded; none = no different.
    """

    seconds: FloatArray
    host: FloatArray
    compute: FloatArray
    kept: FloatArray
    logits: FloatArray
    offloadable: FloatArray
    working: FloatArray
    transient: FloatArray
    transient_sharded: FloatArray
    deferred: FloatArray
    outputs: FloatArray
    root: FloatArray
    held: FloatArray
    shapes: tuple[dict[tuple[int, int], float], ...]
    dense: FloatArray
    expert: FloatArray
    lora: FloatArray
    lora_expert: FloatArray
    frozen_dense: FloatArray
    frozen_expert: FloatArray
    pass_s: float
    sharded: BlockTable | None = None

    @classmethod
    def of(cls, columns: Sequence[tuple[Column, Column] | None], pass_s: float) -> BlockTable:
        """From columns of each kind, unsharded and fully sharded; none where there is no such kind."""
        plain, sharded = (cls._of([c and c[at] for c in columns], pass_s) for at in (0, 1))
        return plain if plain.holds == sharded.holds else replace(plain, sharded=sharded)

    @classmethod
    def _of(cls, columns: Sequence[Column | None], pass_s: float) -> BlockTable:
        rows = [_EMPTY if c is None else c for c in columns]
        phases: dict[str, Any] = {name: np.array([row[name] for row in rows]).T for name in _BY_PHASE}
        # One array of all other numbers: an array for each costs more than what it holds.
        plain: dict[str, Any] = dict(zip(_PLAIN, np.array([_plain_of(row) for row in rows]).T.copy(), strict=True))
        return cls(**phases, **plain, shapes=tuple(row["shapes"] for row in rows), pass_s=pass_s)

    @cached_property
    def holds(self) -> bytes:
        """What tells two tables apart in what their blocks hold."""
        columns = (self.kept, self.logits, self.working, self.transient, self.transient_sharded, self.deferred, self.outputs,
                   self.dense, self.expert, self.lora, self.lora_expert, self.root, self.held)  # fmt: skip
        return b"".join(c.tobytes() for c in columns)


Column = dict[str, Any]
"""The numbers of one kind of block by their names in `BlockTable`; by phase those of `_BY_PHASE`."""
_BY_PHASE: Final = ("seconds", "host", "compute")
_PLAIN: Final = tuple(f.name for f in fields(BlockTable) if f.name not in (*_BY_PHASE, "shapes", "pass_s", "sharded"))
_plain_of: Final = itemgetter(*_PLAIN)
_EMPTY: Final[Column] = {**dict.fromkeys(_BY_PHASE, (0.0,) * len(PHASES)), **dict.fromkeys(_PLAIN, 0.0), "shapes": {}}


def column_of(layout: Layout, pricer: LayoutPricer, block: LocalBlock, phases: Sequence[int], *, sharded: bool) -> Column:
    """Price a block.

    Args:
        phases: to price, of F, B, I, W; seconds of others are 0.
        sharded: weights may be fully sharded (else what is in flight then is 0).
    """
    seconds, host, compute = ([0.0] * len(PHASES) for _ in range(3))
    for phase in phases:
        price = pricer.block(block, PHASES[phase])
        seconds[phase] = price.seconds
        host[phase] = pricer.host.least(block, PHASES[phase])
        compute[phase] = sum(s for n, s in price.terms if n not in _COMMUNICATED)
    kept, logits, working, transient, deferred, _ = block_bytes(
        block, 0.0, 0.0, releases=layout.framework.pipeline.input_gradient_releases
    )
    trained, lora, frozen = layout.trained(block), bool(layout.options.lora_rank), layout.frozen_bytes(block)
    plan = block.options.kernels
    return {
        "seconds": seconds, "host": host, "compute": compute, "kept": kept, "logits": logits,
        "offloadable": block.offloadable_bytes, "working": working, "transient": transient,
        "transient_sharded": _bare_transient(block) if sharded else 0.0, "deferred": deferred,
        "outputs": logits * plan.element / plan.loss.logit_bytes(plan.element) * (layout.framework.pipeline.last_outputs != "none"),
        "root": sum(root_weights(layout, [block])), "held": held_by_frozen(layout, block),
        "shapes": LocalLayer(block.layer, block.options).weight_shapes(),
        "dense": block.dense_parameters, "expert": block.expert_parameters,
        "lora": sum(trained) * lora, "lora_expert": trained[1] * lora,
        "frozen_dense": frozen * (block.frozen_parameters + block.dense_parameters * lora),
        "frozen_expert": frozen * block.expert_parameters * lora,
    }  # fmt: skip


def no_longer(columns: Sequence[Column], sharded: int) -> tuple[Column, Column]:
    """The first, and that at `sharded`, each with seconds no longer than those of any."""
    if len(columns) == 1:
        return columns[0], columns[0]
    least = {name: [min(each) for each in zip(*(c[name] for c in columns), strict=True)] for name in _BY_PHASE}
    return columns[0] | least, columns[sharded] | least


def block_kinds(network: Network, kinds: Kinds) -> list[tuple[int, Layer, bool]]:
    """(kind, block, whether the plan's recomputation is for it) of every kind; layers once with it and once without."""
    layers = dict(zip(kinds.layer, network.layers, strict=True))
    found = [(kind + more, block, not more) for kind, block in layers.items() for more in (0, kinds.layers)]
    found += [(kinds.mtp, block, True) for block in network.mtp[:1]]
    ends = ((kinds.embedding, network.embedding), (kinds.mtp_head, network.mtp_head), (kinds.head, network.head),
            (kinds.shared_head, network.tied_head))  # fmt: skip
    return [*found, *((kind, block, False) for kind, block in ends if block is not None)]


def encoder_kinds(network: Network, kinds: Kinds) -> dict[int, EncoderLayer]:
    """Layers of encoders beside the decoder, by kind."""
    return dict(zip(kinds.encoders, network.encoders, strict=True))


def has_experts(block: Layer) -> bool:
    """Whether a block's work depends on expert parallelism."""
    return any(axis.split == "experts" for axis in block.axes)


@lru_cache(maxsize=4096)
def expert_span(block: Layer) -> range:
    """Positions of the nodes from the norm before a block's experts to the sum after them; none of a block without experts."""
    at = [index for index, node in enumerate(block.nodes) if node.name.startswith("moe")]
    if not at:
        return range(0)
    first = next((i for i in range(at[0], -1, -1) if isinstance(block.nodes[i], Norm)), 0)
    sums = (i for i, node in enumerate(block.nodes) if i > at[-1] and isinstance(node, Elementwise) and node.op == "residual")
    return range(first, next(sums, len(block.nodes) - 1) + 1)


@lru_cache(maxsize=4096)
def expert_branch(block: Layer) -> object:
    """The nodes of `expert_span`, with the axes of what they make: of blocks that are alike in it the experts' part is the same."""
    nodes = tuple(block.nodes[position] for position in expert_span(block))
    return nodes, tuple(block.axis[axis] for node in nodes for name in node.outputs for axis in block.tensor[name].axes)


def _bare_transient(block: LocalBlock) -> float:
    """Bytes of gradients in flight where nothing stands for the weights' gradients (full sharding)."""
    options = replace(block.options, weight_gradients="none", grouped_weight_gradients="none")
    return block.transient if options == block.options else transient(LocalLayer(block.layer, options))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Fully sharded weights that come and go with their blocks: bytes per weight gathered, per gradient, groups ahead.

    `adapters`: they alone have gradients. `head`: bytes of a gradient of the head before it is reduced. `stays`: from a block's
    forward to its backward, at least where passes over fewer than `reuse` weights lie between. `bucket`: gradients of a buffer
    that they are put into before they are reduced; 0 = each block's are reduced alone.
    """

    gather: float
    reduce: float
    ahead: int
    adapters: bool = False
    head: float = 2.0
    stays: bool = False
    reuse: float = 0.0
    bucket: float = 0.0


def serial_seconds(ops: Sequence[LocalOp], seconds: Sequence[float]) -> tuple[float, float]:
    """A lower bound on a block's time as (dense part, expert part), additive over its parts.

    Compute ops run one after the other on one stream. In a row of ops that are all of one part, each starts when what it waits for
    has ended. Of what was under way before the row nothing is known, since the other part may have hidden it; but what starts after
    its last op, and the next row waits for, lies between the two whatever else runs.

    Args:
        ops: of the block in one phase.
        seconds: of each.
    """
    parts, of_experts = [0.0, 0.0], [op.name.startswith("moe") for op in ops]
    begin, finish = list[float](), list[float]()
    now, since = 0.0, 0  # end of the last compute op; the first op of its row

    def wait(on: Sequence[int]) -> float:
        """When these have ended, no sooner than now; the wait counts for the part of the last one."""
        cause = max(on, key=finish.__getitem__, default=-1)
        if cause < 0 or finish[cause] <= now:
            return now
        parts[of_experts[cause]] += finish[cause] - now
        return finish[cause]

    for index, op in enumerate(ops):
        known = [d for d in op.deps if d >= since]
        if op.stream != "compute":
            begin.append(max((finish[d] for d in known), default=-inf if since else 0.0))
            finish.append(begin[-1] + seconds[index])
            continue
        if any(of_experts[d] != of_experts[index] for d in (since, *known)):
            known, since = [d for d in known if begin[d] >= now], index
        start = wait(known)
        begin.append(start)
        now = start + seconds[index]
        parts[of_experts[index]] += now - start
        finish.append(now)
    now = wait(range(since, len(ops)))
    return parts[0], parts[1]


def plain_blocks(layout: Layout, kinds: Kinds) -> dict[int, Layer]:
    """One block of each kind of a layout without recomputation (kinds n .. 2n-1 of layers)."""
    return {kind: block for kind, block, _ in block_kinds(layout.network, kinds) if kind >= kinds.layers}


@dataclass(frozen=True)
class Composition:
    """Stages as numbers of blocks of each kind.

    Attributes:
        counts: int array [stages, kinds].
        orders: kinds of each stage in order.
    """

    counts: IntArray
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kinds: Kinds, stages: Sequence[StageLayers], limit: int | None) -> Composition:
        """The composition of `stages` whose first `limit` layers recompute (None: all)."""
        orders = tuple(tuple(kinds.sequence(stage, limit)) for stage in stages)
        counts = np.array([np.bincount(order, minlength=kinds.count) if order else [0] * kinds.count for order in orders])
        return cls(counts.astype(np.int64), orders)

    def parameters(self, table: BlockTable) -> tuple[FloatArray, FloatArray]:
        """(dense, expert) weights of each stage."""
        return self.counts @ table.dense, self.counts @ table.expert


__all__ = [
    "PHASES", "BlockTable", "Column", "Composition", "Kinds", "block_kinds", "column_of", "expert_branch", "expert_span",
    "has_experts", "plain_blocks", "serial_seconds",
]  # fmt: skip
