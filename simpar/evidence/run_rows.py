"""One measured training run, as a row of runs.jsonl, to a scenario and what was measured, or the reason why not.

The columns are described where the data lives. Everything that is not printed by the source is filled by rules in tables
(row_machine, row_framework, row_model, row_plan), never by the identity of a row, and named in `assumptions`. Seconds of a run that
prints nothing but TFLOP/s or MFU follow from the FLOPs that it says it counts, of its own model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from simpar.boundary import read_json_lines
from simpar.errors import InputError
from simpar.evidence.predicted import BubbleOf
from simpar.evidence.row_complete import RATES, completed
from simpar.evidence.row_framework import framework_of, month_of_row, precision_of
from simpar.evidence.row_machine import CannotExpress, machine_of
from simpar.evidence.row_model import SHIPPED, in_its_own_code, model_of
from simpar.evidence.row_open import open_facts, with_sets
from simpar.evidence.row_plan import plan_of, training_of
from simpar.evidence.row_values import Row, read_values
from simpar.evidence.run_type import Measured, MemoryKind, Run, is_stored, stored_run
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.result.ideal import mfu_peak_flops_per_s, uncounted_pairs_flops
from simpar.specs.catalog import scenario_path
from simpar.specs.framework import framework as framework_named
from simpar.specs.framework_releases import Month, month_of
from simpar.specs.open_values import choices, open_fields
from simpar.specs.scenario import Scenario, make_scenario, read_table

GROUP_KEYS: Final = (
    "source", "gpu", "arch", "confidence", "framework", "model_name", "n_params_b", "n_gpus", "tp", "sp", "pp", "vpp", "cp", "ep",
    "etp", "dp", "zero_stage", "micro_batch", "global_batch", "seq_len", "precision", "recompute", "pp_schedule", "task",
)  # fmt: skip
"""The row's own keys that identify a measurement in reports."""

_MEMORY_KINDS: Final[tuple[tuple[str, MemoryKind], ...]] = (
    (r"^(?!.*reserved).*allocated.*(?:first|\b1) (?:step|iteration)", "first_step"),
    (r"nvidia-smi|rocm-smi|amd-smi|\bnvml\b|whole device|device memory|\bof the device\b", "device"),
    (r"band|allocated or reserved|kind not stated|^not stated", "band"),
    (r"(?:max|peak)[_ ](?:memory[_ ])?reserved|^\s*reserved", "reserved"),
    (r"allocated", "allocated"),
)
"""First match in mem_kind."""
GIGABYTES: Final = {"megatron-bridge": 1e9, "megatron-bridge-tuning": 1e9, "megatron-bridge-defaults": 1e9, "lit-gpt": 1e9}
"""Bytes of what a framework's own log calls a GB, where it is not 2^30: Megatron-Bridge training/utils/train_utils.py
report_memory divides by 1.0e9, as do lit-gpt's scripts and lightning-thunder's benchmark_litgpt.py."""
_BUBBLE_KINDS: Final[tuple[tuple[str, BubbleOf], ...]] = ((r"profiled T_F", "one stage"), (r"profiled", "busiest"))
"""First match in bubble_kind."""
_FIRST_RANK: Final = r"rank 0|logging rank|nanotron logs"
"""mem_kind of figures that the first pipeline rank alone reports (nanotron logs the memory of global rank 0)."""


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of the JSON-lines file at `path`, or of all those in a folder.

    Raises:
        InputError: unreadable, or a line that is not a JSON object; with its number.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; expected a file of runs, one JSON object a line")
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, row in read_json_lines(file):  # a row with nan is skipped with its reason, others go on
            yield f"{file.name}:{number}", row


def read_runs(path: Path) -> Iterator[Run]:
    """Every row of the file (or folder of files) as a run."""
    for name, row in read_rows(path):
        yield run_of(row, name)


def runs_in(paths: Iterable[Path], hardware: str | None = None) -> list[Run]:
    """Every run of the JSON-lines files.

    Args:
        hardware: a profile (one that `simpar calibrate` wrote) to take for the machines of all runs.

    Raises:
        InputError: a file that is missing, unreadable or without a row.
    """
    found: list[Run] = []
    for path in paths:
        rows = [run_of(located(row, path), name) for name, row in read_rows(path)]
        if not rows:
            raise InputError(f"{path}: no run in it; expected lines of `simpar run read`, or rows of scenario and step_time_s")
        found += rows
    return found if hardware is None else [_on(run, hardware) for run in found]


