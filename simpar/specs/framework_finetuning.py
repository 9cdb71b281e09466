"""The dated rows of frameworks on torch's FSDP, for fine-tuning and post-training most of them; see framework_rows.py."""

from __future__ import annotations

from typing import Final

from simpar.specs.framework_releases import LOSS_WORK, Base
from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.framework_torch import FUSED_ADAM, LINEARS_APART, TORCH

_OTHERS: Final = LOSS_WORK[:-1]
"""All but the tiled loss."""

BF16_OPTIMIZER: Final = "DeepSpeed engine.py, bf16 without ZeRO is bf16_optimizer.py's, whose fp32 states are sharded (PR 1801)"

DEEPSPEED: Final = (
    Row(
        (2020, 1),
        {**TORCH, "zero_stage_with_pp": 1, "no_mtp": True, "transformers_classes": True,
         "abilities": ("pure_bf16", "narrow_optimizers", "host_parameters", "fused_kernels", "quantised_base"),
         "zero_stage_default": 3, "states_follow_parameters": False,
         "bucket_bytes": 0.0, "bucket_elements_min": 5e8, "gradient_dtype": "fp16", "fsdp_reduce_dtype": "fp16",
         "overlap_grad_reduce_from": 3, "overlap_param_gather": False, "reduce_copies": 3,
         "attention": (("", "unfused"),), "optimizer_traffic_bytes": 40.0, "gradients_persist": True, "layer_cpu_s": 0.63e-3,
         "recompute_default": "full", "optimizer_tensor_cpu_s": 0.0, "fsdp_prefetch_groups": 0, "fsdp_rank_lists": True,
         "fsdp_module_gathers": True, "fsdp_expert_modules": True},
        "DeepSpeed config defaults: buckets of 5e8 elements, overlap_comm only for stage 3 (zero/config.py overlap_comm_valid), "
        "without which average_tensor (stage_1_and_2.py) and stage 0's engine reduce on the stream of the backward; step gathers "
        "updated weights before it returns (all_gather_dp_groups); each gradient goes into a buffer, is divided and flattened once "
        "more (reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_bucket); hook overhead "
        "assumed (1 ms a layer of a usual host); v0.4.0 partition_parameters.py: _allgather_param and _reduce_scatter_gradient "
        "take a weight each, a list of world_size parts that torch copies out of or into a flat buffer one by one, behind "
        "torch.cuda.synchronize(), so that nothing is fetched ahead (until PR 1188 and 1453); weights below "
        "param_persistence_threshold, 1e5 elements, stay",
    ),
    Row(
        (2022, 1),
        {"fsdp_prefetch_groups": 1, "fsdp_rank_lists": False, "fsdp_gather_copy_bytes": 4.0,
         "fsdp_reduce_copy_bytes": 12.0, "fsdp_module_cpu_s": 0.29e-3, "reduction_hook_cpu_s": 29e-6,
         "optimizer_tensor_cpu_s": 15e-6, "sharded_step_cpu_s": (49e-6, 77e-6), "gradients_persist": "sharded",
         "fsdp_reuse_weights": 1e9, "update_bytes": 4.0, "host_update_bytes": 14.0, "gradients_to_host": True,
         "gradient_buffers": (2, 3)},
        "DeepSpeed stage3.py: unscale_and_clip_grads scales the fp32 gradients on the host (8 bytes), "
        "_reassign_or_swap_out_partitioned_parameters copies fp32 weights there to 16-bit ones on the GPU, which torch casts "
        "first (6); the flat buffer of gradients lies where the optimizer does; partition_parameters.py: each weight is put "
        "together from its ranks' parts, gradients are put into a bucket, that into the order of ranks and divided by their number "
        "(comm/coalesced_collectives.py reduce_scatter_coalesced); 276-300 us of "
        "hooks per module forward and as much backward (deepspeed 0.19, an empty process group, one server core), where a "
        "gradient's hook below stage 3 (stage_1_and_2.py grad_handling_hook) takes 29 us and what step does for it 15; in stage 3 "
        "a backward's end waits for its reductions (independent_gradient_partition_epilogue), step takes each gradient's norm by "
        "itself, in fp64, and its .item() (get_grad_norm_direct), and gathers at its end each weight that stays whole by itself "
        "and synchronises (_post_step, _allgather_params_coalesced): 36 and 77 us of Python each (deepspeed 0.19, 8 ranks that are "
        "not there, one server core), 13 us to read a value (validation/measured/h100-2026-11/host.jsonl); the host "
        "waits with more than two fetches in flight; partitioned_param_coordinator.py __params_to_release: a module's weights stay "
        "if they come again within stage3_max_reuse_distance (1e9 weights by default); stage_1_and_2.py: gradients are freed as "
        "they are reduced, and step makes fp32 ones of the rank's part, as stage3.py does of its grad_partitions_flat_buffer; "
        "contiguous_gradients is on by default since PR 1199: setup_buckets makes a buffer of reduce_bucket_size weights for each "
        "backward, two with overlap_comm, stage3.py one for good; allreduce_bucket and reduce_scatter_coalesced flatten once more",
    ),
    Row((2022, 4), {"bf16_shards_states": True}, BF16_OPTIMIZER),
    Row(
        (2023, 8),
        {"attention": (("", "fa2"),), "gradient_dtype": "fp32", "gradients_like_weights": True,
         "sharded_grad_reduce": "all_reduce_beside", "fsdp_reduce_dtype": "bf16", "recompute_default": "none", "fused_norm": False,
         "adapters": "each", "adapter_cpu_s": 25e-6, "linears_apart": LINEARS_APART},
        "transformers with FlashAttention 2 and peft's adapters (see transformers), whose models' RMSNorm is a chain of "
        "elementary kernels; before version 5 it loops over experts, whose linears are modules to ZeRO-3 unless a run calls "
        "set_z3_leaf_modules; engine.py get_data_types (PR 2847 of 2023-03): "
        "gradients are as wide as the weights (but in pipelines, PR 4713), on the wire too (communication_data_type); "
        "stage_1_and_2.py average_tensor: a bucket is all-reduced, each rank takes its part (use_multi_rank_bucket_allreduce, "
        "on by default)",
    ),
    Row((2024, 1), {"gradient_buffers": (1, 2, 3), "sharded_step_cpu_s": (36e-6, 77e-6)},
        "DeepSpeed PR 4887: contiguous_gradients holds for stage 1 too; PR 4436: norms are added up without .item()"),
    Row((2025, 2), {"columns_apart": LINEARS_APART[:3], "tp_backward_overlap": False},
        "DeepSpeed 0.16.4 trains with AutoTP: module_inject/layers.py LinearLayer of q_proj, k_proj, v_proj, gate_proj and up_proj "
        "each all-reduces its input's gradient (ColumnParallel), at once unless tp_overlap_comm is asked for"),
    Row(
        (2025, 8),
        {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn")), "rocm_attention": ""},
        "torch 2.8 SDPA, the default of transformers' models",
    ),
    Row((2025, 10), {"fsdp_expert_modules": False},
        "DeepSpeed PR 7604, zero/leaf_module_config.py: blocks of experts of Mixtral, Qwen2 and Qwen3 are leaf modules by default, "
        "fetched in one collective, without hooks inside; from transformers 5 (2025-12) on experts are tensors"),
    Row((2025, 12), {"gradient_buffers_late": True}, "DeepSpeed PR 7665: process_gradients, a hook of each weight, sets them up"),
    Row(
        (2026, 3),
        {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn9.19"))},
        "torch 2.11 comes with cuDNN 9.19 (2.10 with 9.10)",
    ),
)  # fmt: skip
"""DeepSpeed's ZeRO around models of torch modules."""

TRANSFORMERS: Final = (
    Row(
        (2020, 8),
        {"gradients_persist": True, "attention": (("", "unfused"),), "optimizer_kernel": "loop",
         "optimizer_tensor_cpu_s": 115e-6,
         "zero_stage_default": 0, "autocast": True, "sharded_weights_fp32": True, "logits_fp32_copies": 2.5,
         "recompute_default": "none", "logits_fp32_copies_fused": 1.5,
         "fsdp_defers_reduction": True, "drains_before_update": True, "offload_blocks_compute": False,
         "fsdp_frozen_holds_inputs": True, "adapters": "each", "model_dropout": True, "no_mtp": True,
         "layer_cpu_s": 0.45e-3, "adapter_cpu_s": 25e-6, "ddp": "several", "bucket_bytes": 25.0 * 2**20},
        "accelerate utils/fsdp_utils.py and accelerator.py: trained weights are turned into fp32 before they are sharded wherever "
        "mixed precision is on, and everything is reduced in its dtype (bf16); transformers loss/loss_utils.py ForCausalLMLoss: an "
        "fp32 copy of the logits into cross_entropy; torch.optim.AdamW in lists of operations; without sharding, weights in fp32 "
        "under autocast; trainer.py runs every micro-batch but the last of a step under accelerator.no_sync (FSDP1's no_sync, "
        "FSDP2's set_requires_gradient_sync(False)), looks whether the loss is finite (logging_nan_inf_filter) and reads the "
        "norm (.item()); activations are offloaded on streams of their own (TRL models/activation_offloading.py); "
        "layers are wrapped alone (TRANSFORMER_BASED_WRAP), so that embedding and head are the root's, which torch "
        "does not reshard after its forward (_fsdp_param_group.py lazy_init; FSDP1 _root_pre_forward); checkpointing is reentrant "
        "unless a run says otherwise, and FSDP1 hooks the inputs of frozen units (_register_post_backward_reshard_only_hook): "
        "their accumulation nodes hold input and gradient until _finalize_params; before 4.46 the head turns its logits into fp32 "
        "itself, so that a fused loss works on those; host time of a layer's modules beside its launches: a Llama of 16 layers at "
        "512 tokens takes the host 4.2 ms a layer and micro-batch where a linear layer's forward takes it 34 us (transformers "
        "5.17, torch 2.11; validation/measured/h100-2026-11, llama3.2-1b-small), here at 13.5 us and without its launches; peft "
        "tuners/lora/layer.py: a pair beside every nn.Linear, whose modules and forward take the host 23-28 us beside its kernels "
        "where a linear layer's forward takes it 13.5 us (peft 0.18, torch 2.14, one core); transformers activations.py: "
        "NewGELUActivation, FastGELUActivation and QuickGELUActivation are written out; models' files read no weights of "
        "multi-token prediction (modeling_qwen3_5.py, modeling_qwen3_next.py); accelerate DistributedDataParallelKwargs "
        "(gradient_as_bucket_view is off)",
    ),
    Row(
        (2023, 3),
        {"gradients_persist": False, "attention": (("", "fa1"),)},
        "torch 2.0: Module.zero_grad sets gradients to none by default (pytorch PR 92731), which the Trainer calls, and "
        "scaled_dot_product_attention has FlashAttention 1",
    ),
    Row(
        (2023, 8),
        {"optimizer_kernel": "foreach", "optimizer_tensor_cpu_s": 17e-6},
        "transformers PR 25109: adamw_torch by default in place of transformers' own AdamW, which loops over the weights: 109 us a "
        "tensor, where torch's lists take 10.6, its fused kernel 3.1 and clipping 6.1 (validation/measured/h100-2026-11/"
        "host.jsonl, 300 tiny tensors)",
    ),
    Row((2023, 9), {"attention": (("", "fa2"),)}, "transformers with FlashAttention 2"),
    Row(
        (2024, 5),
        {"adapters": "fp32", "fsdp_pair_groups": 2},
        "peft PR 1706 (autocast_adapter_dtype): adapters of 16-bit models are fp32; tuners/lora/layer.py Linear.forward casts the "
        "input to their dtype, from which autocast casts back what F.linear multiplies; under FSDP A and B are units of their own "
        "(utils/other.py fsdp_auto_wrap_policy: every module without children whose weight is trained), whose fp32 shards the "
        "layer sees when it asks; the Trainer asks for that policy whenever the model is peft's (trainer.py "
        "_fsdp_qlora_plugin_updates, PR 29587, 2024-03). DeepSpeed turns the module into 16 bits, and nothing is cast",
    ),
    Row(
        (2024, 12),
        {"logits_fp32_copies_fused": 1.0},
        "transformers 4.47: models no longer return logits in fp32 (PRs 33902, 34147); loss/loss_utils.py ForCausalLMLoss turns "
        "them into fp32 itself before what stands for nn.functional.cross_entropy, Liger's (liger_kernel/transformers/"
        "monkey_patch.py) included, which writes the gradient into that copy",
    ),
    Row(
        (2025, 6),
        {"separate_casts": True, "te_scaling": ""},
        "accelerate 1.8 accelerator.py: mixed_precision fp8 is torchao's, and TransformerEngine's only where that is not installed "
        "(before, the other way round)",
    ),
    Row(
        (2025, 8),
        {"optimizer_kernel": "fused", "optimizer_traffic_bytes": 34.0, "optimizer_tensor_cpu_s": 9e-6,
         "attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn")), "sdpa": True,
         "rocm_attention": ""},
        "transformers training_args.py: adamw_torch_fused by default with torch 2.8 and later; modeling_utils.py: torch's SDPA "
        "unless a run asks for another, whose first choice on Hopper and Blackwell is cuDNN by then; masking_utils.py "
        "_ignore_causal_mask_sdpa: a layer of a window shorter than the sequence gets its mask as a tensor; 4.54 "
        "integrations/sdpa_attention.py use_gqa_in_sdpa (PR 39412): keys are no longer repeated before it",
    ),
    Row(
        (2025, 12),
        {"pure_bf16": True, "linears_apart": LINEARS_APART[:3]},
        "transformers 5: experts are one tensor of gate and up (gate_up_proj); from_pretrained keeps the dtype of the checkpoint "
        "(bf16 ones today), so that no fp32 weights exist unless FSDP or DeepSpeed makes them",
    ),
    Row(
        (2026, 2),
        {"fsdp_frozen_holds_inputs": False, "recompute_stops_early": True},
        "checkpointing is not reentrant by default (transformers PR 43203, TRL PR 4811, 2026-01)",
    ),
    Row(
        (2026, 3),
        {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn9.19"))},
        "torch 2.11 comes with cuDNN 9.19 (2.10 with 9.10)",
    ),
)  # fmt: skip
"""Hugging Face Trainer and accelerate."""

TRL: Final = (
    Row((2023, 3), {"recompute_default": "full"}, "TRL trainer/sft_config.py: gradient_checkpointing on"),
    Row(
        (2026, 5),
        {"loss": "tiled", "loss_tile": (4096, 32768)},
        "TRL 1.16 trainer/utils.py: every loss of SFT, DPO and GRPO calls one function of chunked log-probabilities, tiles of "
        "4,096 tokens and 32,768 words",
    ),
)
"""TRL on top of the Trainer."""

SWIFT: Final = (
    Row(
        (2023, 8),
        {"pure_bf16": True},
        "ms-swift utils/argument.py select_dtype and utils/model.py: the model is loaded in bf16 whatever is trained, so that full "
        "fine-tuning updates bf16 weights with bf16 moments; docs/source_en/LLM/Benchmark.md: 18.2 GiB for all of a model of 1.84 "
        "billion weights, 73.4 of 7.72",
    ),
)
"""ms-swift on top of the Trainer."""

TORCHTUNE: Final = (
    Row(
        (2024, 4),
        {"pure_bf16": True, "recompute_default": "full", "zero_stage_default": 0, "loss_chunks": 1, "fsdp_reduce_dtype": "bf16",
         "fsdp_reduce_copy_bytes": 4.0, "logits_fp32_copies_chunked": 1.0, "logits_fp32_copies_compiled": 1.5,
         "gradient_adds": "", "fused_norm": False,
         "repeats_keys": True, "selective_recompute": ("core_attn",), "only_cp_style": "", "microbatch_per_stage": False,
         "adapters": "each", "fsdp_root": "all", "recompute_stops_early": True, "complex_rope": False,
         "linears_apart": LINEARS_APART, **FUSED_ADAM},
        "torchtune modules/position_embeddings.py (real numbers), modules/attention.py (q_proj, k_proj, v_proj); torchtune "
        "recipes and configs (dtype: bf16 for weights and optimizer; enable_activation_checkpointing; fused: True since 2024-09, "
        "PR 1575), modules/loss/ce_chunked_output_loss.py: logits are made whole, only the fp32 copies come piece by piece, and "
        "their softmax is kept; where the loss is compiled their 16-bit logits, turned into the gradient piece by piece; other "
        "losses get fp32 logits (modules/transformer.py) and, compiled, keep them and make an fp32 gradient; modules/rms_norm.py; "
        "modules/peft/lora.py: LoRALinear in place of each linear; training/activations.py: torch's "
        "apply_activation_checkpointing, not reentrant, as is prime-rl's checkpoint_wrapper",
    ),
    Row((2024, 8), {"loss": "chunked"}, "torchtune 0.2: CEWithChunkedOutputLoss in the configs"),
    Row(
        (2025, 5),
        {"logits_fp32_copies_chunked": 0.5, "logits_fp32_copies_compiled": 0.5},
        "torchtune modules/loss LinearCrossEntropyLoss in the configs: the head is part of a piece, whose fp32 softmax is kept, or "
        "its 16-bit logits where the loss is compiled (PR 2531; PR 2667 of 2025-05 skips that, yet the two published runs that "
        "compile hold no fp32 softmax: taken as compiled)",
    ),
)  # fmt: skip
"""torchtune."""

PRIME_RL: Final = (
    Row(
        (2025, 6),
        {"loss": "unfused", "logits_fp32_copies": 3.5, "logits_fp32_copies_compiled": None, "recompute_default": "none",
         "loss_work": (*_OTHERS, ("tiled", "composite", 54.0, 58.0)), "expandable_segments": True,
         "gradient_adds": "", "selective_recompute": ("core_attn",), "fused_norm": False, "normed_bytes": 2.0,
         "repeats_keys": False, "frozen_bytes": 4.0, "complex_rope": False, "linears_apart": LINEARS_APART,
         "compiles_checkpoints": False, "recompute_stops_early": True, "fsdp_alone": True, "adapters": "each",
         "expert_output_bytes": (20.0, 36.0), "expert_rows": "added", "expert_order": "indexed", "eager_experts": False},
        "prime-rl src/prime_rl/trainer/model.py (fp32 shards, bf16 compute, fp32 reduction; each layer compiled alone), "
        "optimization_dtype float32 of every weight, frozen ones included; transformers' rotary embedding and linears, its "
        "RMSNorm, multiplied by its weight in 16 bits, and FlashAttention on fewer heads of keys and values; models/layers/moe.py: "
        "gather and scatter_add of rows without padding; lora.py: a pair in place of every linear; "
        "sft/train.py and models/layers/lm_head.py: the head's output becomes fp32, which stays until the loss and the 16-bit "
        "one does not, torch's cross-entropy outside of any graph; the packed batch of one row makes transformers "
        "modeling_flash_attention_utils.py branch on a tensor (_is_packed_sequence), and torch utils/checkpoint.py runs a "
        "checkpointed call with a graph break eager, all of it; RL: log-probabilities and entropy by words of the "
        "vocabulary (8,192 before January 2026) in elementary kernels on fp32 "
        "(cast, scale, maximum, difference, exponential, two sums and a product forward; backward the logits again, five such and "
        "two casts)",
    ),
    Row((2025, 9), {"fsdp_root": "tied", "token_read_s": (4.3e-6, 12.9e-6)},
        "prime-rl PRs 923 and 937: embedding, and last norm with head, are groups of their own unless they share weights; PR 795, "
        "trainer/utils.py get_response_lengths of RL: a loop over the tokens of a micro-batch asks the device whether each one's "
        "position is 0, between the forward, whose head waits for the device itself, and the loss. A view (1.5 us) and a "
        "comparison (9.4) where a linear layer's forward takes 34 us, here at 13.5, and reading it (12.9, taken as the device's "
        "answer): validation/measured/h100-2026-11/host.jsonl"),
    Row((2026, 1), {"loss_tile": (0, 2048), "adapter_reads": (2, 2), "grouped_adapters": ("hopper",)},
        "prime-rl PR 1544: 2,048 words of the vocabulary at a time; PR 1433 (2025-12-29), models/layers/lora/multi_linear.py: a "
        "pair of several adapters asks how many tokens each has, in an assertion and in repeat_interleave, and cuts the tokens by "
        "those numbers where no grouped product runs, on other GPUs than Hopper"),
    Row((2026, 2), {"adapter_reads": (2, 0)}, "prime-rl PR 1692 (2026-01-30): grouped products on any GPU"),
    Row((2026, 7), {"token_read_s": (0.0, 0.0)}, "prime-rl PR 2723 (2026-06-15): the lengths of sequences come with the batch"),
    Row((2026, 10), {"compiles_checkpoints": True},
        "prime-rl PRs 3753 (experts stay in their block's FSDP unit) and 3754 (FlashAttention 4 as a custom op): blocks compile as "
        "whole graphs, checkpointing inside, which the same configuration did not before (configs/benchmark/README.md: 7.0 s a "
        "step without the two, 4.39 with them)"),
)  # fmt: skip
"""prime-rl's SFT and RL trainers."""

MODALITIES: Final = (
    Row(
        (2024, 1),
        {
            "fused_norm": True,
            "logits_fp32_copies": 1.0,
            "recompute_default": "none",
            "transformers_classes": False,
            "heads_first": True,
        },
        "Modalities loss_functions.py: cross_entropy on the 16-bit logits, whose log-softmax and gradient are of 16 bits; "
        "models/components/layer_norms.py: torch's LayerNorm or RMSNorm, its own RMSLayerNorm being deprecated (with the fp32 "
        "copies of that, 12 of its published runs on 64 GB had not fitted); models/gpt2/gpt2_model.py execute_qkv_transforms: "
        "contiguous() of what transpose made of queries, keys and values (bedbd29f of 2024-09; flash-attn's own function, where a "
        "run asks for it, copies them back)",
    ),
)
"""Modalities: models of its own under FSDP."""

LIT_GPT: Final = (
    Row(
        (2023, 6),
        {"pure_bf16": True, "zero_stage_default": 0, "recompute_default": "none", "gradient_adds": "", "normed_bytes": 4.0,
         "logits_fp32_copies": 2.5, "qkv_copies": 2 / 3, "loss_chunks": 1, "logits_fp32_copies_chunked": 2.5,
         "fsdp_defers_reduction": True, "complex_rope": False, "linears_apart": LINEARS_APART[1:],
         "quantised_inputs": True, "ddp": "several", **FUSED_ADAM},
        "litgpt pretrain.py: precision bf16-true, weights and optimizer states in bf16; rmsnorm.py multiplies by the weight in "
        "fp32; model.py: queries and keys are turned out of place by real numbers, values stay a view of what one linear made, "
        "fc_1 and fc_2 are apart; Fabric turns the "
        "logits into fp32 (plugins/precision/half.py convert_output), of which each piece's cross-entropy keeps its own to the "
        "backward (utils.py chunked_cross_entropy); every micro-batch but the last of a step runs under no_backward_sync; "
        "lightning-thunder's benchmark_litgpt.py has a fused AdamW, sets the same default dtype, and as Fabric's "
        "strategies/ddp.py wraps the model in torch's DistributedDataParallel",
    ),
    Row((2024, 8), {"quantised_inputs": False}, "bitsandbytes PR 1270, as under torch-fsdp"),
)  # fmt: skip
"""Lightning's model of plain modules under Fabric."""

VERL: Final = (
    Row(
        (2024, 10),
        {"loss": "fused", "logits_fp32_copies": 2.0, "loss_work": (("fused", "cross_entropy", 14.0, 20.0), *LOSS_WORK[1:]),
         "recompute_default": "full", "fsdp_reduce_dtype": "fp32", "only_cp_style": "ulysses",
         "abilities": ("pure_bf16", "narrow_optimizers", "fused_kernels"),
         "lacks": ("tensor_parallelism", "pipelines", "expert_parallelism", "partial_sharding")},
        "verl workers/fsdp_workers.py _build_model_optimizer, of the actor's training phase under FSDP: transformers' class with "
        "flash_attention_2, made in fp32 (the actor stays on the GPU meanwhile), MixedPrecision of bf16 with reductions in fp32, "
        "torch.optim's AdamW; workers/actor/dp_actor.py _forward_micro_batch: logits, fp32 in transformers before 4.47, divided "
        "by a temperature in place (4 bytes each way on 16-bit ones), go through flash-attn's cross-entropy and a compiled entropy "
        "(4 bytes forward, 4 and the sum of two gradients backward), which leaves them as they are; Ulysses splits sequences. "
        "use_torch_compile is of the entropy alone; its Megatron strategy is framework megatron-core",
    ),
    Row((2025, 1), {"logits_fp32_copies": 1.0}, "transformers 4.47 returns 16-bit logits, see transformers"),
    Row((2025, 2), {"recompute_stops_early": True}, "verl PR 114 (2025-01-18): use_reentrant=False; PR 147: on by default"),
    Row(
        (2025, 4),
        {"logits_fp32_copies": 0.0, "loss_work": (("fused", "cross_entropy", 10.0, 10.0), *LOSS_WORK[1:])},
        "verl PR 1100 (2025-04-17): entropy_coeff is 0 by default and the update computes no entropy, so that the gradient takes "
        "the place of the logits (inplace_backward)",
    ),
)  # fmt: skip
"""verl's actor while it is trained; roll-outs and log-probabilities before it are other phases."""

FINETUNING: Final[dict[str, tuple[Base, tuple[Row, ...]]]] = {
    "deepspeed": ("", DEEPSPEED),
    "lit-gpt": ("torchtitan", LIT_GPT),
    "transformers": ("torch-fsdp", TRANSFORMERS),
    "trl": ("transformers", TRL),
    "swift": ("transformers", SWIFT),
    "torchtune": ("torchtitan", TORCHTUNE),
    "prime-rl": ("torchtitan", PRIME_RL),
    "modalities": ("torch-fsdp", MODALITIES),
    "verl": ("torch-fsdp", VERL),
    "verl-fsdp2": (
        {"": "verl", "data": "torchtitan", "host": "torchtitan"},
        (
            Row(
                (2025, 5),
                {"fsdp_root": "tied", "abilities": ("pure_bf16", "narrow_optimizers", "fused_kernels", "host_parameters")},
                "verl PR 1026 (2025-05-02), strategy fsdp2: utils/fsdp_utils.py apply_fsdp2 shards every layer, an untied "
                "embedding and the rest by torch's fully_shard, hooks as torchtitan's; offload_policy is CPUOffloadPolicy, which "
                "the actor under FSDP1 does without (fsdp_workers.py: wrong with accumulated gradients)",
            ),
        ),
    ),
}
"""Canonical name -> (framework it builds on, its rows in order of time)."""
