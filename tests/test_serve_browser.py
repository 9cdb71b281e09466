"""The what-if page in headless Chromium: load, move a slider, read the numbers, search, export, reload from the address."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_browser import CHROMIUM, TEXTS, Browser
from typer.testing import CliRunner

from simpar.cli import app as cli
from simpar.specs.base import data_dir
from simpar.units import format_bytes, format_seconds

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="headless Chromium is not installed (Debian package chromium)"),
    pytest.mark.skipif(importlib.util.find_spec("dash") is None, reason="the ui extra (Dash) is not installed"),
]
SMALL = "llama3.1-70b_h100x64_tp4cp2pp4"
WHOLE = "!document.querySelector('.tile.early')"
READY = f"document.querySelector('#tile-step') && Number(document.querySelector('#gantt').dataset.shapes) > 0 && {WHOLE}"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a running `simpar serve`."""
    command = [sys.executable, "-m", "simpar.cli", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found
        yield found.group()
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def page(server: str, browser: Browser) -> Browser:
    """The small scenario, loaded; no message of the console is forgiven."""
    return opened(browser, f"{server}?scenario={SMALL}")


def opened(browser: Browser, url: str) -> Browser:
    browser.resize(1280, 900)
    browser.open("about:blank")
    browser.console.clear()
    browser.open(url)
    browser.wait(READY)
    browser.wait("location.search.includes('scenario=')")
    return browser


def changed(browser: Browser, before: str, selector: str = "#tile-step") -> float:
    """Seconds until a number is another."""
    started = time.perf_counter()
    browser.wait(f"document.querySelector({json.dumps(selector)}).innerText !== {json.dumps(before)} && {WHOLE}")
    return time.perf_counter() - started


def simulated(path: Path, *overrides: str, detail: str = "stage") -> dict[str, Any]:
    """What the command line prints."""
    sets = [part for text in overrides for part in ("--set", text)]
    return dict(json.loads(CliRunner().invoke(cli, ["simulate", str(path), "--json", "--detail", detail, *sets]).stdout))


def agrees(browser: Browser, printed: dict[str, Any]) -> None:
    """The tiles show the numbers of the command line."""
    assert browser.text("#tile-step") == format_seconds(printed["step_time_s"])
    assert browser.text("#tile-rate") == f"{printed['tokens_per_s']:,.0f}"
    assert browser.text("#tile-mfu") == f"{printed['mfu']:.1%}"
    assert browser.text("#tile-bubble") == f"{printed['bubble_fraction']:.1%}"
    assert browser.text("#tile-memory") == format_bytes(printed["peak_memory_bytes"]["device"])


def test_sliders_numbers_and_the_command_line(page: Browser) -> None:
    scenario = data_dir("scenarios") / f"{SMALL}.toml"
    agrees(page, simulated(scenario))
    before, days = page.text("#tile-step"), page.text("#tile-days")
    page.focus("#r-tp")
    page.key("ArrowRight", 39)
    changed(page, before)
    assert page.js("document.querySelector('#v-tp').value") == "8"
    agrees(page, simulated(scenario, "plan.tp=8", "plan.dp=1"))
    assert page.text("#tile-days") != days
    before = page.text("#tile-step")
    page.focus("#r-nic_bw")
    page.key("ArrowLeft", 37)
    page.key("ArrowLeft", 37)
    changed(page, before)
    page.wait("location.search.includes('nic_bw=0.5')")
    time.sleep(0.3)
    agrees(page, simulated(scenario, "plan.tp=8", "plan.dp=1", "cluster.nic_bandwidth_scale=0.5"))
    agrees(page, simulated(scenario, "plan.tp=8", "plan.dp=1", "cluster.nic_bandwidth_scale=0.5", detail="layer"))
    assert page.console == []


def test_wrong_settings_are_said_in_place_and_left_again(page: Browser) -> None:
    step = page.text("#tile-step")
    page.enter("#v-pp", "3")
    page.wait("document.querySelector('#wrong .wrong')")
    assert "must divide the 64 GPUs" in page.text("#wrong")
    assert page.js("document.querySelector('#results').classList.contains('stale')")
    page.enter("#v-pp", "4")
    page.wait("!document.querySelector('#wrong .wrong')")
    assert page.text("#tile-step") == step
    page.enter("#v-tokens", "many")
    page.wait("document.querySelector('#wrong .wrong')")
    assert "15.6T" in page.text("#wrong")
    assert page.console == []


def test_a_path_in_the_address_is_refused_in_place(server: str, browser: Browser) -> None:
    browser.open("about:blank")
    browser.open(f"{server}?scenario={SMALL}&hardware=../../../../etc/passwd")
    browser.wait("document.querySelector('#notice .wrong')")
    assert "unknown hardware '../../../../etc/passwd'" in browser.text("#notice")
    assert "root:" not in browser.js("document.body.innerText")
    browser.open("about:blank")
    browser.open(f"{server}?scenario=../pyproject")
    browser.wait("document.querySelector('#notice .wrong')")
    assert "unknown scenario" in browser.text("#notice")


def test_the_address_brings_everything_back(page: Browser, server: str) -> None:
    page.click("#pin")
    page.wait("document.querySelector('#pinned table')")
    before = page.text("#tile-step")
    page.focus("#r-mbs")
    page.key("ArrowRight", 39)
    changed(page, before)
    page.enter("#v-tokens", "2T")
    page.wait("location.search.includes('tokens=2T') && location.search.includes('pin=')")
    page.wait("document.querySelectorAll('#pinned thead th').length === 3")
    read = "[...document.querySelectorAll('.tile b, .side input')].map(e => e.innerText || e.value).join('|')"
    shown, address = page.js(read), page.js("location.search")
    opened(page, server)
    assert page.js(read) != shown
    opened(page, server + address)
    page.wait("document.querySelectorAll('#pinned thead th').length === 3")
    page.wait(f"{read} === {json.dumps(shown)}")
    assert page.js("location.search") == address
    # A pinned configuration can be taken up again, and removed.
    page.click('#pinned button[aria-label^="Use"]')
    page.wait(f"document.querySelector('#tile-step').innerText === {json.dumps(before)}")
    page.wait("document.querySelectorAll('#pinned thead th')[1].innerText.trim().endsWith('tp4cp2pp4')")
    page.click('#pinned button[aria-label^="Remove"]')
    page.wait("!document.querySelector('#pinned table')")
    assert page.console == []


def test_a_long_step_shows_a_first_answer_and_then_the_whole(server: str, browser: Browser) -> None:
    browser.open("about:blank")
    browser.open(f"{server}?scenario=korthikanti-530b_a100x280_tp8pp35")
    browser.wait("document.querySelector('.tile.early')")
    about = float(browser.text("#tile-step").split()[0])
    assert "micro-batches is being simulated" in browser.text("#gantt-note")
    browser.wait(READY, 60)
    assert float(browser.text("#tile-step").split()[0]) == pytest.approx(about, rel=0.05)
    assert "korthikanti-530b" in browser.js("location.search")
    browser.focus("#r-nic_bw")
    browser.key("ArrowLeft", 37)
    browser.key("ArrowLeft", 37)
    browser.wait("document.querySelector('.tile.early')")
    browser.wait("!document.querySelector('.tile.early') && location.search.includes('nic_bw=0.5')", 60)
    assert float(browser.text("#tile-step").split()[0]) != about


def test_a_search_runs_reports_and_its_layout_can_be_used(page: Browser) -> None:
    page.click("#start")
    page.wait("document.querySelector('#search progress') || document.querySelector('#search-done')")
    page.wait("document.querySelector('#search-done')", 120)
    assert page.text("#search-done").startswith("Done")
    assert ("proven" in page.text("#search-done")) == ("DOES NOT FIT" not in page.text("#search"))
    best = page.text("#search tbody tr td:nth-child(2)")
    page.click("#search tbody button")
    page.wait(f"document.querySelector('#tile-step').innerText === {json.dumps(best)} && {WHOLE}")
    assert page.text("#search tbody tr td:nth-child(3)").startswith(page.text("#tile-memory"))
    assert page.console == []


def test_downloads(page: Browser, tmp_path: Path) -> None:
    page.downloads_to(tmp_path)
    before = page.text("#tile-step")
    page.focus("#r-mbs")
    page.key("ArrowRight", 39)
    changed(page, before)
    page.wait("location.search.includes('mbs=2')")
    page.click("#toml")
    written = arrived(tmp_path, f"{SMALL}.toml")
    agrees(page, simulated(written))
    page.click("#html")
    report = arrived(tmp_path, f"{SMALL}.html").read_text()
    assert "<h1>" in report
    assert page.text("#tile-step") in report
    if page.js("document.querySelector('#flags').disabled"):
        assert "launch flags" in page.js("document.querySelector('#flags').title")
    else:
        page.click("#flags")
        page.wait("document.querySelector('#said').innerText.includes('downloaded')")
    assert page.console == []


def arrived(folder: Path, name: str) -> Path:
    """A finished download."""
    until = time.monotonic() + 30
    while not (folder / name).is_file() or list(folder.glob("*.crdownload")):
        assert time.monotonic() < until, f"{name} did not arrive: {list(folder.iterdir())}"
        time.sleep(0.05)
    return folder / name


OVERLAPS = """
(() => {
  const seen = [...document.querySelectorAll(
    '.side label:not(.unseen), .side input:not(.dash-dropdown-focus-target), .side .dash-dropdown, .side span.soft, ' +
    '.side legend, .side button, .side textarea, ' +
    '.tile span, .tile b, .body > .head > *, .buttons button, .card h2, .card > p, .gantt-legend, #gantt canvas, ' +
    '.js-plotly-plot, #wrong')]
    // What a closed <details> holds has a place, but is not drawn.
    .filter(e => e.checkVisibility()).map(e => [e, e.getBoundingClientRect()]).filter(([e, r]) => r.width > 0 && r.height > 0);
  const found = [];
  for (let i = 0; i < seen.length; i++) for (let j = i + 1; j < seen.length; j++) {
    const [a, p] = seen[i], [b, q] = seen[j];
    if (a.contains(b) || b.contains(a)) continue;
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 1 && h > 1) found.push([a.id || a.innerText || a.tagName, b.id || b.innerText || b.tagName, w, h].join(' / '));
  }
  return found;
})()
"""


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("scenario", [SMALL, "llama3.1-405b_h100x16384_tp8pp16", "mlp-4096x24_a100x8_dp8"])
def test_nothing_overlaps_and_nothing_is_cut_off(server: str, browser: Browser, scenario: str, width: int) -> None:
    opened(browser, f"{server}?scenario={scenario}&pin=scenario%3D{SMALL}")
    browser.resize(width, 1000)
    browser.wait("document.querySelector('#pinned table')")
    time.sleep(0.8)
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js(OVERLAPS) == []
    assert browser.js(TEXTS) == []
    browser.js("for (const e of document.querySelectorAll('details')) e.open = true")
    assert browser.js("document.querySelector('#v-gpu_mem').checkVisibility()")
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js(OVERLAPS) == []
    small = "[...document.querySelectorAll('.page *, .js-plotly-plot text')].filter(e => e.textContent.trim() && !e.children.length"
    assert browser.js(small + " && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.textContent)") == []


CONTROLS = """
[...document.querySelectorAll('.side input:not([type=radio]):not(.dash-dropdown-focus-target), .side textarea, ' +
  '.body button:not(:disabled)')].filter(e => e.type !== 'file' && e.checkVisibility()).map(e => e.id || e.innerText)
"""
FOCUSED = """
(e => [e.id || e.innerText, e.getAttribute('aria-label') || (e.labels && e.labels.length && e.labels[0].innerText) || e.innerText,
  getComputedStyle(e).outlineStyle, [...document.querySelectorAll('.dash-dropdown')].filter(d => d.parentElement.contains(e))
  .map(d => d.id)[0] || ''])(document.activeElement)
"""


def test_every_control_is_reached_by_keyboard_and_named(page: Browser) -> None:
    page.js("for (const e of document.querySelectorAll('.side details')) e.open = true")
    wanted = set(page.js(CONTROLS))
    assert "v-gpu_mem" in wanted
    page.js("document.activeElement.blur(); window.scrollTo(0, 0)")
    found = []
    for _ in range(160):
        page.key("Tab", 9)
        found.append(page.js(FOCUSED))
    assert wanted <= {at[0] for at in found}
    assert [at[0] for at in found if at[0] in wanted and not at[1]] == []
    assert [at[0] for at in found if at[0] in wanted and at[2] == "none"] == []
    assert set(page.js("[...document.querySelectorAll('.side .dash-dropdown')].map(e => e.id)")) <= {at[3] for at in found}
    assert page.js("document.querySelectorAll('#v-recompute input').length") == 4


def test_drop_down_and_radio_by_keyboard(page: Browser) -> None:
    before = page.text("#tile-step")
    page.focus("#v-recompute input")
    page.key("ArrowDown", 40)
    changed(page, before)
    page.wait("location.search.includes('recompute=selective')")
    while page.js(FOCUSED)[3] != "v-precision":
        page.key("Tab", 9)
    page.key("ArrowDown", 40)
    page.wait("document.querySelector('.dash-dropdown-content')")
    page.key("Escape", 27)
    page.wait("!document.querySelector('.dash-dropdown-content')")
    assert page.console == []


def test_a_question_is_answered_and_stands_in_the_address(page: Browser, server: str) -> None:
    assert page.text("#verdict-fast").startswith(f"{page.text('#tile-step')} a step")
    page.click("#ask input[value=fit]")
    page.wait("document.querySelector('.asked-fit').offsetHeight > 0 && location.search.includes('ask=fit')")
    assert page.js("document.querySelector('.asked-fast').offsetHeight") == 0
    assert page.text("#verdict-fit").startswith("Yes: ")
    opened(page, server + page.js("location.search"))
    page.wait("document.querySelector('#ask input:checked').value === 'fit'")
    assert page.console == []


def test_the_nearest_layout_that_fits_is_offered_and_can_be_used(server: str, browser: Browser) -> None:
    opened(browser, f"{server}?scenario={SMALL}&mbs=4&ask=fit")
    assert browser.text("#tile-cost") == "none"
    browser.wait("document.querySelector('#nearest button')", 60)
    assert "The nearest layout that fits" in browser.text("#nearest")
    browser.click("#nearest button")
    browser.wait(
        "document.querySelector('#verdict-fit').innerText.startsWith('Yes') && !document.querySelector('#nearest button')", 60
    )
    assert browser.text("#tile-cost").startswith("$")
    assert browser.console == []


def dropped(browser: Browser, area: str, path: Path) -> None:
    """Choose a file as a person does."""
    found = browser.send("Runtime.evaluate", expression=f"document.querySelector('{area} input[type=file]')")["result"]["objectId"]
    browser.send("DOM.setFileInputFiles", files=[str(path)], objectId=found)


def test_a_dropped_config_and_an_own_gpu(page: Browser, server: str, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 20, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = page.text("#tile-step")
    dropped(page, "#drop-model", tmp_path / "config.json")
    changed(page, before)
    page.wait("location.search.includes('config=')")
    step = page.text("#tile-step")
    page.js("for (const e of document.querySelectorAll('.side details')) e.open = true")
    page.enter("#v-gpu_flops", "300")
    changed(page, step)
    page.wait("location.search.includes('gpu_flops=300')")
    shown, address = page.text("#tile-step"), page.js("location.search")
    opened(page, server + address)
    page.wait(f"document.querySelector('#tile-step').innerText === {json.dumps(shown)}")
    (tmp_path / "broken.json").write_text("[1, 2")
    dropped(page, "#drop-model", tmp_path / "broken.json")
    page.wait("document.querySelector('#dropped .bad')")
    assert page.console == []


def test_my_runs_move_every_answer_and_can_be_forgotten(page: Browser, server: str, tmp_path: Path) -> None:
    page.click("#ask input[value=mine]")
    (tmp_path / "runs.jsonl").write_text('{"step_time_s": 18.1}\n{"step_time_s": 18.2}\n{"step_time_s": 18.0}\n')
    dropped(page, "#drop-log", tmp_path / "runs.jsonl")
    page.wait("document.querySelector('#mine-factors')", 60)
    assert "18.1 s" in page.text("#mine-runs")
    assert "Next check" in page.text("#mine")
    before = page.text("#tile-step")
    page.click("#site-on")
    changed(page, before)
    page.wait("location.search.includes('site=')")
    assert 17.5 < float(page.text("#tile-step").split()[0]) < 18.5
    learned, address = page.text("#tile-step"), page.js("location.search")
    page.click("#site-off")
    page.wait(f"document.querySelector('#tile-step').innerText === {json.dumps(before)}")
    opened(page, server + address)
    page.wait(f"document.querySelector('#tile-step').innerText === {json.dumps(learned)}")
    line = " iteration {:6}/  100 | elapsed time per iteration (ms): {} | learning rate: 1.0E-04 | lm loss: 2.0E+00 |\n"
    (tmp_path / "train.log").write_text("".join(line.format(n, 60000.0 if n == 1 else 18100.0 + n) for n in range(1, 21)))
    page.click("#ask input[value=mine]")
    dropped(page, "#drop-log", tmp_path / "train.log")
    page.wait("document.querySelector('#mine-runs')?.innerText.includes('train.log')", 60)
    assert "18.11 s" in page.text("#mine-runs")  # the median; the first step warms up
    (tmp_path / "no.log").write_text("nothing here\n")
    dropped(page, "#drop-log", tmp_path / "no.log")
    page.wait("document.querySelector('#mine .wrong')", 60)
    assert page.console == []
