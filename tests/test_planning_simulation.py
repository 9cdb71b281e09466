"""The failure simulation against closed forms, against a cycle-by-cycle walk, and against itself."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simpar.planning.closed_forms import exact_interval_s, goodput_exact, mtti_s, poisson_tail
from simpar.planning.outcome import Outcome
from simpar.planning.progress import Progress
from simpar.planning.run_model import (
    Growth,
    Piece,
    Recovery,
    RunModel,
    SlowNodeModel,
    Source,
    Stage,
    Window,
)
from simpar.planning.run_simulation import simulate_run

DAY = 86400.0
NO_TIME = Recovery(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)


def a_run(
    days: float = 40.0,
    nodes: int = 1024,
    rate_per_node_day: float = 5e-3,
    interval_s: float = 900.0,
    stall_s: float = 20.0,
    durable_s: float | None = None,
    detection_s: float = 300.0,
    spares: int = 10_000,
    **changes: object,
) -> RunModel:
    piece = Piece(0, days * DAY * 1e6, 1e6, 1.0)
    stage = Stage(nodes, nodes * 8, (piece,), interval_s, stall_s, stall_s if durable_s is None else durable_s)
    source = Source("node", rate_per_node_day / DAY, 1, detection_s, 6 * 3600.0)
    model = RunModel(("all",), (stage,), (), (source,), None, NO_TIME, (), spares, 0, True, 1.0)
    return replace(model, **changes)  # type: ignore[arg-type]


def goodput(outcome: Outcome) -> float:
    return outcome.productive_s / outcome.wall_s


def adds_up(outcome: Outcome) -> None:
    assert outcome.wall_s == pytest.approx(outcome.productive_s + sum(outcome.lost_s.values()), rel=1e-9, abs=1e-3)
    assert all(seconds >= -1e-3 for seconds in outcome.lost_s.values())


@pytest.mark.parametrize(
    ("nodes", "stall", "recovery"),
    [(256, 30.0, 600.0), (1024, 20.0, 300.0), (2048, 60.0, 1200.0), pytest.param(8192, 10.0, 120.0, marks=pytest.mark.slow)],
)
def test_goodput_meets_the_exact_exponential_form(nodes: int, stall: float, recovery: float) -> None:
    mtti = mtti_s(nodes, 5e-3)
    interval = exact_interval_s(stall, mtti)
    model = a_run(100, nodes, 5e-3, interval, stall, detection_s=recovery)
    found = [goodput(simulate_run(model, 1, i)) for i in range(30)]
    error = statistics.stdev(found) / len(found) ** 0.5
    assert statistics.mean(found) == pytest.approx(goodput_exact(interval, stall, recovery, mtti), abs=4 * error + 2e-4)


def test_failures_come_at_the_rate_of_the_nodes() -> None:
    model = a_run(54, 2048, 3.789e-3)
    outcomes = [simulate_run(model, 3, i) for i in range(20)]
    days = sum(outcome.wall_s for outcome in outcomes) / DAY
    count = sum(outcome.failures["node"] for outcome in outcomes)
    assert count / days == pytest.approx(419 / 54, rel=4 / count**0.5)


def test_the_exact_optimum_is_the_best_interval_in_simulation() -> None:
    mtti, stall = mtti_s(1024, 5e-3), 60.0
    best = exact_interval_s(stall, mtti)

    def mean_wall(interval: float) -> float:
        return statistics.mean(simulate_run(a_run(60, interval_s=interval, stall_s=stall), 5, i).wall_s for i in range(12))

    at_best = mean_wall(best)
    assert at_best < mean_wall(best / 4)
    assert at_best < mean_wall(best * 4)


def test_without_failures_only_stalls_are_lost() -> None:
    outcome = simulate_run(a_run(1.0, rate_per_node_day=0.0, interval_s=3600.0, stall_s=10.0), 0)
    assert outcome.checkpoints == 23  # none at the very end
    assert outcome.wall_s == pytest.approx(DAY + 230.0)
    assert outcome.lost_s["checkpoint_stall"] == pytest.approx(230.0)


def test_same_seed_same_outcome_other_seed_another() -> None:
    model = a_run()
    assert simulate_run(model, 7, 3) == simulate_run(model, 7, 3)
    assert simulate_run(model, 7, 3).wall_s != simulate_run(model, 8, 3).wall_s
    recorded = simulate_run(model, 7, 3, record=True)
    assert recorded.wall_s == simulate_run(model, 7, 3).wall_s
    assert recorded.marks
    assert recorded.progress[-1][1] == pytest.approx(model.tokens)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 4096), rate=st.floats(0.0, 0.02), interval=st.floats(60.0, 7200.0), stall=st.floats(0.0, 120.0),
    background=st.floats(0.0, 600.0), spares=st.integers(0, 40), windows=st.booleans(), slow=st.booleans(),
    software=st.booleans(), growth=st.sampled_from(["none", "day", "tokens"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_wall_clock_is_productive_time_plus_the_ledger(
    nodes: int, rate: float, interval: float, stall: float, background: float, spares: int, windows: bool, slow: bool,
    software: bool, growth: str, seed: int,
) -> None:  # fmt: skip
    durable = min(stall + background, interval + stall)
    model = a_run(2.0, nodes, rate, interval, stall, durable, spares=spares)
    stage = model.stages[0]
    halves = (Piece(0, 9e10, 1e6, 1.0), Piece(1, 8e10, 1.1e6, 1.0))
    stages = [replace(stage, pieces=halves)]
    growths: tuple[Growth, ...] = ()
    if growth != "none":
        faster = tuple(replace(p, tokens_per_s=1.5 * p.tokens_per_s) for p in halves)
        stages.append(replace(stage, nodes=nodes + 8, gpus=8 * (nodes + 8), pieces=faster))
        growths = (Growth(DAY if growth == "day" else None, 1e11 if growth == "tokens" else None, 8),)
    sources = model.sources + ((Source("software", 1e-8, 0, 60.0, 0.0),) if software else ())
    model = replace(
        model,
        phases=("first", "second"),
        stages=tuple(stages),
        growth=growths,
        sources=sources,
        recovery=Recovery(60.0, 600.0, 120.0, 30.0, 45.0, 0.1, 900.0, False),
        windows=(Window("upgrade", 0.3 * DAY, 1800.0, 0.7 * DAY),) if windows else (),
        slow_nodes=SlowNodeModel(1e-8, 0.01, 1.2, 7200.0, True) if slow else None,
    )
    outcome = simulate_run(model, seed)
    adds_up(outcome)
    assert sum(outcome.phase_s) == pytest.approx(outcome.wall_s)
    assert sum(outcome.stage_s) == pytest.approx(outcome.wall_s)
    trained = sum(outcome.busy.values())
    assert trained <= outcome.wall_s * (1 + 1e-9)


def test_more_failures_never_help() -> None:
    def wall(rate: float) -> float:
        return statistics.mean(simulate_run(a_run(rate_per_node_day=rate), 2, i).wall_s for i in range(8))

    assert wall(1e-3) < wall(4e-3) < wall(1.6e-2)


def test_waiting_for_spares_follows_the_poisson_tail() -> None:
    """Software-free, instant recovery: the share of time with too few nodes is close to the M/G/inf tail.

    The job takes no failures to its own nodes while it waits in this regime (short waits), so the tail is approached.
    """
    nodes, rate, repair = 1000, 2e-3, 6 * 3600.0
    mean = nodes * rate * repair / DAY
    for spares in (0, 1):
        model = a_run(400, nodes, rate, 600.0, 0.0, detection_s=0.0, spares=spares)
        outcome = simulate_run(model, 4)
        share = outcome.lost_s["waiting_for_spare"] / outcome.wall_s
        assert share == pytest.approx(poisson_tail(spares, mean), rel=0.25)


def test_spares_only_help() -> None:
    def wall(spares: int) -> float:
        return simulate_run(a_run(spares=spares), 1).wall_s

    assert wall(0) > wall(1) > wall(3) >= wall(8)


def test_cold_spares_take_longer_than_hot_ones() -> None:
    slow = replace(NO_TIME, replacement_s=60.0, cold_replacement_s=1800.0)
    hot = simulate_run(a_run(spares=100, recovery=slow), 1)
    cold = simulate_run(a_run(spares=0, cold_spares=100, recovery=slow), 1)
    assert cold.lost_s["replacement"] > hot.lost_s["replacement"]


def test_a_switch_takes_its_nodes_at_once() -> None:
    switch = Source("leaf switch", 0.05 / 32 / DAY, 32, 300.0, 7200.0)
    few = simulate_run(a_run(spares=16, sources=(switch,)), 1)
    enough = simulate_run(a_run(spares=96, sources=(switch,)), 1)
    assert few.failures["leaf switch"] > 10
    assert few.lost_s["waiting_for_spare"] > 0
    assert few.lost_s["waiting_for_spare"] > enough.lost_s["waiting_for_spare"]


def test_one_slow_node_slows_all_until_it_is_replaced() -> None:
    slow = SlowNodeModel(0.0, 1.0, 1.25, DAY, True)
    quiet = a_run(10.0, nodes=1, rate_per_node_day=0.0, stall_s=0.0, durable_s=0.0, slow_nodes=slow)
    outcome = simulate_run(quiet, 0)
    assert outcome.lost_s["slow_node"] == pytest.approx(DAY - DAY / 1.25)
    adds_up(outcome)


def test_maintenance_costs_its_windows_and_a_restart() -> None:
    window = Window("upgrade", DAY, 3600.0, None)
    restart = replace(NO_TIME, restart_s=100.0, initialisation_s=50.0, load_s=30.0)
    quiet = a_run(3.0, rate_per_node_day=0.0, interval_s=1e9, stall_s=5.0, windows=(window,), recovery=restart)
    outcome = simulate_run(quiet, 0)
    assert outcome.lost_s["maintenance"] == 3600.0
    assert outcome.wall_s == pytest.approx(3 * DAY + 3600.0 + 2 * 150.0 + 30.0 + 5.0)
    assert outcome.lost_s["lost_work"] == 0.0


def test_expansion_finishes_sooner() -> None:
    base = a_run(20.0, rate_per_node_day=0.0, stall_s=0.0, durable_s=0.0)
    stage = base.stages[0]
    doubled = replace(stage, nodes=2048, gpus=2 * stage.gpus, pieces=(replace(stage.pieces[0], tokens_per_s=2e6),))
    grown = replace(base, stages=(stage, doubled), growth=(Growth(10 * DAY, None, 1024),))
    outcome = simulate_run(grown, 0)
    assert outcome.wall_s == pytest.approx(15 * DAY)
    assert outcome.gpu_s == pytest.approx(10 * DAY * 8192 + 5 * DAY * 16384)
    by_tokens = replace(grown, growth=(Growth(None, 10 * DAY * 1e6, 1024),))
    assert simulate_run(by_tokens, 0).wall_s == pytest.approx(15 * DAY)


def test_silent_failures_take_longer_to_find() -> None:
    loud = simulate_run(a_run(), 1)
    silent = simulate_run(a_run(recovery=replace(NO_TIME, silent_fraction=0.5, silent_detection_s=3600.0)), 1)
    assert silent.lost_s["detection"] > loud.lost_s["detection"]


def test_a_run_without_progress_is_given_up_and_accounted_for() -> None:
    outcome = simulate_run(a_run(1.0, 4096, 1.0, interval_s=3600.0), 0)
    assert not outcome.finished
    adds_up(outcome)


class _Walk:
    """What `Progress` computes in closed form, walked cycle by cycle with every checkpoint remembered."""

    def __init__(self, interval: float, stall: float, durable: float) -> None:
        self.interval, self.stall, self.durable = interval, stall, durable
        self.work = self.cycle = self.stalled = self.left = 0.0
        self.saves: list[tuple[float, float]] = [(-1e18, 0.0)]  # (begun at, work it holds)

    def go(self, start: float, elapsed: float, slowdown: float) -> None:
        now, end = start, start + elapsed
        while end - now > 1e-9:
            if self.left > 0:
                step = min(self.left, end - now)
                self.left -= step
                self.stalled += step
                now += step
                continue
            step = min((self.interval - self.cycle) * slowdown, end - now)
            self.cycle += step / slowdown
            self.work += step / slowdown
            now += step
            if self.cycle >= self.interval - 1e-9:
                self.cycle, self.left = 0.0, self.stall
                self.saves.append((now, self.work))

    def fail(self, now: float) -> None:
        durable = [work for begun, work in self.saves if now - begun >= self.durable]
        self.work, self.cycle, self.left = durable[-1], 0.0, 0.0
        self.saves = [(-1e18, self.work)]


@settings(max_examples=200, deadline=None)
@given(
    interval=st.floats(5.0, 50.0),
    stall=st.floats(0.0, 4.0),
    background=st.floats(0.0, 5.0),
    stretches=st.lists(st.tuples(st.floats(0.01, 300.0), st.sampled_from([1.0, 1.5, 2.0]), st.booleans()), min_size=1, max_size=8),
)
def test_progress_in_closed_form_equals_the_walk(
    interval: float, stall: float, background: float, stretches: list[tuple[float, float, bool]]
) -> None:
    durable = stall + background
    progress, walk, now = Progress(interval, stall, durable), _Walk(interval, stall, durable), 0.0
    for elapsed, slowdown, fails in stretches:
        progress.slowdown = slowdown
        walk.go(now, elapsed, slowdown)
        now += elapsed
        progress.interrupt(elapsed, now)
        if fails:
            # A fault at the very instant a checkpoint becomes durable: rounding decides, either answer is right.
            assume(all(abs(now - begun - durable) > 1e-6 for begun, _ in walk.saves))
            walk.fail(now)
            progress.roll_back(now)
        assert progress.work_s == pytest.approx(walk.work, abs=1e-6)
        assert progress.stall_s == pytest.approx(walk.stalled, abs=1e-6)


def test_time_to_a_target_is_what_getting_there_takes() -> None:
    progress = Progress(100.0, 7.0, 7.0)
    needed = progress.time_to(350.0)
    assert needed == pytest.approx(350.0 + 3 * 7.0)
    progress.finish(350.0, needed)
    walked = Progress(100.0, 7.0, 7.0)
    walked.interrupt(needed, needed)
    assert (walked.work_s, walked.stall_s) == pytest.approx((progress.work_s, progress.stall_s))


@pytest.mark.slow
def test_two_hundred_repetitions_of_eighty_days_on_16384_gpus_within_30_seconds() -> None:
    import time

    model = a_run(80.0, 2048, 3.789e-3, 472.0, 10.0, detection_s=600.0, spares=64)
    start = time.perf_counter()
    outcomes = [simulate_run(model, 0, i) for i in range(200)]
    assert time.perf_counter() - start < 30.0
    assert all(outcome.finished for outcome in outcomes)
