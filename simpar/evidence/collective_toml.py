"""Fitted collective constants as TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from simpar.evidence.collective_cells import Harnesses

HEADER = (
    "# Written by `python -m simpar.evidence.fit collectives --data DIR`; do not edit.\n"
    "# SI units; efficiencies are fractions of the raw link or NIC rate. Laws: docs/formulas_collectives.md.\n"
)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.5g}" if value != float("inf") else "inf"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _table(name: str, table: dict[str, Any]) -> list[str]:
    lines = [f"[{name}]"] if name else []
    inner = []
    for key, value in table.items():
        if isinstance(value, dict):
            if value:
                inner += _table(f"{name}.{key}" if name else key, value)
        elif value is not None:
            lines.append(f"{key} = {_value(value)}")
    return [*lines, "", *inner] if len(lines) > (1 if name else 0) else inner


def write_constants(path: Path, constants: BaseModel) -> None:
    """`constants` (a CollectiveConstants) as TOML at `path`; measured points belong to profiles and are left out."""
    table = constants.model_dump(exclude={"points"})
    bands = table.pop("bands", ())
    lines = _table("", table)
    for band in bands:
        lines += ["[[bands]]", *(f"{k} = {_value(v)}" for k, v in band.items()), ""]
    path.write_text(HEADER + "\n".join(lines), encoding="utf-8")


def write_harnesses(path: Path, harnesses: Harnesses) -> None:
    """Costs of benchmark programs as TOML at `path`."""
    lines = [HEADER, "# What a benchmark program adds to a collective's time, and the share of the rate it reaches.", ""]
    for name, (added, rate) in sorted(harnesses.items()):
        lines += [f"[{name}]", f"added_s = {added:.5g}", f"rate = {rate:.5g}", ""]
    path.write_text("\n".join(lines), encoding="utf-8")