def columns_of(raw: Row) -> dict[str, Any]:
    """What conditions on rows see: the columns of a flat row in their types; what identifies a stored run."""
    if not is_stored(raw):
        return read_values(raw).row
    return {**{key: value for key, value in raw.items() if isinstance(value, str | int | float)}, **dict(raw.get("group") or {})}


def run_of(raw: Row, fallback_id: str = "row") -> Run:
    """`raw` as a run: stored, flat, or one whose `scenario` (a file, a shipped name or a raw table) is that scenario; nothing that
    it holds raises."""
    stored = is_stored(raw)
    if not stored and "scenario" not in raw:
        return _flat_run(raw, fallback_id)
    columns = {} if stored else read_values({key: value for key, value in raw.items() if key != "scenario"}).row
    name, measured = str(raw.get("id") or fallback_id), measured_of(columns)
    try:
        return stored_run(raw, fallback_id) if stored else _own_run(raw, name, columns, measured)
    except InputError as error:
        reason = f"not a valid scenario: {str(error).splitlines()[0]}"
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"a field has an unexpected value: {error}"
    return Run(name, {}, measured, None, reason, excluded_because(raw), (), dict(raw))


def _flat_run(raw: Row, fallback_id: str) -> Run:
    values = read_values(raw)
    row, completions = completed(values.row)
    name = str(row.get("id") or fallback_id)
    given = ((key, row[key]) for key in GROUP_KEYS if row.get(key) is not None)
    group = {key: value if isinstance(value, str | int | float) else str(value) for key, value in given}
    run = Run(name, group, measured_of(row), None, "", excluded_because(row), (), row)
    skipped, notes = "", ()  # type: str, tuple[str, ...]
    try:
        if values.wrong:
            raise CannotExpress(f"a column has an unexpected value: {'; '.join(values.wrong.values())}")
        usual, notes = table_of(row, name)
        open_ = open_facts(row, usual)
        run = run.expressed(make_scenario(usual), usual, open_, with_sets(usual, open_))
        notes = (*completions, *notes, *values.notes)
    except CannotExpress as reason:
        skipped = str(reason)
    except InputError as error:
        skipped = f"not a valid scenario: {str(error).splitlines()[0]}"
    except KeyError as error:
        skipped = f"not stated: {error.args[0]}"
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        skipped = f"a column has an unexpected value: {error}"
    if run.scenario is not None and not skipped and run.measured.step_time_s is None:
        seconds = seconds_from_flops(row, run.scenario)
        source = ("tflops_per_gpu" if row.get("tflops_per_gpu") else "mfu") if seconds else ""
        run = replace(run, measured=replace(run.measured, step_time_s=seconds, step_time_from=source))
    if not skipped and not run.measured.anything:
        nothing = ": ".join(filter(None, ("nothing measured", uncounted(row))))
        skipped = "; ".join((nothing, *values.notes))
    return replace(run, skipped=skipped, assumptions=tuple(notes))


def _own_run(raw: Row, name: str, columns: Row, measured: Measured) -> Run:
    """A row of a cluster's own: a scenario and what it measured.

    Raises:
        InputError, AttributeError, KeyError, TypeError, ValueError, OverflowError: its scenario cannot be read.
    """
    table, file = _table(raw["scenario"])
    fields = open_fields(table, file)
    scenario = make_scenario(choices(table, fields, file)[0].table, file=file)
    group = {"source": "", "model_name": scenario.name, "n_gpus": scenario.world_size}
    group |= {key: value for key in GROUP_KEYS if isinstance(value := columns.get(key), str | int | float)}
    skipped = "" if measured.anything else "nothing measured"
    return Run(name, group, measured, scenario, skipped, excluded_because(raw), (), dict(raw), table=table)


def located(row: dict[str, Any], runs: Path) -> dict[str, Any]:
    """`row` of the file or folder `runs`, with its scenario's file in full where that lies beside it."""
    given = row.get("scenario")
    near = (runs if runs.is_dir() else runs.parent) / given if isinstance(given, str) else None
    return {**row, "scenario": str(near.resolve())} if near is not None and near.is_file() else row


