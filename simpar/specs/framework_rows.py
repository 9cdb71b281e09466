"""The dated rows behind framework.py: which framework did what from when, each row with its source.

Figures without a source in the row are marked assumed there; memory and host-time defaults are starting points that the
global calibration may replace.
"""

from __future__ import annotations

from typing import Final

from simpar.specs.framework_finetuning import BF16_OPTIMIZER, FINETUNING
from simpar.specs.framework_releases import LOSS_WORK, Base
from simpar.specs.framework_releases import FrameworkRow as Row
from simpar.specs.framework_runtime import LAZY_CONNECTIONS, MiB
from simpar.specs.framework_torch import LINEARS_APART, MODEL_CODE, NANOTRON, ROCM_TE, TORCHTITAN
from simpar.specs.framework_torch import TORCH as _TORCH
from simpar.specs.framework_xla import XLA

_LOSS_CHAINS: Final = (("unfused", "stream", 38.0, 14.0), ("fused", "stream", 24.0, 14.0))
"""Megatron-LM core/tensor_parallel/cross_entropy.py on fp32 logits, one elementary kernel after the other: cast (6 bytes), maximum
(4), subtraction (8), exponential (8), sum (4), division (8); backward the product with the incoming gradient (8) and the cast (6).
fusions/fused_cross_entropy.py compiles it in pieces: cast and maximum (6), exponential and sum (10), division (8); the same
backward. arguments.py: --cross-entropy-loss-fusion is off unless asked for."""

