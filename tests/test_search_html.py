"""The page about a search: what its figures hold, and in a browser."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from report_results import decompressed
from search_layouts import SMALL, small_space
from serve_browser import CHROMIUM, Browser

from simpar.errors import InputError
from simpar.interop.export import run_files
from simpar.output import offline, write_page
from simpar.report import search_html
from simpar.report.search_html import search_page
from simpar.report.search_points import points_of
from simpar.searching.answer import Answer, answer
from simpar.searching.find import find
from simpar.searching.parts import Wish
from simpar.searching.why import Why, why
from simpar.specs.scenario import make_scenario
from simpar.step import simulate

ALLOW = (*(t for t in SMALL if not t.startswith(("schedule", "recompute", "cp="))), "schedule=1f1b", "recompute=none,full", "cp=1")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="headless Chromium is not installed (Debian package chromium)")


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer([find(small_space(allow=ALLOW), Wish(keep=5))])


@pytest.fixture(scope="module")
def reasons(found: Answer) -> list[Why]:
    assert found.best is not None
    return [why(small_space(allow=ALLOW), Wish(), asked, found.best.scored.choice) for asked in ("tp=4,pp=2", "tp=8")]


@pytest.fixture(scope="module")
def page(found: Answer, reasons: list[Why]) -> str:
    with offline():
        return search_page(found, reasons, run_files)


def test_every_loser_says_why_and_every_layout_can_be_saved(found: Answer, page: str) -> None:
    losers = dict(re.findall(r"<li value=(\d+)>([^<]*)</li>", page))
    assert list(losers) == [str(n) for n in range(2, len(found.candidates) + 1)]
    for number, c in enumerate(found.candidates[1:], start=2):
        assert c.trade is not None
        assert losers[str(number)].startswith(f"{c.trade.step_time_s / found.candidates[0].result.step_time_s:+.1%}: ")
        assert "; memory " in losers[str(number)]
    saved = {unescape(name): unquote(text) for name, text in re.findall(r'download="([^"]*)" href="data:[^,]*,([^"]*)"', page)}
    for number, c in enumerate(found.candidates, start=1):
        again = make_scenario(tomllib.loads(saved[f"{number}-scenario.toml"]))
        assert simulate(again, detail="stage").step_time_s == pytest.approx(c.result.step_time_s)
        files = run_files(c.scored.choice.scenario(c.found.space.template))
        assert {name: saved[f"{number}-{name}"] for name in files} == files
    assert "1-megatron.sh" in saved


def figures(page: str) -> dict[str, list[dict[str, Any]]]:
    data = re.search(r'<script type="application/gzip" id=data>(.*?)</script>', page, re.DOTALL)
    assert data
    return {f["id"]: f["variants"][0]["data"] for f in decompressed(data.group(1))["figures"]}


def test_the_points_are_the_answer_and_the_meshes_of_the_space(found: Answer) -> None:
    points = points_of(found)
    assert [p.choice for p in points[: len(found.candidates)]] == [c.scored.choice for c in found.candidates]
    assert [p.chosen for p in points].count(True) == len(found.candidates)
    meshes = {(g.tp, g.cp, g.pp, g.dp, g.ep) for g in found.found[0].space.groups}
    shown = {(g.tp, g.cp, g.pp, g.dp, g.ep) for g in (p.choice.group for p in points)}
    assert shown <= meshes
    assert len(shown) >= 0.7 * len(meshes), "meshes of which something fits are shown"
    slowest = max(p.step_time_s for p in points)
    assert slowest > 1.2 * points[0].step_time_s, "not only the good ones"


def test_the_figures_hold_every_point_under_its_layout(page: str, found: Answer) -> None:
    drawn, points = figures(page), points_of(found)
    scatter = [t for t in drawn["front"] if t.get("text")]
    assert sorted(text for t in scatter for text in t["text"]) == sorted(p.hover for p in points)
    assert all(str(p.choice) in p.hover for p in points)
    looks = [(t["marker"]["color"], t["marker"]["symbol"]) for t in scatter]
    assert len({symbol for _, symbol in looks}) == len(looks), "shapes differ where colours cannot be told apart"
    lines = drawn["coordinates"]
    assert sorted(t["text"][0] for t in lines) == sorted(p.hover for p in points)
    # The answer's first is drawn last, over the others, and thickest.
    assert lines[-1]["text"][0] == points[0].hover
    assert lines[-1]["line"]["width"] == max(t["line"]["width"] for t in lines)
    assert all(0.0 <= y <= 1.0 for t in lines for y in t["y"])
    front = next(t for t in drawn["front"] if t["name"] == "front")
    assert front["x"] == sorted(front["x"])
    assert front["y"] == sorted(front["y"], reverse=True)


def test_gantts_share_one_scale(page: str, found: Answer) -> None:
    gantts = re.findall(r"<svg viewBox=.*?</svg>", page, re.DOTALL)
    assert len(gantts) == min(len(found.candidates), search_html.GANTTS)
    longest = max(c.result.step_time_s for c in found.candidates[: search_html.GANTTS])
    for svg, candidate in zip(gantts, found.candidates, strict=False):
        ends = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)]
        assert max(ends) == pytest.approx(900.0 * candidate.result.step_time_s / longest, rel=0.02)


def test_the_page_is_self_contained_and_escapes(found: Answer) -> None:
    wild = found.found[0].space.template.model_copy(update={"name": "<script>alert(1)</script>"})
    named = Answer(found.candidates, tuple(_renamed(f, wild) for f in found.found), 1, None)
    with offline():
        page = search_page(named, [])
    assert "<script>alert(1)" not in page
    assert "default-src 'none'" in page
    assert page.count("plotly.js v") == 1


def _renamed(each: Any, template: Any) -> Any:
    from dataclasses import replace

    return replace(each, space=replace(each.space, scenario=template))


def test_nothing_found_still_makes_a_page() -> None:
    space = small_space(allow=(*ALLOW, "tp=1"))
    cluster = space.template.cluster.model_copy(update={"memory_scale": 0.01})
    from dataclasses import replace

    tiny = replace(space, scenario=space.template.model_copy(update={"cluster": cluster}))
    page = search_page(answer([find(tiny, Wish())]), [])
    assert "no layout will do" in page
    assert "does not fit the memory" in page


def test_a_page_that_cannot_be_written_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--html"):
        write_page(tmp_path, "page")
    write_page(tmp_path / "new" / "page.html", "page")
    assert (tmp_path / "new" / "page.html").read_text() == "page"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


OVERLAPS = """(() => {
  const shown = [...document.querySelectorAll('.card, .tile')].map(e => e.getBoundingClientRect());
  let count = 0;
  for (let i = 0; i < shown.length; i++) for (let j = i + 1; j < shown.length; j++) {
    const a = shown[i], b = shown[j];
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1) count++;
  }
  const texts = [...document.querySelectorAll('#front text, #coordinates text')].filter(e => e.textContent)
    .map(e => e.getBoundingClientRect());
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const a = texts[i], b = texts[j];
    if (a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 3 && b.top < a.bottom - 3) count += 100;
  }
  return count;
})()"""


@pytest.mark.browser
@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", [1280, 1920])
def test_in_a_browser(browser: Browser, page: str, found: Answer, tmp_path: Path, width: int) -> None:
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.resize(width, 1000)
    browser.open("about:blank")
    browser.console.clear()
    browser.open(f"file://{path}")
    browser.wait("document.querySelectorAll('#front .scatterlayer .point').length && document.querySelector('#coordinates .lines')")
    browser.wait("document.querySelectorAll('#gantts svg rect').length > 10")
    assert browser.js("document.documentElement.scrollWidth") == width, "nothing runs out of the page"
    assert browser.js(OVERLAPS) == 0
    # Hover names the layout: of a point, and of an op of a Gantt.
    browser.js("document.querySelector('#front').scrollIntoView()")
    box = browser.js(
        "(() => { const r = document.querySelector('#front .scatterlayer .point').getBoundingClientRect();"
        "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] - 3, y=box[1])
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    browser.wait("document.querySelector('#front .hoverlayer text')")
    assert "mbs" in browser.js("document.querySelector('#front .hoverlayer').textContent")
    assert "F" in browser.js("document.querySelector('#gantts rect title').textContent")
    assert browser.console == []


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_nothing_runs_out_of_a_narrow_page(browser: Browser, page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page)
    browser.resize(390, 1000)
    browser.open(f"file://{path}")
    browser.wait("document.querySelectorAll('#gantts svg rect').length > 10")
    assert browser.js("document.documentElement.scrollWidth") == 390
    assert browser.js("document.querySelectorAll('ol.exports a.button').length") >= 10
