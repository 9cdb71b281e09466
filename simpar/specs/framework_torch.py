"""What frameworks on plain torch modules share, and the dated rows of nanotron and torchtitan. See framework_rows.py."""

from __future__ import annotations

from typing import Any, Final

from simpar.specs.framework_releases import LOSS_WORK
from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.optimizers import KERNEL_BYTES

TORCH: Final[dict[str, Any]] = {
    "fused_activation": False, "fused_residual": False, "fused_rope": False, "fused_softmax": False,
    "wgrad_accumulation_fusion": False, "loss": "unfused", "logits_fp32_copies": 2.5, "logits_fp32_copies_fused": 0.0,
    "optimizer_kernel": "fused", "optimizer_tensor_cpu_s": 18e-6, "benchmarked": True,
    "bucket_elements_min": 0.0, "bucket_elements_per_rank": 0.0, "bucket_bytes": 25.0 * 2**20,
    "buckets_on_first_pipeline_rank_only": False, "attention": (("", "fa2"),), "input_gradient_releases": False,
    "gradients_persist": False, "contiguous_buffers": False, "experts_in_one_kernel": True, "states_follow_parameters": True,
    "abilities": ("pure_bf16", "optimizer_in_backward", "narrow_optimizers", "quantised_base", "host_parameters", "fused_kernels"),
}  # fmt: skip
"""What every framework on plain torch modules shares: torch 2.13 sources, saved tensors measured with hooks; 12 bytes per
logit at the peak as torch's memory tracker counts them (bf16 logits, fp32 log-softmax, its gradient and a transient); a fused loss
(Liger's, flash-attn's) turns the 16-bit logits into their gradient in place; torch._grouped_mm is one kernel under
CUTLASS's persistent scheduler (aten/src/ATen/native/cuda/GroupMM.cu); host time of clip_grad_norm_ and a fused AdamW per tensor
(torch 2.13, one server core); FSDP1's CPUOffload(offload_params) and FSDP2's CPUOffloadPolicy take parameters, gradients and the
optimizer's states to the host, where its step runs (distributed/fsdp/api.py, _fully_shard/_fsdp_api.py)."""

FUSED_ADAM: Final[dict[str, Any]] = {"optimizer_kernel": "fused", "optimizer_traffic_bytes": 32.0}
"""torch's fused AdamW over fp32 weights: no 16-bit copy is written."""

LINEARS_APART: Final = ("attention", "mlp", "shared_experts", "moe")
"""Models of torch modules: a linear for each of queries, keys, values, gate and up (transformers modeling_llama.py, torchtitan
models/llama/model.py), and grouped products with w1 and with w3 (torchtitan models/moe GroupedExperts)."""

ROCM_TE: Final = (
    {"rocm_attention": "aiter"},
    "ROCm TransformerEngine runs AITER's v3 kernels on gfx942 and gfx950 (README.rst: NVTE_CK_USES_FWD_V3 and NVTE_CK_USES_BWD_V3, "
    "on unless told otherwise in 2.x; with 1.13 the recipes of AMD's image rocm/megatron-lm v25.5 ask for them), before that "
    "Composable Kernel's, preferred to AOTriton's",
)
"""Changes and source."""

