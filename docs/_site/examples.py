"""Run the examples of a page when the site is built, and show what they print.

A fenced block of kind `console` holds lines `$ simpar ...`; each is run and its output takes its place below it. A block of kind
`python run` is executed and what it prints follows. A block `toml title="mine.toml"` is also written as that file. The blocks of one
page share a working directory. A command that fails stops the build unless its line ends with `# exit 1` (or another code), so that
every example in the documentation is known to work.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

BLOCK: Final = re.compile(
    r"^```(?P<kind>console|python run|(?:toml|json) title=\"(?P<file>[\w./-]+)\")\n(?P<text>.*?)^```$", re.M | re.S
)
EXIT: Final = re.compile(r"\s+# exit (\d+)$")
COLUMNS: Final = "110"
_BEGUN: Final[dict[str, Future[list[str]]]] = {}
"""Page -> its examples as they run."""


class ExampleError(Exception):
    """An example of the documentation that does not do what the page says."""


def on_files(files: Any, **_: Any) -> None:
    """mkdocs' event: begin to run the examples of all pages, each page in a process of its own, one to a core."""
    pool = ThreadPoolExecutor(os.cpu_count())
    for file in files.documentation_pages():
        if BLOCK.search(file.content_string):
            _BEGUN[file.src_uri] = pool.submit(apart, file.abs_src_path)
    pool.shutdown(wait=False)


def apart(path: str) -> list[str]:
    """`blocks` of a page, in a process of its own: they share a working directory.

    Raises:
        ExampleError: as `blocks`.
    """
    done = subprocess.run([sys.executable, __file__, "--json", path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExampleError(done.stdout + done.stderr)
    return list(json.loads(done.stdout))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' event: a page with what its examples printed."""
    name = page.file.src_uri
    ready = iter(_BEGUN[name].result() if name in _BEGUN else blocks(markdown, name))
    return BLOCK.sub(lambda _: next(ready), markdown)


def blocks(markdown: str, name: str) -> list[str]:
    """The example blocks of a page after they have run, in order.

    Raises:
        ExampleError: a command ends with another exit code than the page says, or Python code raises.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        return [shown(found, name, names) for found in BLOCK.finditer(markdown)]


def shown(found: re.Match[str], page: str, names: dict[str, Any]) -> str:
    """One block after it has run."""
    kind, text = found["kind"], found["text"]
    if kind == "console":
        return "```console\n" + "".join(command_with_output(line, page) for line in text.splitlines()) + "```"
    if kind == "python run":
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page, "exec"), names)
        except Exception as error:
            raise ExampleError(f"{page}: {type(error).__name__}: {error} in\n{text}") from error
        output = printed.getvalue()
        return f"```python\n{text}```" + (f"\n\n```text\n{output.rstrip()}\n```" if output else "")
    Path(found["file"]).parent.mkdir(parents=True, exist_ok=True)
    Path(found["file"]).write_text(text)
    return found[0]


def command_with_output(line: str, page: str) -> str:
    """`$ simpar ...` and below it what it prints; other lines as they are."""
    if not line.startswith("$ simpar"):
        return line + "\n"
    wanted = EXIT.search(line)
    line = EXIT.sub("", line)
    code, output = run(shlex.split(line.removeprefix("$ simpar")))
    if code != (int(wanted[1]) if wanted else 0):
        raise ExampleError(f"{page}: exit code {code} of\n  {line}\n{output}")
    return f"{line}\n{output.rstrip()}\n" if output.strip() else f"{line}\n"


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and everything printed by `simpar ARGUMENTS`, in a process of its own as a user has it."""
    done = subprocess.run(
        [sys.executable, "-m", "simpar", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, "\n".join(line.rstrip() for line in done.stdout.splitlines())


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Work in `folder` with a terminal of a fixed width."""
    before, width = Path.cwd(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def main(paths: list[str]) -> int:
    """Run the examples of some pages without building the site; print what fails, after --json what they print."""
    failed, as_json = 0, paths[:1] == ["--json"]
    for path in paths[as_json:]:
        try:
            found = blocks(Path(path).read_text(), path)
            if as_json:
                print(json.dumps(found))
        except ExampleError as error:
            print(error)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
