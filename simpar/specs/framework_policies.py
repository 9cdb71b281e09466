"""The policies that a training framework is composed of: kernels, loss, optimizer, data parallelism, pipeline, host, allocator.

What a policy does is data with a source and a date. framework.py composes them; framework_rows.py and its kin hold their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from simpar.specs.framework_releases import LOSS_WORK, AttentionKernel, GradientDtype, LossKind, Placeholders
from simpar.specs.hardware import GpuSpec

_NEWEST_KERNEL: Final[dict[str, AttentionKernel]] = {"volta": "unfused", "turing": "fa1"}
"""FlashAttention-2 and cuDNN's fused attention start with Ampere, FlashAttention with Turing (Dao-AILab/flash-attention README)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What all policies have.

    Attributes:
        policy: whose it is and since when ("megatron-core 2025-10"); "" = the default of the class.
        source: where the facts of its latest change stand.
    """

    policy: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Kernels(Policy):
    """Which kernels a library runs, what they fuse, cast and save.

    Attributes:
        fused_norm: the norm is one kernel that saves its input and row statistics; False: a chain that saves its input in fp32 and
            normed_bytes per element of what its weight multiplies, in 16 bits or in 32.
        fused_activation: gate and activation in one kernel saving only its input (Megatron bias-gelu / bias-swiglu fusion,
            TransformerEngine, a compiled graph); False: the activation's output and the product are saved as well (torch), and
            GELUs that models write out in elementary operations run so (graph/kernels.py, GELU_CHAINS).
        gate_chains: gates run in Megatron-LM's elementary operations (graph/kernels.py): on two halves, or with an offset (2025).
        activation_kernel: gates fused with their activation are hand-written (tuned) or compiled from torch code (framework).
        fused_operations: what recipes that take whole layers into graphs run through TransformerEngine's operation fuser, whose
            activations are hand-written: all, experts, or runs of a precision; never beside overlapped tensor parallelism.
        fused_residual: bias, dropout and residual addition in one kernel (Megatron bias-dropout-add fusion).
        fused_rope, fused_scaled_rope: rotary embedding of queries and keys as one kernel, also with a factor (YaRN).
        complex_rope: rotary embeddings are products of complex numbers in fp32, in kernels of their own even in a compiled graph
            (Inductor calls the eager ones), but for models that norm their queries and keys or have such a factor.
        wide_rope: outside of a compiled graph those by halves are in fp32 too.
        fused_expert_bias: experts' biases and the clamp of their activation inside the grouped kernels, see graph/kernels.py.
        fused_clamp: the clamp alone is part of the activation's kernel, as in any compiled graph.
        fused_softmax: attention without flash kernels uses Megatron's scale-mask-softmax kernel; False: a chain of torch's.
        compile: graphs are compiled by default.
        compiles_checkpoints: recomputed layers are compiled too; False: eager, as torch does not trace them over a graph break.
        recompute_stops_early: full recomputation makes no more than the tensors that the backward reads (torch's checkpoint that is
            not reentrant, since 2.1), as it does in any compiled graph; False: it runs the whole layer.
        saves_gathered_input: a column-parallel matmul saves its gathered input and does not gather again (torch eager).
        gather_copies: times that what tensor ranks gather along the sequence, or scatter, is put in order (lists of parts: twice).
        repeats_keys: keys and values are copied to as many heads as queries have, and kept so.
        heads_first: without a graph queries, keys and values are copied so that heads come first.
        value_views, expert_output_fp32, unfused_attention_fp32: see graph/attention_kernels.py.
        expert_output_bytes: where scores weigh experts' outputs in fp32, HBM bytes per element that eager kernels move for it,
            forward and backward, beside the copy of each row to its token, or its sum.
        expert_rows: how rows of one token become one, outputs and backward gradients of inputs (graph/kernels.py, ROW_SUMS): fused,
            added (torch's scatter_add), placed (by token, in a batched product; gradients sorted and added), sorted (both).
        bulk_row_adds: atomic sums of rows are left to the copy engine of each SM.
        expert_order: how rows come into the order of the local experts (parallel/expert.py, SORTS).
        eager_experts: outputs are weighed in eager kernels although layers are compiled.
        qkv_copies: further copies of packed queries, keys and values per layer whose keys are not repeated (layouts, rotary).
        quantised_inputs: products with a frozen weight in fewer than 16 bits keep what they multiply all the same.
        narrow_inputs: precisions whose matmuls keep their inputs in that format although the framework otherwise keeps 16 bits.
        fp8_storage: (saved tensor, bytes per element) of what is kept in a narrow format under fp8 beside the inputs of matmuls.
        saves_exchanged_output, turns_output: the attention output before its all-to-all, or its turn if a batch, is kept as well.
        torch_ring: context parallelism other than by all-to-all is torch's ring (parallel/context.py, `_torch_ring`).
        attention: (architecture, kernel) pairs; an architecture that is missing takes the pair of "".
        attention_head_dim: (architecture, part of a GPU's name or "", widest head, kernel of wider ones); the last to apply counts.
        rocm_attention: what runs instead of a fused kernel of `attention` on AMD's GPUs, FlexAttention apart: fa2 (Composable
            Kernel: flash-attn's and, at first, TransformerEngine's), aiter; "" = what torch's SDPA runs there.
        rocm_sdpa: what that is.
        sdpa: attention is torch's scaled_dot_product_attention, to which a window comes as a mask (parallel/local_layer.py) and
            grouped keys as they are (enable_gqa).
        unlisted_attention: kernels that per-op selective checkpointing does not save, so that they run again; listed_exchanges:
            of which models it saves what expert ranks exchange: none, those without norms of queries and keys, all.
        te_scaling: TransformerEngine's one scale of a tensor: from steps before (delayed), of its values (current); "" = none.
        fp8_weight_cache, fp8_dispatch: under fp8 fp8 copies of 16-bit weights are kept for a whole step; tokens travel in fp8.
        separate_casts: under fp8 casts are kernels of the compiler's between matmuls (torchao), "delayed" with scales of earlier
            steps (flax); tensors with one scale are gathered over tensor ranks after it. False: TransformerEngine's, or none.
        fp4_layers: share of the layers, the first ones, whose products are narrow under nvfp4 where casts are separate.
        wgrad_accumulation_fusion: the weight-gradient matmul accumulates straight into the main gradient.
        weight_gradients: weight-gradient tensors in a backward, as wide as activations, real or (where the matmul accumulates in
            place) placeholders: none, each (one at a time), shapes (one of every shape, kept for good).
        grouped_weight_gradients: the same of grouped expert matmuls.
        static_routing: shapes are fixed before the router runs: with a capacity rows go to their experts and back by products with
            a one-hot mask of the places there, without one each expert rank has room for the rows of all.
        dense_experts: vendors on whose GPUs products of experts are, without a capacity, one over all local experts: rows padded
            with zeros for the experts that are not theirs.
        transformers_classes: models run as transformers' classes, of which some run every expert on every token (MoeSpec).
        experts_in_one_kernel: the local experts' products are one kernel (torch._grouped_mm), not one each on several streams (TE).
        whole_embedding_gradient: of a vocabulary split over tensor ranks the accumulating gradient is whole (DTensor).
        tp_backward_overlap: the backward all-reduce / reduce-scatter runs beside the weight-gradient matmul.
        linears_apart: modules whose linears side by side (queries, keys and values; gate and up) are products of their own: outside
            of a compiled graph autograd adds up the gradients of what they read, a kernel for each but the first.
        columns_apart: modules each of whose linears side by side reduces its input's gradient over tensor ranks on its own.
        columns_gather: under sequence parallelism each of those gathers its input on its own as well; False: once for all.
        adapters: low-rank pairs beside the matmuls of queries, keys and values or of gate and up: one pair where these are one
            packed matmul (packed), one for each of them (each), the same in fp32 beside 16-bit weights that are not sharded
            (fp32): every pair casts what it reads to fp32 and, under autocast, back, as its weights; it keeps the copy.
        one_queue: tensor and context parallelism take one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) before Blackwell: kernels
            start in the order of their launch; fully sharded weights come behind it, reductions hold up the next group's backward.
    """

    fused_norm: bool = True
    normed_bytes: float = 2.0
    fused_activation: bool = True
    gate_chains: Literal["", "halves", "offset"] = ""
    activation_kernel: Literal["tuned", "framework"] = "tuned"
    fused_operations: tuple[str, ...] = ()
    fused_residual: bool = True
    fused_rope: bool = True
    fused_scaled_rope: bool = True
    complex_rope: bool = False
    wide_rope: bool = False
    fused_expert_bias: bool = False
    fused_clamp: bool = False
    fused_softmax: bool = True
    compile: bool = False
    compiles_checkpoints: bool = True
    recompute_stops_early: bool = False
    saves_gathered_input: bool = False
    gather_copies: int = 0
    repeats_keys: bool = False
    heads_first: bool = False
    value_views: bool = False
    unfused_attention_fp32: bool = False
    expert_output_fp32: bool = False
    expert_output_bytes: tuple[float, float] = (0.0, 0.0)
    expert_rows: Literal["fused", "added", "placed", "sorted"] = "fused"
    expert_order: Literal["chunks", "local", "indexed", "padded"] = "chunks"
    bulk_row_adds: bool = False
    eager_experts: bool = False
    qkv_copies: float = 0.0
    quantised_inputs: bool = False
    narrow_inputs: tuple[str, ...] = ()
    fp8_storage: tuple[tuple[str, float], ...] = ()
    saves_exchanged_output: bool = False
    turns_output: bool = False
    torch_ring: bool = False
    attention: tuple[tuple[str, AttentionKernel], ...] = (("", "fa2"), ("hopper", "fa3"), ("blackwell", "cudnn"))
    attention_head_dim: tuple[tuple[str, int, AttentionKernel], ...] = ()
    rocm_attention: AttentionKernel | Literal[""] = "fa2"
    rocm_sdpa: AttentionKernel = "unfused"
    sdpa: bool = False
    unlisted_attention: tuple[AttentionKernel, ...] = ()
    listed_exchanges: Literal["none", "unnormed", "all"] = "all"
    te_scaling: Literal["", "delayed", "current"] = ""
    fp8_weight_cache: bool = False
    fp8_dispatch: bool = False
    separate_casts: bool | Literal["delayed"] = False
    fp4_layers: float = 1.0
    wgrad_accumulation_fusion: bool = True
    weight_gradients: Placeholders = "each"
    grouped_weight_gradients: Placeholders = "each"
    static_routing: bool = False
    dense_experts: tuple[str, ...] = ()
    transformers_classes: bool = False
    experts_in_one_kernel: bool = False
    whole_embedding_gradient: bool = False
    tp_backward_overlap: bool = True
    linears_apart: tuple[str, ...] = ()
    columns_apart: tuple[str, ...] = ()
    columns_gather: bool = False
    adapters: Literal["packed", "each", "fp32"] = "packed"
    one_queue: bool = False

    @property
    def weighs_apart(self) -> bool:
        """Whether kernels of their own weigh experts' outputs in fp32."""
        return self.expert_output_fp32 and (self.eager_experts or not self.fused_activation)

    def wide_heads(self, gpu: GpuSpec) -> tuple[tuple[int, str], ...]:
        """(widest head, kernel of wider ones) of `attention_head_dim` that apply to this GPU."""
        return tuple(
            (most, kernel) for part, most, kernel in self.attention_head_dim if part == gpu.architecture or part in gpu.name
        )

    def attention_kernel(self, architecture: str) -> AttentionKernel:
        """The attention kernel on a GPU of `architecture` ("ampere", ...), of heads that it takes."""
        table = dict(self.attention)
        kernel = table.get(architecture, table[""])
        if architecture.startswith("cdna") and kernel not in ("unfused", "flex"):
            return self.rocm_attention or self.rocm_sdpa
        return kernel if kernel == "unfused" else _NEWEST_KERNEL.get(architecture, kernel)


