"""The look of the page, and the two scripts that run in the browser."""

from __future__ import annotations

from typing import Final

from simpar.report.serve.questions import FIRST

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #545c66; --line: #d5dae0; --paper: #fff; --desk: #f3f4f6; --blue: #0060a0;
  --bad: #a8001c; --good: #00684c; --edge: #8b949e; --off: #eceef1; --alarm: #fff5f6; --bar: #e69f00; --ends: #606060; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #a9b1bb; --line: #3a414a; --paper: #1e2227; --desk: #14171a; --blue: #2f7fc0; --bad: #ff8f9c;
    --good: #5fd3ab; --edge: #6b7480; --off: #2a2f36; --alarm: #3a1c20; --bar: #e69f00; --ends: #9aa2ac; }
  .js-plotly-plot .annotation rect { fill: var(--paper) !important; }
  .js-plotly-plot text { fill: var(--ink) !important; }
  .js-plotly-plot .gridlayer path, .js-plotly-plot .zerolinelayer path { stroke: var(--line) !important; }
}
:root { --Dash-Fill-Inverse-Strong: var(--paper); --Dash-Text-Primary: var(--ink); --Dash-Text-Strong: var(--ink);
  --Dash-Text-Weak: var(--soft); --Dash-Stroke-Strong: var(--edge); --Dash-Stroke-Weak: var(--line);
  --Dash-Fill-Interactive-Strong: var(--blue); --Dash-Fill-Weak: var(--off); --Dash-Fill-Interactive-Weak: var(--off);
  --Dash-Fill-Primary-Hover: var(--off); --Dash-Fill-Primary-Active: var(--off); --Dash-Fill-Disabled: var(--off);
  --Dash-Text-Disabled: var(--soft); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--desk); color: var(--ink); font: 15px/1.4 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 21px; margin: 0; } h2 { font-size: 16px; margin: 0 0 4px; } p { margin: 3px 0; }
.soft { color: var(--soft); font-size: 13px; }
.page { display: grid; grid-template: "side head" auto "side rest" 1fr / 372px minmax(0, 1fr); gap: 12px 14px; max-width: 1900px;
  margin: 0 auto; padding: 12px 16px; }
.head { grid-area: head; } .rest { grid-area: rest; }
.side { grid-area: side; align-self: start; }
.side { display: flex; flex-direction: column; gap: 10px; position: sticky; top: 0; max-height: 100vh; overflow-y: auto;
  padding: 2px 4px 12px 2px; }
.side > * { flex: none; }
@media (max-width: 900px) { .side { position: static; max-height: none; } }
fieldset, .card, .group { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; margin: 0;
  min-width: 0; }
legend, summary { font-weight: 600; padding: 0 4px; } summary { cursor: pointer; padding: 2px 0; }
.questions { border: 0; background: none; padding: 0; }
.ask { display: flex; flex-wrap: wrap; gap: 6px; } .ask > * { margin: 0 !important; }
.ask label { display: block; border: 1px solid var(--edge); border-radius: 17px; padding: 4px 13px; margin: 0; cursor: pointer;
  background: var(--paper); color: var(--ink); font-size: 14.5px; }
