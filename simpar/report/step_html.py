"""`simpar simulate --html`: one step as one self-contained page."""

from __future__ import annotations

from html import escape

from simpar.report import layout_plot, memory_plot, step_figures
from simpar.report.gantt import gantt
from simpar.report.page import Cards, plot, tiles
from simpar.report.step_table import advice, format_metric, parts_table, unit_of
from simpar.report.tables import Table
from simpar.result.published import IN_SAMPLE
from simpar.result.result import MFU_DEFINITION, Result
from simpar.units import format_bytes, format_seconds

_TENSORS = 20
"""Names of tensors in the page."""
_ROW, _FEW_ROWS, _LARGEST = (42, 96), 560, 1150
"""Pixels of the Gantt: a row at least and at most, all rows where they are few, everything."""


def step_page(result: Result) -> str:
    """The page as HTML text."""
    chart = gantt(result)
    ranks = max(len(chart["roles"]), 1)
    height = min(130 + ranks * min(max(_ROW[0], _FEW_ROWS // ranks), _ROW[1]), _LARGEST)
    cards = Cards(_head(result))
    cards.add("Pipeline: what every rank does, and when", plot({"id": "gantt", "height": height, "notes": chart["notes"]}),
              note="Drag to zoom, double-click to see the whole step, point at an op for its terms. Shades of a colour "
                   "alternate by micro-batch.")  # fmt: skip
    cards.draw("Where the step goes", step_figures.waterfall(result), "half", advice(result))
    cards.draw("Communication: running and exposed", step_figures.communication(result), "half")
    cards.draw("Memory over the step", memory_plot.over_time(result), "half")
    cards.draw("Memory by pipeline rank", memory_plot.by_rank(result), "half")
    if layout_plot.is_regular(result):
        heads = ("groups", "ranks", "nodes touched", "widest layer crossed")
        places = Table(heads, layout_plot.placements(result), (1, 2))
        cards.draw("Layout on the machine", layout_plot.layout_figure(result), "half", below=places.html() if places.rows else "")
    cards.draw("Every node of the job, pod by pod", layout_plot.fleet(result))
    low, high = result.step_interval.low, result.step_interval.high
    text = f"80 %: {format_seconds(low)} to {format_seconds(high)}. The categories whose constants widen it most:"
    cards.draw("How sure the step time is", step_figures.interval(result), "half", text)
    cards.tabulate("Who does what", parts_table(result), "half")
    worst = result.worst_rank
    title = f"Peak of pipeline rank {worst.rank}, the fullest, at {format_seconds(worst.peak_time_s)}"
    cards.tabulate(title, _peak(result), "half")
    note = "Beside weights and states. Held for: from the pass that makes one to the end of the pass that uses it last, on average."
    cards.tabulate(f"Tensors alive at the peak of pipeline rank {worst.rank}", _tensors(result), "half", note)
    cards.tabulate("Categories and how their prices are known", _provenance(result), "half")
    cards.tabulate("What is published about it", _published(result))
    weak = [k for k, v in result.provenance.items() if v == "assumed"]
    assumed = [f"Assumed, without a source: {', '.join(weak)}."] if weak else []
    cards.tell("Notes", [f"MFU counts {MFU_DEFINITION}.", *result.notes, *assumed])
    return cards.html(result.layout.scenario.name, chart)


def _head(result: Result) -> str:
    """Name, layout and headline numbers."""
    layout, plan, mesh = result.layout, result.layout.plan, result.layout.mesh
    unit = unit_of(result)
    low, high = result.step_interval.low, result.step_interval.high
    worst = result.worst_rank
    tp = "/".join(map(str, plan.stage_tp or (plan.tp,)))
    degrees = [f"tp {tp}", f"cp {plan.cp}", f"pp {plan.pp}", f"dp {mesh.dp}"]
    degrees += [f"virtual stages {plan.virtual_stages}"] if plan.virtual_stages > 1 else []
    degrees += [f"ep {plan.ep}"] if plan.ep > 1 else []
    degrees += [f"ZeRO {plan.zero_stage}", result.schedule_name, f"{layout.num_microbatches} micro-batches"]
    shown = [
        ("step time", format_seconds(result.step_time_s), f"80 %: {format_seconds(low)} to {format_seconds(high)}", ""),
        (f"{unit}/s per GPU", f"{result.tokens_per_s_per_gpu:,.1f}", f"{result.tokens_per_s:,.0f} {unit}/s in all", ""),
        ("MFU", f"{result.mfu:.1%}", f"non-causal {result.mfu_non_causal:.1%}, HFU {result.hfu:.1%}", ""),
        ("model FLOP/s per GPU", f"{result.model_flops_per_s_per_gpu / 1e12:,.1f} TFLOP/s",
         f"of {result.peak_flops_per_s / 1e12:,.0f} at peak", ""),
        ("pipeline bubble", f"{result.bubble_fraction:.1%}", "of the pipeline phase", ""),
        ("peak memory " + ("(fits)" if result.fits else "(DOES NOT FIT)"), format_bytes(worst.device_bytes),
         f"of {format_bytes(result.device_memory_bytes)}, rank {worst.rank}", "good" if result.fits else "bad"),
    ]  # fmt: skip
    if result.repetitions is not None:
        draws = result.repetitions
        text = f"p90 {format_seconds(draws.p90)}, p99 {format_seconds(draws.p99)}"
        shown.insert(1, (f"step over {len(draws.makespans_s)} draws, p50", format_seconds(draws.p50), text, ""))
    text = f"{result.world_size:,} x {layout.hardware.gpu.name} ({layout.hardware.name}): {', '.join(degrees)}"
    about = layout.scenario.description
    described = f"<p class=soft>{escape(about)}</p>" if about else ""
    return f"<h1>{escape(layout.scenario.name)}</h1><p>{escape(text)}</p>{described}{tiles(shown)}"


def _peak(result: Result) -> Table:
    """What fills the fullest rank, largest first."""
    worst = result.worst_rank
    parts = sorted(memory_plot.device_parts(worst).items(), key=lambda item: -item[1])
    total = worst.device_bytes
    rows = [(name.replace("_", " "), format_bytes(v), f"{v / total:.1%}" if total else "") for name, v in parts]
    rows.append(("device", format_bytes(total), f"{total / result.device_memory_bytes:.1%} of the device"))
    return Table(("", "bytes", "share"), rows, (1, 2))


def _tensors(result: Result) -> Table:
    """Tensors that come and go and are alive at the peak of the fullest rank, by name."""
    rows = [
        (row["tensor"], str(row["count"]), format_bytes(row["bytes"]), format_seconds(row["mean_life_s"]))
        for row in result.tensors_at_peak()[:_TENSORS]
    ]
    return Table(("tensor", "alive", "bytes", "held for"), rows, (1, 2, 3))


def _provenance(result: Result) -> Table:
    """Every category of the step: seconds, share, and how its prices are known."""
    step = result.step_time_s
    widths = dict(result.step_interval.dominated_by)
    rows = []
    used = {name for name, seconds in result.breakdown.items() if seconds} | result.provenance.keys()
    for name in sorted(used, key=lambda n: (-result.breakdown.get(n, 0.0), n)):
        seconds = result.breakdown.get(name, 0.0)
        half = f"± {format_seconds(widths[name])}" if name in widths else ""
        rows.append((name.replace("_", " "), result.provenance.get(name, "timeline"), format_seconds(seconds),
                     f"{seconds / step:.1%}" if step else "", half))  # fmt: skip
    heads = ("category", "price is", "mean per step", "share", "80 % half-width")
    return Table(heads, rows, (2, 3, 4))


def _published(result: Result) -> Table:
    """Published facts of the scenario beside the prediction."""
    rows = [
        (fact.metric.replace("_", " "), format_metric(fact.metric, fact.published),
         "" if fact.predicted is None else format_metric(fact.metric, fact.predicted),
         "" if fact.error is None else f"{fact.error:+.1%}",
         IN_SAMPLE if fact.fitted and fact.error is not None else "", fact.source)
        for fact in result.published
    ]  # fmt: skip
    heads = ("metric", "published", "predicted", "difference", "", "source")
    return Table(heads, rows, (1, 2, 3))
