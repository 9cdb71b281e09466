"""Build hook: a wheel carries the repository's top-level data folders as `simpar/_data/`. Everything else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py

DATA_FOLDERS = ("hardware_profiles", "scenarios", "validation")


class BuildWithData(build_py):
    """Copies the data folders beside the built modules; an editable install reads those of the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        root, data = Path(__file__).resolve().parent, Path(self.build_lib) / "simpar" / "_data"
        rmtree(data, ignore_errors=True)  # what an earlier build left there
        for name in DATA_FOLDERS:
            copytree(root / name, data / name, ignore=ignore_patterns("tools"))  # those are run in a checkout


setup(cmdclass={"build_py": BuildWithData})
