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
from simpar.live.cluster_compare import ClusterReport, Measured, compare, read_runs
from simpar.live.cluster_launch import ClusterError, Rendezvous, launch
from simpar.live.cluster_layouts import DEFAULT, LayoutError, RunLayout, parse_layouts
from simpar.live.cluster_predict import Setup, predict
from simpar.live.cluster_setup import config_of, references_of, setup_of, sharded_over
from simpar.live.cluster_shapes import collectives_of, shapes_of
from simpar.units import parse

WORKER: Final = "simpar.live.cluster_worker"
CALIBRATION: Final = "simpar.live.calibrate"
BASE: Final = {"cpu": "cpu-gloo", "cuda": "dgx-h100"}
"""Profile that says which shapes a run has, before the machine is calibrated."""
PRECISIONS: Final = ("auto", "fp32", "bf16", "fp8")
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
        quiet: tell nothing meanwhile.
        store: measurements, kept and continued; None = a temporary file, kept only after an error.
        device: auto, cpu or cuda. threads: of a rank on a CPU.
        precision: auto (fp32 on CPUs, bf16 on GPUs), fp32, bf16 or fp8.
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
    quiet: bool = False
    store: Path | None = None
    device: str = "auto"
    precision: str = "auto"
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

    def measuring(self, device: str) -> dict[str, Any]:
        """How the ranks measure, as they are told."""
        names = ("threads", "timeout_s", "warmup", "steps", "rounds")
        return {"device": device, **{name: getattr(self, name) for name in names}}


def run(options: ClusterOptions) -> ClusterReport | None:
    """Measure and compare; None where another node compares, or only a configuration was written.

    Raises:
        InputError: a wrong option, no torch, or ranks that did not end well.
    """
    check(options)
    return _compared(options) if options.runs is not None else _measured(options)


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
    if options.precision not in PRECISIONS:
        found.append(Violation("--precision", options.precision, "no such precision", f"choose {', '.join(PRECISIONS)}"))
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
    everywhere = options.nproc * options.meet.nnodes
    defaults = [name for ranks, names in DEFAULT.items() if min(everywhere, 2) <= ranks <= everywhere for name in names]
    try:
        layouts = parse_layouts(options.layouts or ",".join(defaults))
    except LayoutError as error:
        raise InputError(f"--layouts: {error}") from None
    large = [layout for layout in layouts if layout.world_size > everywhere]
    if large:
        needs = ", ".join(f"{layout.name} needs {layout.world_size}" for layout in large)
        right = f"give --nproc {max(layout.world_size for layout in large)} or other layouts"
        raise InputError([Violation("--nproc", options.nproc, f"fewer processes than the layouts need: {needs}", right)])
    if options.precision == "fp8" and (wrong := [x.name for x in layouts if x.fsdp]):
        right = "gather in 16 bits with --precision bf16, or leave them out"
        raise InputError([Violation("--precision", "fp8", f"{', '.join(wrong)} would gather weights in 16 bits", right)])
    layouts = tuple(layout for layout in layouts if layout.world_size > 1 or everywhere == 1)
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
    return {
        **options.measuring(device), **config_of(setup, predictions), "kind": "config",
        "nodes": setup.nodes, "processes_per_node": setup.processes_per_node,
        "shapes": shapes_of([*predictions, *beside]), "collectives": collectives_of(predictions),
    }  # fmt: skip


def _measured(options: ClusterOptions) -> ClusterReport | None:
    device = "cuda" if options.write_config is not None and options.device == "cuda" else device_of(options)
    layouts = layouts_of(options)
    base = str(options.profile) if options.profile else BASE[device]
    precision = {"cpu": "fp32", "cuda": "bf16"}[device] if options.precision == "auto" else options.precision
    setup = setup_of(options.scenario, layouts, base, precision)
    setup = replace(setup, nodes=options.meet.nnodes, processes_per_node=options.nproc)
    sizes = sorted({layout.world_size for layout in layouts})
    configs = {n: config_for(options, setup, [x for x in layouts if x.world_size == n], device) for n in sizes}
    if options.write_config is not None:
        _write_configs(options.write_config, configs, options)
        return None
    folder = Path(tempfile.mkdtemp(prefix="simpar-cluster-")) if options.store is None else options.store.parent
    store = options.store or folder / "runs.jsonl"
    say: Say = (lambda text: None) if options.quiet else _to_stderr
    try:
        parts = [_one_size(options, n, configs[n], setup, store, say) for n in sizes]
        if options.meet.node_rank:
            say("the measurements are on node 0, which compares them")
            return None
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


