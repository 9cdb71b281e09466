"""Chunks of layers that run again together: what they keep, what is there while they do, and who can be told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpar.cli import main
from simpar.errors import InputError
from simpar.interop import deepspeed, megatron, megatron_import, nanotron, torchtitan
from simpar.parallel.blocks import LocalBlock
from simpar.result.allocations import Replays
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, simulate

INPUT = 8192 * 4096 * 2 / 4
"""Bytes of what enters a layer of Llama 3 8B, of 8,192 tokens in bf16 split over 4 ranks."""


def job(recompute: Any, *, framework: str = "megatron-core", **plan: Any) -> Scenario:
    return make_scenario({
        "model": "llama3-8b", "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"tp": 4, "zero_stage": 1, "sequence_parallel": True, **plan, "recompute": recompute},
        "training": {"sequence_length": 8192, "global_batch_size": 8},
    })  # fmt: skip


def chunks(k: int) -> RecomputeSpec:
    return RecomputeSpec(granularity="full", uniform_layers=k)


def layers(scenario: Scenario) -> list[list[LocalBlock]]:
    """Of each virtual stage."""
    return [[b for b in blocks if not b.outside_layers] for blocks in prepare(scenario).layout.stage_blocks]


def test_a_chunk_keeps_what_enters_its_first_layer() -> None:
    (found,) = layers(job(chunks(4)))
    assert [block.saved_bytes for block in found] == [INPUT, 0.0, 0.0, 0.0] * 8
    (alone,) = layers(job("full"))
    whole = alone[0].working + INPUT
    assert [block.working for block in found[:4]] == [whole - INPUT, whole, whole, whole]
    assert [block.backward for block in found] == [block.backward for block in alone]


def test_each_virtual_stage_begins_with_a_chunk_and_may_end_with_a_shorter_one() -> None:
    found = layers(job(chunks(3), pp=2, virtual_stages=4))
    assert [[block.saved_bytes for block in stage] for stage in found] == [[INPUT, 0.0, 0.0, INPUT]] * 8


@pytest.mark.parametrize("detail", ["stage", "layer", "op"])
def test_the_whole_chunk_is_there_when_its_backward_begins(detail: Any) -> None:
    """Of 32 layers in chunks of 16 the second one's run again first: the peak has both inputs and 16 layers' tensors; of a chunk
    of all 32 one input and all tensors."""
    (alone,) = layers(job("full"))
    whole = alone[0].working + INPUT
    for length, kept in ((16, 2), (32, 1)):
        found = simulate(job(chunks(length)), detail=detail).worst_rank
        assert found.at_peak["activations"] == pytest.approx(kept * INPUT, rel=1e-3)  # and the tokens' numbers
        assert found.at_peak["recompute"] == pytest.approx(length * whole - INPUT, rel=1e-9)
        assert isinstance(found.replays, Replays)
        assert found.replays.peak(0).allocated_bytes == pytest.approx(found.allocated_bytes, rel=0.005)


def test_as_much_work_as_of_every_layer_by_itself() -> None:
    chunked, alone = simulate(job(chunks(8))), simulate(job("full"))
    assert chunked.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
    assert chunked.hardware_flops == alone.hardware_flops
    assert chunked.memory[0].dynamic.sum(axis=1)[-1] == pytest.approx(alone.memory[0].dynamic.sum(axis=1)[-1], abs=1.0)


def test_where_recomputation_stops_early_only_the_last_layer_of_a_chunk_does() -> None:
    """Torch stops once all that the backward reads is there again; a layer behind reads what the ones before it put out."""
    one, two = (layers(job(spec, framework="nemo-automodel", sequence_parallel=False))[0] for spec in ("full", chunks(2)))
    assert two[1].repeated_flops == one[1].repeated_flops < two[0].repeated_flops == two[0].model_flops


def test_megatron_is_told_and_read() -> None:
    given = job(chunks(4))
    flags = megatron.flags(given)
    assert [f for f in flags if f.startswith("--recompute")] == [
        "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 4",
    ]  # fmt: skip
    assert megatron_import.load(megatron.launch_script(given)).scenario.plan.recompute == chunks(4)


@pytest.mark.parametrize(("tool", "name"), [(deepspeed, "deepspeed"), (nanotron, "nanotron"), (torchtitan, "torchtitan")])
def test_frameworks_that_cannot_say_so(tool: Any, name: str) -> None:
    assert any(v.field.startswith("plan.recompute") for v in tool.violations(job(chunks(2), framework=name)))


@pytest.mark.parametrize("wrong", [{"every": 2}, {"method": "block", "num_layers": 4}, {"granularity": "selective"}])
def test_it_belongs_to_whole_layers_one_by_one(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"plan\.recompute\."):
        job({"granularity": "full", "uniform_layers": 2, **wrong})


def test_the_search_says_that_it_is_no_choice_of_its(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text("""
model = "llama3-8b"
framework = "megatron-core"
[cluster]
hardware = "dgx-h100"
num_nodes = 1
[plan]
tp = 4
recompute = { granularity = "full", uniform_layers = 2 }
[training]
sequence_length = 2048
global_batch_size = 32
""")
    for arguments, named in ((["improve"], "plan.recompute.uniform_layers"), (["search", "--fix", "recompute=full*2"], "full*2")):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(file)])
        assert ended.value.code == 2
        assert named in capsys.readouterr().err
