"""`simpar validate cluster`: real training steps of this machine, launched, measured, predicted, compared.

Calibrate (unless a profile is given), run every layout, compare: each step can be had alone, so that the ranks may run on a
machine that has torch and nothing else (docs/validation_cluster.md).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.units import parse
from simpar.validation.cluster_compare import ClusterReport, Measured, compare, read_runs
from simpar.validation.cluster_launch import ClusterError, Rendezvous, launch
from simpar.validation.cluster_layouts import DEFAULT, LayoutError, RunLayout, parse_layouts
from simpar.validation.cluster_predict import Setup, predict
from simpar.validation.cluster_setup import config_of, references_of, setup_of, sharded_over
from simpar.validation.cluster_shapes import collectives_of, shapes_of

WORKER: Final = "simpar.validation.cluster_worker"
CALIBRATION: Final = "simpar.calibration"
BASE: Final = {"cpu": "cpu-gloo", "cuda": "dgx-h100"}
HERE: Final = Rendezvous()
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the user asked for.

    Attributes:
        nproc: processes of this host.
        layouts: comma-separated; empty = a default set.
        scenario: model and batch; None = small defaults.
        profile: calibrated profile; None = calibrate first.
        tolerance: on the mean error of step times.
        html, json: where the report goes besides the terminal.
        store: measurements, kept and continued; None = a temporary file, kept only after an error.
        device: auto, cpu or cuda. threads: of a rank on a CPU.
        budget_s: for the calibration of each number of ranks.
        steps, warmup, rounds: measured steps of a layout in a round; rounds go over all layouts again.
        timeout_s: longest wait of a rank for the others.
        write_config: write what the ranks need here and stop. runs: compare this file, run nothing.
        meet: where the processes of several hosts meet.
        fault: for tests.
    """

    nproc: int = 2
    layouts: str = ""
    scenario: Path | None = None
    profile: Path | None = None
    tolerance: float = 0.15
    html: Path | None = None
    json: bool = False
    store: Path | None = None
    device: str = "auto"
    threads: int = 1
    budget_s: float = 60.0
    steps: int = 5
    warmup: int = 2
    rounds: int = 2
    timeout_s: float = 60.0
    write_config: Path | None = None
    runs: Path | None = None
    meet: Rendezvous = HERE
    fault: dict[str, Any] | None = None


def run(options: ClusterOptions) -> int:
    """The command; 0 = within tolerance, 1 = outside.

    Raises:
        InputError: a wrong option, no torch, or ranks that did not end well.
    """
    check(options)
    report = _compared(options) if options.runs is not None else _measured(options)
    if report is None:
        return 0
    if options.html is not None:
        from simpar.validation.cluster_report import write_html

        write_html(report, options.html)
    if options.json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n")
    else:
        from simpar.validation.cluster_report import print_report

        print_report(report)
    return 0 if report.passed else 1


def check(options: ClusterOptions) -> None:
    """All that is wrong with the options themselves, together."""
    counts = ("nproc", "threads", "steps", "rounds")
    found = [Violation(f"--{f}", getattr(options, f), "at least 1") for f in counts if getattr(options, f) < 1]
    if options.warmup < 0:
        found.append(Violation("--warmup", options.warmup, "at least 0"))
    if not 0 < options.tolerance < 10:
        found.append(Violation("--tolerance", options.tolerance, "a share of the measured time", "0.15 is 15 %"))
    if options.device not in ("auto", "cpu", "cuda"):
        found.append(Violation("--device", options.device, "no such device", "choose auto, cpu or cuda"))
    if not options.timeout_s > 0:
        found.append(Violation("--timeout", options.timeout_s, "more than no time", "such as 60s"))
    if options.meet.master and not options.meet.master.rpartition(":")[2].isdigit():
        found.append(Violation("--master", options.meet.master, "is no address with a port", "such as node0:29500"))
    if found:
        raise InputError(found)


