"""`simpar search`: options in; the answer handed to whoever shows, writes or exports it."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isclose
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.host import rarely_collected
from simpar.registry import unknown
from simpar.searching.abilities import ANY, limit_of
from simpar.searching.answer import Answer, Known, answer
from simpar.searching.choice import Choice
from simpar.searching.decision import TOLD
from simpar.searching.effects import LARGEST_POOL, POOL, check_slow_ranks, leaves_out, simulated
from simpar.searching.find import SAME, Watch, find_over
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.objective import OBJECTIVES, pace, parse_constraints, parse_front
from simpar.searching.parts import Wish
from simpar.searching.request import make_space
from simpar.searching.space import Space
from simpar.searching.store import Store
from simpar.searching.tasks import TASKS, USUAL_BATCH, USUAL_FRAMEWORK, USUAL_SEQUENCE, task_spaces
from simpar.searching.why import Why, left_out, why, why_nothing
from simpar.specs.counts import divisors
from simpar.specs.options import RunOptions
from simpar.specs.scenario import Scenario
from simpar.specs.wanted import FIT_PROBABILITY

INTERRUPTED: Final = 130
REACH: Final = 1.02
"""Quick searches look for no layout slower than this times the best."""
SMALL: Final = 300_000
"""Spaces up to this size are searched here sooner than processes have started."""


@dataclass
class Outputs:
    """Where an answer goes; the command line hands these over, because the search knows neither terminal nor page.

    Attributes:
        show: writes tables.
        show_stored: the same of a document from a store.
        write_html: writes the page.
        check: told the scenario before the search; raises what no layout of it could be exported for.
        export: writes launch files of the winner.
        runs: why a layout cannot be launched, which then is no answer; "" = it can.
        measured: how many measured runs have the combination of a layout.
        listener: told the progress; called with None when there is no more.
        say: a line for people, beside the answer.
    """

    show: Callable[[Answer, list[Why]], None] | None = None
    show_stored: Callable[[dict[str, Any]], None] | None = None
    write_html: Callable[[Answer, list[Why]], None] | None = None
    check: Callable[[Scenario], None] | None = None
    export: Callable[[Answer], None] | None = None
    runs: Callable[[Scenario], str] = lambda _: ""
    measured: Callable[[Scenario], int] | None = None
    listener: Callable[[Watch | None], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None


@dataclass
class SearchOptions:
    """Options of `simpar search`, as the command line hands them over.

    Attributes:
        scenario: a TOML file or the name of a shipped scenario, whose plan may hold ranges; the five options after it change it, or
            stand for it.
        table: the raw table of a scenario, instead of its file.
        num_nodes: cluster sizes, "8", "8,16" or "8..64x2".
        fix, allow: "pp=1"; "schedule=1f1b,interleaved".
        framework: take its semantics and keep to what it can run; "any" = the scenario's semantics without a limit; none = the
            scenario's framework.
        where: limits, "step_time_s<=5".
        deadline, tokens: a limit on the pace.
        pareto: two or three metrics; the answer is the front.
        why: corners to hold against the winner, "tp=4,pp=8".
        workers: processes of the local executor; none = all cores, for a small space this process.
        prove: go on until nothing can be faster than the answer; else until nothing is by more than the model can tell.
        fit_probability: chance that a layout must have to fit the memory.
        task: "lora" or "full": the memory options of fine-tuning are axes too, see `tasks`.
        num_gpus: instead of num_nodes, as `RunOptions` has them.
    """

    scenario: Path | None = None
    table: Mapping[str, Any] | None = None
    overrides: Sequence[str] = ()
    model: str | None = None
    hardware: str | None = None
    num_nodes: str = ""
    sequence_length: int | None = None
    global_batch: int | None = None
    framework: str | None = None
    fix: Sequence[str] = ()
    allow: Sequence[str] = ()
    objective: str = "step_time"
    where: Sequence[str] = ()
    deadline: str = ""
    tokens: str = ""
    pareto: str = ""
    robust: str = ""
    top: int = 10
    why: Sequence[str] = ()
    usd_per_gpu_hour: float = 2.0
    pue: float = 1.25
    store: Path | None = None
    resume: bool = False
    executor: str = "local"
    workers: int | None = None
    scheduler: str | None = None
    as_json: bool = False
    prove: bool = False
    fit_probability: float = FIT_PROBABILITY
    task: str = ""
    num_gpus: int | None = None
    outputs: Outputs = field(default_factory=Outputs)


@rarely_collected()
def run(options: SearchOptions) -> int:
    """Search as asked.

    Returns:
        The exit code: 0 found, 1 no layout will do, 130 interrupted (what was found until then is shown).

    Raises:
        InputError: options, scenario, store or executor are wrong.
    """
    began = _cpu_s()
    spaces, wish = _checked(options)
    if options.outputs.check is not None:
        options.outputs.check(spaces[0].template)
    if not options.prove and (sum(s.size for s in spaces) > SMALL or isinstance(spaces[0], MixedSpace)):
        wish = replace(wish, reach=REACH, tolerance=TOLD)
    check_slow_ranks(spaces)
    if any(leaves_out(space, robust=wish.robust) for space in spaces):
        wish = replace(wish, pool=POOL, fold=False, reach=inf, tolerance=0.0)
    store = Store(options.store, _request(spaces, wish, options.why)) if options.store is not None else None
    try:
        known = store.answer if store is not None else None
        if store is not None and known is not None and not (options.outputs.write_html or options.outputs.export):
            _check_answer(store, known, spaces)
            return _from_store(known, options)
        if store is not None and options.resume:
            _say_where(store, options)
        result = replace(_searched(spaces, wish, store, options), prove=options.prove)
        reasons = _reasons(options, spaces, wish, result)
        document = {**result.to_json(), "why": [r.to_json() for r in reasons], "from_store": False, "cpu_s": _cpu_s() - began}
        finished = result.finished and all(r.finished for r in reasons)
        if store is not None and finished:
            store.finish(document)
    finally:
        options.outputs.listener(None)
        if store is not None:
            store.close()
    _hand_over(options, result, reasons, document)
    return INTERRUPTED if not finished else 0 if result.candidates else 1


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has started and that are over."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + spent.ru_utime + spent.ru_stime


def _searched(spaces: list[Space], wish: Wish, store: Store | None, options: SearchOptions) -> Answer:
    known: Known = {}
    while True:
        found = find_over(
            spaces, wish, workers=options.workers, scheduler=options.scheduler, store=store,
            resume=options.resume, listener=options.outputs.listener,
        )  # fmt: skip
        options.outputs.listener(None)
        result = answer(found, len(spaces), runs=options.outputs.runs, measured=options.outputs.measured, known=known)
        told = 0.0 if options.prove else TOLD
        enough = result.searched or result.gap is None or result.gap <= told or not result.finished
        if enough or wish.pool >= LARGEST_POOL or len(found[0].best) < wish.pool:
            return result
        # Effects reorder layouts: those not simulated with them may still be faster, so more are.
        wish, store = replace(wish, pool=2 * wish.pool), None
        gap = result.gap or 0.0
        options.outputs.say(f"{result.seen} layouts simulated with effects, others may be {gap:.1%} faster: looking at more")


def _check_answer(store: Store, known: dict[str, Any], spaces: list[Space]) -> None:
    """Simulate the winner of a stored answer again.

    Raises:
        InputError: it takes another time.
    """
    if not isinstance(known.get("best"), list):
        raise store.doubted("it is no answer of this search")
    for best in known["best"][:1]:
        try:
            choice, stored = Choice.from_flat(best["choice"]), float(best["step_time_s"])
            space = next(s for s in spaces if s.template.world_size == best["world_size"])
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
            raise store.doubted("its best layout is none of this search") from None
        seconds = simulated(space, choice).step_time_s
        if not isclose(seconds, stored, rel_tol=SAME):
            raise store.doubted(f"{choice} takes {seconds:.6g} s when simulated again, {stored:.6g} s as stored")


def _from_store(known: dict[str, Any], options: SearchOptions) -> int:
    known["from_store"] = True
    if options.as_json or options.outputs.show_stored is None:
        _print(known)
    else:
        options.outputs.show_stored(known)
    return 0 if known["best"] else 1


def _say_where(store: Store, options: SearchOptions) -> None:
    done, count, layouts = store.progress
    if count:
        options.outputs.say(f"going on: {done} of {count} parts are done, {layouts} layouts simulated")
    else:
        options.outputs.say(f"{store.path} holds nothing of this search (another request, or another simpar): starting anew")


def _hand_over(options: SearchOptions, result: Answer, reasons: list[Why], document: dict[str, Any]) -> None:
    outputs = options.outputs
    if options.as_json:
        _print(document)
    elif outputs.show is not None:
        outputs.show(result, reasons)
    if outputs.write_html is not None:
        outputs.write_html(result, reasons)
    if outputs.export is not None and result.best is not None:
        outputs.export(result)


def _print(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


# -- options ---------------------------------------------------------------------------------------------------------------


def _checked(options: SearchOptions) -> tuple[list[Space], Wish]:
    """The spaces and the wish that options stand for, with everything wrong reported.

    Raises:
        InputError: all wrong options together; then all that is wrong with scenario and restrictions.
    """
    wish = _wish(options)
    sizes = parse_sizes(options.num_nodes)
    run = _run_options(options, sizes)
    table, file = run.table(options.table if options.table is not None else options.scenario, options.overrides)
    if options.objective == "num_gpus" and len(sizes) < 2:
        largest = sizes[0] if sizes else int(dict(table.get("cluster") or {}).get("num_nodes", 1))
        sizes = tuple(divisors(largest))
    limit = limit_of(options.framework, str(table.get("framework", Scenario.model_fields["framework"].default)))
    if options.task:
        spaces = task_spaces(options.task, table, file, fix=options.fix, allow=options.allow, framework=limit)
        return spaces, replace(wish, keep=max(wish.keep, len(spaces)))
    spaces = [
        make_space(table, file=file, fix=options.fix, allow=options.allow, framework=limit, num_nodes=nodes,
                   may_be_empty=len(sizes) > 1)
        for nodes in sizes or (None,)
    ]  # fmt: skip
    if not any(s.size for s in spaces):
        make_space(table, file=file, fix=options.fix, allow=options.allow, framework=limit, num_nodes=sizes[-1])
    return spaces, wish


def _run_options(options: SearchOptions, sizes: Sequence[int]) -> RunOptions:
    """The few options that change a scenario or stand for one; a task has usual values for what nobody says."""
    framework = None if options.framework == ANY else options.framework
    nodes, sequence, batch = sizes[0] if sizes else None, options.sequence_length, options.global_batch
    if options.task and options.scenario is None and options.table is None:
        sequence = sequence or USUAL_SEQUENCE
        batch = batch or USUAL_BATCH
        framework = framework or USUAL_FRAMEWORK
    return RunOptions(options.model, options.hardware, nodes, sequence, batch, framework, options.num_gpus)


def _wish(options: SearchOptions) -> Wish:
    wrong: list[Violation] = []

    def collect(read: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return read()
        except InputError as error:
            wrong.extend(error.violations or [Violation("search", "options", str(error))])
            return otherwise

    objective = next((n for n, metric in OBJECTIVES.items() if options.objective in (n, metric)), "")
    if not objective:
        wrong.append(Violation("--objective", options.objective, str(unknown("objective", options.objective, list(OBJECTIVES)))))
    if options.executor not in ("local", "dask"):
        wrong.append(Violation("--executor", options.executor, str(unknown("executor", options.executor, ["local", "dask"]))))
    if options.robust not in ("", "p90"):
        wrong.append(Violation("--robust", options.robust, "no such reading of the interval", "p90"))
    if options.task and options.task not in TASKS:
        wrong.append(Violation("--task", options.task, str(unknown("task", options.task, list(TASKS)))))
    wrong += _small(options)
    constraints = collect(lambda: parse_constraints(options.where), ())
    if options.deadline or options.tokens:
        constraints += collect(lambda: (pace(options.tokens, options.deadline),), ())
    front = collect(lambda: parse_front(options.pareto), ())
    wish = Wish(
        objective or "step_time", options.top, constraints, options.robust == "p90", front,
        usd_per_gpu_hour=options.usd_per_gpu_hour, pue=options.pue, fold=True,
        fit_probability=options.fit_probability,
    )  # fmt: skip
    if wish.robust and wish.by_memory:
        what, value = ("--pareto", options.pareto) if wish.front else ("--objective", options.objective)
        wrong.append(Violation("--robust", options.robust, f"ranks step times and what follows from them, not {what} {value}"))
    if wrong:
        raise InputError(wrong)
    return wish


def _small(options: SearchOptions) -> list[Violation]:
    """Numbers and options that need each other."""
    wrong: list[Violation] = []
    if options.top < 1:
        wrong.append(Violation("--top", options.top, "must be at least 1", "such as 10"))
    if not 0.5 <= options.fit_probability < 1.0:
        rule = "is the chance that a layout must have to fit, from 0.5 to below 1"
        wrong.append(Violation("--fit-probability", options.fit_probability, rule, f"such as {FIT_PROBABILITY}"))
    if options.workers is not None and options.workers < 1:
        wrong.append(Violation("--workers", options.workers, "must be at least 1", "leave it out for one per core"))
    if options.usd_per_gpu_hour <= 0.0:
        wrong.append(Violation("--usd-per-gpu-hour", options.usd_per_gpu_hour, "must be above 0", "such as 2.0"))
    if options.pue < 1.0:
        wrong.append(Violation("--pue", options.pue, "is the building's power over the machines', at least 1", "such as 1.25"))
    if options.resume and options.store is None:
        wrong.append(Violation("--resume", True, "needs what it goes on from", "--store FILE"))
    if options.executor == "dask" and not options.scheduler:
        wrong.append(Violation("--executor", "dask", "needs the scheduler's address", "--scheduler tcp://10.0.0.1:8786"))
    if options.executor == "local" and options.scheduler:
        wrong.append(Violation("--scheduler", options.scheduler, "is for --executor dask", "add --executor dask"))
    return wrong


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of nodes: "8", "8,16,32", "8..64x2" (doubling), "8..32+8".

    >>> parse_sizes("8..64x2,96")
    (8, 16, 32, 64, 96)

    Raises:
        InputError: not of that form.
    """
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+)([x+])(\d+))?\s*", part)
        first, last, step = (int(match[i] or 0) for i in (1, 2, 4)) if match else (0, 0, 0)
        if match is None or first < 1 or (match[3] and (last < first or step < (2 if match[3] == "x" else 1))):
            raise InputError([Violation("--num-nodes", text, "cannot be read", "8, or 8,16,32, or 8..64x2, or 8..32+8")])
        while first <= max(last, first):
            found.append(first)
            if not match[3]:
                break
            first = first * step if match[3] == "x" else first + step
            if first > last:
                break
    return tuple(sorted(set(found)))


