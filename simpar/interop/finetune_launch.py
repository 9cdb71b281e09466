"""Commands that start fine-tuning: a YAML file, flags that win over it, and accelerate's configuration among the words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simpar.boundary import MOST_CONFIG_BYTES, parse_yaml, read_text
from simpar.interop.carried import Imported
from simpar.interop.finetune_import import dialect_of, load


def load_words(words: Sequence[str], flags: Mapping[str, Sequence[str]], script: Path, **settings: Any) -> Imported | None:
    """The scenario of a command's words, or none where they start no fine-tuning that is read.

    Args:
        flags: of the words, names with hyphens.
        settings: as `finetune_import.load`.

    Raises:
        InputError: as `finetune_import.load`.
    """
    base: dict[str, Any] = {}
    accelerate: dict[str, Any] = {}
    for place in _files(words, script):
        table = parse_yaml(read_text(place, MOST_CONFIG_BYTES), place)
        if isinstance(table, dict) and "distributed_type" in table:
            accelerate = accelerate or table
        elif isinstance(table, dict) and dialect_of(table) is not None:
            base = base or table
    said = {name.replace("-", "_"): _value(values) for name, values in flags.items()}
    # Flags alone name no trainer: those of TRL and of LLaMA-Factory are known by their program and by keys of their own.
    ours = bool({"finetuning_type", "template"} & set(said)) or any(w == "trl" or w.startswith("trl.") for w in words)
    if not base and not ours:
        return None
    if accelerate:
        settings["accelerate"] = accelerate | {name: said[name] for name in ("num_processes", "num_machines") if name in said}
    table = base | said
    return None if dialect_of(table) is None else load(json.dumps(table), file=str(script), **settings)


def _files(words: Sequence[str], script: Path) -> list[Path]:
    """YAML files that the words name, as they lie or beside the script."""
    named = [w.partition("=")[2] or w for w in words if w.endswith((".yaml", ".yml"))]
    return [place for name in named for place in (Path(name), script.parent / name) if place.is_file()]


def _value(values: Sequence[str]) -> Any:
    """A flag's value: true without one, a list of several, else what YAML makes of it; a short option ends it (-m)."""
    end = next((i for i, v in enumerate(values) if re.match("-[a-z]", v)), len(values))
    values = values[:end]
    found = [parse_yaml(v, "a flag") for v in values]
    return True if not found else found[0] if len(found) == 1 else found
