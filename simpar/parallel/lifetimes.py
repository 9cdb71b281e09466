"""Every tensor of one block on one rank, in the order in which the host asks for it and gives it back.

The forward asks for what each op saves and for its output; the backward asks for the gradients of each op's inputs (and, where
weight gradients are not accumulated in place, of its weight) and gives back what was saved once the first op that saved it is
through. Sizes are those of `split.py`, so the sums agree with its `saved`; the order decides what the allocator can reuse.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from simpar.parallel.block_memory import BlockMemory
from simpar.parallel.local_shapes import SplitOptions
from simpar.parallel.recompute import repeated
from simpar.parallel.split import LocalBlock
from simpar.workload.ops import Block, Op, Region, Seam

Step = tuple[str, int]
"""(tensor, bytes asked for or 0: given back)."""
_ENTRY = frozenset({"attention_in", "mlp_in", "head_in"})
_EXIT = frozenset({"attention_out", "mlp_out"})


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Tensors of one block.

    Attributes:
        forward: steps; what is not given back stays saved.
        backward: steps with the recomputation first; gives back all that was saved, but what `late` gives back.
        late: steps of the weight gradient where it is apart from the input gradient.
        weights: (elements, whether it is an expert's) of each op's weights.
        collective: tensors that a tensor-parallel collective reads: partial sums of outputs and of gradients of inputs.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    late: tuple[Step, ...]
    weights: tuple[tuple[int, bool], ...]
    collective: frozenset[str] = frozenset()


def lifetimes(local: LocalBlock, *, split_backward: bool = False) -> Lifetimes:
    """Tensors of `local` over a forward and a backward.

    Args:
        split_backward: the weight gradient runs later; `late` keeps what it needs.
    """
    return _lifetimes(local.block, local.options, split_backward)


@lru_cache(maxsize=4096)
def _lifetimes(block: Block, options: SplitOptions, split_backward: bool) -> Lifetimes:
    return _Order(BlockMemory(block, options)).build(split_backward=split_backward)


class _Order:
    def __init__(self, splitter: BlockMemory) -> None:
        self.splitter, self.block = splitter, splitter.block
        self.tensors = _pieces(splitter)
        self.kept = self._kept()
        self.steps: list[Step] = []
        self.alive: dict[str, int] = {}

    def _kept(self) -> dict[str, int]:
        """What stays after the forward, by tensor."""
        saved, _ = self.splitter.saved()
        sizes: dict[str, int] = {}
        for name, amount in saved:
            if name == "head/logits":
                sizes |= self._kept_logits()
                continue
            parts = self.tensors.get(name, (int(amount),))
            total = sum(parts) or 1
            for index, part in enumerate(parts):
                sizes[f"{name}#{index}"] = round(part * amount / total)
        return sizes

    def _kept_logits(self) -> dict[str, int]:
        """What the loss leaves for its backward."""
        if self.splitter.style.logits_fp32_copies <= 0:
            return {"head/logits#0": self.tensors["head/logits"][0]}
        element, copies, kept = self._loss_parts()
        found = {"loss.saved": int(4 * element)} if copies else {}
        return found | ({"head/logits#0": self.tensors["head/logits"][0]} if kept else {})

    def build(self, *, split_backward: bool) -> Lifetimes:
        """Forward and backward steps."""
        recompute = self.splitter.options.recompute
        ops = list(self.block.ops)
        weights = tuple((int(self.splitter.weights(op)), op.region == "expert") for op in ops)
        self._forward(frozenset(op.name for op in ops))
        for name in list(self.alive):
            wanted = self.kept.get(name, 0)
            if not wanted:
                self._free(name)
            elif wanted < self.alive[name]:
                # Part of it is kept: the rest was a tensor of its own.
                self._free(name)
                self._ask(name, wanted)
        forward, self.steps = tuple(self.steps), []
        again = repeated(recompute, self.block)
        if again:
            self._forward(frozenset(again))
        late = self._backward(split_backward=split_backward)
        return Lifetimes(forward, tuple(self.steps), tuple(late), tuple(w for w in weights if w[0]), self._collective())

    def _collective(self) -> frozenset[str]:
        """Names of what tensor-parallel collectives read."""
        items, found = self.block.items, set()
        if self.splitter.degrees.tp == 1:
            return frozenset()
        for before, after in itertools.pairwise(items):
            if isinstance(after, Seam) and after.name in _EXIT and isinstance(before, Op):
                found.add(f"{before.name}.out")
            if isinstance(before, Seam) and before.name in _ENTRY and isinstance(after, Op):
                found.add(f"{after.name}.gradient")
        return frozenset(found)

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

    def _ask_saved(self, op: Op) -> None:
        for tensor in op.saves:
            for index, part in enumerate(self.tensors[tensor.name]):
                self._ask(f"{tensor.name}#{index}", part)

    def _width(self, op: Op) -> float:
        """Bytes of an op's output (16-bit), residual stream where nothing says otherwise."""
        if op.equation:
            return self.splitter.local(op.output_axes, op.region) * 2.0
        if op.type.value == "attention":
            return float(sum(self.tensors.get("attention/out", (0,))))
        return self._bytes(op.forward_bytes[-1][0] if op.forward_bytes else "bsd", op.region)

    def _bytes(self, axes: str, region: Region) -> float:
        """16-bit tensor of these axes, 0 where the block does not know them."""
        return self.splitter.local(axes, region) * 2.0 if set(axes) <= set(self.splitter.size) else 0.0

    def _gathered(self, seam: Seam) -> float:
        """Bytes of a gathered activation beside its shard, 0 without sequence parallelism."""
        degrees = self.splitter.degrees
        if degrees.tp == 1 or not degrees.sequence_parallel or seam.name not in _ENTRY:
            return 0.0
        if self.splitter.style.saves_gathered_input:
            return 0.0
        return sum(self.splitter.local(axes, "tensor") for axes in seam.axes) * 2.0

    def _forward(self, only: frozenset[str]) -> None:
        """Ops named in `only`: their saved tensors, outputs that nothing saves, gathered inputs."""
        ops = self.block.ops
        following = {op.name: ops[i + 1] if i + 1 < len(ops) else None for i, op in enumerate(ops)}
        gathered = output = ""
        for item in self.block.items:
            if isinstance(item, Seam):
                if self._gathered(item):
                    gathered = f"{item.name}.gathered"
                    self._ask(gathered, self._gathered(item))
                continue
            if item.name not in only:
                continue
            self._ask_saved(item)
            after = following[item.name]
            before, output = output, ""
            if item.name == "head/loss":
                self._loss_forward()
            if item.name == "head/loss":
                pass  # one number per token
            elif after is None or not after.saves or f"{after.saves[0].name}#0" in self.alive:
                output = f"{item.name}.out"
                self._ask(output, self._width(item))
            else:
                self._ask_saved_input(after)
            if before:
                self._free(before)
            if gathered and item.equation:
                self._free(gathered)
                gathered = ""
        for name in (gathered, output):
            if name:
                self._free(name)

    def _loss_parts(self) -> tuple[float, int, bool]:
        """(elements, full fp32 tensors in the backward, whether the 16-bit logits live on) of the unfused loss.

        Of the bytes per logit at the peak every full 4 are an fp32 tensor: the log-softmax, its gradient and the logits'. A
        compiled loss (4 bytes or fewer) stores no fp32: the 16-bit logits and their gradient.
        """
        style = self.splitter.style
        element = float(self.tensors["head/logits"][0]) / 2.0
        per_logit = 2.0 + 4.0 * style.logits_fp32_copies
        return element, int(per_logit // 4) if per_logit > 4.0 else 0, per_logit <= 4.0 or per_logit % 4 >= 2.0

    def _loss_forward(self) -> None:
        if self.splitter.style.logits_fp32_copies <= 0 or "head/logits#0" not in self.alive:
            return
        element, copies, kept = self._loss_parts()
        if not copies:
            return
        if copies > 1:
            self._ask("loss.cast", 4 * element)
        self._ask("loss.saved", 4 * element)
        self._free("loss.cast")
        if not kept:
            self._free("head/logits#0")

    def _loss_backward(self) -> str:
        """Gradients of the loss; returns the name of the logits' gradient."""
        if self.splitter.style.logits_fp32_copies <= 0:
            return "head/logits#0"
        element, copies, _ = self._loss_parts()
        for index in range(copies - 1):
            self._ask(f"loss.gradient#{index}", 4 * element)
        self._free("loss.saved")
        self._ask("loss.gradient", 2 * element)
        for index in range(copies - 1):
            self._free(f"loss.gradient#{index}")
        self._free("head/logits#0")
        return "loss.gradient"

    def _ask_saved_input(self, op: Op) -> None:
        first = op.saves[0]
        for index, part in enumerate(self.tensors[first.name]):
            self._ask(f"{first.name}#{index}", part)

    def _backward(self, *, split_backward: bool) -> list[Step]:
        """Steps through the ops in reverse; returns those of a later weight gradient."""
        ops = list(self.block.ops)
        saver: dict[str, Op] = {}
        for op in reversed(ops):
            for tensor in op.saves:
                for index in range(len(self.tensors[tensor.name])):
                    saver[f"{tensor.name}#{index}"] = op
        mine: dict[str, list[str]] = {}
        for name, op in saver.items():
            mine.setdefault(op.name, []).append(name)
        for name, size in self.kept.items():
            self.alive.setdefault(name, size)
        late: list[Step] = []
        gradient = "gradient.out"
        last = ops[-1]
        self._ask(gradient, self._bytes("bsd", "residual") if last.name == "head/loss" else self._width(last))
        for op in reversed(ops):
            if op.name == "head/loss":
                self._free(gradient)
                gradient = self._loss_backward()
                continue
            gradient = self._op_backward(op, gradient, late if split_backward else None)
            for name in mine.get(op.name, ()):
                if split_backward and op.equation and op.saves and name.startswith(f"{op.saves[0].name}#"):
                    late.append((name, 0))
                    self.alive.pop(name, None)
                else:
                    self._free(name)
        self._free(gradient)
        for name in list(self.alive):
            self._free(name)
        return late

    def _op_backward(self, op: Op, gradient: str, late: list[Step] | None) -> str:
        """Gradients of one op; returns the name of its input's gradient."""
        scores = self._score_gradients(op)
        for index, size in enumerate(scores):
            self._ask(f"{op.name}.scores#{index}", size)
        mine = f"{op.name}.gradient"
        first = op.saves[0].name if op.saves else ""
        size = float(sum(self.tensors[first])) if first else 0.0
        if op.type.value == "attention":
            size = float(sum(sum(self.tensors[t.name]) for t in op.saves if t.name in _QKV))
        elif op.kernel in ("norm", "residual", "rope", "cross_entropy") or not size:
            size = self._width(op)
        elif op.equation:
            size = self.splitter.local(op.input_axes, op.region) * 2.0
        self._ask(mine, size if op.needs_input_gradient else 0.0)
        if op.equation and late is None:
            self._ask(f"{op.name}.weight", self.splitter.weight_gradient(op))
            self._free(f"{op.name}.weight")
        for index in range(len(scores)):
            self._free(f"{op.name}.scores#{index}")
        if late is not None and op.equation and gradient in self.alive:
            late.append((gradient, 0))
            self.alive.pop(gradient)
        else:
            self._free(gradient)
        return mine

    def _score_gradients(self, op: Op) -> list[float]:
        """Gradients of a stored score matrix before and after dropout, and the buffer of the score matmul."""
        if not any(t.name == "attention/softmax" for t in op.saves):
            return []
        scores = self.splitter.local("bns", "tensor") * self.splitter.size["t"] * 2.0
        return [scores] * (3 if self.splitter.style.dropout else 2)


_QKV = frozenset({"attention/qkv_out", "attention/q", "attention/k", "attention/v"})


def _pieces(splitter: BlockMemory) -> dict[str, tuple[int, ...]]:
    """Saved tensors by name as the tensors they consist of."""
    found: dict[str, tuple[int, ...]] = {}
    for name, amount in splitter.tensors().items():
        if name == "head/logits":
            # The 16-bit logits; what the loss makes of them comes and goes with it.
            found[name] = (int(2 * splitter.local("bsv", "tensor") * splitter.style.logits_gathered / splitter.style.loss_chunks),)
        elif name == "attention/softmax" and splitter.style.dropout:
            found[name] = (int(amount * 2 / 5), int(amount * 2 / 5), int(amount / 5))
        else:
            found[name] = (int(amount),)
    return found


__all__ = ["Lifetimes", "Step", "lifetimes"]
