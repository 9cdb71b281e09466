"""A layer's forward and backward on one rank as op lists. The one place that lowers a graph.

Compute ops follow each other on one stream; collectives hang off the op that makes what they carry and are waited for by the op
that reads it. Overlap says which ops run beside which: it never leaves work out.
"""

from __future__ import annotations

from simpar.graph.casts import DELAYED, QUANTIZE, SCALE_KERNELS, cast_inputs, casts
from simpar.graph.differentiate import needs_input_gradient, needs_weight_gradient
from simpar.graph.kernel_types import Kernel
from simpar.graph.kernels import product_of
from simpar.graph.shard import Stretch
from simpar.graph.types import Attention, Convolution, Custom, Einsum, Layer, Node, Permute, Scan
from simpar.parallel import context, expert
from simpar.parallel.adapters import added, trained_weights
from simpar.parallel.local_layer import LocalLayer, Product
from simpar.parallel.one_hot import add_one_hot
from simpar.parallel.plain_modules import head_copies, input_gradient_sums
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import Collective, ExpertExchange, Gemm, GroupedGemm, MemoryWork, OpList, operands


class Lists(LocalLayer):
    """The op lists of one layer on one rank."""

    def __init__(self, layer: Layer, options: SplitOptions) -> None:
        super().__init__(layer, options)
        self.kernel = {kernel.node.name: kernel for kernel in self.kernels}
        split = self.degrees.tp > 1
        self.entry = {s.first: s for s in self.shards.layouts.stretches if s.gathered and split}
        self.exit = {s.last: s for s in self.shards.layouts.stretches if s.reduced and split}

    # -- forward -------------------------------------------------------------------------------------------------------

    def put_forward(self, ops: OpList, only: frozenset[str] | None = None, span: range | None = None) -> None:
        """Append the forward, or the nodes in `only` and the collectives to what they make; `span`: at these positions."""
        for position in span or range(len(self.layer.nodes)):
            node = self.layer.nodes[position]
            wanted = only is None or node.name in only
            stretch = self.entry.get(position)
            if stretch is not None and self._gathers(stretch, only):
                amount = self._local_bytes(*stretch.gathered) * self._share(stretch)
                self._gather(f"{stretch.name}_in", amount, ops, repeat=self._columns(node))
                self._laid_out(f"{stretch.name}_in.layout", self._columns(node) * amount, ops)
            if not wanted:
                continue
            self._channels(node, ops, backward=False)
            if isinstance(node, Permute) and node.back:
                self._exchange(node, ops, backward=False)
            leaving = self.exit.get(position) if only is None or self.cut.reduces else None
            chunked = leaving is not None and self.degrees.overlap_tp and isinstance(node, Einsum)
            if leaving is not None and chunked:
                self._early(f"{leaving.name}_out", self._local_bytes(leaving.reduced), ops)
            if node.name in self.kernel:
                # A whole layer keeps no scales.
                self._compute(self.kernel[node.name], ops, again=only is not None and not self.options.recompute.full)
            if leaving is not None:
                amount = self._local_bytes(leaving.reduced)
                self._laid_out(f"{leaving.name}_out.layout", amount, ops)
                self._reduced(f"{leaving.name}_out", amount, ops, chunked=chunked)
            if isinstance(node, Permute) and not node.back and self._read(node.outputs[0], only):
                self._exchange(node, ops, backward=False)

    def _compute(self, kernel: Kernel, ops: OpList, *, again: bool) -> None:
        node = kernel.node
        if isinstance(node, Attention):
            if copies := head_copies(self, node, backward=False):
                ops.compute(f"{node.name}.repeat", copies, copies.launches)
            core = self.attention(node, backward=False)
            context.attention(node.name, core, node.mask, self.degrees, self.attention_launches(kernel, core), ops)
        elif isinstance(node, Scan | Custom):
            self._alone(kernel, ops, backward=False)
        elif product := product_of(kernel):
            self._engine_cast(product, ops, backward=False)
            work = self._in_pieces(product, self.product(product, "forward"))
            self._cast(product, work, ops, again=again)
            self._pad(node, work, ops)
            self._dequantise(product, ops)
            self._autocast(product, ops)
            ops.compute(node.name, work, self.launches(kernel))
            self._lora(product, ops, backward=False)
        else:
            split = self.shards.layouts.split_loss(node) and self.degrees.tp > 1
            gathered = self.options.kernels.logits_gathered
            if split and gathered > 1:
                # Its backward takes this rank's part of the gradient.
                logits = 2.0 * gathered * self.shards.local(self.axes(node.inputs[0]))
                ops.blocking("loss.all_gather", Collective("all_gather", logits, "tp"), "tp")
            self._elementary(kernel, ops, backward=False)
            if split and gathered == 1:
                amount = 4.0 * self.shards.local(self.axes(node.outputs[0]), "tensor")
                ops.blocking("loss.all_reduce", Collective("all_reduce", amount, "tp", self.options.kernels.loss_all_reduces), "tp")

    def _elementary(self, kernel: Kernel, ops: OpList, *, backward: bool) -> None:
        """A memory-bound node, and what it copies beside."""
        name, suffix = kernel.node.name, ".backward" if backward else ""
        if isinstance(kernel.node, Permute) and self.options.one_hot:
            add_one_hot(self, kernel.node, ops, backward=backward)
        ops.compute(name + suffix, self.memory(kernel, backward=backward), self.elementary_launches(kernel, backward=backward))
        for kind, axes, *each in kernel.beside:  # as one piece beside the node's own kernels, whose launches hold these
            if each[backward]:
                moved = self.shards.local(axes, self.layout(kernel.node)) * each[backward]
                ops.compute(f"{name}.{kind}{suffix}", self._moving(kind, moved), 0)

    def _alone(self, kernel: Kernel, ops: OpList, *, backward: bool) -> None:
        """A scan or custom node. Over context ranks a scan sees all positions of its part of the heads: an all-to-all of what it
        reads before, one of what it makes after (Megatron-LM core, mamba_context_parallel.py); backward the other way round."""
        node, name = kernel.node, kernel.node.name + (".backward" if backward else "")
        exchanges = isinstance(node, Scan) and self.degrees.cp > 1
        reads, makes = (self._local_bytes(*names) for names in (node.inputs, node.outputs))
        if exchanges:
            before = makes if backward else reads
            ops.blocking(f"{name}.all_to_all_in", Collective("all_to_all", before, "cp"), "cp")
        work = self.priced_alone(kernel, backward=backward)
        ops.compute(name, work, work.launches)
        if exchanges:
            after = reads if backward else makes
            ops.blocking(f"{name}.all_to_all_out", Collective("all_to_all", after, "cp"), "cp")

    def _local_bytes(self, *tensors: str) -> float:
        """Bytes of activations with every position of a context rank."""
        return sum(self.shards.local(self.axes(name), "tensor") for name in tensors) * self.element

    def put_parts(self, ops: OpList) -> None:
        """Append shares of forward matmuls."""
        for name, share in self.cut.parts:
            kernel = self.kernel[name]
            assert isinstance(kernel.node, Einsum)
            whole = self.product(kernel.node, "forward")
            part = whole._replace(n=max(round(whole.n * share), 1))
            self._cast(kernel.node, part, ops, again=True)
            ops.compute(name, part, self.launches(kernel))

    def _cast(self, node: Product, product: object, ops: OpList, *, again: bool = False) -> None:
        """Put the casts to fp8 that come before a product, where they are kernels of their own."""
        delayed = self.options.casts.startswith(DELAYED)
        if not (self.options.casts and isinstance(product, Gemm | GroupedGemm)):
            return
        if product.dtype != self.options.dtype if isinstance(product, Gemm) else not delayed:
            return
        elements = operands(product)
        # Linears side by side have a scale each, and so a copy of what they read.
        elements["input"] *= node.linears if delayed and isinstance(node, Einsum) else 1
        suffix = "" if product.direction == "forward" else ".backward"
        for c in casts(self.options.casts, product.direction, again=again):
            ops.compute(f"{node.name}.cast{suffix}", MemoryWork(c.kernel, c.bytes * elements[c.tensor], 1, c.implementation))

    def _autocast(self, node: Product, ops: OpList, suffix: str = "") -> None:
        """Put casts of a product's operands to 16 bits under autocast, backward of their gradients to fp32."""
        plan = self.options.kernels
        if not plan.autocast or not node.weight:
            return
        count = node.linears if isinstance(node, Einsum) else 1
        read = cast_inputs(self.layer, node, plan) if plan.autocast == "own" else 0
        moved = 6.0 * (read * self.shards.local(self.axes(node.inputs[0]), self.layout(node)) + self.shards.weights(node))
        launches = read + count * (2 if node.bias else 1)
        ops.compute(f"{node.name}.autocast{suffix}", self._moving("cast", moved, launches), launches)

    def _dequantise(self, node: Product, ops: OpList) -> None:
        """Put the kernels that turn quantised frozen weights of a layer into 16 bits, one for each linear of a product."""
        moved = self.options.dequantised_bytes * self.shards.weights(node) if self.options.lora_rank else 0.0
        if moved and isinstance(node, Einsum) and node.weight and not node.wide:
            ops.compute(f"{node.name}.dequantise", self._moving("cast", moved, node.linears), node.linears)

    def _engine_cast(self, node: Product, ops: OpList, *, backward: bool) -> None:
        """Put TransformerEngine's casts before a product. Under sequence parallelism a rank casts its part, which it gathers."""
        made = self.options.engine_casts
        if made is None or not isinstance(node, Einsum) or made.skips(self.layer, node, backward=backward):
            return
        elements = self.shards.local(self.axes(node.outputs[0] if backward else node.inputs[0]))
        second, suffix = 0.0 if self.options.lora_rank else made.second, ".backward" if backward else ""
        each = 1 if made.together and second else self.local_groups(node)
        if made.scale:
            count = SCALE_KERNELS * each
            ops.compute(f"{node.name}.scale{suffix}", self._moving("amax", elements * made.scale, count), count)
        ops.compute(f"{node.name}.cast{suffix}", self._moving(QUANTIZE, elements * (made.once + second), each), each)

    # -- collectives ---------------------------------------------------------------------------------------------------

    @property
    def _reduce(self) -> str:
        return "reduce_scatter" if self.degrees.sequence_parallel else "all_reduce"

    def _share(self, stretch: Stretch) -> float:
        """Of a gather's bytes: what is cast before it, where all that reads it is narrow."""
        first = self.layer.nodes[stretch.first]
        wide = not isinstance(first, Einsum) or first.wide
        return 1.0 if wide else self.options.kernels.gather_share

    def _gathers(self, stretch: Stretch, only: frozenset[str] | None) -> bool:
        """Whether a forward gathers at the begin of `stretch`: always the first time, later where a node that reads it runs
        again, or where what was gathered is dropped."""
        if not self.degrees.sequence_parallel:
            return False
        if only is None:
            return True
        if self.options.kernels.library.saves_gathered_input and not self.options.recompute.full:
            return any(name in self.cut.dropped for name in stretch.gathered)
        return any(self._read(name, only) for name in stretch.gathered)

    def _read(self, tensor: str, only: frozenset[str] | None) -> bool:
        return only is None or any(node.name in only for node in self.layer.consumers.get(tensor, ()))

    def _gather(self, name: str, amount: float, ops: OpList, *, overlaps: bool = True, repeat: int = 1) -> None:
        """Gather what the next product reads: with chunked overlap the first chunk is exposed and the rest runs beside it."""
        if not (self.degrees.overlap_tp and self.options.kernels.overlapped_gathers and overlaps):
            ops.blocking(f"{name}.all_gather", Collective("all_gather", amount, "tp", repeat), "tp")
            return
        first = amount / self.degrees.tp
        ops.blocking(f"{name}.all_gather.exposed", Collective("all_gather", first, "tp"), "tp")
        ops.beside(f"{name}.all_gather.rest", Collective("all_gather", amount - first, "tp"), "tp")

    def _in_pieces(self, node: Product, work: Gemm | GroupedGemm) -> Gemm | GroupedGemm:
        """A product as chunked overlap runs it (TransformerEngine's initialize_ub): a piece for each tensor rank whose part of the
        input, or of the output's gradient, arrives; quarters of a 16-bit output beside their reduction on 16 SMs."""
        if not self.degrees.overlap_tp or not isinstance(work, Gemm) or not self.options.kernels.overlapped_gathers:
            return work
        enters, leaves = (any(self.layer.nodes[at].name == node.name for at in ends) for ends in (self.entry, self.exit))
        forward = work.direction == "forward"
        if forward and leaves and work.dtype in ("bf16", "fp16"):
            return work._replace(pieces=4, held_sms=16)
        return work._replace(pieces=self.degrees.tp) if leaves or (forward and enters) else work

    def _laid_out(self, name: str, amount: float, ops: OpList) -> None:
        """Copy what was gathered, or is to be scattered, between rank by rank and sequence by sequence, where these differ."""
        chunked = self.degrees.overlap_tp and self.options.kernels.overlapped_gathers
        copies = self.options.kernels.library.gather_copies
        if copies and self.degrees.sequence_parallel and not chunked:
            ops.compute(name, self._moving("copy", 2.0 * copies * amount))

    def _early(self, name: str, amount: float, ops: OpList) -> None:
        """All but the last chunk of a product's output is reduced beside it."""
        rest = amount - amount / self.degrees.tp
        ops.beside(f"{name}.{self._reduce}.rest", Collective(self._reduce, rest, "tp"), "tp")

    def _reduced(self, name: str, amount: float, ops: OpList, *, chunked: bool) -> None:
        """Sum the partial outputs of a product over the tensor ranks; in chunks the last one is exposed."""
        if chunked:
            ops.blocking(f"{name}.{self._reduce}.exposed", Collective(self._reduce, amount / self.degrees.tp, "tp"), "tp")
        else:
            ops.blocking(f"{name}.{self._reduce}", Collective(self._reduce, amount, "tp"), "tp")

    def _channels(self, node: Node, ops: OpList, *, backward: bool) -> None:
        """All channels for a convolution that needs them: a gather, backward the reduction of their gradients."""
        if self.degrees.tp == 1 or not (name := self.shards.layouts.whole_channels(node)):
            return
        amount = self.layer.elements(name) * self.element / self.degrees.cp
        collective = "reduce_scatter" if backward else "all_gather"
        ops.blocking(f"{name}.{collective}", Collective(collective, amount, "tp"), "tp")

    def _exchange(self, node: Permute, ops: OpList, *, backward: bool) -> None:
        """Rows to their experts or back; the gradient of the one has the way of the other."""
        moe = self.options.moe
        assert moe is not None
        combine, element = node.back is not backward, self.element
        if not (combine or backward or element > 2.0):
            element = self.options.dispatch_bytes
        name = ("moe_combine" if node.back else "moe_dispatch") + (".backward" if backward else "")
        rows = self.axes(self.shards.layouts.exchanged(node))
        elements = self.shards.local(rows[:1], "expert") / (self.degrees.etp * self.options.spare_rows)
        width = self.layer.size(rows[-1])
        work = ExpertExchange(combine, elements / moe.num_experts_per_tok, width, moe, element, self.degrees.dispatcher)
        moved, sorts = element * elements * self.degrees.etp * width, expert.sorts(self.options, node.back, backward)
        ordering = [self._moving(kind, moved * passes) for kind, passes in sorts]
        expert.exchange(name, ops, self.degrees, work, ordering, self.options.load_factor)

    # -- backward ------------------------------------------------------------------------------------------------------

    def put_backward(self, ops: OpList, weight_ops: OpList | None, span: range | None = None) -> None:
        """Append the backward, or that of a `span` of positions; with `weight_ops` the weight gradients go there instead (zero
        bubble)."""
        for position in reversed(span or range(len(self.layer.nodes))):
            node = self.layer.nodes[position]
            if isinstance(node, Permute) and not node.back:
                self._exchange(node, ops, backward=True)
            leaving = self.exit.get(position)
            if leaving is not None and self.degrees.sequence_parallel:
                share = self.options.kernels.gather_share if isinstance(node, Einsum) else 1.0
                amount = share * self._local_bytes(leaving.reduced)
                self._gather(f"{leaving.name}_out", amount, ops, overlaps=isinstance(node, Einsum))
                self._laid_out(f"{leaving.name}_out.layout.backward", amount, ops)
            kernel = self.kernel.get(node.name)
            if kernel is not None:
                self._gradients(kernel, self.entry.get(position), ops, weight_ops)
            if isinstance(node, Permute) and node.back:
                self._exchange(node, ops, backward=True)
            self._channels(node, ops, backward=True)

    def _gradients(self, kernel: Kernel, entry: Stretch | None, ops: OpList, weight_ops: OpList | None) -> None:
        node = kernel.node
        if isinstance(node, Attention):
            core = self.attention(node, backward=True)
            context.attention(f"{node.name}.backward", core, node.mask, self.degrees, self.attention_launches(kernel, core), ops)
            if copies := head_copies(self, node, backward=True):
                ops.compute(f"{node.name}.repeat.backward", copies, copies.launches)
        elif isinstance(node, Scan | Custom):
            self._alone(kernel, ops, backward=True)
        elif product := product_of(kernel):
            self._product_backward(kernel, product, entry, ops, weight_ops)
        else:
            self._elementary(kernel, ops, backward=True)

    def _product_backward(
        self, kernel: Kernel, node: Einsum | Convolution, entry: Stretch | None, ops: OpList, weight_ops: OpList | None
    ) -> None:
        self._engine_cast(node, ops, backward=True)
        regathered = reduced = None
        again = self._trained(node) and not self.options.kernels.library.saves_gathered_input
        if entry is not None and self.degrees.sequence_parallel and again:
            # For the weight's gradient: a frozen one has none (Megatron-LM's LinearWithFrozenWeight), adapters keep what they read.
            work = Collective("all_gather", self._local_bytes(*entry.gathered), "tp", self._columns(node))
            regathered = ops.start(f"{entry.name}_in.regather", work, "tp")
        if self.options.kernels.loss.kind == "tiled" and self.is_logits(node):
            ops.compute(f"{node.name}.again", self.product(node, "forward"), self.launches(kernel))
        if needs_input_gradient(self.layer, node):
            product = self._in_pieces(node, self.product(node, "dgrad"))
            self._cast(node, product, ops)
            self._pad(node, product, ops)
            self._dequantise(node, ops)
            ops.compute(f"{node.name}.dgrad", product, self.launches(kernel))
            if sums := input_gradient_sums(self, node):
                ops.compute(f"{node.name}.sum.backward", sums, sums.launches)
            if entry is not None:
                name = f"{entry.name}_in.{self._reduce}"
                self._laid_out(f"{entry.name}_in.layout.backward", self._columns(node) * self._local_bytes(*entry.gathered), ops)
                for number in range(self._columns(node)):
                    name += ".next" if number else ""
                    reduced = ops.start(name, Collective(self._reduce, self._local_bytes(*entry.gathered), "tp"), "tp")
                    if not self.degrees.async_tp:
                        ops.wait(reduced)
        target = ops if weight_ops is None else weight_ops
        if regathered is not None and entry is not None:
            ops.wait(regathered)
            self._laid_out(f"{entry.name}_in.regather.layout", self._columns(node) * self._local_bytes(*entry.gathered), ops)
        if self._trained(node):
            product = self.product(node, "wgrad")
            self._cast(node, product, target)
            self._pad(node, product, target)
            target.compute(f"{node.name}.wgrad", product, self.launches(kernel))
            if node.bias:  # its gradient: the output's, summed over the rows
                summed = self.shards.local(self.axes(node.outputs[0]), self.layout(node))
                target.compute(f"{node.name}.bias.backward", self._moving("composite", self.element * summed))
            self._autocast(node, target, ".backward")
        else:
            self._lora(node, target, backward=True)
        if reduced is not None:
            ops.wait(reduced)

    def _lora(self, node: Product, ops: OpList, *, backward: bool) -> None:
        """What the low-rank pairs of a product add to a pass."""
        for suffix, work, launches in added(self, node, backward=backward):
            ops.compute(f"{node.name}.lora{suffix}", work, launches)

    def _columns(self, node: Node) -> int:
        """Linears that a product stands for which meet the other tensor ranks one by one."""
        library = self.options.kernels.library
        if not isinstance(node, Einsum) or node.module not in library.columns_apart:
            return 1
        return node.linears if library.columns_gather or not self.degrees.sequence_parallel else 1

    def _trained(self, node: Einsum | Convolution) -> bool:
        """Whether the second operand has a gradient: a trained weight, or another activation."""
        if not node.weight:
            return True
        return not self.options.lora_rank and needs_weight_gradient(self.layer, node)

    def put_copies(self, name: str, bytes_each: float, ops: OpList) -> None:
        """Move the weights or gradients of this layer between tensors and the buffer of a collective, one kernel for all."""
        if not bytes_each:
            return
        trained = name == "reduce.copy.backward" and self.options.lora_rank
        nodes = [node for node in self.layer.nodes if not (self.options.experts_apart and self.layout(node) == "expert")]
        weights = sum(trained_weights(self, node) if trained else self.shards.weights(node) for node in nodes)
        if weights:
            ops.compute(name, self._moving("copy", weights * bytes_each), 2)

    def put_accumulation(self, ops: OpList) -> None:
        """Add the gradients of all weights to their buffer, one kernel each, where no matmul does."""
        if not self.options.accumulation_bytes or self.options.lora_rank:
            return
        weights = [amount for node in self.layer.nodes if (amount := self.shards.weights(node))]
        if weights:
            work = self._moving("residual", sum(weights) * self.options.accumulation_bytes, len(weights))
            ops.compute("accumulation.wgrad", work, len(weights))

    def put_again(self, ops: OpList) -> None:
        """What comes before the backward's own ops: weights unpacked, activations recomputed."""
        self.put_copies("gather.copy.backward", self.options.gather_copy_bytes, ops)
        again = frozenset(self.cut.repeated)
        if again:
            self.put_forward(ops, None if len(again) == len(self.layer.nodes) else again)
        self.put_parts(ops)

    def put_end(self, ops: OpList) -> None:
        """What comes after the weight gradients: added up, packed."""
        self.put_accumulation(ops)
        self.put_copies("reduce.copy.backward", self.options.reduce_copy_bytes, ops)
