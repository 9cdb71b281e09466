"""What a plan may recompute within a layer: modules by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Module:
    """A unit that is checkpointed: modules of nodes, and whether it `discards` what it puts out."""

    nodes: frozenset[str]
    discards: bool = False


def _module(*nodes: str, discards: bool = False) -> Module:
    return Module(frozenset(nodes), discards)


MODULES: Final[dict[str, Module]] = {
    "core_attn": _module("core_attn"),
    "layernorm": _module("layernorm", discards=True),
    "mlp": _module("mlp"),
    "moe": _module("moe", "moe_act"),
    "moe_act": _module("moe_act", discards=True),
    "mla_up_proj": _module("mla_up_proj", discards=True),
    "shared_experts": _module("shared_experts"),
    "attention": _module("attention", "core_attn", "mla_up_proj"),
}
"""Name in a plan -> what it checkpoints; "op", "op_compiled", "op_unlisted", "op_attention" and "op_exchanged" are torchtitan's
per-op policy (graph/rematerialise.py)."""
