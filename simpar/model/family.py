"""What the class of a model type builds without asking its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from simpar.specs.mixers import NormKind

Layout = Literal["pre", "post", "sandwich", "parallel", "parallel_norms"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type's class builds without asking its file. A string names the key that says it."""

    norm: NormKind = "rmsnorm"
    layout: Layout | tuple[str, bool, Layout, Layout] = "pre"
    """Or (key that says it, its default, layout with it, without it)."""
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    expert_bias: bool = False
    gated: bool = True
    qk_norm: Literal["none", "head", "full"] | str = "none"
    """Kind of the norm, or the key that switches one per head on."""
    qk_norm_kind: NormKind = "rmsnorm"
    gate: Literal["none", "element", "head"] = "none"
    sinks: bool = False
    causal: bool | str = True
    packed: bool = False
    """One matrix of queries, keys and values."""
    dense_up_to: int | None = None
    """Experts that its class takes for none; where a class has several by default it builds whatever number the file says."""
    first_dense: int = 0
    """Layers before the first with experts, where no key says it."""
    router_bias: bool | str = False
    shared_gate: bool = False
    full_every: int = 0
    """Every so many layers one has full attention, the others the window, where no key says it."""
    turns: tuple[str, ...] = ()
    """Kinds of its layers by turns, where the file lists none."""
    halves: bool = False
    """The file's width counts both halves of a gated product."""
    position: Literal["rope", "none", "alibi", "absolute", "relative"] = "rope"
    activation: str = "silu"
    """Where the file has none."""
    positions: str = ""
    """Key of the rows of a learned position table."""
    position_offset: int = 0
    head_bias: bool | str = False
    embedding_norm: bool = False
    final_norm: bool = True
    mlp_scalars: int = 0
    """Learned scalars of the activation (Apertus)."""
    square: bool = False
    """The heads' widths add up to the hidden size, whatever `head_dim` says: its class multiplies or normalises by that size."""
    tied: bool | None = False
    """Whether the head is tied where neither file nor class says; None: the class ties nothing, whatever the file says."""

    def constants(self) -> dict[str, tuple[Any, ...]]:
        """Keys that say what the family's class builds anyway, and the values with which they agree with it."""
        found: dict[str, tuple[Any, ...]] = {
            "attn_output_gate": (self.gate != "none",), "attention_output_gate": (self.gate != "none",),
            "use_qk_norm": (self.qk_norm != "none",), "qk_norm": (self.qk_norm != "none",),
            "qk_norm_type": ({"full": "per_layer", "head": "per_head"}.get(self.qk_norm),),
            "qk_layernorm": (self.qk_norm != "none",),
        }  # fmt: skip
        biases = {"attention_bias": self.qkv_bias, "qkv_bias": self.qkv_bias, "mlp_bias": self.mlp_bias, "use_bias": self.mlp_bias}
        return found | {name: (value,) for name, value in biases.items() if isinstance(value, bool)}