_MEGATRON: Final = (
    Row((2020, 1),
        {
            "dropout": 0.1, "recompute_default": "full", "gradient_dtype": "fp16", "wgrad_accumulation_fusion": False,
            "zero_stage_default": 0, "overlap_grad_reduce": False, "overlap_param_gather": False, "bucket_elements_min": 0.0,
            "bucket_elements_per_rank": 0.0, "overlap_p2p_interleaved": False, "tp_scatter_gather_p2p": True,
            "optimizer_traffic_bytes": 40.0, "vocabulary_multiple": 128, "layer_cpu_s": 0.8e-3, "collective_cpu_s": 55e-6,
            "attention": (("", "unfused"),), "overlap_p2p_zero_bubble": False, "pending_collectives": 20,
            "whole_gradient_bytes": 6.0, "loss": "unfused", "loss_work": _LOSS_CHAINS, "gradient_adds": "always",
            "activation_kernel": "framework", "tp_backward_overlap": False, "fused_scaled_rope": False,
        },
        "Narayanan et al. 2021, sections 4.1-4.2 (fused kernels, scatter/gather); TransformerEngine's rotary kernel has no factor "
        "of sine and cosine (mscale, core models/common/embeddings/rope_utils.py); Megatron-LM v2.4 arguments.py: local DDP with "
        "one contiguous buffer to which a hook adds every gradient (model/distributed.py: main_grad.add_), all-reduce after the "
        "last backward; core/fusions: activations are torch code under jit_fuser, measured by Liger-Kernel's megatron_swiglu; 20 "
        "buffers of collectives that cannot be reused yet: regression over BLOOM's nvidia-smi readings; host time per layer and "
        "collective from the launch-bound rows of vTrain's single-node table (hidden 1024, micro batch 1: 3.0 ms per layer with "
        "recomputation, +0.33 ms at tp 2); of dropless layers from Megatron-Bridge's launch-bound runs of Qwen3-30B-A3B with one "
        "sequence per micro-batch: 9 ms per layer on B200 and H100 alike, against 4.7 with a capacity"),
    Row((2021, 6),
        {"gradient_dtype": "fp32", "gradient_dtype_fp16": "fp16", "whole_gradient_bytes": 12.0},
        "Megatron-LM v2.4 arguments.py: --accumulate-allreduce-grads-in-fp32 comes with --bf16, not with --fp16; its buffer of "
        "gradients is zeroed and divided by the replicas (model/distributed.py: zero_grad_buffer, allreduce_gradients); the "
        "scripts of Narayanan et al. 2021 (examples/sc21/CONFIG.sh) train in fp16 without it"),
    Row((2021, 9),
        {"tp_backward_overlap": True},
        "Megatron-LM commit 16c9044 of 2021-09, ColumnParallelLinearWithAsyncAllreduce; mpu/layers.py of v2.4 reduces first"),
    Row((2022, 5),
        {"wgrad_accumulation_fusion": True, "recompute_default": "selective", "weight_gradients": "none",
         "grouped_weight_gradients": "none", "one_queue": True, "gradient_adds": ""},
        "Korthikanti et al. 2022 (sequence parallelism, selective recomputation); Megatron-LM v3.0 gradient accumulation fusion; "
        "its arguments.py wants CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism"),
    Row((2022, 11),
        {"attention": (("", "fa1"),), "recompute_default": "none", "tp_scatter_gather_p2p": False, "te_scaling": "delayed"},
        "Megatron-LM --use-flash-attn, FlashAttention 1 (2022-11); fp8 by TransformerEngine, delayed scaling by default"),
    Row((2023, 4), {"fused_rope": False, "gate_chains": "halves"},
        "Megatron-LM 2cc3dac7 (2023-04-01) model/transformer.py: swiglu cuts its input in two, silu of one half times the other; "
        "model/rotary_pos_embedding.py turns queries and keys in elementary operations"),
    Row((2023, 8),
        {
            "attention": (("", "fa2"),), "zero_stage_default": 1, "overlap_grad_reduce": True, "reduces_together": True,
            "bucket_elements_min": 40e6, "bucket_elements_per_rank": 1e6, "overlap_p2p_interleaved": True,
            "optimizer_traffic_bytes": 34.0, "overlap_p2p_zero_bubble": True, "layer_cpu_s": 1.7e-3, "expert_layer_cpu_s": 4.4e-3,
            "expert_modules_cpu_s": (0.71e-3, 0.48e-3), "expert_cpu_s": (5e-6, 12.5e-6),
            "rotates_each_document": True,
            "weight_gradients": "each", "fp8_weight_cache": True,
            "engine_workspace_bytes": (("", 4 * MiB), ("hopper", 32 * MiB), ("blackwell", 32 * MiB)),
        },
        "FlashAttention 2 (2023-07); TransformerEngine module/base.py get_cublas_workspace_size_bytes (32 MiB from compute "
        "capability 9 on, else 4) and get_weight_workspace: fp8 copies of weights are cached as Megatron-LM says which micro-batch "
        "is the first; Megatron-LM layers.py: an empty tensor of the weight's shape stands for the gradient so that hooks run; "
        "Megatron-LM --overlap-grad-reduce, launched at the same time on all pipeline ranks (--align-grad-reduce, "
        "pipeline_parallel/schedules.py of 2023-05: grad_sync_func), --overlap-p2p-communication, bucket size max(40e6, 1e6 dp) "
        "elements (core/distributed); host time per layer and pass: an 8B model on H100 levels off at 4.3 to 4.5 ms per layer and "
        "micro-batch at tp 4 and 8, on one node as on two (1.9 ms beside the launches), Llama 3 70B in nvfp4 without graphs on "
        "Grace leaves room for 1.6; Megatron-Core moe/token_dispatcher.py makes the host wait for the counts of dropless tokens: "
        "8.8 to 9.4 ms of Qwen3-30B-A3B on B200 and H100 alike, against 4.7 with a capacity; MoELayer of core 0.17.1 with "
        "TransformerEngine 2.13, top 8, an empty process group of 8, products and exchanges replaced by nothing, one server core: "
        "with 2 to 32 experts a rank router 0.25 and 0.15 ms, dispatcher by all-to-all 0.40 and 0.18 beside its pieces of rows for "
        "each expert, which a fused permutation does not cut, experts 0.21 and 0.35 and for each of them 5 and 12.5 us; of these "
        "17 and 33 launches are counted one by one; thread times on a loaded core over those of a linear, as if that took 6.6 us"),
    Row((2023, 12), {"fused_rope": True, "gate_chains": ""},
        "Megatron-LM 8503f754 (2023-11-15): rotary embedding and swiglu as one kernel each"),
    Row((2023, 12),
        {"overlap_param_gather": True, "dropout": 0.0, "whole_gradient_bytes": 16.0, "communicators": 2},
        "Megatron-LM core 0.5 --overlap-param-gather; two communicators beside those that split the model: of all ranks (barriers, "
        "the norm under a distributed optimizer: get_model_parallel_group is none) and of data ranks without context parallelism "
        "(average_losses_across_data_parallel_group); --check-for-nan-in-loss-and-grad reads every bucket; Llama-style recipes "
        "train without dropout"),
    Row((2024, 3),
        {"expert_virtual_stages": "middle", "expert_order": "local"},
        "Megatron-LM core 0.6 transformer/moe/README.md, best practice 3: virtual stages wherever there are pipeline stages, a "
        "value in the middle of the divisors of layers / stages; token_dispatcher.py sorts rows by local expert (num_local_experts "
        "> 1), on one expert rank too"),
    Row((2024, 4),
        {"attention": (("", "fa2"), ("hopper", "cudnn"), ("blackwell", "cudnn")),
         "attention_head_dim": (("blackwell", 128, "unfused"), ("ada", 192, "unfused"), ("", 256, "unfused"))},
        "TransformerEngine 1.5 prefers cuDNN fused attention on Hopper and later, in 2.x also where FlashAttention 3 is there "
        "(dot_product_attention/utils.py, get_attention_backend: \"to give FusedAttention preference on Hopper+\"); "
        "fused_attn.cpp takes no heads above 128 on sm_100 (TransformerEngine PR 1504) before cuDNN 9.11; neither it nor "
        "FlashAttention trains heads above 256 (head_dim_qk <= 256), which UnfusedDotProductAttention takes"),
    Row((2024, 7), LAZY_CONNECTIONS, "NGC 24.07 has NCCL 2.22"),
    Row((2025, 2),
        {"loss": "fused", "cross_entropy_all_reduces": 2},
        "Scripts that come with benchmarks of core 0.10 and later pass --cross-entropy-loss-fusion, two all-reduces (Megatron-LM "
        "examples/llama/train_llama3_8b_h100_fp8.sh, Pai-Megatron-Patch examples/qwen3/run_mcore_qwen3.sh)"),
    Row((2025, 3), {"fsdp_reduce_copy_bytes": 6.0},
        "Megatron-LM core 0.11 has fully sharded weights of its own, without gradient_accumulation_fusion (arguments.py): their "
        "hook copies each 16-bit gradient into the fp32 bucket that is reduced (distributed/fsdp megatron_fsdp.py _grad_acc)"),
    Row((2025, 5),
        {"weight_gradients": "shapes", "logits_fp32_copies_fused": 0.0, "pending_collectives": 0,
         "loss_work": (_LOSS_CHAINS[0], LOSS_WORK[0])},
        "NGC 25.05 has torch 2.8, which holds collectives' tensors until they are waited for instead of recording streams; "
        "TransformerEngine 2.3 module/base.py get_dummy_wgrad: one placeholder per weight shape, kept; its cross-entropy turns the "
        "16-bit logits into their gradient in place (--cross-entropy-loss-fusion --cross-entropy-fusion-impl te)"),
    Row((2025, 5), *ROCM_TE),
    Row((2025, 7),
        {"attention_head_dim": (("blackwell", 192, "fa2"), ("B300", 192, "unfused"), ("ada", 192, "unfused"),
                                ("", 256, "unfused"))},
        "TransformerEngine fused_attn.cpp: heads of 192 and 128 train on sm_100 from cuDNN 9.11 on (NGC 25.07), of 256 from 9.23 "
        "on; until then get_attention_backend is left with FlashAttention 2, which gets heads above 192 on sm_80, sm_90, sm_100 "
        "and sm_120: not on B300, GB300 (sm_103) and Ada (PR 2836 of 2026-06, undone before 2.17, and PR 3360)"),
    Row((2025, 8), {"overlap_keeps_backward": True},
        "Megatron-LM ae1c8829 (2025-08-01) core/models/common/model_chunk_schedule_plan.py: run() gives the backward's plan back "
        "(release_state) behind all of its layers and the other micro-batch's forward"),
    Row((2025, 10), {"saves_exchanged_output": True, "one_queue": False, "rotates_each_document": False},
        "TransformerEngine 2.8: attention with all-to-all context parallelism saves its output before the exchange; Megatron-LM "
        "arguments.py: Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1; rope_utils.py 6fe43ce2: one turn of all documents"),
    Row((2025, 11), {"grouped_weight_gradients": "shapes"},
        "TransformerEngine 2.10: grouped linear layers use the placeholders too"),
    Row((2025, 12), {"reorders_each_document": True},
        "TransformerEngine 2.11 (a75da0ca) context_parallel.py: packed documents under all-to-all context parallelism"),
    Row((2026, 1), {"layer_slowdown": 1.0},
        "TransformerEngine's linear took the host 90 to 100 us on Grace, 2.4 to 2.7 times torch's (issue 2053, 2025-08), and takes "
        "nearly torch's since (issue 2126, 2026-01); what a layer takes on Grace then is read off runs (host.layer_slowdown)"),
    Row((2026, 2), {"overlap_keeps_backward": False},
        "Megatron-LM PR 2236 (a56a0b00 of 2026-01-06): each layer's plan is given back behind its backward"),
    Row((2026, 6), {"rotates_each_document": True}, "Megatron-LM rope_utils.py d30e1652: documents one by one again"),
    Row((2026, 9), {"rotates_each_document": False, "reorders_each_document": False},
        "Megatron-LM e4ba3a30 (2026-08-17): all documents at once; TransformerEngine 2.18 (70101184): chunks put in order at once"),
)  # fmt: skip

