"""`simpar search` and `simpar improve`: options in, tables, JSON, pages and launch files out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.registry import unknown
from simpar.search.answer import Answer, answer
from simpar.search.find import Watch, find_over
from simpar.search.objective import OBJECTIVES, parse_constraints
from simpar.search.parts import Wish
from simpar.search.request import make_space, option_table, scenario_table
from simpar.search.space import Space
from simpar.search.store import Store
from simpar.search.why import Why, why

FRONTS: Final = ("step_time_s", "peak_memory_bytes", "memory_headroom_bytes", "num_gpus", "cost_usd_per_token", "energy_j_per_token")  # noqa: E501


@dataclass
class SearchOptions:
    """Options of `simpar search`, as the command line hands them over.

    Attributes:
        scenario: a TOML file, whose plan may hold ranges; or the five options after it.
        num_nodes: one cluster size, or several.
        fix, allow: "pp=1"; "schedule=1f1b,interleaved".
        framework: take its semantics and keep to what it can run.
        where: constraints, "step_time_s<=5".
        pareto: two or three metrics; the answer is the front.
        why: corners to hold against the winner, "tp=4,pp=8".
        workers: processes of the local executor; none = all cores.
        show: writes the table (given by the command line; the search knows no terminal).
        write_html, export: given by the command line, called with the answer.
    """

    scenario: Path | None = None
    overrides: Sequence[str] = ()
    model: str | None = None
    hardware: str | None = None
    num_nodes: Sequence[int] = ()
    sequence_length: int | None = None
    global_batch: int | None = None
    framework: str | None = None
    fix: Sequence[str] = ()
    allow: Sequence[str] = ()
    objective: str = "step_time"
    where: Sequence[str] = ()
    pareto: str = ""
    robust: str = ""
    top: int = 10
    why: Sequence[str] = ()
    usd_per_gpu_hour: float = 2.0
    store: Path | None = None
    resume: bool = False
    executor: str = "local"
    workers: int | None = None
    scheduler: str | None = None
    as_json: bool = False
    quiet: bool = False
    show: Callable[[Answer, list[Why]], None] | None = None
    show_stored: Callable[[dict[str, Any]], None] | None = None
    write_html: Callable[[Answer, list[Why]], None] | None = None
    export: Callable[[Answer], None] | None = None
    listener: Callable[[Watch], None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def run(options: SearchOptions) -> int:
    """Search as asked; returns the exit code: 0 found, 1 nothing feasible or interrupted.

    Raises:
        InputError: options, scenario or executor are wrong.
    """
    spaces, wish = _checked(options)
    request = _request(spaces, wish)
    store = Store(options.store, request) if options.store is not None else None
    try:
        if store is not None and (known := store.answer) is not None and not (options.write_html or options.export or options.why):
            known["from_store"] = True
            _print(known) if options.as_json else (options.show_stored or _print)(known)
            return 0 if known["best"] else 1
        found = find_over(
            spaces, wish, executor=options.executor, workers=options.workers, scheduler=options.scheduler, store=store,
            resume=options.resume, listener=options.listener,
        )  # fmt: skip
        result = answer(found)
        if wish.front and len(found) > 1:
            result = _front_over(result, options.pareto)
        reasons = _reasons(options, spaces, wish, result)
        document = {**result.to_json(), **({"why": [r.to_json() for r in reasons]} if reasons else {})}
        if store is not None and result.finished:
            store.finish(document)
    finally:
        if store is not None:
            store.close()
    if options.as_json:
        _print(document)
    elif options.show is not None:
        options.show(result, reasons)
    if options.write_html is not None:
        options.write_html(result, reasons)
    if options.export is not None and result.best is not None:
        options.export(result)
    return 0 if result.candidates and result.finished else 1


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _checked(options: SearchOptions) -> tuple[list[Space], Wish]:
    """The spaces and the wish that options stand for, with everything wrong reported."""
    if options.objective not in OBJECTIVES:
        raise unknown("objective", options.objective, list(OBJECTIVES))
    if options.executor not in ("local", "dask"):
        raise unknown("executor", options.executor, ["local", "dask"])
    if options.robust not in ("", "p90"):
        raise InputError([Violation("--robust", options.robust, "no such reading of the interval", "p90")])
    if options.top < 1:
        raise InputError([Violation("--top", options.top, "must be at least 1", "such as 10")])
    if options.resume and options.store is None:
        raise InputError([Violation("--resume", True, "needs what it goes on from", "--store FILE")])
    front = _front(options.pareto)
    wish = Wish(
        options.objective, options.top, parse_constraints(options.where), options.robust == "p90", bool(front),
        usd_per_gpu_hour=options.usd_per_gpu_hour,
    )  # fmt: skip
    file = str(options.scenario) if options.scenario is not None else ""
    if options.scenario is not None:
        table = scenario_table(options.scenario, options.overrides)
    else:
        first = options.num_nodes[0] if options.num_nodes else None
        table = option_table(
            options.model, options.hardware, first, options.sequence_length, options.global_batch, options.framework
        )
    sizes: Sequence[int | None] = list(dict.fromkeys(options.num_nodes)) or [None]
    spaces = [
        make_space(table, file=file, fix=options.fix, allow=options.allow, framework=options.framework, num_nodes=nodes)
        for nodes in sizes
    ]
    return spaces, wish


def _front(text: str) -> tuple[str, ...]:
    """The metrics of a front.

    Raises:
        InputError: fewer than two, more than three, or one that has none.
    """
    if not text:
        return ()
    names = tuple(n.strip() for n in text.split(","))
    aliases = {"step_time": "step_time_s", "memory": "peak_memory_bytes", "memory_headroom": "memory_headroom_bytes",
               "gpus": "num_gpus", "cost_per_token": "cost_usd_per_token", "energy_per_token": "energy_j_per_token"}  # fmt: skip
    names = tuple(aliases.get(n, n) for n in names)
    wrong = [Violation("--pareto", n, "no front over this metric", f"two or three of {', '.join(FRONTS)}") for n in names if n not in FRONTS]  # noqa: E501
    if not wrong and not 2 <= len(set(names)) <= 3:
        wrong = [Violation("--pareto", text, "a front has two or three metrics", f"such as {FRONTS[0]},{FRONTS[1]}")]
    if wrong:
        raise InputError(wrong)
    return names


def _front_over(result: Answer, pareto: str) -> Answer:
    """Of the fronts of several cluster sizes, what no other beats in the metrics asked for."""
    from simpar.search.objective import LARGER_IS_BETTER

    names = _front(pareto)

    def point(metrics: dict[str, float]) -> tuple[float, ...]:
        return tuple(-metrics[n] if n in LARGER_IS_BETTER else metrics[n] for n in names)

    points = [point(c.metrics) for c in result.candidates]
    kept = [
        c for c, p in zip(result.candidates, points, strict=True)
        if not any(all(a <= b for a, b in zip(q, p, strict=True)) and q != p for q in points)
    ]  # fmt: skip
    return Answer(tuple(kept), result.found, None)


def _reasons(options: SearchOptions, spaces: list[Space], wish: Wish, result: Answer) -> list[Why]:
    best = result.best
    space = spaces[0]
    if best is not None:
        world = best.result.world_size
        space = next(s for s in spaces if s.template.world_size == world)
    winner = best.scored.choice if best is not None else None
    return [why(space, wish, asked, winner) for asked in options.why]


def _request(spaces: list[Space], wish: Wish) -> dict[str, Any]:
    """What identifies a search: everything its answer depends on but the cost models."""
    return {
        "spaces": [
            {"scenario": s.template.model_dump(mode="json", exclude={"file", "name", "description", "published"}),
             "restrictions": {k: list(v) for k, v in sorted(s.restrictions.items())}, "framework": s.framework}
            for s in spaces
        ],
        "wish": {"objective": wish.objective, "keep": wish.keep, "constraints": [str(c) for c in wish.constraints],
                 "robust": wish.robust, "front": wish.front, "within": wish.within, "usd_per_gpu_hour": wish.usd_per_gpu_hour},
    }  # fmt: skip


__all__ = ["FRONTS", "SearchOptions", "run"]
