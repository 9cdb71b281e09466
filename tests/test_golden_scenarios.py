"""Waterfall and memory of every shipped scenario are what tests/golden/scenarios.json says; see golden_scenarios.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_scenarios import DIGITS, FILE, said_of, scenario_files

SMALL = 1e-6
"""Seconds and gigabytes below which a part is rounding."""
GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """What differs by more than rounding, one line each."""
    if isinstance(expected, dict):
        keys = dict.fromkeys([*expected, *found])
        return [line for key in keys for line in differences(found.get(key, 0.0), expected.get(key, 0.0), f"{where}.{key}")]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{where}: {found} for {expected}"]
        return [line for i, pair in enumerate(zip(found, expected, strict=True)) for line in differences(*pair, f"{where}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        same = found == pytest.approx(expected, rel=2.0 * 10.0 ** (1 - DIGITS), abs=SMALL)
        return [] if same else [f"{where}: {found} for {expected}"]
    return [] if found == expected else [f"{where}: {found} for {expected}"]


def test_every_scenario_is_golden() -> None:
    assert list(GOLDEN) == [path.stem for path in scenario_files()], "python tests/golden_scenarios.py"


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_scenario_is_what_it_was(path: Path) -> None:
    found = differences(said_of(path), GOLDEN[path.stem])
    assert not found, "\n".join([*found, "if this is meant: python tests/golden_scenarios.py, and say why in the commit"])


def test_differences_are_seen() -> None:
    assert not differences({"a": [1.0, {"b": 2.0001}]}, {"a": [1.0, {"b": 2.0}]})
    assert differences({"a": [1.0, {"b": 2.01}]}, {"a": [1.0, {"b": 2.0}]}) == [".a[1].b: 2.01 for 2.0"]
    assert differences({"a": 1.0}, {"a": 1.0, "new": 3.0}) == [".new: 0.0 for 3.0"]
    assert differences([1.0], [1.0, 2.0])
    assert differences(2, 3)
