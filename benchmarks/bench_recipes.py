"""What would the search gain over vendors' published tuned recipes? As JSON, and the paragraph of docs/search.md.

python benchmarks/bench_recipes.py [--only TEXT] [--most-gpus N] [--limit N] [--docs docs/search.md]

A recipe is a measured run of the evidence whose vendor tuned it (NeMo, Megatron-Bridge, DGX Cloud). Its model, cluster, batch and
precision are searched within its framework, quickly; of the winner it says how much faster than the recipe it is predicted, in
units of the model's own error of a ratio of two layouts, and whether the recipe's design is among those to try. A claim within one
such error is none: the model could not tell the two apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import numpy as np

from simpar.errors import InputError
from simpar.evidence.run_type import Run, stored_run
from simpar.searching.abilities import limit_of
from simpar.searching.answer import answer
from simpar.searching.decision import MESH_ERROR, OWN_ERROR, TOLD
from simpar.searching.designs import design_key, design_name
from simpar.searching.find import find
from simpar.searching.parts import Wish
from simpar.searching.request import choice_of, make_space
from simpar.specs.base import stored_runs
from simpar.step import simulate

VENDORS: Final = ("nvidia_dgx_cloud", "nvidia_megatron_bridge", "nvidia_nemo")
REACH: Final = 1.02
BEGIN, END = "<!-- recipes -->", "<!-- end of recipes -->"


def recipes(most_gpus: int, only: Sequence[str]) -> list[Run]:
    """One run of every model, accelerator, number of GPUs and precision, the fastest per token."""
    best: dict[tuple[object, ...], tuple[float, Run]] = {}
    for path in sorted(stored_runs().glob("*.jsonl")):
        if not path.name.startswith(VENDORS):
            continue
        for number, line in enumerate(path.read_text().splitlines()):
            run = stored_run(json.loads(line), f"{path.name}:{number}")
            scenario, step_s = run.scenario, run.measured.step_time_s
            if scenario is None or step_s is None or run.excluded or scenario.world_size > most_gpus:
                continue
            if run.group.get("task") != "pretrain" or (only and not any(text in run.id for text in only)):
                continue
            training = scenario.training
            name = (run.group["model_name"], run.group["gpu"], scenario.world_size, training.precision, training.sequence_length)
            rate = training.global_batch_size * training.sequence_length / step_s
            if name not in best or rate > best[name][0]:
                best[name] = (rate, run)
    return [run for _, run in best.values()]


def compared(run: Run) -> dict[str, Any]:
    """The recipe beside the best that the search finds for its job."""
    scenario = run.scenario
    assert scenario is not None
    began, mine = time.process_time(), simulate(scenario, detail="stage")
    table = {**scenario.model_dump(mode="json", exclude={"plan", "published", "file"}, exclude_unset=True)}
    space = make_space(table, framework=limit_of(None, scenario.framework))
    wish = Wish(fold=True, fit_probability=0.9, reach=REACH, tolerance=TOLD)
    result = answer([find(space, wish)])
    best = result.best
    if best is None:
        return {"id": run.id, "searched": "nothing fits", "cpu_s": time.process_time() - began}
    gain = mine.step_time_s / best.result.step_time_s - 1.0
    tried = {design_key(result.candidates[i].scored.choice) for i in result.try_these}
    return {
        "id": run.id, "model": run.group["model_name"], "gpu": run.group["gpu"], "gpus": scenario.world_size,
        "precision": scenario.training.precision, "recipe": design_name(choice_of(scenario)), "best": best.design,
        "measured_s": run.measured.step_time_s, "predicted_s": mine.step_time_s, "best_s": best.result.step_time_s,
        "claimed_gain": gain, "in_errors": float(np.log1p(gain) / np.hypot(MESH_ERROR, OWN_ERROR) / 2**0.5),
        "recipe_is_to_try": design_key(choice_of(scenario)) in tried, "cpu_s": time.process_time() - began,
    }  # fmt: skip


def paragraph(rows: list[dict[str, Any]]) -> str:
    """What docs/search.md says of it."""
    gains = np.array([row["claimed_gain"] for row in rows])
    units = np.array([row["in_errors"] for row in rows])
    inside = sum(row["recipe_is_to_try"] for row in rows)
    widest = max(rows, key=lambda row: row["claimed_gain"])
    each = "; ".join(
        f"{row['model']} {row['precision']} on {row['gpus']} {row['gpu']}: {row['claimed_gain']:+.1%}, {row['best']}"
        for row in rows
    )
    text = (
        f"Against {len(rows)} recipes that vendors tuned and published (NeMo, Megatron-Bridge, DGX Cloud; `python "
        f"benchmarks/bench_recipes.py`) the search claims a median gain of {np.median(gains):.1%}, at most {gains.max():.1%} "
        f"({widest['model']}); {int((units <= 1.0).sum())} of them are within one error of the model's ratio of two layouts, and "
        f"{inside} recipes are of a design to try. {each}."
    )
    return fill(text, 132, break_on_hyphens=False)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", default=[], help="only runs whose ids have this")
    parser.add_argument("--most-gpus", type=int, default=64)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--docs", type=Path, default=None, help="page whose paragraph is written anew")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    for run in recipes(options.most_gpus, options.only)[: options.limit]:
        try:
            rows.append(compared(run))
        except InputError as error:
            skipped[str(error)].append(run.id)
    found = [row for row in rows if "claimed_gain" in row]
    print(json.dumps({"recipes": rows, "skipped": skipped, "text": paragraph(found) if found else ""}, indent=2))
    if options.docs is not None and found:
        before, _, rest = options.docs.read_text().partition(BEGIN)
        options.docs.write_text(f"{before}{BEGIN}\n{paragraph(found)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
