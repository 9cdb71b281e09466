"""The layout search of the page, in a process of its own: a scenario on standard input, JSON lines on standard output.

A process of its own keeps the page quick while it runs, and can be stopped at any time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from simpar.errors import SimparError
from simpar.searching.branch import Branch
from simpar.searching.choice import recompute_text, split_text
from simpar.searching.incumbents import Scored
from simpar.searching.request import optimizer_on_host
from simpar.searching.space import Space
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate

KEEP = 5
EVERY_S = 0.25
_FIXED = (
    "cp", "ep", "zero_stage", "shard_size", "sequence_parallel", "overlap_tp", "overlap_ep", "overlap_p2p", "overlap_grad_reduce",
    "overlap_param_gather", "reshard_after_forward", "cp_style", "ep_dispatcher", "placement",
)  # fmt: skip


def restrictions(scenario: Scenario) -> dict[str, tuple[Any, ...]]:
    """The space of the page: tp, pp, virtual stages, micro-batch, recomputation and the schedule are free, all else is as set."""
    plan = scenario.plan
    found: dict[str, tuple[Any, ...]] = {axis: (getattr(plan, axis),) for axis in _FIXED}
    if plan.etp:
        found["etp"] = (plan.etp,)
    schedule = "1f1b" if plan.schedule == "auto" else plan.schedule
    split = (plan.first_stage_less_layers, plan.last_stage_less_layers, plan.embedding_alone)
    return found | {
        "precision": (scenario.training.precision,), "offload_activations": (plan.offload.activations,),
        "offload_optimizer": (optimizer_on_host(scenario),), "offload_parameters": (plan.offload.parameters,),
        "split": (split_text(split),),
        "schedule": tuple(dict.fromkeys(("1f1b", "interleaved", schedule))),
        "recompute": tuple(dict.fromkeys(("none", "selective:core_attn", "full", recompute_text(plan.recompute)))),
    }  # fmt: skip


def settings(scored: Scored, scenario: Scenario) -> dict[str, Any]:
    """A layout found, as values of the page's controls."""
    choice = scored.choice
    group, recompute = choice.group, choice.recompute
    found: dict[str, Any] = {
        "tp": group.tp, "pp": group.pp, "v": choice.pipeline.virtual_stages, "mbs": choice.micro_batch_size,
        "schedule": choice.pipeline.schedule if group.pp > 1 else "auto",
    }  # fmt: skip
    if recompute != recompute_text(scenario.plan.recompute):
        found["recompute"] = "selective" if recompute == "selective:core_attn" else recompute
    return {
        "settings": found, "step_time_s": scored.step_time_s, "text": str(choice),
    }  # fmt: skip


def simulated(scored: Scored, scenario: Scenario) -> dict[str, Any]:
    """What the page will say of the layout's memory once it is used."""
    result = simulate(scored.choice.scenario(scenario), detail="stage")
    return {"device_bytes": result.worst_rank.device_bytes, "fits": result.fits}


class _Reporter:
    """Prints progress, not more often than a page can show it."""

    def __init__(self, branch: Branch, size: int) -> None:
        self.branch, self.size, self._last, self._started = branch, size, 0.0, time.monotonic()

    def __call__(self, bound: float) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self.say(bound, done=False)

    def say(self, bound: float, *, done: bool) -> None:
        """One line."""
        scenario = self.branch.space.template
        scored = sorted(self.branch.best, key=lambda s: s.step_time_s)
        best = [settings(s, scenario) | (simulated(s, scenario) if done else {}) for s in scored]
        gap = max(0.0, 1.0 - bound / best[0]["step_time_s"]) if best and not done else 0.0 if best else None
        account = self.branch.account
        _line({
            "best": best, "gap": gap, "bound_s": bound, "seconds": time.monotonic() - self._started, "done": done,
            "size": self.size, "rejected": dict(account.rejected), "evaluated": dict(account.evaluated),
            "open": len(self.branch.heap),
        })  # fmt: skip


def _line(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Search; errors of the user's are a last line with "error"."""
    try:
        given = json.load(sys.stdin)
        scenario = make_scenario(given["table"], file=given["file"])
        space = Space(scenario, restrictions(scenario), None)
        branch = Branch(space, keep=KEEP)
        reporter = _Reporter(branch, space.size)
        branch.on_progress = reporter
        branch.run()
        reporter.say(0.0, done=True)
    except SimparError as error:
        _line({"error": str(error), "done": True})


if __name__ == "__main__":
    main()
