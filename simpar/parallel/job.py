"""How a scenario's framework runs layers and keeps weights: what follows before the layers are spread over pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from simpar.graph.casts import engine_casts, recipe_of
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.rematerialise import Recompute
from simpar.parallel.adapters import pairs_of_run
from simpar.parallel.data import StateBytes
from simpar.parallel.degrees import Degrees
from simpar.parallel.expert import expert_rows, fixes_tokens, pads_rows
from simpar.parallel.libraries import library_of
from simpar.parallel.split_options import SplitOptions
from simpar.specs.architecture import TokenModel, has_experts, head_sizes
from simpar.specs.framework import FrameworkSpec
from simpar.specs.framework_options import dropout_of
from simpar.specs.hardware import HardwareProfile
from simpar.specs.losses import loss_of
from simpar.specs.model import TransformerSpec
from simpar.specs.optimizers import KINDS, OptimizerKind
from simpar.specs.plan import PlanSpec, RecomputeSpec
from simpar.specs.scenario import Scenario
from simpar.specs.training import BASE_BYTES, BELOW_16_BITS, HALVES, Part, TrainingSpec
from simpar.topology.mesh import Mesh

_KERNEL_DTYPE = {"fp8-block": "fp8_block", "fp8-rowwise": "fp8_row", "nvfp4": "fp4"}
"""Precisions whose matmuls the kernel tables call otherwise."""
_SCALED_BYTES = {"fp8-block": 1.0 + 4.0 / 128.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes per element of a saved fp8 tensor with its scales: fp32 per 128 elements, one byte per 32, one per 16 of 4 bits."""


