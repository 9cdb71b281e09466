"""Trials that it takes to find a layout within 1 % of a measured sweep's best: `simpar tune` against others.

    python benchmarks/bench_tune.py [--data FILE.jsonl ...] [--cache sweeps.jsonl] [--sweeps 12] [--rows 16] [--docs docs/site.md]

A sweep is the runs of one source that differ in nothing but the layout. Its table answers every trial. Compared: `tune` (search,
then trials by their worth), the search alone (layouts in the order of their predicted step), a random order, and Optuna's TPE
without a simulator, whose suggestions are the nearest layouts not yet tried. Random orders and Optuna are repeated; `tune` and the
search are deterministic.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from docs_table import write_between

from simpar.evidence.run_rows import columns_of, read_rows, run_of
from simpar.evidence.run_workers import Bar, in_workers
from simpar.site.learned import shipped_prior
from simpar.site.observed import Observed, observe
from simpar.site.trials import Candidate, Outcome, believe, next_trial
from simpar.specs.base import stored_runs

SAME = ("source", "model_name", "gpu", "n_gpus", "global_batch", "seq_len", "precision", "framework", "n_params_b", "task")
AXES = ("tp", "sp", "pp", "vpp", "cp", "ep", "micro_batch", "recompute", "zero_stage", "pp_schedule", "fsdp")
LEAST, NEAR, REPEATS = 8, 1.01, 200


def sweeps(files: Sequence[Path], most: int, rows: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Sweeps with the most layouts, at most three of a source; `rows` layouts of each, drawn at random."""
    groups: dict[tuple[Any, ...], dict[str, tuple[str, dict[str, Any]]]] = defaultdict(dict)
    for file in files:
        for name, row in read_rows(file):
            columns = columns_of(row)
            if not row.get("oom") and not row.get("exclude"):
                layout = json.dumps([columns.get(axis) for axis in AXES])
                groups[tuple(columns.get(key) for key in SAME)].setdefault(layout, (name, row))
    large = sorted((g for g in groups.items() if len(g[1]) >= LEAST), key=lambda g: -len(g[1]))
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    counts: dict[Any, int] = defaultdict(int)
    generator = np.random.default_rng(0)
    for key, layouts in large:
        if counts[key[0]] < 3 and len(found) < most:
            counts[key[0]] += 1
            table = list(layouts.values())
            chosen = sorted(generator.permutation(len(table))[:rows])
            found[f"{key[0]}: {key[1]} on {key[3]} {key[2]}, batch {key[4]}"] = [table[i] for i in chosen]
    return found


def seen_of(job: tuple[str, dict[str, Any]]) -> Observed | None:
    """A row observed."""
    found = observe(run_of(job[1], job[0]))
    return found if isinstance(found, Observed) else None


def observed(jobs: Sequence[tuple[str, dict[str, Any]]], cache: Path | None, workers: int) -> dict[str, Observed | None]:
    """Name -> row observed, from `cache` where it is there."""
    known: dict[str, Observed | None] = {}
    if cache is not None and cache.exists():
        for text in cache.read_text().splitlines():
            name, table = json.loads(text)
            known[name] = None if table is None else Observed.of_table(table)
    left = [job for job in jobs if job[0] not in known]
    with Bar(len(left), True) as bar:
        for index, found in in_workers(seen_of, left, workers):
            known[left[index][0]] = found
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps([left[index][0], None if found is None else found.as_table()]) + "\n")
            bar.advance(1)
    return known


Table = list[tuple[Candidate, float]]
"""A sweep's layouts and their measured seconds."""


def trials(order: Callable[[Table], Sequence[int]], table: Table) -> int:
    """Trials until one is within 1 % of the best."""
    best = min(seconds for _, seconds in table)
    return 1 + next(i for i, index in enumerate(order(table)) if table[index][1] <= NEAR * best)


