"""One rank's requests to the allocator over its first two steps, from which its reserved memory follows.

The first step runs without the optimizer's moments, which are asked for at its end from what the activations left in the
cache; the second step then meets another state of the cache. Later steps repeat the second. Of each step only as many passes are
replayed as lead to the most micro-batches in flight and a little beyond: from there on a schedule repeats itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from simpar.parallel.layout import Layout
from simpar.parallel.lifetimes import Lifetimes, lifetimes
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.traffic import stays_gathered
from simpar.result.allocator import RECORDED, Event
from simpar.result.gathers import (
    frozen_parameters,
    fully_sharded,
    gathers_in_buffers,
    gradient_buffers,
    head_gradient_bytes,
    held_inputs,
    held_reductions,
    rests_unsharded,
    root_stays,
    sharded_more_moments,
    update_bytes,
    whole_embedding_gradient,
)
from simpar.result.host_events import Host
from simpar.result.outside import workspaces
from simpar.result.stage_ends import STAGE_INPUT, kept_outputs, last_outputs, receive_buffers

Pass = tuple[str, int, int, int]
"""(phase, model stage, first block, past the last block)."""
_OUTPUT: Final = "stage.output"
_UPDATE_TENSORS: Final = 3  # the fp32 gradients, the root of the second moments, the denominator


def until_steady(passes: list[Pass]) -> list[Pass]:
    """The passes up to the most blocks in flight, and until every block has run forward once more after that."""
    ends = "W" if any(phase == "W" for phase, *_ in passes) else "BI"
    blocks = {(stage, index) for _, stage, first, last in passes for index in range(first, last)}
    held = most = at = 0
    for position, (phase, _, first, last) in enumerate(passes):
        held += (last - first) * ((phase == "F") - (phase in ends))
        if held > most:
            most, at = held, position
    again = 0
    for position in range(at + 1, len(passes)):
        phase, _, first, last = passes[position]
        again += (last - first) * (phase == "F")
        if again > len(blocks):
            return passes[:position]
    return passes


@dataclass
class Trace:
    """Requests so far."""

    layout: Layout
    split: frozenset[int]
    thin: bool = False
    events: list[Event] = field(default_factory=list)
    flying: dict[tuple[int, int], deque[dict[str, int]]] = field(default_factory=dict)
    late: dict[tuple[int, int], deque[dict[str, int]]] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    count: int = 0
    known: dict[tuple[int, int, bool], Lifetimes] = field(default_factory=dict)

    def ask(self, size: float, stream: str = "compute") -> int:
        """A tensor; returns its id, -1 for one of no bytes."""
        amount = int(size)
        if amount <= 0:
            return -1
        self.count += 1
        self.events.append((self.count, amount, stream))
        return self.count

    def free(self, tensor: int) -> None:
        """Give a tensor back."""
        if tensor >= 0:
            self.events.append((tensor, 0, ""))

    def lives(self, stage: int, index: int, *, late: bool | None = None) -> Lifetimes:
        """A block's steps, of a thin trace without what a forward gives back; `late`: its weight gradient is a pass of its own."""
        split = stage in self.split if late is None else late
        if (stage, index, split) not in self.known:
            found = lifetimes(self.layout.stage_blocks[stage][index], split_backward=split)
            freed = {name for name, size in found.forward if self.thin and not size}
            self.known[stage, index, split] = replace(found, forward=tuple(s for s in found.forward if s[0] not in freed))
        return self.known[stage, index, split]

    def run(self, steps: tuple[tuple[str, int], ...], ids: dict[str, int], collective: frozenset[str] = frozenset()) -> None:
        """Steps of one block of one micro-batch, whose tensors are `ids`."""
        events, count = self.events, self.count
        for name, size in steps:
            if size:
                count += 1
                ids[name] = count
                events.append((count, size, "compute"))
            else:
                tensor = ids.pop(name, -1)
                if tensor >= 0:
                    events.append((tensor, 0, RECORDED if name in collective else ""))
        self.count = count

    def forward(self, stage: int, index: int) -> None:
        """Forward of a block."""
        ids: dict[str, int] = {}
        lives = self.lives(stage, index)
        self.run(lives.forward, ids, lives.collective)
        if index == 0 and self.layout.framework.pipeline.frees_stage_inputs and self.layout.plan.pp > 1:
            self.free(ids.pop(f"{STAGE_INPUT}#0", -1))
        if index == len(self.layout.stage_blocks[stage]) - 1:
            ids[_OUTPUT] = self.ask(kept_outputs(self.layout, stage))
            self.outputs.append(self.ask(last_outputs(self.layout, self.layout.stage_blocks[stage][index])))
            one = self.layout.framework.pipeline.last_outputs == "one" and self.outputs[-1] >= 0
            while one and len(self.outputs) > 1:
                self.free(self.outputs.pop(0))
        self.flying.setdefault((stage, index), deque()).append(ids)

    def backward(self, stage: int, index: int, *, late: bool) -> None:
        """Backward of a block's oldest micro-batch; `late`: the input gradient alone, the weight gradient comes later."""
        waiting = self.flying.get((stage, index))
        if not waiting:
            return
        if not self.thin or late:
            self._again(stage, index, late=late)
        ids = waiting.popleft()
        if self.thin and not late:
            for tensor in ids.values():
                self.free(tensor)
            return
        lives = self.lives(stage, index, late=late)
        self.run(lives.backward[lives.again :], ids, lives.collective)
        if late:
            self.late.setdefault((stage, index), deque()).append(ids)
        else:
            self.free(ids.pop(_OUTPUT, -1))

    def _again(self, stage: int, index: int, *, late: bool) -> None:
        """Recomputation of a block, or of a chunk of them before the backward of its last one."""
        inner = [block.options.recompute.inner for block in self.layout.stage_blocks[stage]]
        if index + 1 < len(inner) and inner[index + 1]:
            return
        first = next(at for at in range(index, -1, -1) if not inner[at])
        for block in range(first, index + 1):
            lives = self.lives(stage, block, late=late)
            self.repeat(stage, block, lives.backward[: lives.again], lives.collective)

    def repeat(self, stage: int, index: int, steps: tuple[tuple[str, int], ...], collective: frozenset[str]) -> None:
        """Steps of the recomputation of a block's oldest micro-batch."""
        self.run(steps, self.flying[stage, index][0], collective)

    def weight(self, stage: int, index: int) -> None:
        """Weight gradient of a block's oldest micro-batch."""
        waiting = self.late.get((stage, index))
        if waiting:
            for tensor in waiting.popleft().values():
                self.free(tensor)

    def drain(self) -> None:
        """Everything in flight ends."""
        for queues in (self.flying, self.late):
            for waiting in queues.values():
                for ids in waiting:
                    for tensor in ids.values():
                        self.free(tensor)
            queues.clear()
        for tensor in self.outputs:
            self.free(tensor)
        self.outputs.clear()