def sbatch(config: Path, ranks: int, options: ClusterOptions) -> str:
    """A Slurm job that measures the machine and runs the layouts of a configuration; submitted again it goes on."""
    each = min(ranks, options.nproc)
    gpus = f"#SBATCH --gpus-per-node={each}\n" if options.device == "cuda" else ""
    name = config.stem
    device = "cuda" if options.device == "cuda" else "cpu"
    return f"""#!/bin/bash
#SBATCH --job-name=simpar-{name}
#SBATCH --nodes={-(-ranks // each)}
#SBATCH --ntasks-per-node={each}
{gpus}#SBATCH --time=00:30:00
# Run in the folder that holds simpar/, hardware_profiles/ and {config.name}; python3 needs torch and numpy.
set -e
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD"
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
more=; [ -s {name}.jsonl ] && more="--resume {name}.jsonl"
srun python3 -m simpar.live.calibrate --shapes {config.name} --out {name}.toml --budget {options.budget_s:g}s --device {device} \\
    $more
srun python3 -m simpar.live.cluster_worker --config {config.name} --out {name}.runs.jsonl
echo "at home: simpar validate cluster --from {name}.runs.jsonl --profile {name}.toml"
"""


def _write_configs(path: Path, configs: dict[int, dict[str, Any]], options: ClusterOptions) -> None:
    for n, config in configs.items():
        target = path if len(configs) == 1 else path.with_suffix(f".{n}.json")
        try:
            target.write_text(json.dumps(config, indent=1), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--write-config {target}: cannot be written: {error.strerror}") from None
        script = target.with_suffix(".sbatch")
        script.write_text(sbatch(target, n, options), encoding="utf-8")
        _to_stderr(f"wrote {target} for {n} ranks, and {script} that calibrates and runs them")


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
    nodes = -(-ranks // options.nproc)
    meet, several = replace(options.meet, nnodes=nodes) if nodes > 1 else HERE, options.meet.nnodes > 1
    profile = options.profile or beside(store, ranks, ".toml")
    if several and options.meet.node_rank >= nodes:
        say(f"{ranks} ranks need {nodes} of the hosts, not this one")
        return {}, {}, setup
    # Only node 0 sees whether a profile is there. Of several nodes all begin; what is measured is not measured again.
    if options.profile is None and (several or not profile.exists()):
        say(f"calibrating {ranks} ranks for at most {options.budget_s:g} s")
        _calibrate(replace(options, meet=meet), local, told, profile, config)
    say(f"running {len(config['layouts'])} layouts of {ranks} ranks")
    _append_config(runs, config)
    reports = beside(store, ranks, ".ranks")
    launch(
        WORKER, ["--config", str(told), "--out", str(runs), "--reports", str(reports)], local, reports=reports,
        timeout_s=2.0 * options.timeout_s + 60.0, progress=(runs,), meet=replace(meet, begin_s=options.timeout_s + 15.0),
    )  # fmt: skip
    shutil.rmtree(reports, ignore_errors=True)
    if options.meet.node_rank:
        return {}, {}, setup
    _, found, references = read_runs(runs)
    return found, references, replace(setup, hardware=str(profile))


def _calibrate(options: ClusterOptions, ranks: int, told: Path, profile: Path, config: dict[str, Any]) -> None:
    measured = profile.with_suffix(".jsonl")
    reports = profile.with_suffix(".calibration")
    device = config["device"]
    given = {"shapes": told, "out": profile, "budget": f"{options.budget_s}s", "device": device, "threads": options.threads,
             "timeout": f"{options.timeout_s}s", **({"base": BASE[device]} if device == "cpu" else {})}  # fmt: skip
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
    names = ("models", "training", "device", "threads", "precision")
    table: dict[str, Any] = json.loads(json.dumps({"precision": "fp32", **{k: config[k] for k in names if k in config}}))
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
    nodes = {"nodes": config.get("nodes", 1), "processes_per_node": config.get("processes_per_node", 0)}
    setup = Setup(config["models"], config["training"], str(options.profile), config.get("precision", "fp32"), **nodes)
    return compare([(runs, references, setup)], options.tolerance)
