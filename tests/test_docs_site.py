"""The site's hooks: generated pages say something about everything, and an example that fails stops the build.

The pages themselves, with all their examples, are built by `mkdocs build --strict` in CI.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import examples  # noqa: E402
import reference  # noqa: E402
import schedule_pictures  # noqa: E402

from simpar.schedules import SCHEDULES  # noqa: E402
from simpar.specs.hardware import HardwareProfile  # noqa: E402
from simpar.specs.planfile import PlanFile  # noqa: E402
from simpar.specs.scenario import Scenario  # noqa: E402


@pytest.mark.parametrize("root", [Scenario, HardwareProfile, PlanFile], ids=lambda root: root.__name__)
def test_every_field_has_a_meaning(root: type) -> None:
    bare = [
        f"{spec.__name__}.{name}"
        for spec in reference.specs_in(root, {})
        for name, info in spec.model_fields.items()
        if not (info.description or reference.field_texts(spec).get(name))
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
        examples.with_output(markdown, "page.md")


def test_examples_share_their_files_and_show_what_is_printed() -> None:
    page = '```toml title="a.toml"\nx = 1\n```\n\n```python run\nprint(open("a.toml").read().strip() + "!")\n```\n'
    assert "```text\nx = 1!\n```" in examples.with_output(page, "page.md")
