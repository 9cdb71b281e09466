"""validation/measured: the committed comparison is recomputed, its bounds hold, and README.md says what it gives."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from measured_machines import NAME, machines, read_machine, readme_line
from test_validate_rank_command import measured_like, scenario

from simpar.errors import InputError
from simpar.interop.kineto_step import kernel_kind
from simpar.live.rank_frozen import freeze
from simpar.live.rank_plan import rank_plan

ROOT = Path(__file__).resolve().parents[1]
ABOUT = """
machine = "one made up H200"
date = "2026-11-22"
source = "a test"
[[bounds]]
metric = "step_time_s"
median = 0.08
worst = 0.11
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, 4 and 10 % slower than predicted."""
    own = tmp_path / "h200-2026-11"
    (own / "ranks").mkdir(parents=True)
    (own / "about.toml").write_text(ABOUT)
    plans = []
    for name, factor in (("first", 1 / 0.96), ("second", 1 / 0.9)):
        base = scenario(dp=8)
        plan = rank_plan(base.model_copy(update={"name": name}), 0, layers=1)
        plans.append(plan)
        (own / "ranks" / f"{name}.json").write_text(json.dumps(measured_like(plan, factor)))
    freeze(plans, own / "predictions.json")
    return own


def test_committed_machines_keep_their_bounds_and_the_readme_says_so() -> None:
    found = machines(kernel_kind)
    assert [m.broken for m in found if m.broken] == []
    assert all(re.match(NAME, m.name) for m in found)
    assert readme_line(found) in " ".join((ROOT / "README.md").read_text().split())


def test_a_folder_is_compared_with_what_was_frozen(folder: Path) -> None:
    found = read_machine(folder, kernel_kind)
    assert found.errors("step_time_s") == pytest.approx([0.04, 0.10])
    assert found.broken == []
    line = readme_line([found])
    assert line == (
        "single-rank step on one made up H200: median 7.0 %, worst 10.0 % over 2 layouts, predictions committed before"
    )  # fmt: skip


def test_a_bound_that_is_not_kept_is_named(folder: Path) -> None:
    text = (folder / "about.toml").read_text()
    (folder / "about.toml").write_text(text.replace("worst = 0.11", "worst = 0.09"))
    assert "worst 10.0 % (9.0)" in read_machine(folder, kernel_kind).broken[0]
    (folder / "about.toml").write_text('compared = ["first"]\n' + text)
    assert read_machine(folder, kernel_kind).errors("step_time_s") == pytest.approx([0.04])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("strange", "does not belong there"), ("no predictions", "not predictions"), ("unpredicted", "nothing was predicted of"),
        ("edited", "changed after they were frozen"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said(folder: Path, change: str, said: str) -> None:
    frozen = folder / "predictions.json"
    if change == "strange":
        (folder / "notes.txt").write_text("x")
    elif change == "no predictions":
        frozen.unlink()
    elif change == "edited":
        frozen.write_text(frozen.read_text().replace('"gemm": ', '"gemm": 1', 1))
    else:
        shutil.copy(folder / "ranks" / "first.json", folder / "ranks" / "third.json")
        table = json.loads((folder / "ranks" / "third.json").read_text())
        table["plan"]["scenario"]["name"] = "third"
        (folder / "ranks" / "third.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=said):
        read_machine(folder, kernel_kind)
