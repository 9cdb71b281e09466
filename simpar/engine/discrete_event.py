"""The reference engine: a program replayed on SimPy.

An op starts when every op it depends on has finished and it is at the head of every stream it occupies; it holds those
streams while it runs. Streams are first-in first-out, so "head of the stream" means that the op before it on the stream
has finished: one counter of unfinished predecessors per op says both. One SimPy event per op, at its finish; more only
for ops whose speed changes while they run (elastic.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from simpy import Environment, Event

from simpar.engine.contention import Contention
from simpar.engine.durations import SlowFactors, op_seconds
from simpar.engine.elastic import ElasticReplay
from simpar.engine.imbalance import Imbalance
from simpar.engine.jitter import Noise
from simpar.engine.timeline import Timeline
from simpar.program.program import FloatArray, PriceTable, Program


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """What makes a run differ from its prices.

    Attributes:
        interference: compute ops slow down while communication of the same role runs (PriceTable.interference).
        contention: the network that transfers share; None: every transfer takes its price.
        slow_factors: role -> factor on the seconds of its compute ops.
        noise: random factors on the seconds of ops.
        imbalance: expert load drawn per layer and microbatch.
        seed: of all draws.
    """

    interference: bool = False
    contention: Contention | None = None
    slow_factors: SlowFactors | None = None
    noise: Noise | None = None
    imbalance: Imbalance | None = None
    seed: int = 0

    def seconds(self, program: Program, prices: PriceTable, repetition: int) -> FloatArray:
        """Seconds [ops] of one of the seed's independent runs."""
        return op_seconds(program, prices, self.slow_factors, self.noise, self.imbalance, self.seed, repetition)

    def elastic(self, prices: PriceTable) -> bool:
        """Whether ops may change their speed while they run."""
        return self.contention is not None or (self.interference and bool(np.any(prices.interference > 0.0)))


NO_EFFECTS: Final = Effects()


def run(program: Program, prices: PriceTable, effects: Effects = NO_EFFECTS, *, repetition: int = 0) -> Timeline:
    """Replay `program` and return when every op ran.

    Args:
        program: what waits for what.
        prices: seconds and interference per price.
        repetition: which of the seed's independent runs.

    Raises:
        DeadlockError: the program has a cycle; found before anything runs.
        InputError: a slow factor or the network is wrong, or a transfer waits for ever on a link that is down.
    """
    program.check()
    seconds = effects.seconds(program, prices, repetition)
    env = Environment()
    if not effects.elastic(prices):
        return _replay(env, program, seconds)
    return ElasticReplay(env, program, prices, seconds, effects.interference, effects.contention).run()


def _replay(env: Environment, program: Program, seconds: FloatArray) -> Timeline:
    """Every op takes its seconds. Plain lists and local names: this loop is simpar's speed."""
    waiting = np.diff(program.predecessors[0]).tolist()
    ptr, successors = program.successors[0].tolist(), program.successors[1].tolist()
    durations = seconds.tolist()
    start, finish = [0.0] * program.num_ops, [0.0] * program.num_ops
    timeout = env.timeout

    def begin(op: int, now: float) -> None:
        start[op] = now
        timeout(durations[op], op).callbacks.append(end)

    def end(event: Event) -> None:
        op, now = event.value, env.now
        finish[op] = now
        for successor in successors[ptr[op] : ptr[op + 1]]:
            waiting[successor] -= 1
            if not waiting[successor]:
                begin(successor, now)

    for op in [op for op, count in enumerate(waiting) if not count]:
        begin(op, 0.0)
    env.run()
    return Timeline(program, np.array(start), np.array(finish))