NANOTRON: Final = (
    Row(
        (2024, 1),
        {
            **TORCH, "fused_rope": True, "qkv_copies": 2 / 3, "layer_rounding": "cost", "zero_stage_with_pp": 1, "abilities": (),
            "saves_gathered_input": True,
            # gradients and optimizer
            "gradients_persist": True, "gradient_adds": "always", "whole_gradient_bytes": 16.0,
            # data parallelism
            "overlap_param_gather": False, "ddp": "always",
            "sharded_grad_reduce": "all_reduce", "gather_copy_bytes": 12.0, "gather_buffer_bytes": 4.0,
            # pipeline
            "overlap_p2p_interleaved": False, "overlap_p2p_zero_bubble": False, "receives_block_host": True,
            "pending_collectives": 50,
            # host
            "layer_cpu_s": 1.8e-3, "collective_cpu_s": 55e-6, "benchmarked": False,
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
        "several nodes without a pipeline, and 0.5 s for each send in some pipelines of 256 GPUs and of tp 32. "
        "tensor_parallel/functional.py column_linear without async_communication: F.linear of what differentiable_all_gather gives",
    ),
    Row((2024, 8), {"saves_gathered_input": False},
        "nanotron 0adb3684 (2024-08-02): tp_recompute_allgather, on by default, keeps the part and gathers it again"),
)  # fmt: skip
"""nanotron's behaviour; the constants without another source were read off its published sweep."""

TORCHTITAN: Final = (
    Row((2024, 3),
        {**TORCH, "fused_norm": False, "repeats_keys": True, "saves_gathered_input": True, "gather_copies": 1,
         "zero_stage_default": 3, "parameter_bytes": 0.0, "recompute_default": "selective", "fsdp_root": "all",
         "fsdp_reduce_input_stays": True, "optimizer_kernel": "foreach", "optimizer_traffic_bytes": KERNEL_BYTES["foreach"],
         "logits_fp32_copies_parallel": 3.5, "torch_ring": True, "keeps_stage_outputs": True, "last_outputs": "all",
         "receive_buffers_per_microbatch": True, "whole_embedding_gradient": True, "value_views": True, "expert_output_fp32": True,
         "separate_casts": True, "expert_output_bytes": (20.0, 36.0), "expert_rows": "added", "expert_order": "padded",
         "only_cp_style": "all_gather", "selective_recompute": ("op",),
         "microbatch_per_stage": True, "sequence_parallel_default": True, "gradient_adds": "pipelines",
         "fsdp_gather_copy_bytes": 4.0, "fsdp_reduce_copy_bytes": 6.0, "unlisted_attention": ("cudnn",), "rocm_attention": "",
         "fsdp_group_cpu_s": (0.36e-3, 0.42e-3),
         "fsdp_weight_cpu_s": (67e-6, 108e-6), "tensor_module_cpu_s": (0.23e-3, 0.29e-3), "op_layer_cpu_s": (1.45e-3, 1.3e-3),
         "optimizer_tensor_cpu_s": 43e-6,
         "recompute_stops_early": True, "balances_in_turn": True, "listed_exchanges": "none", "logits_fp32_copies": 3.5,
         "complex_rope": True, "linears_apart": LINEARS_APART},
        "torchtitan models/llama/model.py (repeat_kv before attention, whose copies autograd keeps, compiled or not; "
        "apply_rotary_emb by view_as_complex since January 2024, in 2026-08 ComplexRoPE of models/common/rope.py: Llama 3 and 4, "
        "DeepSeek-V3 and Kimi K2, where Qwen3 since PR 1590 of 2025-08, Qwen3.5 and GPT-OSS turn halves); torch "
        "FSDP2 _fsdp_collectives.py: weights are split out of the gathered buffer (16 bits read and written), gradients "
        "chunked into the one that is reduced in fp32, both on the compute stream; torch _functional_collectives.py "
        "(all_gather_tensor and reduce_scatter_tensor chunk and join along any axis but the first); torchao float8 (casts of "
        "inputs, weights and gradients by the compiler; Float8ColwiseParallel and Float8RowwiseParallel gather after the "
        "cast); torch context_parallel, which gathers keys and values unless told otherwise; the per-op policy of selective "
        "checkpointing; of 2024: as many micro-batches as pipeline ranks; torchtitan models/deepseek_v3 (values split off the "
        "up-projection) and models/moe (scores applied after the experts, in fp32, outputs brought back by scatter_add, as the "
        "gradients of inputs that gather took; _permute and _unpermute copy rows with an empty one and put them in order, on one "
        "expert rank too); torch.distributed.pipelining stage.py "
        "(fwd_cache, output_chunks, args_recv_info, grad_recv_info); torchtitan and torch FSDP2 sources "
        "(_fsdp_param_group.py: reduce_scatter_states; _fsdp_param.py: without a reduction, as in a pipeline, each backward "
        "adds the 16-bit gradients to their fp32 sums); tensor/parallel/loss.py: the vocabulary-parallel loss is composite, "
        "four fp32 tensors at its backward (16 bytes per logit); hooks of FSDP2 around groups of one and of nine weights, "
        "norm and fused AdamW of distributed tensors (torch 2.13, processes that are not there, one server core; 1 ms a "
        "pre_forward in pytorch issue 173680); distributed tensors of an eager pair of column- and row-parallel products cost "
        "the host 0.59 and 0.74 ms a product forward and backward (one H100, torch 2.11) where a linear layer's forward takes "
        "it 34 us (validation/measured/h100-2026-11/host.jsonl), here at 13.5 us; a Llama layer of 68 operations whose outputs a "
        "policy keeps one by one takes the host 0.92 ms more forward and 0.85 backward than a checkpointed one where a linear "
        "layer takes it 8.6 us (torch 2.14, one server core), here at 13.5 us; "
        "torchtitan parallelize_llama.py "
        "apply_tp (norms are SequenceParallel) and apply_ac (checkpoint_wrapper, not reentrant, which since torch 2.1 stops where "
        "all saved tensors are made again); models/moe _debug_force_load_balance_routing (experts in turn); train.py asks for "
        "foreach=True (PR 165, 2024-03-28), optimizer.fused is off unless asked for (PR 355, 2024-06-06)"),
    Row((2024, 6), {"logits_fp32_copies": 2.5},
        "torchtitan PR 391 deletes the fp32 logits before the backward (torchtune PR 1046 too), which held them until then"),
    Row((2024, 11), {"logits_fp32_copies_compiled": 0.5},
        "torchtitan e10cb9494 (2024-10-22): the loss is compiled too: the 16-bit logits and their gradient are all that is stored "
        "(softmax recomputed from the row statistics)"),
    Row((2024, 12), {"expandable_segments_one_node": True, "logits_fp32_copies_compiled": None},
        "torchtitan run_train.sh (one node) sets expandable_segments, multinode_trainer.slurm does not; PR 755 (2024-12-18): the "
        "loss is no longer compiled, which failed on the device"),
    Row((2025, 3), FUSED_ADAM,
        "torchtitan PR 881 (2025-02-24): optimizer.implementation is fused unless told otherwise, by which its author's runs of "
        "Llama 3 8B got 1.6 to 3.6 % faster than with lists of operations"),
    Row((2025, 4), {"normed_bytes": 4.0, "logits_fp32_copies_compiled": 0.5},
        "torch 2.7's nn.RMSNorm multiplies by the weight in fp32 (pytorch PR 147203); torchtitan PR 1033 (2025-04-02): "
        "the loss is compiled again"),
    Row((2025, 5), {"attention": (("", "fa2"), ("blackwell", "cudnn"))},
        "torchtitan models/attention.py (PR 1196): cuDNN first on Blackwell alone, FlashAttention elsewhere"),
    Row((2025, 8), {"fsdp_root": "tied", "recompute_stops_early": False},
        "torchtitan PR 1094: embedding, and last norm with head, are groups of their own, one group where they share weights "
        "(distributed/fsdp.py); before that they were the root's, which torch does not reshard after its forward; "
        "distributed/activation_checkpoint.py passes early_stop, off unless asked for"),
    Row((2025, 9), {"listed_exchanges": "unnormed"},
        "torchtitan PR 1672: exchanges are among the ops that selective checkpointing saves, in the lists of DeepSeek-V3 and "
        "Llama 4; not in models/qwen3/infra/parallelize.py"),
    Row((2025, 10), {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn")), "fused_norm": True},
        "torchtitan models/attention.py (PR 1776): cuDNN first everywhere; torch 2.9 has RMSNorm as one kernel (PR 153666), "
        "before that nn.RMSNorm and torchtitan's own are chains in fp32"),
    Row((2025, 11), {"last_outputs": "one", "eager_experts": True},
        "torchtitan PR 1922 (2025-10-22): schedules are stepped with return_outputs=False (torch PR 165822), so that an "
        "output of the last stage goes with its micro-batch, but for that which a variable of torch's loop holds; "
        "models/llama4/infra/parallelize.py apply_compile compiles modules inside a mixture of experts, not its own forward"),
    Row((2025, 12), {"unlisted_attention": (), "expert_output_bytes": (12.0, 6.0), "expert_rows": "placed"},
        "torchtitan PR 1974 (2025-11-21): experts' outputs are put in the order of tokens, cast and weighed by a batched product, "
        "not multiplied and added to their tokens, and rows taken by an index; PR 2095: until then the list of per-op selective "
        "checkpointing had torch's flash and efficient attention, not cuDNN's"),
    Row((2026, 2), {"repeats_keys": False}, "torchtitan PR 2259: attention takes fewer heads of keys and values as they are"),
    Row((2026, 3), {"loss": "chunked", "loss_chunks": 8, "narrow_inputs": ("nvfp4",), "fp4_layers": 0.85, "listed_exchanges": "all",
                    "attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn9.19"))},
        "torch 2.11 comes with cuDNN 9.19 (2.10 with 9.10); torchtitan ChunkedLossWrapper as the default; PR 2357: "
        "one list of saved ops for all models; torchao's nvfp4 linear saves its input in 4 bits; torchtitan "
        "components/quantization/nvfp4.md: the recipes leave the last 15 % of the layers and the head in bf16"),
    Row((2026, 4), {"expert_output_bytes": (20.0, 36.0), "expert_rows": "sorted", "expert_order": "indexed", "wide_rope": True},
        "torchtitan PR 2775 (2026-04-06): multiplied and added again, deterministically; PR 2774: no padding in 16 bits; PR 2575 "
        "(2026-03-14): apply_rotary_emb_cos_sin (Qwen3, GPT-OSS) turns queries and keys into fp32"),
    Row((2026, 5), {"eager_experts": False}, "torchtitan PR 2741 (2026-04-14): layers with experts compile as a whole"),
    Row((2026, 6), {"attention": (("", "flex"),), "linears_apart": LINEARS_APART[1:]},
        "torchtitan PR 3571: language models run FlexAttention on its Triton kernels; PR 3714: one linear for queries, keys and "
        "values"),
)  # fmt: skip
"""torchtitan's behaviour."""
MODEL_CODE: Final[dict[str, tuple[str, tuple[Row, ...]]]] = {
    "llm.c": (
        "plain",
        (Row((2024, 5),
             {"vocabulary_multiple": 128, "fused_norm": True, "fused_activation": True, "fused_residual": True,
              "attention": (("", "unfused"),), "abilities": (), "recompute_default": "none",
              "loss": "fused", "loss_work": (("fused", "cross_entropy", 2.0, 4.0),), "logits_fp32_copies": 0.0,
              "loss_of_16_bits": "",
              "wgrad_accumulation_fusion": True, "gradients_persist": True, "gradient_dtype": "bf16",
              "gradient_reduce_dtype": "bf16", "optimizer_traffic_bytes": 32.0, "layer_cpu_s": 0.0,
              "unfused_attention_fp32": False},
             "llm.c train_gpt2.cu and llmc/*.cuh (f1e2ace): vocabulary padded to 128 words; fused_residual_forward5 (addition and "
             "LayerNorm), gelu.cuh, fused_classifier.cuh (16-bit logits read twice and overwritten by their gradient); "
             "matmul_backward accumulates into 16-bit gradients, which are zeroed once a step; attention.cuh without cuDNN "
             "(cuBLAS and a softmax of the causal half); zero.cuh reduces a layer's gradients beside the backward; adamw.cuh "
             "updates fp32 masters and moments"),),
    ),
    "torch-steps": (
        "",
        (Row((2026, 1),
             {**TORCH, "zero_stage_default": 0, "overlap_param_gather": False, "saves_gathered_input": True,
              "logits_fp32_copies": 1.5, "wgrad_accumulation_fusion": True, "tp_backward_overlap": False,
              "optimizer_traffic_bytes": 36.0, "optimizer_cpu_s": 0.0, "launch_s": 0.0, "backward_launch_s": 0.0,
              "triton_from_python": False, "layer_cpu_s": 0.0, "collective_cpu_s": 0.0, "gradients_persist": True,
              "keeps_stage_outputs": True,
              "receive_buffers_per_microbatch": True, "context_bytes": 0.0, "nccl_pair_bytes": 0.0, "nccl_group_bytes": 0.0,
              "nccl_peer_bytes": 0.0, "blas_workspace_bytes": ()},
             "simpar/live/cluster_model.py and cluster_steps.py: eager torch modules, gradients kept and added to, gradient norm "
             "and fused AdamW; the measured times of its kernels hold the time to launch them"),),
    ),
    "torch-steps-fsdp": (
        "torch-steps",
        (Row((2026, 1), {"wgrad_accumulation_fusion": False, "zero_stage_default": 3, "parameter_bytes": 0.0},
             "fully_shard: gradients of a layer are new tensors until they are reduced"),),
    ),
    "plain": (
        "",
        (Row((2020, 1), {**TORCH, "zero_stage_default": 0, "overlap_param_gather": False, "fused_norm": False, "ddp": "several",
                         "attention": (("", "unfused"),), "logits_fp32_copies_compiled": 0.5, "separate_casts": True,
                         "loss_of_16_bits": "half", "logits_fp32_copies": 3.0},
             "torch modules with DistributedDataParallel; torch.compile takes the whole model, whose forward has the loss (nanoGPT "
             "model.py, transformers loss/loss_utils.py); a loop's variable holds the logits through the backward (nanoGPT's "
             "train.py: logits, loss = model(X, Y)), beside log-softmax, its gradient and theirs; torchao's casts, as nanochat's "
             "loop has them; cross_entropy of 16-bit "
             "logits stays in 16 bits where no autocast turns them into fp32"),
         Row((2023, 1), {"attention": (("", "fa1"),), "rocm_attention": ""},
             "nightlies of torch 2.0, whose scaled_dot_product_attention is FlashAttention 1 (nanoGPT takes it since then)"),
         Row((2024, 1), {"attention": (("", "fa2"),)}, "torch 2.2: FlashAttention 2"),
         Row((2024, 10), {"unfused_attention_fp32": True},
             "torch 2.5 (pytorch PR 135964): the math backend of scaled_dot_product_attention converts 16-bit inputs to fp32")),
    ),
    "torch-autocast": (
        "plain",
        (Row((2020, 8), {"autocast": True, "logits_returned": True},
             "nanoGPT train.py, torch's amp_examples: forward and loss under torch.autocast, weights of fp32; model.py returns "
             "logits and loss; sums of the stream and norms are fp32, and a compiler keeps the normalised input in fp32 beside the "
             "16-bit one that is multiplied (what functorch's min-cut partitioner saves of GPT-2)"),),
    ),
    "torch-fsdp-autocast": (
        "torch-fsdp",
        (Row((2022, 9), {"autocast": True, "fsdp_fp32": True, "fsdp_reduce_dtype": "fp32"},
             "torch.distributed.fsdp without MixedPrecision, forward under torch.autocast: flat parameters and their gradients are "
             "of fp32; views of them are no leaves, so that autocast's cache does not hold their casts"),),
    ),
    "torch-te": (
        "torch-autocast",
        (Row((2022, 9), {"te_scaling": "delayed", "separate_casts": False, "rocm_attention": "fa2", "linears_apart": LINEARS_APART},
             "accelerate utils/transformer_engine.py convert_model: te.Linear in place of each nn.Linear; TransformerEngine "
             "pytorch/quantization.py: fp8_autocast around its layers, whose recipe of one scale a tensor is DelayedScaling"),
         Row((2025, 5), *ROCM_TE)),
    ),
    "torch-te-layers": (
        "plain",
        (Row((2022, 9), {"te_scaling": "delayed", "separate_casts": False, "rocm_attention": "fa2"},
             "TransformerEngine pytorch/transformer.py TransformerLayer in a torch loop: one linear for queries, keys and values, "
             "one for gate and up, behind norms that quantise; what a layer adds up is of the embedding's 16 bits"),
         Row((2025, 5), *ROCM_TE)),
    ),
    "picotron": (
        "plain",
        (Row((2024, 10),
             {"fused_norm": True, "fused_rope": True, "repeats_keys": True, "linears_apart": LINEARS_APART[:2],
              "columns_apart": LINEARS_APART[:2], "columns_gather": True, "gather_copies": 2, "logits_vocab_parallel": False,
              "tp_backward_overlap": False, "saves_gathered_input": False, "attention": (("", "fa2"),)},
             "huggingface/picotron model.py (flash-attn's Triton norm and rotary kernels under FLASH_ATTEN=1, the default; "
             "repeat_interleave of keys and values) and tensor_parallel.py: q_proj, k_proj, v_proj, gate_proj and up_proj are "
             "column-parallel linears each with an all-reduce of its input's gradient, before the weight's gradient unless "
             "async_all_reduce is asked for; final_proj gathers its output; with the sequence parallelism of duoan/picotron "
             "(1b2a724, column_parallel_linear_sp) each gathers its input too, and again in its backward, into lists of parts that "
             "are joined (sp_communications.py)"),),
    ),
    "picotron-sdpa": (
        "picotron",
        (Row((2024, 10), {"fused_norm": False, "fused_rope": False},
             "picotron model.py under FLASH_ATTEN=0: LlamaRMSNorm, apply_rotary_pos_emb and scaled_dot_product_attention"),),
    ),
    "kempnerforge": (
        "torchtitan",
        (Row((2026, 4), {"complex_rope": False, "repeats_keys": True, "linears_apart": LINEARS_APART},
             "KempnerForge 01b461a of 2026-04-05: model/position.py turns halves by sine and cosine (by complex numbers only in "
             "its first commit, two days before), model/attention.py repeats keys and values (repeat_interleave), q_proj, k_proj "
             "and v_proj, gate_proj and up_proj; taken as torchtitan but for these: torch's FSDP2 and distributed tensors"),),
    ),
    "olmo-core": (
        "torchtitan",
        (Row((2024, 9),
             {"complex_rope": False, "linears_apart": LINEARS_APART, "recompute_default": "none", **FUSED_ADAM,
              "loss": "unfused", "logits_fp32_copies_compiled": 1.0, "last_outputs": "all",
              "loss_work": (*LOSS_WORK[:2], ("compiled", "cross_entropy", 8.0, 10.0))},
             "OLMo-core nn/rope.py (RotaryEmbedding turns halves; ComplexRotaryEmbedding on request), nn/attention (w_q, w_k, "
             "w_v); train/trainer.py (075a36a13): compile_loss and fused=True in all its scripts; the logits but those of the "
             "last token are copied (contiguous) before the loss, whose gradient goes back into zeros of all of them; z-loss in "
             "the same graph; nn/transformer/config.py: no checkpointing unless asked for; distributed/parallel/"
             "pipeline_parallel.py steps torch's schedule as it is, which keeps the last outputs"),),
    ),
    "nemo-automodel": (
        "torchtitan",
        (Row((2025, 10),
             {"fused_norm": True, "normed_bytes": 2.0, "fused_activation": True, "fused_clamp": True, "repeats_keys": False,
              "value_views": False, "expert_output_fp32": False, "expert_rows": "fused", "expert_order": "chunks",
              "fsdp_root": "tied", "pure_bf16": True,
              "fsdp_defers_reduction": True, "recompute_default": "none", "selective_recompute": ("core_attn",),
              "recompute_stops_early": True, "microbatch_per_stage": False, "sequence_parallel_default": False,
              "last_outputs": "all", "torch_ring": False, "only_cp_style": "", "loss": "unfused", "logits_fp32_copies": 3.0,
              "logits_fp32_copies_compiled": None, "ep_dispatcher": "deepep", "optimizer_kernel": "foreach",
              "optimizer_traffic_bytes": 46.0, "unlisted_attention": (), "adapters": "each",
              "complex_rope": False, "linears_apart": LINEARS_APART[:3],
              "attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn"))},
             "NeMo AutoModel (ecc8b919, November 2025): components/moe/parallelizer.py (fully_shard of every block, of embedding "
             "and of head; ptd_checkpoint_wrapper of whole blocks, not reentrant), moe/fsdp_mixin.py (micro-batches but the last "
             "reduce nothing), moe/layers.py (Megatron's flex dispatcher with DeepEP and fused permutation, FakeBalancedGate "
             "dealing experts in turn, activations under torch.compile, gate_and_up_projs of all experts), loss/masked_ce.py "
             "(torch's cross-entropy of fp32 logits; recipes/llm/train_ft.py holds the model's own to the end); models are made "
             "in the dtype of their file, bf16, and torch.optim.Adam "
             "without options runs in lists of operations (23 16-bit accesses a weight); norm, linear layers and attention are "
             "TransformerEngine's in the benchmarked configurations; distributed/pipelining/autopipeline.py: schedule.step as it "
             "is, which keeps the last outputs"),
         Row((2026, 1), {"fused_rope": True, "linears_apart": ()},
             "AutoModel PR 897: TransformerEngine's fused rotary embedding; components/models/common/combined_projection: one "
             "linear for queries, keys and values and one for gate and up in dense models (those of experts, which keep them "
             "apart, are not told from them)"),
         Row((2026, 8), {"fused_rope": False}, "components/models/common/utils.py: rope_fusion is switched off for now")),
    ),
}  # fmt: skip
"""Plain torch, and training code of one family of models: name -> (what it builds on, its rows in order of time)."""
