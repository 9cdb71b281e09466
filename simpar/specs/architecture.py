"""A model as stacks of layers, where a layer is any list of mixers and feed-forwards: the general form of a model.

`TransformerSpec` (specs/model.py) is the short form for layers that are all alike. A [model] table with kind = "layers" writes
the general one; the reader of config.json files (simpar/model) makes it from theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, WrapValidator, field_validator, model_validator

from simpar.specs.base import Spec
from simpar.specs.model import CnnSpec, MlaSpec, MlpSpec, MoeSpec, TransformerSpec

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
MOST_LAYERS = 10_000
NormKind = Literal["rmsnorm", "layernorm", "layernorm_no_bias", "unweighted"]


class WeightSpec(Spec):
    """A weight beside those that a mixer's own fields imply."""

    name: str
    """Of the weight."""
    kind: Literal["linear", "vector", "lookup", "conv"] = "linear"
    """linear: a matmul; vector: element by element; lookup: a table read by index; conv: `inputs` taps for each of `outputs`."""
    inputs: Positive = 1
    """Features in."""
    outputs: Positive = 1
    """Features out."""
    bias: bool = False
    """With a bias."""
    copies: Positive = 1
    """Such weights side by side (blocks of a block-diagonal matrix, experts)."""
    uses: float | None = None
    """Times that one token meets it; absent = once for every copy. 0: not a token's work (per image, per sample)."""


class IndexerSpec(Spec):
    """What a sparse attention uses to choose its keys (DeepSeek-V3.2, GLM-5, MiniMax M3)."""

    num_heads: Positive
    """Heads that score keys."""
    head_dim: Positive
    """Width of one."""
    top_k: Positive
    """Keys that a query attends."""
    block: Positive = 1
    """Keys are chosen in blocks of so many."""
    compress: Positive = 1
    """One index key stands for so many tokens."""
    owned: bool = True
    """False: the choice of an earlier layer is used again, without weights or scores of its own."""


class Mixer(Spec):
    """What every branch of a layer may carry. A subclass from elsewhere has a `kind` of its own and writes its nodes itself."""

    extra: tuple[WeightSpec, ...] = ()
    """Weights beside its own."""

    def write(self, writer: Any, x: str) -> list[str]:
        """Nodes of this branch on the tensor `x`, by the layer's `writer` (simpar/model/writer.py); what it adds to the stream."""
        raise NotImplementedError


class AttentionSpec(Mixer):
    """Softmax attention: multi-head, grouped-query or multi-query; self- or cross-attention."""

    kind: Literal["attention"] = "attention"
    """Marks the table."""
    num_heads: Positive
    """Query heads."""
    num_key_value_heads: Positive
    """Heads of keys and values."""
    head_dim: Positive
    """Width of a head."""
    v_head_dim: Positive | None = None
    """Width of a value head where it is not head_dim (MiMo-V2)."""
    causal: bool = True
    """A query sees no later keys."""
    window: Positive | None = None
    """Keys that a query sees, itself included; to each side where not causal."""
    chunk: Positive | None = None
    """Attention within chunks of so many tokens (Llama 4)."""
    keys: Positive | None = None
    """Cross-attention to so many keys of another stream (image tokens)."""
    joint_keys: NonNegative = 0
    """Further keys that every query sees, of a stream beside this one (FLUX's text)."""
    cross: bool = False
    """Keys and values come from another stream."""
    kv_hidden_size: Positive | None = None
    """Width of that stream where it is another."""
    key_value: Literal["own", "shared", "key_only", "query_only"] = "own"
    """shared: of an earlier layer (Gemma 3n); key_only: values are the keys (Gemma 4's global layers)."""
    q_bias: bool = False
    """Bias on queries."""
    k_bias: bool = False
    """Bias on keys."""
    v_bias: bool = False
    """Bias on values."""
    o_bias: bool = False
    """Bias on the output projection."""
    qk_norm: Literal["none", "head", "full", "each_head"] = "none"
    """Normalised queries and keys: head_dim weights shared by the heads, one weight per channel, or one norm for each head."""
    qk_norm_kind: NormKind = "rmsnorm"
    """Kind of norm of queries and keys."""
    gate: Literal["none", "element", "head"] = "none"
    """A sigmoid gate on the output, per channel (Qwen3-Next) or per head (Step-3.5)."""
    gate_bias: bool = False
    """Bias on the gate."""
    sinks: bool = False
    """A learned sink logit per head (gpt-oss)."""
    softcap: float | None = None
    """Scores are bent to stay below it."""
    position: Literal["rope", "none", "alibi", "relative", "absolute"] = "rope"
    """How positions enter."""
    rotary_fraction: float = 1.0
    """Share of a head that is rotated."""
    indexer: IndexerSpec | None = None
    """Chooses the keys that are attended; none = all of the mask."""


