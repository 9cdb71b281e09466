"""What a search found, in a terminal: best layouts, ties, reasons, progress."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from simpar.report.step_table import job_text
from simpar.report.tables import ByWidth, rich_table
from simpar.result.categories import largest_loss, title_of
from simpar.result.result import Result
from simpar.searching.answer import CANNOT_LAUNCH, Answer, Candidate
from simpar.searching.find import Watch
from simpar.searching.improve import Change, Improvements
from simpar.searching.runner_up import RunnerUp, Trade
from simpar.searching.why import Shortage, Why
from simpar.units import format_bytes, format_seconds

NARROW: Final = 100
WIDE: Final = 140
"""Columns from which layouts stand beside their numbers, and from which there is room for more numbers."""


def search_report(answer: Answer, reasons: list[Why]) -> RenderableType:
    """One screen."""
    parts: list[RenderableType] = [_job(answer), _certificate(answer)]
    if answer.candidates:
        parts.append(ByWidth(lambda width: _layouts(answer, width)))
        if answer.runner_up is not None:
            parts.append(_runner_up(answer.runner_up))
    parts.append(_rejected(answer))
    parts += [why_report(reason) for reason in reasons]
    return Group(*parts)


def _job(answer: Answer) -> Text:
    """What is searched for, in one line."""
    space = answer.found[0].space
    job = space.template
    sizes = " or ".join(f"{size:,}" for size in sorted({f.space.template.world_size for f in answer.found}))
    return Text(f"{job.model.name} on {sizes} x {space.hardware.gpu.name}: {job_text(job)}", style="bold underline")


def proof(gap: float | None, *, finished: bool, found: bool) -> str:
    """What is proven, in words."""
    if not found:
        return "no layout will do" if finished else "nothing found yet"
    if finished:
        return "proven best" if not gap else f"nothing is more than {gap:.1%} faster"
    return "interrupted before anything is proven" if gap is None else f"interrupted; at most {gap:.2%} from the best"


def _certificate(answer: Answer) -> Text:
    evaluated = answer.counts("evaluated")
    evaluation = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in evaluated.items())
    seconds = sum(f.seconds for f in answer.found)
    text = proof(answer.gap, finished=answer.finished, found=bool(answer.candidates))
    if answer.seen and answer.searched and answer.candidates:
        text += ", with the scenario's effects"
    elif answer.seen:
        near = "" if answer.gap is None else f"; nothing else is more than {answer.gap:.1%} faster"
        text = f"the best of {answer.seen} simulated with the scenario's effects{near}"
    if answer.wish.front and answer.candidates and answer.finished:
        text = f"the front over {', '.join(answer.wish.front)}, {len(answer.candidates)} layouts"
    return Text(f"{answer.size:,} layouts in {seconds:.1f} s: {text}" + (f" [{evaluation}]" if evaluation else ""), style="bold")


def _value(c: Candidate, name: str) -> str:
    value = c.metrics[name]
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith("time_s"):
        return format_seconds(value)
    return f"{value:,.4g}"


def _layouts(answer: Answer, width: int) -> RenderableType:
    """The designs: below 100 columns each on a line of its own under its numbers, from 140 on with more numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if width >= WIDE else 1, 0, 0))
    shown = {"step_time_s", "peak_memory_bytes", "mfu"}
    extra = [n for n in (*answer.wish.front, *([] if answer.wish.front else [answer.wish.metric])) if n not in shown]
    extra += ["num_gpus"] if len({f.space.template.world_size for f in answer.found}) > 1 and "num_gpus" not in extra else []
    chances = any(c.best_probability is not None for c in answer.candidates)
    heads = ["", "step", "expected", *(["best"] if chances else []), "fits", "MFU", "memory"]
    heads += [n.removesuffix("_bytes") for n in extra]
    heads += ["80 %", "bubble", "measured", "largest loss"] if width >= WIDE else []
    for name in heads:
        table.add_column(name, justify="right" if name not in ("", "largest loss") else "left", no_wrap=True)
    if width >= NARROW:
        table.add_column("design", overflow="fold")
    lines: list[RenderableType] = []
    for number, c in enumerate(answer.candidates, start=1):
        r, i = c.result, c.result.step_interval
        cells = [f"{number}{'*' if number - 1 in answer.try_these else ''}", format_seconds(r.step_time_s),
                 format_seconds(c.expected_step_time_s), *([_percent(c.best_probability)] if chances else []),
                 _percent(c.fit_probability), f"{r.mfu:.1%}", format_bytes(r.worst_rank.device_bytes),
                 *(_value(c, n) for n in extra)]  # fmt: skip
        if width >= WIDE:
            interval = f"{i.low / r.step_time_s - 1:+.0%} {i.high / r.step_time_s - 1:+.0%}"
            runs = "" if c.measured is None else str(c.measured) if c.measured else "never"
            cells += [interval, f"{r.bubble_fraction:.1%}", runs, _largest_loss(r)]
        table.add_row(*cells, *([c.design] if width >= NARROW else []))
        lines.append(Text(f"{number:>2}  {c.design}"))
    parts: list[RenderableType] = [table] if width >= NARROW else [table, Text(""), *lines]
    traded = [(n, c.trade) for n, c in enumerate(answer.candidates, start=1) if c.trade is not None and not answer.wish.front]
    step_s = answer.candidates[0].result.step_time_s
    parts += [Text(f"{number:>2} {trade_text(found, step_s)}", style="dim") for number, found in traded]
    return Group(*parts, *_advice(answer))


