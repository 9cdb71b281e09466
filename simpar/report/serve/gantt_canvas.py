"""The page's pipeline Gantt: drawn on a canvas, because thousands of shapes take plotly a quarter of a second at every change."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from simpar.report.encode import packed, time_unit
from simpar.report.gantt import lanes_of, legend, thinned, waits
from simpar.report.shown import drawn_s, shown_roles
from simpar.result.result import Result

MAX_RECTANGLES = 12_000
_ROW, _FEW, _AXIS = 34, (200, 560), 44


def canvas_data(result: Result) -> tuple[dict[str, Any], str]:
    """What the page's script draws, and a note on what was merged (empty: nothing)."""
    roles = shown_roles(result)
    lanes = lanes_of(result.program, roles)
    drawn, note = thinned(result, lanes, MAX_RECTANGLES)
    program = result.program
    unit, factor = time_unit(drawn_s(result))
    strips, idle = waits(result, roles, len(lanes))
    microbatch = program.microbatch[drawn.first]
    height = int(min(max(len(roles) * _ROW, _FEW[0]), _FEW[1])) + _AXIS
    kinds, kind = legend(program, drawn, idle)
    none = np.full(len(idle.lane), -1)
    data = {
        "unit": unit, "step": drawn_s(result) * factor, "height": height,
        "kinds": kinds,
        "ranks": [f"rank {role.pipeline_rank}" for role in roles],
        "lanes": [[round(lane.top, 4), round(lane.bottom, 4), lane.title] for lane in [*lanes, *strips]],
        "lane": packed(np.concatenate([drawn.lane, idle.lane]), "int16"), "kind": packed(kind, "int8"),
        "microbatch": packed(np.concatenate([np.where(drawn.folded, -1, microbatch), none]), "int16"),
        "stage": packed(np.concatenate([program.stage[drawn.first], none]), "int16"),
        "count": packed(np.concatenate([drawn.count, -none]), "int32"),
        "start": packed(np.concatenate([drawn.start, idle.start]) * factor),
        "end": packed(np.concatenate([drawn.finish, idle.start + idle.length]) * factor),
        "busy": packed(np.concatenate([drawn.busy, idle.length]) * factor),
    }  # fmt: skip
    return data, note


