"""What the API returns for a step: numbers, tables, figures and files of one simulated step, or of two side by side."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from simpar.api.table import Cell, Shown, Table
from simpar.readings import Open, with_readings
from simpar.registry import unknown
from simpar.result.result import Result as StepResult
from simpar.specs.scenario import Scenario
from simpar.units import format_bytes, format_seconds

FIGURES: Final = ("waterfall", "memory", "memory_by_rank", "communication", "layout", "interval")
"""What `Result.figure` draws."""


@dataclass(frozen=True, slots=True, repr=False)
class Result(Shown):
    """One simulated step. Numbers are SI; names are those of `simpar simulate --json`.

    Attributes:
        details: the internal result: timeline, program, memory over time. Not part of the stable interface.
        readings: the answer over every reading of a scenario with open fields; none where nothing is open. Headline numbers are
            then the mixture's, waterfall and memory those of the likeliest reading.
    """

    details: StepResult
    readings: Open | None = None

    @property
    def scenario(self) -> Scenario:
        """What was simulated; `simpar.simulate(result.scenario, pp=4)` goes on from it."""
        return self.details.layout.scenario

    @property
    def name(self) -> str:
        """The scenario's."""
        return self.scenario.name

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return float(self.details.step_time_s if self.readings is None else self.readings.step.seconds)

    def _rate(self, rate: float) -> float:
        """A rate of the likeliest reading, at the step time of all readings."""
        return float(rate if self.readings is None else rate * self.details.step_time_s / self.step_time_s)

    @property
    def step_time_interval_s(self) -> tuple[float, float]:
        """The 80 % interval of `step_time_s`."""
        interval = self.details.step_interval if self.readings is None else self.readings.step
        return float(interval.low), float(interval.high)

    @property
    def tokens_per_s(self) -> float:
        """Tokens (samples, where the model has no sequence) per second of the whole job."""
        return self._rate(self.details.tokens_per_s)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The same of one GPU."""
        return self._rate(self.details.tokens_per_s_per_gpu)

    @property
    def model_flops_per_s_per_gpu(self) -> float:
        """Model FLOPs, without recomputation, per second and GPU."""
        return self._rate(self.details.model_flops_per_s_per_gpu)

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the 16-bit peak, 0 to 1."""
        return self._rate(self.details.mfu)

    @property
    def hfu(self) -> float:
        """Like `mfu`, with recomputed FLOPs counted."""
        return self._rate(self.details.hfu)

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline phase in which a rank waits, mean over ranks."""
        return float(self.details.bubble_fraction)

    @property
    def exposed_communication_s(self) -> dict[str, float]:
        """Seconds of the step, mean over ranks, in which compute waits for a collective of each dimension."""
        return dict(self.details.exposed_communication_s)

    @property
    def peak_memory_bytes(self) -> float:
        """Device memory of the fullest pipeline rank at its peak: reserved, context and NCCL."""
        return float(self.details.worst_rank.device_bytes)

    @property
    def device_memory_bytes(self) -> float:
        """Memory of one GPU."""
        return float(self.details.device_memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device."""
        return bool(self.details.fits)

    @property
    def world_size(self) -> int:
        """GPUs."""
        return int(self.details.world_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed or not modelled."""
        return tuple(self.details.notes)

    @property
    def waterfall(self) -> Table:
        """Where the step goes, from the ideal (model FLOPs at peak) to the predicted; the seconds add up to the step."""
        step = self.step_time_s
        rows = tuple((name, float(s), float(s) / step if step else 0.0) for name, s in self.details.waterfall())
        return Table(("part", "seconds", "share"), rows, f"{self.name}: where the step goes")

    @property
    def memory(self) -> Table:
        """Bytes of each pipeline rank at its peak: allocated, reserved, the whole device, and by category."""
        rows: list[dict[str, Cell]] = [
            {
                "rank": m.rank, "allocated": float(m.allocated_bytes), "reserved": float(m.reserved_bytes),
                "device": float(m.device_bytes), "peak_time_s": float(m.peak_time_s),
                **{name: float(value) for name, value in {**m.at_peak, **dict(m.outside)}.items()},
            }
            for m in self.details.memory
        ]  # fmt: skip
        return Table.of(rows, f"{self.name}: bytes by pipeline rank")

    def table(self) -> Table:
        """The headline numbers."""
        low, high = self.step_time_interval_s
        rows: list[tuple[str, Cell]] = [
            ("step_time_s", self.step_time_s), ("step_time_s low (80 %)", low), ("step_time_s high (80 %)", high),
            ("tokens_per_s", self.tokens_per_s), ("tokens_per_s_per_gpu", self.tokens_per_s_per_gpu), ("mfu", self.mfu),
            ("hfu", self.hfu), ("bubble_fraction", self.bubble_fraction), ("peak_memory_bytes", self.peak_memory_bytes),
            ("device_memory_bytes", self.device_memory_bytes), ("fits", self.fits), ("world_size", self.world_size),
        ]  # fmt: skip
        return Table(("quantity", "value"), tuple(rows), self.name)

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar simulate --json`."""
        return {**with_readings(self.details.to_json(), self.readings), "tensors_at_peak": self.details.tensors_at_peak()}

    def figure(self, kind: str = "waterfall") -> Any:
        """A plotly.graph_objects.Figure, one of `FIGURES`. A kind with nothing to show (communication of one GPU) is empty.

        Raises:
            UnknownNameError: no such kind.
        """
        if kind not in FIGURES:
            raise unknown("figure", kind, list(FIGURES))
        import plotly.graph_objects as go

        from simpar.report import layout_plot, memory_plot, step_figures

        draw = {
            "waterfall": step_figures.waterfall, "memory": memory_plot.over_time, "memory_by_rank": memory_plot.by_rank,
            "communication": step_figures.communication, "layout": layout_plot.layout_figure, "interval": step_figures.interval,
        }[kind]  # fmt: skip
        drawn = draw(self.details)
        if drawn is None:
            return go.Figure()
        view = drawn["variants"][0]
        return go.Figure(data=view["data"], layout={**view["layout"], "height": drawn["height"]})

    def _page(self) -> str:
        from simpar.report.step_html import step_page

        return step_page(self.details)

    def save_trace(self, path: str | Path) -> Path:
        """Write a trace (.json.gz) for ui.perfetto.dev.

        Raises:
            InputError: the file cannot be written.
        """
        from simpar.report.perfetto import write_trace

        write_trace(self.details, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        used, device = format_bytes(self.peak_memory_bytes), format_bytes(self.device_memory_bytes)
        verdict = "fits" if self.fits else "DOES NOT FIT"
        time = format_seconds(self.step_time_s)
        return f"<simpar.Result {self.name!r}: {time} a step, MFU {self.mfu:.1%}, {used} of {device}, {verdict}>"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(repr(self)[len('<simpar.Result ') : -1])}</b></p>{self.waterfall._repr_html_()}"


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two results side by side."""

    first: Result
    second: Result

    def table(self) -> Table:
        """Headline numbers and waterfall of both, and the relative change (None where the first is 0)."""
        pairs: list[tuple[str, float, float]] = [
            (name, float(getattr(self.first, name)), float(getattr(self.second, name)))
            for name in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "hfu", "bubble_fraction", "peak_memory_bytes")
        ]
        a, b = dict(self.first.details.waterfall()), dict(self.second.details.waterfall())
        pairs += [(f"{name} (s)", float(a.get(name, 0.0)), float(b.get(name, 0.0))) for name in {**a, **b}]
        rows = tuple((name, x, y, y / x - 1.0 if x else None) for name, x, y in pairs)
        return Table(("quantity", "first", "second", "change"), rows, self._heading())

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar compare --json`."""
        return {"first": self.first.details.to_json(), "second": self.second.details.to_json()}

    def differences(self) -> Table:
        """What differs in what was asked: a row per field."""
        from simpar.report.step_table import differences

        rows = tuple(differences(self.first.scenario, self.second.scenario))
        return Table(("field", "first", "second"), rows, "what differs" if rows else "nothing differs in what was asked")

    def _heading(self) -> str:
        """Both names; of one scenario under two settings, the settings."""
        if self.first.name != self.second.name:
            return f"{self.first.name} -> {self.second.name}"
        changes = [f"{field} {before} -> {after}" for field, before, after in self.differences().rows]
        return f"{self.first.name}: {', '.join(changes[:3]) or 'nothing differs'}{', ...' if len(changes) > 3 else ''}"

    def __repr__(self) -> str:
        a, b = self.first, self.second
        times = f"{format_seconds(a.step_time_s)} -> {format_seconds(b.step_time_s)}"
        change = f" ({b.step_time_s / a.step_time_s - 1:+.1%})" if a.step_time_s else ""
        return f"<simpar.Comparison {self._heading()!r}: {times}{change}>"

    def _repr_html_(self) -> str:
        return self.differences()._repr_html_() + self.table()._repr_html_()
