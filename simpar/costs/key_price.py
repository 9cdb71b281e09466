"""Seconds of one key of a program, and what frameworks do around the collectives of weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from simpar.costs.block_price import BlockPrice, Kinds, worst_each
from simpar.costs.host import hooks_slowdown
from simpar.costs.price import Price, Provenance
from simpar.parallel import modules
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import tensor_parameters
from simpar.parallel.work import HostCopy, MemoryWork, Work

LAUNCH = "launch"
"""Category of the time in which the device waits for its host."""
DDP_COPIES: Final = 2
"""Kernels that read and write each gradient beside torch's DistributedDataParallel, whose buckets lie apart: into its bucket,
divided by the ranks, and back (torch csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense and copy_bucket_to_grad)."""


@dataclass(frozen=True, slots=True)
class KeyPrice:
    """A symbolic price made concrete.

    Attributes:
        seconds: duration.
        terms: by category, summing to `seconds`.
        spread: (category, up, down) seconds of the 80 % interval.
        interference: how much compute of the same rank slows while this runs (communication only).
        communication_s: busy seconds by dimension inside compute ops.
        provenance: of each category, the worst among its parts.
        latency_s: part of `seconds` that no bandwidth changes (communication only).
        held_sms: SMs that its collectives hold, of which `interference` follows.
    """

    seconds: float
    terms: tuple[tuple[str, float], ...]
    spread: tuple[tuple[str, float, float], ...]
    interference: float
    communication_s: tuple[tuple[str, float], ...]
    provenance: Kinds
    latency_s: float = 0.0
    held_sms: int = 0

    @classmethod
    def of(cls, name: str, price: Price) -> KeyPrice:
        """A price that is all of one category."""
        spread = ((name, price.high - price.seconds, price.seconds - price.low),)
        return cls(price.seconds, ((name, price.seconds),), spread, 0.0, (), ((name, price.provenance),))

    @classmethod
    def of_blocks(cls, prices: Sequence[BlockPrice], gap: float) -> KeyPrice:
        """Blocks one after the other, with the `gap` seconds by which the host is late."""
        terms: dict[str, float] = {}
        up: dict[str, float] = {}
        down: dict[str, float] = {}
        busy: dict[str, float] = {}
        for price in prices:
            for name, seconds in price.terms:
                terms[name] = terms.get(name, 0.0) + seconds
            for name, more, less in price.spread:
                up[name] = up.get(name, 0.0) + more
                down[name] = down.get(name, 0.0) + less
            for name, seconds in price.communication_s:
                busy[name] = busy.get(name, 0.0) + seconds
        if gap:
            terms[LAUNCH], up[LAUNCH], down[LAUNCH] = gap, 0.3 * gap, 0.3 * gap
        return cls(
            sum(p.seconds for p in prices) + gap, tuple(terms.items()),
            tuple((n, up.get(n, 0.0), down.get(n, 0.0)) for n in terms), 0.0, tuple(busy.items()),
            worst_each([*(k for p in prices for k in p.provenance), *([(LAUNCH, Provenance.MODEL)] if gap else [])]),
        )  # fmt: skip


def scaled(price: Price, factor: float) -> Price:
    """`price` times `factor`, interval included."""
    if factor == 1.0:
        return price
    return Price(price.seconds * factor, price.low * factor, price.high * factor, price.provenance, price.terms)


def handled(price: KeyPrice, key: Gather | Reduce, layout: Layout, work: Callable[[Work], Price]) -> KeyPrice:
    """`price` of collectives with what the framework adds: slower buckets beside the backward, unpacking after a gather.

    Args:
        work: the price of a kernel alone.
    """
    spec, zero = layout.framework, layout.plan.zero_stage
    if isinstance(key, Reduce):
        price = _with_buffers(price, key, layout, work)
        return _with_copy(price, key, layout, work, gradient_copies(layout)) if layout.gradients_away else price
    if layout.plan.offload.parameters:
        return _with_copy(price, key, layout, work, layout.state_bytes.gather)
    if not price.seconds or not spec.data.gather_copy_bytes or zero == 3:
        return price
    more = unpacking_s(key, layout, work)
    spread = tuple((name, up + 0.3 * more, down + 0.3 * more) for name, up, down in price.spread)
    seconds = price.seconds + more
    return replace(price, seconds=seconds, terms=(("dp", seconds),), spread=spread, latency_s=price.latency_s + more)


def _with_buffers(price: KeyPrice, key: Reduce, layout: Layout, work: Callable[[Work], Price]) -> KeyPrice:
    """A reduction with the kernels that bring whole gradients into what is reduced, and back where that lies apart, or with the
    hooks that launch them, which take longer for small weights."""
    wrapped, state = layout.state_bytes.bucket, layout.state_bytes
    count = DDP_COPIES if wrapped else layout.framework.data.reduce_copies
    if not price.seconds or layout.plan.zero_stage == 3 or not count:
        return price
    weights = sum(layout.block_parameters(key.stage, key.first, key.last, trainable=True))
    copies = scaled(work(MemoryWork("copy", weights * count * 2.0 * (wrapped or state.reduce))), layout.calibration.memory)
    blocks = layout.stage_blocks[key.stage][key.first : key.last]
    tensors = sum(map(modules.trained, blocks))
    more = max(copies.seconds, hooks_slowdown(layout) * layout.framework.host.reduction_hook_cpu_s * tensors)
    spread = tuple((name, up + copies.high - copies.seconds, down + copies.seconds - copies.low) for name, up, down in price.spread)
    seconds = price.seconds + more
    return replace(price, seconds=seconds, terms=(("dp", seconds),), spread=spread, latency_s=price.latency_s + more)


def gradient_copies(layout: Layout) -> float:
    """Bytes over the host link per gradient of a rank's own part and reduction, where gradients rest in host memory.

    DeepSpeed adds micro-batches up on the device: what there is comes from the host and goes back, and the last goes down once more
    in fp32 (stage_1_and_2.py async_accumulate_grad_in_cpu_via_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu; stage3.py
    partition_grads, which brings the first back as well). torch's FSDP sends each down and adds there.
    """
    zero, count, each = layout.plan.zero_stage, layout.num_microbatches, layout.state_bytes.gradient
    if not layout.framework.optimizer.gradients_to_host:
        return each
    if zero == 3:
        return 2.0 * each + 4.0 / count
    if count == 1:
        return 4.0
    return 2.0 * each + 4.0 if zero == 1 else ((2 * count - 1) * each + 4.0) / count


def _with_copy(price: KeyPrice, key: Gather | Reduce, layout: Layout, work: Callable[[Work], Price], bytes_each: float) -> KeyPrice:
    """A gather whose shards come up from host memory first, or a reduction whose shards go there, on the same stream (torch
    _fsdp_param.py; DeepSpeed's swapper, copy_grads_in_partition)."""
    dense, experts = layout.block_parameters(key.stage, key.first, key.last, trainable=isinstance(key, Reduce))
    shards = dense / layout.shard_ranks + experts / layout.expert_shard_ranks
    copy = work(HostCopy(shards * bytes_each))
    spread = (*price.spread, ("offload", copy.high - copy.seconds, copy.seconds - copy.low))
    return replace(
        price, seconds=price.seconds + copy.seconds, terms=(*price.terms, ("offload", copy.seconds)), spread=spread,
        provenance=(*price.provenance, ("offload", copy.provenance)),
    )  # fmt: skip


def unpacking_s(key: Gather, layout: Layout, work: Callable[[Work], Price]) -> float:
    """Seconds to pack weights before their gather and to unpack them piece by piece after it: the device's, or the host's."""
    spec = layout.framework
    parameters = sum(layout.block_parameters(key.stage, key.first, key.last))
    copies = work(MemoryWork("copy", parameters * spec.data.gather_copy_bytes)).seconds * layout.calibration.memory
    pieces = parameters / tensor_parameters(layout) * layout.shard_ranks
    return max(copies, pieces * spec.host.launch_s * layout.calibration.host)
