"""A model as stacks of layers, where a layer is any list of mixers and feed-forwards: the general form of a model.

`TransformerSpec` (specs/model.py) is the short form for layers that are all alike. A [model] table with kind = "layers" writes
the general one; the reader of config.json files (simpar/model) makes it from theirs.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from simpar.specs.base import Spec
from simpar.specs.mixers import (
    AttentionSpec,
    BranchSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    NormKind,
    RecurrentSpec,
    ShortConvSpec,
    WeightSpec,
)
from simpar.specs.model import (
    MOST_LENGTH,
    CnnSpec,
    Count,
    Layers,
    Length,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    NonNegative,
    Positive,
    TransformerSpec,
)

MOST_LAYERS = 10_000


class SublayerSpec(Spec):
    """One residual step: branches side by side on the same input, their outputs added to the stream."""

    branches: tuple[BranchSpec, ...]
    """Mixers or feed-forwards side by side."""
    norm: Literal["pre", "post", "sandwich", "none"] = "pre"
    """Before the branches, after them, or both."""
    num_norms: NonNegative | None = None
    """Norms with weights where `norm` does not say it (one per branch: 2)."""
    shared_weights: str = ""
    """Sublayers of the same name in one stack hold their weights once (Zamba2, ALBERT)."""
    modulated: bool = False
    """What enters is scaled and shifted, what leaves is scaled, by vectors that follow from a sample's time or class (DiT)."""
    extra: tuple[WeightSpec, ...] = ()
    """Weights beside them."""


class LayerSpec(Spec):
    """One layer: residual steps in order."""

    sublayers: tuple[SublayerSpec, ...]
    """In order."""
    extra: tuple[WeightSpec, ...] = ()
    """Weights beside them."""


class StackSpec(Spec):
    """Layers over one stream of tokens: the decoder, an encoder, a vision tower."""

    name: str = "decoder"
    """Such as decoder."""
    hidden_size: Positive
    """Width of the residual stream."""
    layers: dict[str, LayerSpec] = {}
    """Kinds of layers by name."""
    pattern: tuple[str, ...] = ()
    """Their order, first to last; "local*5" stands for five."""
    norm: NormKind = "rmsnorm"
    """Kind of norm."""
    final_norm: bool = True
    """A norm at the end."""
    tower: bool = False
    """Not part of a text token's way: a vision or audio encoder and its projector."""
    input_tokens: NonNegative = 0
    """Tokens of one input of a tower, where all have one size; 0 = they have any."""
    merge: Positive = 1
    """Tokens of a tower that its projector joins to one of the decoder's."""
    residual_streams: Positive = 1
    """Residual streams side by side (hyper-connections; AltUp)."""
    extra: tuple[WeightSpec, ...] = ()
    """Weights beside the layers."""

    def __hash__(self) -> int:
        return hash((self.name, self.hidden_size, tuple(self.layers.items()), self.pattern, self.norm, self.tower, self.extra))

    @model_validator(mode="after")
    def _known_kinds(self) -> StackSpec:
        for entry in self.pattern:
            name, _, count = entry.partition("*")
            if name not in self.layers:
                raise ValueError(f"pattern names the layer {name!r}; layers has {', '.join(sorted(self.layers)) or 'none'}")
            if count and not re.fullmatch("[1-9][0-9]*", count):
                raise ValueError(f"pattern has {entry!r}; a count is a positive integer, as in {name}*5")
        total = sum(int(entry.partition("*")[2] or 1) for entry in self.pattern)
        if total > MOST_LAYERS:
            raise ValueError(f"pattern has {total:,} layers; at most {MOST_LAYERS:,}")
        return self

    def sequence(self) -> tuple[str, ...]:
        """Names of the layers' kinds, one per layer."""
        names: list[str] = []
        for entry in self.pattern:
            name, _, count = entry.partition("*")
            names += [name] * int(count or 1)
        return tuple(names)


