"""A benchmark's figures on a page of the documentation, between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of `name` on `page`.

    Raises:
        SystemExit: the page does not have them, each once.
    """
    whole, marks = page.read_text(encoding="utf-8"), (f"<!-- {name} -->\n", f"<!-- end of {name} -->")
    if any(whole.count(mark) != 1 for mark in marks):
        raise SystemExit(f"{page}: must have {marks[0].strip()} and {marks[1]} once each")
    before, rest = whole.split(marks[0])
    _, after = rest.split(marks[1])
    page.write_text(f"{before}{marks[0]}\n{text.strip()}\n\n{marks[1]}{after}", encoding="utf-8")
