"""The size of functions and files: what is large is on a list that only gets shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import simpar

PACKAGE = Path(simpar.__file__).parent
MOST_PARAMETERS, MOST_LINES = 7, 400
LONG = {"searching/command.py", "searching/space.py"}
"""Files of more lines than fit one sitting."""


def wide(text: str) -> Iterator[str]:
    """Functions of `text` with too many parameters."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len(given) - (given[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
                yield node.name


def test_no_function_takes_more_parameters_than_a_reader_keeps_in_mind() -> None:
    """Commands are left out, whose parameters are their options."""
    paths = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "cli")
    found = {f"{path.relative_to(PACKAGE)} {name}" for path in paths for name in wide(path.read_text())}
    assert not found, "take fewer parameters, or one object that holds them"


def test_no_file_is_longer_than_one_sitting() -> None:
    paths = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in paths.items() if len(path.read_text().splitlines()) > MOST_LINES}
    assert found <= LONG, "one file, one thing"
    assert len(LONG) <= 3


def test_a_wide_function_would_be_found() -> None:
    assert list(wide("def f(self, a, b, c, d, e, f, g): ...\ndef h(a, b, c, d, e, f, g, *, i): ...")) == ["h"]
