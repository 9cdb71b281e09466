"""CONTRIBUTING's "one place to add": each toy is one file whose last line enters it in a table; simpar itself stays as it is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOYS = Path(__file__).parent / "toys"
NAMES = sorted(path.stem for path in TOYS.glob("*.py"))


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(TOYS.parent / "add_toys.py")], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_toys_are_those_of_contributing() -> None:
    assert NAMES == ["architecture", "collective", "framework", "mask", "mixer", "optimizer", "recomputation", "schedule"]


@pytest.mark.parametrize("name", NAMES)
def test_a_toy_is_one_file_that_enters_itself_in_one_line(name: str) -> None:
    body = ast.parse((TOYS / f"{name}.py").read_text()).body
    acting = [node for node in body[1:] if not isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)]
    assert acting == body[-1:]
    assert acting[0].lineno == acting[0].end_lineno


@pytest.mark.parametrize("name", ["mixer", "optimizer", "mask", "schedule", "recomputation", "framework"])
def test_without_its_line_a_toy_is_unknown(name: str, outcome: dict[str, Any]) -> None:
    assert "toy" in outcome["before"][name]["refused"]


def test_an_architecture(outcome: dict[str, Any]) -> None:
    gone = 2 * (3 * 64 * 128 + 64)  # feed-forwards of two layers, and their norms
    assert outcome["before"]["architecture"]["parameters"] - outcome["found"]["architecture"]["parameters"] == gone


def test_a_mixer(outcome: dict[str, Any]) -> None:
    assert 0 < outcome["found"]["mixer"]["step_time_s"] < outcome["usual"]["step_time_s"]


def test_an_optimizer(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["optimizer"]["peak"] < outcome["usual"]["peak"]


def test_a_mask(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["mask"]["attended"] == 100


def test_a_schedule(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["schedule"]["step_time_s"] > 1.2 * outcome["usual"]["step_time_s"]


def test_a_collective_algorithm(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["collective"]["seconds"] < 0.1 * outcome["before"]["collective"]["seconds"]


def test_a_recomputation_policy(outcome: dict[str, Any]) -> None:
    assert outcome["found"]["recomputation"]["peak"] < outcome["usual"]["peak"]


def test_a_framework_is_a_composition(outcome: dict[str, Any]) -> None:
    found = outcome["found"]["framework"]
    assert found["host"] == "toy 2024-01"
    assert found["head"].startswith("torchtitan")
    assert {found[part].split()[0] for part in ("kernels", "optimizer", "data", "pipeline")} == {"megatron-core"}
    assert found["step_time_s"] != outcome["usual"]["step_time_s"]
