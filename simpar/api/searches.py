"""`search`: the best layouts of a model on a cluster, with proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from simpar.api.result import Result
from simpar.api.scenarios import Source, raw_table
from simpar.api.table import Cell, Shown, Table
from simpar.units import format_seconds

if TYPE_CHECKING:
    from typing import Unpack

    from simpar.searching.answer import Answer
    from simpar.searching.why import Why


class SearchSettings(TypedDict, total=False):
    """What `search` may be told; the options of `simpar search`, see docs/search.md.

    model, hardware, num_nodes ("8", "8,16" or "8..64x2", or a number), sequence_length, global_batch: change the scenario or
    stand for one. framework: keep to what it can run; none = the scenario's own, "any" = no limit. fix: one value of an axis
    (`{"pp": 1}`). allow: values of an axis
    (`{"schedule": ["1f1b", "interleaved"]}`). where: limits such as "memory<70GiB". pareto: two or three metrics.
    why: corners to hold against the winner, "tp=4,pp=8". prove: go on until nothing is faster. fit_probability: chance to fit the
    memory that a layout must have. task: "lora" or "full", whose memory options
    are axes too. num_gpus: instead of num_nodes. workers: processes; none = one per core where it takes long.
    """

    model: str
    hardware: str
    num_nodes: int | str
    sequence_length: int
    global_batch: int
    framework: str
    fix: Mapping[str, Any]
    allow: Mapping[str, Sequence[Any]]
    objective: str
    where: Sequence[str]
    deadline: str
    tokens: str
    pareto: Sequence[str]
    robust: str
    top: int
    prove: bool
    fit_probability: float
    task: str
    num_gpus: int
    why: Sequence[str]
    usd_per_gpu_hour: float
    pue: float
    store: str | Path
    resume: bool
    workers: int


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Shown):
    """What a search found.

    Attributes:
        results: the best layouts, best first, each simulated in full.
        document: the object of `simpar search --json`.
    """

    results: tuple[Result, ...]
    document: Mapping[str, Any]
    _answer: Answer | None = field(default=None, kw_only=True)
    _why: tuple[Why, ...] = field(default=(), kw_only=True)

    @property
    def best(self) -> Result | None:
        """What to run; None where no layout will do."""
        return self.results[0] if self.results else None

    @property
    def optimality_gap(self) -> float | None:
        """How much better, relatively, a layout that was not simulated could be: 0 = proven best."""
        gap = self.document["optimality_gap"]
        return None if gap is None else float(gap)

    @property
    def space_size(self) -> int:
        """Layouts in the space."""
        return int(self.document["space_size"])

    def table(self) -> Table:
        """The best layouts."""
        rows: list[dict[str, Cell]] = [
            {
                "design": b["design"], "step_time_s": b["step_time_s"], "expected_step_time_s": b["expected_step_time_s"],
                "best_probability": b["best_probability"], "fit_probability": b["fit_probability"], "mfu": b["mfu"],
                "tokens_per_s_per_gpu": b["tokens_per_s_per_gpu"], "peak_memory_bytes": b["peak_memory_bytes"]["device"],
                "world_size": b["world_size"], "measured_nearby": b["measured_nearby"], "layout": b["text"],
            }
            for b in self.document["best"]
        ]  # fmt: skip
        return Table.of(rows, f"best of {self.space_size:,} layouts")

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar search --json`."""
        return dict(self.document)

    def _page(self) -> str:
        from simpar.errors import InputError
        from simpar.interop.export import run_files
        from simpar.report.search_html import search_page

        if self._answer is None:
            raise InputError("this answer came from a store, which keeps no timelines for a page; search again without store=")
        return search_page(self._answer, list(self._why), run_files)

    def __repr__(self) -> str:
        if not self.document["best"]:
            return f"<simpar.SearchResult: none of {self.space_size:,} layouts will do>"
        best, gap = self.document["best"][0], self.optimality_gap
        how = "" if gap is None else ", proven best" if gap <= 0.0 else f", at most {gap:.1%} from the best"
        return f"<simpar.SearchResult: {best['text']}, {format_seconds(best['step_time_s'])} a step{how} of {self.space_size:,}>"


def search(source: Source | None = None, /, **settings: Unpack[SearchSettings]) -> SearchResult:
    """The best layouts for a model on a cluster, with proof.

    Args:
        source: a scenario, whose plan may hold ranges; none = `model`, `hardware`, `num_nodes` and `global_batch` stand for it.
        settings: see `SearchSettings`.

    Raises:
        InputError: settings or scenario are wrong.
        KeyboardInterrupt: the search was stopped; with `store` and `resume` it goes on.
    """
    from simpar.api.measured_runs import measured_nearby
    from simpar.interop.export import not_launched
    from simpar.searching.abilities import ANY
    from simpar.searching.command import INTERRUPTED, Outputs, SearchOptions, run

    answers: list[tuple[Answer, list[Why]]] = []
    stored: list[dict[str, Any]] = []
    outputs = Outputs(show=lambda answer, reasons: answers.append((answer, reasons)), show_stored=stored.append)
    outputs.measured = measured_nearby
    if settings.get("framework") != ANY:
        outputs.runs = not_launched
    table = None
    if source is not None:
        table, file = raw_table(source)
        table["file"] = file
    given: dict[str, Any] = dict(settings)
    if "num_nodes" in given:
        given["num_nodes"] = str(given["num_nodes"])
    given["fix"] = [f"{axis}={value}" for axis, value in given.get("fix", {}).items()]
    given["allow"] = [f"{axis}={','.join(str(v) for v in values)}" for axis, values in given.get("allow", {}).items()]
    given["pareto"] = ",".join(given.get("pareto", ()))
    if "store" in given:
        given["store"] = Path(given["store"])
    code = run(SearchOptions(table=table, outputs=outputs, **given))
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if stored:
        return SearchResult((), stored[0])
    answer, reasons = answers[0]
    document = {**answer.to_json(), "why": [reason.to_json() for reason in reasons], "from_store": False}
    return SearchResult(tuple(Result(c.result) for c in answer.candidates), document, _answer=answer, _why=tuple(reasons))
