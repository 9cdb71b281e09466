"""Shard: sizes of one rank's part of every tensor, and the collectives where producer and consumer lie differently.

An axis says what may split it, a `Placement` by how much. Three layouts of activations follow:

    tensor     a tensor with an axis that tensor ranks share has every position of its context rank
    expert     rows are where their experts are
    residual   everything else: each tensor rank has all of it, or under sequence parallelism its part of the positions

A node with an axis that tensor ranks share needs its other inputs in the tensor layout: under sequence parallelism they are
gathered, and their gradients reduced either way. A product over such an axis makes partial sums that are reduced: scattered over
the positions, or all to all. Both are each other's adjoint (Megatron-LM 2019; Korthikanti et al. 2022; DTensor's Shard, Replicate
and Partial).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from simpar.graph.types import Convolution, Einsum, Layer, Lookup, Loss, Node, Permute

Layout = Literal["residual", "tensor", "expert"]
_TENSOR = frozenset({"tensor", "groups"})
_EXPERT = frozenset({"rows", "experts", "expert_tensor"})


@dataclass(frozen=True, slots=True)
class Placement:
    """Ways in which each kind of axis is split.

    Attributes:
        tensor, context, experts, expert_tensor: degrees.
        sequence_parallel: the residual layout is split over the tensor ranks.
        load: rows of the fullest expert rank over the mean.
    """

    tensor: int = 1
    context: int = 1
    experts: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of nodes in the tensor layout, from where it takes tensors of the residual layout to where it gives one back.

    Attributes:
        first, last: positions of its nodes among the layer's.
        name: of its collectives.
        gathered: inputs that come from the residual layout.
        reduced: its partial output; "" = none.
    """

    first: int
    last: int
    name: str
    gathered: tuple[str, ...]
    reduced: str


class Layouts:
    """How the tensors of a layer lie over ranks, however many there are."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._known: dict[tuple[str, ...], Layout] = {}

    # -- layouts -------------------------------------------------------------------------------------------------------

    def layout_of(self, axes: tuple[str, ...]) -> Layout:
        """The layout of an activation with these axes."""
        found = self._known.get(axes)
        if found is None:
            splits = self._splits(axes)
            found = self._known[axes] = "expert" if splits & _EXPERT else "tensor" if splits & _TENSOR else "residual"
        return found

    def _splits(self, axes: tuple[str, ...]) -> set[str]:
        found: set[str] = set()
        for name in axes:
            axis = self.layer.axis[name]
            found.add(axis.split)
            for part in axis.parts:
                found |= self._splits(part)
        return found

    @cached_property
    def of_node(self) -> dict[str, Layout]:
        """The layout in which each node works: that of its most split tensor."""
        found: dict[str, Layout] = {}
        for node in self.layer.nodes:
            names = (*node.inputs, *node.outputs, *node.parameters)
            held = {self.layout_of(self.layer.tensor[name].axes) for name in names}
            found[node.name] = "expert" if "expert" in held else "tensor" if "tensor" in held else "residual"
        return found

    # -- collectives ---------------------------------------------------------------------------------------------------

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Runs of nodes in the tensor layout that take from, or give to, the residual layout."""
        found: list[Stretch] = []
        nodes = self.layer.nodes
        position = 0
        while position < len(nodes):
            if self.of_node[nodes[position].name] != "tensor":
                position += 1
                continue
            last, gathered, reduced = position, dict[str, None](), ""
            while last < len(nodes) and self.of_node[nodes[last].name] == "tensor":
                gathered |= dict.fromkeys(self._entering(nodes[last]))
                reduced = self.partial(nodes[last])
                if reduced:
                    break
                last += 1
            last = min(last, len(nodes) - 1)
            found.append(Stretch(position, last, nodes[position].name.split("/")[0], tuple(gathered), reduced))
            position = last + 1
        return tuple(found)

    def _entering(self, node: Node) -> list[str]:
        """Inputs of a node in the tensor layout that are in the residual one."""
        if isinstance(node, Lookup):
            return []
        tensors = [self.layer.tensor[name] for name in node.inputs]
        return [t.name for t in tensors if t.role == "activation" and self.layout_of(t.axes) == "residual"]

    def partial(self, node: Node) -> str:
        """The output of a node that holds partial sums over the tensor ranks; "" = none does."""
        if not node.outputs or not isinstance(node, Einsum | Lookup):
            return ""
        out = self.layer.tensor[node.outputs[0]]
        summed = any(self._splits(self.layer.tensor[name].axes) & _TENSOR for name in node.parameters)
        return out.name if summed and self.layout_of(out.axes) == "residual" else ""

    def whole_channels(self, node: Node) -> str:
        """The input of a convolution that needs all channels where the layer before split them; "" = none."""
        if not isinstance(node, Convolution) or node.grouped:
            return ""
        source = self.layer.tensor[node.inputs[0]].axes
        by_channel = self.layer.tensor[node.weight].axes[-1] in source
        return node.inputs[0] if not by_channel and self._splits(source) & _TENSOR else ""

    def split_loss(self, node: Node) -> bool:
        """Whether a loss runs over an axis that tensor ranks share."""
        return isinstance(node, Loss) and self.layout_of(self.layer.tensor[node.inputs[0]].axes) == "tensor"

    def exchanged(self, node: Node) -> str:
        """Rows that go to their experts after this node, or come back before it; "" = none."""
        if not isinstance(node, Permute):
            return ""
        return node.inputs[0] if node.back else node.outputs[0]


@lru_cache(maxsize=4096)
def layouts_of(layer: Layer) -> Layouts:
    """The layouts of a layer, the same for all ranks and degrees."""
    return Layouts(layer)


class Shards:
    """One rank's part of a layer."""

    def __init__(self, layer: Layer, placement: Placement) -> None:
        self.layer, self.placement, self.layouts = layer, placement, layouts_of(layer)
        self._local: dict[tuple[tuple[str, ...], Layout], float] = {}
        self._weights: dict[str, float] = {}

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def local(self, axes: tuple[str, ...], layout: Layout | None = None) -> float:
        """Elements of an activation on this rank, in its own layout or in another."""
        layout = layout or self.layouts.layout_of(axes)
        found = self._local.get((axes, layout))
        if found is None:
            found = self._local[axes, layout] = self.product(axes, layout)
        return found

    def extent(self, name: str, layout: Layout) -> float:
        """Size of an axis on this rank."""
        axis, place = self.layer.axis[name], self.placement
        if axis.parts:
            return sum(self.product(part, layout) for part in axis.parts)
        size = axis.size
        if axis.split == "tensor":
            return size / place.tensor
        if axis.split == "groups":
            return max(size / place.tensor, 1.0)
        if axis.split == "sequence":
            return size / (place.context * (place.tensor if layout == "residual" and place.sequence_parallel else 1))
        if axis.split == "rows":
            return size / (place.context * place.tensor / place.expert_tensor) * place.load
        if axis.split == "expert_tensor":
            return size / place.expert_tensor
        return size / place.experts if axis.split == "experts" else size

    def product(self, axes: Iterable[str], layout: Layout) -> float:
        """Of the sizes of axes on this rank."""
        found = 1.0
        for axis in axes:
            found *= self.extent(axis, layout)
        return found

    def weight(self, name: str) -> float:
        """Elements of a parameter on this rank."""
        found = self._weights.get(name)
        if found is None:
            found = self._weights[name] = self.product(self.layer.tensor[name].axes, "tensor")
        return found

    def weights(self, node: Node) -> float:
        """Parameters of a node on this rank."""
        return sum(self.weight(name) for name in node.parameters)
