"""How a run's experts get their tokens: what exchanges them, and how evenly they spread."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_framework import OFF, tunes
from simpar.evidence.row_machine import CannotExpress
from simpar.evidence.row_model import HYBRID
from simpar.evidence.row_values import SAID, Row, first_match
from simpar.specs.framework import FrameworkSpec

DISPATCHERS: Final = (
    (rf"{SAID}hybrid[-_ ]?ep\b(?!{OFF})", "hybridep"),
    (rf"{SAID}deep[-_ ]?ep\b(?!{OFF})", "deepep"),
)
"""Pattern in moe_routing, else in the notes -> what exchanges tokens."""
_OVER_EFA: Final = re.compile(r"\buccl\b|\befa\b|libfabric", re.IGNORECASE)
"""In moe_routing: DeepEP's kernels cannot drive these adapters themselves."""
_FORCED: Final = re.compile(rf"{SAID}forced?[-_ ](?:load[-_ ])?balanc", re.IGNORECASE)
"""In moe_routing: loads are even whatever the data."""
_NATURAL: Final = re.compile(rf"aux-loss-free|{SAID}natural|{SAID}real (?:rout|data|tok)", re.IGNORECASE)
_CAPACITY: Final = re.compile(r"(?:capacity(?: factor)?|\bcf)[\s=:]{0,3}(?!\d{3})(\d+(?:\.\d+)?)(?!\.?\d|\s*tokens)", re.IGNORECASE)
"""A factor, at most 99: a larger number, or one of tokens, is what an expert takes."""
_ALL_TO_ALL: Final = (
    (rf"{SAID}(?:all[-_ ]?to[-_ ]?all|a2a)\b(?!{OFF})", "alltoall"),
    (rf"{SAID}all[-_ ]?gather\b(?!{OFF})", "allgather"),
)
"""The same in moe_routing alone: notes say so of traffic, whatever carries it."""


def exchange_of(row: Row, plan: dict[str, Any], framework: FrameworkSpec, notes: list[str]) -> dict[str, Any]:
    """What exchanges experts' tokens, and whether beside computation: where neither is said, not of hybrids, and in pipelines of
    virtual stages alone.

    Raises:
        CannotExpress: DeepEP over adapters that its kernels do not drive.
    """
    stated = first_match((*DISPATCHERS, *_ALL_TO_ALL), row.get("moe_routing")) or first_match(DISPATCHERS, row.get("notes"))
    if stated == "deepep" and _OVER_EFA.search(str(row.get("moe_routing"))):
        raise CannotExpress("DeepEP over EFA (UCCL, NVSHMEM's libfabric): what its proxies on the CPU take is not known")
    beside, usual = row.get("overlap_ep"), framework.conventions.ep_dispatcher
    whole = re.search(r"full[-_ ]iter(?!.*assumed)", str(row.get("cuda_graphs")), re.IGNORECASE)
    if framework.conventions.graphed_exchange and plan["ep"] > 1 and whole:
        usual = framework.conventions.graphed_exchange
        chunks = plan["pp"] == 1 or plan["virtual_stages"] > 1
        if stated is None and beside is None and chunks and not HYBRID.search(str(row.get("arch"))):
            beside = True
            notes.append("graphs hold whole iterations: experts' exchange beside computation, as in the framework's recipes")
    return {"overlap_ep": bool(beside), "ep_dispatcher": stated or usual}


def untrained(row: Row) -> bool:
    """Whether a run's router is as it was initialised and nothing balances what it chooses."""
    text = str(row.get("moe_routing") or "")
    return "natural" in text and "random init" in text and not re.search(r"balance|capacity|drop\b", text)


def chosen_freely(row: Row, framework: FrameworkSpec) -> bool:
    """Whether a run names a pre-training recipe, which starts from random weights, that lets the router choose."""
    recipe = re.search(r"\brecipe \w+_pretrain_\w*config", str(row.get("framework")))
    return framework.conventions.recipes_route_freely and recipe is not None


def routing_of(text: str, task: str, *, free: bool = False) -> dict[str, Any]:
    """How tokens spread over experts, as a row says or, where it does not, as what it trains implies.

    Args:
        text: moe_routing.
        task: what it trains, empty where there are no experts.
        free: its recipe leaves an untrained router to itself.
    """
    capacity = _CAPACITY.search(text)
    table: dict[str, Any] = {"kind": "balanced"}
    balanced = re.search(r"balance|capacity|drop\b|not (?:natural|real)", text, re.IGNORECASE) is not None
    trained = (tunes({"task": task}) or re.match(r"rl\b", task) is not None) and not balanced
    untouched = free and task == "pretrain" and not balanced
    if not _FORCED.search(text) and (_NATURAL.search(text) or trained or untouched):
        # Fine-tuning keeps the router of its checkpoint. One that has not been trained spreads loads by about their mean, as in the
        # first steps of a pre-training.
        table = {"kind": "lognormal", **({"spread": 1.0} if untouched or "random init" in text else {})}
    elif re.search(r"round[- ]robin|\bin turn\b|\(even\)|_type\W+even\b", text):
        table["in_turn"] = True  # Primus' moe_router_force_load_balancing_type: even
    if capacity or "token drop" in text or "token-drop" in text:
        table["capacity_factor"] = float(capacity[1]) if capacity else 1.0
    return table
