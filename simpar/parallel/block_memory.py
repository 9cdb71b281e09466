"""What one block on one rank holds in memory: saved tensors, what its backward adds, what a later weight gradient keeps."""

from __future__ import annotations

from simpar.parallel.local_shapes import OUTSIDE_TE, LocalShapes
from simpar.parallel.recompute import dropped
from simpar.parallel.work import Gemm, GroupedGemm
from simpar.workload.ops import Op, OpType, Region


class BlockMemory(LocalShapes):
    """Bytes by tensor of one block on one rank."""

    _tensors: dict[str, float] | None = None

    def tensors(self) -> dict[str, float]:
        """Saved tensors by name before recomputation, bytes on this rank."""
        if self._tensors is not None:
            return dict(self._tensors)
        found: dict[str, float] = {}
        stored = dict(self.style.stored)
        for op in self.block.ops:
            for t in op.saves:
                if t.name == "attention/softmax":
                    continue_axes = t.axes.replace("t", "")
                    amount = self.local(continue_axes, t.region) * self.size["t"] * t.element_bytes
                else:
                    amount = self.local(t.axes, t.region) * stored.get(t.name, t.element_bytes)
                found.setdefault(t.name, amount)
        self._tensors = found
        return dict(found)

    def saved(self) -> tuple[tuple[tuple[str, float], ...], float]:
        """(what stays saved, what is alive only during the backward)."""
        tensors, recompute = self.tensors(), self.options.recompute
        if recompute.full:
            first = next(iter(tensors), "")
            entry = self.local("bsd", "residual") * 2.0
            return ((first or "input", entry),), sum(tensors.values()) - entry
        kept = tuple((name, amount) for name, amount in tensors.items() if not dropped(recompute, name))
        if "op" in recompute.modules:
            kept = tuple((name, self._op_level(name, amount)) for name, amount in kept)
        return kept, sum(tensors.values()) - sum(a for _, a in kept)

    def _op_level(self, name: str, amount: float) -> float:
        """Bytes that per-op checkpointing keeps of a tensor: of q, k, v the key part goes, of fc1 the w3 half goes;
        the second norm's input is rebuilt from the kept outputs, w2's output is kept instead (same size)."""
        if name == "attention/qkv_out":
            size = self.size
            total = size["n"] * size["h"] + size["k"] * (size["h"] + size["j"])
            return amount * (total - size["k"] * size["h"]) / total
        return amount / 2 if name == "mlp/activation_in" and self.size["u"] == 2 * self.size["f"] else amount

    def transient(self) -> float:
        """What a backward adds to the saved tensors at its worst op: gradients of a matmul's output, input and weight."""
        widest = 0.0
        for op in self.block.ops:
            if op.name == "embedding/word" and self.style.whole_embedding_gradient:
                widest = 2.0 * self.size["v"] * self.size["d"]
            if op.equation:
                pair = self.local(op.output_axes, op.region) * 2.0 + self.weight_gradient(op)
                pair += sum(self.local(t.axes, self._gradient_region(op, t.region)) for t in op.saves[:1]) * 2.0
                if op.name == "head/logits":
                    # The logits and their copies are gone by then, but for the gradient of the logits counted above.
                    pair -= sum(v for name, v in self.tensors().items() if name == "head/logits")
                widest = max(widest, pair)
        return max(widest, self._scores_transient(), self._ring_transient())

    def _gradient_region(self, op: Op, region: Region) -> Region:
        """Layout of an input's gradient: whole before its reduce-scatter under sequence parallelism."""
        return "tensor" if op.region == "tensor" and region == "residual" else region

    def weight_gradient(self, op: Op) -> float:
        """Bytes of the 16-bit tensor that holds (or stands for) the weight gradient of a matmul while it is computed."""
        grouped = op.type is OpType.GROUPED_MATMUL
        kind = self.options.grouped_weight_gradients if grouped else self.options.weight_gradients
        if kind == "none" or (kind == "shapes" and op.name not in OUTSIDE_TE):
            return 0.0
        return self.weights(op) * 2.0

    def weight_shapes(self) -> dict[tuple[int, int], float]:
        """(rows, columns) -> bytes of the placeholders that are kept for this block's weight gradients."""
        found: dict[tuple[int, int], float] = {}
        for op in self.block.ops:
            grouped = op.type is OpType.GROUPED_MATMUL
            kind = self.options.grouped_weight_gradients if grouped else self.options.weight_gradients
            if op.equation and kind == "shapes" and op.name not in OUTSIDE_TE:
                work = self.matmul(op, "forward")
                if isinstance(work, Gemm | GroupedGemm):
                    found[work.n, work.k] = 2.0 * work.n * work.k
        return found

    def _ring_transient(self) -> float:
        """The same at an attention over torch's ring: keys and values of all query heads that were gathered (or arrived, and are
        passed on), their fp32 gradients and what arrives of them, less what the ops behind it have freed by then."""
        if self.degrees.cp == 1 or not self.degrees.ring_merges or self.degrees.cp_style == "ulysses":
            return 0.0
        tensors, freed = self.tensors(), 0.0
        for op in reversed(self.block.ops):
            if op.type is OpType.ATTENTION:
                pair = self.local("bsnh", "tensor") + self.local("bsnj", "tensor")
                parts = self.degrees.cp if self.degrees.cp_style == "all_gather" else 2
                return 2.0 * pair * parts + 2 * 4.0 * pair - freed
            freed += sum(tensors.pop(t.name, 0.0) for t in op.saves)
        return 0.0

    def _scores_transient(self) -> float:
        """The same at an attention that keeps its scores: gradients of the probabilities before and after dropout and the
        buffer that the score matmul accumulates into (Megatron-LM), less what the ops behind it have freed by then."""
        tensors, freed = self.tensors(), 0.0
        for op in reversed(self.block.ops):
            if any(t.name == "attention/softmax" for t in op.saves):
                scores = self.local("bns", "tensor") * self.size["t"] * 2.0
                return (3.0 if self.style.dropout else 2.0) * scores - freed
            freed += sum(tensors.pop(t.name, 0.0) for t in op.saves)
        return 0.0

    def deferred(self) -> float:
        """What weight gradients need: input and output gradient of every matmul, each tensor once (fp8 matmuls: both in fp8)."""
        tensors, kept = self.tensors(), 0.0
        for op in self.block.ops:
            if op.equation:
                element = 2.0 if op.name in OUTSIDE_TE else self.style.linear_input_bytes
                kept += self.local(op.output_axes, op.region) * element + tensors.pop(op.saves[0].name, 0.0)
        return kept
