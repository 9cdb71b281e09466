"""Everything besides a layer that decides what one rank does for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final, Literal

from simpar.graph.casts import EngineCasts
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.rematerialise import Recompute
from simpar.hashed import field_hash
from simpar.parallel.degrees import Degrees
from simpar.parallel.work import Implementation
from simpar.specs.model import MoeSpec

_NARROW: Final = ("fp8", "fp4", "mxfp8")
WeightGradients = Literal["none", "each", "shapes"]
"""16-bit tensors of weight gradients in a backward: none, one at a time, one of every shape kept for good."""


@dataclass(frozen=True)
class SplitOptions:
    """Everything besides the layer that decides one rank's work.

    Attributes:
        degrees: tensor, context, expert.
        kernels: the kernel library's rules.
        recompute: what runs again.
        dtype: of matmuls: bf16, fp16, fp8, fp8-block, fp32, ...
        expert_dtype: of experts' where it is another, "" = the same.
        attention_kernel: name for the attention price.
        sdpa: torch's scaled_dot_product_attention looks at each layer's heads and mask for a kernel that takes them.
        memory_implementation: tuned, framework or eager kernels.
        activation_implementation: of activations where the others are tuned.
        accumulate_fp32: weight gradients accumulate into fp32.
        moe: expert spec, for the exchange.
        load_factor: tokens of the fullest expert rank over the mean.
        spare_rows: rows that an expert rank has room for, over those that come: products and exchanges skip what is empty.
        pads_rows: copies of their own pad the rows of each local expert before narrow products and cut them behind.
        one_hot: rows go to their places at the experts and back by products with a one-hot mask.
        dense_experts: products of experts are one over all local experts, of rows padded with zeros for the others.
        dispatch_bytes: per element of the dispatched hidden vectors (1 under fp8 dispatch).
        casts: recipe of casts to fp8 that are kernels of their own (graph/casts.py), "" = none.
        lora_rank: > 0: base weights are frozen; matmuls that `kernels.pairs` names have a trained pair of this rank.
        borrowed: nodes whose weights another layer of the stage holds.
        frozen: nothing of the layer is trained, nor anything before it: it has a forward alone.
        dequantised_bytes: read and written per frozen weight of a layer to turn it into 16 bits before each use.
        weight_gradients, grouped_weight_gradients: what stands for them in memory, see specs/framework.py.
        engine_casts: casts to fp8 by TransformerEngine, none = it makes none.
        accumulation_bytes: per weight, of adding its gradient to a buffer in a kernel of its own.
        gather_copy_bytes: per weight, of taking it out of the buffer that it was gathered into.
        reduce_copy_bytes: per trained weight, of putting its gradient into the buffer that is reduced.
        experts_apart: full sharding leaves experts out: neither of these copies has theirs.
    """

    degrees: Degrees
    kernels: KernelPlan
    recompute: Recompute = field(default_factory=Recompute)
    dtype: str = "bf16"
    expert_dtype: str = ""
    attention_kernel: str = "auto"
    sdpa: bool = False
    memory_implementation: Implementation = "tuned"
    activation_implementation: Implementation = "tuned"
    accumulate_fp32: bool = True
    moe: MoeSpec | None = None
    load_factor: float = 1.0
    spare_rows: float = 1.0
    pads_rows: bool = False
    one_hot: bool = False
    dense_experts: bool = False
    dispatch_bytes: float = 2.0
    casts: str = ""
    lora_rank: int = 0
    borrowed: frozenset[str] = frozenset()
    frozen: bool = False
    dequantised_bytes: float = 0.0
    weight_gradients: WeightGradients = "none"
    grouped_weight_gradients: WeightGradients = "none"
    engine_casts: EngineCasts | None = None
    accumulation_bytes: float = 0.0
    gather_copy_bytes: float = 0.0
    reduce_copy_bytes: float = 0.0
    experts_apart: bool = False

    @cached_property
    def _hash(self) -> int:
        return field_hash(self)

    def __hash__(self) -> int:
        return self._hash

    @property
    def interned(self) -> SplitOptions:
        """The first of all equal ones: a memo finds it at once, an equal one after a comparison of all fields."""
        return _first(self)

    @property
    def narrow_experts(self) -> bool:
        """Whether experts' matmuls run in fewer than 16 bits."""
        return (self.expert_dtype or self.dtype).startswith(_NARROW)

    @property
    def narrow(self) -> bool:
        """Whether matmuls run in fewer than 16 bits."""
        return self.dtype.startswith(_NARROW)


@lru_cache(maxsize=4096)
def _first(options: SplitOptions) -> SplitOptions:
    return options
