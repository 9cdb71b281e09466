"""What holds for every schedule of the registry, whatever its shape."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from simpar.errors import InputError
from simpar.schedules import NO_INDEX, SCHEDULES, Action, Phase, Schedule, overlapped, parse_action
from simpar.schedules.csv import read_csv, write_csv

# A tmp_path shared by the examples of one test is fine: each example overwrites the one file it uses.
PROPERTY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
MICROBATCHES = st.integers(1, 40)


def built(name: str, p: int, m: int, v: int) -> Schedule:
    """The schedule of the nearest shape that fits, for shapes drawn without regard to the family's demands."""
    family = SCHEDULES[name]
    if family.replicas == 2:
        p, m = 2 * p, 4 * p + 2 * m
    elif name == "dualpipe-v":
        m += 2 * p
    shape = (p, m, family.virtual_stages or v)
    assume(not family.requirements(*shape))
    return family.build(*shape)


shapes = given(p=st.integers(1, 6), m=MICROBATCHES, v=st.integers(1, 4))


@pytest.mark.parametrize("name", SCHEDULES)
@PROPERTY
@shapes
def test_each_action_runs_once_and_the_order_runs(name: str, p: int, m: int, v: int) -> None:
    schedule = built(name, p, m, v)
    schedule.check()
    leaves = [leaf for row in schedule.rows for action in row for leaf in action.leaves]
    assert len(leaves) == len(set(leaves))
    stages_per_microbatch = schedule.stages_per_model
    forwards = [leaf for leaf in leaves if leaf.phase is Phase.F]
    ends = [leaf for leaf in leaves if leaf.phase in (Phase.B, Phase.W)]
    assert len(forwards) == len(ends) == schedule.num_microbatches * stages_per_microbatch


@pytest.mark.parametrize("name", SCHEDULES)
@PROPERTY
@shapes
def test_replay_respects_prerequisites(name: str, p: int, m: int, v: int) -> None:
    schedule = built(name, p, m, v)
    played = schedule.replay(F=1.0, B=2.3, I=1.1, W=0.7)
    leaves = [leaf for row in schedule.rows for action in row for leaf in action.leaves]
    finish = dict(zip(leaves, played.finish, strict=True))
    for leaf, start in zip(leaves, played.start, strict=True):
        assert all(finish[needed] <= start for needed in schedule.prerequisites(leaf))
    work = []
    for begin, end in pairwise(schedule.as_arrays().rank_start):
        assert played.start[begin:end] == sorted(played.start[begin:end])
        work.append(sum(played.finish[begin:end]) - sum(played.start[begin:end]))
    # No rank can beat its own work, nor one microbatch its own way through all stages.
    longest = max(work)
    assert played.makespan >= longest - 1e-9
    assert played.makespan >= schedule.stages_per_model * (1.0 + 1.1) - 1e-9


@pytest.mark.parametrize("name", SCHEDULES)
@PROPERTY
@shapes
def test_peaks_stay_below_the_stated_ones(name: str, p: int, m: int, v: int) -> None:
    schedule = built(name, p, m, v)
    p, m = schedule.num_ranks, schedule.num_microbatches
    group = m // max(1, m // p)  # torch's round: p where p divides m
    stated = {
        "naive": lambda r: 1,
        "gpipe": lambda r: m,
        "1f1b": lambda r: p - r,
        "interleaved": lambda r: 2 * (p - r - 1) + (v - 1) * group + 1,
        "interleaved_1f1b": lambda r: 2 * (p - r - 1) + (v - 1) * group + 1,
        "interleaved_bfs": lambda r: m * v,
        "interleaved_zb": lambda r: p + (v - 1) * group,
        "zb-h1": lambda r: p,
        "zb-h2": lambda r: 2 * p - 1,
        "zb-1p": lambda r: p,
        "zb-2p": lambda r: 2 * p,
        "zb-v": lambda r: 2 * p,
        "v-half": lambda r: 2 * ((p + 2) // 2),
        "v-min": lambda r: 2 * ((p + 4) // 3),
        "dualpipe": lambda r: p + 1,
        "dualpipe-v": lambda r: 2 * p + 1,
    }[name]
    for rank, peak in enumerate(schedule.peak_in_flight()):
        assert 1 <= peak <= stated(rank)
        assert peak <= sum(leaf.phase is Phase.F for action in schedule.rows[rank] for leaf in action.leaves)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", [False, True])
@settings(PROPERTY, max_examples=10)
@given(p=st.integers(1, 4), m=st.integers(1, 12), v=st.integers(1, 3))
def test_csv_round_trip(name: str, communication: bool, p: int, m: int, v: int, tmp_path: Path) -> None:
    schedule = built(name, p, m, v)
    path = tmp_path / f"{schedule.name}.csv"
    write_csv(schedule, path, communication=communication)
    assert read_csv(path, replicas=schedule.replicas) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
@PROPERTY
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 8), v=st.integers(1, 3))
def test_check_refuses_an_order_with_a_missing_or_doubled_action(name: str, data: st.DataObject, p: int, m: int, v: int) -> None:
    schedule = built(name, p, m, v)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    step = data.draw(st.integers(0, len(schedule.rows[rank]) - 1))
    row = schedule.rows[rank]
    for changed in (row[:step] + row[step + 1 :], (*row[: step + 1], *row[step:])):
        rows = (*schedule.rows[:rank], changed, *schedule.rows[rank + 1 :])
        other = Schedule("changed", schedule.num_ranks, schedule.num_microbatches, schedule.stage_to_rank, rows,
                         schedule.chains)  # fmt: skip
        with pytest.raises(InputError):
            other.check()


def single(stage: int, phase: Phase, microbatch: int = NO_INDEX) -> Action:
    return Action(stage, phase, microbatch)


index = st.integers(0, 10**6)
compute = st.builds(single, index, st.sampled_from([Phase.F, Phase.B, Phase.I, Phase.W]), index)
transfers = st.builds(single, index, st.sampled_from([p for p in Phase if "SEND" in p or "RECV" in p]), index)
parameters = st.builds(single, index, st.sampled_from([Phase.UNSHARD, Phase.RESHARD, Phase.REDUCE_GRAD]))
pairs = st.builds(
    overlapped,
    st.builds(single, index, st.just(Phase.F), index),
    st.builds(single, index, st.sampled_from([Phase.B, Phase.I]), index),
)


@settings(deadline=None)
@given(st.one_of(compute, transfers, parameters, pairs))
def test_text_round_trip(action: Action) -> None:
    assert parse_action(str(action)) == action
    assert (action.microbatch == NO_INDEX) == (action.phase in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B"))


@settings(deadline=None)
@given(st.text(alphabet="0123FBIW();OVERLAP_SENDRCU", max_size=24))
def test_any_text_is_an_action_or_an_input_error(text: str) -> None:
    try:
        action = parse_action(text)
    except InputError:
        return
    assert parse_action(str(action)) == action
