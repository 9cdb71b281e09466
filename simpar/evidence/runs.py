"""`simpar validate runs`: every measured training run of a file against its prediction, in parallel and with
progress."""

from __future__ import annotations

import json
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, SimparError
from simpar.evidence.predicted import Prediction, Predictor, bubble_of, memory_of, predict, stalled
from simpar.evidence.row_framework import framework_of, stated_precision
from simpar.evidence.run_rows import GROUP_KEYS, columns_of, excluded_because, located, read_rows, run_of
from simpar.evidence.run_type import Run
from simpar.evidence.run_workers import Bar, in_order
from simpar.evidence.spread import predict_run
from simpar.ranking import RankingSummary, SweepRanking, rank_sweeps, summarize_rankings
from simpar.readings import Open
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import Scenario
from simpar.statistics import (
    ChanceBand,
    Comparison,
    FitConfusion,
    Group,
    Key,
    chances_to_fit,
    fit_by_chance,
    fit_confusion,
    group_by,
    summarize,
)

CHUNK: Final = 16
STALLED: Final = "stalled sends"
"""State of a run whose pipeline lost half a second at every blocking send; such runs are counted apart (`predicted.stalled`)."""
IMPOSSIBLE: Final = 0.1
"""A run that fits with less than this chance is called impossible: the whole 80 % interval of its peak lies above the device."""
EVEN: Final = 0.5
"""A run that fits with less than this chance is called out of memory."""
FAULT: Final = "a fault in simpar, please report it"
"""Begins the reason of a row whose prediction broke off in a way that simpar does not know."""
KIND_TITLES: Final = {
    "allocated": "allocated", "reserved": "reserved", "device": "whole device", "first_step": "allocated, first step",
    "band": "kind not stated",
}  # fmt: skip
"""Kind of a memory figure -> its name in the report."""

_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `validate_runs` found.

    Attributes:
        path: where the runs are from.
        rows: one comparison per measured value, excluded rows left out.
        groups: errors by metric and grouping.
        fits: confusion of the labelled runs.
        by_chance: how often runs ran, by their chance to fit.
        sweeps, ranking: ranking quality.
        runs: runs read, excluded ones left out.
        repeated: ids that several of them have; each counts.
        impossible: runs that ran, called impossible by their memory.
        not_expressed: reason -> ids of the runs that cannot be expressed.
        excluded: the data's own reason -> ids.
        seconds: wall time.
    """

    path: Path
    rows: tuple[Comparison, ...]
    groups: tuple[Group, ...]
    fits: FitConfusion
    by_chance: tuple[ChanceBand, ...]
    sweeps: tuple[SweepRanking, ...]
    ranking: RankingSummary
    runs: int
    repeated: tuple[str, ...]
    impossible: tuple[str, ...]
    not_expressed: dict[str, list[str]]
    excluded: dict[str, list[str]]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The object of `simpar validate runs --json`."""
        return {
            "rows": [row.as_json() for row in self.rows],
            "groups": [group.as_json() for group in self.groups],
            "oom": {**self.fits.as_json(), "by_chance": [asdict(band) for band in self.by_chance]},
            "ranking": {**self.ranking.as_json(), "per_sweep": [sweep.as_json() for sweep in self.sweeps]},
            "runs": self.runs,
            "repeated_ids": list(self.repeated),
            "ran_called_impossible": list(self.impossible),
            "skipped": {reason: len(ids) for reason, ids in self.not_expressed.items()},
            "not_expressed": self.not_expressed,
            "excluded": {reason: len(ids) for reason, ids in self.excluded.items()},
            "seconds": self.seconds,
        }


def matches(row: dict[str, Any], conditions: Sequence[str]) -> bool:
    """Whether `row` meets every condition: "source=nanotron" (part of a text, any case), "n_gpus>=64", "oom!=true".

    Raises:
        InputError: a condition that is not key, operator, value.
    """
    parsed = (_parsed(condition) for condition in conditions)
    return all(_meets(row.get(key), sign, text) for key, sign, text in parsed)


def _meets(value: Any, sign: str, text: str) -> bool:
    if isinstance(value, str) or value is None:
        return sign in ("=", "!=") and (text.lower() in str(value or "").lower()) == (sign == "=")
    try:
        return bool(_OPERATORS[sign](value, json.loads(text.lower())))
    except (ValueError, RecursionError, TypeError):  # no number; a list or a table has no order
        return False


def _parsed(condition: str) -> tuple[str, str, str]:
    parsed = re.fullmatch(r"\s*(\w+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*", condition)
    if parsed is None:
        raise InputError(f"--where {condition}: write it as key=value, such as source=nanotron or n_gpus>=64")
    return parsed[1], parsed[2], parsed[3]