@dataclass(frozen=True, slots=True)
class Loss(Policy):
    """The loss and the logits it leaves.

    Attributes:
        loss: fused (in-place vocabulary-parallel), unfused (fp32 copies), chunked or linear; see losses.py.
        loss_of_16_bits: the same where weights are of 16 bits alone and no graph holds the loss; "" = no difference.
        loss_chunks: pieces of the chunked loss for which logits exist one after the other; 0 = the usual number.
        loss_tile: tokens (0: all) and words of the vocabulary for which a tiled loss has logits at a time.
        loss_work: (loss, class of its kernels, bytes per logit forward, backward) of each kind that the framework has;
            "compiled" by torch.compile.
        logits_fp32_copies: fp32 tensors of logits size alive at the peak beside the 2-byte ones.
        logits_fp32_copies_compiled: the same where the loss is compiled; none = compiling changes nothing.
        logits_fp32_copies_parallel: the same where the vocabulary is split over tensor ranks; none = no difference.
        logits_fp32_copies_fused: the same where a run asks for its framework's fused loss; none = no difference.
        logits_fp32_copies_chunked: the same of a loss by pieces; none = no difference.
        cross_entropy_all_reduces: all-reduces of a value per token over the tensor group (a run that asks for a fused loss: two).
        logits_vocab_parallel: the logits stay split over tensor ranks (False: gathered before the loss).
        logits_returned: a compiled model returns its logits beside its loss.
    """

    loss: LossKind = "fused"
    loss_of_16_bits: LossKind | Literal[""] = ""
    loss_chunks: int = 0
    loss_tile: tuple[int, int] = (0, 8192)
    loss_work: tuple[tuple[str, str, float, float], ...] = LOSS_WORK
    logits_fp32_copies: float = 1.0
    logits_fp32_copies_compiled: float | None = None
    logits_fp32_copies_parallel: float | None = None
    logits_fp32_copies_fused: float | None = None
    logits_fp32_copies_chunked: float | None = None
    cross_entropy_all_reduces: int = 3
    logits_vocab_parallel: bool = True
    logits_returned: bool = False


