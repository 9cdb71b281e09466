"""Layers of each pipeline stage, as a run states them or as its framework deals them out."""

from __future__ import annotations

import re
from typing import Any

from simpar.evidence.row_machine import CannotExpress
from simpar.evidence.row_values import Row
from simpar.specs.layer_split import split_by_cost


def stage_layers(row: Row, rounding: str, stages: int) -> dict[str, Any]:
    """Plan fields of a run over so many virtual stages; `rounding`: the framework's way where the run does not say.

    Raises:
        CannotExpress: a layout that is not understood or does not hold all layers.
    """
    layers, stated = int(row["layers"]), str(row.get("pp_layout") or "")
    usual = layout_of(stated, layers, stages)
    if stated:
        return usual
    if rounding == "cost" and int(row["pp"]) > 1:
        return {"layers_per_stage": _by_cost(row, stages)}
    deal = {"fill": _filled, "last": _last_longer, "ends": _ends}.get(rounding)
    return (deal(layers, stages) if deal else {}) or usual


def layout_of(text: str, layers: int, stages: int) -> dict[str, Any]:
    """Plan fields of a pp_layout: words about the first and last stage, or Megatron's layout language.

    >>> layout_of("Et*2|(t*3|)*2tL", 9, 4)
    {'layers_per_stage': (2, 3, 3, 1)}

    Raises:
        CannotExpress: a layout that does not hold all layers.
    """
    if not text:
        return _more_stages_than_layers(layers, stages)
    if re.fullmatch(r"[EtmL*()|,\d\s]+", text):
        counts = parse_layout(text)
        if sum(counts) != layers or len(counts) != stages:
            held = f"{sum(counts)} layers in {len(counts)} stages"
            raise CannotExpress(f"pp_layout {text!r} has {held}, not {layers} in {stages}")
        return {"layers_per_stage": counts}
    if re.search(r"first.*last.*(fewer|removed)|removed from first|counted as layers", text):
        if stages >= layers:
            return _more_stages_than_layers(layers, stages)
        if (layers + 2) % stages == 0:
            return {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
        if (layers + 1) % stages == 0:
            return {"last_stage_less_layers": 1}
        return {}
    raise CannotExpress(f"pp_layout {text!r} is not understood")


def parse_layout(text: str) -> tuple[int, ...]:
    """Transformer layers per stage of Megatron's pipeline layout ("E" embedding, "t" layer, "m" MTP, "L" loss).

    "|" ends a stage, "," is ignored, "x*3" repeats one symbol, "(...)*3" a group.
    """
    expanded = re.sub(r"\s|,", "", text)
    group = re.compile(r"\(([^()]*)\)\*(\d+)")
    while (found := group.search(expanded)) is not None:
        expanded = expanded[: found.start()] + found[1] * int(found[2]) + expanded[found.end() :]
    expanded = re.sub(r"([A-Za-z|])\*(\d+)", lambda m: m[1] * int(m[2]), expanded)
    return tuple(stage.count("t") for stage in expanded.split("|"))


def _more_stages_than_layers(layers: int, stages: int) -> dict[str, Any]:
    """Single-layer stages; the first and last (embedding and head) without, further empty ones at the end."""
    empty = stages - layers
    if empty <= 0:
        return {}
    first = 1 if empty >= 2 else 0
    return {"layers_per_stage": (0,) * first + (1,) * layers + (0,) * (empty - first)}


def _filled(layers: int, stages: int) -> dict[str, Any]:
    """Every stage the rounded-up share, the last what is left; nothing where they divide or a stage would stay empty."""
    share = -(-layers // stages)
    rest = layers - share * (stages - 1)
    return {"layers_per_stage": [share] * (stages - 1) + [rest]} if layers % stages and rest > 0 else {}


def _last_longer(layers: int, stages: int) -> dict[str, Any]:
    """The layers that are left over go to the last stages; nothing where they divide."""
    share, rest = divmod(layers, stages)
    return {"layers_per_stage": [share] * (stages - rest) + [share + 1] * rest} if share and rest else {}


def _ends(layers: int, stages: int) -> dict[str, Any]:
    """The rounded-up share in between; what is left on the first and the last stage."""
    share = -(-layers // stages)
    left = layers - share * (stages - 2)
    if stages < 3 or layers % stages == 0 or left < 1:
        return {}
    return {"layers_per_stage": (left - left // 2, *(share,) * (stages - 2), left // 2)}


def _by_cost(row: Row, stages: int) -> tuple[int, ...]:
    """Layers per stage of a framework that deals them out by matmul weights, the head's included."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    attention = 4 * heads * int(row.get("head_dim") or hidden // heads) * hidden
    layer = attention + 3 * int(row["ffn"]) * hidden
    return split_by_cost(int(row["layers"]), layer, float(row.get("vocab") or 0) * hidden, stages)
