"""The HTML report of a step: what its figures hold, against the result; and the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from plotly.offline import get_plotlyjs, get_plotlyjs_version
from report_results import EVERY, SMALL_70B, decompressed, expanded, scenario, step, unpacked

from simpar.errors import InputError
from simpar.output import offline, write_page
from simpar.program.program import OpKind
from simpar.report import layout_plot, memory_plot
from simpar.report.encode import compressed, packed
from simpar.report.gantt import WAITS, gantt, lanes_of, rectangles, thinned, waits
from simpar.report.shown import shown_roles
from simpar.report.step_html import step_page
from simpar.result.accounting import account
from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.step import prepare, run, simulate

CHROMIUM = next((p for p in ("/usr/bin/chromium", shutil.which("chromium")) if p and Path(p).exists()), None)
CASES = pytest.mark.parametrize(("stem", "detail", "overrides"), EVERY, ids=[f"{s}-{d}" for s, d, _ in EVERY])


def payload(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'<script type="application/gzip" id=data>(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = decompressed(found.group(1))
    return data


def figure(page: str, name: str) -> list[dict[str, Any]]:
    """The views of one figure."""
    return next(f["variants"] for f in payload(page)["figures"] if f["id"] == name)


@CASES
def test_page_is_whole_and_self_contained(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    with offline():
        page = step_page(step(stem, detail, overrides=overrides))
    body = page.replace(payload_text(page), "")
    head = body[: body.index("<script")]
    assert "default-src 'none'" in head
    assert "https://" not in head
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?!data:)[a-z]""", head)
    assert page.count("plotly.js v") == 1
    places = set(re.findall(r'<div class=plot id="([\w-]+)"', page))
    drawn = {f["id"] for f in payload(page)["figures"]} | {"gantt"}
    assert places == drawn >= {"gantt", "waterfall", "memory-time", "memory-ranks", "layout"}


def payload_text(page: str) -> str:
    """The JSON inside the page, as text."""
    start = page.index("id=data>")
    return page[start : page.index("</script>", start)]


