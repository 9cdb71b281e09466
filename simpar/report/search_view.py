"""What a search found, in a terminal: best layouts, ties, reasons, progress."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from simpar.search.answer import Answer
from simpar.search.find import Watch
from simpar.search.improve import Change, Improvements
from simpar.search.why import Why
from simpar.units import format_bytes, format_seconds

_CATEGORIES = {"bubble": "pipeline bubble", "tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel",
               "dp": "data parallel", "pp": "pipeline sends", "memory_bound": "memory-bound kernels", "launch": "launch gaps"}  # fmt: skip  # noqa: E501


def search_report(answer: Answer, reasons: list[Why]) -> RenderableType:
    """One screen."""
    parts: list[RenderableType] = [_certificate(answer)]
    if answer.candidates:
        parts.append(_layouts(answer))
        if answer.runner_up is not None:
            parts.append(_runner_up(answer.runner_up))
    parts.append(_rejected(answer))
    parts += [why_report(reason) for reason in reasons]
    return Group(*parts)


def _certificate(answer: Answer) -> Text:
    gap = answer.gap
    proof = "nothing found yet" if gap is None else "proven best" if gap == 0 else f"at most {gap:.2%} from the best"
    if not answer.candidates and answer.finished:
        proof = "no layout fits"
    evaluated = answer.counts("evaluated")
    tiers = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in evaluated.items())
    seconds = sum(f.seconds for f in answer.found)
    state = "" if answer.finished else " (interrupted)"
    return Text(f"{answer.size:,} layouts in {seconds:.1f} s{state}: {proof} [{tiers}]", style="bold")


def _layouts(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("", "left"), ("step", "right"), ("80 %", "right"), ("MFU", "right"), ("memory", "right"),
                       ("layout", "left")):  # fmt: skip
        table.add_column(name, justify=side, no_wrap=name != "layout", overflow="fold")  # type: ignore[arg-type]
    ties = sum(c.tied for c in answer.candidates)
    for number, c in enumerate(answer.candidates, start=1):
        r, i = c.result, c.result.step_interval
        half = (i.high - i.low) / 2.0 / r.step_time_s
        mark = "=" if c.tied and ties > 1 else ""
        table.add_row(
            f"{number}{mark}", format_seconds(r.step_time_s), f"±{half:.0%}", f"{r.mfu:.1%}", format_bytes(r.worst_rank.device_bytes),  # noqa: E501
            str(c.scored.choice),
        )  # fmt: skip
    if ties > 1:
        table.caption = "= differs from the best by less than the model can tell; of these the simplest comes first"
    return table


def _runner_up(other: dict[str, Any]) -> Text:
    changes = ", ".join(f"{axis} {a} -> {b}" for axis, (a, b) in other["differs_in"].items())
    text = f"Next design: {other['slower_by']:+.2%} with {changes}"
    if other["would_win_if"]:
        text += "; it would win if " + " or ".join(_turn(name, f) for name, f in other["would_win_if"].items())
    return Text(text)


def _turn(name: str, factor: float) -> str:
    return f"{_CATEGORIES.get(name, name.replace('_', ' '))} took {factor:.2f} x as long"


def _rejected(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for reason, count in answer.counts("rejected").items():
        table.add_row(f"{count:,}", reason)
    return table


def why_report(reason: Why) -> RenderableType:
    """Why not that layout."""
    title = Text(f"Why not {reason.asked}? ", style="bold")
    if reason.size == 0:
        return Group(title, Text("It is not in the space: " + ("; ".join(reason.broken) or "no such combination")))
    if reason.scored is None:
        causes = ", ".join(f"{count:,} {name}" for name, count in reason.account.rejected.items() if count)
        return Group(title, Text(f"None of its {reason.size:,} layouts will do: {causes}"))
    slower = "" if reason.slower_by is None else f", {reason.slower_by:+.2%}"
    best = Text(f"Its best is {reason.scored.choice}: {format_seconds(reason.scored.step_time_s)}{slower}")
    table = Table(box=None, pad_edge=False)
    for name in ("", "best", "asked", "difference"):
        table.add_column(name, justify="left" if not name else "right")
    for name, a, b in reason.waterfall:
        table.add_row(name, f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}")
    turns = " or ".join(_turn(n, f) for n, f in reason.would_win_if.items())
    return Group(title, best, table, Text(f"It would win if {turns}" if turns else ""))


def improve_report(found: Improvements) -> RenderableType:
    """Today's layout and the changes."""
    today = found.today
    fits = "" if today.fits else ", DOES NOT FIT"
    head = Text(f"Today: {found.choice}: {format_seconds(today.step_time_s)}, MFU {today.mfu:.1%}{fits}", style="bold")
    return Group(head, _changes("One change", found.singles), _changes("Two changes", found.doubles))


def _changes(title: str, changes: tuple[Change, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
    if not changes:
        table.add_row("", "none makes it faster")
    for change in changes:
        what = ", ".join(f"{axis} {a} -> {b}" for axis, (a, b) in change.axes.items())
        table.add_row(f"{change.gain:+.2%}", format_seconds(change.scored.step_time_s), format_bytes(change.scored.device_bytes), what)  # noqa: E501
    return table


def stored_report(document: dict[str, Any]) -> RenderableType:
    """An answer read back from a store."""
    lines = [Text(f"{document['space_size']:,} layouts, answered from the store: gap {document['optimality_gap']}", style="bold")]
    for number, layout in enumerate(document["best"], start=1):
        lines.append(Text(f"{number}  {format_seconds(layout['step_time_s'])}  MFU {layout['mfu']:.1%}  {layout['text']}"))
    return Group(*lines)


class ProgressLine:
    """The incumbent and the gap on one line of standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._last = 0.0

    def __call__(self, watch: Watch) -> None:
        if not self._console.is_terminal or watch.seconds - self._last < 0.3:
            return
        self._last = watch.seconds
        best = "nothing yet" if watch.best is None else f"{format_seconds(watch.best.step_time_s)} {watch.best.choice}"
        gap = "" if watch.gap is None else f"gap {watch.gap:.2%}, "
        text = f"{watch.seconds:5.1f} s  {gap}{watch.simulated} simulated, part {watch.done}/{watch.parts}: {best}"
        self._console.print(text[: self._console.width - 1].ljust(self._console.width - 1), end="\r", highlight=False)


def show(view: RenderableType) -> None:
    """Print to the terminal."""
    Console().print(view, highlight=False)


__all__ = ["ProgressLine", "improve_report", "search_report", "show", "stored_report", "why_report"]