def _reasons(options: SearchOptions, spaces: list[Space], wish: Wish, result: Answer) -> list[Why]:
    best = result.best
    # Of a task the last recipe saves most.
    largest = spaces[-1] if options.task else max(spaces, key=lambda s: s.template.world_size)
    space = best.found.space if best is not None else largest
    winner = best.scored.choice if best is not None else None
    found: list[Why] = []
    for asked in options.why:
        found.append(why(space, wish, asked, winner, options.outputs.listener))
        options.outputs.listener(None)
    for reason in found:
        if not reason.finished:
            options.outputs.say(f"{reason.asked} was not searched to the end")
        if not reason.in_space:
            faster = "" if (reason.slower_by or 0.0) >= 0.0 else ", faster than the best in it"
            rule = left_out(space, reason.scored.choice) if reason.scored is not None else ""
            rule = rule or "--allow takes such values in"
            options.outputs.say(f"{reason.asked} goes beyond the space that was searched{faster}: {rule}")
    if best is None and result.finished and not found and space.size <= 10 * SMALL:
        found.append(why_nothing(space, wish, result.found[-1].account))
        if space.recipe:
            options.outputs.say(f"of the options, the last is explained: {space.recipe}")
    return found


def _request(spaces: list[Space], wish: Wish, asked: Sequence[str]) -> dict[str, Any]:
    """What identifies a search: everything its answer depends on but the cost models."""
    plain = replace(wish, constraints=())
    return {
        "spaces": [
            {"scenario": s.template.model_dump(mode="json", exclude={"file", "name", "description", "published"}),
             "hardware": [machine.model_dump(mode="json") for machine in s.machines],
             "restrictions": {k: list(v) for k, v in sorted(s.restrictions.items())}, "framework": s.framework,
             "space": type(s).__name__}
            for s in spaces
        ],
        "wish": {**{name: getattr(plain, name) for name in plain.__dataclass_fields__},
                 "constraints": [repr(c) for c in wish.constraints]},
        "why": list(asked),
    }  # fmt: skip


__all__ = ["INTERRUPTED", "Outputs", "SearchOptions", "parse_sizes", "run"]