@CASES
def test_waterfall_ends_at_the_step(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    result = step(stem, detail, overrides=overrides)
    trace = figure(step_page(result), "waterfall")[0]["data"][0]
    assert trace["measure"][0] == "absolute"
    assert trace["measure"][-1] == "total"
    assert sum(trace["x"][:-1]) == pytest.approx(trace["x"][-1], rel=1e-6)
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[payload(step_page(result))["gantt"]["unit"]]
    assert trace["x"][-1] == pytest.approx(result.step_time_s * factor)


@CASES
def test_gantt_draws_every_second_of_every_stream(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    result = step(stem, detail, overrides=overrides)
    chart = gantt(result)
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[chart["unit"]]
    lane, length = unpacked(chart["lane"]), unpacked(chart["length"])
    busy, start = unpacked(chart["busy"]), unpacked(chart["start"])
    lanes = lanes_of(result.program, shown_roles(result))
    held = result.timeline.busy_s()
    for index, drawn in enumerate(lanes):
        mine = lane == index
        assert busy[mine].sum() / factor == pytest.approx(held[drawn.stream], rel=1e-5)
        ends = start[mine] + length[mine]
        assert (start[mine][1:] >= ends[:-1] - 1e-5 * chart["step"]).all()
    assert (start + length).max() == pytest.approx(chart["step"], rel=1e-6)
    assert len(chart["label"]) == len(lane)
    terms = np.array([sum(s for _, s in table) for table in chart["tables"]])[unpacked(chart["terms"])]
    assert (busy >= terms * (1 - 1e-4) - 1e-6 * chart["step"]).all(), "slowed ops take longer than their terms, never less"


def test_lanes_do_not_overlap_and_stay_in_their_band() -> None:
    result = step("llama3.1-70b_h100x64_tp4cp2pp4", "op", overrides=SMALL_70B)
    lanes = sorted(lanes_of(result.program, shown_roles(result)), key=lambda lane: lane.top)
    assert len(lanes) == len(result.program.streams)
    for above, below in pairwise(lanes):
        assert above.bottom <= below.top + 1e-9
    assert all(int(lane.top) == int(lane.bottom) for lane in lanes)


@CASES
def test_causes_of_waits_add_up_to_those_of_the_step(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    result = step(stem, detail, overrides=overrides)
    roles = shown_roles(result)
    strips, idle = waits(result, roles, 100)
    causes = list(WAITS)
    told = account(result.program, result.timeline).waits
    for index, shown in enumerate(roles):
        mine = idle.lane == 100 + index
        begin, length = idle.start[mine], idle.length[mine]
        assert (begin[1:] >= (begin + length)[:-1] - 1e-9 * result.step_time_s).all()
        for cause in ("bubble", "dp", "skew"):
            seconds = length[idle.cause[mine] == causes.index(cause)].sum()
            assert seconds == pytest.approx(float(told[cause][shown.role]) if cause in told else 0.0, abs=1e-6 * result.step_time_s)
    ops = lanes_of(result.program, roles)
    for strip in strips:
        assert all(strip.bottom <= lane.top + 1e-9 or lane.bottom <= strip.top + 1e-9 for lane in ops)


def test_a_shortened_timeline_fills_its_axis_and_says_what_it_is() -> None:
    whole = scenario("gpt3-175b_a100x384_tp8pp12", "training.global_batch_size=6144", "plan.virtual_stages=1", "plan.schedule=1f1b")
    result = simulate(whole, detail="stage")
    shown = int(result.program.microbatch.max()) + 1
    assert shown < result.layout.num_microbatches
    chart = gantt(result)
    assert (unpacked(chart["start"]) + unpacked(chart["length"])).max() == pytest.approx(chart["step"], rel=1e-6)
    assert f"The timeline shows {shown} of {result.layout.num_microbatches:,} micro-batches" in chart["notes"][0]


OP_70B = ("llama3.1-70b_h100x64_tp4cp2pp4", "op", SMALL_70B)
LAYER_MLP = ("mlp-4096x24_a100x8_pp8", "layer", ())


@pytest.mark.parametrize(
    ("case", "limit"), [(OP_70B, n) for n in (300, 1_500, 4_000, 20_000, 10**6)] + [(LAYER_MLP, n) for n in (400, 700, 1_500)]
)
def test_thinning_keeps_the_ends_and_says_so(case: tuple[str, str, tuple[str, ...]], limit: int) -> None:
    result = step(case[0], case[1], overrides=case[2])
    program = result.program
    lanes = lanes_of(program, shown_roles(result))
    every = rectangles(result, lanes)
    drawn, note = thinned(result, lanes, limit)
    # Nothing is left out: every op is somewhere, and every second.
    assert sorted(drawn.members.tolist()) == sorted(program.stream_ops.tolist())
    assert len(drawn.members) == drawn.count.sum()
    assert drawn.busy.sum() == pytest.approx(result.timeline.busy_s().sum())
    assert (drawn.busy <= drawn.finish - drawn.start + 1e-12).all()
    if limit >= len(every.lane):
        assert not note
        assert len(drawn.lane) == len(every.lane) == len(program.stream_ops)
        return
    assert f"{len(program.stream_ops):,} ops are drawn as {len(drawn.lane):,} rectangles" in note
    last = int(program.microbatch.max())
    owner = np.repeat(np.arange(len(drawn.count)), drawn.count)
    microbatch = program.microbatch[drawn.members]
    if limit >= len(rectangles(result, lanes, whole=0).lane):
        assert len(drawn.lane) <= limit
        assert not drawn.folded.any()
        ends = drawn.count[(drawn.first == 0) | (program.microbatch[drawn.first] == 0)]
        assert (ends == 1).all() == ("but for the first and last" in note)
    else:
        hidden = set(microbatch[drawn.folded[owner]].tolist())
        shown = set(microbatch[~drawn.folded[owner]].tolist()) - {-1}
        assert f"first and last {len(shown) // 2} of {last + 1}" in note
        assert {0, last} <= shown
        assert not shown & hidden
        assert hidden == set(range(len(shown) // 2, last + 1 - len(shown) // 2))
        if len(shown) > 2:
            assert len(drawn.lane) <= limit * 1.05


def test_merged_rectangles_hold_ops_of_one_action() -> None:
    result = step("llama3.1-70b_h100x64_tp4cp2pp4", "op", overrides=SMALL_70B)
    program = result.program
    drawn = rectangles(result, lanes_of(program, shown_roles(result)), whole=0)
    owner = np.repeat(np.arange(len(drawn.count)), drawn.count)
    for column in (program.kind, program.stage, program.microbatch):
        assert (column[drawn.members] == column[drawn.first][owner]).all()
    assert (drawn.busy <= drawn.finish - drawn.start + 1e-12).all()
    compute = np.isin(program.kind[drawn.first], [int(OpKind.FORWARD), int(OpKind.BACKWARD)])
    assert (drawn.count[compute] > 1).any()


@given(
    npst.arrays(np.float64, st.integers(1, 400), elements=st.floats(0, 1e6, width=32)),
    st.integers(30, 200),
    st.randoms(use_true_random=False),
)
def test_envelope_keeps_peak_trough_and_ends(total: np.ndarray, limit: int, random: Any) -> None:
    times = np.sort(np.array([random.random() for _ in total]))
    kept = memory_plot.envelope(times, total, limit)
    assert (np.diff(kept) > 0).all()
    assert {0, len(total) - 1} <= set(kept.tolist())
    assert total[kept].max() == total.max()
    assert total[kept].min() == total.min()
    assert len(kept) <= min(limit + 2, len(total))


@CASES
def test_memory_figures_show_the_peaks(stem: str, detail: str, overrides: tuple[str, ...]) -> None:
    result = step(stem, detail, overrides=overrides)
    page = step_page(result)
    views = figure(page, "memory-time")
    assert views[0]["label"] == str(result.worst_rank.rank)
    by_rank = {m.rank: m for m in result.memory}
    for view in views:
        memory = by_rank[int(view["label"])]
        top = unpacked(view["data"][-1]["y"])
        assert top.max() * 2**30 == pytest.approx(memory.allocated_bytes, rel=1e-5)
        layers = np.sum([unpacked(trace["customdata"]) for trace in view["data"]], axis=0)
        np.testing.assert_allclose(layers, top, rtol=1e-4, atol=1e-6)
        times = unpacked(view["data"][0]["x"])
        assert (np.diff(times) >= 0).all()
        at = view["layout"]["annotations"][-1]
        assert at["y"] * 2**30 == pytest.approx(memory.allocated_bytes)
    bars = figure(page, "memory-ranks")[0]["data"]
    sums = np.sum([trace["y"] for trace in bars], axis=0) * 2**30
    np.testing.assert_allclose(sums, [m.device_bytes for m in result.memory], rtol=1e-9)


@pytest.mark.parametrize(
    "stem", ["llama3.1-70b_h100x64_tp4cp2pp4", "deepseek-v3_h800x2048_pp16ep64", "switch-c_tpu-v4x2048_ep2048"]
)
def test_layout_colours_every_gpu_by_its_place(stem: str) -> None:
    result = step(stem, "stage", overrides=SMALL_70B if "70b" in stem else ())
    mesh, per_node = result.layout.mesh, result.layout.hardware.gpus_per_node
    ranks, text = layout_plot.shown_gpus(result)
    assert f"{len(ranks):,}" in text
    assert len(ranks) <= layout_plot.MAX_RANKS
    nodes = sorted({int(r) // per_node for r in ranks})
    for view in layout_plot.layout_figure(result)["variants"]:
        trace = view["data"][0]
        name = trace["colorbar"]["title"]["text"]
        for rank in ranks.tolist():
            node, gpu = nodes.index(rank // per_node), rank % per_node
            assert trace["z"][gpu][node] == mesh.coordinates(rank)[name]
            assert trace["customdata"][gpu][node].startswith(f"GPU {rank}")
        cells = sum(value is not None for row in trace["z"] for value in row)
        assert cells == len(ranks)


def test_an_expanded_program_shows_its_slowest_pipeline() -> None:
    page = step_page(expanded(60))
    chart = payload(page)["gantt"]
    pipelines = expanded().layout.mesh.pp
    assert len(chart["roles"]) == 2 * pipelines
    assert any("the pipeline of the slowest rank" in note for note in chart["notes"])
    even = payload(step_page(expanded()))["gantt"]
    assert len(even["roles"]) == pipelines
    assert any("no other rank is slower" in note for note in even["notes"])


def test_what_does_not_fit_is_said() -> None:
    result = step("llama3.1-70b_h100x1_fp8")
    assert not result.fits
    page = step_page(result)
    assert "DOES NOT FIT" in page
    assert "does not fit: largest are" in page


def test_random_effects_show_their_spread() -> None:
    effects = ("effects.repetitions=5", "effects.compute_sigma=0.05")
    result = simulate(scenario("mlp-4096x24_a100x8_pp8", *effects), detail="stage")
    assert result.repetitions is not None
    assert "step over 5 draws, p50" in step_page(result)
    assert "draws" not in step_page(step("mlp-4096x24_a100x8_pp8", "stage")).split("<script")[0]


def test_names_cannot_break_out_of_the_page() -> None:
    wanted = scenario("mlp-4096x24_a100x8_tp8").model_copy(
        update={"name": "</script><script>alert(1)</script>", "description": "<b>&"}
    )
    priced = prepare(wanted, detail="stage")
    page = step_page(interpret(priced, run(priced)))
    assert "alert(1)</script>" not in page
    assert "&lt;b&gt;&amp;" in page


@given(st.text(max_size=30))
@example("</script><!--")
def test_data_of_a_page_round_trip(text: str) -> None:
    encoded = compressed({"text": text})
    assert "<" not in encoded
    assert decompressed(encoded)["text"] == text


@given(npst.arrays(np.float64, st.integers(0, 50), elements=st.floats(-1e9, 1e9)))
def test_packed_arrays_round_trip(values: np.ndarray) -> None:
    assert (unpacked(packed(values, "float64")) == values).all()


def test_paths(tmp_path: Path) -> None:
    result = step("mlp-4096x24_a100x8_tp8", "stage")
    path = tmp_path / "a" / "b" / "report.html"
    write_page(path, step_page(result))
    assert path.read_text(encoding="utf-8") == step_page(result)
    with pytest.raises(InputError, match=r"--html = .*is a file, not a folder"):
        write_page(path / "report.html", step_page(result))
    with pytest.raises(InputError, match=r"--html = .*is a folder"):
        write_page(tmp_path, step_page(result))


def test_the_largest_scenario_is_quick_and_small(tmp_path: Path) -> None:
    result = step("llama3.1-405b_h100x16384_tp8pp16")
    begin = time.process_time()
    write_page(tmp_path / "report.html", step_page(result))
    assert time.process_time() - begin < 3.0
    assert (tmp_path / "report.html").stat().st_size < 1.5e6


def test_a_page_trusts_plotly_by_its_hash() -> None:
    page = step_page(step("mlp-4096x24_a100x8_tp8", "stage"))
    script = re.search(r'<script src="https://cdn.plot.ly/plotly-([\d.]+).min.js" integrity="sha256-([^"]+)"', page)
    assert script
    assert script[1] == get_plotlyjs_version()
    assert base64.b64decode(script[2]) == hashlib.sha256(get_plotlyjs().encode()).digest()
    assert "script-src 'unsafe-inline' https://cdn.plot.ly;" in page


PROBE = """<script>(async () => {
  while (!document.body.dataset.ready) await new Promise(r => setTimeout(r, 20));
  document.body.dataset.probe = window.ganttText(PROBE_X, PROBE_Y, 0);
})();</script>"""


def in_browser(page: str, folder: Path, width: int) -> tuple[str, str]:
    """(document, log) of the page opened without a network."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1200",
            "--virtual-time-budget=30000", "--enable-logging=stderr", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr


def browser_results() -> list[Result]:
    return [step("llama3.1-70b_h100x64_tp4cp2pp4", "layer", overrides=SMALL_70B), step("alexnet_gtx580x2_tp2", "stage")]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="headless Chromium is not installed at /usr/bin/chromium")
@pytest.mark.parametrize(("index", "width"), [(0, 1280), (1, 1920)])
def test_the_page_draws_in_a_browser(index: int, width: int, tmp_path: Path) -> None:
    result = browser_results()[index]
    with offline():
        page = step_page(result)
    chart = payload(page)["gantt"]
    # A point in the middle of the first op of the first lane.
    x = float(unpacked(chart["start"])[0]) + float(unpacked(chart["length"])[0]) / 2
    y = (chart["lanes"][0][0] + chart["lanes"][0][1]) / 2
    probe = PROBE.replace("PROBE_X", repr(x)).replace("PROBE_Y", repr(y))
    document, log = in_browser(page.replace("</body>", probe + "</body>"), tmp_path, width)
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
    body = re.search(r"<body([^>]*)>", document)
    assert body
    assert "data-errors" not in body.group(1)
    assert 'data-ready="1"' in body.group(1)
    figures = len(payload(page)["figures"]) + 1
    assert f'data-plots="{figures}"' in body.group(1)
    assert f'data-probe="{chart["label"][0]}' in body.group(1)
    kinds = len(chart["kinds"])
    drawn = document[document.index('id="gantt"') : document.index('id="waterfall"')]
    assert drawn.count("js-fill") >= kinds
    bars = document[document.index('id="memory-ranks"') : document.index('id="layout"')]
    assert bars.count('class="point"') >= len(result.memory)