@dataclass(frozen=True, slots=True)
class Optimizer(Policy):
    """Weights, gradients and states at rest, and their update.

    Attributes:
        gradient_dtype: default accumulation dtype.
        gradient_dtype_fp16: the same of fp16 runs; none = no difference.
        gradients_like_weights: without a pipeline it is the dtype of the weights.
        gradient_reduce_dtype: dtype on the wire; none = gradient_dtype.
        gradient_adds: where kernels of their own add every micro-batch's gradients to a sum ("pipelines": fully sharded frameworks
            reduce each micro-batch and add shards, but in a pipeline add whole gradients); "" = nowhere.
        gradient_add_casts: another kernel casts each gradient to the sum's dtype first.
        gradients_persist: gradients live in buffers of their own; False: they exist from the first backward to the update;
            "sharded": those of fully sharded weights live in a buffer, others do not.
        gradients_to_host: gradients rest in host memory where the states do.
        states_follow_parameters: sharded weights in host memory have their gradients and the optimizer's states there, and are
            updated there.
        gradient_copy_bytes: bytes per parameter of a second gradient copy in the compute dtype kept beside the main one.
        parameter_bytes: working copy of the weights, a parameter (bf16: 2; FSDP with fp32 shards: 0, in the optimizer's 12).
        frozen_bytes: of a weight that low-rank adaptation leaves as it is, where none are kept to compute with.
        fp8_parameters: under fp8 the working copy of the weights is fp8 itself (fp8 primary weights).
        update_bytes: per parameter that a rank updates, what exists only meanwhile: fp32 gradients of a 16-bit optimizer, the
            intermediate tensors of an update that is not fused (but the one of `foreach`).
        pure_bf16: trained weights, gradients and moments rest in bf16 where a run does not say.
        autocast: without sharding, weights of fp32 are cast to 16 bits where they are used, and the copies are kept for the
            backward unless layers are recomputed; norms, embeddings and residual sums are fp32 (KernelPlan.autocast).
        sharded_weights_fp32: fully sharded trained weights rest in fp32 whatever they were loaded in, and an optimizer that is
            sharded alone (DeepSpeed's) has them in fp32, unless a run says otherwise (accelerate turns them into fp32 where its
            mixed precision is on, axolotl's own FSDP2 does not).
        gradients_like_shards: gradients of fully sharded weights rest in fp32, as these do, whatever they were reduced in.
        optimizer_kernel: fused (one multi-tensor kernel), foreach (one kernel per elementary operation, with one tensor of every
            weight's size in between), loop (per tensor).
        optimizer_traffic_bytes: HBM bytes moved per parameter updated, gradient clipping and the copy to the working weights
            included (fused Adam: read g, p, m, v and write p, m, v, bf16 copy = 30; the norm reads g once more = 34).
        host_update_bytes: host memory traffic per weight of an update on the CPU beside Adam's own.
        whole_gradient_bytes: the same per gradient of the rank's buffer: norm, clipping and zeroing of all that ZeRO 2 and 3 leave.
        optimizer_post_validation: with a split backward no rank waits for the others before its update; it is validated after the
            fact and rolled back if the global norm asks for it.
    """

    gradient_dtype: GradientDtype = "fp32"
    gradient_dtype_fp16: GradientDtype | None = None
    gradients_like_weights: bool = False
    gradient_reduce_dtype: GradientDtype | None = None
    gradient_adds: Literal["", "always", "pipelines"] = ""
    gradient_add_casts: bool = False
    gradients_persist: bool | Literal["sharded"] = True
    gradients_to_host: bool = False
    states_follow_parameters: bool = False
    gradient_copy_bytes: float = 0.0
    parameter_bytes: float = 2.0
    frozen_bytes: float = 2.0
    fp8_parameters: bool = False
    update_bytes: float = 0.0
    pure_bf16: bool = False
    autocast: bool = False
    sharded_weights_fp32: bool = False
    gradients_like_shards: bool = False
    optimizer_kernel: Literal["fused", "foreach", "loop"] = "fused"
    optimizer_traffic_bytes: float = 34.0
    host_update_bytes: float = 2.0
    whole_gradient_bytes: float = 0.0
    optimizer_post_validation: bool = False

    def persist(self, zero_stage: int) -> bool:
        """Whether the gradients of a rank live in buffers of their own."""
        return zero_stage == 3 if self.gradients_persist == "sharded" else self.gradients_persist

    def gradients(self, precision: str, pp: int) -> GradientDtype:
        """Default accumulation dtype of gradients in a run of `precision` on so many pipeline ranks."""
        if self.gradients_like_weights and pp == 1 and precision in ("bf16", "fp16"):
            return "fp16" if precision == "fp16" else "bf16"
        return (self.gradient_dtype_fp16 if precision == "fp16" else None) or self.gradient_dtype


