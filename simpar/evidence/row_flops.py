"""Seconds per step of a run that prints nothing but TFLOP/s: the FLOPs that it says it counts, of the model that it trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from simpar.parallel.layout import Layout
from simpar.specs.scenario import Scenario

Row = Mapping[str, Any]

_HARDWARE: Final = re.compile(r"hardware|(?<!no )(?<!without )recomput|\bhfu\b", re.IGNORECASE)
_WHOLE: Final = re.compile(r"non-?causal|full attention|whole (?:score|attention)|12\s*[*x·]?\s*l\b", re.IGNORECASE)
_CAUSAL: Final = re.compile(r"causal|\bmodel\b", re.IGNORECASE)
UNCOUNTED: Final = "TFLOP/s alone, and tflops_def does not say of what: model FLOPs, with causal or with full attention"


def seconds_from_flops(row: Row, scenario: Scenario) -> float | None:
    """Seconds of a step whose model FLOPs run at the stated rate; None where that counts others or does not say.

    Attention is causal, half of the score matrix, unless the row says that it is counted whole, as recent papers do.
    """
    stated, words = row.get("tflops_per_gpu"), str(row.get("tflops_def") or "")
    whole = _WHOLE.search(words) is not None
    if not stated or _HARDWARE.search(words) or not (whole or _CAUSAL.search(words)):
        return None
    layout = Layout.of(scenario, scenario.plan.pp * scenario.plan.virtual_stages)
    flops = layout.model_flops + (layout.attention_model_flops if whole else 0.0)
    return flops / (stated * 1e12 * scenario.world_size)


__all__ = ["UNCOUNTED", "seconds_from_flops"]
