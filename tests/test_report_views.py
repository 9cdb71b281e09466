"""What stands on a terminal: widths, colours, what was written, what differs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from search_layouts import SMALL

from simpar.cli.app import main
from simpar.report.fleet_plot import fleet_figure
from simpar.report.search_view import improve_report, search_report
from simpar.report.step_html import step_page
from simpar.report.step_table import comparison, differences, format_metric, step_report
from simpar.report.topology_view import topology_report
from simpar.searching.answer import answer
from simpar.searching.find import find
from simpar.searching.improve import improve
from simpar.searching.parts import Wish
from simpar.searching.request import make_space
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.step import simulate
from simpar.topology.cluster import Cluster

ROOT = Path(__file__).parents[1] / "scenarios"


def printed(view: RenderableType, width: int = 80, *, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="standard" if color else None)
    console.print(view)
    return out.getvalue()


def scenario(**plan: object) -> Scenario:
    return make_scenario({
        "name": "run", "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"tp": 2, **plan},
        "training": {"sequence_length": 8192, "global_batch_size": 8},
    })  # fmt: skip


def test_topology_prints_no_python_and_no_bare_numbers() -> None:
    text = printed(topology_report(load_hardware("grand-teton-h100-roce"), 2048))
    assert "58.5 TB/s" in text
    assert "{" not in text
    assert "0000000" not in text


def test_compare_tells_two_scenarios_of_one_name_apart() -> None:
    first, second = scenario(), scenario(pp=2, recompute="full")
    assert differences(first, second) == [
        ("plan.pp", "1", "2"), ("plan.recompute", "none", "full"),
    ]  # fmt: skip
    text = printed(comparison(simulate(first, detail="stage"), simulate(second, detail="stage")), 120)
    assert "run (first)" in text
    assert "run (second)" in text
    assert "plan.pp" in text
    assert "points" in next(line for line in text.splitlines() if line.startswith("MFU"))
    assert "Nothing differs" in printed(comparison(*[simulate(first, detail="stage")] * 2))
    other = read_scenario(ROOT / "mlp-4096x24_a100x8_dp8.toml")
    assert [f for f, _, _ in differences(first, other) if f.startswith("model.")] == ["model.name"]


def test_a_report_says_which_job_it_is_of() -> None:
    for recompute, said in (("none", "no"), ("full", "full")):
        text = printed(step_report(simulate(scenario(recompute=recompute), detail="stage")), 160)
        job = next(line for line in text.splitlines() if line.startswith("job"))
        assert f"{said} recomputation" in job


def test_what_does_not_fit_is_red() -> None:
    full, empty = scenario(), scenario(tp=1, zero_stage=0)
    assert "\x1b[1;31m" not in printed(step_report(simulate(full, detail="stage")), color=True)
    crowded = simulate(empty, detail="stage")
    assert not crowded.fits
    text = printed(step_report(crowded), color=True)
    assert "DOES NOT FIT" in "".join(line for line in text.split("\x1b[0m") if "\x1b[1;31m" in line)
    today = improve(empty, axes=("zero_stage",))
    assert "\x1b[1;31m, DOES NOT FIT" in printed(improve_report(today), 200, color=True)


@pytest.mark.parametrize(("width", "columns"), [(80, ()), (120, ("design",)), (160, ("design", "largest loss", "measured"))])
def test_designs_are_readable_and_use_the_width(width: int, columns: tuple[str, ...]) -> None:
    table = {
        "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 8192, "global_batch_size": 8},
    }  # fmt: skip
    told = answer([find(make_space(table, allow=SMALL), Wish(keep=3))])
    text = printed(search_report(told, []), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for candidate in told.candidates:
        assert all(word in text for word in candidate.design.split())
    assert str(told.candidates[0].scored.choice) in " ".join(text.split())
    head = next(line for line in text.splitlines() if "MFU" in line)
    assert [name for name in ("design", "largest loss", "measured") if name in head] == [*columns]


def test_the_waterfall_uses_the_width() -> None:
    result = simulate(scenario(), detail="stage")
    bars = [max(line.count("█") for line in printed(step_report(result), width).splitlines()) for width in (80, 160)]
    assert 5 < bars[0] < bars[1]


def test_files_are_named_when_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace, net = tmp_path / "step.html", tmp_path / "step.json.gz", tmp_path / "net.html"
    file = ROOT / "mlp-4096x24_a100x8_dp8.toml"
    with pytest.raises(SystemExit):
        main(["simulate", str(file), "--html", str(page), "--trace", str(trace), "--json"])
    with pytest.raises(SystemExit):
        main(["topology", str(file), "--html", str(net)])
    told = capsys.readouterr().err
    for path in (page, trace, net):
        assert path.is_file()
        assert f"wrote {path}" in told


def test_large_numbers_have_units() -> None:
    assert format_metric("model_flops_per_s_per_gpu", 4e14) == "400.0 TFLOP/s"
    assert format_metric("parameters", 70.55e9) == "70,550,000,000"
    assert format_metric("step_time_s", 14.66) == "14.66 s"
    assert format_metric("mfu", 0.41) == "41.0%"


def test_pages_of_large_jobs_draw_every_node() -> None:
    result = simulate(read_scenario(ROOT / "llama3.1-405b_h100x16384_tp8pp16.toml"), detail="stage")
    page = step_page(result)
    assert "All 2,048 nodes." in page
    assert "e+14" not in page.partition("Plotly")[0]
    figure = fleet_figure(Cluster(load_hardware("grand-teton-h100-roce"), 2048), lambda node: node % 16, "rank")
    assert figure is not None
    trace, layout = figure["variants"][0]["data"][0], figure["variants"][0]["layout"]
    cells = [value for row in trace["z"] for value in row if value is not None]
    assert cells == [node % 16 for node in range(2048)]
    assert len(layout["yaxis"]["ticktext"]) == 6
    assert fleet_figure(Cluster(load_hardware("dgx-h100"), 1), lambda node: node, "rank") is None


def test_terms_are_those_of_the_text_as_whole_words() -> None:
    from simpar.report.terms import TERMS, terms_in

    assert list(terms_in("bubble 4.9% of the pipeline; MFU 49%, tp 4")) == ["tp", "bubble", "mfu, hfu"]
    assert not terms_in("apply, stages-of, a trail, dpi")
    assert all(meaning and not meaning.endswith(".") for meaning in TERMS.values())
