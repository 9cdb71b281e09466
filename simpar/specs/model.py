"""A model as the user writes it: a transformer (dense, MoE, MLA, encoder-decoder), a deep MLP, or a CNN.

Field names are Hugging Face's where it has one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simpar.specs.base import Spec

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class MoeSpec(Spec):
    """Mixture-of-experts feed-forward layers."""

    num_experts: Positive
    num_experts_per_tok: Positive
    moe_intermediate_size: Positive
    """Width of one routed expert."""
    shared_expert_intermediate_size: NonNegative = 0
    """Total width of the shared experts; 0 = none."""
    shared_expert_gate: bool = False
    """A sigmoid gate of hidden_size weights in front of the shared expert (Qwen2-MoE)."""
    first_k_dense_replace: NonNegative = 0
    """Leading layers that stay dense, of width intermediate_size."""
    moe_layer_freq: Positive = 1
    """Every moe_layer_freq-th layer is MoE (2 = every other one: Switch, GLaM)."""
    router_bias: bool = False
    """A bias per expert added to the scores for selection (DeepSeek-V3's auxiliary-free balancing)."""
    topk_group: NonNegative = 0
    """Groups (nodes) a token may reach; 0 = no limit."""
    n_group: NonNegative = 0


class MlaSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2/V3)."""

    q_lora_rank: NonNegative = 0
    """0 = queries are projected directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive


class TransformerSpec(Spec):
    """A decoder-only (or, with num_decoder_layers, encoder-decoder) transformer."""

    kind: Literal["transformer"] = "transformer"
    name: str = ""
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    max_position_embeddings: Positive = 8192
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    """Three matrices (SwiGLU, GeGLU) instead of two."""
    activation: Literal["silu", "gelu", "relu", "squared_relu"] = "silu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    position: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    attention_bias: bool = False
    """Biases on the Q, K, V projections."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    swiglu_limit: Positive | None = None
    """Both halves of the gated unit are clamped to it before the activation (GPT-OSS: 7)."""
    qk_norm: bool = False
    """Normalisation of queries and keys per head (head_dim weights each)."""
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM)."""
    final_norm: bool = True
    block_norms: Literal[1, 2, 4] = 2
    """Norms per layer: before each sub-block (2), after each as well (4: Gemma 2, Grok-1), one shared (1: GPT-J)."""
    parallel_block: bool = False
    """Attention and MLP side by side from one input (GPT-J, Falcon)."""
    head_bias: bool = False
    sliding_window: Positive | None = None
    num_decoder_layers: NonNegative = 0
    """Decoder layers with cross-attention on top of num_hidden_layers encoder layers (T5, Switch)."""
    relative_position_buckets: NonNegative = 0
    """position = "relative": learned biases per head and bucket, one table per stack (T5: 32)."""
    num_nextn_predict_layers: NonNegative = 0
    """Multi-token-prediction modules (DeepSeek-V3)."""
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    published_parameters: Positive | None = None
    """The published count, where one is known exactly; the tests compare."""
    published_as: str = ""
    """The count as printed ("175B") where no exact one is known; the tests compare to the printed digits."""
    published_scope: Literal["total", "non_embedding"] = "total"
    """What is counted: all but the multi-token-prediction modules, or less the word embeddings too."""
    published_rounding: Literal["nearest", "truncated"] = "nearest"
    """How the printed digits relate to the count."""
    source: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TransformerSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide num_attention_heads ({self.num_attention_heads})"
            )
        if self.moe and self.moe.num_experts_per_tok > self.moe.num_experts:
            raise ValueError(
                f"moe.num_experts_per_tok ({self.moe.num_experts_per_tok}) must be at most moe.num_experts ({self.moe.num_experts})"
            )
        return self

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` (from 0) has routed experts."""
        if self.moe is None or index < self.moe.first_k_dense_replace:
            return False
        return (index + 1) % self.moe.moe_layer_freq == 0


class MlpSpec(Spec):
    """A deep MLP: `depth` square layers of `width` with non-linearities; input and output layers where given."""

    kind: Literal["mlp"] = "mlp"
    name: str = ""
    width: Positive
    depth: Positive
    input_size: Positive | None = None
    output_size: Positive | None = None
    bias: bool = True
    published_parameters: Positive | None = None
    published_as: str = ""
    source: str = ""


class ConvLayerSpec(Spec):
    """One layer of a convolutional net."""

    kind: Literal["conv", "pool", "linear"]
    out_channels: Positive | None = None
    """Filters of a conv, units of a linear."""
    kernel_size: Positive = 1
    stride: Positive = 1
    padding: NonNegative = 0
    groups: Positive = 1


class CnnSpec(Spec):
    """A convolutional net as a list of layers (AlexNet)."""

    kind: Literal["cnn"] = "cnn"
    name: str = ""
    image_size: Positive
    in_channels: Positive = 3
    layers: tuple[ConvLayerSpec, ...]
    published_parameters: Positive | None = None
    published_as: str = ""
    source: str = ""