def trade_text(found: Trade, step_s: float) -> str:
    """Why a design is not the first, in one line: what takes how much of the first one's step more or less, and the memory."""
    reasons = ", ".join(f"{title_of(n)} {more / step_s:+.1%}" for n, more in found.by_category_s.items())
    memory = ("-" if found.peak_memory_bytes < 0 else "+") + format_bytes(abs(found.peak_memory_bytes))
    return f"{found.step_time_s / step_s:+.1%}: {reasons or 'the same parts'}; memory {memory}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _advice(answer: Answer) -> list[Text]:
    """What to try, the whole layout of the first, what is free in it, what nobody has measured."""
    first = answer.candidates[0]
    found = []
    if first.best_probability is not None and len(answer.candidates) > 1:
        numbers = ", ".join(str(n + 1) for n in answer.try_these)
        what = "it is" if len(answer.try_these) == 1 else "one of these is"
        found.append(Text(f"* Try {numbers}: {what} the best of these designs, or within 1 % of it, with 90 %", style="bold"))
    found.append(Text(f"1 is {first.scored.choice}"))
    if first.free:
        free = "; ".join(f"{axis} {', '.join(map(_short, values))}" for axis, values in first.free.items())
        found.append(Text(f"Free in it, each by itself (less than 1 %): {free}", style="dim"))
    unfit = [f.space.recipe for f in answer.found if f.space.recipe and f.finished and not f.best]
    found += [Text(f"Do not fit, whatever else is chosen: {'; '.join(unfit)}", style="dim")] if unfit else []
    if first.measured == 0:
        found.append(Text("No measured run of the evidence has this combination.", style="yellow"))
    return found


def _short(value: object) -> str:
    return {"True": "on", "False": "off", "None": "default"}.get(str(value), str(value))


def _largest_loss(result: Result) -> str:
    """What takes most of the step beside products, with its share."""
    name = largest_loss(result.breakdown)
    return f"{title_of(name)} {result.breakdown[name] / result.step_time_s:.0%}" if name else ""


def _runner_up(other: RunnerUp) -> Text:
    changes = ", ".join(f"{axis} {a} -> {b}" for axis, (a, b) in other.differs_in.items())
    text = f"Next design{'' if other.proven else ' found'}: {other.slower_by:+.2%} with {changes}"
    if other.slower_by <= 0.0:
        text += "; the winner is preferred for another reason than its step time"
    if other.would_win_if:
        text += "; it would win if " + " or ".join(turn(name, f) for name, f in other.would_win_if.items())
    return Text(text)


def turn(name: str, factor: float) -> str:
    """A turning point in words."""
    return f"{title_of(name)} took {factor:.2f} x as long"


