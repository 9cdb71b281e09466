"""Liveness: every tensor of one layer on one rank, in the order in which the host asks for it and gives it back.

The forward asks for what each kernel keeps and for its output; the backward asks for the gradients of each node's inputs (and,
where weight gradients are not accumulated in place, of its weight) and gives back what was kept once the first node that kept it
is through. Sizes are those of local_layer.py, so the sums agree with its `saved`; the order decides what the allocator can reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simpar.graph.attention_kernels import score_parts
from simpar.graph.differentiate import needs_input_gradient
from simpar.graph.kernel_types import HALF, Kernel
from simpar.graph.kernels import product_of
from simpar.graph.shard import Stretch
from simpar.graph.types import Attention, Convolution, Einsum, Elementwise, Layer, Loss, Norm, Permute, Select
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.split_options import SplitOptions

Step = tuple[str, int]
"""(tensor, bytes asked for or 0: given back)."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Tensors of one layer.

    Attributes:
        forward: steps; what is not given back stays saved.
        backward: steps with the recomputation first; gives back all that was saved, but what `late` gives back.
        again: how many of these are the recomputation's.
        late: steps of the weight gradient where it is apart from the input gradient.
        weights: (elements, whether it is an expert's) of each node's weights.
        gathered: elements of each node's weights that full sharding gathers.
        collective: tensors that a tensor-parallel collective reads: partial sums of outputs and of gradients of inputs.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    late: tuple[Step, ...]
    weights: tuple[tuple[int, bool], ...]
    gathered: tuple[int, ...]
    collective: frozenset[str] = frozenset()
    again: int = 0


def lifetimes(local: LocalBlock, *, split_backward: bool = False) -> Lifetimes:
    """Tensors of `local` over a forward and a backward.

    Args:
        split_backward: the weight gradient runs later; `late` keeps what it needs.
    """
    if local.options.frozen:
        return Lifetimes((), (), (), (), ())  # it leaves nothing to a backward, and its weights rest apart from trained ones
    return _lifetimes(local.layer, local.options, split_backward)


@lru_cache(maxsize=4096)
def _lifetimes(layer: Layer, options: SplitOptions, split_backward: bool) -> Lifetimes:
    return _Order(LocalLayer(layer, options)).build(split_backward=split_backward)


class _Order:
    def __init__(self, local: LocalLayer) -> None:
        self.local, self.plan = local, local.options.kernels
        self.entry: dict[str, Stretch] = {local.layer.nodes[s.first].name: s for s in local.shards.layouts.stretches if s.gathered}
        ends = [local.layer.nodes[s.last] for s in local.shards.layouts.stretches if s.reduced]
        self.exit = {node.name for node in ends if isinstance(node, Einsum)}
        self.tensors = self._pieces()
        self.loss = next((k.node for k in local.kernels if isinstance(k.node, Loss) and k.node.kind == "vocabulary"), None)
        self.logits = self.loss.inputs[0] if self.loss else ""
        self.kept = self._kept()
        self.steps: list[Step] = []
        self.alive: dict[str, int] = {}

    def _pieces(self) -> dict[str, tuple[int, ...]]:
        """Kept tensors by name as the tensors they consist of."""
        found: dict[str, tuple[int, ...]] = {}
        for name, amount in self.local.tensors().items():
            found[name] = (int(amount),)
            if name.endswith("/softmax"):
                parts = score_parts(self.plan)
                found[name] = tuple(int(amount * part / sum(parts)) for part in parts)
        for name in self.local.cut.entries:
            found.setdefault(name, (int(self.local.entry_bytes(name)),))
        for kernel in self.local.kernels:
            node = kernel.node
            if isinstance(node, Loss) and node.kind == "vocabulary":
                # The logits; what the loss makes of them comes and goes with it.
                logits = self.plan.element * self.local.shards.local(self.local.axes(node.inputs[0]))
                found[node.inputs[0]] = (int(logits * self.plan.logits_gathered / self.plan.loss.chunks),)
        return found

    def _kept(self) -> dict[str, int]:
        """What stays after the forward, by tensor."""
        saved, _ = self.local.saved()
        sizes: dict[str, int] = {}
        for name, amount in saved:
            if name == self.logits:
                sizes |= self._kept_logits()
                continue
            parts = self.tensors.get(name, (int(amount),))
            total = sum(parts) or 1
            for index, part in enumerate(parts):
                sizes[f"{name}#{index}"] = round(part * amount / total)
        return sizes

    def _kept_logits(self) -> dict[str, int]:
        """What the loss leaves for its backward."""
        logits = f"{self.logits}#0"
        if self.plan.loss.fp32_copies <= 0:
            return {logits: self.tensors[self.logits][0]}
        element, copies, kept = self._loss_parts()
        found = {"loss.saved": int(4 * element)} if copies else {}
        return found | ({logits: self.tensors[self.logits][0]} if kept else {})

    def build(self, *, split_backward: bool) -> Lifetimes:
        """Forward and backward steps."""
        local = self.local
        own = [node for node in local.layer.nodes if node.name not in local.options.borrowed]
        weights = tuple((int(local.shards.weights(n)), local.layout(n) == "expert") for n in own)
        self._ask_kept(*(name for name in local.cut.entries if name in local.layer.inputs))
        self._forward(local.kernels, frozenset(n.name for n in local.layer.nodes))
        for name in list(self.alive):
            wanted = self.kept.get(name, 0)
            if not wanted:
                self._free(name)
            elif wanted < self.alive[name]:
                # Part of it is kept: the rest was a tensor of its own.
                self._free(name)
                self._ask(name, wanted)
        forward, self.steps = tuple(self.steps), []
        if local.cut.repeated:
            self._forward(local.kernels, frozenset(local.cut.repeated))
        again = len(self.steps)
        late = self._backward(split_backward=split_backward)
        weights = tuple(w for w in weights if w[0])
        gathered = tuple(w for w, expert in weights if not (expert and local.options.experts_apart))
        return Lifetimes(forward, tuple(self.steps), tuple(late), weights, gathered, self._collective(), again)

    def _collective(self) -> frozenset[str]:
        """Names of what tensor-parallel collectives read."""
        if self.local.degrees.tp == 1:
            return frozenset()
        return frozenset({f"{name}.out" for name in self.exit} | {f"{name}.gradient" for name in self.entry})

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _ask(self, name: str, size: float) -> None:
        amount = int(size)
        if amount > 0 and name not in self.alive:
            self.alive[name] = amount
            self.steps.append((name, amount))

    def _free(self, name: str) -> None:
        if name in self.alive:
            del self.alive[name]
            self.steps.append((name, 0))

    def _ask_kept(self, *names: str) -> None:
        for name in names:
            for index, part in enumerate(self.tensors.get(name, ())):
                self._ask(f"{name}#{index}", part)

    def _width(self, kernel: Kernel) -> float:
        """Bytes of a node's output."""
        node, local = kernel.node, self.local
        if isinstance(node, Attention):
            return float(sum(self.tensors.get(node.outputs[0], (0,))))
        if isinstance(node, Einsum | Convolution) or not kernel.forward:
            return local.shards.local(local.axes(node.outputs[0]), local.layout(node)) * self.plan.element
        return local.shards.local(kernel.forward[-1][0], local.layout(node)) * self.plan.element

    def _gathered(self, stretch: Stretch) -> float:
        """Bytes of gathered activations beside their shards, 0 without sequence parallelism."""
        degrees = self.local.degrees
        if degrees.tp == 1 or not degrees.sequence_parallel or self.plan.library.saves_gathered_input:
            return 0.0
        return sum(self.local.shards.local(self.local.axes(name), "tensor") for name in stretch.gathered) * self.plan.element

    def _forward(self, kernels: tuple[Kernel, ...], only: frozenset[str]) -> None:
        """Nodes named in `only`: their kept tensors, outputs that nothing keeps, gathered inputs."""
        gathered = output = ""
        for position, kernel in enumerate(kernels):
            node = kernel.node
            if node.name in self.entry and self._gathered(self.entry[node.name]):
                gathered = f"{self.entry[node.name].name}_in.gathered"
                self._ask(gathered, self._gathered(self.entry[node.name]))
            if node.name not in only:
                continue
            self._ask_kept(*(t.name for t in kernel.keeps))
            after = kernels[position + 1] if position + 1 < len(kernels) else None
            before, output = output, ""
            if node is self.loss:
                self._loss_forward()
            elif stays := [name for name in node.outputs if name in self.local.cut.entries]:
                # What runs again starts from it, although no kernel keeps it.
                self._ask_kept(*stays)
            elif not (kept := self._kept_input(after)) or f"{kept}#0" in self.alive:
                output = f"{node.name}.out"
                self._ask(output, self._width(kernel))
            else:
                self._ask_kept(kept)
            if before:
                self._free(before)
            if gathered and isinstance(node, Einsum):
                self._free(gathered)
                gathered = ""
        for name in (gathered, output):
            if name:
                self._free(name)

    def _kept_input(self, after: Kernel | None) -> str:
        """What stays of a node's input for the kernel behind it; "" = nothing."""
        if after is None or not after.keeps:
            return ""
        first = after.keeps[0].name
        if isinstance(after.node, Norm) and after.node.inputs and first not in after.node.inputs:
            return next((name for name in after.node.inputs[:1] if name in self.tensors), "")
        return first

    def _loss_parts(self) -> tuple[float, int, bool]:
        """(elements, full fp32 tensors in the backward, whether the logits live on) of the unfused loss.

        Of the bytes per logit at the peak every full 4 are an fp32 tensor: the log-softmax, its gradient and the logits'. A
        compiled loss (4 bytes or fewer) stores no fp32: the 16-bit logits and their gradient.
        """
        element = float(self.tensors[self.logits][0]) / self.plan.element
        per_logit = self.plan.loss.logit_bytes(HALF) - HALF * self.plan.loss.returned
        return element, int(per_logit // 4) if per_logit > 4.0 else 0, self.plan.loss.logits_live

    def _loss_forward(self) -> None:
        logits = f"{self.logits}#0"
        if self.plan.loss.fp32_copies <= 0 or logits not in self.alive:
            return
        element, copies, kept = self._loss_parts()
        if not copies:
            return
        if copies > 1:
            self._ask("loss.cast", 4 * element)
        self._ask("loss.saved", 4 * element)
        self._free("loss.cast")
        if not kept:
            self._free(logits)

    def _loss_backward(self) -> str:
        """Gradients of the loss; returns the name of the logits' gradient."""
        logits = f"{self.logits}#0"
        if self.plan.loss.fp32_copies <= 0:
            return logits
        element, copies, _ = self._loss_parts()
        for index in range(copies - 1):
            self._ask(f"loss.gradient#{index}", 4 * element)
        self._free("loss.saved")
        if self.plan.loss.returned:
            self._ask("loss.zeros", self.plan.element * element)
        self._ask("loss.gradient", self.plan.element * element)
        self._free("loss.zeros")
        for index in range(copies - 1):
            self._free(f"loss.gradient#{index}")
        self._free(logits)
        return "loss.gradient"

    def _backward(self, *, split_backward: bool) -> list[Step]:
        """Steps through the nodes in reverse; returns those of a later weight gradient."""
        kernels = self.local.kernels
        keeper: dict[str, str] = {}
        for kernel in reversed(kernels):
            for tensor in kernel.keeps:
                for index in range(len(self.tensors.get(tensor.name, ()))):
                    keeper[f"{tensor.name}#{index}"] = kernel.node.name
        mine: dict[str, list[str]] = {}
        for name, owner in keeper.items():
            mine.setdefault(owner, []).append(name)
        for name, size in self.kept.items():
            self.alive.setdefault(name, size)
        late: list[Step] = []
        gradient = "gradient.out"
        self._ask(gradient, self._gradient_of_output(kernels[-1]))
        for kernel in reversed(kernels):
            if kernel.node is self.loss:
                self._free(gradient)
                gradient = self._loss_backward()
                continue
            gradient = self._node_backward(kernel, gradient, late if split_backward else None)
            product = product_of(kernel)
            for name in mine.get(kernel.node.name, ()):
                if split_backward and product and kernel.keeps and name.startswith(f"{kernel.keeps[0].name}#"):
                    late.append((name, 0))
                    self.alive.pop(name, None)
                else:
                    self._free(name)
        self._free(gradient)
        for name in list(self.alive):
            self._free(name)
        return late

    def _gradient_of_output(self, last: Kernel) -> float:
        """Bytes of the gradient with which a backward begins; of a loss that of its logits' input."""
        if last.node is self.loss:
            return sum(self.local.shards.local(self.local.axes(name)) for name in self.local.layer.inputs) * self.plan.element
        return self._width(last)

    def _node_backward(self, kernel: Kernel, gradient: str, late: list[Step] | None) -> str:
        """Gradients of one node; returns the name of its input's gradient."""
        node, local = kernel.node, self.local
        scores = self._score_gradients(kernel)
        for index, size in enumerate(scores):
            self._ask(f"{node.name}.scores#{index}", size)
        mine = f"{node.name}.gradient"
        first = kernel.keeps[0].name if kernel.keeps else ""
        size = float(sum(self.tensors.get(first, ()))) if first else 0.0
        product = product_of(kernel)
        passes = (
            isinstance(node, Norm | Select)
            or (isinstance(node, Permute) and not node.back)
            or (isinstance(node, Elementwise) and kernel.price in ("residual", "rope", "composite"))
        )
        if isinstance(node, Attention):
            size = float(sum(sum(self.tensors.get(name, (local.entry_bytes(name),))) for name in node.inputs))
        elif isinstance(node, Einsum):
            size = local.shards.local(local.axes(node.inputs[0]), local.layout(node)) * self.plan.element
        elif passes or not size:
            size = self._width(kernel)
        self._ask(mine, size if needs_input_gradient(local.layer, node) else 0.0)
        if product and late is None:
            own = [f"{node.name}.weight", f"{node.name}.sum"]
            for name in own[: min(self.plan.loss.pieces, 2) if local.is_logits(node) else 1]:
                self._ask(name, local.weight_gradient(product))
            for name in own:
                self._free(name)
        for index in range(len(scores)):
            self._free(f"{node.name}.scores#{index}")
        if late is not None and product and gradient in self.alive:
            late.append((gradient, 0))
            self.alive.pop(gradient)
        else:
            self._free(gradient)
        return mine

    def _score_gradients(self, kernel: Kernel) -> list[float]:
        """Gradients of a stored score matrix before and after dropout, and the buffer of the score matmul."""
        scores = self.local.scores_bytes(kernel)
        return [scores] * (3 if self.plan.dropout else 2) if scores else []
