"""Spaces and random layouts that the tests of the layout search share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from simpar.searching.choice import Choice
from simpar.searching.request import make_space
from simpar.searching.space import Space

TINY = {
    "kind": "transformer", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama3.1-8b", "nodes": 2, "batch": 32},
    "gqa": {"model": "llama3.1-70b", "nodes": 8, "batch": 64, "sequence": 8192},
    "moe": {"model": "mixtral-8x7b", "nodes": 4, "batch": 64},
    "mla": {"model": "deepseek-v2", "nodes": 8, "batch": 64},
    "tiny": {"model": TINY, "nodes": 1, "batch": 16, "sequence": 1024},
    "tied": {"model": {**TINY, "tie_word_embeddings": True}, "nodes": 1, "batch": 16, "sequence": 1024,
             "semantics": "zero-bubble"},
    "torchtitan": {"model": "llama3.1-8b", "nodes": 2, "batch": 32, "semantics": "torchtitan"},
    "zero-bubble": {"model": "llama3.1-8b", "nodes": 2, "batch": 32, "semantics": "zero-bubble"},
    "deepspeed": {"model": "llama3.1-8b", "nodes": 2, "batch": 32, "semantics": "deepspeed"},
    "deferred": {"model": "llama3.1-8b", "nodes": 2, "batch": 64, "semantics": "torchtitan", "plan": {"defer_reduction": True}},
    "trainer": {"model": "llama3.1-8b", "nodes": 1, "batch": 32, "semantics": "transformers"},
    "hosted": {"model": "llama3.1-8b", "nodes": 1, "batch": 32, "semantics": "transformers", "framework": "transformers"},
    "nanotron": {"model": "llama3.1-8b", "nodes": 2, "batch": 32, "semantics": "nanotron"},
    "fsdp-moe": {"model": "mixtral-8x7b", "nodes": 4, "batch": 64, "semantics": "torchtitan"},
    "uneven": {"model": "mixtral-8x7b", "nodes": 4, "batch": 64, "training": {"routing": {"kind": "zipf", "alpha": 0.5}}},
    "fsdp-fp8": {"model": "llama3.1-8b", "nodes": 2, "batch": 32, "semantics": "torchtitan", "training": {"precision": "fp8"}},
}  # fmt: skip
"""Spaces of many kinds, as arguments of `space_of`."""

SLOW: dict[str, dict[str, Any]] = {
    "slow-gpu": {**CASES["dense"], "effects": {"expand": True, "slow_ranks": {11: 1.4}}},
    "slow-experts": {**CASES["moe"], "nodes": 2, "effects": {"expand": True, "slow_ranks": {5: 1.2, 6: 1.1}}},
    "slow-rank": {**CASES["zero-bubble"], "effects": {"slow_ranks": {0: 1.3}}},
    "slow-first-ranks": {**CASES["torchtitan"], "fix": ("pp=4",), "effects": {"slow_ranks": {1: 1.5, 2: 1.1}}},
}  # fmt: skip
"""The same with slow ranks."""


def space_of(
    model: Any, hardware: str = "dgx-h100", nodes: int = 2, sequence: int | None = 4096, batch: int = 32,
    *, fix: Sequence[str] = (), allow: Sequence[str] = (), framework: str | None = None, training: dict[str, Any] | None = None,
    num_gpus: int | None = None, semantics: str | None = None, plan: dict[str, Any] | None = None,
    effects: dict[str, Any] | None = None,
) -> Space:  # fmt: skip
    """A space of a model on a cluster."""
    own: dict[str, Any] = {"global_batch_size": batch, **(training or {})}
    if sequence is not None:
        own["sequence_length"] = sequence
    cluster: dict[str, Any] = {"hardware": hardware, "num_nodes": nodes}
    if num_gpus is not None:
        cluster["num_gpus"] = num_gpus
    table: dict[str, Any] = {"name": "space", "model": model, "cluster": cluster, "training": own}
    if semantics is not None:
        table["framework"] = semantics
    if plan is not None:
        table["plan"] = plan
    if effects is not None:
        table["effects"] = effects
    return make_space(table, fix=fix, allow=allow, framework=framework)


def random_choice(space: Space, draw: random.Random) -> Choice | None:
    """A layout of the space, each axis drawn in turn; None where the draw leads to an empty corner."""
    group = draw.choice(space.groups)
    batches = space.micro_batches(group)
    if not batches:
        return None
    batch, m = draw.choice(batches)
    variants, pipelines = space.variants(group), space.pipelines(group.pp, m)
    if not variants or not pipelines:
        return None
    pipeline, variant = draw.choice(pipelines), draw.choice(variants)
    merges, states = space.merges(variant), space.states(group)
    recomputes = space.recomputes(space.deepest(pipeline, group.pp), merges=merges)
    if not recomputes or not states or not space.runs(variant, pipeline, group.pp):
        return None
    return Choice(
        group, batch, variant, pipeline, draw.choice(recomputes), draw.choice(states), draw.choice(space.offloads)
    )  # fmt: skip
