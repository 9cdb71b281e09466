"""The site's hooks: generated pages say something about everything, and an example that fails stops the build.

The pages themselves, with all their examples, are built by `mkdocs build --strict` in CI.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import examples  # noqa: E402
import lesson  # noqa: E402
import notebooks  # noqa: E402
import output  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402
import schedule_pictures  # noqa: E402

from simpar.schedules import SCHEDULES  # noqa: E402
from simpar.specs.base import field_texts  # noqa: E402
from simpar.specs.hardware import HardwareProfile  # noqa: E402
from simpar.specs.planfile import PlanFile  # noqa: E402
from simpar.specs.scenario import Scenario  # noqa: E402


@pytest.mark.parametrize("root", [Scenario, HardwareProfile, PlanFile], ids=lambda root: root.__name__)
def test_every_field_has_a_meaning(root: type) -> None:
    bare = [
        f"{spec.__name__}.{name}"
        for spec in reference.specs_in(root, {})
        for name, info in spec.model_fields.items()
        if not (info.description or field_texts(spec).get(name))
    ]
    assert not bare


def test_every_command_and_option_has_help() -> None:
    assert "## simpar search\n" in reference.cli_page()
    assert not re.findall(r"^\| `[^|]*` \|  \|", reference.cli_page(), re.M)


def test_every_schedule_is_drawn() -> None:
    page = schedule_pictures.schedules_page()
    for family in {family.name for family in SCHEDULES.values()}:
        assert f'aria-label="Timeline of schedule {family}"' in page
    assert page.count("1F1") >= 1


def test_quantities_show_how_they_are_written() -> None:
    page = reference.profile_page()
    row = next(line for line in page.splitlines() if line.startswith("| `memory_bandwidth`"))
    assert '`"400 Gb/s"`' in row
    assert "with source" in row


@pytest.mark.parametrize(
    ("markdown", "message"),
    [
        ("```console\n$ simpar models show no-such-model\n```", "exit code 2"),
        ("```console\n$ simpar --version # exit 2\n```", "exit code 0"),
        ("```python run\nassert 1 > 2\n```", "AssertionError"),
    ],
)
def test_an_example_that_fails_stops_the_build(markdown: str, message: str) -> None:
    with pytest.raises(examples.ExampleError, match=message):
        examples.blocks(markdown, "page.md")


def test_examples_share_their_files_and_show_what_is_printed() -> None:
    page = '```toml title="a.toml"\nx = 1\n```\n\n```python run\nprint(open("a.toml").read().strip() + "!")\n```\n'
    assert examples.blocks(page, "page.md")[1].endswith("```text\nx = 1!\n```")


def test_a_figure_of_a_lesson_holds_every_choice_and_its_reason() -> None:
    block = (
        '```lesson\ntitle = "t"\nscenario = "zero-7.5b_a100x64_zero0"\nshow = ["memory", "time", "pipeline"]\n'
        'set = { global_batch_size = 64 }\n[[choices]]\nlabel = "stage"\nfield = "zero_stage"\nvalues = [0, 3]\n'
        '[[choices]]\nlabel = "micro-batch"\nfield = "micro_batch_size"\nvalues = [1, 2]\n```\n'
    )
    page = lesson.with_figures(block)
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[0])
    assert data["sizes"] == [2, 2]
    plain, wrong, sharded, _ = data["steps"]
    assert sharded["gib"] < plain["gib"]
    assert "must be a multiple" in wrong["wrong"]
    assert sum(seconds for _, seconds in plain["parts"]) == pytest.approx(plain["s"], rel=0.02)
    assert sum(size for _, size in plain["memory"]) == pytest.approx(plain["gib"], rel=0.02)
    assert all(0 <= start <= end <= 1000 for row in plain["ranks"] for _, _, start, end in row)
    assert page.count('type="radio"') == 4
    with pytest.raises(ValueError, match="no choice"):
        lesson.with_figures(block.replace("[1, 2]", "[7]"))


def test_notebooks_are_stored_without_outputs() -> None:
    found = sorted(notebooks.FOLDER.glob("*.ipynb"))
    assert len(found) == 2
    for path in found:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_a_notebook_is_executed_and_a_failing_one_stops_the_build(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbconvert")
    path = tmp_path / "n.ipynb"
    for source, raises in (("print(6 * 7)", False), ("1 / 0", True)):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
        if raises:
            with pytest.raises(Exception, match="ZeroDivisionError"):
                notebooks.page(path)
        else:
            assert "    42" in notebooks.page(path)


def test_every_json_output_has_a_table_or_a_place() -> None:
    import typer

    from simpar.cli.app import app

    told = {*output.COMMANDS, *output.SAME_AS}
    for path, command in reference.commands(typer.main.get_command(app), ("simpar",)):
        if any("--json" in parameter.opts for parameter in command.params):
            name = " ".join(path)
            assert any(name == each or name.startswith(f"{each} ") for each in told), name


def test_families_are_drawn_from_runs_that_no_fit_has_seen() -> None:
    found = pictures.unseen_by_family()
    assert {"megatron-core", "nanotron", "deepspeed", "torchtitan"} <= set(found)
    drawn = sum(len(points) for points in found.values() if len(points) >= 10)
    assert pictures.families_picture().count('fill-opacity="0.55"') == drawn


def test_the_readmes_picture_is_what_the_code_says_now() -> None:
    """The seconds in it, to 3 % of the step; drawn anew by `python docs/_site/pictures.py`."""
    drawn, now = (
        [float(found) for found in re.findall(r"([0-9.]+) s\b", text)]
        for text in ((pictures.OUT / "step.svg").read_text(encoding="utf-8"), pictures.step_picture())
    )
    assert len(now) > 5
    assert drawn == pytest.approx(now, abs=0.03 * max(now))
