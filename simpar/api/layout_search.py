"""The layout search behind `simpar plan`: each simulated phase that wants it gets the best layout of its cluster and batch.

Planning and search do not know each other; they meet here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpar.errors import InputError
from simpar.planning.steps import Searched
from simpar.report.serve.search_process import restrictions
from simpar.searching.abilities import limit_of
from simpar.searching.choice import Choice
from simpar.searching.find import Found, Watch, find
from simpar.searching.parts import Wish
from simpar.searching.request import choice_of
from simpar.searching.space import Space
from simpar.searching.store import Store
from simpar.specs.checks import check_scenario
from simpar.specs.scenario import Scenario
from simpar.step import simulate
from simpar.units import format_seconds

KEEP = (1, 16)
"""Layouts asked for, and asked for again where none fits: the search knows memory by a bound, the allocator is replayed after."""
_FREE = frozenset({"cp", "ep", "etp", "zero_stage", "sequence_parallel", "shard_size"})
"""What a cluster of another size decides anew, beside what the page's search leaves free."""
_LAYOUT_FIELDS = ("plan", "training.global_batch_size", "training.micro_batch_size")
"""What the search decides: rules broken there do not matter before it."""

PROVEN = "proven best"

Say = Callable[[str, bool], None]
"""(text, whether it is the last word on this search)."""


def _silent(_text: str, _last: bool) -> None:
    """Say nothing."""


@dataclass
class LayoutSearch:
    """`planning.Search` by branch and bound over everything that the scenario's framework can run.

    Attributes:
        workers: processes; 1 = this one, none = this one, and one per core where it takes long.
        store: SQLite file that keeps finished searches. Parts of one are not kept: a search in one part prunes best.
        say: told the progress.
        limit_s: a search that takes longer ends with the best found until then, and says how far from the best that may be.
    """

    workers: int | None = 1
    store: Path | None = None
    say: Say = _silent
    limit_s: float = 300.0
    count: int = field(default=0, init=False)

    def __call__(self, scenario: Scenario) -> Searched:
        """The best layout for the model, cluster and batch of `scenario`.

        Raises:
            KeyboardInterrupt: the user stopped it; what was finished is in the store.
        """
        wrong = [v for v in check_scenario(scenario) if not v.field.startswith(_LAYOUT_FIELDS)]
        if wrong:
            return Searched(None, reasons=tuple(str(v) for v in wrong))
        self.count += 1
        space = Space(scenario, space_of(scenario), framework_of(scenario))
        if not space.groups:
            return Searched(None, reasons=("no degrees divide the model, the batch and the cluster",))
        if self.store is None:
            return self._best(space)
        store = Store(self.store, _request(space))
        try:
            return self._kept(space, store)
        finally:
            store.close()

    def _kept(self, space: Space, store: Store) -> Searched:
        known = store.answer
        if known is not None:
            self.say(f"layouts of {_what(space.template)}: from {self.store}", True)
            choice = None if known["choice"] is None else Choice.from_flat(known["choice"])
            chosen = None if choice is None else choice.scenario(space.template)
            return Searched(chosen, str(choice or ""), tuple(known["reasons"]), known["note"])
        searched = self._best(space)
        if searched.note.startswith(PROVEN):
            flat = None if searched.scenario is None else choice_of(searched.scenario).flat()
            store.finish({"choice": flat, "reasons": list(searched.reasons), "note": searched.note})
        return searched

    def _best(self, space: Space) -> Searched:
        """The best that fits; more are asked for where the first does not."""
        for keep in KEEP:
            found = self._search(space, keep)
            searched = _chosen(space, found)
            if searched.scenario is not None or not found.best:
                break
        return searched

    def _search(self, space: Space, keep: int) -> Found:
        started, over, what = time.monotonic(), False, _what(space.template)

        def watch(seen: Watch) -> None:
            nonlocal over
            best = "" if seen.best is None else f", best {format_seconds(seen.best.step_time_s)}"
            gap = best if seen.gap is None else f"{best}, gap {seen.gap:.1%}"
            self.say(f"layouts of {what}: {space.size:,}{gap}, {seen.seconds:.0f} s", False)
            if time.monotonic() - started > self.limit_s:
                over = True
                raise KeyboardInterrupt

        found = find(space, Wish(keep=keep), workers=self.workers, listener=watch)
        if not found.finished and not over:
            raise KeyboardInterrupt
        best = format_seconds(found.best[0].step_time_s) if found.best else "none fits"
        self.say(f"layouts of {what}: {space.size:,}, {proof(found)}, {best}, {found.seconds:.0f} s", True)
        return found