_FP8_BLOCK: Final = 1.0 + 4.0 / 128.0
"""Bytes per element in fp8 with an fp32 scale per 128 elements."""

FRAMEWORKS: Final[dict[str, tuple[Base, tuple[Row, ...]]]] = {
    "megatron-core": ("", _MEGATRON),
    "nemo": (
        "megatron-core",
        (
            Row((2022, 9), {"zero_stage_default": 1, "overlap_grad_reduce": True, "overlap_param_gather": True,
                            "whole_gradient_bytes": 4.0, "reduces_together": True, "dropout": 0.0,
                            "gate_chains": "", "fused_rope": True},
                "NeMo recipes: distributed fused Adam with overlapped reduction and gather, launched by apex' interleaved schedule "
                "as by Megatron's (pipeline_parallel/schedules.py of 2023-05, grad_sync_func)"),
            Row((2024, 4), {"fp8_parameters": True, "graphed_machines": ("gb200-nvl72", "gb300-nvl72")},
                "MLPerf Training v4.0 llama2_70b_lora, conf/megatron_gpt_peft_tuning_config.yaml: fp8_params wherever fp8 is; "
                "graphs in recipes of GB200 and GB300, whose hosts are slow, and not in most of H100 (dgxc-benchmarking v25.05 "
                "launch.sh, Megatron-Bridge scripts/performance/configs, MLPerf Training v5.0)"),
            Row((2024, 7), {"gradient_dtype": "bf16", "gradient_reduce_dtype": "bf16", "loss": "fused",
                            "cross_entropy_all_reduces": 2},
                "NeMo 24.07 performance recipes: cross_entropy_loss_fusion = True (two all-reduces); grad_reduce_in_fp32 = False, "
                "so that main gradients are bf16 as well (Megatron core distributed/param_and_grad_buffer.py)"),
            Row((2025, 5), {"logits_fp32_copies": 0.0, "layer_rounding": "fill", "adapter_cp_style": "ulysses",
                            "te_scaling": "current"},
                "NeMo 25.04 recipes: cross_entropy_fusion_impl = te; pipeline layouts of the DeepSeek-V3, Kimi-K2 and Moonlight "
                "recipes (map_pp_vp_to_layout); MLPerf Training v5.0 and v5.1 llama2_70b_lora, "
                "conf/megatron_gpt_peft_tuning_config.yaml: cp_comm_type = a2a; NeMo 25.04 performance summary: one scale per "
                "tensor, of the current step, as in MLPerf v5.1's default fp8_recipe = tensorwise"),
            Row((2025, 10), {"fused_operations": ("all",)},
                "MLPerf Training v5.1 llama31_8b config_common_8b.sh: USE_TE_OPS=True, but False in the configurations of 512 GPUs "
                "that set TP_COMM_OVERLAP; llama2_70b_lora train.py: use_transformer_engine_op_fuser"),
        ),
    ),
    "megatron-bridge": (
        "nemo",
        (
            Row((2025, 9), {"fused_operations": (), "logits_fp32_copies": 1.0, "fsdp_reduce_copy_bytes": 0.0},
                "Megatron-Bridge recipes; its fp8_cs is current scaling; perf_recipes/_common.py: no operation fuser; "
                "set_megatron_fsdp_overrides: gradient_accumulation_fusion, so that matmuls write into the buckets; "
                "models/gpt_provider.py fuses the loss and names no implementation: Megatron-LM's own "
                "(fusions/fused_cross_entropy.py), compiled by torch: fp32 logits beside the 16-bit ones, then their softmax "
                "beside the gradient"),
            Row((2025, 11), {"logits_fp32_copies": 0.0},
                "Megatron-Bridge PR 1154: recipes ask for TransformerEngine's loss, as the performance scripts did"),
            Row((2026, 6), {"fused_operations": ("experts", "nvfp4"), "graphed_exchange": "hybridep"},
                "Megatron-Bridge perf_recipes (deepseek, gpt_oss, qwen, nemotronh): use_transformer_engine_op_fuser, HybridEP and "
                "overlap_moe_expert_parallel_comm where graphs hold whole iterations of mixtures of experts; llama31_8b in nvfp4 "
                "with the fuser likewise, the recipe of MLPerf Training v6.0"),
        ),
    ),
    "megatron-bridge-tuning": (
        "megatron-bridge",
        (
            Row((2025, 9), {"fused_rope": False, "recipes_route_freely": True},
                "Megatron-Bridge recipes beside perf_recipes leave apply_rope_fusion as Megatron-LM has it, off, but of Llama, "
                "Nemotron and hybrids (models/llama/llama_bridge.py, nemotron_bridge.py, hybrid_provider.py), and set "
                "moe_router_force_load_balancing to False where those set it to True (recipes at 067f987d of 2026-08)"),
            Row((2025, 12), {"gradient_dtype": "fp32", "gradient_reduce_dtype": "fp32"},
                "recipes/common.py takes bf16_mixed, whose grad_reduce_in_fp32 overrides that of the DDP configuration "
                "(training/mixed_precision.py, setup); DeepSeek-V3, Moonlight, OLMoE and Wan have a precision of their own: bf16"),
        ),
    ),
    "megatron-bridge-defaults": (
        "megatron-bridge-tuning",
        (
            Row((2025, 9), {"gate_chains": "offset"},
                "they leave bias_activation_fusion off as well, but of DeepSeek, GLM, gpt-oss, Kimi, Llama and towers (models/"
                "deepseek, glm, gpt_oss, kimi, llama, qwen_vl); performance recipes of Qwen3 switch it on (scripts/performance/"
                "configs/qwen)"),
        ),
    ),
    "megatron-deepspeed": (
        "megatron-core",
        (
            Row((2021, 6),
                {"zero_stage_default": 1, "gradient_dtype_fp16": None, "overlap_grad_reduce": False, "overlap_param_gather": False,
                 "dropout": 0.0, "recompute_default": "full", "tp_scatter_gather_p2p": True, "attention": (("", "unfused"),),
                 "wgrad_accumulation_fusion": False, "weight_gradients": "each", "gradient_adds": "always",
                 "gradient_add_casts": True, "tp_backward_overlap": False, "gradient_copy_bytes": 2.0, "whole_gradient_bytes": 0.0,
                 "communicators": 3, "pair_communicators": 2, "keeps_stage_outputs": True, "zero_stage_with_pp": 1},
                "BLOOM and MT-NLG papers; config.json of bigscience/bloom (no dropout); host time assumed; DeepSpeed "
                "runtime/pipe/engine.py holds outputs and, with tensor ranks, sends a part of outputs and gradients from each "
                "(is_pipe_partitioned, is_grad_partitioned; an option only since PR 4322 of 2023-09), topology.py and p2p.py add "
                "data, model and slice groups and one per neighbour; bf16_optimizer.py keeps 16-bit gradients beside the fp32 "
                "ones, casts and adds them up after every backward (update_hp_grads), fp16 gradients are added by autograd; "
                "bigscience-workshop/Megatron-DeepSpeed megatron/mpu/layers.py reduces input gradients before it goes on "
                "(copy_to_tensor_model_parallel_region)"),
            Row((2022, 4), {"bf16_shards_states": True}, BF16_OPTIMIZER),
            Row((2023, 3), {"gradients_like_weights": True},
                "DeepSpeed engine.py get_data_types: ZeRO accumulates in the dtype of what it trains unless a run says (PR 2847); "
                "pipelines go on with bf16_optimizer.py (PR 4713)"),
            Row((2023, 4), {"fused_rope": False, "gate_chains": "halves"},
                "microsoft/Megatron-DeepSpeed, from 2cc3dac7 and 1e0e555c on: megatron/model/rotary_pos_embedding.py turns queries "
                "and keys in elementary operations; transformer.py ParallelMLP: swiglu cuts its input in two (torch.chunk), silu "
                "of one half times the other"),
        ),
    ),
    "zero-bubble": (
        "megatron-core",
        (Row((2023, 12),
             {"gradient_dtype_fp16": None, "dropout": 0.1, "zero_stage_default": 0, "overlap_p2p_zero_bubble": True,
              "attention": (("", "unfused"),), "optimizer_post_validation": True, "qkv_copies": 2 / 3},
             "sail-sg/zero-bubble-pipeline-parallelism, a fork of Megatron-LM; the 1F1B peaks of arXiv 2401.10241 Table 4 hold the "
             "score matrices and dropout masks (34 sbh + 5 as^2 b per layer), so attention was unfused; keys and values are copied "
             "by repeat_interleave, as in Megatron-LM of autumn 2023; the script sets --enable-optimizer-post-validation (section "
             "4) with the zero-bubble schedules; weight gradients wait in a store of matmul inputs and output gradients "
             "(core/weight_grad_store.py)"),
         Row((2024, 11), {"gradient_dtype_fp16": "fp16", "dropout": 0.0, "attention": (("", "fa2"),), "one_queue": False},
             "sail-sg/VocabularyParallelism pretrain_gpt.sh: --use-flash-attn, no dropout, --fp16 without "
             "--accumulate-allreduce-grads-in-fp32, CUDA_DEVICE_MAX_CONNECTIONS=8; the memory of arXiv 2411.05288 Table 5 grows by "
             "16 bytes per parameter of the vocabulary")),
    ),
    "aa-scaling": (
        "megatron-core",
        (Row((2023, 1),
             {"vocabulary_multiple": 1, "fused_norm": False, "fused_activation": False, "fused_residual": False,
              "fused_rope": False, "gate_chains": "", "dropout": 0.0, "loss_work": LOSS_WORK, "zero_stage_default": 1,
              "gradient_dtype": "bf16",
              "overlap_grad_reduce": False, "overlap_param_gather": False, "wgrad_accumulation_fusion": False,
              "gradient_adds": "always", "tp_backward_overlap": False, "columns_apart": ("mlp",), "whole_gradient_bytes": 0.0,
              "overlap_p2p_interleaved": False, "logits_fp32_copies": 3.0, "loss": "unfused", "logits_vocab_parallel": False,
              "saves_gathered_input": True, "weight_gradients": "each", "attention": (("", "fa2"),),
              "keeps_stage_outputs": True, "last_outputs": "one", "engine_of_one_stage": True, "turns_output": True},
             "Hagemann et al. 2023 (arXiv 2311.05610), section 3; in-house Megatron-style code, unfused but for the named kernels, "
             "so autograd adds up gradients (torch AccumulateGrad). Inferred from which of its runs fit: 13B without model "
             "parallelism does, so gradients take 2 bytes; long micro-batches at high tensor parallelism do not, so logits and "
             "inputs are gathered. Its later release, Aleph-Alpha/scaling of 2024-08: core/nn/linear/utils.py "
             "_CopyToModelParallelRegion reduces input gradients before it goes on; core/nn/mlp.py ParallelSwiGLUMLP has dense_in "
             "and siglu_weight, a column-parallel matmul each; core/nn/parallel_module/parallel_module.py takes a stage's output "
             "from its buffer when its gradient arrives, those of the last stage never, and pipeline_schedule/train.py has two "
             "buffers or more in turn, without pipeline too: the logits of the micro-batch before are still there; "
             "core/nn/attention/attention.py flash_attention turns its output to heads first and its caller back, two copies "
             "where there is more than one sequence"),),
    ),
    "aa-scaling-fused-norm": (
        "aa-scaling",
        (Row((2023, 1), {"fused_norm": True}, "Hagemann et al. 2023, section 3: the RMSNorm kernel of FlashAttention"),),
    ),
    "aa-scaling-torch-softmax": (
        "aa-scaling",
        (Row((2023, 1), {"fused_softmax": False}, "Hagemann et al. 2023, section 3: torch attention without any kernel"),),
    ),
    "nanotron": ("", NANOTRON),
    "torchtitan": ("", TORCHTITAN),
    "llm-foundry": (
        "",
        (Row((2023, 5),
             {**_TORCH, "zero_stage_default": 3, "parameter_bytes": 0.0, "fsdp_reduce_dtype": "bf16", "bucket_bytes": 0.0,
              "fsdp_root": "all", "loss": "fused", "logits_fp32_copies": 0.5, "attention": (("", "fa1"),), "te_scaling": "delayed",
              "optimizer_kernel": "foreach", "optimizer_traffic_bytes": 72.0, "fsdp_group_cpu_s": (0.92e-3, 1.28e-3),
              "optimizer_tensor_cpu_s": 44e-6, "gradients_like_shards": True},
             "llm-foundry v0.4 benchmarking README, torch FSDP1 FULL_SHARD, whose root (embedding, last norm) is not resharded "
             "after its forward; models/mpt/modeling_mpt.py: flash-attn's cross-entropy unless a run says otherwise (16-bit logits "
             "and their gradient); setup.py pins flash-attn 1.0.9, and the H100 table's runs up to 65,536 tokens go with it and "
             "not with FlashAttention 2; DecoupledAdamW loops over tensors with elementwise kernels (traffic counted from its "
             "update rule); hooks of FSDP1 around a layer, norm and AdamW tensor by tensor (torch 2.13, processes that are not "
             "there, one server core); _runtime_utils.py _cast_grad_to_param_dtype, FSDP2's foreach_reduce to orig_dtype: reduced "
             "gradients are as wide as the shards"),),
    ),
    "torch-fsdp": (
        "llm-foundry",
        (Row((2023, 3),
             {"fused_norm": False, "loss": "unfused", "logits_fp32_copies": 2.0, "optimizer_traffic_bytes": 92.0, "no_mtp": True,
              "optimizer_tensor_cpu_s": 17e-6, "transformers_classes": True,
              "fsdp_reduce_copy_bytes": 4.0, "offload_blocks_compute": True, "quantised_inputs": True,
              "linears_apart": LINEARS_APART},
             "FSDP1's gradients of views are joined to that of the flat parameter; plain torch modules under FSDP1: norm and "
             "rotary embedding as chains of elementary kernels (transformers and foundation-model-stack sources; no compile before "
             "fms-fsdp PR 45), torch's SDPA with FlashAttention 1 (torch 2.0); foreach AdamW counted from torch 2.2 "
             "optim/adamw.py, 80 bytes per parameter and 12 for clipping, which take the host 10.6 us and 6.1 a "
             "tensor (validation/measured/h100-2026-11/host.jsonl, 300 tiny ones); torch checkpoint_wrapper.py offload_wrapper, "
             "around the model (AWS's FSDP example), is autograd/graph.py save_on_cpu: copies on the current stream of all that "
             "autograd saves"),
         Row((2023, 9), {"attention": (("", "fa2"),)}, "transformers with FlashAttention 2 (2023-09), torch 2.2 SDPA (2024-01); "
             "checkpoints of torch 2.1 stop early here too (CheckpointImpl.NO_REENTRANT in fms-fsdp, Modalities, AWS's example) "
             "and this is not priced: its runs are too fast by as much already, and what slows them is not known"),
         Row((2024, 8), {"quantised_inputs": False}, "bitsandbytes PR 1270 (0.43.2): MatMul4Bit kept its input for a gradient that "
             "it does not make")),
    ),
    "tinyllama": (
        "torch-fsdp",
        (Row((2023, 9),
             {"fused_norm": True, "fused_activation": True, "fused_rope": True, "loss": "fused", "logits_fp32_copies": 0.0,
              "optimizer_kernel": "loop", "optimizer_tensor_cpu_s": 115e-6, "linears_apart": ()},
             "jzhang38/TinyLlama, a fork of lit-gpt: FlashAttention 2 with its RMSNorm, rotary and cross-entropy kernels and "
             "xformers' SwiGLU; pretrain/tinyllama.py: FSDP per block, AdamW with foreach=False"),),
    ),
    "internevo": (
        "megatron-core",
        (Row((2023, 7),
             {"vocabulary_multiple": 1, "attention": (("", "fa1"),), "dropout": 0.0, "zero_stage_default": 1,
              "overlap_grad_reduce": True, "fused_residual": False, "sharded_grad_reduce": "all_reduce_beside",
              "broadcasts_weights": True, "fused_activation": False, "gradient_dtype": "bf16", "bucket_elements_min": 512.0 * 2**20,
              "bucket_elements_per_rank": 0.0, "wgrad_accumulation_fusion": False, "gradient_adds": "always",
              "fsdp_reduce_dtype": "bf16", "update_bytes": 12.0, "whole_gradient_bytes": 0.0, "layer_rounding": "last",
              "loss": "fused", "loss_work": LOSS_WORK, "fused_rope": True, "gate_chains": ""},
             "InternEvo doc/en/train_performance.md; flash-attention 1.0.5 (doc/en/install.md) and its cross-entropy "
             "(model/losses/ce_loss.py); solver/pipeline_utils.py partition_uniform; solver/optimizer/hybrid_zero_optim.py: "
             "reduce_bucket_size of 512 Mi elements (num_elements_in_bucket), all-reduced without a destination rank "
             "(_attach_reduction_hook), tensors dealt to ranks by size (_partition_param_list), each rank's broadcast after the "
             "update (broadcast_params(overlap=False)); bf16 gradients, which autograd adds up, turned into fp32 ones for the "
             "update (solver/optimizer/fsdp_optimizer.py, hybrid_zero_optim.py) by torch's AdamW, whose lists of operations (torch "
             "2.0 optim/adamw.py _multi_tensor_adamw) make the root of the second moment and the denominator of all parameters"),
         Row((2023, 8), {"overlap_param_gather": True},
             "overlap_sync_param: broadcasts are waited for where the next forward needs them (ParamBcastSyncHandler)"),
         Row((2024, 2), {"overlap_param_gather": False, "attention": (("", "fa2"),)},
             "configs/7B_sft.py overlap_sync_param=False; flash-attention 2.2.1 (doc/en/install.md)")),
    ),
    "fast-llm": (
        "megatron-core",
        (Row((2024, 9),
             {"vocabulary_multiple": 1, "dropout": 0.0, "zero_stage_default": 1, "overlap_grad_reduce": True,
              "overlap_param_gather": True, "attention": (("", "fa2"),), "rocm_attention": "fa2", "gradient_dtype": "fp32",
              "loss": "fused", "loss_work": LOSS_WORK, "wgrad_accumulation_fusion": False, "gradient_adds": "always"},
             "ServiceNow/Fast-LLM (2024-10): functional/triton; multi_stage/config.py full_precision_gradients; "
             "functional/linear.py: 16-bit weight gradients go to the fp32 buffer by a kernel of their own; flash-attn"),),
    ),
    "hai-llm": (
        "megatron-core",
        (Row((2024, 12), {"vocabulary_multiple": 1, "schedule": "dualpipe", "attention": (("", "fa3"),), "fp8_weight_cache": False,
                          "loss": "fused", "loss_work": LOSS_WORK, "gradient_reduce_dtype": "bf16", "whole_gradient_bytes": 0.0,
                          "ep_dispatcher": "deepep", "fp8_dispatch": True, "layer_rounding": "ends",
                          "fp8_storage": (("moe/activation_in", _FP8_BLOCK), ("shared_experts/activation_in", _FP8_BLOCK),
                                          ("attention/out", 1.5)), "experts_in_one_kernel": True},
             "DeepSeek-V3 technical report (arXiv 2412.19437), sections 3.2-3.3; DeepEP is its exchange; casts to fp8 are kernels "
             "that read 16 bits and write 8, and once more along the other axis for the weight gradient (3.5.2); its split of "
             "layers is not published (section 3.2.2: the first and last share a rank with embedding and head); 3.3.3: inputs of "
             "the experts' SwiGLU are cached in fp8 (1 x 128 scales), the input of the linear after attention in E5M6 (12 bits); "
             "DeepGEMM multiplies for all experts of a rank in one kernel"),),
    ),
    "colossal-ai":
        ("", (Row((2023, 1), {**_TORCH, "zero_stage_default": 2, "gradient_dtype": "bf16", "abilities": ()}, "README; assumed"),)),
    "llama3-internal": (
        "megatron-core",
        (Row((2024, 4), {"vocabulary_multiple": 1, "zero_stage_default": 2, "attention": (("", "fa2"), ("hopper", "fa3")),
                         "wgrad_accumulation_fusion": False, "gradient_adds": "pipelines", "rank_order": "tp-cp-ep-pp-dp",
                         "whole_gradient_bytes": 0.0, "frees_stage_inputs": True, "expandable_segments": True, "fragmentation": 1.0,
                         "pending_collectives": 0, "loss": "fused", "loss_work": LOSS_WORK},
             "Llama 3 paper (arXiv 2407.21783), section 3.3.2: inputs and outputs of pipeline stages are deallocated after a "
             "profile of the allocator and streams are not recorded (TORCH_NCCL_AVOID_RECORD_STREAMS); that segments are "
             "expandable and nothing else fragments is assumed, as the 8,192-GPU run fits only so; torch's FSDP (Zhao et al. 2023) "
             "without resharding, whose backwards add 16-bit gradients to fp32 sums in kernels of their own; modified interleaved "
             "schedule, reduce-scatter in fp32; section 3.3.2: ranks in the order TP, CP, PP, DP"),),
    ),
    **MODEL_CODE,
    **FINETUNING,
    **XLA,
}  # fmt: skip
"""Canonical name -> (what it builds on, its rows in order of time)."""

UNRELATED: Final = frozenset({"hai-llm"})
"""Frameworks that take over another's rows where nothing is known of their own, and share no code with it."""