class LatentAttentionSpec(Mixer):
    """Multi-head latent attention (DeepSeek-V2 on)."""

    kind: Literal["latent_attention"] = "latent_attention"
    """Marks the table."""
    num_heads: Positive
    """Query heads."""
    q_lora_rank: NonNegative = 0
    """Width that queries are compressed to; 0: they are not."""
    kv_lora_rank: Positive
    """Width that keys and values are compressed to."""
    qk_nope_head_dim: NonNegative
    """Part of a query or key head without rotary embedding."""
    qk_rope_head_dim: NonNegative
    """Part with it."""
    v_head_dim: Positive
    """Width of a value head."""
    window: Positive | None = None
    """Keys that a query sees at most; none = all of the mask."""
    a_bias: bool = False
    """Biases on the down-projections and the output."""
    gate: Literal["none", "element", "head"] = "none"
    """A gate on the output."""
    indexer: IndexerSpec | None = None
    """Chooses the keys that are attended; none = all of the mask."""


class Mamba1Spec(Mixer):
    """Selective state space (Mamba, Jamba, FalconMamba)."""

    kind: Literal["mamba1"] = "mamba1"
    """Marks the table."""
    inner_size: Positive
    """Channels of the scan."""
    state_size: Positive
    """State per channel."""
    time_step_rank: Positive
    """Width that time steps are compressed to."""
    conv_kernel: Positive = 4
    """Tokens under the convolution."""
    conv_bias: bool = True
    """Bias on it."""
    bias: bool = False
    """Biases on the projections."""
    inner_norms: bool = False
    """Norms with weights on dt, B and C (Jamba)."""


class Mamba2Spec(Mixer):
    """State-space duality (Mamba 2, Nemotron-H, Falcon-H1, Zamba2, Granite 4)."""

    kind: Literal["mamba2"] = "mamba2"
    """Marks the table."""
    num_heads: Positive
    """Heads of the scan."""
    head_dim: Positive
    """Width of one."""
    num_groups: Positive = 1
    """Groups that share B and C."""
    state_size: Positive
    """State per channel."""
    conv_kernel: Positive = 4
    """Tokens under the convolution."""
    conv_bias: bool = True
    """Bias on it."""
    bias: bool = False
    """Biases on the projections."""
    out_norm: bool = True
    """A gated norm before the output projection."""
    chunk: Positive = 256
    """Tokens that the scan takes at once."""


class DeltaSpec(Mixer):
    """Gated delta rule: Gated DeltaNet (Qwen3-Next, Qwen3.5) and, with a decay per channel, Kimi Delta Attention."""

    kind: Literal["delta"] = "delta"
    """Marks the table."""
    num_key_heads: Positive
    """Heads of queries and keys."""
    num_value_heads: Positive
    """Heads of values."""
    key_head_dim: Positive
    """Width of a key head."""
    value_head_dim: Positive
    """Width of a value head."""
    conv_kernel: NonNegative = 4
    """0 = no short convolutions."""
    conv_bias: bool = False
    """Bias on the convolutions."""
    decay: Literal["head", "channel", "none"] = "head"
    """The state decays by one factor per head, one per channel, or not."""
    decay_rank: NonNegative = 0
    """Low rank of the decay's projection; 0 = a direct one."""
    gate: bool = True
    """The output is gated."""
    gate_rank: NonNegative = 0
    """Low rank of the output gate's projection; 0 = a full matrix."""
    chunk: Positive = 64
    """Tokens that the scan takes at once."""


class LinearAttentionSpec(Mixer):
    """Linear attention with a decay: lightning attention (MiniMax), gated linear attention, retention."""

    kind: Literal["linear_attention"] = "linear_attention"
    """Marks the table."""
    num_heads: Positive
    """Heads."""
    num_key_value_heads: Positive | None = None
    """Heads of keys and values where they are fewer."""
    key_head_dim: Positive
    """Width of a key head."""
    value_head_dim: Positive
    """Width of a value head."""
    scan: Literal["linear", "dplr"] = "linear"
    """dplr: a state transition that is diagonal plus low rank (RWKV-7)."""
    conv_kernel: NonNegative = 0
    """Short convolutions over queries, keys and values; 0 = none."""
    conv_bias: bool = False
    """Bias on the convolutions."""
    gate: bool = True
    """The output is gated."""
    norm_size: NonNegative = 0
    """Weights of the norm on the output; 0 = none."""
    chunk: Positive = 256
    """Tokens that the scan takes at once."""
    bias: bool = False
    """Biases on the projections."""


