"""Where models come from: shipped presets, Hugging Face config.json files, and TOML tables."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.specs.base import read_toml, validate
from simpar.specs.huggingface import from_huggingface
from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec

_PRESETS = Path(__file__).resolve().parent / "models"
_KINDS: dict[str, type[TransformerSpec] | type[MlpSpec] | type[CnnSpec]] = {
    "transformer": TransformerSpec,
    "mlp": MlpSpec,
    "cnn": CnnSpec,
}


def model_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def load_model(name_or_path: str, base: Path | None = None) -> TransformerSpec | MlpSpec | CnnSpec:
    """The model called `name_or_path`: a preset, or a path to a Hugging Face config.json or a TOML model table.

    A path is looked up from `base` (the scenario's folder) first, then from the working directory; a folder means the
    config.json in it.

    Raises:
        InputError: an unknown name, an unreadable file, or every violation in it together.
    """
    path = _existing(Path(name_or_path), base or Path())
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return from_huggingface(_read_json(path), file=str(path))
    if path.suffix == ".toml":
        return _from_toml(path)
    if name_or_path in model_names():
        return _preset(name_or_path)
    raise unknown("model", name_or_path, model_names())


def model_from_table(table: dict[str, Any], *, file: str = "", prefix: str = "") -> TransformerSpec | MlpSpec | CnnSpec:
    """A model from a raw `table`, whose `kind` (transformer, mlp, cnn) defaults to transformer.

    Raises:
        InputError: every violation, together.
    """
    kind = table.get("kind", "transformer")
    if kind not in _KINDS:
        field = f"{prefix}.kind" if prefix else "kind"
        raise InputError([Violation(field, kind, "unknown kind of model", f"one of {', '.join(_KINDS)}", file)])
    return validate(_KINDS[kind], {"kind": kind, **table}, file=file, prefix=prefix)


def _existing(path: Path, base: Path) -> Path:
    """`path` from `base` if it exists there, else as it stands."""
    return base / path if (base / path).exists() else path


@lru_cache(maxsize=128)
def _preset(name: str) -> TransformerSpec | MlpSpec | CnnSpec:
    return _from_toml(_PRESETS / f"{name}.toml")


def _from_toml(path: Path) -> TransformerSpec | MlpSpec | CnnSpec:
    table = read_toml(path)
    table = table.get("model", table)
    return model_from_table({"name": path.stem, **table}, file=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a config.json holds one object, this one a {type(content).__name__}")
    return content