class ArchitectureSpec(Spec):
    """A model of any layers: `stacks` in the order in which tokens meet them."""

    kind: Literal["layers"] = "layers"
    """Marks the table as an architecture of layers."""
    name: str = ""
    """What reports call it."""
    vocab_size: Annotated[int, Field(ge=0, le=MOST_LENGTH)] = 0
    """Rows of the word embedding and columns of the head; 0 = neither (diffusion)."""
    embedding_rows: NonNegative = 0
    """Rows of the word embedding where they are not vocab_size."""
    embedding_size: NonNegative = 0
    """Width of the word embedding where it is not the last stack's hidden size; its projection is an extra weight."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""
    head: bool = True
    """A projection to the vocabulary (False: an encoder without one)."""
    head_bias: bool = False
    """Bias on the head."""
    max_position_embeddings: Length = 8192
    """Longest sequence."""
    stacks: tuple[StackSpec, ...]
    """One after the other, such as encoder and decoder."""
    extra: tuple[WeightSpec, ...] = ()
    """Weights outside all stacks: positions, token types, projections around embedding and head."""
    num_nextn_predict_layers: Layers = 0
    """Multi-token-prediction modules that a training run adds; not counted in the parameters."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """After attention and feed-forward, as the model's file states it; see training.dropout."""
    even_routing: bool = False
    """A bias per expert keeps loads even (balancing without an auxiliary loss), a parameter or a buffer; see training.routing."""
    notes: tuple[str, ...] = ()
    """What the reader of the file left out or assumed."""
    published_parameters: Count | None = None
    """The published count, where one is known exactly."""
    published_as: str = ""
    """The count as printed."""
    source: str = ""
    """Where the facts stand."""

    @field_validator("stacks")
    @classmethod
    def _has_a_stream(cls, stacks: tuple[StackSpec, ...]) -> tuple[StackSpec, ...]:
        if all(stack.tower for stack in stacks):
            raise ValueError("stacks need one that is not a tower: the tokens that are trained on")
        return stacks

    @property
    def text(self) -> StackSpec:
        """The stack whose tokens the head sees: the last one that is not a tower."""
        return [stack for stack in self.stacks if not stack.tower][-1]

    def branches(self) -> tuple[BranchSpec, ...]:
        """Every different branch of the stacks that are not towers."""
        found = (
            branch
            for stack in self.stacks
            if not stack.tower
            for layer in stack.layers.values()
            for step in layer.sublayers
            for branch in step.branches
        )
        return tuple(dict.fromkeys(found))

    @property
    def num_layers(self) -> int:
        """Layers that pipeline stages share out."""
        return sum(len(stack.sequence()) for stack in self.stacks if not stack.tower)

    @property
    def moe(self) -> MoeSpec | None:
        """The experts, as a TransformerSpec has them; of several kinds the first."""
        for branch in self.branches():
            if isinstance(branch, ExpertsSpec):
                return MoeSpec(
                    num_experts=branch.num_experts, num_experts_per_tok=branch.num_experts_per_tok,
                    moe_intermediate_size=branch.width, shared_expert_intermediate_size=branch.shared_width,
                    transformers_class=branch.transformers_class,
                )  # fmt: skip
        return None

    @property
    def mla(self) -> MlaSpec | None:
        """The latent attention, as a TransformerSpec has it; None where there is none."""
        for branch in self.branches():
            if isinstance(branch, LatentAttentionSpec) and branch.qk_nope_head_dim and branch.qk_rope_head_dim:
                return MlaSpec(
                    q_lora_rank=branch.q_lora_rank, kv_lora_rank=branch.kv_lora_rank, qk_nope_head_dim=branch.qk_nope_head_dim,
                    qk_rope_head_dim=branch.qk_rope_head_dim, v_head_dim=branch.v_head_dim,
                )  # fmt: skip
        return None

    @property
    def head_dim(self) -> int:
        """Width of the widest query head; 0 without attention."""
        return max((branch.head_dim for branch in self.branches() if isinstance(branch, AttentionSpec)), default=0)

    def tensor_widths(self) -> list[tuple[str, int]]:
        """What tensor parallelism splits, and into how many parts it may go at most."""
        found: list[tuple[str, int]] = []
        for branch in self.branches():
            if isinstance(branch, (AttentionSpec, LatentAttentionSpec, LinearAttentionSpec, Mamba2Spec)):
                found.append((f"the heads of {branch.kind}", branch.num_heads))
            elif isinstance(branch, DeltaSpec):
                found += [("the key heads of delta", branch.num_key_heads), ("the value heads of delta", branch.num_value_heads)]
            elif isinstance(branch, (FeedForwardSpec, ShortConvSpec, RecurrentSpec)):
                found.append((f"the width of {branch.kind}", branch.width))
            elif isinstance(branch, ExpertsSpec) and branch.shared_width:
                found.append(("the shared expert's width", branch.shared_width))
            elif isinstance(branch, Mamba1Spec):
                found.append(("the channels of mamba1", branch.inner_size))
        return list(dict.fromkeys(found))

    def tensor_groups(self) -> list[tuple[str, int]]:
        """What tensor parallelism splits or, beyond their number, replicates: key and value heads, state-space groups."""
        found = [("num_key_value_heads", b.num_key_value_heads) for b in self.branches() if isinstance(b, AttentionSpec)]
        found += [("the groups of mamba2", b.num_groups) for b in self.branches() if isinstance(b, Mamba2Spec)]
        return list(dict.fromkeys(found))


TokenModel = TransformerSpec | ArchitectureSpec
"""Models of tokens: what the two forms of a transformer share."""
ModelSpec = Annotated[TransformerSpec | MlpSpec | CnnSpec | ArchitectureSpec, Field(discriminator="kind")]


def has_experts(model: object) -> bool:
    """Whether a model routes tokens to experts."""
    return isinstance(model, TokenModel) and model.moe is not None


def head_sizes(model: object) -> tuple[float, float]:
    """(Words, hidden size) of what a language model's loss works on; 1 and 1 of a model without words."""
    if not isinstance(model, TokenModel):
        return 1.0, 1.0
    stream = model.text if isinstance(model, ArchitectureSpec) else model
    return float(model.vocab_size), float(stream.hidden_size)
