"""Writes the layers of an ArchitectureSpec as graphs: axes that keep their names where sizes agree, extra weights, masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from simpar.graph.build import LayerBuilder
from simpar.graph.masks import BIDIRECTIONAL, CAUSAL, Mask
from simpar.graph.types import Axis, Convolution, Custom, Lookup, View
from simpar.specs.mixers import AttentionSpec, NormKind, WeightSpec

TOKENS: Final = "batch sequence hidden"

NORMS: dict[str, Literal["rmsnorm", "layernorm", "l2"]] = {
    "rmsnorm": "rmsnorm", "layernorm": "layernorm", "layernorm_no_bias": "rmsnorm", "unweighted": "l2",
}  # fmt: skip
"""Kinds of norm as the graph knows them: by how many weights a channel has."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: sequences and their length; `vocabulary` where a framework pads it (0: the model's own)."""

    size: int
    sequence: int
    vocabulary: int = 0


class Writer:
    """One layer of `hidden` channels in the making."""

    def __init__(self, name: str, hidden: int, batch: Batch, norm: NormKind = "rmsnorm") -> None:
        self.hidden, self.batch, self.norm_kind = hidden, batch, norm
        self.graph = LayerBuilder(name, [
            Axis("batch", batch.size), Axis("sequence", batch.sequence, "sequence"), Axis("hidden", hidden),
        ])  # fmt: skip
        self.taken: set[str] = set()
        self.shared: list[tuple[str, str]] = []

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch.size * self.batch.sequence

    def path(self, name: str) -> str:
        """`name`, or with a number where the layer has such a part already."""
        found, number = name, 2
        while found in self.taken:
            found, number = f"{name}_{number}", number + 1
        self.taken.add(found)
        return found

    def axis(self, role: str, size: int = 0, split: Any = "", parts: tuple[str, ...] = ()) -> str:
        """An axis called `role`, numbered where another of that name differs."""
        made = Axis(role, size, split, tuple(tuple(part.split()) for part in parts))
        name, number = role, 2
        while name in self.graph.axes and self.graph.axes[name] != Axis(name, made.size, made.split, made.parts):
            name, number = f"{role}_{number}", number + 1
        return self.graph.axis(name, size, split, parts)

    def norm(self, name: str, x: str, module: str = "layernorm") -> str:
        """A norm over the stream."""
        return self.graph.norm(self.path(name), x, kind=NORMS[self.norm_kind], module=module)

    def convolution(self, name: str, x: str, out: tuple[str, str], taps: int, bias: bool, module: str) -> str:
        """A causal depthwise convolution over the sequence; `out` is the name and channels' axis of what it makes."""
        channels = out[1]
        weight = self.graph.parameter(f"{name}.weight", (self.axis("taps", taps), channels))
        added = self.graph.parameter(f"{name}.bias", (channels,)) if bias else ""
        held = (weight, added) if bias else (weight,)
        y = self.graph.tensor(out[0], f"batch sequence {channels}")
        return self.graph.add(Convolution(name, (x,), (y,), module, held, weight, added, True))

    def weights(self, path: str, x: str, every: tuple[WeightSpec, ...], module: str = "") -> str:
        """Weights beside those that a mixer implies, after `x`; what follows reads the result."""
        for weight in every:
            x = self.weight(path, x, weight, module)
        return x

    def weight(self, path: str, x: str, weight: WeightSpec, module: str = "") -> str:
        """One of them: products are priced by their FLOPs and bytes, vectors belong to a neighbouring kernel."""
        name = self.path(f"{path}/{weight.name}" if path else weight.name)
        axes = tuple(
            self.axis(f"{name}.{side}", size)
            for side, size in (("copies", weight.copies), ("in", weight.inputs), ("out", weight.outputs))
            if size > 1 or side == "out"
        )
        held = [self.graph.parameter(f"{name}.weight", axes)]
        if weight.bias:
            bias_axes = (axes[0], axes[-1]) if weight.copies > 1 else axes[-1:]
            held.append(self.graph.parameter(f"{name}.bias", bias_axes))
        if weight.kind == "lookup":
            made = self.graph.tensor(f"{name}.rows", axes)
            self.graph.add(Lookup(name, (), (made,), "embedding", tuple(held)))
            return x
        out = self.graph.tensor(f"{name}.out", self.graph.axes_of(x))
        uses = float(weight.copies) if weight.uses is None else weight.uses
        if weight.kind == "vector" or not uses:
            return self.graph.add(View(name, (x,), (out,), module, tuple(held)))
        flops = 2.0 * uses * weight.inputs * weight.outputs * self.tokens
        moved = 2.0 * uses * (weight.inputs + weight.outputs) * self.tokens
        over = ("batch", "sequence")
        return self.graph.add(
            Custom(name, (x,), (out,), module, tuple(held), flops=flops, forward_bytes=moved, over=over, saved=(x,))
        )

    def kernel(self, name: str, inputs: tuple[str, ...], out: str, module: str, *, flops: float, moved: float) -> str:
        """A kernel of which only FLOPs and bytes are known; its inputs are kept."""
        y = self.graph.tensor(f"{name}.out", out)
        over = ("batch", "sequence")
        return self.graph.add(Custom(name, inputs, (y,), module, flops=flops, forward_bytes=moved, over=over, saved=inputs))

    def linear(self, name: str, x: str, out: str, module: str, bias: bool = False) -> str:
        return self.graph.linear(name, x, f"batch sequence {out}" if out != TOKENS else out, module=module, bias=bias)


def attention_mask(a: AttentionSpec) -> Mask:
    """The mask that an attention's fields describe."""
    if a.indexer is not None:
        return Mask("top_k", a.indexer.top_k, a.indexer.block)
    if a.keys is not None:
        return Mask("fixed", a.keys)
    if a.chunk is not None:
        return Mask("chunk", a.chunk)
    if a.window is not None:
        return Mask("window" if a.causal else "bidirectional_window", a.window)
    if a.joint_keys:
        return Mask("causal" if a.causal else "bidirectional", joint=a.joint_keys)
    return CAUSAL if a.causal and not a.cross else BIDIRECTIONAL
