"""What a framework and a training setup change about the work itself: fusion, what is saved, which loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """How a framework runs a block.

    Attributes:
        fused_activation: gate and activation in one kernel that saves only its input (Megatron, compiled torch).
        fused_residual: bias, dropout and residual addition in one kernel.
        fused_norm: one-kernel norm saving its input and the row statistics.
        fused_rope: one kernel for queries and keys; False = several elementwise kernels.
        flash_attention: no score matrix is stored; False stores softmax output (and its dropout) per head.
        dropout: probability; > 0 stores one mask byte per element of each residual branch.
        linear_input_bytes: saved input of a matmul, per element (1 under fp8, 2 else).
        loss: how logits and cross-entropy are kept: fused (in place), unfused (fp32 copies), chunked over the sequence.
        loss_all_reduces: all-reduces of one fp32 value per token that a loss over split logits takes.
        loss_chunks: chunks of the chunked loss.
        loss_kernel, loss_bytes: class of the loss's kernels, and what they move per logit forward and backward.
        logits_fp32_copies: fp32 tensors of logits size alive at the peak of the backward.
        logits_gathered: ranks whose logits each rank gathers before the loss (1: they stay split over the vocabulary).
        fused_expert_bias: the experts' biases and the clamp of their activation are part of other kernels; else each is a chain of
            elementary operations, in fp32 where routing probabilities scale the bias (Megatron-LM experts.py `_apply_bias`).
        whole_embedding_gradient: the gradient of a vocabulary split over tensor ranks is whole on each (DTensor).
        value_views: latent attention keeps its values as a view of the whole up-projection of keys and values.
        expert_output_fp32: the experts' outputs are weighed by the routing probabilities in fp32, and kept so.
        qkv_copies: further copies of the packed queries, keys and values that attention keeps.
        output_copies: further copies of the attention output kept until the backward.
        stored: (tensor, bytes per element) of saved tensors that are kept in another format than they are computed in.
        gather_share: bytes of a tensor-parallel gather before a matmul, or of an output's gradient, over 16-bit ones (cast to fp8
            first: a half).
        overlapped_gathers: chunked overlap of tensor parallelism takes in the gathers, not the reductions alone.
        saves_gathered_input: under sequence parallelism the gathered input of a column-parallel matmul is what is saved
            (torch eager) instead of gathering again (Megatron).
    """

    fused_activation: bool = True
    fused_residual: bool = True
    fused_norm: bool = True
    fused_rope: bool = True
    flash_attention: bool = True
    dropout: float = 0.0
    linear_input_bytes: float = 2.0
    loss: Literal["fused", "unfused", "chunked"] = "fused"
    loss_all_reduces: int = 3
    loss_chunks: int = 1
    loss_kernel: str = "cross_entropy"
    loss_bytes: tuple[float, float] = (6.0, 6.0)
    logits_fp32_copies: float = 1.0
    logits_gathered: int = 1
    gather_share: float = 1.0
    overlapped_gathers: bool = True
    saves_gathered_input: bool = False
    fused_expert_bias: bool = True
    whole_embedding_gradient: bool = False
    value_views: bool = False
    expert_output_fp32: bool = False
    qkv_copies: float = 0.0
    output_copies: float = 0.0
    stored: tuple[tuple[str, float], ...] = ()
