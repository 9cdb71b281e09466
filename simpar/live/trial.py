"""A scenario run for real on this machine, a few steps of it, for `simpar tune`:

    simpar tune job.toml --run-command 'python -m simpar.live.trial {scenario}'

Prints one JSON line, `{"step_time_s": ..., "mem_gib": ...}`. The ranks' program is that of `simpar validate cluster`: a Llama or an
MLP with random weights under torch.distributed (gloo on CPUs, NCCL on GPUs).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from simpar.errors import InputError, SimparError, Violation
from simpar.live.cluster import BASE, WORKER, ClusterOptions, device_of, seconds
from simpar.live.cluster_compare import read_runs
from simpar.live.cluster_launch import launch
from simpar.live.cluster_layouts import RunLayout, impossible
from simpar.live.cluster_predict import predict
from simpar.live.cluster_setup import config_of, setup_of
from simpar.specs.counts import resolved_dp
from simpar.specs.model import MlpSpec
from simpar.specs.scenario import Scenario, read_scenario


def layout_of_scenario(scenario: Scenario) -> RunLayout:
    """The real run that a scenario describes.

    Raises:
        InputError: the ranks' program cannot run such a plan.
    """
    plan, model = scenario.plan, scenario.model
    moe = getattr(model, "moe", None) is not None
    recompute = plan.recompute if isinstance(plan.recompute, str) else plan.recompute.granularity
    wrong = []
    if plan.zero_stage not in (0, 3):
        wrong.append(Violation("plan.zero_stage", plan.zero_stage, "ranks replicate or shard everything", "0 or 3", scenario.file))
    if recompute not in ("none", "full"):
        wrong.append(Violation("plan.recompute", recompute, "a real run recomputes whole layers", "none or full", scenario.file))
    layout = RunLayout(
        name=scenario.name or "trial", model="mlp" if isinstance(model, MlpSpec) else "moe" if moe else "transformer",
        tp=plan.tp, cp=plan.cp, dp=resolved_dp(scenario), pp=plan.pp, ep=plan.ep, fsdp=plan.zero_stage == 3,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1, cp_style=plan.cp_style,
        schedule=plan.schedule if plan.pp > 1 else "1f1b", virtual_stages=plan.virtual_stages, recompute=recompute == "full",
        compiled=scenario.training.compile in (True, "model"),
    )  # fmt: skip
    wrong += [Violation("plan", layout.name, rule) for rule in impossible(layout)]
    if wrong:
        raise InputError(wrong)
    return layout


def measure(path: Path, options: ClusterOptions) -> dict[str, Any]:
    """Run the scenario in `path` and read what it took.

    Raises:
        InputError: it cannot be run here, or its ranks did not end well.
    """
    scenario = read_scenario(path)
    layout = layout_of_scenario(scenario)
    options = replace(options, nproc=layout.world_size)
    device = device_of(options)
    precision = {"cpu": "fp32", "cuda": "bf16"}[device]
    setup = setup_of(path, [layout], BASE[device], precision)
    told = options.measuring(device) | config_of(setup, [predict(layout, setup)])
    with tempfile.TemporaryDirectory(prefix="simpar-trial-") as folder:
        config, runs, reports = (Path(folder) / name for name in ("config.json", "runs.jsonl", "ranks"))
        config.write_text(json.dumps({**told, "kind": "config"}), encoding="utf-8")
        arguments = ["--config", str(config), "--out", str(runs), "--reports", str(reports)]
        launch(WORKER, arguments, layout.world_size, reports=reports, timeout_s=2.0 * options.timeout_s + 60.0, progress=(runs,))
        (found,) = read_runs(runs)[1].values()
    row: dict[str, Any] = {"step_time_s": found.median_s, "steps": found.steps, "spread": found.spread}
    if ranks := found.first.get("memory"):
        row |= {"mem_gib": max(rank["allocated"] for rank in ranks) / 2**30, "mem_kind": "max allocated"}
    return row


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.trial", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="measured in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", default="60s", help="longest wait of a rank for the others")
    given = parser.parse_args(arguments)
    try:
        wait = seconds("--timeout", given.timeout)
        options = ClusterOptions(device=given.device, steps=given.steps, rounds=given.rounds, warmup=given.warmup, timeout_s=wait)
        print(json.dumps(measure(given.scenario, options)))
    except SimparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
