"""The size of functions and files, and how objects are told apart: what breaks a rule is on a list that only gets shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import simpar

PACKAGE = Path(simpar.__file__).parent
MOST_PARAMETERS, MOST_LINES = 7, 400
LONG = {"searching/command.py", "searching/space.py"}
"""Files of more lines than fit one sitting."""
WRITE_BEHIND = {"costs/kernels.py", "searching/memo.py"}
"""Files that write into `__dict__`: two memos of methods, as `cached_property` is one of attributes."""


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All of the syntax tree of `text`."""
    return tuple(ast.walk(ast.parse(text)))


def wide(text: str) -> Iterator[str]:
    """Functions of `text` with too many parameters."""
    for node in nodes(text):
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


def identities(text: str) -> Iterator[int]:
    """Lines of `text` that name the built-in `id`."""
    return (
        node.lineno for node in nodes(text) if isinstance(node, ast.Name) and node.id == "id" and isinstance(node.ctx, ast.Load)
    )


def behind(text: str) -> Iterator[int]:
    """Lines of `text` that write attributes past what a class allows."""
    for node in nodes(text):
        if isinstance(node, ast.Attribute):
            owner = node.value
            past = isinstance(owner, ast.Name) and owner.id == "object" and node.attr in ("__setattr__", "__delattr__")
            kept = isinstance(owner, ast.Attribute) and owner.attr == "__dict__" and node.attr in ("update", "setdefault", "pop")
            if past or kept:
                yield node.lineno
        written = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if written and isinstance(node.value, ast.Attribute) and node.value.attr == "__dict__":
            yield node.lineno


def test_no_object_is_found_by_its_address() -> None:
    """Another object may have it later, in a memo that does not hold the first one: the object itself is the key (`eq=False` where
    it is one of a kind), or its value, hashed once where that is long (`simpar.hashed`)."""
    found = {f"{path.relative_to(PACKAGE)}:{line}" for path in PACKAGE.rglob("*.py") for line in identities(path.read_text())}
    assert not found


def test_frozen_objects_are_not_written() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(behind(path.read_text()))}
    assert found == WRITE_BEHIND


def test_an_address_and_a_write_would_be_found() -> None:
    assert sorted(identities("a = {id(b): c.id}\nd = map(id, e)")) == [1, 2]
    writes = ("object.__setattr__(a, 'b', 1)", "a.__dict__['b'] = 1", "a.__dict__.update(b=1)", "del a.__dict__['b']")
    assert all(list(behind(text)) == [1] for text in writes)
    assert not list(behind("b = a.__dict__['b']; a.b = 1; a.__dict__.get('b')"))