def _table(given: object) -> tuple[dict[str, Any], str]:
    if isinstance(given, Mapping):
        return {k: v for k, v in given.items() if k != "file"}, str(given.get("file", ""))
    if not isinstance(given, str):
        raise InputError(f"scenario {given!r}: a file, a name or a table")
    path = Path(given) if Path(given).is_file() else scenario_path(given)
    return read_table(path), str(path)


def excluded_because(row: Row) -> str:
    """The data's own reason to leave a row out; "" where it counts."""
    return str(row.get("exclude") or "")


def table_of(row: Row, name: str = "run") -> tuple[dict[str, Any], tuple[str, ...]]:
    """The table of `row`'s scenario and what was assumed.

    Raises:
        CannotExpress: outside what simpar models, or too little is stated; the message says which.
    """
    task = str(row.get("task") or "pretrain")
    if "microbenchmark" in task:
        raise CannotExpress("a layer microbenchmark, not a training step")
    key, notes = framework_of(row)
    month = month_of_row(row, key)
    version = f"{month[0]}-{month[1]:02d}" if month[0] < 9000 else None
    semantics = framework_named(key, version)
    cluster, machine_notes = machine_of(row)
    precision, more = precision_of(row, month, cluster["hardware"])
    notes += more
    model, model_notes = (row[SHIPPED], []) if row.get(SHIPPED) else model_of(row)
    model = in_its_own_code(model, semantics.conventions)
    plan, plan_notes = plan_of(row, semantics)
    training, training_notes = training_of(row, semantics, precision, month)
    if row.get("cuda_graphs") is None and cluster["hardware"] in semantics.conventions.graphed_machines:
        training["cuda_graphs"] = True
        training_notes.append("CUDA graphs not stated: those of layers, as in recipes of this machine")
    table = {
        "name": name,
        "model": model,
        "framework": key,
        "framework_version": version,
        "cluster": cluster,
        "plan": plan,
        "training": training,
    }
    notes += [*machine_notes, *model_notes, *plan_notes, *training_notes]
    return table, tuple(notes)


def measured_of(row: Row) -> Measured:
    """What `row`, read by `read_values`, measured; in SI units."""
    seconds, derivation = _step_time(row)
    memory = row.get("mem_gib")
    unit = GIGABYTES.get(framework_of(row)[0], 2.0**30) if str(row.get("mem_unit_as_stated")) == "GB" else 2.0**30
    kind = str(row.get("mem_kind") or "not stated")
    bubble, oom = row.get("bubble_fraction"), row.get("oom")
    return Measured(
        seconds,
        derivation,
        memory * unit if memory else None,
        next((k for pattern, k in _MEMORY_KINDS if re.search(pattern, kind, re.IGNORECASE)), "band"),
        memory is not None and re.search(_FIRST_RANK, kind, re.IGNORECASE) is not None,
        bubble,
        next((of for pattern, of in _BUBBLE_KINDS if re.search(pattern, str(row.get("bubble_kind") or ""))), "all"),
        None if oom is None else bool(oom),
    )


def _step_time(row: Row) -> tuple[float | None, str]:
    """Seconds per step, from the best that is stated, and from which."""
    for key in ("step_time_s_best", "step_time_s", "step_time_s_derived"):
        if seconds := row.get(key):
            return seconds, key
    batch, length, gpus = (row.get(key) for key in ("global_batch", "seq_len", "n_gpus"))
    if not batch or not gpus:
        return None, ""
    tokens = batch * (length or 0.0)
    for key in RATES:
        amount = (tokens if key.startswith("tokens") else batch) / (gpus if "per_gpu" in key else 1)
        if amount and (rate := row.get(key)):
            return amount / rate, key
    return None, ""


def _on(run: Run, hardware: str) -> Run:
    """`run` on another profile of its machine."""
    if run.scenario is None or run.table is None:
        return run
    table = {**run.table, "cluster": {**run.table["cluster"], "hardware": hardware}}
    try:
        usual = choices(table, open_fields(table))[0].table
        return replace(run, table=table, scenario=make_scenario(usual, file=run.scenario.file))
    except InputError as error:
        return replace(run, skipped=f"not a valid scenario on {hardware}: {str(error).splitlines()[0]}", scenario=None)