.ask input { position: absolute; opacity: 0; width: 1px; height: 1px; }
.ask label:has(input:checked) { background: #0060a0; border-color: #0060a0; color: #fff; }
.ask label:has(input:checked) * { color: #fff; }
.ask label:has(input:focus-visible) { outline: 3px solid #d55e00; outline-offset: 1px; }
.verdict { font-size: 19px; font-weight: 600; margin: 0 0 4px; overflow-wrap: anywhere; } .verdict.bad { color: var(--bad); }
.answer ul { margin: 2px 0 6px; padding-left: 20px; } .answer h3 { font-size: 15px; margin: 8px 0 2px; } .bad { color: var(--bad); }
.asked { display: none; }
body[data-ask=fit] .asked-fit, body[data-ask=fast] .asked-fast, body[data-ask=best] .asked-best, body[data-ask=long] .asked-long,
body[data-ask=why] .asked-why, body[data-ask=mine] .asked-mine { display: block; }
body[data-ask=fit] .card-memory, body[data-ask=why] .card-waterfall { order: -1; }
.head:has(#wrong .wrong) .answer { opacity: .45; }
.body > div:empty { display: none; }
.answer:has(.verdict.bad) #nearest[data-dash-is-loading=true]::before { content: "Looking for the nearest layout that fits ..."; }
.falls { list-style: none; margin: 6px 0 0; padding: 0; font-size: 13.5px; }
.falls li { display: grid; grid-template-columns: 210px minmax(0, 1fr) 128px; gap: 0 10px; align-items: center; padding: 2.5px 0; }
.falls .bar { position: relative; height: 16px; background: var(--off); border-radius: 2px; }
.falls i { position: absolute; top: 0; bottom: 0; background: var(--bar); border-radius: 1px; }
.falls i.ends { background: var(--ends); }
.number { font-variant-numeric: tabular-nums; }
.row { display: grid; grid-template-columns: 128px minmax(0, 1fr); gap: 2px 8px; align-items: center; margin: 4px 0; }
.row label { font-size: 13.5px; line-height: 1.2; }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) 74px; gap: 8px; align-items: center; }
.unit { display: flex; align-items: center; gap: 6px; }
.unit .soft { white-space: nowrap; }
.side .dash-input-container { border: 0; padding: 0; margin: 0; width: 100%; background: none; box-shadow: none; height: auto; }
.side .dash-input-stepper { display: none; }
input[type=file] { display: none !important; }
.side .dash-input-container input:not([type=range]), .side textarea { width: 100%; font: inherit; font-size: 14px; height: 28px;
  padding: 3px 6px !important; border: 1px solid var(--edge) !important; border-radius: 5px !important;
  background: var(--paper) !important;
  color: var(--ink); min-width: 0; box-sizing: border-box; }
.side textarea { height: auto; font: 13px/1.35 "DejaVu Sans Mono", monospace; resize: vertical; }
.side .dash-dropdown { font-size: 14px; min-height: 30px; width: 100%; }
.unit .dash-input-container { width: 92px; flex: none; }
.radio label { margin-right: 12px; font-size: 14px; }
.radio input { accent-color: var(--blue); }
.side input[type=range] { width: 100%; margin: 0; accent-color: var(--blue); }
button { font: inherit; font-size: 14px; padding: 5px 11px; border: 1px solid var(--edge); border-radius: 6px;
  background: var(--paper);
  color: var(--ink); cursor: pointer; }
button.main { background: #0060a0; border-color: #0060a0; color: #fff; }
button:disabled { color: var(--soft); background: var(--off); border-color: var(--edge); cursor: not-allowed; }
:is(button, input, select, textarea, a, summary, [tabindex]):focus-visible { outline: 3px solid #d55e00 !important;
  outline-offset: 1px; }
.dash-dropdown-wrapper:focus-within { outline: 3px solid #d55e00; outline-offset: 1px; border-radius: 6px; }
.buttons { display: flex; flex-wrap: wrap; gap: 7px; align-items: center; margin: 6px 0 0; }
.body { display: flex; flex-direction: column; gap: 12px; min-width: 0; }
.title { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 20px; align-items: center; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(172px, 1fr)); gap: 10px; }
.tile { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
.tile b { display: block; font-size: 20px; line-height: 1.25; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; } .tile.bad b { color: var(--bad); } .tile.good b { color: var(--good); }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
.figures > .wide { grid-column: span 2; }
@media (max-width: 1500px) { .figures > .card { grid-column: span 2; } }
@media (max-width: 900px) {
  .page { grid-template: "head" auto "side" auto "rest" auto / minmax(0, 1fr); padding: 8px 10px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 8px; }
}
@media (max-width: 560px) {
  .falls li { grid-template-columns: minmax(0, 1fr) auto; } .falls .bar { grid-row: 2; grid-column: span 2; height: 12px; }
  .ask label { padding: 6px 11px; } .verdict { font-size: 17px; }
}
.wrong { border: 2px solid var(--bad); background: var(--alarm); border-radius: 8px; padding: 8px 12px; }
.wrong ul { margin: 4px 0; padding-left: 20px; } .wrong li { overflow-wrap: anywhere; }
.stale { opacity: .45; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; } th, td { padding: 3px 18px 3px 0; text-align: left; vertical-align: top; }
thead th { border-bottom: 1px solid var(--line); max-width: 260px; overflow-wrap: anywhere; } tbody th { font-weight: 400;
  color: var(--soft); white-space: nowrap; }
td { font-variant-numeric: tabular-nums; } td.bad { color: var(--bad); }
#gantt { position: relative; min-height: 240px; } #gantt canvas { display: block; cursor: crosshair; }
.gantt-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 2px 0 6px; }
.gantt-legend i { display: inline-block; width: 13px; height: 13px; margin-right: 5px; vertical-align: -2px; }
.gantt-tip { position: absolute; background: #1c1f23; color: #fff; font-size: 13px; padding: 4px 8px; border-radius: 5px;
  max-width: 720px; pointer-events: none; z-index: 3; }
progress { width: 260px; height: 14px; accent-color: var(--blue); }
"""

NEAREST: Final = """
function(at, value) {
  const stops = STOPS;
  const none = window.dash_clientside.no_update;
  const asked = window.dash_clientside.callback_context.triggered.map(t => t.prop_id).join(" ");
  const near = v => stops.reduce((best, s, i) =>
    Math.abs(Math.log(s / v)) < Math.abs(Math.log(stops[best] / v)) ? i : best, 0);
  const shown = typeof value === "number" && value > 0;
  if (asked.startsWith('r-') && at !== null && at !== undefined) {
    const i = Number(at);
    if (shown && near(value) === i) return [none, none];
    return [none, stops[i]];
  }
  return [shown ? near(value) : 0, none];
}
"""
"""Slider and number box of one field: the one that moved sets the other; the slider stands at the stop nearest to the number."""

_ADDRESS: Final = """
function(query, pins, ask) {
  if (!query) return window.dash_clientside.no_update;
  const all = "?" + query + (ask === "FIRST" ? "" : "&ask=" + ask) +
    (pins || []).map(p => "&pin=" + encodeURIComponent(p)).join("");
  if (all !== window.location.search) window.history.replaceState(null, "", window.location.pathname + all);
  return all;
}
"""
ADDRESS: Final = _ADDRESS.replace("FIRST", FIRST)
"""The address follows the state, without an entry in the history for every move of a slider."""

ASKED: Final = """
function(ask) {
  document.body.dataset.ask = ask;
  // Dash gives radio buttons the roles of a list box, and hides what takes the focus of a drop-down from screen readers.
  const label = e => (e.closest(".row") || e.closest("fieldset") || e).querySelector("label, legend");
  const named = () => {
    for (const group of document.querySelectorAll(".dash-radioitems[role=listbox]")) {
      group.setAttribute("role", "radiogroup");
      group.setAttribute("aria-label", group.id === "ask" ? "question" : label(group).innerText);
      for (const e of group.querySelectorAll("[role=option]")) { e.removeAttribute("role"); e.removeAttribute("aria-selected"); }
    }
    for (const e of document.querySelectorAll(".dash-dropdown-focus-target[aria-hidden]")) {
      e.removeAttribute("aria-hidden");
      e.setAttribute("aria-label", (label(e) || {innerText: "choice"}).innerText);
    }
    for (const e of document.querySelectorAll("input[type=file]:not([aria-label])")) e.setAttribute("aria-label", "file to read");
  };
  if (!window.simparOpened) {
    window.simparOpened = true;
    const narrow = window.matchMedia("(max-width: 900px)").matches;
    if (narrow) for (const e of document.querySelectorAll(".side details.less")) e.open = false;
    // Elements come and go as Dash draws them.
    let due = false;
    const soon = () => { if (!due) { due = true; setTimeout(() => { due = false; named(); }, 60); } };
    new MutationObserver(soon).observe(document.body, {childList: true, subtree: true, attributeFilter: ["role", "aria-hidden"]});
    named();
  }
  return ask;
}
"""
"""Shows the answer to the question that is asked; a phone starts with the controls that are used least closed."""

INDEX: Final = (
    "<!doctype html><html lang=en><head>{%metas%}<title>{%title%}</title><link rel=icon href='data:,'>{%css%}<style>"
    + STYLE
    + "</style></head><body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"
)

CLOSING = """
function(tab) {
    window.addEventListener("pagehide", () => navigator.sendBeacon("/closed", tab));
    return window.dash_clientside.no_update;
}
"""
"""A tab that is closed says so: its search ends."""
