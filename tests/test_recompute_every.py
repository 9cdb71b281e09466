"""Checkpoints of every k-th layer: which layers run again, what they keep, and which frameworks can be told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpar.cli import main
from simpar.errors import InputError
from simpar.interop import deepspeed, megatron
from simpar.parallel.layout import Layout
from simpar.result.memory import RankMemory
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, simulate


def job(recompute: Any, *, model: str = "qwen3-8b", framework: str = "torchtitan", **plan: Any) -> Scenario:
    return make_scenario({
        "model": model, "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 1, "sequence_parallel": False, **plan, "recompute": recompute},
        "training": {"sequence_length": 2048, "global_batch_size": 32},
    })  # fmt: skip


def every(k: int) -> RecomputeSpec:
    return RecomputeSpec(granularity="full", every=k)


def again(scenario: Scenario) -> list[int]:
    """Numbers of the layers that run again, from 1."""
    layout: Layout = prepare(scenario).layout
    blocks = [b for stage in layout.stage_blocks for b in stage if b.name not in ("embedding", "head")]
    return [number for number, block in enumerate(blocks, 1) if block.working]


def test_layers_are_counted_through_the_model() -> None:
    assert again(job(every(3))) == list(range(3, 37, 3))
    assert again(job(every(3), pp=2, layers_per_stage=[17, 19])) == list(range(3, 37, 3))
    assert again(job("full")) == again(job(every(1))) == list(range(1, 37))


def test_as_much_work_and_memory_as_of_that_many_first_layers() -> None:
    """Of equal layers it does not matter which run again."""
    first = RecomputeSpec(granularity="full", method="block", num_layers=18)
    found, block = simulate(job(every(2))), simulate(job(first))
    assert found.step_time_s == pytest.approx(block.step_time_s, rel=1e-9)

    def kept(rank: RankMemory) -> float:
        return rank.allocated_bytes

    assert kept(found.memory[0]) == pytest.approx(kept(block.memory[0]), rel=0.02)
    none, full = simulate(job("none")), simulate(job("full"))
    assert none.step_time_s < found.step_time_s < full.step_time_s
    assert kept(full.memory[0]) < kept(found.memory[0]) < kept(none.memory[0])


def test_of_unequal_layers_it_matters() -> None:
    """Windowed and global layers of Gemma 3: each sixth one is global."""
    found = simulate(job(every(6), model="gemma3-4b")).step_time_s
    assert found != simulate(job(RecomputeSpec(granularity="full", method="block", num_layers=5), model="gemma3-4b")).step_time_s


@pytest.mark.parametrize("tool", [megatron, deepspeed])
def test_frameworks_that_cannot_say_so(tool: Any) -> None:
    name = "megatron-core" if tool is megatron else "deepspeed"
    assert any(v.field.startswith("plan.recompute") for v in tool.violations(job(every(2), framework=name)))


def test_it_belongs_to_whole_layers() -> None:
    with pytest.raises(InputError, match=r"plan\.recompute\.every"):
        job({"granularity": "selective", "every": 2})


def test_the_search_says_that_it_is_no_choice_of_its(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text("""
model = "qwen3-8b"
framework = "torchtitan"
[cluster]
hardware = "dgx-h100"
num_nodes = 1
[plan]
zero_stage = 3
recompute = { granularity = "full", every = 2 }
[training]
sequence_length = 2048
global_batch_size = 32
""")
    for arguments, named in ((["improve"], "plan.recompute.every"), (["search", "--fix", "recompute=full/2"], "full/2")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(file)])
        assert ended.value.code == 2
        assert named in capsys.readouterr().err
