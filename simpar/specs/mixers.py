"""What mixes tokens or works on each of them: one class for every kind of branch of a layer.

A layer (specs/architecture.py) is residual steps of these; a mixer from elsewhere derives from `Mixer` and enters `OTHER_MIXERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, WrapValidator

from simpar.specs.base import Spec
from simpar.specs.model import Count, NonNegative, Positive

NormKind = Literal["rmsnorm", "layernorm", "layernorm_no_bias", "unweighted"]


class WeightSpec(Spec):
    """A weight beside those that a mixer's own fields imply."""

    name: str
    """Of the weight."""
    kind: Literal["linear", "vector", "lookup", "conv"] = "linear"
    """linear: a matmul; vector: element by element; lookup: a table read by index; conv: `inputs` taps for each of `outputs`."""
    inputs: Count = 1
    """Features in."""
    outputs: Count = 1
    """Features out."""
    bias: bool = False
    """With a bias."""
    copies: Count = 1
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
    query_rank: NonNegative = 0
    """Width that queries are compressed to, with a norm, before their heads' matrix (Step-3); 0: they are not."""
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
    packed: bool = False
    """The model's own code multiplies queries, keys and values by one matrix (GPT-2)."""
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
    position: Literal["rope", "none", "alibi", "relative", "absolute"] = "rope"
    """How positions enter."""
    rope_factor: bool = False
    """Sine and cosine are multiplied by a factor (YaRN's concentration, 0.1 ln(scale) + 1)."""
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
    limit: Positive | None = None
    """Both halves of the gated unit are clamped to it before the activation (GPT-OSS: 7)."""
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
    transformers_class: Literal["modules", "tensors", "every"] = "modules"
    """How the family's class in transformers has its experts: modules, a tensor of all of them, or one whose every expert runs on
    every token (Llama 4)."""


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
