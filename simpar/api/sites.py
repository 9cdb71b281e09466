"""`adapt`: what a cluster's own runs say about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpar.api.table import Cell, Table

if TYPE_CHECKING:
    from simpar.site.learned import Adapted
    from simpar.specs.site import Site


@dataclass(frozen=True, slots=True, repr=False)
class SiteResult:
    """A site learned from runs.

    Attributes:
        details: the internal result. Not part of the stable interface.
    """

    details: Adapted

    @property
    def site(self) -> Site:
        """What `site=` of a scenario takes."""
        return self.details.site

    def save(self, path: str | Path) -> Path:
        """Write site.toml.

        Raises:
            InputError: the file cannot be written.
        """
        from simpar.site.learned import write_site

        write_site(self.site, Path(path))
        return Path(path)

    def table(self) -> Table:
        """The runs learned from: measured, predicted without and with the site, and how far each was believed."""
        rows: list[dict[str, Cell]] = [
            {"run": r.id, "measured_s": r.measured_s, "before_s": r.before_s, "after_s": r.after_s, "weight": r.weight}
            for r in self.site.runs
        ]
        return Table.of(rows, f"{self.site.name}: {len(rows)} runs")

    def to_dict(self) -> dict[str, Any]:
        """The object of `simpar adapt --json`."""
        return self.details.as_json()

    def __repr__(self) -> str:
        factors = ", ".join(f"{name} x {value:.3g}" for name, value in self.site.factors.items())
        return f"<simpar.SiteResult: {len(self.site.runs)} runs, {factors}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def adapt(
    runs: str | Path | Iterable[str | Path | Mapping[str, Any]], /, *, name: str = "site", hardware: str | None = None,
    workers: int = 1, progress: bool = False,
) -> SiteResult:  # fmt: skip
    """Learn a site from a cluster's own runs.

    Args:
        runs: JSON-lines files, or rows: what `simpar run read` writes, or `{"scenario": ..., "step_time_s": 12.3}`.
        hardware: a profile to take for the machines of all runs, such as one that `simpar calibrate` wrote.
        workers: processes.

    Raises:
        InputError: a file is missing or unreadable.
    """
    from simpar.evidence.run_rows import run_of, runs_in
    from simpar.site.learned import adapt as learned

    given = [runs] if isinstance(runs, str | Path) else list(runs)
    files = [Path(each) for each in given if not isinstance(each, Mapping)]
    rows = [run_of(each, f"row {index + 1}") for index, each in enumerate(given) if isinstance(each, Mapping)]
    found = [*runs_in(files, hardware), *rows]
    return SiteResult(learned(found, name=name, workers=workers, progress=progress))
