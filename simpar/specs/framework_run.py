"""Policies of how a framework runs a step beside its kernels and its sharding: host, pipeline engine, device memory, and the
conventions of its published runs. See framework_policies.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simpar.specs.framework_policies import Policy
from simpar.specs.framework_releases import Ability, Lack, Recompute


@dataclass(frozen=True, slots=True)
class Host(Policy):
    """Seconds of the host.

    Attributes:
        benchmarked: its times were measured in benchmarks of eager torch, not read off published runs and so off their hosts: those
            of launches and modules are stated for a core on which a linear layer's forward takes 13.5 us, so that an unknown host
            is slower (`USUAL_X86`), those of `fsdp_` hooks and of an update's tensors were taken as they came in a virtual machine.
        launch_s: host time per kernel launched from the forward, eager Python and dispatcher included.
        backward_launch_s: the same from the autograd engine (C++).
        compiled_launch_s: per kernel inside a compiled graph.
        triton_from_python: scans are Triton kernels that Python launches, compiled layer or not; False where one graph is the step.
        layer_cpu_s: further host time per layer and pass: module calls, hooks, autograd functions, checkpoint bookkeeping.
        layer_slowdown: how many times that takes on another kind of CPU; None = as much longer as a launch does.
        op_layer_cpu_s: host time that a policy which decides op by op what a checkpointed layer keeps adds to its forward and
            to its backward where operations are dispatched eagerly (torch's create_selective_checkpoint_contexts: modes in Python).
        rotates_each_document, reorders_each_document: where sequences hold several documents, an unfused rotary embedding, and
            context parallelism by all-to-all, go through these one by one (costs/host.py, `_documents_s`).
        expert_layer_cpu_s: host time of a forward in which it waits for the tokens of each expert (`Layout.host_counts_tokens`).
        expert_modules_cpu_s: host time of router, dispatcher and experts in a forward and in a backward, beside their launches: it
            stands in a layer with experts in place of the modules of a dense feed-forward.
        expert_cpu_s: what each expert of a rank adds to these, beside its products' launches.
        collective_cpu_s: host time to issue one collective inside a layer (tensor, context, expert).
        tensor_module_cpu_s: host time that tensor parallelism adds to a product or a norm in a forward and in a backward where
            every operation is dispatched eagerly through distributed tensors (torch DTensor); none inside a compiled graph.
        fsdp_module_cpu_s: host time of the hooks of one module in one pass, which fetch its weights: the host gets no further ahead
            of the device than a layer (DeepSpeed ZeRO-3).
        reduction_hook_cpu_s: host time of the hook that takes a weight's gradient to its reduction, where weights are whole.
        fsdp_rank_lists: each weight is gathered alone, when the device is through with all before it, into a list of its ranks'
            parts, and its gradient reduced out of one: each part takes the host as long as a launch (DeepSpeed's ZeRO-3 of 2021).
        fsdp_group_cpu_s, fsdp_weight_cpu_s: host time of the hooks around a fully sharded group in a forward and in a backward, and
            what each of its weights adds (torch FSDP).
        fsdp_pair_groups: groups that the two weights of a low-rank pair are, each with hooks of its own inside the layer's.
        adapter_reads: values of the device that the forward of a low-rank pair reads, and further ones for each adapter that it
            holds where it takes these one by one: the host is then no further than the device, and the hooks of the next group come
            on top.
        grouped_adapters: architectures on which it takes all adapters in one grouped product.
        adapter_cpu_s: host time of the modules of a low-rank pair in a forward, beside its kernels and the linear's own module.
        token_read_s: before the backward of a tiled loss, time for each token in which the device has nothing to do: a loop reads a
            value of it from the device. The host's part, which a slower host takes longer for, and the device's answer.
        optimizer_cpu_s: host time of one optimizer step outside its kernels (scaler, scheduler, logging).
        optimizer_tensor_cpu_s: host time of gradient norm and update for each parameter tensor.
        sharded_step_cpu_s: of a step of fully sharded weights the host time, while the device waits for it, of the norm of each
            gradient before the update and, beside a collective of its own, of each weight that stays whole after it.
        drains_before_update: the host reads the loss or the norm before it updates, so that it is no further than the device.
    """

    benchmarked: bool = False
    launch_s: float = 9e-6
    backward_launch_s: float = 6e-6
    compiled_launch_s: float = 3e-6
    triton_from_python: bool = True
    layer_cpu_s: float = 150e-6
    layer_slowdown: float | None = None
    op_layer_cpu_s: tuple[float, float] = (0.0, 0.0)
    rotates_each_document: bool = False
    reorders_each_document: bool = False
    expert_layer_cpu_s: float = 0.0
    expert_modules_cpu_s: tuple[float, float] = (0.0, 0.0)
    expert_cpu_s: tuple[float, float] = (0.0, 0.0)
    collective_cpu_s: float = 50e-6
    tensor_module_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_module_cpu_s: float = 0.0
    reduction_hook_cpu_s: float = 0.0
    fsdp_rank_lists: bool = False
    fsdp_group_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_weight_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_pair_groups: int = 0
    adapter_reads: tuple[int, int] = (0, 0)
    grouped_adapters: tuple[str, ...] = ()
    adapter_cpu_s: float = 0.0
    token_read_s: tuple[float, float] = (0.0, 0.0)
    optimizer_cpu_s: float = 2e-3
    optimizer_tensor_cpu_s: float = 0.0
    sharded_step_cpu_s: tuple[float, float] = (0.0, 0.0)
    drains_before_update: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline(Policy):
    """The pipeline engine: what waits for a transfer, what a stage holds.

    Attributes:
        schedule: of a published run without virtual stages that does not say its own.
        schedules: what the engine runs, without virtual stages and with them; () = every one that there is.
        layer_rounding: how layers are spread over stages: "front" evenly, the extra ones to the first stages; "last" the same to
            the last; "fill" where they do not divide: every stage the rounded-up share, the last what is left; "cost" by compute
            cost with the head counted (counts.py); "ends" the rounded-up share in between, what is left on the first and
            last (with DualPipe on one rank).
        zero_stage_with_pp: the highest stage that its pipeline engine composes with.
        overlap_p2p_interleaved: with virtual stages sends are asynchronous; without, compute steps wait for batched sends and
            receives between them.
        overlap_p2p_zero_bubble: zero-bubble style runtimes post receives early.
        receives_block_host: the host waits for what another pipeline stage sends (it reads the shape first), so that it runs ahead
            of the device only where nothing is received: on the first stage's forwards in a row.
        tp_scatter_gather_p2p: pipeline sends are split over tensor ranks and gathered over NVLink at the far end (Megatron
            2021-2022 without sequence parallelism; sends shrink by tp).
        input_gradient_releases: a backward in two parts frees after the input gradient all but what weight gradients need (a store
            of matmul inputs and output gradients: zero-bubble's fork, DualPipe, Megatron); False: torch's pipelining keeps the
            whole graph until the weight gradient.
        keeps_stage_outputs: every stage output is held until its backward (DeepSpeed; Megatron before deallocate_pipeline_outputs).
        frees_stage_inputs: the input of a pipeline stage is given back after its forward, what its first norm saves of it too.
        last_outputs: micro-batches whose logits stay to the step's end: none, all (torch's pipelining), one (return_outputs=False).
        engine_of_one_stage: a job without pipeline runs through the pipeline's engine too, so that `last_outputs` holds there.
        overlap_keeps_backward: where exchanges between expert ranks are hidden behind another micro-batch, all activations of the
            one whose backward runs stay until it has ended.
        receive_buffers_per_microbatch: every micro-batch has receive buffers of its own, made before the first (the same).
    """

    schedule: str = "1f1b"
    schedules: tuple[str, ...] = ()
    layer_rounding: Literal["front", "last", "fill", "cost", "ends", "equal"] = "front"
    zero_stage_with_pp: int = 3
    overlap_p2p_interleaved: bool = True
    overlap_p2p_zero_bubble: bool = True
    receives_block_host: bool = False
    tp_scatter_gather_p2p: bool = False
    input_gradient_releases: bool = True
    keeps_stage_outputs: bool = False
    frees_stage_inputs: bool = False
    last_outputs: Literal["none", "one", "all"] = "none"
    engine_of_one_stage: bool = False
    overlap_keeps_backward: bool = False
    receive_buffers_per_microbatch: bool = False

    def named(self, schedule: str, pp: int, virtual_stages: int) -> str:
        """The schedule that a plan asks for; where it leaves it open ("auto"), the engine's own for so many stages on a rank, on a
        single rank that of accumulation: each backward after its forward."""
        if schedule != "auto":
            return schedule
        usual = ("1f1b", "interleaved")
        return ((self.schedules or usual) if pp > 1 else usual)[virtual_stages > 1]


@dataclass(frozen=True, slots=True)
class Allocator(Policy):
    """Device memory beside the model's: contexts, communicators and workspaces, and how the allocator rounds.

    Attributes:
        context_bytes: CUDA context with the kernels loaded.
        nccl_pair_bytes: buffers of one communicator of two ranks.
        nccl_group_bytes: the same of more ranks.
        nccl_peer_bytes: buffers of an all-to-all inside one NVLink domain for each other rank.
        communicators, pair_communicators: more in use than one per dimension of the layout, of any number of ranks and of two.
        blas_workspace_bytes: (architecture, bytes) of one cuBLAS workspace; an architecture that is missing takes the one of "".
        engine_workspace_bytes: the same of the workspace of TransformerEngine's matmuls.
        contiguous_buffers: weights and gradients are copied into one buffer each at the start (Megatron's DDP).
        fragmentation: reserved over what the allocator reserves for the replayed requests: what the replay does not see (side
            streams, workspaces); the default is the median over the ranks of SimuMax's measured B200 runs (v1.2).
        expandable_segments: the setting of the launch scripts; _one_node: of the script of a single node, not of several.
        pending_collectives: buffers of tensor-parallel collectives that are freed but not yet there for others, as the host runs
            ahead (torch before 2.8 records NCCL's stream on them); they count as reserved, not as allocated.
        planned: the compiler gives every buffer of a step its place in one allocation before it runs, so that nothing is cached.
    """

    context_bytes: float = 0.0
    nccl_pair_bytes: float = 0.0
    nccl_group_bytes: float = 0.0
    nccl_peer_bytes: float = 0.0
    communicators: int = 0
    pair_communicators: int = 0
    blas_workspace_bytes: tuple[tuple[str, float], ...] = ()
    engine_workspace_bytes: tuple[tuple[str, float], ...] = ()
    contiguous_buffers: bool = True
    fragmentation: float = 1.025
    expandable_segments: bool = False
    expandable_segments_one_node: bool = False
    pending_collectives: int = 0
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Conventions(Policy):
    """What its runs do that do not say, and which options it has.

    Attributes:
        abilities: options of specs/framework_options.py that the framework has.
        lacks: dimensions and layouts of that file that most frameworks have and this one has not.
        dropout: default dropout of the framework's era (GPT-3 style pre-training: 0.1).
        model_dropout: runs that do not say have the dropout that the model's file states, as the model's own code runs.
        no_mtp: the model's code is without its modules for multi-token prediction.
        recompute_default: recomputation used where a run does not say (Megatron's 2021-2022 scripts checkpoint every layer).
        selective_recompute: modules that are recomputed where a run says "selective" and no more.
        vocabulary_multiple: words on a tensor rank are rounded up to a multiple of this (Megatron-LM
            --make-vocab-size-divisible-by); 0: what does not divide over the ranks is left out.
        rank_order: dimensions of the ranks, the fastest first, where a published run does not say; "" = the plan's default.
        ep_dispatcher: how tokens reach their experts where a published run does not say.
        graphed_exchange: the same where graphs hold whole iterations, then beside computation; "" = as elsewhere.
        recipes_route_freely: its pre-training recipes leave an untrained router to itself.
        balances_in_turn: a forced balance deals experts in turn, so that a token's are consecutive; False: at random.
        only_cp_style: the one style of context parallelism there is, whatever a run calls it; "" = as the run says.
        adapter_cp_style: context parallelism of fine-tuning with low-rank adapters, of runs that do not say theirs.
        expert_virtual_stages: of pipelined runs with experts that do not say theirs: one, or the middle one of the divisors of a
            stage's layers.
        microbatch_per_stage: a local batch is split into one micro-batch per pipeline rank where a run does not say.
        sequence_parallel_default: tensor parallelism splits the sequence too where a run does not say.
        graphed_machines: profiles on which layers run from CUDA graphs where a run does not say.
        bf16_shards_states: what runs in bf16 call stage 0 shards the optimizer's states, as stage 1 does.
    """

    abilities: tuple[Ability, ...] = ()
    lacks: tuple[Lack, ...] = ()
    dropout: float = 0.0
    model_dropout: bool = False
    no_mtp: bool = False
    recompute_default: Recompute = "none"
    selective_recompute: tuple[str, ...] = ("core_attn",)
    vocabulary_multiple: int = 1
    rank_order: str = ""
    ep_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    graphed_exchange: Literal["", "deepep", "hybridep"] = ""
    recipes_route_freely: bool = False
    balances_in_turn: bool = False
    only_cp_style: Literal["", "ring", "all_gather", "ulysses"] = ""
    adapter_cp_style: Literal["ring", "ulysses"] = "ring"
    expert_virtual_stages: Literal["one", "middle"] = "one"
    microbatch_per_stage: bool = False
    sequence_parallel_default: bool = False
    graphed_machines: tuple[str, ...] = ()
    bf16_shards_states: bool = False