SCRIPT: Final = """
function(data) {
  const none = window.dash_clientside.no_update;
  const root = document.getElementById("gantt");
  if (!data || !root) return none;
  const types = {f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array};
  const unpack = v => new types[v.dtype](Uint8Array.from(atob(v.bdata), c => c.charCodeAt(0)).buffer);
  const setup = () => {
    const canvas = document.createElement("canvas"), legend = document.createElement("div"), tip = document.createElement("div");
    canvas.tabIndex = 0; canvas.id = "gantt-canvas"; canvas.setAttribute("role", "img");
    legend.className = "gantt-legend soft"; tip.className = "gantt-tip"; tip.hidden = true;
    root.append(legend, canvas, tip);
    const g = {canvas, legend, tip, from: 0, to: 1, left: 70, bottom: 44, drag: null};
    const at = e => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
    g.time = x => g.from + (x - g.left) / (g.width - g.left - 8) * (g.to - g.from);
    g.place = t => g.left + (t - g.from) / (g.to - g.from) * (g.width - g.left - 8);
    g.zoom = (from, to) => {
      const least = g.data.step * 1e-5, span = Math.min(Math.max(to - from, least), g.data.step);
      g.from = Math.min(Math.max(from, 0), g.data.step - span); g.to = g.from + span; g.draw();
    };
    g.draw = () => {
      const d = g.data, ratio = window.devicePixelRatio || 1, rows = d.ranks.length, h = d.height - g.bottom;
      g.width = canvas.parentElement.clientWidth;
      canvas.width = g.width * ratio; canvas.height = d.height * ratio;
      canvas.style.width = g.width + "px"; canvas.style.height = d.height + "px";
      const c = canvas.getContext("2d");
      const look = name => getComputedStyle(root).getPropertyValue(name);
      c.scale(ratio, ratio); c.fillStyle = look("--paper"); c.fillRect(0, 0, g.width, d.height);
      const y = v => v / rows * h, right = g.width - 8;
      c.fillStyle = look("--off");
      const x0 = g.place(Math.max(0, g.from)), x1 = g.place(Math.min(d.step, g.to));
      for (const [top, bottom] of d.lanes) c.fillRect(x0, y(top), x1 - x0, y(bottom) - y(top));
      const scale = (right - g.left) / (g.to - g.from), tops = d.lanes.map(l => y(l[0])), highs = d.lanes.map(l => y(l[1] - l[0]));
      for (const ids of d.groups) {
        c.fillStyle = ids.color === "#000000" ? look("--ink") : ids.color;
        for (const i of ids.at) {
          if (d.end[i] < g.from || d.start[i] > g.to) continue;
          const a = Math.max(g.left, g.left + (d.start[i] - g.from) * scale);
          const b = Math.min(right, g.left + (d.end[i] - g.from) * scale);
          const l = d.lane[i]; c.fillRect(a, tops[l], Math.max(b - a, 0.4), Math.max(highs[l], 0.7));
        }
      }
      c.fillStyle = look("--ink"); c.font = "13px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
      c.textAlign = "right"; c.textBaseline = "middle";
      const each = Math.max(1, Math.ceil(rows * 17 / h));
      for (let r = 0; r < rows; r += each) c.fillText(d.ranks[r], g.left - 7, y(r + 0.5));
      const rough = (g.to - g.from) / Math.max(2, (right - g.left) / 110), ten = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map(k => k * ten).find(k => k >= rough);
      const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      c.textBaseline = "top"; c.textAlign = "center"; c.strokeStyle = look("--edge"); c.beginPath();
      for (let t = Math.ceil(g.from / step) * step; t <= g.to * (1 + 1e-9); t += step) {
        const x = g.place(t); c.moveTo(x, h); c.lineTo(x, h + 5);
        c.fillText(t.toFixed(places), Math.min(x, right - 12), h + 7);
      }
      c.moveTo(g.left, h + 0.5); c.lineTo(right, h + 0.5); c.stroke();
      c.fillText("time in the step (" + d.unit + ")", (g.left + right) / 2, h + 25);
      if (g.drag) {
        c.fillStyle = "rgba(0, 96, 160, 0.2)"; c.fillRect(Math.min(g.drag[0], g.drag[1]), 0, Math.abs(g.drag[1] - g.drag[0]), h);
      }
    };
    g.under = (x, yy) => {
      const d = g.data, t = g.time(x), v = yy / (d.height - g.bottom) * d.ranks.length;
      const lane = d.lanes.findIndex(l => v >= l[0] && v <= l[1]);
      if (lane < 0 || x < g.left) return -1;
      let best = -1;
      for (let i = 0; i < d.lane.length; i++) if (d.lane[i] === lane && d.start[i] <= t && t <= d.end[i]) best = i;
      return best;
    };
    g.text = i => {
      const d = g.data, n = x => Number(x.toPrecision(4)), kind = d.kinds[d.kind[i]][0], mb = d.microbatch[i];
      const many = d.count[i] > 1 ? " (" + d.count[i] + " ops, busy " + n(d.busy[i]) + " " + d.unit + ")" : "";
      return kind + (d.stage[i] >= 0 ? ", stage " + d.stage[i] : "") + (mb >= 0 ? ", micro-batch " + mb : "") + many + " | " +
        d.lanes[d.lane[i]][2] + " | start " + n(d.start[i]) + " " + d.unit + ", lasts " + n(d.end[i] - d.start[i]) + " " + d.unit;
    };
    canvas.addEventListener("mousedown", e => { const [x] = at(e); g.drag = [x, x]; });
    canvas.addEventListener("mousemove", e => {
      const [x, yy] = at(e);
      if (g.drag) { g.drag[1] = x; g.draw(); return; }
      const i = g.under(x, yy);
      tip.hidden = i < 0;
      if (i >= 0) {
        tip.textContent = g.text(i); tip.style.top = canvas.offsetTop + yy + 16 + "px";
        tip.style.left = Math.max(0, Math.min(x - 40, g.width - tip.offsetWidth - 4)) + "px";
      }
    });
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    window.addEventListener("mouseup", () => {
      if (!g.drag) return;
      const [a, b] = g.drag.map(g.time).sort((p, q) => p - q), wide = Math.abs(g.drag[1] - g.drag[0]) > 4;
      g.drag = null; wide ? g.zoom(a, b) : g.draw();
    });
    canvas.addEventListener("dblclick", () => g.zoom(0, g.data.step));
    canvas.addEventListener("keydown", e => {
      const span = g.to - g.from, mid = (g.from + g.to) / 2;
      const to = {"+": [mid - span / 4, mid + span / 4], "=": [mid - span / 4, mid + span / 4], "-": [mid - span, mid + span],
        ArrowLeft: [g.from - span / 4, g.to - span / 4], ArrowRight: [g.from + span / 4, g.to + span / 4],
        Home: [0, g.data.step]}[e.key];
      if (to) { e.preventDefault(); g.zoom(to[0], to[1]); }
    });
    new ResizeObserver(() => { if (g.data && root.clientWidth !== g.width) g.draw(); }).observe(root);
    return g;
  };
  const g = root.gantt || (root.gantt = setup());
  const d = {...data};
  for (const name of ["lane", "kind", "microbatch", "stage", "count", "start", "end", "busy"]) d[name] = unpack(data[name]);
  const groups = {};
  for (let i = 0; i < d.lane.length; i++) {
    const k = d.kinds[d.kind[i]], color = d.microbatch[i] >= 0 && d.microbatch[i] % 2 ? k[2] : k[1];
    (groups[color] = groups[color] || {color, at: []}).at.push(i);
  }
  d.groups = Object.values(groups);
  g.data = d; g.from = 0; g.to = d.step;
  g.legend.replaceChildren(...[["waiting", "var(--off)"], ...d.kinds.filter((_, k) => d.kind.includes(k))].map(k => {
    const item = document.createElement("span"), box = document.createElement("i");
    box.style.background = k[1] === "#000000" ? "var(--ink)" : k[1]; item.append(box, k[0]); return item;
  }));
  const long = Number(d.step.toPrecision(4)) + " " + d.unit;
  g.canvas.setAttribute("aria-label", "Pipeline of " + d.ranks.length + " ranks over " + long +
    "; plus and minus zoom, arrows move, Home shows all");
  g.draw();
  root.dataset.shapes = d.lane.length;
  return d.lane.length;
}
"""
"""Draws what `canvas_data` says; drag to zoom, double-click to see all; with the keyboard plus, minus, arrows and Home."""