def by_search(table: Table) -> list[int]:
    """In the order of the predicted step."""
    return sorted(range(len(table)), key=lambda i: sum(line.weight * line.seconds for line in table[i][0].lines))


def by_tune(table: Table) -> list[int]:
    """As `simpar tune` goes on, until every layout was run."""
    prior, outcomes, order = shipped_prior(), [], []
    candidates = [candidate for candidate, _ in table]
    while len(order) < len(table):
        chosen = next_trial(believe(candidates, outcomes, prior))
        assert chosen is not None
        order.append(chosen[0])
        outcomes.append(Outcome(candidates[chosen[0]].name, table[chosen[0]][1]))
    return order


def by_optuna(seed: int) -> Callable[[Table], list[int]]:
    """Optuna's TPE over the axes; a suggestion is the nearest layout not yet tried."""

    def order(table: Table) -> list[int]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4))
        values = {axis: sorted({str(c.axes.get(axis)) for c, _ in table}) for axis in AXES}
        left, found = list(range(len(table))), []
        while left:
            trial = study.ask()
            wanted = {axis: trial.suggest_categorical(axis, listed) for axis, listed in values.items()}
            index = min(left, key=lambda i: sum(str(table[i][0].axes.get(axis)) != value for axis, value in wanted.items()))
            left.remove(index)
            found.append(index)
            own = {axis: str(table[index][0].axes.get(axis)) for axis in AXES}
            kinds = {axis: optuna.distributions.CategoricalDistribution(listed) for axis, listed in values.items()}
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            study.add_trial(optuna.trial.create_trial(params=own, distributions=kinds, value=table[index][1]))
        return found

    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="none: the runs that come with simpar")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--optuna-seeds", type=int, default=10)
    parser.add_argument("--docs", type=Path, help="page whose table is replaced by what comes out")
    options = parser.parse_args()
    jobs = sweeps(options.data or [stored_runs()], options.sweeps, options.rows)
    known = observed([job for rows in jobs.values() for job in rows], options.cache, options.workers)
    counts: dict[str, list[float]] = defaultdict(list)
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say("| sweep | layouts | search alone | tune | random, median | random, 9th of 10 | Optuna, median | Optuna, worst |")
    say("|---|---|---|---|---|---|---|---|")
    for name, rows in jobs.items():
        table: Table = []
        for key, row in rows:
            found = known[key]
            if found is not None:
                table.append(
                    (Candidate(key, found.lines, {axis: columns_of(row).get(axis) for axis in AXES}, found.kind), found.seconds)
                )
        if len(table) < LEAST:
            continue
        generator = np.random.default_rng(0)
        best = min(seconds for _, seconds in table)
        good = sum(seconds <= NEAR * best for _, seconds in table)
        random = [1 + int(np.flatnonzero(generator.permutation(len(table)) < good)[0]) for _ in range(REPEATS)]
        try:
            blind = [trials(by_optuna(seed), table) for seed in range(options.optuna_seeds)]
        except ImportError:
            blind = []
        row = {"search": trials(by_search, table), "tune": trials(by_tune, table), "random": float(np.median(random)),
               "random worst": float(np.quantile(random, 0.9)), "optuna": float(np.median(blind)) if blind else float("nan"),
               "optuna worst": float(max(blind, default=float("nan")))}  # fmt: skip
        for key, value in row.items():
            counts[key].append(value)
        cells = [f"{row[key]:g}" for key in ("search", "tune", "random", "random worst", "optuna", "optuna worst")]
        say(f"| {name} | {len(table)} | {' | '.join(cells)} |")
    say("")
    for what, of in (("median", np.median), ("worst", np.max), ("mean", np.mean)):
        say(f"- {what} over sweeps: " + ", ".join(f"{key} {of(values):.3g}" for key, values in counts.items()))
    if options.docs is not None:
        write_between(options.docs, "bench_tune", "\n".join(lines))


if __name__ == "__main__":
    main()
