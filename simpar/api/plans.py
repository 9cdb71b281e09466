"""`plan`: days, cost, energy and goodput of a whole run with failures. Planning and search meet here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from simpar.api.scenarios import assigned
from simpar.api.table import Cell, Shown, Table
from simpar.planning.questions import PlanOptions, PlanReport, ask
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.planning.steps import Search, StepModel
from simpar.specs.planfile import read_plan_table
from simpar.specs.scenario import as_published

if TYPE_CHECKING:
    from typing import Unpack

    from simpar.api.layout_search import Say


class PlanSettings(TypedDict, total=False):
    """What `plan` may be told; the options of `simpar plan`, see docs/planning.md."""

    solve: str
    deadline: str
    compare: Sequence[str]
    sweep: Sequence[str]
    sensitivity: bool
    marginal: bool
    keep_layout: bool
    seed: int
    repetitions: int
    store: str | Path
    resume: bool
    site: str | Path


@dataclass(frozen=True, slots=True, repr=False)
class PlanResult(Shown):
    """The answer to a plan.

    Attributes:
        report: the internal report. Not part of the stable interface.
        document: the object of `simpar plan --json`.
    """

    report: PlanReport
    document: Mapping[str, Any]

    @property
    def feasible(self) -> bool:
        """Whether the run can be done at all."""
        return bool(self.document["feasible"])

    @property
    def days(self) -> dict[str, float] | None:
        """Quantiles p10, p50, p90; None where the run is not feasible."""
        return self._quantiles("days")

    @property
    def cost_usd(self) -> dict[str, float] | None:
        """Quantiles; None without a price."""
        return self._quantiles("cost_usd")

    @property
    def goodput(self) -> dict[str, float] | None:
        """Quantiles of the share of time in which steps that stay are made."""
        return self._quantiles("goodput")

    def _quantiles(self, name: str) -> dict[str, float] | None:
        found = self.document[name]
        return None if found is None else dict(found)

    def table(self) -> Table:
        """The quantities with their quantiles."""
        from simpar.planning.to_json import QUANTITIES

        found = {name: self._quantiles(name) for name in QUANTITIES}
        rows: list[dict[str, Cell]] = [{"quantity": name, **values} for name, values in found.items() if values]
        return Table.of(rows, str(self.document["name"]))

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar plan --json`."""
        return dict(self.document)

    def _page(self) -> str:
        from simpar.report.plan_html import plan_page

        return plan_page(self.report)

    def __repr__(self) -> str:
        name, days, cost = self.document["name"], self.days, self.cost_usd
        if not self.feasible or days is None:
            return f"<simpar.PlanResult {name!r}: not feasible>"
        money = "" if cost is None else f", {cost['p50'] / 1e6:,.2f} M$"
        return f"<simpar.PlanResult {name!r}: {days['p50']:.1f} days ({days['p10']:.1f} to {days['p90']:.1f}){money}>"


def step_model(store: Path | None = None, say: Say | None = None) -> StepModel:
    """Where a plan's step times come from: the simulator, with layouts searched where the plan or the question wants it.

    Args:
        store: of the plan's repetitions; layouts are kept in a store beside it.
        say: told the progress of a search.
    """

    @cache
    def loaded() -> Search:
        # Loaded when the first layout is to be searched: most plans need none.
        from simpar.api.layout_search import LayoutSearch

        layouts = store and store.with_suffix(f".layouts{store.suffix}")
        return LayoutSearch(store=layouts, say=say) if say is not None else LayoutSearch(store=layouts)

    return SimulatedSteps(lambda scenario: loaded()(scenario))


def plan(
    source: str | Path | Mapping[str, Any], /, *, changes: Mapping[str, Any] | None = None, **settings: Unpack[PlanSettings]
) -> PlanResult:
    """Days, GPU-hours, cost, energy and goodput of a whole run with failures.

    Args:
        source: a plan: TOML file, shipped name or raw table.
        changes: fields by dotted name: `{"cluster.num_nodes": 256}`.
        settings: see `PlanSettings`.

    Raises:
        InputError: the plan or a setting breaks a rule.
    """
    from simpar.planning.to_json import report_json

    table = dict(source) if isinstance(source, Mapping) else read_plan_table(source)
    given: dict[str, Any] = dict(settings)
    if "compare" in given:
        given["compare"] = ",".join(given["compare"])
    given["sweep"] = tuple(given.get("sweep", ()))
    store = given["store"] = Path(given["store"]) if "store" in given else None
    if "site" in given:
        given["site"] = Path(given["site"])
    report = ask(as_published(assigned(table, changes or {}), table), PlanOptions(**given), step_model(store))
    return PlanResult(report, report_json(report))
