"""A block's work on one rank: forward and backward op lists, saved activations, weights. The one place that splits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from simpar.parallel import context, expert, tensor
from simpar.parallel.block_memory import BlockMemory
from simpar.parallel.casts import casts
from simpar.parallel.local_shapes import LocalShapes, SplitOptions
from simpar.parallel.recompute import repeated, repeated_parts
from simpar.parallel.work import Gemm, LocalOp, MemoryWork, OpList, Work
from simpar.workload.ops import Block, Op, OpType, Seam, op_flops, volume


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """One rank's share of a block.

    Attributes:
        name: the block's.
        forward, backward: op lists; `backward` starts with what is recomputed.
        input_gradient, weight_gradient: the backward split for zero-bubble schedules.
        saved: (tensor, bytes) kept from forward to backward.
        working: bytes alive only while the block's backward runs (recomputed activations).
        transient: bytes of the largest gradient pair alive in the backward.
        deferred: bytes that stay from the input gradient to the weight gradient where the two are apart.
        dense_parameters, expert_parameters: weights on this rank.
        matmul_parameters: of which in matmuls (weights cast or gathered per use).
        lora_parameters: trained weights under low-rank adaptation.
        model_flops: forward FLOPs of the whole micro-batch over all ranks, causal attention halved.
        attention_flops: attention's part of them.
        block, options: what was split, and how.
    """

    name: str
    forward: tuple[LocalOp, ...]
    backward: tuple[LocalOp, ...]
    input_gradient: tuple[LocalOp, ...]
    weight_gradient: tuple[LocalOp, ...]
    saved: tuple[tuple[str, float], ...]
    working: float
    transient: float
    deferred: float
    dense_parameters: float
    expert_parameters: float
    lora_parameters: float
    model_flops: float
    attention_flops: float
    block: Block = field(compare=False, repr=False)
    options: SplitOptions = field(compare=False, repr=False)

    @property
    def saved_bytes(self) -> float:
        """Total kept from forward to backward."""
        return sum(amount for _, amount in self.saved)


class _Splitter(LocalShapes):
    """The op lists of one block on one rank."""

    def put_forward(self, ops: OpList, only: frozenset[str] | None = None) -> None:
        """Append the forward (or the ops named in `only` and the collectives between them)."""
        for item in self.block.items:
            if isinstance(item, Seam):
                if only is None:
                    self._forward_seam(item, ops)
                continue
            if only is not None and item.name not in only:
                continue
            if item.type is OpType.ATTENTION:
                core = self.attention(item, backward=False)
                context.attention(item.name, core, self.degrees, self.attention_launches(item, core), ops)
            elif item.type is OpType.MEMORY:
                ops.compute(item.name, self.memory(item, backward=False), item.kernels)
            else:
                self._engine_cast(item, ops, backward=False)
                work = self.matmul(item, "forward")
                self._cast(item, work, ops, again=only is not None)
                ops.compute(item.name, work, self.launches(item))
                if self.options.lora_rank and item.module == "attention":
                    ops.compute(f"{item.name}.lora", self.lora(item, "forward"), 2)

    def _cast(self, op: Op, product: Work, ops: OpList, *, again: bool = False) -> None:
        """Put the casts to fp8 that come before a product, where they are kernels of their own."""
        if not self.options.casts or not isinstance(product, Gemm) or product.dtype != self.options.dtype:
            return
        suffix = "" if product.direction == "forward" else ".backward"
        for work in casts(self.options.casts, product, again=again):
            ops.compute(f"{op.name}.cast{suffix}", work)

    def _engine_cast(self, op: Op, ops: OpList, *, backward: bool) -> None:
        """Put TransformerEngine's cast; the launches of a grouped matmul hold those of its casts."""
        if (work := self.engine_cast(op, backward=backward)) is not None:
            ops.compute(f"{op.name}.cast" + (".backward" if backward else ""), work, int(op.type is OpType.MATMUL))

    def _forward_seam(self, seam: Seam, ops: OpList) -> None:
        if seam.name in ("moe_dispatch", "moe_combine"):
            self._exchange(seam, ops, combine=seam.name == "moe_combine", backward=False)
        else:
            tensor.forward(seam, self.size, self.degrees, self.style, ops)

    def _exchange(self, seam: Seam, ops: OpList, *, combine: bool, backward: bool) -> None:
        assert self.options.moe is not None
        element = seam.element_bytes if combine or backward or seam.element_bytes > 2.0 else self.options.dispatch_bytes
        suffix = ".backward" if backward else ""
        expert.exchange(seam.name + suffix, self.size, self.degrees, self.options.moe, ops, combine=combine,
                        element_bytes=element, load_factor=self.options.load_factor)  # fmt: skip

    def put_parts(self, ops: OpList, parts: dict[str, float]) -> None:
        """Append shares of forward matmuls."""
        for op in self.block.ops:
            if op.name in parts:
                whole = self.matmul(op, "forward")
                assert isinstance(whole, Gemm)
                self._cast(op, replace(whole, n=max(round(whole.n * parts[op.name]), 1)), ops, again=True)
                ops.compute(op.name, replace(whole, n=max(round(whole.n * parts[op.name]), 1)), self.launches(op))

    def put_backward(self, ops: OpList, weight_ops: OpList | None) -> None:
        """Append the backward; with `weight_ops` the weight gradients go there instead (zero bubble)."""
        items = self.block.items
        for position in range(len(items) - 1, -1, -1):
            item = items[position]
            if isinstance(item, Seam):
                self._backward_seam(item, ops)
                continue
            if item.type is OpType.ATTENTION:
                core = self.attention(item, backward=True)
                context.attention(f"{item.name}.backward", core, self.degrees, self.attention_launches(item, core), ops)
            elif item.type is OpType.MEMORY:
                ops.compute(f"{item.name}.backward", self.memory(item, backward=True), 2 * item.kernels)
            else:
                entry = self._entry_before(position)
                self._matmul_backward(item, entry, ops, weight_ops)

    def put_accumulation(self, ops: OpList) -> None:
        """Add the gradients of all weights to their buffer, one kernel each, where no matmul does."""
        weights = [amount for op in self.block.ops if (amount := self.weights(op))]
        if weights and self.options.accumulation_bytes and not self.options.lora_rank:
            work = MemoryWork("residual", sum(weights) * self.options.accumulation_bytes, len(weights),
                              self.options.memory_implementation)  # fmt: skip
            ops.compute("accumulation.wgrad", work, len(weights))

    def _entry_before(self, position: int) -> Seam | None:
        """The entry seam right before the op at `position`, whose collectives belong to its backward."""
        previous = self.block.items[position - 1] if position else None
        return previous if isinstance(previous, Seam) and previous.name in ("attention_in", "mlp_in", "head_in") else None

    def _backward_seam(self, seam: Seam, ops: OpList) -> None:
        if seam.name in ("moe_dispatch", "moe_combine"):
            # The gradient of combine is a dispatch and the other way round.
            self._exchange(seam, ops, combine=seam.name == "moe_dispatch", backward=True)
        else:
            tensor.backward_exit(seam, self.size, self.degrees, self.style, ops)

    def _matmul_backward(self, op: Op, entry: Seam | None, ops: OpList, weight_ops: OpList | None) -> None:
        self._engine_cast(op, ops, backward=True)
        regathered = None
        if entry is not None:
            regathered = tensor.regather(entry, self.size, self.degrees, self.style, ops)
        if op.needs_input_gradient:
            work = self.matmul(op, "dgrad")
            self._cast(op, work, ops)
            ops.compute(f"{op.name}.dgrad", work, self.launches(op))
        reduced = None
        if entry is not None and op.needs_input_gradient:
            reduced = tensor.reduce_input_gradient(entry, self.size, self.degrees, ops)
        target = ops if weight_ops is None else weight_ops
        if regathered is not None:
            ops.wait(regathered)
        if not self.options.lora_rank:
            work = self.matmul(op, "wgrad")
            self._cast(op, work, target)
            target.compute(f"{op.name}.wgrad", work, self.launches(op) + bool(op.bias))
        elif op.module == "attention":
            target.compute(f"{op.name}.lora.wgrad", self.lora(op, "wgrad"), 2)
            target.compute(f"{op.name}.lora.dgrad", self.lora(op, "dgrad"), 2)
        if reduced is not None:
            ops.wait(reduced)


