"""Primus: its YAML with overrides of Megatron-LM's arguments (examples of AMD-AGI/Primus, 2025 to 2026)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from typing import Any, Final, Unpack

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.argv import options
from simpar.interop.carried import Imported, Outside
from simpar.interop.megatron_import import of_flags
from simpar.interop.megatron_model import model_flags
from simpar.interop.megatron_table import flags_of
from simpar.interop.resolved import nested
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, preset_called

_OPEN: Final = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
_DEFAULTS: Final[dict[str, Any]] = {
    "use_distributed_optimizer": True, "bf16": True, "use_flash_attn": True, "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall", "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
"""Where primus/configs (modules/megatron/pre_trainer.yaml, models/megatron) at fd1eeabb differs from Megatron-LM's defaults."""


@reader("file", "a YAML configuration of Primus")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of modules.pre_trainer.

    Raises:
        InputError: another framework than Megatron, a model file that no shipped model stands for, or a variable without a default.
    """
    table = parse_yaml(text, file or "the configuration")
    trainer = nested(table, "modules.pre_trainer")
    if not isinstance(trainer, dict):
        modules = ", ".join(map(str, nested(table, "modules") or ())) or None
        rule = "has no pre_trainer, the only module that is read"
        raise InputError([Violation("modules", modules, rule, "the log of the run, whose table of arguments has it all", file)])
    if nested(trainer, "framework", "megatron") != "megatron":
        rule = "is another trainer of Primus than Megatron's"
        raise InputError(
            [Violation("modules.pre_trainer.framework", trainer.get("framework"), rule, "megatron, or its own configuration", file)]
        )
    overrides = {
        str(k): _settled(v, f"modules.pre_trainer.overrides.{k}", file) for k, v in (trainer.get("overrides") or {}).items()
    }
    overrides = {k: bool(v) if k == "sequence_parallel" else v for k, v in overrides.items()}
    model = _settled(trainer.get("model"), "modules.pre_trainer.model", file)
    sizes: dict[str, list[str]] = {}
    if "num_layers" not in overrides or "hidden_size" not in overrides:
        found = load_model(name) if (name := preset_called(str(model))) else None
        if not isinstance(found, TransformerSpec):
            rule = "is a file of Primus's own, which is not here"
            raise InputError(
                [
                    Violation(
                        "modules.pre_trainer.model", model, rule, "the log of the run, whose table of arguments has it all", file
                    )
                ]
            )
        sizes = options(shlex.split(" ".join(model_flags(found))))
    flags = {**sizes, **flags_of({**_DEFAULTS, **overrides})}
    return of_flags(flags, text=text, file=file, accept=accept, resolved=True, **outside)


def _settled(value: Any, path: str, file: str) -> Any:
    """A value with the defaults of its variables."""
    if not isinstance(value, str) or "${" not in value:
        return value
    wrong = [m[1] for m in _OPEN.finditer(value) if m[2] is None]
    if wrong:
        raise InputError([Violation(path, value, f"asks for {wrong[0]}, which has no default", "its value in the file", file)])
    text = _OPEN.sub(lambda m: m[2] or "", value)
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return {"true": True, "false": False, "null": None, "": None}.get(text.lower(), text)
