"""`simpar tune` for real: gloo ranks on this machine run every trial; then every other layout is run too, to see what was missed.

    python benchmarks/bench_tune_real.py --ranks 2 [--budget 4] [--folder FOLDER] [--json]

The space: dp, tp and pp of the ranks, micro-batches of 1 and 4. A folder keeps the tuning and the measurements: killed and started
again, the command goes on. Leave the machine alone meanwhile: what else runs there slows layouts unequally.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from simpar.api.tuning import Tuning, tune
from simpar.interop.scenario_text import table_text
from simpar.live.cluster import ClusterOptions
from simpar.live.trial import measure

MODEL = {"kind": "transformer", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 1024}  # fmt: skip
FIXED = {"cp": "1", "zero_stage": "0", "overlap_grad_reduce": "true", "overlap_param_gather": "true", "sequence_parallel": "false"}
ALLOWED = {"micro_batch_size": ["1", "4"], "recompute": ["none"], "schedule": ["1f1b"]}
OPTIONS = ClusterOptions(device="cpu", steps=4, rounds=2, warmup=2)


def job(ranks: int) -> dict[str, Any]:
    """What is trained."""
    return {
        "name": f"{ranks} gloo ranks", "framework": "torch-steps", "model": MODEL,
        "cluster": {"hardware": "cpu-gloo", "num_nodes": 1, "num_gpus": ranks},
        "plan": {"zero_stage": 0, "synchronous_optimizer": True},
        "training": {"precision": "fp32", "sequence_length": 128, "global_batch_size": 16, "micro_batch_size": 1},
    }  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tuned(ranks: int, budget: int, folder: Path) -> Tuning:
    """The tuning, each trial a real run."""
    command = f"{sys.executable} -m simpar.live.trial {{scenario}} --steps {OPTIONS.steps} --rounds {OPTIONS.rounds} --device cpu"
    return tune(job(ranks), budget=budget, folder=folder, run_command=command, say=say, fix=FIXED, allow=ALLOWED)


def every(state: Tuning) -> dict[str, float]:
    """Layout -> seconds of a step, of every layout there was to choose from; what was tried is measured again."""
    kept = state.folder / "every.json"
    found: dict[str, float] = json.loads(kept.read_text()) if kept.exists() else {}
    for candidate, raw in state.candidates:
        if candidate.name not in found:
            path = state.folder / "every.toml"
            path.write_text(table_text(raw))
            found[candidate.name] = measure(path, OPTIONS)["step_time_s"]
            say(f"{candidate.name}: {found[candidate.name]:.4g} s")
            kept.write_text(json.dumps(found))
    return found


def report(state: Tuning, seconds: dict[str, float]) -> dict[str, Any]:
    """How many trials it took, and how far what it found is from the best of all layouts."""
    best = min(seconds, key=lambda name: seconds[name])
    again = [seconds[trial.layout] / trial.measured_s for trial in state.trials if trial.measured_s]
    chosen = min((trial for trial in state.trials if trial.measured_s), key=lambda trial: trial.measured_s or 0.0).layout
    return {
        "layouts": len(seconds), "trials": len(state.trials), "chosen": chosen, "best": best, "why": state.why,
        "chosen_over_best": seconds[chosen] / seconds[best], "seconds": seconds,
        "repeats_within": max(max(ratio, 1.0 / ratio) for ratio in again),
        "trial_seconds": {trial.layout: trial.measured_s for trial in state.trials},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="simpar-tune-"))
    state = tuned(options.ranks, options.budget, folder)
    found = report(state, every(state))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print("| layout | predicted | measured | trial |\n|---|---|---|---|")
    order = {trial.layout: trial.number for trial in state.trials}
    for candidate, _ in state.candidates:
        predicted = sum(line.weight * line.seconds for line in candidate.lines)
        measured, trial = found["seconds"][candidate.name], order.get(candidate.name, "")
        print(f"| {candidate.name} | {predicted:.3f} s | {measured:.3f} s | {trial} |")
    print(
        f"{found['trials']} trials of {found['layouts']} layouts; chosen: {found['chosen']}, x {found['chosen_over_best']:.3f} of "
        f"the fastest ({found['best']}); trials repeat within x {found['repeats_within']:.2f}; stopped: {found['why']}"
    )


if __name__ == "__main__":
    main()