class Sharded:
    """Gathering and reduction around the blocks of a fully sharded rank (torch FSDP2: one group per block)."""

    def __init__(self, trace: Trace) -> None:
        layout = trace.layout
        self.trace, self.layout = trace, layout
        self.active = fully_sharded(layout) and layout.plan.pp == 1
        self.stays = [stays_gathered(layout, blocks) for blocks in layout.stage_blocks]
        self.gathered: dict[tuple[int, int], tuple[int, ...]] = {}
        self.resting: dict[tuple[int, int], list[int]] = {}
        self.reducing = -1
        self.held: list[int] = []

    def before(self, stage: int, index: int, step: int) -> None:
        """The block's weights and the next one's are gathered."""
        if not self.active:
            return
        blocks = self.layout.stage_blocks[stage]
        at_loss = step < 0 and any(name == "head/logits" for name, _ in blocks[index].saved)
        ahead = 0 if at_loss else self.layout.framework.data.fsdp_prefetch_groups
        wholes = [i for i in range(len(blocks)) if self._root(stage, i)]
        for wanted in wholes + [index + step * offset for offset in range(ahead + 1)]:
            if 0 <= wanted < len(blocks) and (stage, wanted) not in self.gathered:
                self._gather(stage, wanted)

    def _root(self, stage: int, index: int) -> bool:
        """Whether a block belongs to the group that stays gathered."""
        return root_stays(self.layout) and self.layout.stage_blocks[stage][index].outside_layers

    def _gather(self, stage: int, index: int) -> None:
        block, trace = self.layout.stage_blocks[stage][index], self.trace
        element = self.layout.state_bytes.gather
        flat = trace.ask(block.gathered_parameters * element, "all_gather")
        self.gathered[stage, index] = tuple(trace.ask(w * element) for w in trace.lives(stage, index).gathered)
        trace.free(flat)

    def after_forward(self, stage: int, index: int) -> None:
        """The weights go, except the last block's, which the backward needs first."""
        if self.active and not self.stays[stage][index] and not self._root(stage, index):
            self._reshard(stage, index)

    def _reshard(self, stage: int, index: int) -> None:
        for tensor in self.gathered.pop((stage, index), ()):
            self.trace.free(tensor)

    def after_backward(self, stage: int, index: int) -> None:
        """Gradients are reduced into shards; the weights go."""
        if not self.active:
            return
        block, trace, state = self.layout.stage_blocks[stage][index], self.trace, self.layout.state_bytes
        weights = trace.lives(stage, index).gathered
        share = sum(self.layout.trained(block)) / (sum(weights) or 1.0) if self.layout.options.lora_rank else 1.0
        element = head_gradient_bytes(self.layout) if any(n == "head/logits" for n, _ in block.saved) else state.gather
        own = [trace.ask(w * share * element) for w in weights]
        held = sum(weights) * share
        kept = held_inputs(self.layout, block)
        self.held += [trace.ask(kept), trace.ask(kept), trace.ask(held_reductions(self.layout, block))]
        if self._root(stage, index) and index:
            self.held += own  # they wait for those of the embedding
            return
        for each in range(len(self.layout.stage_blocks[stage])) if index == 0 else (index,):
            self._reshard(stage, each)
        stays = self.layout.framework.data.fsdp_reduce_input_stays
        if stays:
            self._let_go()
        copied = held * state.reduce * (not gradient_buffers(self.layout))
        self.reducing = trace.ask(copied, "compute" if stays else "reduce_scatter")
        for tensor in own:
            trace.free(tensor)
        while index == 0 and self.held:
            trace.free(self.held.pop())
        # What goes to the host leaves as it was reduced.
        wide = state.reduce if self.layout.gradients_away else state.gradient
        shard = trace.ask(held * wide / self.layout.shard_ranks, "reduce_scatter")
        if self.layout.gradients_away or (stage, index) in self.resting:
            trace.free(shard)
        else:
            apart = block.expert_parameters * (not self.layout.plan.shard_experts)
            self.resting[stage, index] = [shard, trace.ask(apart * state.gradient)]
        if not stays or (stage, index) == (0, 0):
            # With the backward over, torch FSDP2's root lets go of the last input (_root_post_backward_final_callback).
            self._let_go()

    def _let_go(self) -> None:
        """Give the input of the last reduction back."""
        self.trace.free(self.reducing)
        self.reducing = -1

    def zero_gradients(self) -> None:
        """The step is over: gradients are set to none."""
        for tensors in self.resting.values():
            for tensor in tensors:
                self.trace.free(tensor)
        self.resting.clear()


