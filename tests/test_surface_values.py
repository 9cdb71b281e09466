"""Numbers and texts of the outer parts, computed by hand: statistics, fits, explanations, prices, ties, tables, flags."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from interop_plans import megatron_scenarios

from simpar.boundary import parse_yaml
from simpar.errors import InputError
from simpar.interop.argv import options
from simpar.interop.megatron import flags, launch_script
from simpar.interop.megatron_import import read_options
from simpar.live.trace_align import late_collectives
from simpar.live.trace_slices import Slice
from simpar.planning.economics import Economics
from simpar.planning.outcome import Outcome
from simpar.planning.run_model import Piece, Recovery, RunModel, SlowNodeModel, Stage
from simpar.planning.run_simulation import simulate_run
from simpar.report.explain import blame, blame_memory
from simpar.report.tables import Table
from simpar.searching.answer import TIE, is_tied
from simpar.searching.swept import Swept
from simpar.specs.base import data_dir
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.statistics import Comparison, summarize

SCENARIOS: Final = sorted(Path(str(data_dir("scenarios"))).glob("*.toml"))

# -- statistics and fits -----------------------------------------------------------------------------------------------


def test_quantiles_of_errors() -> None:
    """Errors of 0, 10, ..., 100 %, every other one below: the tenth of eleven is the 90th percentile."""
    signs = [1 if i % 2 else -1 for i in range(11)]
    rows = [Comparison(str(i), "step_time_s", 1.0, 1.0 + sign * i / 10) for i, sign in enumerate(signs)]
    found = summarize(rows)
    assert (found.p90, found.median, found.max, found.mape) == pytest.approx((0.9, 0.5, 1.0, 0.5))
    assert found.bias == pytest.approx(-0.5 / 11)


# -- explanations ------------------------------------------------------------------------------------------------------


def test_a_gap_is_shared_by_variance() -> None:
    """Half-widths of 3 s and 1 s hold 9 and 1 tenth of a gap, not 3 and 1 quarter."""
    result: Any = SimpleNamespace(
        step_time_s=10.0, breakdown={"matmul": 6.0, "dp": 4.0, "bubble": 1.0},
        step_interval=SimpleNamespace(dominated_by=(("matmul", 3.0), ("dp", 1.0))),
    )  # fmt: skip
    assert blame(result, 12.0) == [
        ("matmul", pytest.approx(1.8), pytest.approx(0.9)),
        ("dp", pytest.approx(0.2), pytest.approx(0.1)),
    ]
    # What the calibration leaves open belongs to the parts by the square of their size: 36 and 16 of 52.
    calibrated: Any = SimpleNamespace(**{**vars(result), "step_interval": SimpleNamespace(dominated_by=(("calibration", 2.0),))})
    assert blame(calibrated, 12.0)[0] == ("matmul", pytest.approx(2 * 36 / 52), pytest.approx(36 / 52))


def test_a_gap_of_memory_is_shared_by_variance() -> None:
    """Activations of 100 GB may be off by 5, parameters of 200 by 2: 25 and 4 parts of 29."""
    parts = {"activations": 100.0, "parameters": 200.0}
    worst = SimpleNamespace(at_peak=parts, reserved_bytes=300.0, allocated_bytes=300.0, outside=())
    result: Any = SimpleNamespace(worst_rank=worst)
    assert blame_memory(result, "allocated", 329.0) == [
        ("activations", pytest.approx(25.0), pytest.approx(25 / 29)),
        ("parameters", pytest.approx(4.0), pytest.approx(4 / 29)),
    ]


# -- planning ----------------------------------------------------------------------------------------------------------


def outcome(gpu_hours: float, node_hours: float) -> Outcome:
    return Outcome(0.0, 0.0, {}, (), gpu_hours * 3600.0, node_hours * 3600.0, {}, (), {}, 0, True)


def test_rent_with_and_without_spares() -> None:
    """80 GPU-hours in the job and 11 node-hours of 8 GPUs held: 88 GPU-hours with the spares."""
    prices = Economics(8, 700.0, 100.0, 0.0, 1.2, 0.4, rent_usd_per_gpu_hour=2.0)
    model: Any = None
    assert prices.cost_usd(model, outcome(80.0, 11.0)) == pytest.approx(176.0)
    assert replace(prices, rent_includes_spares=False).cost_usd(model, outcome(80.0, 11.0)) == pytest.approx(160.0)


def test_many_slow_nodes_are_as_slow_as_one() -> None:
    """All four nodes are slow for the first hour: 3600 / 1.5 s of work in it, then the rest at full speed."""
    stage = Stage(4, 32, (Piece(0, 7200.0, 1.0, 1.0),), 1e9, 0.0, 0.0)
    slow = SlowNodeModel(0.0, 1.0, 1.5, 3600.0, False)
    model = RunModel(("all",), (stage,), (), (), slow, Recovery(*(0.0,) * 7, True), (), 0, 0, True, 1.0)
    found = simulate_run(model, 0)
    assert found.wall_s == pytest.approx(3600.0 + 7200.0 - 3600.0 / 1.5)
    assert found.lost_s["slow_node"] == pytest.approx(3600.0 - 3600.0 / 1.5)


# -- search ------------------------------------------------------------------------------------------------------------


def test_what_is_dearer_in_every_price_is_not_swept() -> None:
    swept = Swept(2)
    chosen, below = swept.sort_out(np.array([[3.0, 3.0], [1.0, 2.0], [2.0, 1.0]]))
    # The first is dearer than both others, which do not compare: they are swept and it stands behind the first of them.
    assert sorted(chosen.tolist()) == [1, 2]
    assert below == {0: 0}
    swept.add(np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([10.0, 20.0]))
    chosen, below = swept.sort_out(np.array([[2.5, 2.5], [0.5, 0.5], [1.0, 2.0]]))
    # Of two cheaper ones the slower is the better bound; a cheaper one is new, an equal one known.
    assert chosen.tolist() == [1]
    assert below == {0: 1, 2: 0}


@pytest.mark.parametrize(("other", "tied"), [(100.9, True), (101.1, False), (99.1, True), (98.9, False)])
def test_layouts_within_a_hundredth_are_tied(other: float, tied: bool) -> None:
    wide = SimpleNamespace(low=50.0, high=150.0)
    best: Any = SimpleNamespace(value=100.0, metrics={}, result=SimpleNamespace(step_interval=wide, step_time_s=100.0))
    wish: Any = SimpleNamespace(by_memory=False, objective="step_time")
    assert TIE == 0.01
    assert is_tied(best, SimpleNamespace(value=other, metrics={}), wish) is tied  # type: ignore[arg-type]


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_collective_stands_out_by_six_deviations() -> None:
    """Excesses of 100 us, give or take 10: 70 us more than the median is late, 50 us more is not."""

    def line(excesses: list[float]) -> tuple[list[Slice], list[Slice]]:
        starts = [i * 1e-3 for i in range(len(excesses))]
        predicted = [Slice(t, t + 50e-6, "dp", "reduce", "dp", collective="all_reduce") for t in starts]
        measured = [replace(s, end_s=s.end_s + excess) for s, excess in zip(predicted, excesses, strict=True)]
        return predicted, measured

    usual = [*[90e-6] * 10, 100e-6, *[110e-6] * 9]
    assert late_collectives(*line([*usual, 150e-6])) == []
    late = late_collectives(*line([*usual, 170e-6]))
    assert [found.index for found in late] == [20]


# -- texts -------------------------------------------------------------------------------------------------------------


def test_cells_and_heads_are_escaped() -> None:
    page = Table(("<b>", "n"), [("<script>alert(1)</script>", "1"), ('a & "b"', "2")], (1,)).html()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;" in page
    assert "a &amp; &quot;b&quot;" in page
    assert "<td class=n>1</td>" in page


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", False), ("No", False), ("yes", True), ("true", True), ("FALSE", False), ("null", None), ("~", None), ("12", 12),
     ("-3", -3), ("1.0e+3", 1000.0), (".5", 0.5), ("'no'", "no"), ('"12"', "12"), ("norway", "norway"), ("1.2.3", "1.2.3"),
     ("[a, no, 3]", ["a", False, 3])],
)  # fmt: skip
def test_scalars_of_yaml(text: str, value: object) -> None:
    """YAML 1.1's words."""
    found = parse_yaml(f"key: {text}\n", "f.yaml")["key"]
    assert found == value
    assert type(found) is type(value)


