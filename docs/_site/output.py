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
    "simpar scenarios": ["scenarios", "--json"],
    "simpar constants": ["constants", "--json"],
}  # fmt: skip
"""Heading -> a command that prints the object."""
SAME_AS: Final = {
    "simpar improve": "that of [search](#simpar-search), and `start`, the layout to improve",
    "simpar tune": "described in [your own runs](../site.md)",
    "simpar run read": "one row of runs, as in `validation/runs/README.md`; see [runs in](../runs.md)",
    "simpar scenarios show": "the scenario with every [field](scenario.md)",
    "simpar profiles show": "the profile with every [field](profile.md)",
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
    "about": "one line",
    "accuracy": "share called right",
    "after": "with it",
    "architecture": "generation of the GPU",
    "assumed": "what the file left open",
    "assumptions": "figures of the profile that nobody measured or published",
    "before": "without it",
    "below_ideal": "whether it is faster than the ideal allows",
    "best": "layouts, best first",
    "best_probability": "that it is the best of those shown",
    "bias": "mean signed error",
    "binding": "what limits the plan",
    "bounds": "by a bound alone",
    "by": "what the group has in common",
    "bytes": "bytes",
    "calibrated": "whether kernels and collectives of this machine were measured",
    "carbon_kg": "kilograms of CO2",
    "causes": "seconds won and lost, by cause",
    "change": "what is different",
    "checkpoint": "its size, and what was assumed of it",
    "checkpoints": "how many are written",
    "choice": "values of all axes",
    "close": "whether the model can tell them apart",
    "closed_forms": "the same by formula, as a check on the simulation",
    "collectives": "fitted constants of collectives",
    "constraints": "limits that were asked for",
    "core": "top level",
    "cost_usd": "US dollars",
    "coverage": "share of measured values inside the 80 % interval",
    "days": "of the whole run",
    "deadline_probability": "that the run ends in time",
    "description": "one line",
    "design": "what makes it another layout than the others",
    "details": "how it was read and predicted",
    "device": "of the whole process",
    "differs_in": "axes",
    "domain_size": "GPUs that reach each other over the fast links",
    "dominated_by": "what makes it wide, widest first",
    "doubted": "runs that contradict the others",
    "effective_training_time_ratio": "time in steps that count, over all time",
    "effects": "whether contention and slow ranks were simulated",
    "energy_kwh": "kilowatt-hours",
    "error": "predicted over measured, minus one",
    "evaluated": "layouts looked at, by how closely",
    "excluded": "rows that the data says to leave out",
    "expected_ettr": "effective training time ratio by formula",
    "experts": "of a layer",
    "explanation": "in words",
    "fabric": "the network between nodes",
    "factors": "on seconds of compute, memory-bound kernels and communication",
    "failures": "how many happen",
    "feasible": "whether the constraints can be met",
    "finished": "share of repetitions that end",
    "first": "the object of `simulate`, first scenario",
    "fit_probability": "that its peak memory fits a real device",
    "fitted": "whether a constant was fitted with this run",
    "free_choices": "axes that change nothing here, and their values",
    "from_store": "whether an earlier search was taken",
    "front": "layouts that no other beats in time and memory",
    "gain": "error that it saves on sources left out",
    "gain_se": "its standard error",
    "gap_of": "what the gap is measured against",
    "goodput": "share of time that trains",
    "goodput_exact": "goodput by formula, failures while recovering included",
    "goodput_first_order": "the usual approximation",
    "gpus": "how many",
    "gpus_per_domain": "GPUs of one fast domain",
    "gpus_per_node": "of one host",
    "groups": "rows put together",
    "half_width": "half of the 80 % interval",
    "half_widths": "distance in half-widths of the interval",
    "heads": "attention heads",
    "hidden_size": "width of the model",
    "high": "upper end",
    "id": "of the row",
    "ideal_days": "without any loss of time",
    "inside_interval": "whether it lies in the 80 % interval",
    "interval": "80 % of real runs lie inside",
    "kept": "runs that count",
    "kernels": "fitted constants of kernels",
    "kind": "what it is",
    "layer": "kind of layer",
    "layout_search": "how its layout was found",
    "leaf": "bottom level",
    "leaf_groups": "groups of nodes under one leaf switch",
    "leaf_spine": "between leaf and spine",
    "like": "causes by how much of the gap they explain",
    "links": "number by kind",
    "longest_path": "by the longest path",
    "lost_time_s": "seconds that do not train, by cause",
    "low": "lower end",
    "machine": "profile",
    "mape": "mean absolute error",
    "max": "largest",
    "max_sequence_length": "longest sequence",
    "mean_error": "of the runs, without and with the site",
    "mean_regret_1": "loss of taking the first choice",
    "mean_regret_5": "loss of the best of five choices",
    "mean_tau": "Kendall's tau",
    "meaning": "what it scales",
    "measured": "what was measured, against the prediction",
    "measured_nearby": "published runs of the same framework and kinds of parallelism",
    "median": "middle error",
    "memory": "by pipeline rank",
    "metric": "which figure",
    "metrics": "the object of `simulate`",
    "mode": "quick or proven",
    "model": "name",
    "neighbours": "layouts one change away",
    "network": "kind of network",
    "neutral": "value that changes nothing",
    "nic": "adapters",
    "nic_bytes_per_s_per_gpu": "rate of the adapters, for one GPU, one direction",
    "nics": "adapters",
    "nics_per_node": "adapters of one host",
    "node": "one host",
    "nodes": "hosts",
    "not_expressed": "rows without a prediction",
    "num_gpus": "how many",
    "num_nodes": "hosts",
    "nvswitches": "switches of the fast domain",
    "objective": "what is best",
    "oom": "out-of-memory labels: called right and wrong",
    "op": "kernel",
    "optimality_gap": "how much better an unseen layout of the space could be",
    "oversubscription": "ratio of leaf to spine",
    "p10": "10th percentile of the repetitions",
    "p50": "median",
    "p90": "90th percentile",
    "parameters_without_embeddings": "without embedding and head",
    "parts": "bytes by category",
    "pcie": "host links",
    "per_pipeline_rank": "one for each pipeline rank",
    "per_sweep": "one row for each sweep",
    "phase": "which phase",
    "phase_days": "days of each phase",
    "plans": "plan files",
    "pods": "groups of leaf groups",
    "power_w": "watts of the cluster",
    "predicted": "by simpar",
    "probability_spares_short": "that spares run out",
    "proven": "whether nothing better is left",
    "ran_called_impossible": "runs that ran and were predicted not to fit",
    "ranking": "how well layouts of a sweep are put in order",
    "reason": "in words",
    "reasons": "why this layout",
    "recipe": "fields of the plan to set",
    "rejected": "reason -> layouts",
    "repeated_ids": "ids that occur twice",
    "repetitions": "simulated runs",
    "robust": "best under doubt about prices",
    "rows": "one for each measured value",
    "runner_up": "the best of the other designs",
    "scale_up": "links of the fast domain",
    "scale_up_bytes_per_s_per_gpu": "rate of the fast links, one GPU, one direction",
    "scale_up_domains": "how many fast domains",
    "scenarios": "one for each file",
    "second": "of the second scenario",
    "seconds": "seconds",
    "seed": "of the random draws",
    "sensitivity": "change of the answer for each assumption",
    "sequence_length": "tokens",
    "simulated_with_effects": "layouts simulated again with the effects of the scenario",
    "since": "month from which the behaviour holds",
    "site": "what the runs say, as `--site` takes it",
    "size": "size of the problem",
    "skipped": "why there is no prediction",
    "slower_by": "share of the step",
    "source": "where it stands",
    "sources": "whose runs it rests on",
    "space_size": "layouts of the space",
    "spares_needed": "for the wanted probability",
    "spine": "middle level",
    "spine_core": "between spine and core",
    "stack": "which stack it is in",
    "status": "fitted, kept, or read off",
    "steps": "the step of each phase",
    "storage": "bandwidth that checkpoints need",
    "studies": "what-if questions that were asked",
    "sweeps": "how many",
    "switches": "number by level",
    "switches_on_longest_route": "between the farthest GPUs",
    "table": "file of the data",
    "tensor": "its name",
    "tensors_at_peak": "live tensors of the fullest rank",
    "text": "in words",
    "tied": "layouts that no price tells apart from it",
    "title": "of the scenario",
    "tolerance": "largest error allowed",
    "try_these": "layouts worth a trial run",
    "unused": "runs that say nothing, with the reason",
    "usd_per_million_tokens": "US dollars",
    "value": "of the objective",
    "warnings": "what to look at",
    "why": "reasons for the order",
    "widest_tier": "farthest level that a group crosses",
    "worst_regret_1": "largest loss of a first choice",
    "would_win_if": "what would have to be different",
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
    from simpar.specs.base import field_texts
    from simpar.specs.plan import PlanSpec
    from simpar.specs.site import Site

    if key in MEANINGS:
        return MEANINGS[key]
    fields = {name: text for spec in (PlanSpec, Site) for name, text in field_texts(spec).items()}
    if key in fields:
        return fields[key]
    word = key.replace("_", " ")
    found = next((text for term, text in TERMS.items() if word in [part.strip() for part in term.lower().split(",")]), "")
    return found or next((unit for end, unit in UNITS.items() if key.endswith(end)), "")


def rows(found: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Rows of an object: its keys, and below a key those of its own object or of the first item of its list."""
    for key, value in found.items():
        yield f"| `{prefix}{key}` | {kind(value)} | {meaning(key).replace('|', ' ')} |"
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and not prefix and key != "fields" and all(k.isidentifier() for k in inner):
            yield from rows(inner, f"{key}{'[]' if isinstance(value, list) else ''}.")


def kind(value: Any) -> str:
    """JSON's word for a value."""
    words = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "object", type(None): "null"}
    return words[type(value)]
