"""A layout: everything about one scenario that both the program's shape and its prices need, derived once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from simpar.graph.casts import GATHERED, engine_casts
from simpar.graph.kernels import KernelPlan
from simpar.graph.rematerialise import Recompute
from simpar.graph.types import Layer
from simpar.model.kind import kind_of, site_of
from simpar.model.layered import layered_network
from simpar.model.network import Network, padded_vocabulary, simple_network, transformer_network
from simpar.parallel.blocks import LocalBlock, split_block
from simpar.parallel.data import StateBytes
from simpar.parallel.degrees import Degrees
from simpar.parallel.local_layer import SplitOptions
from simpar.parallel.pipeline import StageLayers, split_layers
from simpar.parallel.work import Implementation
from simpar.specs.architecture import ArchitectureSpec, TokenModel
from simpar.specs.calibration import RunCalibration, calibration_on, measured_here
from simpar.specs.framework import FrameworkSpec, framework
from simpar.specs.hardware import HardwareProfile
from simpar.specs.losses import loss_of
from simpar.specs.model import TransformerSpec
from simpar.specs.optimizers import KINDS, OptimizerKind
from simpar.specs.plan import PlanSpec, RecomputeSpec
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site
from simpar.specs.stage_plan import Host, hosts, joint_profile
from simpar.specs.training import BASE_BYTES, TrainingSpec
from simpar.topology.mesh import Mesh
from simpar.topology.placement import GroupPlacement

_KERNEL_DTYPE = {"fp8-block": "fp8_block", "fp8-rowwise": "fp8_row", "nvfp4": "fp4"}
"""Precisions whose matmuls the kernel tables call otherwise."""
_FP8 = frozenset({"fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"})
_SCALED_BYTES = {"fp8-block": 1.0 + 4.0 / 128.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes per element of a saved fp8 tensor with its scales: fp32 per 128 elements, one byte per 32, one per 16 of 4 bits."""


def _compiled(scenario: Scenario, spec: FrameworkSpec) -> bool:
    """Whether layers run as compiled graphs."""
    asked = spec.kernels.compile if scenario.training.compile is None else scenario.training.compile
    return asked and (spec.kernels.compiles_checkpoints or not _recompute(scenario.plan)[0].full)


def _kernel_plan(scenario: Scenario, spec: FrameworkSpec, *, kernel: str) -> KernelPlan:
    training, plan, own = scenario.training, scenario.plan, spec.kernels
    compiled = _compiled(scenario, spec)
    library = compiled or training.fused_kernels
    model, tokens = scenario.model, training.micro_batch_size * training.sequence_length / plan.cp
    sizes = (
        (tokens, float(model.vocab_size), float(model.hidden_size)) if isinstance(model, TransformerSpec) else (tokens, 1.0, 1.0)
    )
    loss = loss_of(spec, training.cross_entropy, compiled=compiled, tp=plan.tp, sizes=sizes)
    fp8 = training.precision in _FP8
    narrow = fp8 and (not own.saves_gathered_input or training.precision in own.narrow_inputs)
    made = replace(
        own,
        fused_activation=own.fused_activation or library,
        fused_residual=own.fused_residual or compiled,
        fused_norm=own.fused_norm or library,
        fused_rope=own.fused_rope or library,
        # A graph over whole layers holds no split by tokens per expert on the host: biases go into the grouped kernels.
        fused_expert_bias=own.fused_expert_bias or (training.cuda_graphs and training.cuda_graph_scope == "layer"),
        saves_gathered_input=own.saves_gathered_input and plan.tp > 1,
        whole_embedding_gradient=own.whole_embedding_gradient and plan.tp > 1,
    )
    return KernelPlan(
        library=made,
        loss=loss,
        element=4.0 if training.precision in ("fp32", "tf32") else 2.0,
        flash_attention=kernel != "unfused",
        dropout=training.dropout,
        linear_input_bytes=_SCALED_BYTES.get(training.precision, 1.0) if narrow else 2.0,
        loss_all_reduces=2 if training.cross_entropy == "fused" else spec.head.cross_entropy_all_reduces,
        loss_keeps_weight_gradient=loss.kind == "linear" and training.trainable == "all",
        logits_gathered=1 if spec.head.logits_vocab_parallel else plan.tp,
        gather_share=0.5 if own.separate_casts and training.precision == "fp8" else 1.0,
        overlapped_gathers=not (own.separate_casts and training.precision == "fp8-rowwise"),
        output_copies=float(own.saves_exchanged_output and plan.cp > 1 and plan.cp_style == "ulysses"),
        stored=own.fp8_storage if fp8 else (),
    )


