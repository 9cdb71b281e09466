"""Seconds that the host takes to launch a block: kernels, collectives, modules and the hooks around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

from simpar.costs.block_price import BlockPrice
from simpar.costs.gloo import check_seconds
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.expert import fixes_tokens
from simpar.parallel.layout import Layout
from simpar.specs.framework_run import Pipeline
from simpar.specs.hardware import USUAL_X86

PASS_SHARE = {"F": 1 / 3, "B": 2 / 3}
"""Of the host's time for forward and backward of a block, where it runs ahead from pass to pass: what one pass is launched late
by, the other's time on the device hides, and a backward takes about twice as long as a forward (assumed; shares that followed the
device's own times would make a faster kernel lengthen the other pass)."""
ATTENTION_SHARE = 0.5
"""Of a dense layer's modules, and so of the host's time beside its launches: what a layer with experts keeps (assumed: attention
and feed-forward alike); router, dispatcher and experts have times of their own (`Host.expert_modules_cpu_s`)."""

ROTATED: Final = {"F": 12, "B": 10}
"""Kernels that turn one document's queries, or its keys: sine and cosine of its angles scaled and cast, two products, the halves
swapped, their sum; backward those of autograd (Megatron-LM core/models/common/embeddings/rope_utils.py,
_apply_rotary_pos_emb_thd)."""
REORDERED: Final = {"F": 48, "B": 40}
"""Launches, a read of a value counted as two, that put one chunk of one document in order around attention whose heads are split by
all-to-all: before it 9 and two reads, of queries, keys and values, backward of the output's gradient; after it 5 and two, of the
output, backward of three gradients (TransformerEngine context_parallel.py, reorder_seq_chunks_after_a2a_before_attn_thd and
reorder_seq_chunks_before_a2a_after_attn_thd). In either direction they come from Python."""

PAIR_HOOKS: Final = {"F": 3.5, "B": 2.0}
"""Hooks of ZeRO-3 around a low-rank pair over those around a weight's module: in a forward peft's layer, dropout, A and B have
some, in a backward A and B. Seven pairs lengthen the hooks of a Qwen3 layer, 14 modules, from 3.3 to 9.0 ms forward and from 3.2
to 6.5 ms backward (deepspeed 0.19, peft 0.18, an empty process group, one server core)."""

QUANTISED: Final = {"nf4": (46e-6, 61e-6), "nf4-double": (65e-6, 82e-6)}
"""What bitsandbytes adds to a linear's forward and to its backward, where a linear layer's forward takes the host 13.5 us: its
autograd function in Python, the dequantisation's checks and ctypes, two casts; a second dequantisation of its scales. Without any
kernel: 22 and 30 us, 32 and 40 of a double one, beside a linear's 6.6 (bitsandbytes 0.41.3, the same in 0.45.5, their library
replaced by nothing, torch 2.13, one server core)."""


TRITON_LAUNCH_S: Final = 58e-6
"""Host time of a scan's kernel that Triton's autotuner and launcher start from Python, what torch allocates for it included: Mamba
2's five take an H100's host 0.29 ms for 1,024 tokens as for 2,048 (vLLM pull request 27299, October 2025; all five fused into one
0.07). Triton alone says 42 (pull request 1431), 49 (3638) and 62 us with many arguments (3503), a GB200's host 16 to 19 (Meta's
Triton, pull request 1645)."""


