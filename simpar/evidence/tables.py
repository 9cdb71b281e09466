"""Measured tables of a folder: `x.csv`, or packed as `x.csv.gz`, which readers open by the name without `.gz`."""

from __future__ import annotations

from pathlib import Path


def tables(folder: Path, pattern: str) -> list[Path]:
    """Files in `folder` whose name, without a `.gz`, matches `pattern`, by that name."""
    packed = (path.with_suffix("") for path in folder.glob(f"{pattern}.gz"))
    return sorted({*folder.glob(pattern), *packed})


def there(path: Path) -> bool:
    """Whether the table at `path` is there, packed or not."""
    return bool(tables(path.parent, path.name))
