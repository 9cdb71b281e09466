"""What a rank of a real run holds beside what `simpar simulate` counts: batches on the device and the tensors of torch's pipelines.

torch.distributed.pipelining (stage.py, schedules.py) makes a receive buffer for every micro-batch and stage. What arrives from a
stage of the same rank takes the buffer's place and is the sender's own output. The runtime of several stages waits for its sends
when the step is over: gloo's work keeps what it sends until then, NCCL's does not. The last stage's logits live on in its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from simpar.graph.kernels import product_of
from simpar.graph.types import Norm
from simpar.live.cluster_layouts import SPLIT_BACKWARD, RunLayout
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp, LaunchGap
from simpar.parallel.local_layer import LocalLayer
from simpar.parallel.pipeline import boundary_bytes
from simpar.program.program import FloatArray
from simpar.result.interpret import Priced
from simpar.result.memory import RankMemory
from simpar.result.result import Result
from simpar.result.stage_ends import receive_buffers

TOKEN_BYTES = 8.0
"""torch's integers."""
Change = tuple[float, float]
"""(seconds, bytes)."""


def peaks(priced: Priced, result: Result, run: RunLayout) -> tuple[float, ...]:
    """Peak bytes of each pipeline rank."""
    found = []
    for memory in result.memory:
        extra = Beside(priced, result, run, memory.rank)
        found.append(_peak(memory, extra.resting(), list(extra.changes())))
    return tuple(found)


def _peak(memory: RankMemory, resting: float, changes: list[Change]) -> float:
    """The highest sum of two step functions of time; of changes at one moment their sum counts."""
    moments = np.unique(np.concatenate([memory.times, [time for time, _ in changes]]))
    whole = memory.total[np.searchsorted(memory.times, moments, side="right") - 1]
    ordered = sorted(changes)
    sums = np.concatenate([[0.0], np.cumsum([amount for _, amount in ordered])])
    more: FloatArray = sums[np.searchsorted([time for time, _ in ordered], moments, side="right")]
    return float((whole + more).max()) + resting


def captured(local: LocalLayer) -> dict[str, float]:
    """Bytes of the gradients that torch's split backward keeps from the input gradient on, by node: of the outputs of all that have
    weights; norms first, as a layer's modules have them."""
    nodes = [kernel.node for kernel in local.kernels if product_of(kernel) or isinstance(kernel.node, Norm)]
    nodes.sort(key=lambda node: not isinstance(node, Norm))
    return {n.name: local.element * local.shards.local(local.axes(n.outputs[0]), local.layout(n)) for n in nodes}


def weights_peak(local: LocalLayer) -> float:
    """What torch's weight gradients (stage_backward_weight) add at their worst to saved tensors and `captured` gradients.

    One node after the other, each makes a new gradient, which lives on until the next one's has been added, and then frees the
    gradient of its output and what it alone saved.
    """
    tensors, gradients = local.tensors(), captured(local)
    readers = Counter(t.name for kernel in local.kernels for t in kernel.keeps)
    kernels = {kernel.node.name: kernel for kernel in local.kernels}
    worst = level = previous = 0.0
    for name, gradient in gradients.items():
        kernel = kernels[name]
        made = local.element * local.shards.weights(kernel.node)
        worst = max(worst, level + previous + made)
        own = {t.name for t in kernel.keeps if readers[t.name] == 1} - set(local.layer.inputs)
        level -= gradient + sum(tensors.get(tensor, 0.0) for tensor in own)
        previous = made
    return worst