@dataclass(frozen=True, slots=True)
class DataParallel(Policy):
    """How data-parallel ranks reduce gradients and gather weights.

    Attributes:
        zero_stage_default: where a run does not say.
        bucket_elements_min, bucket_elements_per_rank: a gradient bucket holds max(min, per_rank * dp) elements; 0, 0 = all of them.
        gradient_buffers: ZeRO stages whose gradients are copied into a buffer of a bucket's elements and reduced in another copy: a
            second buffer where stage 1 or 2 reduces beside the backward, both gone before the update; that of stage 3 rests.
        gradient_buffers_late: those of stages 1 and 2 are made for the first gradient of a backward, not before it.
        bucket_bytes: torch-style cap in bytes instead; 0 = the element rule.
        buckets_on_first_pipeline_rank_only: other pipeline ranks and later chunks use a single bucket (Megatron).
        ddp: which ranks torch's DistributedDataParallel wraps where nothing is sharded: none (""), "several", or one alone too
            ("always"). It reduces in buckets as wide as the weights, which rest beside the gradients from before the first step on
            (gradient_as_bucket_view is off by default).
        overlap_grad_reduce, overlap_param_gather: defaults of the launch scripts of that time.
        overlap_grad_reduce_from: the least ZeRO stage that has overlap_grad_reduce for a default; stages below reduce alone.
        reduces_together: pipeline ranks launch the reductions that overlap at the same time, as those slow the compute beside them.
        sharded_grad_reduce: while weights are whole (ZeRO 1 and 2) gradients are reduce-scattered ("scatter"), beside the
            backward where that is asked for, or all-reduced whole, in the same way ("all_reduce_beside") or with ZeRO-1 once the
            last backward is through ("all_reduce").
        broadcasts_weights: with sharded optimizer states alone every rank updates whole tensors and broadcasts those of its own;
            False: every rank updates a slice of a buffer, which is all-gathered.
        gather_copy_bytes: HBM bytes per parameter of packing updated weights before their gather and unpacking them after it.
        gather_buffer_bytes: bytes per weight of a rank that hold updated weights meanwhile, half in one tensor, half in pieces.
        fsdp_prefetch_groups: layers gathered ahead (implicit forward, explicit backward prefetch).
        fsdp_alone: weights are fully sharded where there is one rank too.
        fsdp_module_gathers: the weights of each module come in a collective of their own (DeepSpeed ZeRO-3), not a layer's in one.
        fsdp_wide_experts: on expert ranks weights are gathered in 16 bits and cast then, whatever their products take.
        fsdp_expert_modules: experts are such modules where transformers' class has them so (MoeSpec.transformers_class).
        fsdp_reduce_dtype: dtype of the gradient reduce-scatter.
        fsdp_fp32: fully sharded weights are gathered in fp32, and cast where autocast uses them (FSDP without MixedPrecision);
            autograd keeps the casts unless layers are recomputed.
        fsdp_gather_copy_bytes: HBM bytes per gathered weight of taking it out of its group's buffer, on the compute stream.
        fsdp_reduce_copy_bytes: the same per gradient of putting it into the buffer that is reduced.
        reduce_copies: kernels that read and write each gradient of whole weights around its reduction, outside torch's DDP.
        fsdp_reduce_input_stays: the input of a group's reduction belongs to the compute stream and is held until the next group
            reduces (torch FSDP2); False: a buffer of the reduction's own stream that goes with it.
        fsdp_defers_reduction: default; micro-batches but the last of a step add whole gradients, in the dtype they are reduced in
            (no_sync), and the last alone reduces them.
        fsdp_reuse_weights: a group stays gathered from its forward to its backward where passes over fewer weights lie between
            (the last group always does).
        fsdp_root: of which models embedding, last norm and head are one group, gathered from the begin of a forward to the end of
            its backward and reduced there, as the root of torch's FSDP is; of the others each end is a group of its own.
        fsdp_frozen_holds_inputs: the input of a frozen, reentrantly checkpointed layer and its gradient stay to the end (FSDP1).
        offload_blocks_compute: nothing runs beside activations, the loss's among them, that go to the host or come back (torch's
            save_on_cpu: copies on the current stream); False: those of the layers do, on streams of their own.
    """

    zero_stage_default: int = 1
    bucket_elements_min: float = 40e6
    bucket_elements_per_rank: float = 1e6
    gradient_buffers: tuple[int, ...] = ()
    gradient_buffers_late: bool = False
    bucket_bytes: float = 0.0
    buckets_on_first_pipeline_rank_only: bool = True
    ddp: Literal["", "several", "always"] = ""
    overlap_grad_reduce: bool = True
    overlap_grad_reduce_from: int = 0
    overlap_param_gather: bool = True
    reduces_together: bool = False
    sharded_grad_reduce: Literal["scatter", "all_reduce", "all_reduce_beside"] = "scatter"
    broadcasts_weights: bool = False
    gather_copy_bytes: float = 0.0
    gather_buffer_bytes: float = 0.0
    fsdp_prefetch_groups: int = 1
    fsdp_alone: bool = False
    fsdp_module_gathers: bool = False
    fsdp_wide_experts: bool = False
    fsdp_expert_modules: bool = False
    fsdp_reduce_dtype: GradientDtype = "fp32"
    fsdp_fp32: bool = False
    fsdp_gather_copy_bytes: float = 0.0
    fsdp_reduce_copy_bytes: float = 0.0
    reduce_copies: int = 0
    fsdp_reduce_input_stays: bool = False
    fsdp_defers_reduction: bool = False
    fsdp_reuse_weights: float = 0.0
    fsdp_root: Literal["all", "tied", "none"] = "none"
    fsdp_frozen_holds_inputs: bool = False
    offload_blocks_compute: bool = False

    def fills_buckets(self, zero_stage: int) -> bool:
        """Whether gradients are copied into a buffer and reduced once that is full (DeepSpeed)."""
        return zero_stage in self.gradient_buffers

    def all_reduces_whole(self, zero_stage: int) -> bool:
        """Whether gradients are all-reduced whole although the optimizer's states are sharded."""
        return zero_stage in (1, 2) and self.sharded_grad_reduce != "scatter"

    def reduces_beside_backward(self, zero_stage: int, chosen: bool | None) -> bool:
        """Whether gradients are reduced beside the backward; `chosen`: what the plan says, none = the default."""
        late = zero_stage == 1 and self.sharded_grad_reduce == "all_reduce"
        usual = self.overlap_grad_reduce and zero_stage >= self.overlap_grad_reduce_from
        return not late and (usual if chosen is None else chosen)