def compare(run: Run, prediction: Prediction | None, failure: str = "", answer: Open | None = None) -> list[Comparison]:
    """One comparison per value that `run` measured; `answer` lists the readings where facts were open."""
    skipped = run.skipped or failure
    measured = run.measured
    shared: dict[str, Any] = {"assumptions": list(run.assumptions)} if run.assumptions else {}
    if answer is not None:
        shared["readings"] = [reading.as_json() for reading in answer.readings]
        shared["look_up"] = [path for path, _ in answer.look_up]
    rows = []

    def add(metric: str, value: float | bool, **fields: Any) -> None:
        group = run.group | fields.pop("more", {})
        rows.append(Comparison(run.id, metric, value, fields.pop("predicted", None), group=group, skipped=skipped,
                               details=shared | fields.pop("details", {}), **fields))  # fmt: skip

    p = prediction
    if measured.step_time_s is not None:
        fields: dict[str, Any] = {"predicted": p.step_time_s, "low": p.step_low_s, "high": p.step_high_s} if p else {}
        if p:
            fields["details"] = {"waterfall_s": dict(p.waterfall)} if p.waterfall else {}
            fields["details"]["fit_probability"] = p.fit_probability
        if p and run.scenario is not None:
            stands = {"state": STALLED} if stalled(p, run.scenario, measured.step_time_s) else {}
            fields["more"] = {"workload": workload_of(run.scenario), "styles": _styles(run.scenario.plan)} | stands
        add("step_time_s", measured.step_time_s, **fields)
    if measured.peak_memory_bytes is not None:
        kind = {"memory_kind": KIND_TITLES[measured.memory_kind]}
        add("peak_memory_bytes", measured.peak_memory_bytes, more=kind, **({} if p is None else _memory(run, p)))
    if measured.bubble_fraction is not None:
        alike = {} if p is None or run.scenario is None else {"predicted": bubble_of(p, run.scenario, measured.bubble_of)}
        add("bubble_fraction", measured.bubble_fraction, **alike)
    if measured.out_of_memory is not None:
        chance = {} if p is None else {"predicted": p.fit_probability < EVEN, "details": {"fit_probability": p.fit_probability}}
        add("oom", measured.out_of_memory, **chance)
    return rows


def workload_of(scenario: Scenario) -> str:
    """What is computed, whatever the layout: equal for equal models, routing, weights that learn and documents."""
    training = scenario.training
    told = (training.routing, training.trainable, training.lora_rank, training.lora_modules, training.document_lengths)
    return sha256(repr((scenario.model, told)).encode()).hexdigest()[:12]


def _styles(plan: PlanSpec) -> str:
    """What makes another design of the same degrees."""
    found: list[str] = [plan.cp_style] if plan.cp > 1 else []
    found += [plan.ep_dispatcher] if plan.ep > 1 else []
    found += [name for name, share in plan.offload.model_dump().items() if share]
    return " ".join(found)


def _memory(run: Run, p: Prediction) -> dict[str, Any]:
    """Predicted memory of the kind that was measured."""
    peak, low, high, band = memory_of(p, run.measured.memory_kind, first_rank=run.measured.memory_first_rank)
    return {"predicted": peak, "low": low, "high": high, "band": band}


def _validated(named: tuple[str, dict[str, Any]], predictor: Predictor) -> tuple[str, str, list[Comparison]]:
    """(Id of a row's run, why it cannot be expressed, its comparisons): little, as it comes back from another process."""
    run = run_of(named[1], named[0])
    prediction, answer, failure = None, None, ""
    if run.scenario is not None and not run.skipped:
        try:
            prediction, answer = predict_run(run, predictor)
        except SimparError as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        except Exception as error:  # one row must not cost the others their results
            failure = f"{FAULT}: {type(error).__name__}: {str(error)[:200]}"
    rows = compare(run, prediction, failure, answer)
    return run.id, run.skipped or next((row.skipped for row in rows if row.skipped), ""), rows


def validate_runs(
    path: Path | str,
    where: Sequence[str] = (),
    workers: int | None = None,
    predictor: Predictor = predict,
    progress: bool = False,
) -> Report:
    """Every run of the JSON-lines file at `path` that meets `where`, predicted and compared.

    Args:
        path: a file of flat rows or of stored runs (run_type), or a folder of such files.
        where: conditions on the rows, see `matches`.
        workers: processes; none = all cores; 1 = in this process.
        predictor: what predicts; a module-level function.
        progress: show a bar on standard error.

    Raises:
        InputError: the file or a condition is wrong.
    """
    start = time.perf_counter()
    path = Path(path)
    everything = list(read_rows(path))
    if not everything:
        raise InputError(f"{path}: holds no runs; one JSON object per line is needed")
    seen_rows = [(name, row, columns_of(row)) for name, row in everything]
    check_conditions([seen for _, _, seen in seen_rows], where)
    rows = [(name, row, seen) for name, row, seen in seen_rows if matches(seen, where)]
    if not rows:
        raise InputError(f"{path}: none of its {len(everything)} rows meets --where {' --where '.join(where)}")
    excluded = _named((excluded_because(seen), str(row.get("id") or name)) for name, row, seen in rows)
    wanted = [(name, located(row, path)) for name, row, seen in rows if not excluded_because(seen)]
    each = partial(_validated, predictor=predictor)
    done = in_order(each, wanted, workers or os.cpu_count() or 1, Bar(len(wanted), progress), CHUNK)
    comparisons = [row for _, _, part in done for row in part]
    reasons = _named((reason, name) for name, reason, _ in done)
    return report_of(path, comparisons, [name for name, _, _ in done], reasons, excluded, time.perf_counter() - start)


