"""What the class of a model type builds without asking its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from simpar.specs.mixers import NormKind, WeightSpec

Layout = Literal["pre", "post", "sandwich", "parallel", "parallel_norms"]

Weights = tuple[WeightSpec, ...]


def _nothing(*_: Any) -> Weights:
    return ()


def _changes_nothing(*_: Any) -> dict[str, Any]:
    return {}


def _as_many(_: Any) -> int:
    return 0


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
    attention: Callable[[Any, int], dict[str, Any]] = _changes_nothing
    """Changes of a plain attention's fields, of (reader, layer)."""
    attention_extra: Callable[[Any, int], Weights] = _nothing
    layer_extra: Callable[[Any, int], Weights] = _nothing
    """Weights beside those of attention and feed-forward, of (reader, layer)."""
    stack_extra: Callable[[Any], Weights] = _nothing
    further: Callable[[Any], Weights] = _nothing
    """Weights outside the layers; outside the stack, beside positions and the norm of the embedding."""
    rows: Callable[[Any], int] = _as_many
    """Of the embedding where they are not the vocabulary's; 0 = they are."""
    width: Callable[[Any, int], int] | None = None
    """Of a layer's dense feed-forward, where no general key says it."""
    shared: Callable[[Any, int], int] | None = None
    """Total width of the shared experts, of (reader, width of one), where no general key says it."""
    turns: tuple[str, ...] = ()
    """Kinds of its layers by turns, where the file lists none."""
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
