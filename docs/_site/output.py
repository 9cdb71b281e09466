"""The page of JSON outputs, made from real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from examples import run

COMMANDS: Final = {
    "simpar simulate": ["simulate", "korthikanti-22b_a100x8_tp8pp1", "--json"],
    "simpar search": [
        "search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "32",
        "--sequence-length", "8192", "--framework", "megatron-core", "--top", "2", "--json",
    ],
    "simpar models show": ["models", "show", "llama3.1-8b", "--json"],
    "simpar constants": ["constants", "--json"],
}  # fmt: skip
"""Heading -> a command that prints the object."""

MEANINGS: Final = {
    "active_parameters": "parameters that work on one token",
    "bubble_fraction": "mean wait for other stages over the pipeline phase",
    "communication_s": "seconds of collectives and sends by dimension, hidden or not, mean over roles",
    "constants": "every fitted number",
    "count": "how many there are",
    "device_memory_bytes": "what the device has",
    "exposed_communication_s": "the part of it that compute waits for",
    "fits": "whether the fullest rank fits",
    "forward_flops_per_token": "every matmul weight applied to one token, the attended keys of the mask exactly",
    "framework": "whose semantics, and the month since when they hold",
    "hardware": "profile",
    "hfu": "hardware FLOPs utilisation: recomputed FLOPs count as well",
    "layers": "pattern of layers with counts",
    "layout": "degrees and what follows from them",
    "mfu": "model FLOPs utilisation, attention counted causal",
    "mfu_definition": "which FLOPs and which peak",
    "mfu_non_causal": "the same with full attention",
    "model_flops_per_s_per_gpu": "model FLOPs over time and GPUs",
    "name": "of the scenario",
    "notes": "what is not modelled, or was chosen where nothing was said",
    "parameters": "of the whole model",
    "peak_memory_bytes": "of the fullest rank: tensors (allocated), what the allocator holds (reserved), the whole process (device)",
    "provenance": "what each kind of price rests on",
    "published": "published figures of this scenario, predicted and measured",
    "step_time_s": "one optimizer step",
    "tokens_per_s": "of all GPUs",
    "tokens_per_s_per_gpu": "of one",
    "uncertainty": "80 % intervals and what makes them wide",
    "waterfall_s": "seconds by cause, from the ideal to the step",
    "world_size": "GPUs",
}
"""Key -> meaning, where the name with its unit does not say it all."""


def output_page() -> str:
    """Markdown with a table of keys for each command."""
    parts = [
        "# Output\n",
        "Every command that predicts prints one JSON object with `--json`. Names carry SI units: `_s` seconds, `_bytes`, `_flops`,",
        "`_flops_per_s`. Fields are added but not renamed. The tables come from real outputs.\n",
    ]
    for heading, arguments in COMMANDS.items():
        _, text = run(arguments)
        found = json.loads(text[text.index("{") :])
        parts += [f"## {heading}\n", "| key | kind | meaning |", "|---|---|---|", *rows(found), ""]
    return "\n".join(parts)


def rows(found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Rows of an object: its keys, and below a key those of its own object or of the first item of its list."""
    for key, value in found.items():
        yield f"| `{prefix}{key}` | {kind(value)} | {MEANINGS.get(key, '') if not prefix else ''} |"
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and not prefix and all(k.isidentifier() for k in inner):
            yield from rows(inner, f"{key}{'[]' if isinstance(value, list) else ''}.")


def kind(value: Any) -> str:
    """JSON's word for a value."""
    words = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "object", type(None): "null"}
    return words[type(value)]