@lru_cache(maxsize=65536)
def split_block(block: Block, options: SplitOptions) -> LocalBlock:
    """`block` on one rank under `options`."""
    splitter, memory = _Splitter(block, options), BlockMemory(block, options)
    forward = OpList()
    splitter.put_forward(forward)
    backward, inputs, weights = OpList(), OpList(), OpList()
    again = repeated(options.recompute, block)
    for ops in (backward, inputs):
        if options.recompute.full:
            splitter.put_forward(ops)
        elif again:
            splitter.put_forward(ops, only=frozenset(again))
            splitter.put_parts(ops, repeated_parts(options.recompute, block))
    splitter.put_backward(backward, None)
    splitter.put_backward(inputs, weights)
    for ops in (backward, weights):
        splitter.put_accumulation(ops)
    saved, working = memory.saved()
    dense = sum(splitter.weights(op) for op in block.ops if op.region != "expert")
    experts = sum(splitter.weights(op) for op in block.ops if op.region == "expert")
    flops = [(op, op_flops(op, splitter.size)) for op in block.ops]
    return LocalBlock(
        name=block.name, forward=forward.done(), backward=backward.done(), input_gradient=inputs.done(),
        weight_gradient=weights.done(), saved=saved, working=working, transient=memory.transient(), deferred=memory.deferred(),
        dense_parameters=dense, expert_parameters=experts,
        lora_parameters=sum(splitter.lora_weights(op) for op in block.ops), model_flops=sum(f for _, f in flops),
        attention_flops=sum(f for op, f in flops if op.type is OpType.ATTENTION), block=block, options=options,
    )  # fmt: skip


__all__ = ["LocalBlock", "SplitOptions", "split_block", "volume"]
