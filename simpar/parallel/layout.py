"""A layout: everything about one scenario that both the program's shape and its prices need, derived once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from simpar.graph.rematerialise import Recompute
from simpar.graph.types import Layer
from simpar.model.kind import kind_of, site_of
from simpar.model.layered import token_network
from simpar.model.network import EncoderInput, EncoderLayer, Network, padded_vocabulary, simple_network
from simpar.parallel.blocks import LocalBlock, split_block
from simpar.parallel.job import Job
from simpar.parallel.pipeline import StageLayers, boundary_bytes, split_layers
from simpar.parallel.split_options import SplitOptions
from simpar.specs.architecture import TokenModel, has_experts
from simpar.specs.calibration import RunCalibration, calibration_on, measured_here
from simpar.specs.encoders import encoders_of, input_tokens
from simpar.specs.framework import framework
from simpar.specs.kinds import Kind
from simpar.specs.reference import reference_of
from simpar.specs.scenario import Scenario
from simpar.specs.site import Site
from simpar.specs.stage_plan import Host, hosts, joint_profile
from simpar.specs.training import BASE_BYTES
from simpar.topology.mesh import Mesh
from simpar.topology.placement import GroupPlacement


@dataclass(frozen=True, eq=False)
class Layout(Job):
    """One scenario laid out.

    Attributes:
        num_stages: virtual stages of one copy of the model.
        replicas: copies of the model in the pipeline (2: DualPipe).
        ends_meet: the schedule puts the first stage and the last on one rank.
        alone: layouts of a mixed cluster's hosts (specs/stage_plan.py), each as if all stages were like its own.
        ranks: pipeline rank of each model stage, of a mixed cluster.
        replica: of which host's replicas this is the pipeline, where hosts hold replicas.
        vocabulary_tp: tensor ranks that the vocabulary is padded for: of all stages, where they differ; 0 = tp.
    """

    num_stages: int
    replicas: int = 1
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
        more = (load_factor, num_stages, replicas, ends_meet)
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

    @cached_property
    def calibration(self) -> RunCalibration:
        """What published runs of this framework on this GPU add to the priced parts (nothing on a calibrated machine), with
        what the cluster's own runs say on top; of several kinds of GPU the least known one."""
        if self.alone:
            return max((layout.calibration for layout in self.alone), key=lambda c: c.expected_error)
        found = self.published_calibration
        found = measured_here(found) if self.hardware.calibrated else found
        return found if self.site is None else self.site.applied(found, self.kind)

    @property
    def memory_half_width(self) -> float:
        """Of the 80 % interval of a predicted peak, as a logarithm."""
        return self.calibration.memory_half_width(experts=has_experts(self.scenario.model))

    @cached_property
    def site(self) -> Site | None:
        """What was learned from the cluster's own runs, where they had this framework and GPU."""
        return site_of(self.scenario)

    @cached_property
    def kind(self) -> Kind:
        """What the job is one of, at a site with runs of its own."""
        return kind_of(self.scenario)

    @cached_property
    def published_calibration(self) -> RunCalibration:
        """What published runs of this framework on this GPU add to the priced parts, also where they are not used."""
        return calibration_on(self.framework, self.hardware)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches per step and data-parallel rank; of replicas that differ, of this one."""
        return self.of_rank(0).num_microbatches if self.alone else super().num_microbatches

    @property
    def microbatches_in_all(self) -> int:
        """Micro-batches per step of all replicas."""
        return self.training.global_batch_size // self.training.micro_batch_size

    @cached_property
    def network(self) -> Network:
        """The model as layer graphs of one micro-batch."""
        model, training, own = self.scenario.model, self.training, self.framework.conventions
        if not isinstance(model, TokenModel):
            return simple_network(model, training.micro_batch_size, self.plan.tp)
        vocab = padded_vocabulary(model.vocab_size, own.vocabulary_multiple, self.vocabulary_tp or self.plan.tp)
        inputs = tuple(
            EncoderInput(stack.name, given.per_sample * training.micro_batch_size, input_tokens(stack, given),
                         "all" if training.trainable == "lora" else given.frozen)
            for stack, given in encoders_of(self.scenario)
        )  # fmt: skip
        trained = model.model_copy(update={"num_nextn_predict_layers": 0}) if own.no_mtp else model
        shape = (training.micro_batch_size, training.sequence_length, vocab)
        return token_network(trained, *shape, inputs, training.document_lengths)

    @cached_property
    def boundary_bytes(self) -> tuple[float, ...]:
        """Activation passed between layers, one micro-batch, unsplit, before each layer (and after the last)."""
        return tuple(elements * self.kernels.element for elements in self.network.boundary_elements)

    def entering_bytes(self, stage: int) -> float:
        """What one rank of a model stage gets from the stage before it, one micro-batch."""
        own = self.stages[stage]
        if own.encoders[0] and (own.embedding or own.encoders[1] > own.encoders[0]):
            # Encoders split their inputs over no ranks.
            return self.network.encoders[own.encoders[0] - 1].passes_on * self.kernels.element
        beside = self.reference.entering_bytes(stage) if self.reference is not None else 0.0
        return beside + boundary_bytes(self.boundary_bytes[own.first], self.plan)

    @cached_property
    def embedding_stage(self) -> int:
        """The model stage where the decoder begins."""
        return next(index for index, stage in enumerate(self.stages) if stage.embedding)

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """Layers of each virtual stage."""
        ends_meet = self.ends_meet or self.plan.pp == 1
        network = self.network
        return split_layers(len(network.layers), self.num_stages, self.plan, ends_meet=ends_meet, encoders=len(network.encoders))

    @cached_property
    def stage_blocks(self) -> tuple[tuple[LocalBlock, ...], ...]:
        """Blocks of each virtual stage on one rank, in order."""
        if self.alone:
            return tuple(self.on(index).stage_blocks[index] for index in range(self.num_stages))
        return tuple(
            (*self._encoder_blocks(stage), *self.reference_blocks(index), *self._own_blocks(stage))
            for index, stage in enumerate(self.stages)
        )

    @property
    def blocks_in_order(self) -> tuple[list[LocalBlock], list[LocalBlock], list[LocalBlock]]:
        """Blocks of the model on one rank: before the layers (encoders without stages of their own, embedding), layers, behind
        them; without those of a reference."""
        blocks: list[LocalBlock] = []
        for index, own in enumerate(self.stage_blocks):
            first = self.stages[index].encoders
            begin = first[1] - first[0]
            blocks += [*own[:begin], *own[begin + len(self.reference_blocks(index)) :]]
        network = self.network
        before = len(network.encoders) + int(network.embedding is not None)
        last = before + len(network.layers)
        apart = len(network.encoders) if self.plan.encoder_stages else 0
        return blocks[apart:before], blocks[before:last], blocks[last:]

    def _encoder_blocks(self, stage: StageLayers) -> list[LocalBlock]:
        return [self.split(e.layer, self.encoder_options(e)) for e in self.network.encoders[slice(*stage.encoders)]]

    def _own_blocks(self, stage: StageLayers) -> list[LocalBlock]:
        network, plain, spec = self.network, self.plain_options, self.recompute
        blocks, held = list[LocalBlock](), set[str]()
        if stage.embedding and network.embedding is not None:
            blocks.append(self.split(network.embedding, plain))
        narrow = int(len(network.layers) * self.framework.kernels.fp4_layers) if self.casts == "fp4" else len(network.layers)
        for offset in range(stage.count):
            number = stage.first + offset
            again = offset < (stage.count if spec.num_layers is None else spec.num_layers) and not (number + 1) % spec.every
            options, layer = self.options if again else plain, network.layers[number]
            options = options if number < narrow else self.wide(options)
            if spec.uniform_layers > 1:
                options = replace(options, recompute=options.recompute.in_chunk(offset, spec.uniform_layers, stage.count))
            if borrowed := frozenset(node for name, node in layer.shared if name in held) if layer.shared else None:
                options = replace(options, borrowed=borrowed)
            held |= {name for name, _ in layer.shared}
            blocks.append(self.split(layer, options))
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

    @cached_property
    def reference(self) -> Layout | None:
        """The layout of the model that runs forward beside the trained one, stage by stage, on the same ranks."""
        found = reference_of(self.scenario)
        return None if found is None else replace(self, scenario=found, alone=(), ranks=())

    def reference_blocks(self, stage: int) -> list[LocalBlock]:
        """Blocks of a stage that are the reference's, behind its encoders."""
        here = self.on(stage).reference
        return [] if here is None else [here._frozen(block) for block in here._own_blocks(here.stages[stage])]

    def _frozen(self, block: LocalBlock) -> LocalBlock:
        """A block's forward on frozen weights: a copy of them, or the base weights of adapters."""
        own = block.options.lora_rank > 0
        shared = frozenset(node.name for node in block.layer.nodes) if own else block.options.borrowed
        options = replace(block.options, recompute=Recompute(), lora_rank=0, borrowed=shared, frozen=True)
        made, held = self.split(block.layer, options), block.dense_parameters + block.expert_parameters
        # A matrix that another block has too, as a tied head its embedding's, is there once.
        return replace(made, frozen_parameters=held) if held < made.frozen_parameters else made

    def encoder_options(self, encoder: EncoderLayer) -> SplitOptions:
        """Options of an encoder's layer: tensor parallel where its heads and widths allow, else whole on every rank; its inputs are
        split neither along their tokens nor over context ranks (Megatron-LM, pretrain_vlm.py)."""
        tp, frozen = self.plan.tp, encoder.frozen
        tp = tp if all(encoder.layer.size(a.name) % tp == 0 for a in encoder.layer.axes if a.split in ("tensor", "groups")) else 1
        degrees = replace(self.degrees, tp=tp, sequence_parallel=False, cp=1, overlap_tp=False)
        options = replace(self.plain_options if frozen else self.options, degrees=degrees, frozen=frozen)
        return replace(options, lora_rank=0, dequantised_bytes=0.0) if frozen else options

    def split(self, block: Layer, options: SplitOptions) -> LocalBlock:
        """One rank's share of a layer, each computed once."""
        return split_block(block, options)

    def frozen_bytes(self, block: LocalBlock) -> float:
        """Bytes per frozen weight of a block under low-rank adaptation; only matrices of layers are ever quantised. Of one in fp32
        autograd keeps the 16-bit copy that a product read, as its input's gradient is made with it."""
        if self.training.base_weights == "fp32":
            copied = block.name != "embedding" and self.plan.zero_stage < 3 and self.recompute.granularity == "none"
            return 6.0 if copied else 4.0
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
        return max(self.mesh.edp // replicas, 1) if self.plan.shard_experts else 1

    def block_parameters(self, stage: int, first: int, last: int, *, trainable: bool = False) -> tuple[float, float]:
        """(dense, expert) weights of blocks [first, last) of a stage on one rank; of those, the trained ones."""
        blocks = self.stage_blocks[stage][first:last]
        parts = [self.trained(b) if trainable else (b.dense_parameters, b.expert_parameters) for b in blocks]
        return sum(dense for dense, _ in parts), sum(expert for _, expert in parts)

    def held_parameters(self, stages: Iterable[int], *, trainable: bool = False) -> tuple[float, float]:
        """The same of all blocks of some stages."""
        parts = [self.block_parameters(s, 0, len(self.stage_blocks[s]), trainable=trainable) for s in stages]
        return sum(dense for dense, _ in parts), sum(expert for _, expert in parts)

    def trained(self, block: LocalBlock) -> tuple[float, float]:
        """(Dense, expert) weights of a block that are trained: all, or those of the adapters beside them."""
        if self.options.lora_rank:
            held = self.training.lora_adapters
            return (block.lora_parameters - block.lora_experts) * held, block.lora_experts * held
        return block.dense_parameters, block.expert_parameters

    @cached_property
    def tied_extra(self) -> float:
        """Weights of the head that are the embedding's: a copy on another rank, or the very same where the ends meet; none of a
        model that ends in its last layer's outputs."""
        head = self.network.head
        if not self.network.tied or head is None or "head/logits.weight" not in head.tensor:
            return 0.0
        return head.elements("head/logits.weight") / self.plan.tp

    @cached_property
    def overlap_grad_reduce(self) -> bool:
        """Gradient reduction runs beside the backward."""
        beside = self.framework.data.reduces_beside_backward(self.plan.zero_stage, self.plan.overlap_grad_reduce)
        return beside and not self.training.launch_blocking

    @cached_property
    def overlap_param_gather(self) -> bool:
        """Parameter gathering runs beside the forward."""
        chosen = self.plan.overlap_param_gather
        beside = self.framework.data.overlap_param_gather if chosen is None else chosen
        return beside and not self.training.launch_blocking

    @cached_property
    def data_ranks(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.mesh.dp * self.mesh.cp

    def buckets(self, stage: int, *, bucketed: bool) -> tuple[tuple[int, int], ...]:
        """Blocks of a stage as gradient buckets [first, last), last block first (the order of the backward)."""
        blocks = self.stage_blocks[stage]
        size = self.plan.reduce_bucket_size or self.framework.bucket_elements(self.data_ranks, self.state_bytes.bucket)
        found, last, held = [], len(blocks), 0.0
        for first in range(len(blocks) - 1, -1, -1):
            held += blocks[first].dense_parameters + blocks[first].expert_parameters
            if (bucketed and held >= size) or first == 0:
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
            nodes = self.scenario.cluster.num_nodes
            self._placements[dimension] = self.mesh.placement(name, self.hardware, nodes, self.shard_ranks)
        return self._placements[dimension]

    @cached_property
    def pipeline_pairs(self) -> tuple[GroupPlacement, ...]:
        """Where each pair of neighbouring pipeline ranks sits (`keys.pair_of`), the slowest over all pipelines."""
        return self.mesh.pairs("pp", self.hardware, self.scenario.cluster.num_nodes)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of one step, forward and backward, no recomputation, causal attention halved."""
        return sum(b.step_flops for blocks in self.stage_blocks for b in blocks) * self.microbatches_in_all

    @cached_property
    def attention_model_flops(self) -> float:
        """The attention part of `model_flops` (causal); the non-causal convention counts it twice."""
        return sum(b.passes[0] * b.attention_flops for blocks in self.stage_blocks for b in blocks) * self.microbatches_in_all


def recomputed_flops(layout: Layout) -> float:
    """FLOPs per step that recomputation repeats (causal attention halved)."""
    return sum(block.repeated_flops for blocks in layout.stage_blocks for block in blocks) * layout.microbatches_in_all
