"""One run, weeks long, on SimPy: failures, spares, slow nodes, maintenance, expansion; one event per incident.

The job is one process that trains, is interrupted, recovers, and trains on. Failures are a superposed Poisson process
with the nodes that train; failures during a recovery start it anew, failures while the job waits only take another
node. Assumed: spares and stopped nodes do not fail, repaired nodes come back as hot spares.
"""

from __future__ import annotations

import bisect
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import simpy

from simpar.planning.outcome import Mark, Outcome
from simpar.planning.progress import Progress
from simpar.planning.run_model import CAUSES, RunModel, SlowNodeModel, Source

Wait = Generator[Any, Any, None]

GIVE_UP_AT = 10.0  # times as long as without losses: a run that makes no progress worth the name


@dataclass(slots=True)
class _Stop:
    """Why training was interrupted."""

    kind: str  # failure | speed | planned | grow
    detection_s: float = 0.0
    duration_s: float = 0.0
    nodes: int = 0
    label: str = ""


@dataclass(slots=True)
class _Counters:
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    failures: dict[str, int] = field(default_factory=dict)
    busy: dict[tuple[int, int], float] = field(default_factory=dict)
    ideal_s: float = 0.0


class _Run:
    """The state of one repetition: SimPy processes are the methods that yield."""

    def __init__(self, model: RunModel, rng: np.random.Generator, record: bool) -> None:
        self.env = simpy.Environment()
        self.model, self.rng, self.record = model, rng, record
        self.stage, self.phase = 0, 0
        first = model.stages[0]
        self.progress = Progress(first.interval_s, first.stall_s, first.durable_s)
        self.hot, self.cold, self.missing = model.hot_spares, model.cold_spares, 0
        self.state = "recovering"
        self.slow = 0
        """Nodes that are slow now; one sets the pace as well as many."""
        self.pending: list[_Stop] = []
        self.counters = _Counters()
        self.marks: list[Mark] = []
        self.points: list[tuple[float, float]] = [(0.0, 0.0)] if record else []
        self.spans: list[tuple[float, float]] = []
        self.phase_ends: list[float] = []
        self.stage_ends: list[float] = []
        self.returned: simpy.Event | None = None
        self.growth_tokens = sorted((g.at_tokens, g.add_nodes) for g in model.growth if g.at_tokens is not None)
        self._load_stage(0, 0.0)

    # -- positions ---------------------------------------------------------------------------------------------------
    def _load_stage(self, stage: int, tokens: float) -> None:
        """Switch to the speeds of `stage`, standing at `tokens`."""
        pieces = self.model.stages[stage].pieces
        self.at_tokens = [0.0, *accumulate(p.tokens for p in pieces)]
        self.at_s = [0.0, *accumulate(p.ideal_s for p in pieces)]
        ends = {piece.phase: end for piece, end in zip(pieces, self.at_s[1:], strict=True)}
        self.phase_end_s = [ends[i] for i in sorted(ends)]
        self.stage = stage
        self.stage_start_s = self.progress.work_s = self._position_of(tokens)
        chosen = self.model.stages[stage]
        self.progress.configure(chosen.interval_s, chosen.stall_s, chosen.durable_s)

    def _position_of(self, tokens: float) -> float:
        return float(np.interp(tokens, self.at_tokens, self.at_s))

    def _tokens(self) -> float:
        return float(np.interp(self.progress.work_s, self.at_s, self.at_tokens))

    def _target(self) -> float:
        """The next position where something happens: the end of the phase, or a growth at a number of tokens."""
        target = self.phase_end_s[self.phase]
        if self.growth_tokens:
            target = min(target, self._position_of(self.growth_tokens[0][0]))
        return target

    # -- bookkeeping -------------------------------------------------------------------------------------------------
    def _mark(self, start: float, kind: str, label: str = "") -> None:
        if self.record and self.env.now > start:
            self.marks.append(Mark(start, self.env.now, kind, label))

    def _spend(self, cause: str, duration: float, label: str = "") -> Wait:
        """Lose `duration` to `cause`, or what passes of it until an interruption."""
        start = self.env.now
        try:
            if duration > 0:
                yield self.env.timeout(duration)
        finally:
            self.counters.lost[cause] += self.env.now - start
            self._mark(start, cause, label)

    def _trained(self, start: float, before: float) -> None:
        key = (self.phase, self.stage)
        self.counters.busy[key] = self.counters.busy.get(key, 0.0) + self.progress.training_s - before
        if self.record:
            self.points.append((self.env.now, self._tokens()))
            self.spans.append((start, self.env.now))

    # -- the job -----------------------------------------------------------------------------------------------------
    def job(self) -> Wait:
        """The training job, from its first start to its last token."""
        yield from self._recover(_Stop("planned"), first=True)
        while True:
            if self.pending:
                yield from self._handle(self.pending.pop(0))
                continue
            target, start, before = self._target(), self.env.now, self.progress.training_s
            if self.record:
                self.points.append((start, self._tokens()))
            self.state = "training"
            self.progress.slowdown = self.model.slow_nodes.slowdown if self.slow and self.model.slow_nodes else 1.0
            try:
                yield self.env.timeout(self.progress.time_to(target))
            except (simpy.Interrupt, GeneratorExit) as interrupt:
                self.state = "recovering"
                self.progress.interrupt(self.env.now - start, self.env.now)
                self._trained(start, before)
                if isinstance(interrupt, GeneratorExit):
                    raise  # the run was given up
                yield from self._handle(interrupt.cause)
                continue
            self.state = "recovering"
            self.progress.finish(target, self.env.now)
            self._trained(start, before)
            if self._reached(target):
                break
        self.stage_ends.append(self.env.now)

    def _reached(self, target: float) -> bool:
        """The job stands at `target` in full. True when the whole training is done."""
        if self.growth_tokens and target >= self._position_of(self.growth_tokens[0][0]) - 1e-6:
            self.pending.append(_Stop("grow", nodes=self.growth_tokens.pop(0)[1], label="expansion"))
        if target >= self.phase_end_s[self.phase] - 1e-6:
            self.phase_ends.append(self.env.now)
            if self.phase == len(self.phase_end_s) - 1:
                return True
            self.phase += 1
            if self.model.restart_between_phases and not self.pending:
                self.pending.append(_Stop("planned", label=f"phase {self.model.phases[self.phase]}"))
        return False

    def _handle(self, stop: _Stop) -> Wait:
        if stop.kind == "failure":
            self._fall_back()
            yield from self._recover(stop)
        elif stop.kind != "speed":
            yield from self._planned(stop)

    def _fall_back(self) -> None:
        """Lose what the last durable checkpoint does not hold."""
        self.progress.roll_back(self.env.now)
        if self.record:
            self.points.append((self.env.now, self._tokens()))

    def _planned(self, stop: _Stop) -> Wait:
        """A stop that is known in advance: save, do it, restart."""
        self.state = "saving"
        try:
            yield from self._spend("checkpoint_stall", self.model.stages[self.stage].durable_s, stop.label)
        except simpy.Interrupt as interrupt:
            self.state = "recovering"
            self.pending.insert(0, stop)
            yield from self._handle(interrupt.cause)
            return
        self.progress.restored()
        if stop.duration_s:
            self.state = "maintenance"
            yield from self._spend("maintenance", stop.duration_s, stop.label)
        if stop.kind == "grow":
            self._grow()
        elif stop.nodes:
            self._take_nodes(stop.nodes)
        self.state = "recovering"
        yield from self._recover(_Stop("planned", label=stop.label))

    def _recover(self, stop: _Stop, *, first: bool = False) -> Wait:
        """Detect, replace, restart, initialise, load; from the start again when another failure comes."""
        again: _Stop | None = stop
        while again is not None:
            try:
                yield from self._spend("detection", again.detection_s, again.label)
                yield from self._obtain_nodes()
                yield from self._spend("restart", self.model.recovery.restart_s)
                yield from self._spend("initialisation", self.model.recovery.initialisation_s)
                if not first:
                    yield from self._spend("checkpoint_load", self.model.recovery.load_s)
                again = None
            except simpy.Interrupt as interrupt:
                again = interrupt.cause

    def _obtain_nodes(self) -> Wait:
        """Put spares in the places of missing nodes; wait for repairs when there are none."""
        while self.missing:
            if self.hot or self.cold:
                cold = not self.hot
                taken = min(self.missing, self.cold if cold else self.hot)
                self.hot, self.cold = (self.hot, self.cold - taken) if cold else (self.hot - taken, self.cold)
                self.missing -= taken
                times = self.model.recovery
                yield from self._spend("replacement", times.cold_replacement_s if cold else times.replacement_s)
            else:
                self.state, start = "waiting", self.env.now
                self.returned = self.env.event()
                try:
                    yield self.returned
                finally:
                    self.counters.lost["waiting_for_spare"] += self.env.now - start
                    self._mark(start, "waiting_for_spare")
                    self.state, self.returned = "recovering", None

    def _grow(self) -> None:
        """The cluster enters its next stage."""
        self.stage_ends.append(self.env.now)
        self.counters.ideal_s += self.progress.work_s - self.stage_start_s
        self._load_stage(self.stage + 1, self._tokens())
        if self.failing.is_alive:
            self.failing.interrupt()

    def _take_nodes(self, nodes: int) -> None:
        """`nodes` leave the job, for repair."""
        nodes = min(nodes, self.model.stages[self.stage].nodes - self.missing)
        self.missing += nodes

    # -- what happens to the job -------------------------------------------------------------------------------------
    def failures(self) -> Wait:
        """The superposed Poisson process of all failures."""
        sources = self.model.sources
        shares = list(accumulate(source.rate_per_node_s for source in sources))
        while shares and shares[-1] > 0:
            rate = self.model.failure_rate_per_s(self.stage)
            try:
                yield self.env.timeout(self.rng.exponential(1.0 / rate))
            except simpy.Interrupt:
                continue  # more nodes: draw again at the new rate, which the missing memory of the process allows
            chosen = bisect.bisect_right(shares, self.rng.random() * shares[-1])
            self._fail(sources[min(chosen, len(sources) - 1)])

    def _fail(self, source: Source) -> None:
        stopped = self.state in ("waiting", "maintenance")
        if stopped and not source.nodes_hit:
            return  # nothing runs that could fail
        self.counters.failures[source.name] = self.counters.failures.get(source.name, 0) + 1
        if source.nodes_hit:
            before = self.missing
            self._take_nodes(source.nodes_hit)
            self.env.process(self._repair(self.missing - before, source.repair_s))
        if not stopped:
            times = self.model.recovery
            silent = times.silent_fraction > 0 and self.rng.random() < times.silent_fraction
            detection = times.silent_detection_s if silent else source.detection_s
            self.working.interrupt(_Stop("failure", detection_s=detection, label=source.name))

    def _repair(self, nodes: int, mean_s: float) -> Wait:
        yield self.env.timeout(mean_s if self.model.recovery.fixed_repair else self.rng.exponential(mean_s))
        self.hot += nodes
        if self.returned is not None and not self.returned.triggered:
            self.returned.succeed()

    def slow_nodes(self) -> Wait:
        """Nodes turn slow, one after another."""
        slow = self.model.slow_nodes
        if slow is None:
            return
        for _ in range(int(self.rng.binomial(self.model.stages[0].nodes, slow.initial_fraction))):
            self.env.process(self._one_slow(slow))
        while slow.rate_per_node_s > 0:
            rate = slow.rate_per_node_s * self.model.stages[self.stage].nodes
            yield self.env.timeout(self.rng.exponential(1.0 / rate))
            self.env.process(self._one_slow(slow))

    def _one_slow(self, slow: SlowNodeModel) -> Wait:
        self._slower(1)
        start = self.env.now
        yield self.env.timeout(slow.detection_s)
        self._mark(start, "slow_node")
        self._slower(-1)
        if slow.replace:
            self.env.process(self._repair(1, self.model.sources[0].repair_s if self.model.sources else 0.0))
            self._ask(_Stop("planned", nodes=1, label="slow node"))

    def _slower(self, nodes: int) -> None:
        """So many more (or fewer) slow nodes: the pace changes with the first and with the last."""
        was, self.slow = self.slow, self.slow + nodes
        if (was > 0) != (self.slow > 0):
            self._poke()

    def _poke(self) -> None:
        """Have the training job look around."""
        if self.state == "training":
            self.state = "stopping"  # one interrupt is enough for all that happens at this moment
            self.working.interrupt(_Stop("speed"))

    def _ask(self, stop: _Stop) -> None:
        """A planned stop: at once while the job trains, else after what keeps it busy."""
        self.pending.append(stop)
        self._poke()

    def windows(self) -> Wait:
        """Maintenance windows and growth by the calendar, in order."""
        calendar = [(w.start_s, i) for i, w in enumerate(self.model.windows)]
        while calendar:
            start, index = min(calendar)
            calendar.remove((start, index))
            yield self.env.timeout(start - self.env.now)
            window = self.model.windows[index]
            self._ask(_Stop("planned", duration_s=window.duration_s, label=window.name))
            if window.every_s:
                calendar.append((start + window.every_s, index))

    def growth(self) -> Wait:
        """Nodes that join at a day."""
        for item in sorted((g.at_s, g.add_nodes) for g in self.model.growth if g.at_s is not None):
            yield self.env.timeout(item[0] - self.env.now)
            self._ask(_Stop("grow", nodes=item[1], label="expansion"))

    def run(self) -> Outcome:
        """Simulate to the end."""
        self.failing = self.env.process(self.failures())
        self.env.process(self.slow_nodes())
        self.env.process(self.windows())
        self.env.process(self.growth())
        job = self.job()
        self.working = self.env.process(job)
        self.env.run(until=self.working | self.env.timeout(GIVE_UP_AT * self.model.ideal_s))
        finished = not self.working.is_alive
        if not finished:
            job.close()  # what it was doing is accounted on the way out
            self.stage_ends.append(self.env.now)
        return self._outcome(finished)

    def _outcome(self, finished: bool) -> Outcome:
        wall, lost = self.env.now, self.counters.lost
        productive = self._productive_s()
        lost["checkpoint_stall"] += self.progress.stall_s
        lost["lost_work"] += self.progress.lost_s
        slowed = self.progress.training_s - self.progress.lost_s - productive
        lost["slow_node"] += slowed if self.model.slow_nodes else 0.0  # without slow nodes only rounding is left
        starts, ends = [0.0, *self.stage_ends[:-1]], self.stage_ends
        stage_s = tuple(end - start for start, end in zip(starts, ends, strict=True))
        spares = self.model.hot_spares + self.model.cold_spares
        phase_ends = [*self.phase_ends, *([wall] if len(self.phase_ends) < len(self.phase_end_s) else [])]
        return Outcome(
            wall_s=wall,
            productive_s=productive,
            lost_s=lost,
            phase_s=tuple(b - a for a, b in zip([0.0, *phase_ends[:-1]], phase_ends, strict=True)),
            gpu_s=sum(s * self.model.stages[i].gpus for i, s in enumerate(stage_s)),
            node_s=sum(s * (self.model.stages[i].nodes + spares) for i, s in enumerate(stage_s)),
            busy=self.counters.busy,
            stage_s=stage_s,
            failures=self.counters.failures,
            checkpoints=self.progress.checkpoints,
            finished=finished,
            marks=tuple(self.marks),
            progress=tuple(self.points),
            spans=tuple(self.spans),
        )

    def _productive_s(self) -> float:
        """Work kept, in every stage at that stage's speed."""
        return self.counters.ideal_s + self.progress.work_s - self.stage_start_s


def simulate_run(model: RunModel, seed: int, repetition: int = 0, *, record: bool = False) -> Outcome:
    """One repetition of `model`; the same (seed, repetition) gives the same outcome, recorded or not."""
    rng = np.random.default_rng([seed, repetition])
    spread = _draw_uncertainty(model, rng)
    return _Run(model.scaled(*spread), rng, record).run()


def _draw_uncertainty(model: RunModel, rng: np.random.Generator) -> tuple[float, float]:
    """One draw of (step time factor, rate factor): lognormal with the given 80 % intervals (z = 1.2816)."""
    z_step, z_rate = rng.standard_normal(2) / 1.2815515655446004
    pieces = model.stages[0].pieces
    total = sum(piece.ideal_s for piece in pieces)
    side = "high" if z_step > 0 else "low"
    end = sum(piece.ideal_s * getattr(piece, side) for piece in pieces) / total
    return float(end ** abs(z_step)), float(model.rate_uncertainty**z_rate)