class Beside:
    """What one pipeline rank holds more, or less."""

    def __init__(self, priced: Priced, result: Result, run: RunLayout, rank: int) -> None:
        self.layout, self.run, self.rank = priced.layout, run, rank
        self.held, self.priced, self.timeline = priced.held[rank], priced, result.timeline
        several = run.virtual_stages > 1 or run.schedule in SPLIT_BACKWARD
        self.late_sends = several and priced.layout.hardware.gpu.vendor == "cpu"

    # -- batches -------------------------------------------------------------------------------------------------------

    def resting(self) -> float:
        """Bytes through the whole step: inputs of a first stage, targets of a last one, and every receive buffer."""
        layout, last = self.layout, len(self.layout.stages) - 1
        count, first = layout.num_microbatches, layout.stage_blocks[0][0]
        tokens = layout.training.micro_batch_size * layout.training.sequence_length / layout.plan.cp
        inputs = self._batch(first) or TOKEN_BYTES * tokens
        found = count * (inputs * (0 in self.held) + TOKEN_BYTES * tokens * (last in self.held))
        if layout.plan.pp > 1:
            every = sum(count * self._between(s + end) for s in self.held for end in (0, 1) if 0 < s + end <= last)
            found += every - receive_buffers(layout, self.held)
        return found

    def _batch(self, first: LocalBlock) -> float:
        """Bytes of a micro-batch's inputs that the first block keeps: a part of the batch."""
        own = first.layer.inputs
        return sum(amount for name, amount in first.saved if name in own)

    def _between(self, stage: int) -> float:
        """Bytes of what enters a stage."""
        layout = self.layout
        return boundary_bytes(layout.boundary_bytes[layout.stages[stage].first], layout.plan)

    # -- over time -----------------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[Change]:
        """Bytes that come and go."""
        for stage in self.held:
            blocks, last = self.layout.stage_blocks[stage], len(self.layout.stages) - 1
            begins, ends = self._passes(stage, 0)
            _, freed = self._spans(stage, 0, ("B", "W"))
            kept = self._batch(blocks[0])
            # What a block keeps of its input is a part of the batch, or the receive buffer.
            yield from ((t, -kept) for t in begins)
            yield from ((t, kept) for t in freed)
            if stage > 0:
                yield from self._sent_gradients(stage, ends)
                for index, block in enumerate(blocks):
                    yield from self._captured(stage, index, block)
            if stage < last:
                yield from self._outputs(stage, *self._passes(stage, len(blocks) - 1))
            elif self.layout.plan.pp > 1:
                yield from self._logits(stage, blocks[-1])

    def _sent_gradients(self, stage: int, ends: list[float]) -> Iterator[Change]:
        """The gradient of a stage's input, until its send is waited for."""
        if stage - 1 in self.held:
            return
        sent = self._between(stage)
        waits = self.late_sends or (self.run.schedule == "gpipe" and self.layout.hardware.gpu.vendor == "cpu")
        yield from ((t, sent) for t in (ends if waits else ends[:1]))

    def _outputs(self, stage: int, begins: list[float], ends: list[float]) -> Iterator[Change]:
        """A stage's output, counted from its forward to its backward, is the next stage's buffer on this rank, or stays sent."""
        made = self._between(stage + 1)
        if stage + 1 in self.held:
            yield from ((t, -made) for t in begins)
            yield from ((t, made) for t in ends)
        elif self.late_sends:
            yield from ((t, made) for t in ends)

    def _captured(self, stage: int, index: int, block: LocalBlock) -> Iterator[Change]:
        """Gradients of outputs that an input gradient leaves to the weight gradient (_backward.py: a group's grads), and what that
        adds to them."""
        local, last = LocalLayer(block.layer, block.options), len(self.layout.stages) - 1
        grads = sum(captured(local).values())
        if index == len(self.layout.stage_blocks[stage]) - 1 and stage < last:
            grads -= self._between(stage + 1)  # the receive buffer, or what takes its place
        _, begins = self._spans(stage, index, ("I",))
        start, ends = self._spans(stage, index, ("W",))
        yield from ((t, grads) for t in begins if ends)
        yield from ((t, -grads) for t in ends)
        more = weights_peak(local)
        yield from ((t, more) for t in start)
        yield from ((t, -more) for t in ends)

    def _logits(self, stage: int, head: LocalBlock) -> Iterator[Change]:
        """The pipeline's reference to the logits outlives the loss by their own backward; what the loss saved goes when an input
        gradient is through its stage (stage_backward_input detaches the loss), not with the weight gradient."""
        plan, at = head.options.kernels, len(self.layout.stage_blocks[stage]) - 1
        saved = sum(amount for name, amount in head.saved if name == "head/logits")
        logits = plan.element * saved / plan.loss.logit_bytes(plan.element)
        _, through = self._spans(stage, 0, ("I",))
        _, weighed = self._spans(stage, at, ("W",))
        yield from ((t, -saved) for t in through if weighed)
        yield from ((t, saved) for t in weighed)
        begins, ends = self._spans(stage, at, ("B", "I"))
        yield from ((t, logits) for t in begins)
        yield from ((t, -logits) for t in ends)

    def _passes(self, stage: int, block: int) -> tuple[list[float], list[float]]:
        """When forwards of a block begin, and when their (input gradients') backwards end."""
        return self._spans(stage, block, ("F",))[0], self._spans(stage, block, ("B", "I"))[1]

    def _spans(self, stage: int, block: int, phases: tuple[str, ...]) -> tuple[list[float], list[float]]:
        program, keys = self.priced.program, self.priced.program.price_keys
        begins, ends = [], []
        for op in np.flatnonzero(program.role == self.rank):
            key = keys[program.price[op]]
            if isinstance(key, BlockOp | LaunchGap) and (key.stage, key.block) == (stage, block) and key.phase in phases:
                if isinstance(key, LaunchGap):
                    ends.append(float(self.timeline.finish[op]))
                elif key.index == 0:
                    begins.append(float(self.timeline.start[op]))
        return sorted(begins), sorted(ends)
