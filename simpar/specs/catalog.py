"""Shipped scenarios and plans by name, beside files by path."""

from __future__ import annotations

from pathlib import Path

from simpar.errors import InputError
from simpar.registry import unknown
from simpar.specs.base import data_dir


def scenario_names() -> list[str]:
    """Names of the shipped scenarios."""
    return sorted(path.stem for path in data_dir("scenarios").glob("*.toml"))


def plan_names() -> list[str]:
    """Names of the shipped plans of whole runs."""
    return sorted(path.stem for path in (data_dir("scenarios") / "plans").glob("*.toml"))


def scenario_path(name: str | Path) -> Path:
    """The file of a scenario: at the path `name`, else the shipped one of that name.

    Raises:
        InputError: neither; a misspelt name lists the known ones.
    """
    return _path("scenario", data_dir("scenarios"), name)


def plan_path(name: str | Path) -> Path:
    """The file of a plan, see `scenario_path`."""
    return _path("plan", data_dir("scenarios") / "plans", name)


def _path(kind: str, folder: Path, name: str | Path) -> Path:
    path = Path(name)
    try:
        if path.exists():
            return path
    except OSError as error:
        raise InputError(f"{kind} {str(name)[:80]!r}...: cannot be a file: {error.strerror}") from None
    shipped = {found.stem: found for found in sorted(folder.glob("*.toml"))}
    if path.suffix == ".toml" or path.name != str(name):
        hint = f"; a shipped {kind} has that name: write {path.stem}" if path.stem in shipped else ""
        raise InputError(f"{path}: no such file{hint}")
    if path.name not in shipped:
        raise unknown(kind, path.name, list(shipped), "simpar scenarios")
    return shipped[path.name]
