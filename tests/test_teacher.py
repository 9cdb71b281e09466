"""A teacher of another shape beside the trained model: its forward, weights, experts, messages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.errors import InputError
from simpar.model.ledger import total_parameters
from simpar.parallel.keys import Gather
from simpar.parallel.traffic import state_collectives
from simpar.parallel.work import ExpertExchange
from simpar.result import gathers
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, pricer_of, simulate

STUDENT, TEACHER = "llama3.2-1b", "llama3.1-8b"


def distilled(
    plan: dict[str, Any], model: Any = STUDENT, teacher: Any = TEACHER, framework: str = "megatron-core", **training: Any
) -> Scenario:
    return make_scenario({
        "model": model, "plan": plan, "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "framework": framework,
        "training": {"sequence_length": 2048, "global_batch_size": 16, "reference_model": teacher, **training},
    })  # fmt: skip


@pytest.mark.parametrize(("plan", "framework"), [({"pp": 2, "tp": 2}, "megatron-core"), ({"zero_stage": 3}, "torchtitan")])
def test_a_teacher_of_another_shape_adds_its_forward_and_its_weights(plan: dict[str, Any], framework: str) -> None:
    whole, student = (simulate(distilled(plan, teacher=given, framework=framework)) for given in (TEACHER, False))
    teacher = simulate(distilled(plan, TEACHER, False, framework))
    layout = whole.layout
    assert layout.model_flops == pytest.approx(student.layout.model_flops + teacher.layout.model_flops / 3)
    frozen = [sum(b.frozen_parameters for b in blocks) for blocks in layout.stage_blocks]
    assert frozen == [sum(teacher.layout.block_parameters(s, 0, len(b))) for s, b in enumerate(teacher.layout.stage_blocks)]
    shards = 8 if plan.get("zero_stage") == 3 else 1
    for rank, (with_, without) in enumerate(zip(whole.memory, student.memory, strict=True)):
        more = dict(with_.static)["parameters"] - dict(without.static)["parameters"]
        assert more == 2.0 * frozen[rank] / shards  # 16 bits each, of its own stage
    assert student.step_time_s < whole.step_time_s < student.step_time_s + teacher.step_time_s
    assert whole.step_time_s == pytest.approx(simulate(layout.scenario, detail="stage").step_time_s, rel=1e-9)


def test_a_teacher_lies_evenly_beside_its_student() -> None:
    layout = prepare(distilled({"pp": 4, "tp": 2, "layers_per_stage": [1, 5, 5, 5]}), detail="stage").layout
    layers = [sum(not b.outside_layers for b in layout.reference_blocks(stage)) for stage in range(4)]
    assert layers == [8, 8, 8, 8]
    assert [len(blocks) for blocks in layout.stage_blocks] == [11, 13, 13, 15]  # both embeddings, both heads
    # Both hidden vectors of 2,048 tokens, split over the tensor ranks where the plan splits sequences.
    assert layout.entering_bytes(2) == 2048 * (2048 + 4096) * 2.0 / (2 if layout.degrees.sequence_parallel else 1)


def test_a_teacher_has_experts_of_its_own() -> None:
    """A dense student beside a sparse teacher: exchanges are priced, and experts held, as those of the teacher alone."""
    plan, teacher = {"ep": 4, "ep_dispatcher": "deepep"}, "qwen3-30b-a3b"
    layout = prepare(distilled(plan, teacher=teacher), detail="op").layout
    alone = prepare(distilled(plan, teacher, False), detail="op").layout
    pricers = [pricer_of(each) for each in (layout, alone)]
    blocks = [next(b for b in each.stage_blocks[0] if b.frozen_experts or b.expert_parameters) for each in (layout, alone)]
    ops = [[op for op in block.forward if isinstance(op.work, ExpertExchange)] for block in blocks]
    assert ops[0] == ops[1]
    assert len(ops[0]) == 2
    assert [pricers[0].op_price(op) for op in ops[0]] == [pricers[1].op_price(op) for op in ops[1]]
    assert blocks[0].frozen_experts == blocks[1].expert_parameters == 128 / 4 * 3 * 2048 * 768
    assert blocks[0].frozen_parameters == blocks[1].expert_parameters + blocks[1].dense_parameters


def test_frozen_experts_are_sharded_over_the_ranks_that_hold_the_same() -> None:
    """Of 8 ranks in groups of 4 that share the experts out, two hold the same ones."""
    layout = prepare(distilled({"ep": 4, "zero_stage": 3}, teacher="qwen3-30b-a3b", framework="torchtitan"), detail="stage").layout
    frozen = [(b.frozen_parameters, b.frozen_experts) for b in layout.stage_blocks[0]]
    held = sum((whole - experts) / 8 + experts / 2 for whole, experts in frozen)
    assert gathers.frozen_parameters(layout, [0]) == pytest.approx(2.0 * held)
    index = next(i for i, (_, experts) in enumerate(frozen) if experts)
    sent = {c.dimension: c.bytes for c in state_collectives(layout, Gather(0, index, index + 1))}
    whole, experts = frozen[index]
    assert sent == {"dp": 2.0 * (whole - experts), "edp": 2.0 * experts}


def test_a_tied_teacher_on_one_rank_holds_its_matrix_once() -> None:
    layout = prepare(distilled({}, TEACHER, STUDENT), detail="stage").layout
    spec = load_model(STUDENT)
    assert isinstance(spec, TransformerSpec)
    padding = (
        (layout.reference_blocks(0)[0].frozen_parameters - spec.vocab_size * spec.hidden_size) if spec.tie_word_embeddings else 0
    )
    assert spec.tie_word_embeddings
    assert sum(b.frozen_parameters for b in layout.reference_blocks(0)) == total_parameters(spec) + padding


@pytest.mark.parametrize(
    ("plan", "given", "field", "said"),
    [
        ({"tp": 8}, {"teacher": "qwen2.5-1.5b"}, "plan.tp", "of training.reference_model"),
        ({}, {"teacher": "nothing"}, "training.reference_model", "unknown model"),
        ({}, {"teacher": {"kind": "mlp", "width": 4, "depth": 1}}, "training.reference_model", "models of tokens"),
        ({"pp": 8}, {"teacher": {"num_hidden_layers": 3}}, "training.reference_model.vocab_size", "is required"),
        ({"ep": 4}, {}, "plan.ep", "no experts"),
        ({"ep": 3}, {"teacher": "qwen3-30b-a3b"}, "plan.ep", "must divide num_experts (128), of training.reference_model"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(plan: dict[str, Any], given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        distilled(plan, **given)
    assert any(v.field == field and said in v.rule for v in caught.value.violations)
