"""What readers of every family write: weights, steps of one branch each, attention of encoders, stacks of one kind of layer."""

from __future__ import annotations

from typing import Any

from simpar.specs.architecture import LayerSpec, StackSpec, SublayerSpec
from simpar.specs.mixers import AttentionSpec, BranchSpec, NormKind, WeightSpec


def norm_extra(name: str, kind: NormKind, width: int) -> WeightSpec:
    """A norm outside the layers."""
    values = {"rmsnorm": 1, "layernorm_no_bias": 1, "layernorm": 2, "unweighted": 0}[kind]
    return vector(name, values * width)


def vector(name: str, size: int) -> WeightSpec:
    """Learned values that are not a matrix."""
    return WeightSpec(name=name, kind="vector", outputs=size)


def matrix(name: str, inputs: int, outputs: int, **more: Any) -> WeightSpec:
    """A product without a bias; `more`: copies and uses, as in WeightSpec."""
    return WeightSpec(name=name, inputs=inputs, outputs=outputs, **more)


def linear(name: str, inputs: int, outputs: int, **more: Any) -> WeightSpec:
    """A product with a bias, unless `more` says otherwise."""
    return matrix(name, inputs, outputs, **{"bias": True, **more})


def once(name: str, inputs: int, outputs: int, *, bias: bool = True) -> WeightSpec:
    """A product that a sample meets, and none of its tokens."""
    return matrix(name, inputs, outputs, bias=bias, uses=0.0)


def lookup(name: str, rows: int, width: int, copies: int = 1) -> WeightSpec:
    """A table that is read by index."""
    return WeightSpec(name=name, kind="lookup", inputs=rows, outputs=width, copies=copies)


def depthwise(name: str, taps: int, channels: int, **more: Any) -> WeightSpec:
    """A convolution of each channel by itself."""
    return WeightSpec(name=name, kind="conv", inputs=taps, outputs=channels, **more)


def in_turn(*branches: BranchSpec, **step: Any) -> tuple[SublayerSpec, ...]:
    """Residual steps of one branch each; `step`: fields that all of them have."""
    return tuple(SublayerSpec(branches=(branch,), **step) for branch in branches)


def encoder_attention(heads: int, width: int, *, bias: bool = True, **changes: Any) -> AttentionSpec:
    """Attention over everything with as many key heads as query heads, and biases everywhere or nowhere, in `width` channels."""
    fields = {"num_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads, "causal": False}
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), bias)
    return AttentionSpec(**{**fields, **biases, **changes})


def uniform(kind: str, layer: LayerSpec, depth: int, **fields: Any) -> StackSpec:
    """A stack of `depth` equal layers."""
    return StackSpec(layers={kind: layer}, pattern=(f"{kind}*{depth}",), **fields)


def deal(layers: list[LayerSpec], kinds: list[str]) -> tuple[dict[str, LayerSpec], tuple[str, ...]]:
    """Equal layers as one kind, named by its mixer and feed-forward; the pattern in runs ("full_mlp*3")."""
    names: dict[LayerSpec, str] = {}
    runs: list[list[Any]] = []
    for layer, kind in zip(layers, kinds, strict=True):
        if layer not in names:
            label = "_".join([kind.replace("_attention", ""), *_feed_label(layer)])
            taken = sum(name == label or name.startswith(f"{label}_") for name in names.values())
            names[layer] = f"{label}_{taken + 1}" if taken else label
        if runs and runs[-1][0] == names[layer]:
            runs[-1][1] += 1
        else:
            runs.append([names[layer], 1])
    pattern = tuple(f"{name}*{count}" if count > 1 else name for name, count in runs)
    return {name: layer for layer, name in names.items()}, pattern


def _feed_label(layer: LayerSpec) -> list[str]:
    kinds = [branch.kind for step in layer.sublayers for branch in step.branches]
    return [kind for kind in ("mlp", "experts") if kind in kinds]