# -- flags of Megatron-LM ----------------------------------------------------------------------------------------------

LIST: Final = Path(__file__).parent / "data" / "frameworks" / "megatron_flags.txt"
KNOWN: Final = frozenset(line for line in LIST.read_text(encoding="utf-8").splitlines() if line.startswith("--"))


def names_of(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_flags_of_shipped_scenarios_are_the_frameworks(path: Path) -> None:
    try:
        lines = flags(read_scenario(path))
    except InputError:
        return  # Megatron-LM cannot run it
    assert names_of(lines) <= KNOWN


@given(scenario=megatron_scenarios())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_flags_of_random_plans_are_the_frameworks(scenario: Scenario) -> None:
    try:
        lines = flags(scenario)
    except InputError:
        return
    assert names_of(lines) <= KNOWN


def test_every_flag_in_the_exporter_is_the_frameworks() -> None:
    import simpar.interop.megatron as parallel
    import simpar.interop.megatron_model as model

    for module in (parallel, model):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        written = set(re.findall(r'["\' ](--[a-z][a-z0-9-]+)', text))
        assert written - {"--name", "--accept"} <= KNOWN


def small(**plan: Any) -> Scenario:
    return make_scenario(
        {"model": "llama3.1-8b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 2}, "plan": plan,
         "training": {"sequence_length": 4096, "global_batch_size": 64}}
    )  # fmt: skip


def test_ranks_of_the_pipeline_before_those_of_data() -> None:
    lines = flags(small(tp=2, pp=2, placement="tp-cp-ep-pp-dp"))
    assert "--use-tp-pp-dp-mapping" in lines
    assert "--use-tp-pp-dp-mapping" not in flags(small(tp=2, pp=2))
    read = read_options(options([word for line in lines for word in line.split()]))
    assert "tp-cp-ep-pp-dp" in str(read)


@pytest.mark.parametrize(
    ("plan", "one"), [({"tp": 2}, True), ({"cp": 2}, True), ({"pp": 2}, False), ({"tp": 2, "zero_stage": 3}, False)]
)
def test_one_hardware_queue_where_the_framework_asks_for_it(plan: dict[str, Any], one: bool) -> None:
    """arguments.py wants it for tensor and context parallelism, and refuses it with fully sharded parameters."""
    script = launch_script(small(**plan))
    assert ("\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script) is one