def check_conditions(rows: Sequence[dict[str, Any]], conditions: Sequence[str]) -> None:
    """That every condition can be read and names a key that the rows have.

    Raises:
        InputError: one that does not; with the keys that come close.
    """
    known = dict.fromkeys(key for row in rows for key in row)
    for condition in conditions:
        key = _parsed(condition)[0]
        if key not in known:
            close = get_close_matches(key, known, n=3) or sorted(set(known) & set(GROUP_KEYS)) or sorted(known)
            raise InputError(f"--where {condition}: no row has a key {key!r}; there are {', '.join(close)}, ...")


def _named(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> ids, the commonest reason first; nothing for an empty reason."""
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        if reason:
            found.setdefault(reason, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def size_class(row: Comparison) -> str:
    """GPUs in powers of eight, as text."""
    return _class(_degree(row.group.get("n_gpus")), (8, 64, 512, 4096), "GPUs")


def model_class(row: Comparison) -> str | None:
    """Parameters in steps of about four, as text; None where they are not stated."""
    billions = row.group.get("n_params_b")
    return _class(float(billions), (2, 8, 32, 128, 512), "billion parameters") if isinstance(billions, int | float) else None


def _class(value: float, limits: tuple[int, ...], unit: str) -> str:
    above = next((limit for limit in limits if value <= limit), None)
    return f"more than {limits[-1]} {unit}" if above is None else f"up to {above} {unit}"


def parallelism_class(row: Comparison) -> str:
    """The dimensions in use: "tp+pp", "fsdp", "dp"."""
    degrees = [name for name in ("tp", "pp", "cp", "ep") if _degree(row.group.get(name)) > 1]
    if row.group.get("zero_stage") == 3:
        degrees.append("fsdp")
    elif _degree(row.group.get("dp")) > 1 and not degrees:
        degrees.append("dp")
    return "+".join(degrees) or "one GPU"


def _degree(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


GROUPINGS: Final[dict[str, Key]] = {
    "source": "source",
    "framework": lambda row: framework_of(row.group)[0],
    "gpu": "gpu",
    "arch": "arch",
    "confidence": "confidence",
    "precision": lambda row: stated_precision(row.group) or row.group.get("precision"),
    "size": size_class,
    "model_size": model_class,
    "parallelism": parallelism_class,
    "memory_kind": "memory_kind",
}
"""Groupings of the report, beside one over everything: a key of the rows or what follows from them, such as the framework that
a row's words mean; those that no row of a metric has are left out."""


Named = dict[str, list[str]]
"""Reason -> ids."""


def report_of(
    path: Path, comparisons: Sequence[Comparison], runs: Sequence[str], not_expressed: Named, excluded: Named, seconds: float
) -> Report:
    """Groups, confusion and rankings over `comparisons`, of `runs` (ids) at `path`."""
    groups: list[Group] = []
    for metric in dict.fromkeys(row.metric for row in comparisons):
        found_rows = [row for row in comparisons if row.metric == metric]
        rows = [row for row in found_rows if row.group.get("state") != STALLED]
        groups.append(Group(metric, {}, summarize(rows)))
        if apart := [row for row in found_rows if row.group.get("state") == STALLED]:
            groups.append(Group(metric, {"state": STALLED}, summarize(apart)))
        for key, value_of in GROUPINGS.items():
            found = group_by(rows, key=value_of)
            if any(value is not None for (value,) in found):
                parts = [Group(metric, {key: "-" if v is None else v}, summarize(members)) for (v,), members in found.items()]
                groups += sorted(parts, key=lambda group: -group.summary.rows - group.summary.skipped)
    sweeps = rank_sweeps([row for row in comparisons if row.group.get("state") != STALLED])
    return Report(
        path, tuple(comparisons), tuple(groups), fit_confusion(comparisons),
        fit_by_chance(chances_to_fit(comparisons).values()), tuple(sweeps), summarize_rankings(sweeps),
        len(runs), tuple(name for name, count in Counter(runs).items() if count > 1), _impossible(comparisons), not_expressed,
        excluded, seconds,
    )  # fmt: skip


def _impossible(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Runs with a measured step or label "ran" whose memory says that they cannot have run."""
    return tuple(name for name, (chance, failed) in chances_to_fit(comparisons).items() if chance < IMPOSSIBLE and not failed)