def rank_events(layout: Layout, stages: list[int], passes: list[Pass], *, thin: bool = False, most: float = inf) -> list[Event]:
    """Requests of a rank that holds these model stages and runs these passes, over two steps; past `most` of them not all."""
    trace = Trace(layout, frozenset(stage for phase, stage, _, _ in passes if phase == "W"), thin)
    sharded = Sharded(trace)
    shortened = until_steady(passes)
    moments = _states(trace, stages)
    run_passes(trace, sharded, shortened, most)
    trace.drain()
    for size in moments:
        trace.ask(size)
    _update(trace, moments)
    sharded.zero_gradients()
    run_passes(trace, sharded, shortened, most)
    return trace.events


def _update(trace: Trace, moments: list[float]) -> None:
    """What an update needs beside the states: of two moments, so many bytes a parameter; of a gather, its buffers."""
    state = trace.layout.state_bytes
    total = update_bytes(trace.layout, sum(moments) * state.optimizer / state.moments) if state.moments else 0.0
    shards = trace.layout.shard_ranks
    if gathers_in_buffers(trace.layout):
        tensors = [trace.ask(total / 2 / shards) for _ in range(shards)] + [trace.ask(total / 2)]
    elif trace.layout.optimizer.update_kernel(trace.layout.framework.optimizer)[0] == "foreach" and total:
        # A list of operations makes one tensor for each weight.
        tensors = [trace.ask(total * m / sum(moments)) for m in moments]
    else:
        tensors = [trace.ask(total / _UPDATE_TENSORS) for _ in range(_UPDATE_TENSORS)]
    for tensor in tensors:
        trace.free(tensor)


