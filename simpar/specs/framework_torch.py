"""What frameworks on plain torch modules share, and the dated rows of one of them, nanotron. See framework_rows.py."""

from __future__ import annotations

from typing import Any, Final

from simpar.specs.framework_releases import FrameworkRow as Row

TORCH: Final[dict[str, Any]] = {
    "fused_activation": False, "fused_residual": False, "fused_rope": False, "fused_softmax": False,
    "wgrad_accumulation_fusion": False, "loss": "unfused", "logits_fp32_copies": 2.5, "logits_fp32_copies_fused": 0.0,
    "optimizer_kernel": "fused", "optimizer_tensor_cpu_s": 18e-6,
    "bucket_elements_min": 0.0, "bucket_elements_per_rank": 0.0, "bucket_bytes": 25.0 * 2**20,
    "buckets_on_first_pipeline_rank_only": False, "attention": (("", "fa2"),), "input_gradient_releases": False,
    "gradients_persist": False, "contiguous_buffers": False,
    "abilities": ("pure_bf16", "optimizer_in_backward", "narrow_optimizers", "quantised_base", "host_parameters", "fused_kernels"),
}  # fmt: skip
"""What every framework on plain torch modules shares: torch 2.13 sources, saved tensors measured with hooks; 12 bytes per
logit at the peak as torch's memory tracker counts them (bf16 logits, fp32 log-softmax, its gradient and a transient); a fused loss
(Liger's, flash-attn's) turns the 16-bit logits into their gradient in place; host time of clip_grad_norm_ and a fused AdamW per
tensor (torch 2.13, one server core)."""

NANOTRON: Final = (
    Row(
        (2024, 1),
        {
            **TORCH, "fused_rope": True, "qkv_copies": 2 / 3, "layer_rounding": "cost", "zero_stage_with_pp": 1, "abilities": (),
            # gradients and optimizer
            "gradients_persist": True, "gradient_adds": "always", "whole_gradient_bytes": 16.0,
            # data parallelism
            "overlap_param_gather": False, "ddp_buckets": True,
            "sharded_grad_reduce": "all_reduce", "gather_copy_bytes": 12.0, "gather_buffer_bytes": 4.0,
            # pipeline
            "overlap_p2p_interleaved": False, "overlap_p2p_zero_bubble": False, "receives_block_host": True,
            "pending_collectives": 50,
            # host
            "layer_cpu_s": 1.8e-3, "collective_cpu_s": 55e-6,
        },
        "nanotron sources: 25 MB buckets, stages cut by compute cost, all-gather redone in the backward. trainer.py make_ddp: "
        "DistributedDataParallel without ZeRO, its buckets hold the 16-bit gradients; optim/gradient_accumulator.py all-reduces "
        "their fp32 sums as lists of tensors. With ZeRO-1 no DDP: one all-reduce of the fp32 buffer after the last backward "
        "(sync_gradients_across_dp, reduce_scatter=False); optim/zero.py and distributed.py all_gather_coalesced flatten, "
        "gather and copy back one slice per tensor and data rank. optim/clip_grads.py takes the norm of all fp32 gradients and "
        "scales them (4 + 8 bytes), zero_grad clears them (4), however the optimizer is sharded; every micro-batch adds each "
        "16-bit gradient to the fp32 buffer. Runs of the ultra-scale playbook without a pipeline and with one or two micro- "
        "batches per rank: 7 us per slice (up to 0.3 s at 256 data ranks), buckets 1.65 times slower beside the backward than "
        "alone at 32 to 256 data ranks. Regression over the memory columns of the same sweep: 11-12 bytes per logit, no "
        "gathered inputs kept, about 4h per token and layer beside torch's saved tensors, 50 partial sums of reduce-scatters "
        "(25 layers, what the launch queue of 1,024 holds) that torch 2.1 cannot reuse yet. parallel/pipeline_parallel/p2p.py "
        "_recv_meta reads shapes on the host before every receive. Host time from its launch-bound rows: 4.5 ms per layer and "
        "micro-batch from tp 2 on. Its pipelines over nodes take 2 ms more per tensor rank, layer and micro-batch: "
        "training.collective_checks (1.6 of them). Not explained: 6 to 10 ms more a layer where 16 or 32 tensor ranks lie on "
        "several nodes without a pipeline, and 0.5 s for each send in some pipelines of 256 GPUs and of tp 32",
    ),
)  # fmt: skip
"""nanotron's behaviour; the constants without another source were read off its published sweep."""
