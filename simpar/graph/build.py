"""Writes a layer node by node: names of tensors follow from the node that makes them, axes are given as words.

layer = LayerBuilder("layer", axes)
x = layer.input("hidden", "batch sequence hidden")
y = layer.norm("norm", x)
y = layer.linear("mlp/fc1", y, "batch sequence ffn", module="mlp")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from simpar.graph.masks import CAUSAL, Mask
from simpar.graph.types import (
    Attention,
    Axis,
    Convolution,
    Einsum,
    Elementwise,
    Format,
    Layer,
    Lookup,
    Loss,
    Node,
    Norm,
    Permute,
    Scan,
    Select,
    Tensor,
    View,
)


class LayerBuilder:
    """One layer in the making; every method puts a node and returns the name of the tensor that it makes."""

    def __init__(self, name: str, axes: Iterable[Axis]) -> None:
        self.name = name
        self.axes = {axis.name: axis for axis in axes}
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {}
        self._inputs: list[str] = []

    # -- tensors -------------------------------------------------------------------------------------------------------

    def axis(self, name: str, size: int = 0, split: Any = "", parts: Sequence[str] = ()) -> str:
        """A further axis; `parts` as words: ("heads head_dim", "kv_heads head_dim")."""
        self.axes[name] = Axis(name, size, split, tuple(tuple(part.split()) for part in parts))
        return name

    def input(self, name: str, axes: str, *, data: bool = False, format: Format = "activation") -> str:
        """A tensor that the layer is given; `data` has no gradient."""
        self._inputs.append(self.tensor(name, axes, format=format, role="data" if data else "activation"))
        return name

    def tensor(self, name: str, axes: str | tuple[str, ...], **options: Any) -> str:
        """Make a tensor known."""
        self.tensors[name] = Tensor(name, tuple(axes.split()) if isinstance(axes, str) else axes, **options)
        return name

    def parameter(self, name: str, axes: str | tuple[str, ...]) -> str:
        """A weight."""
        return self.tensor(name, axes, role="parameter")

    def axes_of(self, tensor: str) -> tuple[str, ...]:
        """Axes of a tensor."""
        return self.tensors[tensor].axes

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> str:
        """Put any node; its tensors are known already."""
        self.nodes.append(node)
        return node.outputs[0] if node.outputs else ""

    def linear(self, name: str, x: str, out: str, *, module: str = "", to: str = "", bias: bool = False, wide: bool = False) -> str:
        """y = x W (+ b): `out` are the axes of y, of which the weight has those that x lacks, as it has those that y lacks.

        Args:
            to: name of y; "" = the node's with ".out".
        """
        has, wanted = self.axes_of(x), tuple(out.split())
        contracted = tuple(a for a in has if a not in wanted)
        made = tuple(a for a in wanted if a not in has)
        weight = self.parameter(f"{name}.weight", (*contracted, *made))
        held = [weight]
        if bias:
            held.append(self.parameter(f"{name}.bias", made))
        y = self.tensor(to or f"{name}.out", wanted)
        return self.add(Einsum(name, (x,), (y,), module, tuple(held), weight, held[1] if bias else "", wide))

    def of_linears(self, y: str, count: int) -> str:
        """The last product, which made y, stands for so many linears side by side."""
        product = self.nodes[-1]
        assert isinstance(product, Einsum)
        self.nodes[-1] = replace(product, linears=count)
        return y

    def grouped(self, group: str, y: str) -> str:
        """The last product, which made y, with a weight (and bias) for each slice of an axis `group`, of which a row meets one."""
        for name in self.nodes[-1].parameters:
            held = self.tensors[name]
            self.tensors[name] = replace(held, axes=(group, *held.axes))
        return y

    def norm(
        self, name: str, x: str, *, kind: Literal["rmsnorm", "layernorm", "l2"] = "rmsnorm", module: str = "layernorm",
        to: str = "", parts: Sequence[tuple[str, str]] = (), gate: str = "",
    ) -> str:  # fmt: skip
        """A norm over the last axis of x, or over those of `parts` of it: (axes, tensor that is saved)."""
        runs, kept = tuple(tuple(axes.split()) for axes, _ in parts) or (self.axes_of(x),), tuple(name for _, name in parts)
        held = []
        for index, axes in enumerate(runs):
            suffix = f"{index}" if index else ""
            if kind != "l2":
                held.append(self.parameter(f"{name}.weight{suffix}", (axes[-1],)))
            if kind == "layernorm":
                held.append(self.parameter(f"{name}.bias{suffix}", (axes[-1],)))
        y = self.tensor(to or f"{name}_out", self.axes_of(x))
        inputs = (x, gate) if gate else (x,)
        return self.add(Norm(name, inputs, (y,), module, tuple(held), kind, runs if parts else (), kept, bool(gate)))

    def attention(self, name: str, inputs: Sequence[str], out: str, *, mask: Mask = CAUSAL, to: str = "", **axes: Any) -> str:
        """Attention over q, k, v (or a packed tensor of them); `out` are the axes of its output."""
        y = self.tensor(to or f"{name}.out", out)
        return self.add(Attention(name, tuple(inputs), (y,), "core_attn", mask=mask, **axes))

    def scan(self, name: str, inputs: Sequence[str], out: str, **options: Any) -> str:
        """A recurrence in chunks."""
        return self.add(Scan(name, tuple(inputs), (self.tensor(f"{name}.out", out),), "scan", **options))

    def elementwise(
        self, name: str, inputs: Sequence[str], op: str, *, module: str = "", to: str = "", out: str = "", over: Sequence[str] = ()
    ) -> str:  # fmt: skip
        """A function of each element; axes of the output are those of the first input unless `out` says otherwise."""
        y = self.tensor(to or f"{name}.out", out or self.axes_of(inputs[0]))
        runs = tuple(tuple(axes.split()) for axes in over)
        return self.add(Elementwise(name, tuple(inputs), (y,), module, (), op, runs))

    def residual(self, name: str, *inputs: str, to: str = "") -> str:
        """The sum of a layer's branches and its residual stream."""
        return self.elementwise(name, inputs, "residual", module="residual", to=to)

    def convolution(self, name: str, x: str, out: str, weight: tuple[str, ...], *, module: str = "cnn", to: str = "",
                    grouped: bool = False) -> str:  # fmt: skip
        """A convolution with a bias per filter; axes of the weight: what is summed over, then filters."""
        held = (self.parameter(f"{name}.weight", weight), self.parameter(f"{name}.bias", weight[-1:]))
        y = self.tensor(to or f"{name}.out", out)
        return self.add(Convolution(name, (x,), (y,), module, held, *held, grouped))

    def view(self, inputs: Sequence[str], *outputs: tuple[str, str]) -> tuple[str, ...]:
        """Parts of a tensor, or several as one: (name, axes) of each output."""
        made = tuple(self.tensor(name, axes) for name, axes in outputs)
        module = next((node.module for node in self.nodes if inputs[0] in node.outputs), "")
        self.add(View(f"{made[0]}.view", tuple(inputs), made, module))
        return made

    def lookup(self, name: str, ids: str, table: str, out: str, *, add: str = "") -> str:
        """Rows of a new table with axes `table`, added to `add` where one is given."""
        weight, y = self.parameter(f"{name}.weight", table), self.tensor(f"{name}.out", out)
        return self.add(Lookup(name, (ids, add) if add else (ids,), (y,), "embedding", (weight,)))

    def select(self, name: str, scores: str) -> str:
        """The k best experts of each token."""
        return self.add(Select(name, (scores,), (self.tensor(f"{name}.choice", self.axes_of(scores)),), "moe"))

    def permute(self, name: str, inputs: Sequence[str], out: str, *, back: bool = False, to: str = "") -> str:
        """Tokens to rows of their experts, or rows `back` to tokens; the last input is the choice."""
        return self.add(Permute(name, tuple(inputs), (self.tensor(to or f"{name}.out", out),), "moe", (), back))

    def loss(self, name: str, logits: str, out: str, *, kind: Literal["vocabulary", "classes"] = "vocabulary") -> str:
        """The loss over the last axis of `logits`."""
        y = self.tensor(f"{name}.out", out, format="fp32")
        return self.add(Loss(name, (logits,), (y,), "loss", kind=kind))

    def done(self, *outputs: str) -> Layer:
        """The finished layer.

        Raises:
            ValueError: the graph is not one (a bug of the builder's).
        """
        layer = Layer(self.name, tuple(self.nodes), tuple(self.tensors.values()), tuple(self._inputs), outputs,
                      tuple(self.axes.values()))  # fmt: skip
        for problem in layer.problems():
            raise ValueError(f"layer {self.name}: {problem}")
        return layer