class HostTimes:
    """Host seconds of the blocks of `layout`, each counted once; `price` gives a block's kernels."""

    def __init__(self, layout: Layout, price: Callable[[LocalBlock, str], BlockPrice]) -> None:
        self._layout, self._price = layout, price
        self._launched: dict[tuple[LocalBlock, str], float] = {}

    @cached_property
    def _ahead(self) -> bool:
        return runs_ahead(self._layout)

    def seconds(self, block: LocalBlock, phase: str) -> float:
        """To launch the kernels of one phase, or its share of both passes where the host runs ahead."""
        return self._shared(block, phase) if self._ahead else self._own(block, phase)

    def least(self, block: LocalBlock, phase: str) -> float:
        """No more than that, whatever the pipeline lets the host do."""
        own = self._own(block, phase)
        return min(own, self._shared(block, phase)) if may_run_ahead(self._layout) else own

    def _shared(self, block: LocalBlock, phase: str) -> float:
        if phase not in PASS_SHARE:
            return self._own(block, phase)
        return PASS_SHARE[phase] * sum(self._own(block, each) for each in PASS_SHARE)

    def _own(self, block: LocalBlock, phase: str) -> float:
        if block.options.frozen and phase != "F":
            return 0.0  # there is nothing to launch in a frozen block's backward
        key = (block, phase)
        if key not in self._launched:
            price = self._price(block, phase)
            self._launched[key] = launch_seconds(self._layout, price, phase) + self._drained(block, phase, price)
        return self._launched[key]

    def _drained(self, block: LocalBlock, phase: str, price: BlockPrice) -> float:
        """The device's own time of what the host launches only when the device is through with all before it: what follows the
        values that pairs read in a forward, the repeated one too, and the backward of a head behind a loop over all tokens."""
        host, training = self._layout.framework.host, self._layout.training
        head = phase == "B" and any(name == "head/logits" for name, _ in block.saved)
        if head and any(host.token_read_s) and block.options.kernels.loss.kind == "tiled":
            tokens = training.micro_batch_size * training.sequence_length / self._layout.plan.cp
            asked, answered = host.token_read_s
            return price.seconds + (slowdown(self._layout) * asked + answered) * tokens
        reads = _reads_s(self._layout, price, phase)
        return reads + self._price(block, "F").seconds if reads else 0.0


