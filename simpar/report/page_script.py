"""The script of a report page: draws its figures, and the Gantt from arrays of rectangles."""

SCRIPT = r"""
"use strict";
window.addEventListener("error", e => {
  document.body.dataset.errors = (document.body.dataset.errors || "") + e.message + "\n";
});
const SHADE = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const FONT = {family: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 13, color: SHADE("ink")};
const CONFIG = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
const ARRAYS = {f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, i1: Int8Array};

function unpack(packed) {
  const text = atob(packed.bdata), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[packed.dtype](bytes.buffer);
}

function styled(layout) {
  const axis = {gridcolor: SHADE("grid"), zerolinecolor: SHADE("zero"), automargin: true};
  const page = {font: FONT, margin: {l: 64, r: 40, t: 14, b: 48}, paper_bgcolor: SHADE("paper"), plot_bgcolor: SHADE("paper"),
                modebar: {orientation: "v"}};
  const out = Object.assign(page, layout);
  // Notes lie on the paper's own colour, whichever that is.
  for (const note of out.annotations || []) if (note.bgcolor) note.bgcolor = SHADE("paper");
  out.xaxis = Object.assign({}, axis, layout.xaxis);
  out.yaxis = Object.assign({}, axis, layout.yaxis);
  return out;
}

function drawn(promise) {
  return promise.then(() => { document.body.dataset.plots = 1 + Number(document.body.dataset.plots || 0); });
}

function drawFigure(figure) {
  const config = Object.assign({}, CONFIG, {displayModeBar: figure.zoom ? "hover" : false});
  const show = i => Plotly.react(figure.id, figure.variants[i].data, styled(figure.variants[i].layout), config);
  const choice = document.querySelector('select[data-for="' + figure.id + '"]');
  if (choice) choice.addEventListener("change", () => show(Number(choice.value)));
  return drawn(show(0));
}

function linked(first, second) {
  const other = {[first.id]: second, [second.id]: first};
  for (const div of [first, second]) div.on("plotly_relayout", change => {
    if (!Object.keys(change).some(key => key.startsWith("xaxis"))) return;
    const range = div._fullLayout.xaxis.range, there = other[div.id]._fullLayout.xaxis.range;
    // Only what differs: setting the other's range calls this once more.
    const differs = Math.abs(range[0] - there[0]) + Math.abs(range[1] - there[1]) > 1e-9;
    if (differs) Plotly.relayout(other[div.id], {"xaxis.range": [...range]});
  });
}

function polygons(lanes, r, wanted) {
  const x = [], y = [];
  for (let i = 0; i < r.start.length; i++) {
    if (!wanted(i)) continue;
    const a = r.start[i], b = a + r.length[i], lane = lanes[r.lane[i]];
    x.push(a, b, b, a, null);
    y.push(lane[0], lane[0], lane[1], lane[1], null);
  }
  return [x, y];
}

function filled(name, color, xy, group, legend) {
  return {type: "scatter", mode: "none", fill: "toself", fillcolor: color, x: xy[0], y: xy[1], name: name, hoverinfo: "skip",
          legendgroup: group, showlegend: legend};
}

function drawGantt(g) {
  const r = {};
  for (const key of ["lane", "kind", "odd", "start", "length", "busy", "terms"]) r[key] = unpack(g[key]);
  const idle = [[], []];
  for (const lane of g.lanes) {
    idle[0].push(0, g.step, g.step, 0, null);
    idle[1].push(lane[0], lane[0], lane[1], lane[1], null);
  }
  const traces = [filled("waiting", SHADE("idle"), idle, "waiting", true)];
  g.kinds.forEach((kind, k) => {
    let named = false;
    for (const odd of [0, 1]) {
      const xy = polygons(g.lanes, r, i => r.kind[i] === k && r.odd[i] === odd);
      if (!xy[0].length) continue;
      traces.push(filled(kind[0], kind[1 + odd], xy, kind[0], !named));
      named = true;
    }
  });
  const n = g.roles.length, step = Math.ceil(n / 32), at = [], names = [];
  for (let i = 0; i < n; i += step) { at.push(i + 0.5); names.push(g.ticks[i]); }
  const layout = styled({
    xaxis: {title: {text: "time in the step (" + g.unit + ")"}, range: [0, g.step], showgrid: false, zeroline: false},
    yaxis: {tickvals: at, ticktext: names, range: [n, 0], showgrid: false, zeroline: false},
    legend: {orientation: "h", y: 1.01, yanchor: "bottom", x: 0}, dragmode: "zoom", hovermode: false,
    margin: {l: 80, r: 40, t: 10, b: 44},
  });
  const div = document.getElementById("gantt");
  return drawn(Plotly.newPlot(div, traces, layout, Object.assign({scrollZoom: true}, CONFIG))).then(() => watch(div, g, r));
}

function laneEnds(lanes, lane) {
  const ends = new Array(lanes + 1).fill(0);
  for (const l of lane) ends[l + 1]++;
  for (let i = 0; i < lanes; i++) ends[i + 1] += ends[i];
  return ends;
}

function watch(div, g, r) {
  const tip = document.getElementById("tip"), ends = laneEnds(g.lanes.length, r.lane);
  const units = [["s", 1], ["ms", 1e3], ["us", 1e6]], per = g.unit === "s" ? 1 : g.unit === "ms" ? 1e3 : 1e6;
  function time(value) {
    const seconds = value / per, unit = units.find(u => Math.abs(seconds) * u[1] >= 1) || units[2];
    return Number((seconds * unit[1]).toPrecision(5)) + " " + unit[0];
  }
  function find(lane, t, reach) {
    let low = ends[lane], high = ends[lane + 1];
    while (low < high) { const mid = (low + high) >> 1; if (r.start[mid] <= t) low = mid + 1; else high = mid; }
    const before = low - 1;
    if (before >= ends[lane] && t <= r.start[before] + r.length[before] + reach) return before;
    return low < ends[lane + 1] && r.start[low] - t <= reach ? low : -1;
  }
  function text(x, y, reach) {
    const lane = g.lanes.findIndex(l => y >= l[0] && y <= l[1]);
    if (lane < 0 || x < 0 || x > g.step) return null;
    const i = find(lane, x, reach);
    if (i < 0) return g.lanes[lane][2] + "\nwaiting at " + time(x);
    const lines = [(g.label[i] ? g.label[i] + "   " : "") + g.kinds[r.kind[i]][0], g.lanes[lane][2],
      "start " + time(r.start[i]) + ", lasts " + time(r.length[i])];
    if (r.length[i] - r.busy[i] > 1e-4 * r.length[i]) lines.push("of which busy " + time(r.busy[i]));
    let priced = 0;
    for (const term of g.tables[r.terms[i]]) {
      priced += term[1];
      lines.push("  " + term[0].replace(/_/g, " ") + " " + time(term[1]));
    }
    if (priced > 0 && r.busy[i] - priced > 1e-4 * priced) lines.push("  slowed by others " + time(r.busy[i] - priced));
    return lines.join("\n");
  }
  div.addEventListener("mousemove", e => {
    const full = div._fullLayout, box = div.getBoundingClientRect();
    const x = full.xaxis.p2d(e.clientX - box.left - full.xaxis._offset);
    const y = full.yaxis.p2d(e.clientY - box.top - full.yaxis._offset);
    const reach = Math.abs(full.xaxis.p2d(2) - full.xaxis.p2d(0));
    const inside = x >= full.xaxis.range[0] && x <= full.xaxis.range[1];
    const found = inside ? text(x, y, reach) : null;
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    tip.textContent = found;
    tip.style.left = Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(e.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  div.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  window.ganttText = text;
}

async function read(element) {
  const bytes = Uint8Array.from(atob(element.textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

(async () => {
  if (!window.Plotly) {
    const note = "The figures need plotly.js, which this page loads from cdn.plot.ly. Without a network, write it with --offline.";
    for (const plot of document.querySelectorAll(".plot")) plot.replaceChildren(note);
    document.body.dataset.ready = "1";
    return;
  }
  const DATA = await read(document.getElementById("data"));
  if (DATA.gantt) await drawGantt(DATA.gantt);
  for (const figure of DATA.figures) await drawFigure(figure);
  const over = document.getElementById("memory-time");
  if (DATA.gantt && over) linked(document.getElementById("gantt"), over);
  document.body.dataset.ready = "1";
})().catch(e => { document.body.dataset.errors = (document.body.dataset.errors || "") + e.message + "\n"; throw e; });
"""
