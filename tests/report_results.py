"""Simulated steps for the report tests: small, of every level of detail, folded and expanded."""

from __future__ import annotations

import base64
import gzip
import json
from functools import lru_cache
from typing import Any

import numpy as np

from simpar.result.interpret import interpret
from simpar.result.result import Result
from simpar.specs.base import data_dir
from simpar.specs.scenario import Scenario, read_scenario
from simpar.step import prepare, run

SMALL_70B = ("training.global_batch_size=16",)


def scenario(stem: str, *overrides: str) -> Scenario:
    """A shipped scenario, changed."""
    return read_scenario(data_dir("scenarios") / f"{stem}.toml", list(overrides))


@lru_cache(maxsize=64)
def step(stem: str, detail: str = "layer", engine: str = "discrete_event", overrides: tuple[str, ...] = ()) -> Result:
    """A folded step."""
    priced = prepare(scenario(stem, *overrides), detail=detail)  # type: ignore[arg-type]
    return interpret(priced, run(priced, engine))  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def expanded(slow_rank: int | None = None) -> Result:
    """A step of 64 ranks, each simulated, one of them slower if asked for."""
    priced = prepare(scenario("llama3.1-70b_h100x64_tp4cp2pp4", *SMALL_70B), detail="stage", expand=True)
    effects = {} if slow_rank is None else {"slow_factors": {slow_rank: 1.4}}
    return interpret(priced, run(priced, **effects))


EVERY = [
    ("llama3.1-70b_h100x64_tp4cp2pp4", "stage", SMALL_70B),
    ("llama3.1-70b_h100x64_tp4cp2pp4", "layer", SMALL_70B),
    ("llama3.1-70b_h100x64_tp4cp2pp4", "op", SMALL_70B),
    ("deepseek-v3_h800x2048_pp16ep64", "layer", ("training.global_batch_size=4096",)),
    ("zero-7.5b_a100x64_zero3", "op", ()),
    ("mlp-4096x24_a100x8_pp8", "layer", ()),
    ("mlp-4096x24_a100x8_tp8", "op", ()),
    ("alexnet_gtx580x2_tp2", "stage", ()),
    ("alexnet_gtx580x2_tp2", "op", ()),
]
"""(scenario, detail, overrides)."""


def unpacked(value: dict[str, str]) -> np.ndarray[Any, np.dtype[Any]]:
    """The inverse of `encode.packed`, as the page's script does it."""
    return np.frombuffer(base64.b64decode(value["bdata"]), dtype=f"<{value['dtype']}")


def decompressed(text: str) -> Any:
    """The inverse of `encode.compressed`."""
    return json.loads(gzip.decompress(base64.b64decode(text)))
