"""What a kernel library makes of a layer: the plan it follows, the kernels it launches, what they keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from simpar.graph.pairs import Pairs
from simpar.graph.types import Layer, Node
from simpar.hashed import field_hash
from simpar.specs.framework_policies import Kernels
from simpar.specs.losses import FUSED
from simpar.specs.losses import Loss as LossWork

Axes = tuple[str, ...]
Traffic = tuple[tuple[Axes, float], ...]
"""(axes of a tensor, bytes moved per element), summed."""
HALF: Final = 2.0


@dataclass(frozen=True)
class KernelPlan:
    """Which rules are in force in one run.

    Attributes:
        library: the framework's kernels, with what the run's compiler fuses beside them.
        loss: the loss as this run computes it.
        element: bytes of an activation.
        wide_heads: (widest heads, attention kernel of wider ones), of those that apply the last; "unfused" stores softmax output
            (and its dropout) per head, others no score matrix.
        dropout: probability; > 0 stores one mask byte per element of each residual branch.
        linear_input_bytes: saved input of a matmul, per element (1 under fp8, 2 else).
        linears_alone: each of linears side by side keeps a narrow input of its own (TransformerEngine in models of torch modules).
        loss_all_reduces: all-reduces of one fp32 value per token that a loss over split logits takes.
        loss_keeps_weight_gradient: the gradient of the head's weight exists from the forward on (linear loss of a trained head).
        logits_gathered: ranks whose logits each rank gathers before the loss (1: they stay split over the vocabulary).
        output_copies: further copies of the attention output kept until the backward.
        stored: (tensor, bytes per element) of saved tensors that are kept in another format than they are computed in.
        gather_share: bytes of a tensor-parallel gather before a matmul, or of an output's gradient, over 16-bit ones (cast to fp8
            first: a half).
        overlapped_gathers: chunked overlap of tensor parallelism takes in the gathers, not the reductions alone.
        row_probability_bytes: of the routing probability that comes with each row of an expert.
        autocast: weights of fp32 under autocast: embeddings, norms and sums make fp32, products cast what they multiply to 16 bits,
            in kernels of their own or joined with what made it by a compiler.
        autocast_powers: autocast computes powers in fp32, and so what is made of them.
        frozen_inputs: products that train nothing keep what they multiply.
        pairs: how low-rank pairs beside frozen products compute; None where there are none.
    """

    library: Kernels = field(default_factory=Kernels)
    loss: LossWork = FUSED
    element: float = HALF
    wide_heads: tuple[tuple[int, str], ...] = ()
    dropout: float = 0.0
    linear_input_bytes: float = 2.0
    linears_alone: bool = False
    loss_all_reduces: int = 3
    loss_keeps_weight_gradient: bool = False
    logits_gathered: int = 1
    output_copies: float = 0.0
    stored: tuple[tuple[str, float], ...] = ()
    gather_share: float = 1.0
    overlapped_gathers: bool = True
    row_probability_bytes: float = 4.0
    autocast: Literal["", "own", "joined"] = ""
    autocast_powers: bool = False
    frozen_inputs: bool = False
    pairs: Pairs | None = None

    @cached_property
    def _hash(self) -> int:
        return field_hash(self)

    def __hash__(self) -> int:
        return self._hash

    def beyond(self, width: int) -> str:
        """The attention kernel of heads that are too wide for the run's; "" = they are not."""
        return next((kernel for widest, kernel in reversed(self.wide_heads) if width > widest), "")


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a forward leaves for its backward: bytes per element of `axes`.

    Attributes:
        of_weight: only the gradient of the node's weight reads it.
        part: share of the elements that is not there under another name.
    """

    name: str
    axes: Axes
    bytes: float
    of_weight: bool = False
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a node runs.

    Attributes:
        price: class of the memory-bound price; "" = a product, attention or a scan.
        forward, backward: memory traffic.
        launches, backward_launches: kernels in a forward, and in a backward; None = twice as many.
        each_group: further kernels for each expert of a rank, forward and backward, of what is computed expert by expert.
        beside: (class, axes, bytes per element forward, backward) of what other kernels move as one piece; the node's own launches
            hold theirs.
        keeps: what is left for the backward.
        bare: the rewrite rules left nothing of the node.
    """

    node: Node
    price: str = ""
    forward: Traffic = ()
    backward: Traffic = ()
    launches: int = 1
    keeps: tuple[Kept, ...] = ()
    bare: bool = False
    each_group: tuple[int, int] = (0, 0)
    beside: tuple[tuple[str, Axes, float, float], ...] = ()
    backward_launches: int | None = None

    def launched(self, *, backward: bool) -> int:
        """Kernels in one direction."""
        if not backward:
            return self.launches
        return 2 * self.launches if self.backward_launches is None else self.backward_launches


def kept_whole(layer: Layer, name: str, each: float = HALF) -> Kept:
    """A tensor of the layer, kept at `each` bytes an element."""
    return Kept(name, layer.tensor[name].axes, each)
