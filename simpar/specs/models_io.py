"""Where models come from: shipped presets, Hugging Face config.json files, and TOML tables."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from simpar.boundary import read_json, reader
from simpar.errors import InputError, UnknownNameError, Violation
from simpar.registry import unknown
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.base import read_toml, validate
from simpar.specs.hub import hub_config, hub_url, is_hub_name
from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec

_PRESETS = Path(__file__).resolve().parent / "models"
AnyModel = TransformerSpec | MlpSpec | CnnSpec | ArchitectureSpec
_KINDS: dict[str, type[TransformerSpec] | type[MlpSpec] | type[CnnSpec] | type[ArchitectureSpec]] = {
    "transformer": TransformerSpec,
    "mlp": MlpSpec,
    "cnn": CnnSpec,
    "layers": ArchitectureSpec,
}


def model_names() -> list[str]:
    """Names of the shipped presets: TOML tables, and published config.json files by another name."""
    return sorted(path.stem for suffix in ("toml", "json") for path in _PRESETS.glob(f"*.{suffix}"))


def table_names() -> list[str]:
    """Names of the presets that are TOML tables: models of one kind of layer, read in no time."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def preset_of(model: AnyModel) -> str | None:
    """The preset, among those that are tables, that `model` is; none where it is no shipped one."""
    return next((name for name in table_names() if _preset(name) == model), None)


def _plain(text: str) -> str:
    """A name of a model in the spelling of presets."""
    plain = re.sub(r"[\s_]+", "-", text.lower()).replace("gpt-3", "gpt3")
    plain = re.sub(r"(?<=[a-z])v(?=\d)", "-v", plain)
    plain = re.sub(r"(?<![a-z])llama-(?=\d)", "llama", plain)
    return re.sub(r"llama3(?:\.[03])?-(?=8b|70b)", "llama3.1-", plain)  # of the same shapes


def preset_called(text: str) -> str | None:
    """The shipped model that a name or path means: "meta-llama/Llama-3.1-8B-Instruct", "llama3.1_70B.yaml"; none where no shape of
    a shipped one is meant. What comes behind a size (-Instruct, a date, a precision) does not change shapes."""
    plain = _plain(re.sub(r"\.(ya?ml|json)$", "", text.rstrip("/").rpartition("/")[2].lower()))
    plain = plain.removeprefix("meta-").removeprefix("nvidia-")
    tuned = r"-(instruct|base|chat|hf|pretrain|it|thinking|exp|bf16|fp8)(?=-|$)"
    cut = re.sub(tuned + ".*$", "", plain)
    known = {re.sub(r"[^a-z0-9.]", "", n.lower()): n for n in model_names()}
    meant = (plain, re.sub(tuned, "", plain), cut, re.sub(r"-(v\d\.\d|\d{4})$", "", cut))
    return next((known[name] for one in meant if (name := re.sub(r"[^a-z0-9.]", "", one)) in known), None)


def preset_described(text: str) -> str | None:
    """The shipped model of which a description speaks: the longest name in it ("Llama 3.1 405B proxy, 8 layers"), else the only one
    that begins with it ("Nemotron_3_Nano"); it may be cut in depth."""
    plain = _plain(text)
    found = [name for name in model_names() if re.search(rf"(?<![a-z0-9.]){re.escape(name)}(?![a-z0-9.])", plain)]
    if not found and re.search(r"[a-z].*\d", plain):
        begun = [name for name in model_names() if name.startswith(f"{plain}-")]
        return begun[0] if len(begun) == 1 else None
    return max(found, key=len, default=None)


def load_model(name_or_path: str, base: Path | None = None, *, approximate: bool = False) -> AnyModel:
    """The model called `name_or_path`: a preset, by its own name or a name at Hugging Face, a path to a Hugging Face config.json or
    a TOML model table, or any other model of the Hugging Face Hub, whose config.json is fetched (`simpar.specs.hub`).

    `approximate` accepts structural keys of a config.json that are not read, with a note.

    A path is looked up from `base` (the scenario's folder) first, then from the working directory; a folder means the
    config.json in it.

    Raises:
        InputError: an unknown name, an unreadable file, or every violation in it together.
    """
    path = _existing(Path(name_or_path), base or Path())
    if os.path.isdir(path) and name_or_path not in model_names():
        if not (path / "config.json").is_file():
            raise InputError([Violation("model", name_or_path, "is a folder without a config.json", "name a file in it")])
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path, approximate=approximate)
    if path.suffix == ".toml":
        return _from_toml(path)
    if name_or_path in model_names():
        return _preset(name_or_path)
    if (name := preset_called(name_or_path)) is not None:
        return _preset(name)
    error = unknown("model", name_or_path, model_names(), "simpar models")
    if not is_hub_name(name_or_path):
        raise error
    config = hub_config(name_or_path)
    if isinstance(config, str):
        raise UnknownNameError(f"{error}. {config}")
    found = _from_config(config, approximate=approximate)
    return found.model_copy(update={"name": name_or_path, "source": hub_url(name_or_path)})


def model_from_table(table: dict[str, Any], *, file: str = "", prefix: str = "") -> AnyModel:
    """A model from a raw `table`, whose `kind` (transformer, mlp, cnn, layers) defaults to transformer.

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
    try:
        return base / path if (base / path).exists() else path
    except (OSError, ValueError):  # no path: too long, or a NUL in it
        return path


@lru_cache(maxsize=128)
def _preset(name: str) -> AnyModel:
    path = _PRESETS / f"{name}.toml"
    return _from_toml(path) if path.is_file() else _from_config(path.with_suffix(".json"), name=name)


@reader("path", "a Hugging Face config.json")
def _from_config(path: Path, *, name: str = "", approximate: bool = False) -> AnyModel:
    """The model of a config.json; a preset carries its `_source` and its count of `_parameters`."""
    # A scenario names its model, so the reader of model files is called from here; simpar.model imports the specs.
    from simpar.model.huggingface import from_huggingface

    config = read_json(path, "a Hugging Face config.json, one object", finite=False)  # limits of time steps are Infinity
    model = from_huggingface(config, file=str(path), approximate=approximate)
    if not name:
        return model
    return model.model_copy(update={"name": name, "source": config["_source"], "published_parameters": config["_parameters"]})


@reader("path", "a [model] table, TOML")
def _from_toml(path: Path) -> AnyModel:
    table = read_toml(path)
    table = table.get("model", table)
    return model_from_table({"name": path.stem, **table}, file=str(path))
