"""Searches over a pipeline on machines of several kinds: bounds hold, the best of every layout is found, answers say what runs."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from simpar.cli import app
from simpar.errors import InputError
from simpar.interop.export import not_launched
from simpar.readings import outcome_of
from simpar.searching.choice import Choice
from simpar.searching.designs import design_name
from simpar.searching.mixed_branch import MixedBranch
from simpar.searching.mixed_space import MixedSpace
from simpar.searching.parts import Wish, branch_for
from simpar.searching.request import make_space
from simpar.searching.tree import MEMORY, SIMULATED_MEMORY
from simpar.step import simulate

SMALL: Final = ("micro_batch_size=1,4", "tp=2,4", "dp=2,4", "virtual_stages=1,2", "recompute=none,full")
FIT: Final = 0.9


def table(memory: float = 1.0, **cluster: Any) -> dict[str, Any]:
    model = {"kind": "transformer", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000}  # fmt: skip
    parts = [{"hardware": name, "num_nodes": 1, "memory_scale": memory} for name in ("dgx-a100-80gb", "dgx-h100")]
    return {"name": "mixed", "framework": "megatron-core", "model": model, "cluster": {"parts": parts, **cluster},
            "plan": {"zero_stage": 1}, "training": {"sequence_length": 2048, "global_batch_size": 16}}  # fmt: skip


def branch(memory: float = 1.0, **wish: Any) -> MixedBranch:
    space = make_space(table(memory), allow=SMALL, framework="megatron-core")
    assert isinstance(space, MixedSpace)
    found = branch_for(space, Wish(fit_probability=FIT, **wish))
    assert isinstance(found, MixedBranch)
    return found


@cache
def every(memory: float) -> list[tuple[Choice, float, float, bool]]:
    """(layout with its layers dealt out, bound, step time, whether it fits) of all, simulated one by one."""
    one = branch(memory)
    found = []
    for choice in one.space.choices():
        m = dict(one.space.micro_batches(choice.group))[choice.micro_batch_size]
        dealt = one.dealt(choice)
        result = simulate(dealt.scenario(one.space.template), detail="stage")
        fits = result.fits and outcome_of(result).chance_to_fit >= FIT
        found.append((dealt, one.bound(choice, m), result.step_time_s, fits))
    return found


@pytest.mark.parametrize("memory", [1.0, 0.1])
def test_best_of_every_layout(memory: float) -> None:
    found, fitting = branch(memory, keep=3), sorted((s, str(c)) for c, _, s, fits in every(memory) if fits)
    found.run()
    assert [(s.step_time_s, str(s.choice)) for s in found.best] == fitting[:3]
    account = found.account
    assert account.kept + sum(account.rejected.values()) == found.space.size == len(every(memory))
    assert (account.rejected[MEMORY] + account.rejected[SIMULATED_MEMORY] > 0) == (memory < 1.0)
    # Parts of unequal tensor parallelism are among what was looked at, and layers lie where they cost least.
    assert any(c.group.stage_tp for c, *_ in every(memory))
    best = found.best[0].choice.pipeline.layers
    assert sum(best) == 8
    # With little memory halves may be all that fits.
    assert sum(best[0::2]) <= sum(best[1::2]) - (memory == 1.0)


@pytest.mark.parametrize("memory", [1.0, 0.1])
def test_bounds_hold(memory: float) -> None:
    for choice, bound, seconds, fits in every(memory):
        assert bound <= seconds or not fits, choice
    assert all(0.3 * seconds < bound for _, bound, seconds, fits in every(memory) if fits)


def test_quick_search_misses_no_more_than_it_says() -> None:
    found = branch(keep=5, fold=True, reach=1.02, tolerance=0.01)
    found.run()
    best = min(seconds for _, _, seconds, fits in every(1.0) if fits)
    assert found.best[0].step_time_s <= best * 1.01
    assert found.account.evaluated["simulated"] < len(every(1.0))


def test_front_has_every_layout_that_none_beats() -> None:
    found = branch(front=("step_time_s", "peak_memory_bytes"), within=0.0)
    found.run()
    for scored in found.best:
        assert not any(seconds < scored.step_time_s * (1 - 1e-9) and fits and
                       simulate(c.scenario(found.space.template), detail="stage").worst_rank.device_bytes <= scored.device_bytes
                       for c, _, seconds, fits in every(1.0) if seconds < scored.step_time_s)  # fmt: skip
    assert len(found.best) > 1


def test_workers_can_be_told_the_space() -> None:
    one = table()
    for space in (
        make_space(one, allow=SMALL, framework="megatron-core"),
        make_space({**one, "cluster": {"hardware": "dgx-h100", "num_nodes": 1}}, framework="megatron-core"),
    ):
        assert space.groups
        assert space.machines[0].gpu.memory.value <= space.hardware.gpu.memory.value * 1.01
        again = pickle.loads(pickle.dumps(space))
        assert type(again) is type(space)
        assert again.groups == space.groups


def test_names_and_plain_data() -> None:
    unlike = next(c for c, *_ in every(1.0) if c.group.stage_tp)
    assert Choice.from_flat(json.loads(json.dumps(unlike.flat()))) == unlike
    assert design_name(unlike).startswith(f"tp{unlike.group.stage_tp[0]}/{unlike.group.stage_tp[-1]} pp")
    alike = next(c for c, *_ in every(1.0) if not c.group.stage_tp)
    assert Choice.from_flat(alike.flat()) == alike
    assert "stage_tp" not in alike.flat()


def test_command(tmp_path: Path) -> None:
    from simpar.interop.scenario_text import scenario_text
    from simpar.specs.scenario import make_scenario

    file = tmp_path / "mixed.toml"
    file.write_text(scenario_text(make_scenario({**table(), "plan": {"pp": 2, "zero_stage": 1}})))
    more = [word for text in (*SMALL, "dp=4") for word in ("--allow", text)]
    shown = CliRunner().invoke(app, ["search", str(file), "--json", "--quiet", *more, "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    best = answer["best"][0]
    for name in ("design", "free_choices", "fit_probability", "best_probability", "expected_step_time_s", "measured_nearby"):
        assert name in best
    assert [part["pipeline_ranks"] for part in best["parts"]] == [[0], [1]]
    assert best["choice"]["split"] == "+".join(map(str, (n for p in best["parts"] for n in p["layers_per_stage"]))) or (
        best["choice"]["virtual_stages"] > 1
    )
    assert 0.0 <= answer["optimality_gap"] < 0.01
    assert answer["try_these"]
    assert (tmp_path / "page.html").stat().st_size > 10_000
    printed = CliRunner().invoke(app, ["search", str(file), "--quiet", *more, "--why", "dp=2"])
    assert printed.exit_code == 0, printed.output
    assert "A100 SXM 80GB + H100 SXM: batch" in " ".join(printed.stdout.split())


def test_layers_by_cost_on_one_kind_of_machine() -> None:
    one = {**table(), "cluster": {"hardware": "dgx-h100", "num_nodes": 1}}
    one["model"] = {**one["model"], "vocab_size": 256_000}
    allow = ("tp=2", "pp=4", "micro_batch_size=1", "virtual_stages=1", "recompute=none")
    space = make_space(one, framework="megatron-core", allow=allow, fix=["split=auto"])
    assert isinstance(space, MixedSpace)
    (choice,) = space.choices()
    found = branch_for(space, Wish(fit_probability=FIT))
    assert isinstance(found, MixedBranch)
    found.run()
    (best,) = found.best
    # The head weighs more than a layer does.
    layers = best.choice.pipeline.layers
    assert layers[-1] < layers[0]
    assert sum(layers) == 8
    even = simulate(choice.scenario(space.template), detail="stage").step_time_s
    assert found.bound(choice, 16) < best.step_time_s < even
    assert not not_launched(best.choice.scenario(space.template))
    with pytest.raises(InputError, match="dealt out by cost are searched by themselves"):
        make_space(one, framework="megatron-core", allow=["split=auto,even"])


@pytest.mark.parametrize(
    ("cluster", "options", "told"),
    [
        ({"parts_hold": "replicas"}, {}, "a search lays stages over parts"),
        ({}, {"allow": ["split=0-1"]}, "layers are dealt out by their cost"),
        ({}, {"fix": ["pp=1"]}, "pp = 1"),
    ],
)
def test_what_cannot_be_searched(cluster: dict[str, Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make_space(table(**cluster), framework="megatron-core", **options)


def test_bounds_count_what_is_not_hidden() -> None:
    """Gradients that are reduced after the backward, and parameters that are gathered after the update."""
    few = ("micro_batch_size=1", "tp=2,4", "dp=2", "virtual_stages=1,2", "recompute=none")
    bounds = []
    for hidden in ("true", "false"):
        allow = (*few, f"overlap_grad_reduce={hidden}", f"overlap_param_gather={hidden}")
        one = branch_for(make_space(table(), allow=allow, framework="megatron-core"), Wish())
        assert isinstance(one, MixedBranch)
        for choice in one.space.choices():
            bounds.append(one.bound(choice, 8))
            assert bounds[-1] <= simulate(one.dealt(choice).scenario(one.space.template), detail="stage").step_time_s, choice
    half = len(bounds) // 2
    assert all(exposed > overlapped for overlapped, exposed in zip(bounds[:half], bounds[half:], strict=True))
