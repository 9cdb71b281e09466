"""Megatron-LM's pipeline layout strings: "Et*3|(tt|)*29,m|L" is embedding and 3 layers, 29 stages of 2, ..., head alone."""

from __future__ import annotations

import re
from typing import Any

from simpar.errors import InputError, Violation
from simpar.interop.stage_cuts import split_fields
from simpar.parallel.pipeline import split_layers
from simpar.specs.counts import layer_count, model_stages
from simpar.specs.scenario import Scenario


def layout_text(scenario: Scenario) -> str | None:
    """The layout of the scenario's stages, or None where plain flags say it (equal stages)."""
    plan, layers = scenario.plan, layer_count(scenario.model)
    counts = [s.count for s in split_layers(layers, model_stages(plan), plan)]
    if len(set(counts)) == 1:
        return None
    modules = getattr(scenario.model, "num_nextn_predict_layers", 0)
    texts = [f"t*{n}" if n > 1 else "t" * n for n in counts]
    texts[0] = f"E,{texts[0]}" if texts[0] else "E"
    tail = ",".join(x for x in (texts[-1], *(["m"] * modules), "L") if x)
    texts[-1] = tail
    return "|".join(texts)


def expand(text: str) -> list[str]:
    """Stages as strings of single letters: "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"].

    Raises:
        InputError: brackets do not match, or a letter means nothing.
    """
    text = text.replace(",", "").replace(" ", "").strip("'\"")
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?", text):
        text = text[: match.start()] + match[1] * int(match[2] or 1) + text[match.end() :]
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    if re.search(r"[^EtmL|]", text):
        rule = "holds something other than E, t, m, L, |, (...)*n"
        raise InputError([Violation("--pipeline-model-parallel-layout", text, rule, 'such as "Et*3|(tt|)*29,m|L"')])
    return text.split("|")


def layers_from_layout(text: str, layers: int, pp: int) -> dict[str, Any]:
    """The plan's fields of a layout string: a cut that has a name where there is one, else layers_per_stage.

    Raises:
        InputError: the layout does not hold the model's layers in a whole number of stages per rank.
    """
    stages = expand(text)
    counts = [stage.count("t") for stage in stages]
    if sum(counts) != layers or len(counts) % pp:
        rule = f"has {len(counts)} stages with {sum(counts)} layers"
        raise InputError(
            [Violation("--pipeline-model-parallel-layout", text, rule, f"{layers} layers in a multiple of {pp} stages")]
        )
    found: dict[str, Any] = {"virtual_stages": len(counts) // pp, "schedule": "interleaved" if len(counts) > pp else "1f1b"}
    return {**found, **split_fields(counts, pp)}


def counts_of_ends(layers: int, pp: int, v: int, first: int, last: int) -> list[int]:
    """Layers of each virtual stage where the first and last rank's are given (-1 = like the ranks between).

    Megatron-LM: the ranks between share the rest evenly, and the layers of a rank are cut into `v` equal chunks.
    """
    given = [n for n in (first, last) if n >= 0]
    between = pp - len(given)
    each = (layers - sum(given)) // between if between > 0 else 0
    ranks = [each] * pp
    if first >= 0:
        ranks[0] = first
    if last >= 0:
        ranks[-1] = last
    return [ranks[rank] // v for _ in range(v) for rank in range(pp)]
