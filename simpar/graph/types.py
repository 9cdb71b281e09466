"""A layer as data: nodes that compute, and between them tensors with named axes.

A *layer* is a list of nodes in the order in which they run; the edges are the tensors that one node makes and others read. An
axis has a size and says how it may be split: that, and not its name, decides where parallel dimensions cut. Nothing here knows
about a framework: which kernels run a node, what they save and what they cost follows from rules (kernels.py and the passes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, Literal

from simpar.graph.masks import CAUSAL, Mask

Split = Literal["", "sequence", "tensor", "groups", "rows", "experts", "expert_tensor"]
"""What may split an axis:

    ""              nothing
    "sequence"      context parallelism; tensor ranks as well where sequence parallelism is on and no other axis is theirs
    "tensor"        tensor parallelism: heads, feed-forward widths, the vocabulary
    "groups"        the same, but with fewer of them than ranks they are replicated: key/value heads, state-space groups
    "rows"          routed copies of tokens: as the sequence, and gathered over the tensor ranks of an expert
    "experts"       expert parallelism
    "expert_tensor" tensor parallelism inside an expert
"""
GELUS: Final = ("gelu_new", "gelu_fast", "quick_gelu")
"""Activations that transformers writes out in elementary operations, each an op of its own; all others are "activation"."""
Format = Literal["activation", "fp32", "int64", "int32", "bool"]
"""Element format; "activation" is what the training precision computes in (2 bytes, 4 in fp32)."""
Role = Literal["activation", "data", "parameter"]
"""data: comes from outside, has no gradient."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis.

    Attributes:
        size: of the whole model and micro-batch; 0 = follows from `parts`.
        split: what may split it.
        parts: of a packed axis: the products of other axes that lie behind each other on it (queries, keys, values).
    """

    name: str
    size: int = 0
    split: Split = ""
    parts: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """An edge of the graph: a tensor with named axes.

    Attributes:
        trained: a parameter that has a gradient.
    """

    name: str
    axes: tuple[str, ...]
    format: Format = "activation"
    role: Role = "activation"
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Node:
    """What all kinds of node have.

    Attributes:
        name: path in the layer, "attention/qkv".
        inputs, outputs: tensors read and made.
        module: the unit of the model that it belongs to ("attention", "mlp", ...), as recomputation and adapters name it.
        parameters: weights that it holds, biases included.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str = ""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Einsum(Node):
    """A product of the first input with `weight` (or of two inputs), summed over the axes that the output lacks.

    An axis of the weight that neither input nor output has groups the product: every row meets one of its slices (experts).

    Attributes:
        weight: the second operand where it is a parameter.
        wide: stays in 16 bits where training is in fewer (logits, router).
        linears: that it is in models of torch modules: three of queries, keys and values, two of gate and up.
    """

    weight: str = ""
    bias: str = ""
    wide: bool = False
    linears: int = 1


@dataclass(frozen=True, slots=True)
class Convolution(Node):
    """A convolution: every output position is a product of `weight` (taps and channels, filters) with what lies around it.

    Attributes:
        grouped: filters see their own channels alone, so that channels may stay split; False: all channels of the input.
    """

    weight: str = ""
    bias: str = ""
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class Attention(Node):
    """softmax(q k^T) v. Inputs: q, k, v, or one packed tensor of them; further ones (indices, sinks) behind.

    Attributes:
        mask: which keys a query attends.
        heads, kv_heads, head_dim, value_dim, batch, queries, keys: axes that say its shape.
    """

    mask: Mask = CAUSAL
    heads: str = "heads"
    kv_heads: str = "kv_heads"
    head_dim: str = "head_dim"
    value_dim: str = "value_dim"
    batch: str = "batch"
    queries: str = "sequence"
    keys: str = "sequence"


@dataclass(frozen=True, slots=True)
class Scan(Node):
    """A recurrence over the sequence: state-space model or linear attention, in chunks of matrix products.

    Attributes:
        kind: a row of SCANS (ledger.py): "diagonal" (Mamba 1, RG-LRU), "ssd" (Mamba 2), "linear" (lightning, GLA), "delta"
            (gated DeltaNet, KDA), "dplr" (RWKV-7).
        heads, key_dim, value_dim, groups: axes; of a state-space model heads, state, channels of a head, groups of B and C.
        chunk: positions per chunk.
        saved: of its inputs, those that the kernel keeps; () = all.
    """

    kind: str = "ssd"
    heads: str = "heads"
    key_dim: str = "state"
    value_dim: str = "head_dim"
    groups: str = ""
    chunk: int = 64
    batch: str = "batch"
    sequence: str = "sequence"
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Norm(Node):
    """A normalisation over the last axis.

    Attributes:
        kind: rmsnorm (one statistic a row), layernorm (two), l2 (one, no weight).
        over: what it runs over, where not the whole first input: parts of a packed tensor.
        saved: names of what it keeps of its input, one for each of `over`; () = the input itself.
        gated: the second input is a gate that multiplies the output.
    """

    kind: Literal["rmsnorm", "layernorm", "l2"] = "rmsnorm"
    over: tuple[tuple[str, ...], ...] = ()
    saved: tuple[str, ...] = ()
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Elementwise(Node):
    """A function of each element, with any fan-in.

    Attributes:
        op: a row of the kernel rules ("residual", "rope", "activation", "gate", "clamp", ...); one that no rule names reads its
            inputs, writes its outputs and keeps the inputs for the backward.
        over: what it runs over, where not the whole first input: parts of a packed tensor.
    """

    op: str = ""
    over: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Select(Node):
    """Routing: softmax or sigmoid of the scores and the k best; its outputs are the choice and its weights."""


