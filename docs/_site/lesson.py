"""Figures of a lesson that the reader moves: every choice is simulated when the site is built, and the page shows the one chosen.

A fenced block of kind `lesson` is TOML: a `scenario`, `choices` (label, field, values), `show` (time, memory, pipeline), and `set`, fields
that hold for all of them. A choice that cannot run shows the reason.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

BLOCK: Final = re.compile(r"^```lesson\n(?P<text>.*?)^```$", re.M | re.S)
MOST: Final = 32
"""Steps simulated for one figure."""
GIB: Final = 2**30


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' event: replace the figures of a page."""
    return with_figures(markdown)


def with_figures(markdown: str) -> str:
    """The page with its figures as HTML.

    Raises:
        ValueError: a figure with more steps than a build should simulate, or a scenario that never runs.
    """
    return BLOCK.sub(lambda found: figure(tomllib.loads(found["text"])), markdown)


def figure(asked: dict[str, Any]) -> str:
    """One figure: its controls, and the data of every choice."""
    choices = asked["choices"]
    combinations = list(product(*(choice["values"] for choice in choices)))
    if len(combinations) > MOST:
        raise ValueError(f"{len(combinations)} steps in one figure; at most {MOST}")
    fields = [choice["field"] for choice in choices]
    steps = [
        step(asked["scenario"], {**asked.get("set", {}), **dict(zip(fields, each, strict=True))}, asked["show"])
        for each in combinations
    ]
    if all("wrong" in each for each in steps):
        raise ValueError(f"no choice of the figure of {asked['scenario']} can run: {steps[0]['wrong']}")
    first = [choice["values"].index(choice.get("first", choice["values"][0])) for choice in choices]
    data = {"sizes": [len(choice["values"]) for choice in choices], "first": first, "show": asked["show"], "steps": steps}
    groups = "".join(controls(choice, index, first[index]) for index, choice in enumerate(choices))
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="lesson" markdown="0"><p class="lesson-title">{escape(asked["title"])}</p>{groups}'
        '<div class="lesson-shown" aria-live="polite"></div><noscript>This figure needs JavaScript; the examples below need none.</noscript>'
        f'<script type="application/json">{text}</script></div>'
    )


def controls(choice: dict[str, Any], index: int, first: int) -> str:
    """A group of radio buttons."""
    buttons = []
    for i, value in enumerate(choice["values"]):
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        checked = " checked" if i == first else ""
        buttons.append(f'<label><input type="radio" data-choice="{index}" value="{i}"{checked}><span>{escape(word)}</span></label>')
    return f"<fieldset><legend>{escape(choice['label'])}</legend>{''.join(buttons)}</fieldset>"


def step(scenario: str, changes: dict[str, Any], show: list[str]) -> dict[str, Any]:
    """What one choice gives."""
    import simpar

    try:
        found = simpar.simulate(scenario, **changes, detail="stage")
    except simpar.InputError as error:
        return {"wrong": "; ".join(f"{v.field}: {v.rule}" for v in error.violations) or str(error).splitlines()[0]}
    shown: dict[str, Any] = {
        "s": round(found.step_time_s, 5), "gib": round(found.peak_memory_bytes / GIB, 2), "of": round(found.device_memory_bytes / GIB, 2),
        "fits": found.fits, "mfu": round(found.mfu, 4), "bubble": round(found.bubble_fraction, 4),
    }  # fmt: skip
    if "time" in show:
        parts = [(str(row["part"]), float(row["seconds"])) for row in found.waterfall if row["part"] != "step"]
        shown["parts"] = [[name, round(seconds, 5)] for name, seconds in parts if seconds > 0.002 * found.step_time_s]
    if "memory" in show:
        worst = found.details.worst_rank
        rest = worst.device_bytes - sum(worst.at_peak.values())
        sizes = [*((name.replace("_", " "), size) for name, size in worst.at_peak.items()), ("allocator, CUDA and NCCL", rest)]
        shown["memory"] = [[name, round(size / GIB, 3)] for name, size in sizes if size > 0.002 * worst.device_bytes]
    if "pipeline" in show:
        shown["ranks"] = timeline(found.details)
    return shown


def timeline(found: Any) -> list[list[list[Any]]]:
    """[phase, odd micro-batch, start, end] of the compute of every pipeline rank, in thousandths of the step."""
    from simpar.program.program import OpKind

    names = {
        OpKind.FORWARD: "F",
        OpKind.BACKWARD: "B",
        OpKind.INPUT_GRADIENT: "I",
        OpKind.WEIGHT_GRADIENT: "W",
        OpKind.OPTIMIZER: "O",
    }
    program, times = found.program, found.timeline
    ranks: dict[int, list[list[Any]]] = {}
    for index, stream in enumerate(program.streams):
        if stream.kind != "compute":
            continue
        row = ranks.setdefault(stream.role, [])
        for op in program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]].tolist():
            name = names.get(OpKind(int(program.kind[op])))
            if name:
                start, end = (round(1000 * float(t[op]) / times.makespan, 1) for t in (times.start, times.finish))
                row.append([name, int(program.microbatch[op]) % 2, start, end])
    return [ranks[role] for role in sorted(ranks)]