class ShortConvSpec(Mixer):
    """Gated short convolution (LFM2): in-projection to three streams, a depthwise convolution, out-projection."""

    kind: Literal["short_conv"] = "short_conv"
    """Marks the table."""
    width: Positive
    """Channels."""
    kernel: Positive = 3
    """Tokens under the convolution."""
    bias: bool = False
    """Biases."""


class RecurrentSpec(Mixer):
    """Real-gated linear recurrent unit (RecurrentGemma, Griffin)."""

    kind: Literal["recurrent"] = "recurrent"
    """Marks the table."""
    width: Positive
    """Channels of the recurrence."""
    num_heads: Positive
    """Blocks of its gates."""
    conv_kernel: Positive = 4
    """Tokens under the convolution."""


class FeedForwardSpec(Mixer):
    """Dense feed-forward."""

    kind: Literal["mlp"] = "mlp"
    """Marks the table."""
    width: Positive
    """Of the hidden layer."""
    gated: bool = True
    """Three matrices instead of two."""
    bias: bool = False
    """Biases."""
    activation: str = "silu"
    """Between them."""


class ExpertsSpec(Mixer):
    """Routed experts with the shared ones beside them."""

    kind: Literal["experts"] = "experts"
    """Marks the table."""
    num_experts: Positive
    """Routed experts."""
    num_experts_per_tok: Positive
    """Experts that work on a token."""
    width: Positive
    """Hidden width of one."""
    gated: bool = True
    """Three matrices instead of two."""
    bias: bool = False
    """Biases in the experts."""
    activation: str = "silu"
    """Between the matrices."""
    input_size: Positive | None = None
    """Width inside which the experts work (latent experts of Nemotron 3 Super)."""
    router: Literal["linear", "none"] = "linear"
    """Whether it has weights of its own."""
    router_bias: bool = False
    """A parameter per expert beside the router's matrix."""
    zero_experts: NonNegative = 0
    """Experts that return their input: routed to, without weights (LongCat)."""
    shared_width: NonNegative = 0
    """Total width of the shared experts."""
    shared_gate: bool = False
    """A gate on the shared expert."""
    num_groups: NonNegative = 0
    """Groups that routing is limited to."""
    top_groups: NonNegative = 0
    """Groups that a token may use."""


class CustomSpec(Mixer):
    """Anything else, by its weights and the FLOPs of its kernel (per token, forward)."""

    kind: Literal["custom"] = "custom"
    """Marks the table."""
    label: str
    """What reports call it."""
    kernel_flops: float = 0.0
    """FLOPs of its kernel per token, beside its weights."""
    attention_columns: NonNegative = 0
    """Query and output columns of a softmax attention in it; causal, or as the three fields below say."""
    window: Positive | None = None
    """Keys that a query sees at most; none = all of the mask."""
    compress: NonNegative = 0
    """One compressed key for so many tokens beside the window (DeepSeek-V4); 0 = none."""
    top_k: NonNegative = 0
    """Compressed keys that a query attends; 0 = all."""
    index_columns: NonNegative = 0
    """Columns of the indexer that chooses them."""


OTHER_MIXERS: dict[str, type[Mixer]] = {}
"""Kind -> mixer from elsewhere; a line here makes it known to [model] tables."""


def _other(value: Any, usual: Callable[[Any], Any]) -> Any:
    """A branch of a kind in `OTHER_MIXERS`; any other by the union below."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    other = OTHER_MIXERS.get(kind) if isinstance(kind, str) else None
    return usual(value) if other is None else other.model_validate(value)


BranchSpec = Annotated[
    AttentionSpec | LatentAttentionSpec | Mamba1Spec | Mamba2Spec | DeltaSpec | LinearAttentionSpec | ShortConvSpec | RecurrentSpec
    | FeedForwardSpec | ExpertsSpec | CustomSpec,
    Field(discriminator="kind"), WrapValidator(_other), SerializeAsAny(),
]  # fmt: skip


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
    vocab_size: NonNegative = 0
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
    max_position_embeddings: Positive = 8192
    """Longest sequence."""
    stacks: tuple[StackSpec, ...]
    """One after the other, such as encoder and decoder."""
    extra: tuple[WeightSpec, ...] = ()
    """Weights outside all stacks: positions, token types, projections around embedding and head."""
    num_nextn_predict_layers: NonNegative = 0
    """Multi-token-prediction modules that a training run adds; not counted in the parameters."""
    notes: tuple[str, ...] = ()
    """What the reader of the file left out or assumed."""
    published_parameters: Positive | None = None
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
