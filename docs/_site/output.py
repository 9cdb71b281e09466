"""The page of JSON outputs, made from real ones."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from examples import run, working_in

COMMANDS: Final = {
    "simpar simulate": ["simulate", "korthikanti-22b_a100x8_tp8pp1", "--json"],
    "simpar compare": ["compare", "zero-7.5b_a100x64_zero1", "zero-7.5b_a100x64_zero3", "--json"],
    "simpar explain": ["explain", "korthikanti-22b_a100x8_tp8pp1", "--measured", "step_time=1.42s", "--json"],
    "simpar search": [
        "search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "32",
        "--sequence-length", "8192", "--framework", "megatron-core", "--top", "2", "--json",
    ],
    "simpar plan": ["plan", "what-if_llama3.1-405b_h100", "--repetitions", "4", "--json"],
    "simpar topology": ["topology", "dgx-h100", "--num-nodes", "4", "--json"],
    "simpar adapt": ["adapt", "runs.jsonl", "--json"],
    "simpar validate runs": ["validate", "runs", "--where", "source=AWS", "--json"],
    "simpar validate kernels": ["validate", "kernels", "--json"],
    "simpar models": ["models", "--json"],
    "simpar models show": ["models", "show", "llama3.1-8b", "--json"],
    "simpar profiles": ["profiles", "--json"],
    "simpar profiles show": ["profiles", "show", "dgx-h100", "--json"],
    "simpar scenarios": ["scenarios", "--json"],
    "simpar constants": ["constants", "--json"],
}  # fmt: skip
"""Heading -> a command that prints the object."""
SAME_AS: Final = {
    "simpar improve": "that of [search](#simpar-search), and `start`, the layout to improve",
    "simpar tune": "described in [your own runs](../site.md)",
    "simpar run read": "one row of runs, as in `validation/runs/README.md`; see [runs in](../runs.md)",
    "simpar scenarios show": "the scenario with every [field](scenario.md)",
    "simpar diff": "described in [compare with a trace](../trace_diff.md)",
    "simpar import": "what was read: the profile or the scenario, and notes; see [scripts and measurements in](../imports.md)",
    "simpar validate": "the cases, predicted and measured; see [published runs](../validation.md)",
    "simpar validate collectives": "that of [validate kernels](#simpar-validate-kernels)",
    "simpar validate cluster": "rows as [validate runs](#simpar-validate-runs); see [validate a cluster](../validation_cluster.md)",
    "simpar validate rank": "described in [validate one rank](../validation_rank.md)",
}
"""Commands whose object needs a GPU, a log or minutes, or is another's -> what it is."""
RUNS: Final = '{"id": "monday", "scenario": "korthikanti-22b_a100x8_tp8pp1", "step_time_s": 1.42}\n'

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
    """Markdown with a table of keys for each command.

    Raises:
        ValueError: a command ended with an error.
    """
    parts = [
        "# Output\n",
        "Every command that predicts prints one JSON object with `--json`. Names carry SI units: `_s` seconds, `_bytes`, `_flops`,",
        "`_flops_per_s`. Fields are added but not renamed. The tables come from real outputs; `[]` stands for each item of a list.\n",
    ]
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        Path("runs.jsonl").write_text(RUNS)
        for heading, arguments in COMMANDS.items():
            code, text = run(arguments)
            if code > 1 or "{" not in text:
                raise ValueError(f"{heading}: exit code {code}\n{text}")
            found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
            parts += [
                f"## {heading}\n",
                f"    simpar {shlex.join(arguments)}\n",
                "| key | kind | meaning |",
                "|---|---|---|",
                *rows(found),
                "",
            ]
    parts += [
        "## Others\n",
        "| command | object |",
        "|---|---|",
        *(f"| `{name} --json` | {text} |" for name, text in SAME_AS.items()),
        "",
    ]
    return "\n".join(parts)


UNITS: Final = {
    "_flops_per_s_per_gpu": "FLOP/s of one GPU", "_flops_per_s": "FLOP/s", "_per_s": "a second", "_s": "seconds", "_bytes": "bytes",
    "_usd": "US dollars", "_kwh": "kilowatt-hours", "_fraction": "share, 0 to 1", "_hours": "hours",
}  # fmt: skip


def meaning(key: str) -> str:
    """What a key means: its own line, a term of the glossary, or at least its unit."""
    from simpar.report.terms import TERMS

    if key in MEANINGS:
        return MEANINGS[key]
    word = key.replace("_", " ")
    found = next((text for term, text in TERMS.items() if word in [part.strip() for part in term.lower().split(",")]), "")
    return found or next((unit for end, unit in UNITS.items() if key.endswith(end)), "")


def rows(found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Rows of an object: its keys, and below a key those of its own object or of the first item of its list."""
    for key, value in found.items():
        yield f"| `{prefix}{key}` | {kind(value)} | {meaning(key).replace('|', ' ')} |"
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and not prefix and all(k.isidentifier() for k in inner):
            yield from rows(inner, f"{key}{'[]' if isinstance(value, list) else ''}.")


def kind(value: Any) -> str:
    """JSON's word for a value."""
    words = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "object", type(None): "null"}
    return words[type(value)]