def _recompute(plan: PlanSpec) -> tuple[Recompute, RecomputeSpec]:
    spec = plan.recompute if isinstance(plan.recompute, RecomputeSpec) else RecomputeSpec(granularity=plan.recompute)
    if spec.granularity == "full":
        return Recompute(full=True), spec
    if spec.granularity == "selective":
        return Recompute(modules=frozenset(spec.modules or ("core_attn",))), spec
    return Recompute(), spec


@dataclass(frozen=True)
class Layout:
    """One scenario laid out.

    Attributes:
        scenario: what the user wrote.
        hardware, framework: resolved.
        mesh: ranks and groups.
        num_stages: virtual stages of one copy of the model.
        replicas: copies of the model in the pipeline (2: DualPipe).
        ends_meet: the schedule puts the first stage and the last on one rank.
        alone: layouts of a mixed cluster's hosts (specs/stage_plan.py), each as if all stages were like its own.
        ranks: pipeline rank of each model stage, of a mixed cluster.
        replica: of which host's replicas this is the pipeline, where hosts hold replicas.
        vocabulary_tp: tensor ranks that the vocabulary is padded for: of all stages, where they differ; 0 = tp.
    """

    scenario: Scenario
    hardware: HardwareProfile
    framework: FrameworkSpec
    mesh: Mesh
    num_stages: int
    replicas: int = 1
    load_factor: float = 1.0
    ends_meet: bool = False
    alone: tuple[Layout, ...] = ()
    ranks: tuple[int, ...] = ()
    replica: int = 0
    vocabulary_tp: int = 0

    @classmethod
    def of(
        cls, scenario: Scenario, num_stages: int, replicas: int = 1, load_factor: float = 1.0, *, ends_meet: bool = False,
        ranks: Sequence[int] = (), replica: int = 0,
    ) -> Layout:  # fmt: skip
        """The layout of a checked scenario cut into `num_stages` virtual stages.

        Args:
            ranks: pipeline rank of each of them; none = dealt out in turn.
            replica: of which host's replicas, where hosts hold replicas.
        """
        spec = framework(scenario.framework, scenario.framework_version)
        more = (num_stages, replicas, load_factor, ends_meet)
        found = hosts(scenario)
        if not found:
            return cls(scenario, scenario.hardware, spec, Mesh.of(scenario.plan, scenario.world_size), *more)
        widest = lcm(*(host.scenario.plan.tp for host in found))
        alone = tuple(
            cls(h.scenario, h.hardware, spec, Mesh.of(h.scenario.plan, h.scenario.world_size), *more, vocabulary_tp=widest)
            for h in found
        )
        at = tuple(ranks) or tuple(stage % scenario.plan.pp for stage in range(num_stages))
        # Of a mixed layout the mesh is that of its first host; all have the same dp, cp and pp.
        return cls(scenario, joint_profile(found), spec, alone[0].mesh, *more, alone, at, replica)

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """What holds which pipeline ranks, of a mixed cluster."""
        return hosts(self.scenario)

    @property
    def replicas_differ(self) -> bool:
        """Hosts hold replicas: this is the pipeline of one kind of them."""
        return self.scenario.cluster.parts_hold == "replicas"

    def host_of(self, rank: int) -> int:
        """The host of a pipeline rank of a mixed cluster."""
        if self.replicas_differ:
            return self.replica
        return next(index for index, host in enumerate(self.hosts) if rank in host.ranks)

    def of_rank(self, rank: int) -> Layout:
        """What holds for a pipeline rank: its machines, its degrees, its kernels."""
        return self.alone[self.host_of(rank)] if self.alone else self

    @property
    def kinds(self) -> tuple[tuple[Layout, range], ...]:
        """Layouts of one kind of machine with the pipeline ranks that they hold for."""
        if not self.alone or self.replicas_differ:
            return ((self.of_rank(0), range(self.plan.pp)),)
        return tuple((alone, host.ranks) for alone, host in zip(self.alone, self.hosts, strict=True))

    def on(self, stage: int) -> Layout:
        """What holds for a model stage."""
        return self.of_rank(self.ranks[stage]) if self.alone else self

    @property
    def plan(self) -> PlanSpec:
        """The scenario's plan."""
        return self.scenario.plan

    @property
    def training(self) -> TrainingSpec:
        """The scenario's training step."""
        return self.scenario.training

    @cached_property
    def calibration(self) -> RunCalibration:
        """What published runs of this framework on this GPU add to the priced parts (nothing on a calibrated machine), with
        what the cluster's own runs say on top; of several kinds of GPU the least known one."""
        if self.alone:
            return max((layout.calibration for layout in self.alone), key=lambda c: c.expected_error)
        found = self.published_calibration
        found = measured_here(found) if self.hardware.calibrated else found
        return found if self.site is None else self.site.applied(found, self.kind)

    @cached_property
    def site(self) -> Site | None:
        """What was learned from the cluster's own runs, where they had this framework and GPU."""
        return site_of(self.scenario)

    @cached_property
    def kind(self) -> str:
        """What the job is one of, at a site with runs of its own."""
        return kind_of(self.scenario)

    @cached_property
    def published_calibration(self) -> RunCalibration:
        """What published runs of this framework on this GPU add to the priced parts, also where they are not used."""
        return calibration_on(self.framework, self.hardware)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        if self.alone:
            return self.of_rank(0).num_microbatches
        return self.training.global_batch_size // (self.training.micro_batch_size * self.mesh.dp)

    @property
    def microbatches_in_all(self) -> int:
        """Micro-batches per step of all replicas."""
        return self.training.global_batch_size // self.training.micro_batch_size

    @cached_property
    def attention_kernel(self) -> str:
        """The attention kernel in force."""
        if self.training.attention_kernel != "auto":
            return self.training.attention_kernel
        model = self.scenario.model
        mla = model.mla if isinstance(model, TokenModel) else None
        wide = mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else getattr(model, "head_dim", 0)
        return self.framework.kernels.attention_kernel(self.hardware.gpu.architecture, wide)

    @cached_property
    def compiled(self) -> bool:
        """Whether graphs are compiled."""
        return _compiled(self.scenario, self.framework)

    @cached_property
    def kernels(self) -> KernelPlan:
        """Which kernels the framework runs layers with."""
        return _kernel_plan(self.scenario, self.framework, kernel=self.attention_kernel)

    @cached_property
    def degrees(self) -> Degrees:
        """Block-level degrees."""
        plan = self.plan
        sequence_parallel = plan.sequence_parallel and plan.tp > 1 and isinstance(self.scenario.model, TokenModel)
        return Degrees(
            tp=plan.tp, sequence_parallel=sequence_parallel, cp=plan.cp, cp_style=plan.cp_style, ep=plan.ep,
            etp=self.mesh.expert_tp, overlap_tp=plan.overlap_tp, overlap_ep=plan.overlap_ep,
            ring_merges=("fused" if self.compiled else "eager") if self.framework.kernels.torch_ring else "",
            async_tp=self.framework.kernels.tp_backward_overlap, dispatcher=plan.ep_dispatcher,
        )  # fmt: skip

    @cached_property
    def network(self) -> Network:
        """The model as layer graphs of one micro-batch."""
        model, training = self.scenario.model, self.training
        tp = self.vocabulary_tp or self.plan.tp
        if isinstance(model, ArchitectureSpec):
            vocab = padded_vocabulary(model.vocab_size, self.framework.conventions.vocabulary_multiple, tp)
            return layered_network(model, training.micro_batch_size, training.sequence_length, vocab)
        if isinstance(model, TransformerSpec):
            vocab = padded_vocabulary(model.vocab_size, self.framework.conventions.vocabulary_multiple, tp)
            return transformer_network(model, training.micro_batch_size, training.sequence_length, vocab)
        return simple_network(model, training.micro_batch_size, self.plan.tp)

    @property
    def host_counts_tokens(self) -> bool:
        """Whether the host waits for the tokens of each expert before it launches them: without a capacity, where tokens are not
        counted on the device alone as by hybridep (Megatron-Core transformer/moe/token_dispatcher.py)."""
        return self.training.routing.capacity_factor is None and self.plan.ep_dispatcher != "hybridep"

    @cached_property
    def options(self) -> SplitOptions:
        """How blocks are split, with the plan's recomputation."""
        model, training = self.scenario.model, self.training
        recompute, _ = _recompute(self.plan)
        if "op" in recompute.modules:
            more = {"op_compiled"} if self.compiled else set()
            if self._casts == "fp4":
                # torchao multiplies through scaled_mm, whose op is none of those that the policy saves (torch
                # _functorch/partitioners.py, compute_intensive_ops: mm and _scaled_mm).
                more.add("op_unlisted")
            recompute = Recompute(modules=recompute.modules | more)
        moe = model.moe if isinstance(model, TokenModel) else None
        capacity = training.routing.capacity_factor
        load = capacity if capacity is not None else self.load_factor
        whole = self.plan.zero_stage == 3 or training.trainable == "lora" or training.optimizer == "none"
        unfused = self.attention_kernel == "unfused"
        implementation: Implementation = (
            "tuned" if self.framework.kernels.fused_norm and self.framework.kernels.fused_activation else "framework"
        )
        return SplitOptions(
            degrees=self.degrees, kernels=self.kernels, recompute=recompute,
            dtype=_KERNEL_DTYPE.get(training.precision, training.precision),
            attention_kernel="eager" if unfused and not self.framework.kernels.fused_softmax else self.attention_kernel,
            memory_implementation=implementation, activation_implementation=self.framework.kernels.activation_kernel,
            accumulate_fp32=self.framework.kernels.wgrad_accumulation_fusion and self.gradient_dtype == "fp32", moe=moe,
            load_factor=load,
            casts=self._casts,
            dispatch_bytes=1.0 if training.precision in _FP8 and self.framework.kernels.fp8_dispatch else 2.0,
            lora_rank=training.lora_rank if training.trainable == "lora" else 0,
            lora_modules=training.lora_modules,
            dequantised_bytes=BASE_BYTES.get(training.base_weights, -2.0) + 2.0,
            # A fully sharded rank holds the gradients of a whole group (result/memory.py), a frozen weight has none.
            weight_gradients="none" if whole else self.framework.kernels.weight_gradients,
            grouped_weight_gradients="none" if whole else self.framework.kernels.grouped_weight_gradients,
            engine_casts=engine_casts(training.precision, self.hardware.gpu.architecture, self.framework.kernels.te_scaling),
            accumulation_bytes=self._accumulation_bytes,
            gather_copy_bytes=self.framework.data.fsdp_gather_copy_bytes if self.gathers_by_layer else 0.0,
            reduce_copy_bytes=self.framework.data.fsdp_reduce_copy_bytes if self.gathers_by_layer else 0.0,
        )  # fmt: skip

    @property
    def gathers_by_layer(self) -> bool:
        """Weights are gathered for every pass of a layer (full sharding, no pipeline that keeps them)."""
        sharded = self.plan.zero_stage == 3 and self.mesh.dp * self.mesh.cp > 1 and self.training.optimizer != "none"
        return sharded and not (self.plan.pp > 1 and self.framework.data.fsdp_unsharded_with_pp)

    @property
    def _accumulation_bytes(self) -> float:
        """HBM bytes per weight and micro-batch where kernels add gradients up: one of 16 bits and the sum read, the sum written."""
        adds = self.framework.optimizer.gradient_adds
        if not adds or (adds == "pipelines" and self.plan.pp == 1):
            return 0.0
        return 2.0 + 2.0 * (4.0 if self.gradient_dtype == "fp32" else 2.0)

    @cached_property
    def boundary_bytes(self) -> tuple[float, ...]:
        """Activation passed between layers, one micro-batch, unsplit, before each layer (and after the last)."""
        return tuple(elements * self.kernels.element for elements in self.network.boundary_elements)

    @cached_property
    def _casts(self) -> str:
        """Recipe of the casts to fp8 that are kernels of their own; "" = none."""
        precision = self.training.precision
        if precision not in _FP8 or not self.framework.kernels.separate_casts:
            return ""
        return GATHERED if precision == "fp8" and self.plan.zero_stage == 3 else _KERNEL_DTYPE.get(precision, precision)

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """Layers of each virtual stage."""
        ends_meet = self.ends_meet or self.plan.pp == 1
        return split_layers(len(self.network.layers), self.num_stages, self.plan, ends_meet=ends_meet)

    @cached_property
    def stage_blocks(self) -> tuple[tuple[LocalBlock, ...], ...]:
        """Blocks of each virtual stage on one rank, in order."""
        if self.alone:
            return tuple(self.on(index).stage_blocks[index] for index in range(self.num_stages))
        return tuple(tuple(self._blocks_of(stage)) for stage in self.stages)

    def _blocks_of(self, stage: StageLayers) -> list[LocalBlock]:
        network, plain = self.network, self._plain
        _, spec = _recompute(self.plan)
        blocks: list[LocalBlock] = []
        if stage.embedding and network.embedding is not None:
            blocks.append(self.split(network.embedding, plain))
        limit = spec.num_layers if spec.granularity == "full" and spec.num_layers is not None else stage.count
        narrow = int(len(network.layers) * self.framework.kernels.fp4_layers) if self._casts == "fp4" else len(network.layers)
        for offset in range(stage.count):
            options = self.options if offset < limit else plain
            layer = stage.first + offset
            blocks.append(self.split(network.layers[layer], options if layer < narrow else self._wide(options)))
        if stage.head:
            for block in network.mtp:
                blocks.append(self.split(block, self.options))
                if network.mtp_head is not None:
                    blocks.append(replace(self.split(network.mtp_head, plain), dense_parameters=0.0))
            if network.head is not None:
                head = self.split(network.head, plain)
                # A tied matrix beside its embedding is one parameter: reduced, gathered and updated with that.
                blocks.append(replace(head, dense_parameters=head.dense_parameters - self.tied_extra) if stage.shares else head)
        return blocks

    def _wide(self, options: SplitOptions) -> SplitOptions:
        """`options` of a layer that stays in 16 bits among narrow ones."""
        recompute = replace(options.recompute, modules=options.recompute.modules - {"op_unlisted"})
        return replace(
            options, dtype="bf16", casts="", recompute=recompute, kernels=replace(options.kernels, linear_input_bytes=2.0)
        )

    @cached_property
    def _plain(self) -> SplitOptions:
        """Options without recomputation: embedding, head, layers past the block method's limit."""
        return replace(self.options, recompute=Recompute())

    def split(self, block: Layer, options: SplitOptions) -> LocalBlock:
        """One rank's share of a layer, each computed once."""
        return split_block(block, options)

    # -- states ----------------------------------------------------------------------------------------------------

    @cached_property
    def gradient_dtype(self) -> str:
        """Accumulation dtype of gradients."""
        return self.training.gradient_dtype or self.framework.optimizer.gradients(self.training.precision)

    @cached_property
    def state_bytes(self) -> StateBytes:
        """Bytes per parameter of each state."""
        spec, training = self.framework, self.training
        gradient = 4.0 if self.gradient_dtype == "fp32" else 2.0
        reduce_dtype = spec.optimizer.gradient_reduce_dtype or self.gradient_dtype
        if training.gradient_dtype is not None:
            reduce_dtype = training.gradient_dtype
        full = training.precision in ("fp32", "tf32")
        parameter = 4.0 if full else spec.optimizer.parameter_bytes
        if training.precision in _FP8 and (spec.optimizer.fp8_parameters or spec.kernels.fp8_weight_cache):
            # Blackwell multiplies any layout of one fp8 copy; Hopper needs a transposed one, block scales one per direction.
            single = training.precision == "fp8" and self.hardware.gpu.architecture == "blackwell"
            parameter = (1.0 if single else 2.0) + (0.0 if spec.optimizer.fp8_parameters else parameter)
        # torchao gathers weights with a scale per row in 16 bits, as its enable_fsdp_float8_all_gather takes one per tensor, and
        # those of nvfp4 (torchtitan components/quantization/nvfp4.md).
        formats = _FP8 - ({"fp8-rowwise", "nvfp4"} if spec.kernels.separate_casts else {"fp8-rowwise"})
        narrow = training.precision in formats and self.plan.zero_stage == 3
        gather = 4.0 if full else 1.0 if narrow else 2.0
        if self.plan.zero_stage == 3 and not full:
            reduce_dtype = training.gradient_dtype or spec.data.fsdp_reduce_dtype
            # Shards of fp32 weights have fp32 gradients, whatever they were reduced in.
            gradient = 4.0 if reduce_dtype == "fp32" or spec.optimizer.sharded_weights_fp32 else 2.0
        if spec.optimizer.autocast and self.plan.zero_stage < 3 and _recompute(self.plan)[1].granularity == "none" and not full:
            parameter = 2.0
        if self.pure_bf16:
            # Autograd's gradients and torch's moments are in the weight's dtype; nothing is left to cast on the way.
            reduce_dtype, gradient, parameter = training.gradient_dtype or "bf16", 2.0, max(parameter, 2.0)
        master = 0.0 if full or self.pure_bf16 or training.optimizer == "none" else 4.0
        # With several micro-batches they are there from the first one's backward on, that is at the peak.
        persist = spec.optimizer.gradients_persist or self.num_microbatches > 1 or self.plan.pp > 1
        copy = spec.optimizer.gradient_copy_bytes if gradient > 2.0 else 0.0
        if spec.data.ddp_buckets and self.plan.zero_stage == 0:
            copy += parameter
        return StateBytes(parameter, gradient + copy, master, self.optimizer.moments,
                          4.0 if reduce_dtype == "fp32" or full else 2.0, gather, persist)  # fmt: skip

    @cached_property
    def pure_bf16(self) -> bool:
        """Trained weights, gradients and optimizer states rest in bf16 without an fp32 copy."""
        spec, chosen = self.framework, self.training.pure_bf16
        if self.training.precision in ("fp32", "tf32", "fp16") or (
            self.plan.zero_stage == 3 and spec.optimizer.sharded_weights_fp32
        ):
            return False
        return spec.optimizer.pure_bf16 if chosen is None else chosen

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
    def update_bytes(self) -> float:
        """Bytes per updated weight that exist during the update only."""
        if self.training.optimizer_in_backward:
            return 0.0
        between = self.framework.optimizer.optimizer_kernel == "foreach" and self.training.optimizer in ("adamw", "adam")
        return self.framework.optimizer.update_bytes + (self.weight_bytes if between else 0.0)

    def frozen_bytes(self, block: LocalBlock) -> float:
        """Bytes per frozen weight of a block under low-rank adaptation; only matrices of layers are ever quantised."""
        base = BASE_BYTES.get(self.training.base_weights)
        if base is None or block.name in ("embedding", "head"):
            return self.state_bytes.parameter or self.framework.optimizer.frozen_bytes
        return base

    @cached_property
    def shard_ranks(self) -> int:
        """Ranks over which dense states are sharded."""
        return self.plan.shard_size or self.mesh.dp * self.mesh.cp

    @cached_property
    def expert_shard_ranks(self) -> int:
        """Ranks over which expert states are sharded."""
        replicas = (self.mesh.dp * self.mesh.cp) // self.shard_ranks
        return max(self.mesh.edp // replicas, 1)

    def block_parameters(self, stage: int, first: int, last: int, *, trainable: bool = False) -> tuple[float, float]:
        """(dense, expert) weights of blocks [first, last) of a stage on one rank; of those, the trained ones."""
        blocks = self.stage_blocks[stage][first:last]
        if trainable and self.options.lora_rank:
            return sum(self.trained(b) for b in blocks), 0.0
        return sum(b.dense_parameters for b in blocks), sum(b.expert_parameters for b in blocks)

    def trained(self, block: LocalBlock) -> float:
        """Weights of a block that are trained: all, or those of the adapters."""
        if self.options.lora_rank:
            return block.lora_parameters * self.training.lora_adapters
        return block.dense_parameters + block.expert_parameters

    @cached_property
    def tied_extra(self) -> float:
        """Weights of the head that are the embedding's: a copy on another rank, or the very same where the ends meet."""
        head = self.network.head
        if not self.network.tied or head is None:
            return 0.0
        return head.elements("head/logits.weight") / self.plan.tp

    @cached_property
    def overlap_grad_reduce(self) -> bool:
        """Gradient reduction runs beside the backward."""
        return self.framework.data.reduces_beside_backward(self.plan.zero_stage, self.plan.overlap_grad_reduce)

    @cached_property
    def overlap_param_gather(self) -> bool:
        """Parameter gathering runs beside the forward."""
        chosen = self.plan.overlap_param_gather
        return self.framework.data.overlap_param_gather if chosen is None else chosen

    @cached_property
    def data_ranks(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.mesh.dp * self.mesh.cp

    def buckets(self, stage: int, *, bucketed: bool) -> tuple[tuple[int, int], ...]:
        """Blocks of a stage as gradient buckets [first, last), last block first (the order of the backward)."""
        blocks = self.stage_blocks[stage]
        if not blocks:
            return ()
        size = self.framework.bucket_elements(self.data_ranks) if bucketed else float("inf")
        found, last, held = [], len(blocks), 0.0
        for first in range(len(blocks) - 1, -1, -1):
            held += blocks[first].dense_parameters + blocks[first].expert_parameters
            if held >= size or first == 0:
                found.append((first, last))
                last, held = first, 0.0
        return tuple(found)

    # -- groups ----------------------------------------------------------------------------------------------------

    @cached_property
    def _placements(self) -> dict[str, GroupPlacement]:
        return {}

    def placement(self, dimension: str) -> GroupPlacement:
        """Where a representative group of `dimension` sits ("dp" means dp x cp for dense states)."""
        if dimension not in self._placements:
            name = {"dp": "dp_cp", "embedding": "pp"}.get(dimension, dimension)
            sized = dimension in ("shard", "replica", "expert_shard", "expert_replica")
            shard = self.shard_ranks if sized else None
            nodes = self.scenario.cluster.num_nodes
            self._placements[dimension] = self.mesh.placement(name, self.hardware, nodes, shard)
        return self._placements[dimension]

    @cached_property
    def pipeline_pairs(self) -> tuple[GroupPlacement, ...]:
        """Where each pair of neighbouring pipeline ranks sits (`keys.pair_of`), the slowest over all pipelines."""
        return self.mesh.pairs("pp", self.hardware, self.scenario.cluster.num_nodes)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of one step, forward and backward, no recomputation, causal attention halved."""
        total = sum(b.model_flops for blocks in self.stage_blocks for b in blocks)
        return 3.0 * total * self.microbatches_in_all

    @cached_property
    def attention_model_flops(self) -> float:
        """The attention part of `model_flops` (causal); the non-causal convention counts it twice."""
        return 3.0 * sum(b.attention_flops for blocks in self.stage_blocks for b in blocks) * self.microbatches_in_all


def recomputed_flops(layout: Layout) -> float:
    """FLOPs per step that recomputation repeats (causal attention halved)."""
    return sum(block.repeated_flops for blocks in layout.stage_blocks for block in blocks) * layout.microbatches_in_all


__all__ = ["Layout", "recomputed_flops"]
