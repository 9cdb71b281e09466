"""Designs: what a person would call different choices, and what is left to choose freely within one.

A design is a mesh, a micro-batch, a family of schedules, a kind of recomputation, a ZeRO stage, a style of context parallelism, how
tokens reach their experts and what lives on the host. How many virtual stages, which layers of a stage, which order of ranks, what
runs beside what: those are settings of a design, of which the best counts.
"""

from __future__ import annotations

from typing import Final

from simpar.searching.choice import Choice, tp_text

DesignKey = tuple[object, ...]

FAMILIES: Final = {
    "1f1b": "1f1b", "gpipe": "gpipe", "naive": "naive", "interleaved": "interleaved", "interleaved_bfs": "interleaved",
    "interleaved_zb": "zero bubble", "zb-h1": "zero bubble", "zb-h2": "zero bubble", "zb-v": "zero bubble", "v-half": "zero bubble",
    "v-min": "zero bubble", "dualpipe": "dualpipe", "dualpipe-v": "dualpipe",
}  # fmt: skip
"""Schedule -> its family."""


def family(schedule: str) -> str:
    """The family of a schedule."""
    return FAMILIES.get(schedule, schedule)


def recompute_kind(text: str) -> str:
    """none, selective or full (of all layers or of some)."""
    return text.partition(":")[0]


def design_key(choice: Choice) -> DesignKey:
    """What layouts of one design share."""
    g, v, s, o = choice.group, choice.variant, choice.state, choice.offload
    return (
        g.stage_tp or g.tp, g.cp, g.pp, g.dp, g.ep, g.etp if g.ep > 1 else 0, choice.micro_batch_size,
        v.cp_style if g.cp > 1 else "", v.ep_dispatcher if g.ep > 1 else "", v.precision,
        family(choice.pipeline.schedule) if g.pp > 1 else "",
        recompute_kind(choice.recompute), s.zero_stage if g.dp * g.cp > 1 else 0, o.activations > 0, o.optimizer,
        s.offload_parameters,
    )  # fmt: skip


def design_name(choice: Choice) -> str:
    """A short name: "tp4 pp4 dp4, micro-batch 1, interleaved, selective recomputation, ZeRO 1"."""
    g, s, o = choice.group, choice.state, choice.offload
    degrees = [f"tp{tp_text(g)}"] if g.stage_tp or g.tp > 1 else []
    degrees += [f"{name}{value}" for name, value in (("cp", g.cp), ("pp", g.pp), ("ep", g.ep)) if value > 1]
    words = [" ".join([*degrees, f"dp{g.dp}"]), f"micro-batch {choice.micro_batch_size}"]
    if g.cp > 1:
        words.append(f"{choice.variant.cp_style.replace('_', '-')} attention")
    words += [f"{choice.variant.ep_dispatcher} exchange"] if g.ep > 1 and choice.variant.ep_dispatcher != "alltoall" else []
    if g.pp > 1:
        words.append(family(choice.pipeline.schedule))
    kind = recompute_kind(choice.recompute)
    words += [f"{kind} recomputation"] if kind != "none" else []
    words += [f"ZeRO {s.zero_stage}"] if g.dp * g.cp > 1 else []
    words += ["activations on the host"] if o.activations else []
    words += ["optimizer on the host"] if o.optimizer else []
    words += ["parameters on the host"] if s.offload_parameters else []
    return ", ".join(words)


def layout_name(choice: Choice) -> str:
    """The name of its design, and what this layout of it recomputes: "tp4 dp4, ..., full recomputation of 1 layer a stage, ..."."""
    kind, _, part = choice.recompute.partition(":")
    if not part:
        return design_name(choice)
    what = part.replace("+", " and ") if kind == "selective" else "1 layer a stage" if part == "1" else f"{part} layers a stage"
    return design_name(choice).replace(f"{kind} recomputation", f"{kind} recomputation of {what}")


__all__ = ["DesignKey", "design_key", "design_name", "family", "layout_name", "recompute_kind"]
