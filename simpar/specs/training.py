"""What is trained on, how: sequence, batch, precision, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpar.specs.base import Spec

Precision = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]


class RoutingSpec(Spec):
    """How tokens spread over experts."""

    kind: Literal["balanced", "uniform", "zipf", "counts"] = "balanced"
    """balanced: every expert has the mean; uniform: every expert is as likely, so chance alone spreads the tokens."""
    alpha: Annotated[float, Field(ge=0)] = 0.0
    """Zipf exponent of the expert popularity."""
    counts: tuple[float, ...] = ()
    """Measured relative load per expert."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """Fixed expert capacity (drop and pad) as a multiple of the mean; none = dropless."""


class TrainingSpec(Spec):
    """One step's work."""

    sequence_length: Annotated[int, Field(gt=0)] = 1
    """Tokens per sequence (1 for models without a sequence)."""
    global_batch_size: Annotated[int, Field(gt=0)]
    """Sequences (samples) per step."""
    micro_batch_size: Annotated[int, Field(gt=0)] = 1
    """Sequences per micro-batch and data-parallel rank."""
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adamw-bf16-moments", "muon", "none"] = "adamw"
    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Accumulation and reduction; none = the framework's default."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    attention_kernel: Literal["auto", "unfused", "fa1", "fa2", "fa3", "cudnn"] = "auto"
    """auto = the framework's of that time on that GPU."""
    cross_entropy: Literal["auto", "unfused", "fused", "chunked"] = "auto"
    compile: bool | None = None
    cuda_graphs: bool = False
    cuda_graph_scope: Literal["layer", "attention"] = "layer"
    """What graphs hold: whole layers, or all but experts and their dispatch."""
    routing: RoutingSpec = RoutingSpec()
    trainable: Literal["all", "lora"] = "all"
    lora_rank: Annotated[int, Field(gt=0)] = 16