@dataclass(frozen=True, slots=True)
class Permute(Node):
    """Gathers a token's row for each of its experts, or (`back`) sums the rows back into tokens, weighed by the router."""

    back: bool = False


@dataclass(frozen=True, slots=True)
class Lookup(Node):
    """Rows of a table, the one parameter, by index; a second input is added to (learned positions)."""


@dataclass(frozen=True, slots=True)
class Loss(Node):
    """Loss over the last axis of its input; `kind`: of a language model over its vocabulary, or of a few classes."""

    kind: Literal["vocabulary", "classes"] = "vocabulary"


@dataclass(frozen=True, slots=True)
class View(Node):
    """Parts of a tensor, or several as one, without a kernel."""


@dataclass(frozen=True, slots=True)
class Custom(Node):
    """Anything else.

    Attributes:
        flops: forward multiply-adds times two, of the whole micro-batch.
        backward_flops: of the backward; none = twice the forward's.
        forward_bytes, backward_bytes: memory traffic of the whole micro-batch, at two bytes an element of activation.
        over: axes whose split divides all of these.
        saved: tensors that the backward reads.
    """

    flops: float = 0.0
    backward_flops: float | None = None
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    over: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A graph that is scheduled as one: embedding, layer, head.

    Attributes:
        nodes: in the order in which they run.
        tensors: every edge and parameter.
        inputs, outputs: tensors that come from the layer before and go to the next.
        axes: of all tensors.
        shared: (name, node) of weights that every layer with a node of that name reads, held once.
    """

    name: str
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: tuple[Axis, ...]
    shared: tuple[tuple[str, str], ...] = ()

    @cached_property
    def tensor(self) -> dict[str, Tensor]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def axis(self) -> dict[str, Axis]:
        """Axes by name."""
        return {axis.name: axis for axis in self.axes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that makes a tensor."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read a tensor, in order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def grouping(self, node: Node) -> str:
        """The axis that groups a product's rows by expert; "" = none."""
        if not isinstance(node, Einsum) or not node.weight:
            return ""
        first = self.tensor[node.weight].axes[0]
        return "" if any(first in self.tensor[name].axes for name in (node.inputs[0], node.outputs[0])) else first

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {}

    def size(self, axis: str) -> int:
        """Size of one axis.

        Raises:
            KeyError: the layer has no such axis.
        """
        found = self._sizes.get(axis)
        if found is None:
            told = self.axis[axis]
            found = told.size or sum(self.volume(part) for part in told.parts)
            self._sizes[axis] = found
        return found

    def volume(self, axes: tuple[str, ...]) -> int:
        """Elements of a tensor with these axes."""
        return prod(self.size(axis) for axis in axes)

    def elements(self, tensor: str) -> int:
        """Elements of a tensor."""
        return self.volume(self.tensor[tensor].axes)

    def weights(self, node: Node) -> int:
        """Parameters that a node holds."""
        return sum(self.elements(name) for name in node.parameters)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.nodes, self.axes))

    def __hash__(self) -> int:
        return self._hash

    def problems(self) -> Iterator[str]:
        """What is wrong with the graph: every edge has one maker before its readers, every name and axis is known."""
        made = set(self.inputs)
        for node in self.nodes:
            for name in (*node.inputs, *node.parameters, *node.outputs):
                if name not in self.tensor:
                    yield f"{node.name}: no tensor {name!r}"
            yield from (f"{node.name} reads {name!r} before it is made" for name in node.inputs if name not in made)
            yield from (f"{node.name} makes {name!r} again" for name in node.outputs if name in made)
            made |= set(node.outputs)
        yield from (f"no node makes the output {name!r}" for name in self.outputs if name not in made)
        for tensor in self.tensors:
            yield from (f"{tensor.name}: no axis {axis!r}" for axis in tensor.axes if axis not in self.axis)
        for axis in self.axes:
            yield from (f"{axis.name}: no axis {part!r}" for product in axis.parts for part in product if part not in self.axis)