def _chosen(space: Space, found: Found) -> Searched:
    """The first of the best that fits once simulated."""
    note = f"{proof(found)} of {found.size:,} layouts"
    for scored in found.best:
        scenario = scored.choice.scenario(space.template)
        try:
            fits = simulate(scenario, detail="stage").fits
        except InputError:
            continue
        if fits:
            return Searched(scenario, str(scored.choice), note=note)
    if not found.finished and not found.best:
        return Searched(None, reasons=(f"no layout was found in {found.seconds:.0f} s of search",), note=note)
    counts = sorted(found.account.rejected.items(), key=lambda item: -item[1])
    told = ", ".join(f"{count:,} {name}" for name, count in counts if count)
    return Searched(None, reasons=(f"none of {found.size:,} layouts runs: {told}",), note=note)


def space_of(scenario: Scenario) -> dict[str, tuple[Any, ...]]:
    """Free are all degrees, micro-batches up to 8, virtual stages, 1F1B or interleaved, ZeRO 1, 3 or as written, and the usual
    recomputation; all else is as written, so that a point takes seconds."""
    fixed = {axis: values for axis, values in restrictions(scenario).items() if axis not in _FREE}
    written = scenario.plan
    return fixed | {
        "shard_size": tuple(dict.fromkeys((None, written.shard_size))),
        "zero_stage": tuple(dict.fromkeys((written.zero_stage, 1, 3))),
        "micro_batch_size": tuple(sorted({1, 2, 4, 8, scenario.training.micro_batch_size})),
    }


def proof(found: Found) -> str:
    """How good the best is known to be."""
    if found.finished:
        return PROVEN
    return "nothing found yet" if found.gap is None else f"at most {found.gap:.1%} from the best"


def framework_of(scenario: Scenario) -> str | None:
    """The framework whose abilities bound the space; none = any."""
    return limit_of(None, scenario.framework)


def _what(scenario: Scenario) -> str:
    cluster, training = scenario.cluster, scenario.training
    return f"{scenario.world_size:,} GPUs ({cluster.hardware}), batch {training.global_batch_size} x {training.sequence_length}"


def _request(space: Space) -> dict[str, Any]:
    """What identifies a search of a plan: all but the names and what the search decides."""
    scenario = space.template
    kept = scenario.model_dump(mode="json", exclude={"file", "name", "description", "published", "plan"})
    kept["plan"] = {k: v for k, v in scenario.plan.model_dump(mode="json").items() if k not in _DECIDED}
    return {"scenario": kept, "framework": space.framework, "keep": KEEP,
            "space": {axis: list(values) for axis, values in sorted(space.restrictions.items())}}  # fmt: skip


_DECIDED = frozenset((
    "tp", "cp", "pp", "dp", "ep", "etp", "placement", "sequence_parallel", "cp_style", "overlap_tp", "overlap_ep",
    "ep_dispatcher", "virtual_stages", "schedule", "overlap_p2p", "first_stage_less_layers", "last_stage_less_layers",
    "embedding_alone", "layers_per_stage", "recompute", "zero_stage", "shard_size", "reshard_after_forward",
    "overlap_grad_reduce", "overlap_param_gather", "offload",
))  # fmt: skip