def _rejected(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    for reason, count in answer.counts("rejected").items():
        told = f": {answer.refused[0]}" if reason == CANNOT_LAUNCH else ""
        table.add_row(f"{count:,}", reason + told)
    return table


def why_report(reason: Why) -> RenderableType:
    """Why not that layout."""
    title = Text(f"Why not {reason.asked}?" if reason.asked else "Why nothing will do", style="bold")
    if reason.size == 0:
        return Group(title, Text("It is not in the space: " + ("; ".join(reason.broken) or "no such combination")))
    if reason.scored is None and not reason.finished:
        return Group(title, Text(f"Nothing of its {reason.size:,} layouts was simulated yet."))
    if reason.scored is None:
        return Group(title, Text(f"None of its {reason.size:,} layouts fits the memory."), *_shortage(reason.shortage))
    slower = "" if reason.slower_by is None else f", {reason.slower_by:+.2%}"
    what = "fastest" if reason.missed else "best"
    best = Text(f"Its {what} is {reason.scored.choice}: {format_seconds(reason.scored.step_time_s)}{slower}")
    missed = [Text(f"It misses {text}") for text in reason.missed]
    seconds = [(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}") for name, a, b in reason.waterfall]
    table = rich_table("", ("seconds", "best", "asked", "difference"), seconds)
    turns = " or ".join(turn(n, f) for n, f in (reason.would_win_if or {}).items())
    rest = [table] if reason.waterfall else []
    return Group(title, best, *missed, *rest, *([Text(f"It would win if {turns}")] if turns else []))


def _shortage(found: Shortage | None) -> list[Text]:
    if found is None:
        return []
    parts = sorted(found.by_category.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{name.replace('_', ' ')} {format_bytes(value)}" for name, value in parts if value >= 0.5 * 2**20)
    need = f"{format_bytes(found.needed_bytes)} of {format_bytes(found.device_bytes)}"
    return [Text(f"The one that needs least, {found.choice}, needs {need}:"), Text(text)]


def improve_report(found: Improvements) -> RenderableType:
    """Today's layout and the changes."""
    today = found.today
    memory = format_bytes(today.worst_rank.device_bytes)
    fits = "" if today.fits else f", DOES NOT FIT {format_bytes(today.device_memory_bytes)}"
    head = Text(f"Today: {found.choice}: {format_seconds(today.step_time_s)}, MFU {today.mfu:.1%}, {memory}", style="bold")
    head.append(fits, style="bold red")
    return Group(head, _changes("One change", found, found.singles), _changes("Two changes", found, found.doubles))


def _changes(title: str, found: Improvements, changes: tuple[Change, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    if not changes:
        table.add_row("", "none makes it faster" if found.today.fits else "none makes it fit")
        return table
    for side in ("right", "right", "right", "left"):
        table.add_column(justify="right" if side == "right" else "left")
    for change in changes:
        what = ", ".join(f"{axis} {a} -> {b}" for axis, (a, b) in change.axes.items())
        more = f"{'+' if change.memory_bytes >= 0 else '-'}{format_bytes(abs(change.memory_bytes))}"
        # A longer step is only proposed where today's layout does not fit.
        table.add_row(f"{change.gain:+.2%}", format_seconds(change.scored.step_time_s), more, what)
    return table


def stored_report(document: dict[str, Any]) -> RenderableType:
    """An answer read back from a store."""
    text = proof(document["optimality_gap"], finished=document["finished"], found=bool(document["best"]))
    lines = [Text(f"{document['space_size']:,} layouts, answered from the store: {text}", style="bold")]
    for number, layout in enumerate(document["best"], start=1):
        mark = "*" if number - 1 in document["try_these"] else " "
        memory = format_bytes(layout["peak_memory_bytes"]["device"])
        step = format_seconds(layout["step_time_s"])
        lines.append(Text(f"{number}{mark} {step}  MFU {layout['mfu']:.1%}  {memory}  {layout['design']}"))
    lines += [Text(f"{count:,} {reason}") for reason, count in document["rejected"].items()]
    lines += [Text(f"Why not {w['asked']}? {_stored_why(w)}") for w in document["why"]]
    return Group(*lines)


def _stored_why(reason: dict[str, Any]) -> str:
    if reason["best"] is not None:
        slower = "" if reason["slower_by"] is None else f", {reason['slower_by']:+.2%}"
        return f"{reason['best']['text']}: {format_seconds(reason['best']['step_time_s'])}{slower}"
    if reason["shortage"] is not None:
        need, device = reason["shortage"]["needed_bytes"], reason["shortage"]["device_memory_bytes"]
        return f"needs at least {format_bytes(need)} of {format_bytes(device)}"
    return "; ".join(reason["broken_rules"]) or "not in the space"


class ProgressLine:
    """The incumbent and the gap: a line that renews itself on a terminal, else one line every half minute."""

    EVERY_S = 30.0

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._said = 0.0

    def __call__(self, watch: Watch | None) -> None:
        """Show where the search stands; None: it is over."""
        if watch is None:
            if self._live is not None:
                self._live.stop()
                self._live = None
        elif self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, transient=True, refresh_per_second=4)
                self._live.start()
            self._live.update(Text(progress_text(watch), overflow="ellipsis", no_wrap=True))
        elif watch.seconds - self._said >= self.EVERY_S:
            self._said = watch.seconds
            self._console.print(progress_text(watch), highlight=False, soft_wrap=True)


def progress_text(watch: Watch) -> str:
    """Where a search stands, on one line."""
    # The layout is last: a narrow terminal cuts the line.
    chance = "" if (likely := watch.chance()) is None else f" (P(best) {likely:.0%})"
    best = "nothing found yet" if watch.best is None else f"{format_seconds(watch.best.step_time_s)}{chance} {watch.best.choice}"
    gap = "" if watch.gap is None else f"gap {watch.gap:.2%}, "
    return f"{watch.seconds:.0f} s, {gap}part {watch.done}/{watch.parts}, {watch.simulated} simulated, best {best}"


class Steps:
    """A bar over things that are done one after the other, on a terminal."""

    def __init__(self, what: str, quiet: bool = False) -> None:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
        self._task = self._progress.add_task(what, total=None)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        """So many of so many."""
        self._progress.update(self._task, completed=done, total=total)


def say(text: str) -> None:
    """A line beside the answer, on standard error."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


def show(view: RenderableType) -> None:
    """Print to the terminal."""
    Console().print(view, highlight=False)