@dataclass(frozen=True, eq=False)
class Job:
    """One scenario on its machine.

    Attributes:
        scenario: what the user wrote.
        hardware, framework: resolved.
        mesh: ranks and groups.
        load_factor: tokens of the fullest expert rank over the mean.
    """

    scenario: Scenario
    hardware: HardwareProfile
    framework: FrameworkSpec
    mesh: Mesh
    load_factor: float

    @cached_property
    def plan(self) -> PlanSpec:
        """The scenario's plan; weights in host memory take the optimizer there where the framework has them together."""
        plan = self.scenario.plan
        if not plan.offload.parameters or plan.offload.optimizer or not self.framework.optimizer.states_follow_parameters:
            return plan
        return plan.model_copy(update={"offload": plan.offload.model_copy(update={"optimizer": True})})

    @property
    def training(self) -> TrainingSpec:
        """The scenario's training step."""
        return self.scenario.training

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.mesh.dp)

    @cached_property
    def recompute(self) -> RecomputeSpec:
        """The plan's recomputation as a table."""
        asked = self.plan.recompute
        return asked if isinstance(asked, RecomputeSpec) else RecomputeSpec(granularity=asked)

    @property
    def _asked_recompute(self) -> Recompute:
        modules = self.recompute.modules or ("core_attn",)
        selective = self.recompute.granularity == "selective"
        return Recompute(full=self.recompute.granularity == "full", modules=frozenset(modules if selective else ()))

    @cached_property
    def attention_kernel(self) -> str:
        """The attention kernel in force, of heads that it takes."""
        asked, gpu = "unfused" if self._math_attention else self.training.attention_kernel, self.hardware.gpu
        return self.framework.kernels.attention_kernel(gpu.architecture) if asked == "auto" else asked

    @cached_property
    def _math_attention(self) -> bool:
        """Whether torch's attention gets grouped keys where only its math backend takes them: before Ampere (no FlashAttention; the
        memory-efficient kernel wants a key for every query: transformers issue 48633)."""
        model, own = self.scenario.model, self.framework.kernels.sdpa and self.training.attention_kernel == "auto"
        grouped = isinstance(model, TransformerSpec) and model.num_key_value_heads < model.num_attention_heads
        return own and grouped and self.hardware.gpu.architecture in ("volta", "turing")

    @cached_property
    def compiled(self) -> bool:
        """Whether layers run as compiled graphs."""
        own, asked = self.framework.kernels, self.training.compile
        compiled = own.compile if asked is None else asked in (True, "model")
        return compiled and (own.compiles_checkpoints or not self._asked_recompute.full)

    @cached_property
    def kernels(self) -> KernelPlan:
        """Which kernels the framework runs layers with."""
        training, plan, spec, compiled = self.training, self.plan, self.framework, self.compiled
        own, fp8, whole = spec.kernels, training.narrow_in("linears"), spec.optimizer.autocast and not plan.zero_stage
        in_graph = training.compile == "loss" or (compiled and training.compile != "model")
        sizes = (training.micro_batch_size * training.sequence_length / plan.cp, *head_sizes(self.scenario.model))
        loss = loss_of(spec, training.cross_entropy, compiled=in_graph, tp=plan.tp, sizes=sizes, pure=self.pure_bf16)
        narrow = fp8 and (not own.saves_gathered_input or training.precision in own.narrow_inputs)
        turned = own.turns_output and training.micro_batch_size > 1 and self.attention_kernel != "unfused"
        return KernelPlan(
            library=library_of(own, training, compiled=compiled, tp=plan.tp, math_attention=self._math_attention),
            loss=loss,
            element=4.0 if training.precision in ("fp32", "tf32") else 2.0,
            wide_heads=((0, "unfused"),) if self.attention_kernel == "unfused" else own.wide_heads(self.hardware.gpu),
            dropout=dropout_of(self.scenario, spec),
            linear_input_bytes=_SCALED_BYTES.get(training.precision, 1.0) if narrow else 2.0,
            linears_alone=narrow and bool(own.te_scaling and own.linears_apart),
            loss_all_reduces=2 if training.cross_entropy == "fused" else spec.head.cross_entropy_all_reduces,
            loss_keeps_weight_gradient=loss.kind == "linear" and training.trainable == "all",
            logits_gathered=1 if self._loss_parallel else plan.tp,
            gather_share=0.5 if own.separate_casts and training.precision == "fp8" else 1.0,
            overlapped_gathers=training.precision != "fp8-rowwise",
            output_copies=float((own.saves_exchanged_output and plan.cp > 1 and plan.cp_style == "ulysses") or turned),
            stored=own.fp8_storage if fp8 else (),
            # DeepEP and HybridEP send fp32 (Megatron-Core token_dispatcher.py: token_probs.float()), others what the router has.
            row_probability_bytes=4.0 if plan.ep_dispatcher in ("deepep", "hybridep") else 2.0,
            autocast=("joined" if compiled else "own") if self._autocast else "",
            autocast_powers=spec.optimizer.autocast and training.precision in HALVES,
            frozen_inputs=own.quantised_inputs and training.base_weights in BASE_BYTES,
            pairs=pairs_of_run(training, own, wide=self._fp32_adapters, compiled=compiled, whole=whole),
        )

    @property
    def _autocast(self) -> bool:
        """Whether weights that are of fp32 where they are used are trained, or stand beside adapters, under autocast."""
        training, under = self.training, self.framework.optimizer.autocast and self.training.precision not in ("fp32", "tf32")
        wide = (training.trainable == "all" or training.base_weights == "fp32") and not self.pure_bf16
        return under and wide and (self.plan.zero_stage == 0 or self._gather_bytes > 2.0)

    @property
    def _fp32_adapters(self) -> bool:
        """Whether low-rank pairs are of fp32 beside 16-bit weights."""
        chosen = self.framework.kernels.adapters == "fp32" and self.training.trainable == "lora" and self.plan.zero_stage in (0, 3)
        return chosen and not self._full_precision

    @property
    def _loss_parallel(self) -> bool:
        return self.framework.head.logits_vocab_parallel if (asked := self.training.loss_parallel) is None else asked

    @cached_property
    def degrees(self) -> Degrees:
        """Block-level degrees."""
        plan = self.plan
        sequence_parallel = plan.sequence_parallel and plan.tp > 1 and isinstance(self.scenario.model, TokenModel)
        return Degrees(
            tp=plan.tp, sequence_parallel=sequence_parallel, cp=plan.cp, cp_style=plan.cp_style, ep=plan.ep,
            etp=self.mesh.expert_tp, overlap_tp=plan.overlap_tp, overlap_ep=plan.overlap_ep,
            ring_merges=("fused" if self.compiled else "eager") if self.framework.kernels.torch_ring else "",
            async_tp=self.framework.kernels.tp_backward_overlap and not self.training.launch_blocking,
            dispatcher=plan.ep_dispatcher,
        )  # fmt: skip

    @property
    def _fuses_operations(self) -> bool:
        training, model = self.training, self.scenario.model
        if not training.cuda_graphs or training.cuda_graph_scope != "layer" or self.plan.overlap_tp:
            return False
        experts = {"experts"} if has_experts(model) else set()
        return not {"all", training.precision, *experts}.isdisjoint(self.framework.kernels.fused_operations)

    @property
    def host_counts_tokens(self) -> bool:
        """Whether the host waits for the tokens of each expert before it launches them: without a capacity, where tokens are not
        counted on the device alone as by hybridep (Megatron-Core transformer/moe/token_dispatcher.py)."""
        return not fixes_tokens(self.plan, self.training.routing) and self.plan.ep_dispatcher != "hybridep"

    @cached_property
    def options(self) -> SplitOptions:
        """How blocks are split, with the plan's recomputation."""
        model, training, own = self.scenario.model, self.training, self.framework.kernels
        recompute = self._asked_recompute
        if "op" in recompute.modules:
            more = {"op_compiled"} if self.compiled else set()
            if self.casts == "fp4":
                # torchao multiplies through scaled_mm, whose op is none of those that the policy saves (torch
                # _functorch/partitioners.py, compute_intensive_ops: mm and _scaled_mm).
                more.add("op_unlisted")
            if self.attention_kernel in self.framework.kernels.unlisted_attention:
                more.add("op_attention")
            listed = own.listed_exchanges
            if self.plan.ep > 1 and (listed == "all" or (listed == "unnormed" and not getattr(model, "qk_norm", False))):
                more.add("op_exchanged")
            recompute = Recompute(modules=recompute.modules | more)
        elif recompute.full and training.trainable != "lora":
            # The frozen product of an adapted layer runs before what its adapter keeps.
            recompute = replace(recompute, stops=self.compiled or own.recompute_stops_early)
        capacity = training.routing.capacity_factor
        whole = self.plan.zero_stage == 3 or training.trainable == "lora" or training.optimizer == "none"
        return SplitOptions(
            degrees=self.degrees, kernels=self.kernels, recompute=recompute,
            dtype=self._dtype("linears"), expert_dtype=self._dtype("experts"),
            attention_kernel=self.attention_kernel,
            sdpa=own.sdpa and training.attention_kernel == "auto",
            memory_implementation="tuned" if own.fused_norm and own.fused_activation else "framework",
            activation_implementation="tuned" if self._fuses_operations else own.activation_kernel,
            accumulate_fp32=own.wgrad_accumulation_fusion and self.gradient_dtype == "fp32",
            moe=model.moe if isinstance(model, TokenModel) else None,
            load_factor=expert_rows(self.scenario, own, self.load_factor),
            spare_rows=float(self.plan.ep) if capacity is None and own.static_routing else 1.0,
            pads_rows=self.host_counts_tokens and pads_rows(self.plan, training),
            one_hot=capacity is not None and own.static_routing,
            dense_experts=capacity is None and self.hardware.gpu.vendor in own.dense_experts,
            casts=self.casts,
            dispatch_bytes=1.0 if training.precision in BELOW_16_BITS and own.fp8_dispatch else 2.0,
            lora_rank=training.lora_rank if training.trainable == "lora" else 0,
            dequantised_bytes=BASE_BYTES.get(training.base_weights, -2.0) + 2.0,
            # A fully sharded rank holds the gradients of a whole group (result/memory.py), a frozen weight has none.
            weight_gradients="none" if whole else own.weight_gradients,
            grouped_weight_gradients="none" if whole else own.grouped_weight_gradients,
            engine_casts=engine_casts(training.precision, self.hardware.gpu.architecture, own.te_scaling),
            accumulation_bytes=self._accumulation_bytes,
            gather_copy_bytes=self.framework.data.fsdp_gather_copy_bytes if self.gathers_by_layer else 0.0,
            reduce_copy_bytes=self._reduce_copy_bytes, experts_apart=not self.plan.shard_experts,
        ).interned  # fmt: skip

    @property
    def _reduce_copy_bytes(self) -> float:
        """HBM bytes per weight and micro-batch of filling what is reduced: once a step where the last alone reduces."""
        copies = self.framework.data.fsdp_reduce_copy_bytes if self.gathers_by_layer else 0.0
        return copies / self.num_microbatches if self.defers_reduction else copies

    @property
    def shares_state(self) -> bool:
        """Whether a rank has others to gather from, host memory that holds its weights, or shards them all the same."""
        return self.mesh.dp * self.mesh.cp > 1 or self.plan.offload.parameters or self.framework.data.fsdp_alone

    @property
    def gathers_by_layer(self) -> bool:
        """Weights are gathered for every pass of a layer (full sharding without a pipeline, which keeps them: torch FSDP2)."""
        sharded = self.plan.zero_stage == 3 and self.shares_state and self.training.optimizer != "none"
        return sharded and self.plan.pp == 1

    @cached_property
    def defers_reduction(self) -> bool:
        """Micro-batches but the last of a step add whole gradients of fully sharded weights (no_sync), the last reduces them."""
        return self.may_defer_reduction and self.gathers_by_layer and self.num_microbatches > 1

    @property
    def may_defer_reduction(self) -> bool:
        """The plan's wish or the framework's habit to reduce in the last micro-batch alone, where no pipeline is in the way."""
        asked = self.plan.defer_reduction
        return self.plan.pp == 1 and (self.framework.data.fsdp_defers_reduction if asked is None else asked)

    @property
    def _accumulation_bytes(self) -> float:
        """HBM bytes a weight and micro-batch of kernels that add gradients up: 16 bits, the sum twice; a cast before it."""
        optimizer = self.framework.optimizer
        if self.defers_reduction:
            return 2.0 + 2.0 * self.state_bytes.reduce
        if not optimizer.gradient_adds or (optimizer.gradient_adds == "pipelines" and self.plan.pp == 1):
            return 0.0
        total = 4.0 if self.gradient_dtype == "fp32" else 2.0
        cast = 2.0 * total if optimizer.gradient_add_casts and total > 2.0 else 0.0
        return 2.0 + cast + 2.0 * total

    @cached_property
    def casts(self) -> str:
        """Recipe of the casts to fp8 that are kernels of their own; "" = none."""
        own = self.framework.kernels.separate_casts or self.training.precision == "fp8-rowwise"  # torchao's anywhere
        if not (own and self.training.narrow_in("linears")):
            return ""
        dtype, gathered = self._dtype("linears"), self._gather_bytes == 1.0
        return recipe_of(dtype, self.hardware.gpu.architecture, gathered=gathered, delayed=own == "delayed")

    def _dtype(self, part: Part) -> str:
        """Of the kernels of a part's matmuls."""
        precision, narrow = self.training.precision, self.training.narrow_in(part)
        return "bf16" if precision in BELOW_16_BITS and not narrow else _KERNEL_DTYPE.get(precision, precision)

    def wide(self, options: SplitOptions) -> SplitOptions:
        """`options` of a layer that stays in 16 bits among narrow ones."""
        recompute = replace(options.recompute, modules=options.recompute.modules - {"op_unlisted"})
        kernels = replace(options.kernels, linear_input_bytes=2.0)
        return replace(options, dtype="bf16", expert_dtype="", casts="", recompute=recompute, kernels=kernels)

    @cached_property
    def plain_options(self) -> SplitOptions:
        """Options without recomputation: embedding, head, layers past the block method's limit."""
        return replace(self.options, recompute=Recompute()).interned

    @cached_property
    def gradient_dtype(self) -> str:
        """Accumulation dtype of gradients."""
        return self.training.gradient_dtype or self.framework.optimizer.gradients(self.training.precision, self.plan.pp)

    @property
    def _full_precision(self) -> bool:
        return self.training.precision in ("fp32", "tf32")

    @cached_property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter of each state."""
        spec, training, full = self.framework, self.training, self._full_precision
        gradient = 4.0 if self.gradient_dtype == "fp32" else 2.0
        reduce_dtype = training.gradient_dtype or spec.optimizer.gradient_reduce_dtype or self.gradient_dtype
        if self.plan.zero_stage == 3 and not full:
            reduce_dtype = training.gradient_dtype or spec.data.fsdp_reduce_dtype
            # Shards of fp32 weights have fp32 gradients, whatever they were reduced in.
            wide = reduce_dtype == "fp32" or spec.optimizer.sharded_weights_fp32 or spec.optimizer.gradients_like_shards
            gradient = 4.0 if wide else 2.0
        parameter = self._working_bytes
        if self.pure_bf16:
            # Autograd's gradients and torch's moments are in the weight's dtype. FSDP reduces in its own (MixedPrecisionPolicy's
            # reduce_dtype) and casts what it has reduced back.
            own = spec.data.fsdp_reduce_dtype if self.plan.zero_stage == 3 else "bf16"
            reduce_dtype, gradient, parameter = training.gradient_dtype or own, 2.0, max(parameter, 2.0)
        copy = spec.optimizer.gradient_copy_bytes if gradient > 2.0 else 0.0
        wrapped = spec.data.ddp == "always" or (spec.data.ddp == "several" and self.mesh.dp * self.mesh.cp > 1)
        trained = 4.0 if full or (spec.optimizer.autocast and not self.pure_bf16) else 2.0
        return StateBytes(
            parameter=parameter,
            gradient=gradient + copy,
            master=0.0 if full or self.pure_bf16 or training.optimizer == "none" else 4.0,
            moments=self.optimizer.moments,
            reduce=4.0 if reduce_dtype == "fp32" or full else 2.0,
            gather=self._gather_bytes,
            bucket=trained if wrapped and self.plan.zero_stage == 0 else 0.0,
            # With several micro-batches they are there from the first one's backward on, that is at the peak.
            gradients_persist=spec.optimizer.persist(self.plan.zero_stage) or self.num_microbatches > 1 or self.plan.pp > 1,
        )

    @property
    def _working_bytes(self) -> float:
        """Bytes per weight of the copies that compute."""
        own, precision = self.framework.optimizer, self.training.precision
        if self._full_precision:
            return 4.0
        if own.autocast and self.plan.zero_stage < 3 and self.recompute.granularity == "none":
            return 2.0
        if precision not in BELOW_16_BITS or not (own.fp8_parameters or self.framework.kernels.fp8_weight_cache):
            return own.parameter_bytes
        # Blackwell multiplies any layout of one fp8 copy; Hopper needs a transposed one, made anew for each use where weights are
        # frozen (disable_parameter_transpose_cache of MLPerf's llama2_70b_lora); block scales need one per direction.
        frozen = self.training.trainable == "lora" and own.fp8_parameters
        single = precision == "fp8" and (frozen or self.hardware.gpu.architecture == "blackwell")
        return (1.0 if single else 2.0) + (0.0 if own.fp8_parameters else own.parameter_bytes)

    @property
    def _gather_bytes(self) -> float:
        """Bytes per weight on the wire where weights are gathered."""
        if self._full_precision or (self.plan.zero_stage == 3 and self.framework.data.fsdp_fp32):
            return 4.0
        # torchao gathers one scale per tensor in 8 bits, scales per row and MX in 16 (enable_fsdp_float8_all_gather; nvfp4.md).
        wide = {"fp8-rowwise", "mxfp8", "nvfp4"} if self.framework.kernels.separate_casts else {"fp8-rowwise"}
        narrow = self.training.narrow_in("linears") and self.training.precision not in wide and self.training.fp8_gather
        wide_experts = self.framework.data.fsdp_wide_experts and self.plan.ep > 1
        return 1.0 if narrow and self.plan.zero_stage == 3 and not wide_experts else 2.0

    @cached_property
    def pure_bf16(self) -> bool:
        """Trained weights, gradients and optimizer states rest in 16 bits without an fp32 copy; in fp16 where a run says so."""
        own, chosen = self.framework.optimizer, self.training.pure_bf16
        if self._full_precision or self._fp32_adapters or (self.training.precision == "fp16" and not chosen):
            return False
        fp32_shards = self.plan.zero_stage > 0 and own.sharded_weights_fp32
        return own.pure_bf16 and not fp32_shards if chosen is None else chosen

    @property
    def weight_bytes(self) -> float:
        """Width of the weights that the optimizer updates."""
        return 2.0 if self.pure_bf16 else 4.0

    @cached_property
    def optimizer(self) -> OptimizerKind:
        """The optimizer beside weights of this width."""
        return KINDS[self.training.optimizer].beside(self.weight_bytes)

    @property
    def states_away(self) -> bool:
        """The optimizer's states rest in host memory."""
        return self.plan.offload.optimizer or self.optimizer.paged

    @property
    def gradients_away(self) -> bool:
        """Gradients rest in host memory too."""
        own, offload = self.framework.optimizer, self.plan.offload
        return (own.gradients_to_host and self.states_away) or (own.states_follow_parameters and offload.parameters)

    @property
    def update_bytes(self) -> float:
        """Bytes per updated weight that exist during the update only."""
        if self.training.optimizer_in_backward:
            return 0.0
        kernel, _ = self.optimizer.update_kernel(self.framework.optimizer)
        between = kernel == "foreach" and self.training.optimizer in ("adamw", "adam", "adamw-foreach")
        wide = 4.0 if self.gradient_dtype == "fp32" else 0.0  # no copies of those are made
        return max(self.framework.optimizer.update_bytes - wide, 0.0) + (self.weight_bytes if between else 0.0)
