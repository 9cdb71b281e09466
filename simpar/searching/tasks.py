"""Fine-tuning tasks: the memory options of a training table as axes, in words that people know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.searching.request import make_space
from simpar.searching.space import Space

Recipe = tuple[str, dict[str, Any]]
"""Words, and what they change in the training table."""

_LOSSES: Final[tuple[Recipe, ...]] = (
    ("", {}),
    ("Liger loss and kernels", {"cross_entropy": "linear", "fused_kernels": True}),
)
_STATES: Final[tuple[Recipe, ...]] = (("", {"pure_bf16": False}), ("bf16 throughout", {"pure_bf16": True}))
_OPTIMIZERS: Final[tuple[Recipe, ...]] = (
    ("AdamW", {"optimizer": "adamw"}),
    ("8-bit AdamW", {"optimizer": "adamw-8bit"}),
    ("paged 8-bit AdamW", {"optimizer": "adamw-8bit-paged"}),
    ("Adafactor", {"optimizer": "adafactor"}),
    ("8-bit AdamW in the backward", {"optimizer": "adamw-8bit", "optimizer_in_backward": True}),
    ("paged 8-bit AdamW in the backward", {"optimizer": "adamw-8bit-paged", "optimizer_in_backward": True}),
)
_BASES: Final[tuple[Recipe, ...]] = (
    ("LoRA on 16-bit weights", {}),
    ("LoRA on 8-bit weights", {"base_weights": "int8"}),
    ("QLoRA (4-bit weights, double quantisation)", {"base_weights": "nf4-double"}),
)
_LORA: Final = {"trainable": "lora", "lora_modules": "all"}

TASKS: Final[dict[str, tuple[tuple[Recipe, ...], ...]]] = {
    "full": (_OPTIMIZERS, _STATES, _LOSSES),
    "lora": (_BASES, _LOSSES),
}
"""Task -> its axes beside those of the plan (sharding, checkpointing, what lives on the host, micro-batch)."""

USUAL_SEQUENCE: Final = 2048
USUAL_BATCH: Final = 16
USUAL_FRAMEWORK: Final = "trl"
"""Of a task that says no more: the Trainer with what TRL adds, activations on the host among it."""


def recipes(task: str, training: Mapping[str, Any]) -> list[Recipe]:
    """Every combination of a task's options as (words, training table); what the table says already stays.

    >>> [name for name, _ in recipes("lora", {"cross_entropy": "auto"})][:2]
    ['LoRA on 16-bit weights', 'LoRA on 8-bit weights']
    """
    found: dict[str, dict[str, Any]] = {}
    for chosen in product(*TASKS[task]):
        changes = {key: value for _, part in chosen for key, value in part.items()}
        if any(key in training and training[key] != value for key, value in changes.items()):
            continue
        words = ", ".join(name for name, _ in chosen if name)
        found.setdefault(words, {**(_LORA if task == "lora" else {}), **changes, **training})
    return list(found.items())


def task_spaces(
    task: str, table: Mapping[str, Any], file: str, *, fix: Sequence[str], allow: Sequence[str], framework: str | None
) -> list[Space]:
    """One space for every combination of a task's memory options that the framework has.

    Raises:
        InputError: it has none of them.
    """
    refused: InputError | None = None
    found = []
    for words, changed in recipes(task, dict(table.get("training") or {})):
        try:
            space = make_space({**table, "training": changed}, file=file, fix=fix, allow=allow, framework=framework)
        except InputError as error:
            refused = error
        else:
            found.append(replace(space, recipe=words))
    if not found:
        raise refused or InputError([Violation("--task", task, "leaves nothing to choose", "fewer values in [training]")])
    return found


__all__ = ["TASKS", "USUAL_BATCH", "USUAL_FRAMEWORK", "USUAL_SEQUENCE", "Recipe", "recipes", "task_spaces"]
