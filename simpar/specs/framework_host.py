"""What the host spends around the kernels of a training step: a policy of a framework, see framework_policies.py."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.specs.framework_policies import Policy


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
        layer_cpu_s: further host time per layer and pass: module calls, hooks, autograd functions, checkpoint bookkeeping.
        layer_slowdown: how many times that takes on another kind of CPU; None = as much longer as a launch does.
        op_layer_cpu_s: host time that a policy which decides op by op what a checkpointed layer keeps adds to its forward and
            to its backward where operations are dispatched eagerly (torch's create_selective_checkpoint_contexts: modes in Python).
        rotates_each_document, reorders_each_document: where sequences hold several documents, an unfused rotary embedding, and
            context parallelism by all-to-all, go through these one by one (costs/host.py, `_documents_s`).
        expert_layer_cpu_s: host time of a forward in which it waits for the tokens of each expert (`Layout.host_counts_tokens`).
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
            holds on GPUs older or newer than Hopper, where it takes these one by one: the host is then no further than the device,
            and the hooks of the next group come on top.
        adapter_cpu_s: host time of the modules of a low-rank pair in a forward, beside its kernels and the linear's own module.
        token_read_s: before the backward of a tiled loss, time for each token in which the device has nothing to do: a loop reads a
            value of it from the device.
        optimizer_cpu_s: host time of one optimizer step outside its kernels (scaler, scheduler, logging).
        optimizer_tensor_cpu_s: host time of gradient norm and update for each parameter tensor.
        drains_before_update: the host reads the loss or the norm before it updates, so that it is no further than the device.
    """

    benchmarked: bool = False
    launch_s: float = 9e-6
    backward_launch_s: float = 6e-6
    compiled_launch_s: float = 3e-6
    layer_cpu_s: float = 150e-6
    layer_slowdown: float | None = None
    op_layer_cpu_s: tuple[float, float] = (0.0, 0.0)
    rotates_each_document: bool = False
    reorders_each_document: bool = False
    expert_layer_cpu_s: float = 0.0
    collective_cpu_s: float = 50e-6
    tensor_module_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_module_cpu_s: float = 0.0
    reduction_hook_cpu_s: float = 0.0
    fsdp_rank_lists: bool = False
    fsdp_group_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_weight_cpu_s: tuple[float, float] = (0.0, 0.0)
    fsdp_pair_groups: int = 0
    adapter_reads: tuple[int, int] = (0, 0)
    adapter_cpu_s: float = 0.0
    token_read_s: float = 0.0
    optimizer_cpu_s: float = 2e-3
    optimizer_tensor_cpu_s: float = 0.0
    drains_before_update: bool = False