def layouts_of(options: ClusterOptions) -> tuple[RunLayout, ...]:
    """The layouts asked for.

    Raises:
        InputError: wrong names, or layouts that need more processes than there are.
    """
    defaults = [name for ranks, names in DEFAULT.items() if ranks <= options.nproc for name in names]
    try:
        layouts = parse_layouts(options.layouts or ",".join(defaults))
    except LayoutError as error:
        raise InputError(f"--layouts: {error}") from None
    everywhere = options.nproc * options.meet.nnodes
    large = [layout for layout in layouts if layout.world_size > everywhere]
    if large:
        needs = ", ".join(f"{layout.name} needs {layout.world_size}" for layout in large)
        right = f"give --nproc {max(layout.world_size for layout in large)} or other layouts"
        raise InputError([Violation("--nproc", options.nproc, f"fewer processes than the layouts need: {needs}", right)])
    layouts = tuple(layout for layout in layouts if layout.world_size > 1)
    if not layouts:
        raise InputError([Violation("--layouts", options.layouts, "nothing to compare", "name layouts of more than one rank")])
    return layouts


def device_of(options: ClusterOptions) -> str:
    """cpu or cuda.

    Raises:
        InputError: no torch, no GPU, fewer GPUs than processes, or no NCCL.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("real runs need torch; install it with `pip install simpar[torch]`")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cpu" or (options.device == "auto" and gpus < options.nproc):
        return "cpu"
    if gpus < options.nproc:
        right = "choose cpu, fewer processes, or a machine with more GPUs"
        raise InputError([Violation("--device", "cuda", f"torch sees {gpus} GPUs, {options.nproc} processes need one each", right)])
    if not torch.distributed.is_nccl_available():
        raise InputError([Violation("--device", "cuda", "this torch has no NCCL", "install one that has, or choose cpu")])
    return "cuda"


def config_for(options: ClusterOptions, setup: Setup, layouts: Sequence[RunLayout], device: str) -> dict[str, Any]:
    """What the ranks of one launch are told: reference steps first, then the layouts."""
    references = references_of(layouts, device)
    predictions = [predict(layout, setup) for layout in (*references, *layouts)]
    degree = min((layout.dp for layout in layouts if layout.fsdp), default=0)
    # What the sharded reference is compared with runs nowhere, but its copies need prices.
    beside = [predict(sharded_over(layout, degree), setup) for layout in references if layout.fsdp]
    return config_of(
        setup, predictions, device=device, threads=options.threads, timeout_s=options.timeout_s, warmup=options.warmup,
        steps=options.steps, rounds=options.rounds,
    ) | {
        "kind": "config",
        "shapes": shapes_of([*predictions, *beside]), "collectives": collectives_of(predictions),
    }  # fmt: skip


def _measured(options: ClusterOptions) -> ClusterReport | None:
    device = "cuda" if options.write_config is not None and options.device == "cuda" else device_of(options)
    layouts = layouts_of(options)
    base = str(options.profile) if options.profile else BASE[device]
    setup = setup_of(options.scenario, layouts, base, "fp32")
    sizes = sorted({layout.world_size for layout in layouts})
    configs = {n: config_for(options, setup, [x for x in layouts if x.world_size == n], device) for n in sizes}
    if options.write_config is not None:
        _write_configs(options.write_config, configs)
        return None
    folder = Path(tempfile.mkdtemp(prefix="simpar-cluster-")) if options.store is None else options.store.parent
    store = options.store or folder / "runs.jsonl"
    say: Say = (lambda text: None) if options.json else _to_stderr
    try:
        parts = [_one_size(options, n, configs[n], setup, store, say) for n in sizes]
    except ClusterError as error:
        raise ClusterError(f"{error}; measurements so far are kept in {store.parent}: go on with --store {store}") from None
    report = compare(parts, options.tolerance)
    if options.store is None:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def seconds(field: str, text: str) -> float:
    """ "60s" or "2min" as seconds.

    Raises:
        InputError: it is no time.
    """
    try:
        return parse(text, "seconds")
    except ValueError as error:
        raise InputError([Violation(field, text, str(error), "such as 60s or 2min")]) from None


def _write_configs(path: Path, configs: dict[int, dict[str, Any]]) -> None:
    for n, config in configs.items():
        target = path if len(configs) == 1 else path.with_suffix(f".{n}.json")
        try:
            target.write_text(json.dumps(config, indent=1), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--write-config {target}: cannot be written: {error.strerror}") from None
        _to_stderr(f"wrote {target} for {n} ranks")


def beside(store: Path, ranks: int, suffix: str) -> Path:
    """A file of one number of ranks next to the store."""
    return store.with_name(f"{store.stem}.{ranks}{suffix}")


def _one_size(
    options: ClusterOptions, ranks: int, config: dict[str, Any], setup: Setup, store: Path, say: Say
) -> tuple[dict[str, Measured], dict[str, Measured], Setup]:
    """Calibrate and run the layouts of one number of ranks; what is there already is not measured again."""
    store.parent.mkdir(parents=True, exist_ok=True)
    runs, told = beside(store, ranks, ".runs.jsonl"), beside(store, ranks, ".config.json")
    _check_same(runs, config)
    told.write_text(json.dumps(config | ({"fault": options.fault} if options.fault else {})), encoding="utf-8")
    local = min(ranks, options.nproc)
    profile = options.profile
    if profile is None:
        profile = beside(store, ranks, ".toml")
        if not profile.exists():
            say(f"calibrating {ranks} ranks for at most {options.budget_s:g} s")
            _calibrate(options, local, told, profile, config)
    say(f"running {len(config['layouts'])} layouts of {ranks} ranks")
    _append_config(runs, config)
    reports = beside(store, ranks, ".ranks")
    launch(
        WORKER, ["--config", str(told), "--out", str(runs), "--reports", str(reports)], local, reports=reports,
        timeout_s=2.0 * options.timeout_s + 60.0, progress=(runs,), meet=options.meet, begin_s=options.timeout_s + 15.0,
    )  # fmt: skip
    shutil.rmtree(reports, ignore_errors=True)
    _, found, references = read_runs(runs)
    return found, references, replace(setup, hardware=str(profile))


def _calibrate(options: ClusterOptions, ranks: int, told: Path, profile: Path, config: dict[str, Any]) -> None:
    measured = profile.with_suffix(".jsonl")
    reports = profile.with_suffix(".calibration")
    device = config["device"]
    given = {"shapes": told, "out": profile, "budget": f"{options.budget_s}s", "device": device, "threads": options.threads,
             "timeout": f"{options.timeout_s}s", "base": BASE[device]}  # fmt: skip
    arguments = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    if measured.exists():
        arguments += ["--resume", str(measured)]
    launch(
        CALIBRATION, arguments, ranks, reports=reports, timeout_s=options.budget_s + 2.0 * options.timeout_s + 60.0,
        progress=(measured,), meet=options.meet,
    )  # fmt: skip
    shutil.rmtree(reports, ignore_errors=True)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """What must agree for measurements to belong together."""
    table: dict[str, Any] = json.loads(json.dumps({k: config[k] for k in ("models", "training", "device", "threads")}))
    return table


def _check_same(runs: Path, config: dict[str, Any]) -> None:
    if not runs.exists() or os.path.getsize(runs) == 0:
        return
    old, _, _ = read_runs(runs)
    if _plain(old) != _plain(config):
        raise InputError(f"{runs}: measured with another model, batch or device; give another --store, or move it away")


def _append_config(runs: Path, config: dict[str, Any]) -> None:
    if not runs.exists() or os.path.getsize(runs) == 0:
        runs.write_text(json.dumps(config) + "\n", encoding="utf-8")


def _compared(options: ClusterOptions) -> ClusterReport:
    """A file of runs that another machine wrote, against a profile."""
    assert options.runs is not None
    if options.profile is None:
        raise InputError("--from: give the profile that was calibrated there with --profile")
    config, runs, references = read_runs(options.runs)
    setup = Setup(config["models"], config["training"], str(options.profile))
    return compare([(runs, references, setup)], options.tolerance)
