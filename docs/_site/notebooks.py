"""Notebooks of the site: executed in a real kernel when it is built, and shown with what they print.

They are stored without outputs. A cell that raises stops the build.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "notebooks"
COALESCE: Final = "nbconvert.preprocessors.coalescestreams.CoalesceStreamsPreprocessor"
LIMIT_S: Final = 300
"""Longest time of one cell."""


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' event: a page for each notebook; the notebook itself is copied beside it."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        link = f"[Download this notebook]({path.name})\n\n"
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=link + page(path)))
    return files


def page(path: Path) -> str:
    """A notebook as Markdown, executed.

    Raises:
        CellExecutionError: a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    text, _ = MarkdownExporter(preprocessors=[COALESCE]).from_notebook_node(notebook)
    return str(text)