def _reads_s(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time of reading values of the device in a phase's pairs, a read as long as two launches (`REORDERED`)."""
    host, training = layout.framework.host, layout.training
    pairs = price.pairs if phase == "F" or price.repeats_modules else 0
    grouped = layout.hardware.gpu.architecture in host.grouped_adapters
    reads = host.adapter_reads[0] + (0 if grouped else host.adapter_reads[1] * training.lora_adapters)
    return slowdown(layout) * pairs * reads * 2 * host.launch_s


def _benchmarked(layout: Layout) -> bool:
    """Whether the framework's host times are those of benchmarks, which ran beside GPUs."""
    return layout.framework.host.benchmarked and layout.hardware.gpu.vendor in ("nvidia", "amd")


def slowdown(layout: Layout) -> float:
    """Time of Python, dispatcher and driver calls over what the framework's host times say."""
    node = layout.hardware.node
    unknown = _benchmarked(layout) and node.host_linear is None and node.cpu in ("intel", "amd")
    return node.host_slowdown * (USUAL_X86 if unknown else 1.0) * layout.calibration.host


def hooks_slowdown(layout: Layout) -> float:
    """The same of hooks and of the update's tensors, which were benchmarked in a virtual machine, a usual host (`Host`)."""
    return slowdown(layout) / (USUAL_X86 if _benchmarked(layout) else 1.0)


def launch_seconds(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time to launch a block's kernels; the device waits where this is the longer one."""
    spec, training = layout.framework, layout.training
    # What discards its output (norms, an activation) runs again as a function, without the modules around it and their hooks.
    passes = 2.0 if phase != "F" and price.repeats_modules else 1.0
    slow = slowdown(layout)
    each = slow * (spec.host.launch_s if phase == "F" else spec.host.backward_launch_s)
    if training.cuda_graphs:
        return price.expert_kernels * each if training.cuda_graph_scope == "attention" else 0.0
    beside = slow * (price.collectives * spec.host.collective_cpu_s + _checks_s(layout, price, phase))
    beside += hooks_slowdown(layout) * _sharding_hooks_s(layout, price, phase)
    if spec.host.triton_from_python:
        usual = slow * spec.host.compiled_launch_s if layout.compiled else each
        beside += price.triton_kernels * (hooks_slowdown(layout) * TRITON_LAUNCH_S - usual)
    if layout.compiled:
        return slow * price.kernels * spec.host.compiled_launch_s + beside
    forwards = 1.0 if phase == "F" else passes - 1.0
    known = spec.host.layer_slowdown
    modules = slow if known is None else known * layout.hardware.node.core_slowdown * layout.calibration.host
    own = modules * spec.host.layer_cpu_s
    again = price.repeated_kernels * (spec.host.launch_s - spec.host.backward_launch_s)  # a repeated forward comes from Python
    host = price.kernels * each + slow * again + beside + passes * own + slow * forwards * price.pairs * spec.host.adapter_cpu_s
    if price.quantised:
        forward, backward = QUANTISED.get(training.base_weights, (0.0, 0.0))
        host += slow * price.quantised * (forwards * forward + (0.0 if phase == "F" else backward))
    host += _documents_s(layout, price, phase, forwards) * slow
    if price.containers and "op" in layout.recompute.modules:
        host += slow * spec.host.op_layer_cpu_s[phase != "F"]
    if layout.plan.tp > 1:
        forward, backward = spec.host.tensor_module_cpu_s
        host += slow * price.weights * (forwards * forward + (0.0 if phase == "F" else backward))
    if price.expert_kernels and spec.host.expert_layer_cpu_s:
        counts = layout.host_counts_tokens and (phase == "F" or price.repeats_experts)
        # What it waits for is the device and the counts of other ranks: a slower core does not lengthen that.
        waits = spec.host.expert_layer_cpu_s if counts else 0.0
        host += waits - passes * (1.0 - ATTENTION_SHARE) * own + modules * _experts_s(layout, price, phase)
    if spec.host.fsdp_module_cpu_s and layout.plan.zero_stage == 3:
        # A fetch or two ahead, the host hides behind the layer's kernels what its hooks take, norms' chains included.
        hooks = passes * (price.weights + price.containers)
        hooks += price.pairs * (forwards * PAIR_HOOKS["F"] + (0.0 if phase == "F" else PAIR_HOOKS["B"]))
        host += hooks_slowdown(layout) * hooks * spec.host.fsdp_module_cpu_s
        if layout.mesh.dp * layout.mesh.cp > 1:  # a collective for each weight, which those that were measured did not start
            host += slow * price.linears * spec.host.collective_cpu_s
        host = max(price.seconds, host)
    if spec.host.fsdp_rank_lists and layout.gathers_by_layer:
        lists = price.matrices * (1 if phase == "F" else 2)
        host += price.seconds + slow * lists * layout.placement("shard").size * spec.host.launch_s
    return host


def _experts_s(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time of the modules of a layer's experts, its router and dispatcher in a phase, on a core that is not slower."""
    host, moe = layout.framework.host, layout.options.moe
    local = moe.num_experts / layout.options.degrees.ep if moe is not None else 0.0
    forward, backward = (every + local * each for every, each in zip(host.expert_modules_cpu_s, host.expert_cpu_s, strict=True))
    if phase == "F":
        return forward
    return backward + (forward if price.repeats_experts else 0.0)


def _documents_s(layout: Layout, price: BlockPrice, phase: str, forwards: float) -> float:
    """Host time of what goes through packed documents one by one, in a phase with so many forwards."""
    host, training, plan = layout.framework.host, layout.training, layout.plan
    lengths = training.document_lengths
    if not lengths:
        return 0.0
    backwards, found = float(phase != "F"), 0.0
    if host.rotates_each_document and not layout.framework.kernels.fused_rope:
        each = forwards * ROTATED["F"] * host.launch_s + backwards * ROTATED["B"] * host.backward_launch_s
        found += 2 * price.rotaries * each
    if host.reorders_each_document and plan.cp > 1 and plan.cp_style == "ulysses":
        found += 2 * plan.cp * price.attentions * (forwards * REORDERED["F"] + backwards * REORDERED["B"]) * host.launch_s
    return training.micro_batch_size * training.sequence_length * len(lengths) / sum(lengths) * found


def least_launches(layout: Layout, *, experts: bool) -> tuple[float, float]:
    """Host seconds of a block's forward and backward, at least: without any launch, whatever the pipeline lets the host do."""
    nothing = BlockPrice(0.0, (), (), (), 0, 0, (), expert_kernels=int(experts))
    each = {phase: launch_seconds(layout, nothing, phase) for phase in PASS_SHARE}
    if may_run_ahead(layout):
        each = {phase: min(own, PASS_SHARE[phase] * sum(each.values())) for phase, own in each.items()}
    return each["F"], each["B"]


def launch_gaps(device: Sequence[float], host: Sequence[float], *, blocking: bool = False, cut: bool = False) -> list[float]:
    """Seconds by which the host is late after each block of a pass.

    The host launches block after block and runs ahead of the device, so a block ends when the device is through with it and the
    host has launched all of its kernels: end_i = max(end_(i-1) + device_i, host_0 + ... + host_i). Ends of blocks are longest
    paths: none comes later for a shorter one of these times.

    Args:
        device, host: seconds of each block, in the order in which they run.
        blocking: the host waits for each kernel, so that all of its time is added.
        cut: others wait for these blocks, or these for others. Each is as long as its device or its host takes: if one could use
            what the host gained in another, a faster block could make a later one longer.
    """
    if blocking:
        return list(host)
    gaps, end, launched = [], 0.0, 0.0
    for own, launch in zip(device, host, strict=True):
        if cut:
            end = launched = 0.0
        launched += launch
        through = end + own
        end = max(through, launched)
        gaps.append(end - through)
    return gaps


def passes_join(pp: int, virtual_stages: int, schedule: str, overlap_p2p: bool | None, policy: Pipeline) -> bool:
    """Whether a pipeline lets the host go on from pass to pass without waiting for the device: with one stage, or where sends and
    receives are not batched (Megatron-LM p2p_communication.py: torch.cuda.synchronize() after those, config.batch_p2p_sync)."""
    if pp == 1:
        return True
    if virtual_stages == 1 or schedule not in ("auto", "interleaved") or policy.receives_block_host:
        return False
    return policy.overlap_p2p_interleaved if overlap_p2p is None else overlap_p2p


def may_run_ahead(layout: Layout) -> bool:
    """Whether there are pipelines in which the host runs ahead of the device from pass to pass.

    Without a capacity the host of every dispatcher waits for the tokens that its experts get (Megatron-LM token_dispatcher.py,
    DeepEP's dispatch; HybridEP's unless it is given num_permuted_tokens), with one that of DeepEP's."""
    waits = layout.options.moe is not None and not fixes_tokens(layout.plan, layout.training.routing)
    return not (layout.training.launch_blocking or waits)


def runs_ahead(layout: Layout) -> bool:
    """Whether the host runs ahead of the device from pass to pass."""
    plan = layout.plan
    if layout.gathers_by_layer or not may_run_ahead(layout):
        return False
    return passes_join(plan.pp, plan.virtual_stages, plan.schedule, plan.overlap_p2p, layout.framework.pipeline)


def _sharding_hooks_s(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time around a pass of a block whose weights are gathered for it; no graph takes it away."""
    if not layout.gathers_by_layer:
        return 0.0
    host, backward = layout.framework.host, phase != "F"
    each = host.fsdp_group_cpu_s[backward]
    # A pair inside a checkpointed layer is gathered once more for its second forward.
    pair = each + (host.fsdp_group_cpu_s[0] if backward and price.repeats_modules else 0.0)
    # Pairs without groups of their own are weights of the layer's, two for each adapter that a run holds.
    inside = 0 if host.fsdp_pair_groups else 2 * layout.training.lora_adapters * price.pairs
    weights = (price.weights + inside) * host.fsdp_weight_cpu_s[backward]
    return each + weights + price.pairs * host.fsdp_pair_groups * pair


def _checks_s(layout: Layout, price: BlockPrice, phase: str) -> float:
    """Host time in which ranks compare their calls before each collective of a block, its sharded weights' included."""
    if not layout.training.collective_checks:
        return 0.0
    found = sum(count * check_seconds(layout.placement(dimension).size) for dimension, count in price.called)
    if layout.gathers_by_layer:
        found += (1 if phase == "F" else 2) * check_seconds(layout.placement("shard").size)
    return found