def _states(trace: Trace, stages: list[int]) -> list[float]:
    """Ask for what is there before the first step; returns the sizes of the optimizer's moments."""
    layout = trace.layout
    state, zero, plan = layout.state_bytes, layout.plan.zero_stage, layout.plan
    resting = gradient_buffers(layout) if zero == 3 else 0.0  # others are two where they overlap: no request depends on that
    for size in (*workspaces(layout.framework, layout.hardware.gpu.architecture), resting):
        trace.ask(size)
    weights = [w for stage in stages for i in range(len(layout.stage_blocks[stage])) for w in trace.lives(stage, i).weights]

    def shards(expert: bool) -> int:
        return layout.expert_shard_ranks if expert else layout.shard_ranks

    if layout.options.lora_rank:
        frozen = 0.0 if layout.plan.offload.parameters else frozen_parameters(layout, stages)
        for _ in weights or [(0, False)]:
            trace.ask(frozen / max(len(weights), 1))
        return []
    kept = 0.0 if layout.plan.offload.parameters else state.parameter
    trace.ask(0.0 if layout.plan.offload.parameters else frozen_parameters(layout, stages))
    own = [trace.ask(w * kept / (shards(e) if zero == 3 else 1)) for w, e in weights]
    total = sum(w for w, _ in weights)
    if layout.training.optimizer == "none":
        return []
    buffers = zero in (1, 2) and layout.framework.allocator.contiguous_buffers
    if buffers:
        # Each weight moves into the buffer, at the start and not at the peak of a step.
        trace.ask(total * state.parameter)
        for tensor in own:
            trace.free(tensor)
    if zero < 3 and not layout.gradients_away:
        trace.ask(total * (state.gradient + state.bucket) / (layout.shard_ranks if zero == 2 else 1))
    elif rests_unsharded(layout) or layout.defers_reduction:
        for w in (w for w, expert in weights if plan.shard_experts or not expert):
            trace.ask(0.0 if layout.defers_reduction else w * state.gather)
            trace.ask(w * state.reduce)
        trace.ask(whole_embedding_gradient(layout) if layout.embedding_stage in stages else 0.0)
    for size in placeholders(layout, stages).values():
        trace.ask(size)
    trace.ask(receive_buffers(layout, stages))
    moments = []
    if layout.states_away:
        if not plan.offload.optimizer:
            for w, expert in weights:
                trace.ask(w * state.master / (shards(expert) if zero >= 1 else 1))
        return []
    for w, expert in weights:
        split = shards(expert) if zero >= 1 else 1
        trace.ask(w * state.master / split)
        moments += [w * state.moments / 2 / split] * 2
    trace.ask(sharded_more_moments(layout, stages))
    return moments


def placeholders(layout: Layout, stages: list[int]) -> dict[tuple[int, int], float]:
    """(rows, columns) -> bytes of what stands for weight gradients that accumulate in place: one tensor of every shape."""
    shapes: dict[tuple[int, int], float] = {}
    for block in dict.fromkeys(b for stage in stages for b in layout.stage_blocks[stage]):
        shapes |= LocalLayer(block.layer, block.options).weight_shapes()
    return shapes


def run_passes(trace: Trace, sharded: Sharded, passes: list[Pass], most: float = inf) -> None:
    """Requests of these passes, one after the other, until there are more than `most`."""
    host = Host(trace.layout, trace.events)
    for phase, stage, first, last in passes:
        if len(trace.events) > most:
            break
        host.before(phase, stage, first, last)
        last = min(last, len(trace.layout.stage_blocks[stage]))
        if phase == "F":
            for index in range(first, last):
                sharded.before(stage, index, 1)
                trace.forward(stage, index)
                sharded.after_forward(stage, index)
        elif phase == "W":
            for index in range(last - 1, first - 1, -1):
                trace.weight(stage, index)
        else:
            for index in range(last - 1, first - 1, -1):
                sharded.before(stage, index, -1)
                trace.backward(stage, index, late=phase == "I")
                sharded.after_backward(stage, index)
