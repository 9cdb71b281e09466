// The figures of the lessons: data of every choice stands in the page; a choice shows its step beside the one before.
(() => {
  const colour = { F: ["#19537d", "#799bb3"], B: ["#f1b214", "#f7d277"], I: ["#ff3000", "#ff876b"], W: ["#3ebe85", "#8fd9b8"], O: ["#606060", "#606060"] };
  const words = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", O: "optimizer" };
  const shades = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8c6d46", "#606060", "#b0b0b0"];
  const make = (tag, className, text) => { const e = document.createElement(tag); if (className) e.className = className; if (text !== undefined) e.textContent = text; return e; };
  const seconds = s => s >= 1 ? s.toPrecision(4) + " s" : (1e3 * s).toPrecision(3) + " ms";
  const names = []; // one colour for one kind of memory, in every figure
  const shade = name => { if (!names.includes(name)) names.push(name); return shades[names.indexOf(name) % shades.length]; };

  function bars(parts, total) {
    const list = make("ul", "lesson-bars"); let at = 0;
    for (const [name, s] of parts) {
      const row = make("li"), bar = make("span", "bar"), fill = make("i");
      fill.style.left = 100 * at / total + "%"; fill.style.width = Math.max(100 * s / total, 0.3) + "%"; at += s;
      bar.append(fill); row.append(make("span", "", name), bar, make("span", "number", seconds(s))); list.append(row);
    }
    return list;
  }
  function memory(step, most) {
    const all = make("div", "lesson-memory"), bar = make("div", "bar"), key = make("ul", "lesson-key");
    for (const [name, gib] of step.memory) {
      const fill = make("i"); fill.style.width = 100 * gib / most + "%"; fill.style.background = shade(name); fill.title = `${name}: ${gib.toFixed(2)} GiB`; bar.append(fill);
      const item = make("li"), box = make("i"); box.style.background = shade(name); item.append(box, `${name} ${gib.toFixed(1)} GiB`); key.append(item);
    }
    const line = make("b"); line.style.left = 100 * step.of / most + "%"; line.title = `the GPU has ${step.of.toFixed(1)} GiB`; bar.append(line);
    all.append(bar, key); return all;
  }
  function pipeline(step) {
    const all = make("div", "lesson-pipeline"), used = new Set(), svgns = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(svgns, "svg"), high = 20, gap = 4;
    svg.setAttribute("viewBox", `0 0 1000 ${step.ranks.length * (high + gap)}`); svg.setAttribute("preserveAspectRatio", "none"); svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `Timeline of ${step.ranks.length} pipeline ranks over ${seconds(step.s)}`);
    svg.style.width = "100%"; svg.style.height = step.ranks.length * (high + gap) + "px";
    step.ranks.forEach((row, r) => {
      const rect = (x, w, fill) => { const e = document.createElementNS(svgns, "rect"); e.setAttribute("x", x); e.setAttribute("width", Math.max(w, 0.3)); e.setAttribute("y", r * (high + gap)); e.setAttribute("height", high); e.setAttribute("fill", fill); svg.append(e); };
      rect(0, 1000, "var(--lesson-idle)");
      for (const [phase, odd, from, to] of row) { used.add(phase); rect(from, to - from, colour[phase][odd]); }
    });
    const key = make("ul", "lesson-key");
    for (const phase of Object.keys(words).filter(p => used.has(p))) { const item = make("li"), box = make("i"); box.style.background = colour[phase][0]; item.append(box, words[phase]); key.append(item); }
    const item = make("li"), box = make("i"); box.style.background = "var(--lesson-idle)"; item.append(box, "waiting"); key.append(item);
    all.append(svg, key); return all;
  }
  function show(root, data, before) {
    const at = data.sizes.map((_, i) => Number(root.querySelector(`input[data-choice="${i}"]:checked`).value));
    const step = data.steps[at.reduce((index, value, i) => index * data.sizes[i] + value, 0)], shown = root.querySelector(".lesson-shown");
    shown.replaceChildren();
    if (step.wrong) { shown.append(make("p", "lesson-verdict bad", "This cannot run: " + step.wrong)); return before; }
    const fits = step.fits ? "fits" : "does not fit";
    const verdict = make("p", "lesson-verdict" + (step.fits ? "" : " bad"), `${seconds(step.s)} a step, MFU ${(100 * step.mfu).toFixed(1)} %; ${step.gib.toFixed(1)} of ${step.of.toFixed(1)} GiB: ${fits}`);
    shown.append(verdict);
    if (before && before !== step) {
      const time = step.s / before.s - 1, gib = step.gib - before.gib;
      const faster = Math.abs(time) < 5e-4 ? "As fast" : `${Math.abs(100 * time).toFixed(1)} % ${time < 0 ? "faster" : "slower"}`;
      const less = Math.abs(gib) < 0.05 ? "the same memory" : `${Math.abs(gib).toFixed(1)} GiB ${gib < 0 ? "less" : "more"}`;
      shown.append(make("p", "lesson-change", `${faster} than the choice before, ${less}.`));
    }
    const runs = data.steps.filter(s => !s.wrong);
    if (step.ranks) shown.append(make("h4", "", `The pipeline: ${(100 * step.bubble).toFixed(0)} % bubble`), pipeline(step));
    if (step.parts) shown.append(make("h4", "", "Where the step goes"), bars(step.parts, Math.max(...runs.map(s => s.s))));
    if (step.memory) shown.append(make("h4", "", "Memory of the fullest GPU; the line is what it has"), memory(step, 1.02 * Math.max(...runs.map(s => Math.max(s.gib, s.of)))));
    return step;
  }
  const start = () => document.querySelectorAll(".lesson").forEach((root, number) => {
    const data = JSON.parse(root.querySelector("script").textContent);
    for (const input of root.querySelectorAll("input")) input.name = `lesson-${number}-${input.dataset.choice}`;
    data.first.forEach((value, i) => { root.querySelector(`input[data-choice="${i}"][value="${value}"]`).checked = true; });
    let before = show(root, data, null);
    root.addEventListener("change", () => { before = show(root, data, before); });
  });
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
