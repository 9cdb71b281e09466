"""A page: sections of HTML and figures that plotly.js draws.

plotly.js, most of the weight of a page, comes from its own site, checked by its hash. An offline page has it inside and loads
nothing from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from simpar.output import OFFLINE, PLOTLY_SITE, plotly_script
from simpar.report.encode import compressed
from simpar.report.page_script import SCRIPT
from simpar.report.tables import Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'{site}; img-src data: blob:; font-src data:"
_STYLE = """
:root { --ink: #1c1f23; --soft: #5b636d; --line: #dde1e6; --paper: #ffffff; --desk: #f3f4f6; --grid: #e8eaed;
  --zero: #b8bec6; --idle: #eceef1; --bad: #b00020; --good: #00684c; --warn: #a03c00; color-scheme: light; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3abb5; --line: #3a4048; --paper: #1e2227;
  --desk: #15181c; --grid: #30363d; --zero: #5b636d; --idle: #2c3138; --bad: #ff8a80; --good: #6ddba9; --warn: #ffb27a;
  color-scheme: dark; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--desk); color: var(--ink); font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1840px; margin: 0 auto; padding: 18px 22px 40px; }
h1 { font-size: 24px; margin: 4px 0 2px; } h2 { font-size: 16px; margin: 0 0 4px; }
p { margin: 3px 0; } .soft { color: var(--soft); font-size: 13px; } .warn { color: var(--warn); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(185px, 1fr)); gap: 10px; margin: 14px 0; }
.tile { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 9px 13px; }
.tile b { display: block; font-size: 21px; line-height: 1.25; margin: 1px 0; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: 13px; } .bad b { color: var(--bad); } .good b { color: var(--good); }
.cards { display: grid; grid-template-columns: repeat(12, minmax(0, 1fr)); gap: 12px; align-items: stretch; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; grid-column: span 12; }
@media (min-width: 1100px) { .half { grid-column: span 6; } }
.plot { width: 100%; } .scroll { overflow-x: auto; }
label { font-size: 13px; color: var(--soft); } select { font: inherit; font-size: 13px; }
table { border-collapse: collapse; font-size: 14px; } th, td { padding: 3px 16px 3px 0; text-align: left; vertical-align: top; }
td:first-child { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; } tbody tr + tr td { border-top: 1px solid var(--grid); }
#tip { position: fixed; z-index: 9; pointer-events: none; display: none; background: #1c1f23; color: #fff; font-size: 13px;
  border-radius: 6px; padding: 7px 10px; max-width: 420px; white-space: pre; box-shadow: 0 2px 8px rgba(0,0,0,.35); }
ul { margin: 4px 0; padding-left: 20px; }
"""


def tiles(shown: Iterable[tuple[str, ...]]) -> str:
    """Headline figures: (title, value, more, style), of which the last two may be missing."""
    boxes = ""
    for title, value, *more in shown:
        below = f"<span>{escape(more[0])}</span>" if more else ""
        style = f" {more[1]}" if more[1:] else ""
        boxes += f'<div class="tile{style}"><span>{escape(title)}</span><b>{escape(value)}</b>{below}</div>'
    return f"<div class=tiles>{boxes}</div>" if boxes else ""


def plot(figure: dict[str, Any]) -> str:
    """Where a figure goes, with its notes and, where it has several views, their choice."""
    name, variants = figure["id"], figure.get("variants", [])
    notes = "".join(f"<p class=soft>{escape(text)}</p>" for text in figure.get("notes", []))
    choice = ""
    if len(variants) > 1:
        options = "".join(f"<option value={i}>{escape(v['label'])}</option>" for i, v in enumerate(variants))
        choice = f'<label>{escape(figure["choose"])} <select data-for="{name}">{options}</select></label>'
    return f'{notes}{choice}<div class=plot id="{name}" style="height:{figure["height"]}px"></div>'


class Cards:
    """The sections of a page under its head, and the figures drawn in them."""

    def __init__(self, head: str) -> None:
        self._parts = [head, "<div class=cards>"]
        self._figures: list[dict[str, Any]] = []

    def add(self, title: str, body: str, width: str = "", note: str = "") -> None:
        """A section; `width` is "" or "half" of a wide screen."""
        text = f"<p class=soft>{escape(note)}</p>" if note else ""
        self._parts.append(f'<section class="card {width}"><h2>{escape(title)}</h2>{text}{body}</section>')

    def draw(self, title: str, figure: dict[str, Any] | None, width: str = "", note: str = "", below: str = "") -> None:
        """A section with a figure, and what stands under it; none without one."""
        if figure is not None:
            self._figures.append(figure)
            self.add(title, plot(figure) + below, width, note)

    def tabulate(self, title: str, table: Table, width: str = "", note: str = "") -> None:
        """A section with a table; none without rows."""
        if table.rows:
            self.add(title, table.html(), width, note)

    def tell(self, title: str, texts: Sequence[str], width: str = "") -> None:
        """A section with a list of texts; none without any."""
        if texts:
            self.add(title, "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>", width)

    def html(self, title: str, gantt: dict[str, Any] | None = None) -> str:
        """The whole document; what a Gantt is drawn from goes to the place of the figure of that name."""
        data = compressed({"figures": self._figures, "gantt": gantt})
        policy = _POLICY.format(site="" if OFFLINE.get() else f" {PLOTLY_SITE}")
        return (
            f'<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name=viewport content="width=device-width, initial-scale=1"><link rel=icon href="data:,">'
            f"<style>{_STYLE}</style></head><body><main>{''.join(self._parts)}</div></main><div id=tip></div>"
            f'<script type="application/gzip" id=data>{data}</script>{plotly_script()}'
            f"<script>{SCRIPT}</script></body></html>"
        )  # fmt: skip
