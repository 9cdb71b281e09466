"""A model as the user writes it: a transformer (dense, MoE, MLA, encoder-decoder), a deep MLP, or a CNN.

Field names are Hugging Face's where it has one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from simpar.specs.base import Spec

MOST_WIDTH: Final = 2**24
"""Of any width, number of heads or experts of a model."""
MOST_LENGTH: Final = 2**32
"""Tokens of a sequence, words of a vocabulary, positions."""
Positive = Annotated[int, Field(gt=0, le=MOST_WIDTH)]
NonNegative = Annotated[int, Field(ge=0, le=MOST_WIDTH)]
Length = Annotated[int, Field(gt=0, le=MOST_LENGTH)]
Layers = Annotated[int, Field(ge=0)]
"""How many are too many: specs/size.py."""
Count = Annotated[int, Field(gt=0)]


class MoeSpec(Spec):
    """Mixture-of-experts feed-forward layers."""

    num_experts: Positive
    """Routed experts per layer."""
    num_experts_per_tok: Positive
    """Experts that work on a token."""
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
    """Groups that routing is limited to (DeepSeek); 0: none."""
    transformers_class: Literal["modules", "tensors", "every"] = "modules"
    """How the family's class in transformers has its experts: modules, a tensor of all of them, or one whose every expert runs on
    every token (Llama 4)."""


class MlaSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2/V3)."""

    q_lora_rank: NonNegative = 0
    """0 = queries are projected directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: Positive
    """Width that keys and values are compressed to."""
    qk_nope_head_dim: Positive
    """Part of a query or key head without rotary embedding."""
    qk_rope_head_dim: Positive
    """Part with it."""
    v_head_dim: Positive
    """Width of a value head."""


class TransformerSpec(Spec):
    """A decoder-only (or, with num_decoder_layers, encoder-decoder) transformer."""

    kind: Literal["transformer"] = "transformer"
    """Marks the table as a transformer."""
    name: str = ""
    """What reports call it."""
    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the MLP."""
    num_hidden_layers: Count
    """Layers (of the encoder, where there is a decoder)."""
    num_attention_heads: Positive
    """Query heads."""
    num_key_value_heads: Positive
    """Heads of keys and values: fewer than query heads is grouped-query attention."""
    head_dim: Positive
    """Width of a head."""
    vocab_size: Length
    """Words of the embedding."""
    max_position_embeddings: Length = 8192
    """Longest sequence; the size of learned position embeddings."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""
    gated_mlp: bool = True
    """Three matrices (SwiGLU, GeGLU) instead of two."""
    activation: Literal["silu", "gelu", "relu", "squared_relu", "gelu_new", "gelu_fast", "quick_gelu"] = "silu"
    """Of the MLP. The last three are GELUs that transformers writes out in elementary operations."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """After attention and the MLP, as the model's file states it; see training.dropout."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of norm."""
    position: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    """How positions enter."""
    even_routing: bool = False
    """A bias per expert keeps loads even (balancing without an auxiliary loss), a parameter or a buffer; see training.routing."""
    packed_attention: bool = False
    """The model's own code multiplies queries, keys and values by one matrix (GPT-2)."""
    attention_bias: bool = False
    """Biases on the Q, K, V projections."""
    attention_out_bias: bool = False
    """Bias on the output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    swiglu_limit: Positive | None = None
    """Both halves of the gated unit are clamped to it before the activation (GPT-OSS: 7)."""
    qk_norm: bool = False
    """Normalisation of queries and keys per head (head_dim weights each)."""
    embedding_norm: bool = False
    """A norm right after the embedding (BLOOM)."""
    final_norm: bool = True
    """A norm before the head."""
    block_norms: Literal[1, 2, 4] = 2
    """Norms per layer: before each sub-block (2), after each as well (4: Gemma 2, Grok-1), one shared (1: GPT-J)."""
    parallel_block: bool = False
    """Attention and MLP side by side from one input (GPT-J, Falcon)."""
    head_bias: bool = False
    """Bias on the head."""
    sliding_window: Positive | None = None
    """Keys that a query sees at most, in every layer; none = all."""
    num_decoder_layers: Layers = 0
    """Decoder layers with cross-attention on top of num_hidden_layers encoder layers (T5, Switch)."""
    relative_position_buckets: NonNegative = 0
    """position = "relative": learned biases per head and bucket, one table per stack (T5: 32)."""
    num_nextn_predict_layers: Layers = 0
    """Multi-token-prediction modules (DeepSeek-V3)."""
    moe: MoeSpec | None = None
    """Experts in place of the MLP; none = dense."""
    mla: MlaSpec | None = None
    """Multi-head latent attention; none = ordinary attention."""
    published_parameters: Count | None = None
    """The published count, where one is known exactly; the tests compare."""
    published_as: str = ""
    """The count as printed ("175B") where no exact one is known; the tests compare to the printed digits."""
    published_scope: Literal["total", "non_embedding"] = "total"
    """What is counted: all but the multi-token-prediction modules, or less the word embeddings too."""
    published_rounding: Literal["nearest", "truncated"] = "nearest"
    """How the printed digits relate to the count."""
    source: str = ""
    """Where the facts stand."""

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

    def tensor_widths(self) -> list[tuple[str, int]]:
        """What tensor parallelism splits, and into how many parts it may go at most."""
        found = [("num_attention_heads", self.num_attention_heads)]
        if self.moe is None or self.moe.first_k_dense_replace or self.moe.moe_layer_freq > 1:
            found.append(("intermediate_size", self.intermediate_size))
        if self.moe and self.moe.shared_expert_intermediate_size:
            found.append(("the shared expert's width", self.moe.shared_expert_intermediate_size))
        return found

    def tensor_groups(self) -> list[tuple[str, int]]:
        """What tensor parallelism splits or, beyond their number, replicates."""
        return [("num_key_value_heads", self.num_key_value_heads)]


class MlpSpec(Spec):
    """A deep MLP: `depth` square layers of `width` with non-linearities; input and output layers where given."""

    kind: Literal["mlp"] = "mlp"
    """Marks the table as an MLP."""
    name: str = ""
    """What reports call it."""
    width: Positive
    """Of every layer."""
    depth: Count
    """Layers."""
    input_size: Positive | None = None
    """Features in."""
    output_size: Positive | None = None
    """Features out."""
    bias: bool = True
    """Biases in every layer."""
    published_parameters: Count | None = None
    """The published count, where one is known exactly."""
    published_as: str = ""
    """The count as printed."""
    source: str = ""
    """Where the facts stand."""


class ConvLayerSpec(Spec):
    """One layer of a convolutional net."""

    kind: Literal["conv", "pool", "linear"]
    """What the layer does."""
    out_channels: Positive | None = None
    """Filters of a conv, units of a linear."""
    kernel_size: Positive = 1
    """Pixels along a side."""
    stride: Positive = 1
    """Pixels between outputs."""
    padding: NonNegative = 0
    """Pixels added on each side."""
    groups: Positive = 1
    """Channel groups without connections between them."""


class CnnSpec(Spec):
    """A convolutional net as a list of layers (AlexNet)."""

    kind: Literal["cnn"] = "cnn"
    """Marks the table as a convolutional network."""
    name: str = ""
    """What reports call it."""
    image_size: Positive
    """Pixels along a side."""
    in_channels: Positive = 3
    """Channels of the image."""
    layers: tuple[ConvLayerSpec, ...]
    """In order."""
    published_parameters: Count | None = None
    """The published count, where one is known exactly."""
    published_as: str = ""
    """The count as printed."""
    source: str = ""
    """Where the facts stand."""