_HARDWARE: Final = re.compile(r"hardware|\bhfu\b", re.IGNORECASE)
_AGAIN: Final = re.compile(r"(?<!no )(?<!without )recomput", re.IGNORECASE)
_WHOLE: Final = re.compile(r"non-?causal|full attention|whole (?:score|attention)|12\s*[*x·]?\s*l\b", re.IGNORECASE)
_CAUSAL: Final = re.compile(r"causal|\bmodel\b", re.IGNORECASE)
_UNCOUNTED: Final = (
    "TFLOP/s or MFU alone, and tflops_def or mfu_def does not say of what: model FLOPs, with causal or with full attention, or "
    "hardware FLOPs"
)


_MEGATRON: Final[tuple[tuple[Month, str], ...]] = (((0, 0), ""), ((2023, 11), "non-causal"), ((2025, 4), "causal"))
_LOGS: Final[dict[str, tuple[tuple[Month, str], ...]]] = {
    "megatron-core": _MEGATRON, "megatron-bridge": _MEGATRON, "torchtitan": (((0, 0), "non-causal"),),
}  # fmt: skip
"""Framework -> what its log counts, from a month on. Megatron-LM's --log-throughput and Megatron-Bridge's utils/flop_utils.py:
model FLOPs (training.py num_floating_point_operations: 2748e7c7 of 2023-11; half of the score matrix since 8873b55d of 2025-03,
latent attention's products since d4f9a6f7 of 2025-04). Torchtitan's: active weights but the input embedding, and the score matrix
whole (12 l h q t of its utils.py of 2024, models/utils.py get_moe_model_nparams_and_flops of 2026-08)."""
_LEAST_PERCENT: Final = 1.0
"""MFU is in percent; one of at most this may as well be a share of 1, so no step time is taken from it."""


def seconds_from_flops(row: Row, scenario: Scenario) -> float | None:
    """Seconds of a step whose FLOPs run at the stated rate; None where that counts others or does not say.

    Model FLOPs have causal attention, half of the score matrix, unless the row says that it is counted whole, as recent papers do,
    or names a log that does.
    Hardware FLOPs have it whole unless the row says causal, and layers that are recomputed once more, as Narayanan et al. 2021
    (arXiv 2104.04473, appendix) count them.
    """
    layout = Layout.of(scenario, scenario.plan.pp * scenario.plan.virtual_stages)
    rate, words = _rate(row, layout)
    words = _as_logged(words, scenario)
    hardware = _HARDWARE.search(words) is not None
    whole = _WHOLE.search(words) is not None or (hardware and not re.search(r"causal", words, re.IGNORECASE))
    if not rate or (not hardware and (_AGAIN.search(words) or not (whole or _CAUSAL.search(words)))):
        return None
    flops = layout.model_flops + (uncounted_pairs_flops(layout) if whole else 0.0)
    if hardware:
        if layout.recompute.granularity == "selective":
            return None
        flops += recomputed_flops(layout) + (uncounted_pairs_flops(layout, again=True) if whole else 0.0)
    return flops / (rate * scenario.world_size)


def _as_logged(words: str, scenario: Scenario) -> str:
    """`words`, or what the log counts that they name and say no more of."""
    if _HARDWARE.search(words) or _WHOLE.search(words) or _CAUSAL.search(words) or not words:
        return words
    name, _ = framework_of({"framework": words})
    if name not in _LOGS:
        return words
    month = month_of(scenario.framework, scenario.framework_version)
    return f"{words}: {next(counts for since, counts in reversed(_LOGS[name]) if month >= since)}"


def _rate(row: Row, layout: Layout) -> tuple[float, str]:
    """FLOP/s of a GPU that `row` states, as such or as a share of a peak, and what it says it counts."""
    if stated := row.get("tflops_per_gpu"):
        return stated * 1e12, str(row.get("tflops_def") or "")
    peak = (row.get("peak_tflops_used") or 0.0) * 1e12 or mfu_peak_flops_per_s(layout)
    share = row.get("mfu") or 0.0
    return (share / 100.0 * peak if share > _LEAST_PERCENT else 0.0), str(row.get("mfu_def") or "")


def uncounted(row: Row) -> str:
    """Why the FLOP/s or MFU of `row` tell no step time; "" where it states neither."""
    if not row.get("tflops_per_gpu") and 0.0 < (row.get("mfu") or 0.0) <= _LEAST_PERCENT:
        return f"mfu {row['mfu']:g} is in percent and too small for one; a share of 0.45 is written 45"
    return _UNCOUNTED if row.get("tflops_per_gpu") or row.get("mfu") else ""


__all__ = ["seconds_from_flops", "uncounted"]
