"""One screen about one step: rich tables of throughput, waterfall, memory."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from simpar.report.tables import ByWidth, Table, rich_table
from simpar.report.terms import terms_in
from simpar.result.published import IN_SAMPLE
from simpar.result.result import MFU_DEFINITION, Result
from simpar.specs.architecture import TokenModel
from simpar.specs.scenario import Scenario
from simpar.units import format_bytes, format_seconds

_BAR = 28
_BESIDE_BAR = 52
"""Columns that names and numbers of the waterfall take."""


def unit_of(result: Result) -> str:
    """What a result counts its throughput in."""
    return "tokens" if isinstance(result.layout.scenario.model, TokenModel) else "samples"


def job_text(scenario: Scenario) -> str:
    """What is trained in a step, and by what: "batch 64 of 8,192 tokens, bf16, megatron-core 0.12"."""
    training = scenario.training
    samples = f" of {training.sequence_length:,} tokens" if isinstance(scenario.model, TokenModel) else ""
    return ", ".join((f"batch {training.global_batch_size:,}{samples}", training.precision,
                      f"{scenario.framework} {scenario.framework_version or ''}".rstrip()))  # fmt: skip


def _per_microbatch(result: Result) -> str:
    """What a micro-batch holds and what its backward computes again."""
    recompute = result.layout.plan.recompute
    kind = "no" if recompute == "none" else recompute
    return f"micro-batch {result.layout.scenario.training.micro_batch_size}, {kind} recomputation"


def _headline(result: Result) -> RichTable:
    table = RichTable(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    interval = result.step_interval
    plan, mesh = result.layout.plan, result.layout.mesh
    tp = "/".join(map(str, plan.stage_tp or (plan.tp,)))
    degrees = [f"tp {tp}", f"cp {plan.cp}", f"pp {plan.pp}", f"dp {mesh.dp}"]
    if plan.virtual_stages > 1:
        degrees.insert(3, f"v {plan.virtual_stages}")
    if plan.ep > 1:
        degrees.append(f"ep {plan.ep}")
    rows = [
        ("job", f"{job_text(result.layout.scenario)}; {_per_microbatch(result)}"),
        ("layout", f"{result.world_size:,} x {result.layout.hardware.gpu.name}: {', '.join(degrees)}, ZeRO {plan.zero_stage}, "
                   f"{result.schedule_name}, {result.layout.num_microbatches} micro-batches"),
        ("step time", f"{format_seconds(result.step_time_s)}  (80 %: {format_seconds(interval.low)} to "
                      f"{format_seconds(interval.high)}; widest: {', '.join(n for n, _ in interval.dominated_by[:3])})"),
        ("throughput", f"{result.tokens_per_s:,.0f} {unit_of(result)}/s, {result.tokens_per_s_per_gpu:,.1f} per GPU"),
        ("model FLOPs", f"{result.model_flops_per_s_per_gpu / 1e12:,.1f} TFLOP/s per GPU, MFU {result.mfu:.1%} "
                        f"(non-causal {result.mfu_non_causal:.1%}, HFU {result.hfu:.1%})"),
        ("bubble", f"{result.bubble_fraction:.1%} of the pipeline phase"),
    ]  # fmt: skip
    if result.repetitions is not None:
        r = result.repetitions
        times = ", ".join(f"{n} {format_seconds(v)}" for n, v in (("p50", r.p50), ("p90", r.p90), ("p99", r.p99)))
        rows.append((f"over {len(r.makespans_s)} draws", times))
    for name, text in rows:
        table.add_row(Text(name, style="bold"), text)
    return table


def waterfall_table(result: Result, bar: int = _BAR) -> RichTable:
    table = RichTable(title="Where the step goes (mean over pipeline ranks)", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    for name, seconds in result.waterfall():
        share = seconds / result.step_time_s if result.step_time_s else 0.0
        blocks = "█" * max(round(share * bar), 0)
        table.add_row(name, f"{seconds:.4g}", f"{share:.1%}", blocks)
    table.add_row("step", f"{result.step_time_s:.4g}", "100 %", "", style="bold")
    return table


def parts_table(result: Result) -> Table:
    """A row for each part of a mixed cluster."""
    found: list[tuple[str, ...]] = []
    for part in result.parts():
        if "replicas" in part:
            holds = f"{part['replicas']} replicas of {part['num_microbatches']} micro-batches"
        else:
            ranks, layers = part["pipeline_ranks"], ", ".join(map(str, part["layers_per_stage"]))
            which = f"ranks {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"rank {ranks[0]}"
            holds = f"pipeline {which}: {layers} layers"
        full = "" if part["fits"] else ": DOES NOT FIT"
        memory = f"{format_bytes(part['device_bytes'])} of {format_bytes(part['device_memory_bytes'])}{full}"
        found.append((f"{part['num_gpus']:,} x {part['gpu']}", holds, format_seconds(part["busy_s"]), memory))
    return Table(("part", "holds", "computes", "fullest rank"), found)


def _parts(result: Result) -> list[RenderableType]:
    table = parts_table(result)
    return [table.rich("Who does what"), Text("")] if table.rows else []


def _memory(result: Result) -> RichTable:
    worst = result.worst_rank
    verdict = "fits" if result.fits else "DOES NOT FIT"
    table = RichTable(
        title=f"Memory of pipeline rank {worst.rank}, the fullest ({verdict}; peak at {format_seconds(worst.peak_time_s)})",
        title_justify="left", title_style="italic" if result.fits else "bold red", box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    table.add_column("bytes", justify="right")
    parts = worst.at_peak
    model = [(k, parts.get(k, 0.0)) for k in ("parameters", "gradients", "optimizer")]
    rest = sorted(((k, v) for k, v in parts.items() if k not in dict(model)), key=lambda x: -x[1])
    table.add_row("parameters + gradients + optimizer", " + ".join(format_bytes(v) for _, v in model))
    for name, amount in rest[:3]:
        table.add_row(name.replace("_", " "), format_bytes(amount))
    table.add_row("allocated / reserved", f"{format_bytes(worst.allocated_bytes)} / {format_bytes(worst.reserved_bytes)}")
    table.add_row("context + NCCL", format_bytes(sum(v for _, v in worst.outside)))
    style = "bold" if result.fits else "bold red"
    table.add_row("device", f"{format_bytes(worst.device_bytes)} of {format_bytes(result.device_memory_bytes)}", style=style)
    spread = sorted(result.memory, key=lambda m: m.device_bytes)
    if len(spread) > 1:
        table.add_row("ranks, least to most", f"{format_bytes(spread[0].device_bytes)} to {format_bytes(spread[-1].device_bytes)}")
    return table


REMEDIES: Final = {
    "bubble": "more micro-batches, more virtual stages or a zero-bubble schedule shrink the pipeline bubble",
    "tp": "a smaller tp, sequence parallelism or overlapped tensor parallelism exposes less of its collectives",
    "dp": "larger micro-batch counts or overlapped gradient reduction hide more of the data-parallel traffic",
    "skew": "overlapped gradient reduction or an even split of parameters over stages shortens the last rank's reductions",
    "cp": "fewer context-parallel ranks or a ring expose less",
    "ep": "overlapping the expert exchange or a smaller ep hides more of it",
    "recompute": "recomputing less (where memory allows) saves these FLOPs",
    "pp": "asynchronous sends or fewer stages expose less of the pipeline traffic",
    "launch": "larger micro-batches, compilation or CUDA graphs remove launch gaps",
    "memory_bound": "fused kernels or fewer tensor-parallel ranks cut memory-bound time",
}
"""Loss that a plan can change -> what shrinks it."""


def advice(result: Result) -> str:
    """The largest loss that a plan can change, in one line."""
    name = max(REMEDIES, key=lambda k: result.breakdown.get(k, 0.0))
    share = result.breakdown.get(name, 0.0) / result.step_time_s if result.step_time_s else 0.0
    if not result.fits:
        parts = sorted(result.worst_rank.at_peak.items(), key=lambda x: -x[1])[:2]
        return "does not fit: largest are " + ", ".join(f"{k.replace('_', ' ')} {format_bytes(v)}" for k, v in parts)
    return f"would help most ({share:.1%} of the step): {REMEDIES[name]}" if share > 0.005 else "nothing stands out"


def _assumptions(result: Result) -> Text:
    weak = [f"{k}: {v}" for k, v in result.provenance.items() if v in ("assumed", "peak-scaled", "published")]
    text = f"MFU: {MFU_DEFINITION}."
    if weak:
        text += f"\nNot measured on this machine: {', '.join(weak)}."
    return Text(text, style="dim")


def step_report(result: Result) -> RenderableType:
    """Everything `simpar simulate` prints."""
    told = Text(advice(result), style="yellow" if result.fits else "bold red")
    waterfall = ByWidth(lambda width: waterfall_table(result, min(max(width - _BESIDE_BAR, 8), 3 * _BAR)))
    return Group(
        Text(result.layout.scenario.name, style="bold underline"), _headline(result), Text(""), waterfall, Text(""),
        *_parts(result), _memory(result), Text(""), told, _published(result), _assumptions(result),
        *(Text(f"note: {note}", style="yellow") for note in result.notes),
    )  # fmt: skip


def format_metric(metric: str, value: float) -> str:
    """A value for people, by what its name says of its unit."""
    if metric.endswith("flops_per_s_per_gpu"):
        return f"{value / 1e12:,.1f} TFLOP/s"
    if metric.endswith("time_s"):
        return format_seconds(value)
    if metric in ("mfu", "bubble_fraction"):
        return f"{value:.1%}"
    if metric.endswith(("bytes", "bytes_total", "bytes_per_rank")):
        return format_bytes(value)
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.6g}"


def _published(result: Result) -> RenderableType:
    lines = []
    for row in result.published:
        text = f"published {row.metric} {format_metric(row.metric, row.published)}"
        if row.predicted is not None and row.error is not None:
            text += f", predicted {format_metric(row.metric, row.predicted)} ({row.error:+.1%})"
            text += f", {IN_SAMPLE}" if row.fitted else ""
        lines.append(f"{text}  [{row.source}]")
    return Text("\n".join(lines), style="cyan")


def comparison(first: Result, second: Result) -> RenderableType:
    """Two results side by side: what differs in what was asked, then what came out."""
    mine, theirs = first.layout.scenario, second.layout.scenario
    names = (mine.name, theirs.name) if mine.name != theirs.name else (f"{mine.name} (first)", f"{theirs.name} (second)")
    asked = rich_table("What differs", ("", "first", "second"), differences(mine, theirs))
    table = rich_table("What comes out", ("", "unit", *names, "change"), texts=(0, 1))
    rows: list[tuple[str, str, float, float, str]] = [
        ("step time", "s", first.step_time_s, second.step_time_s, ".4g"),
        (f"{unit_of(first)}/s per GPU", "1/s", first.tokens_per_s_per_gpu, second.tokens_per_s_per_gpu, ",.1f"),
        ("MFU", "%", 100 * first.mfu, 100 * second.mfu, ".1f"),
        ("bubble", "%", 100 * first.bubble_fraction, 100 * second.bubble_fraction, ".1f"),
        ("device memory", "GiB", first.worst_rank.device_bytes / 2**30, second.worst_rank.device_bytes / 2**30, ".1f"),
    ]
    a, b = dict(first.waterfall()), dict(second.waterfall())
    rows += [(name, "s", a.get(name, 0.0), b.get(name, 0.0), ".4g") for name in {**a, **b}]
    for name, unit, before, after, form in rows:
        change = f"{after - before:+.1f} points" if unit == "%" else f"{after / before - 1:+.1%}" if before else ""
        table.add_row(name, unit, format(before, form), format(after, form), change)
    table.add_row("fits", "", *(Text("yes") if r.fits else Text("NO", style="bold red") for r in (first, second)), "")
    same = Text("Nothing differs in what was asked.") if not asked.row_count else asked
    return Group(same, Text(""), table)


def differences(first: Scenario, second: Scenario) -> list[tuple[str, str, str]]:
    """(field, value of the first, value of the second) of everything in two scenarios that decides the step and differs."""
    told = {"name", "description", "published", "file"}
    mine, theirs = (_flat(s.model_dump(mode="json", exclude=told)) for s in (first, second))
    named = mine.get("model.name"), theirs.get("model.name")
    fields = [f for f in {**mine, **theirs} if mine.get(f) != theirs.get(f)]
    if named[0] != named[1]:
        fields = ["model.name", *(f for f in fields if not f.startswith("model."))]
    return [(field, _said(mine.get(field)), _said(theirs.get(field))) for field in fields]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _said(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def show(renderable: RenderableType) -> None:
    """Print to the terminal."""
    Console().print(renderable)


def terms_report(report: RenderableType) -> RichTable:
    """What the words of a report mean."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report)
    table = RichTable(
        title="What the words mean", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False
    )
    for word, meaning in terms_in(captured.get()).items():
        table.add_row(Text(word, style="bold"), meaning)
    return table
