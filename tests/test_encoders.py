"""Encoders beside a decoder in a step: their work, weights and memory, frozen or not, on the first stage or on their own."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.errors import InputError
from simpar.model.carried import boundary_elements
from simpar.model.ledger import entries, total_parameters
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.traffic import state_collectives
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.models_io import load_model, model_from_table
from simpar.specs.notes import scenario_notes
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import decided, prepare, simulate

VISION = "qwen3-vl-2b"


def scenario(plan: dict[str, Any] | None = None, images: dict[str, Any] | None = None, **training: Any) -> Scenario:
    given = {"per_sample": 2, "tokens": 1024} if images is None else images
    return make_scenario({
        "model": VISION, "framework": "megatron-core", "plan": plan or {}, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 2048, "global_batch_size": 16, **({"images": given} if given else {}), **training},
    })  # fmt: skip


def weights(scenario: Scenario) -> tuple[float, float]:
    """(trained, frozen) weights of all stages."""
    layout = prepare(scenario, detail="stage").layout
    blocks = [b for stage in layout.stage_blocks for b in stage]
    return sum(sum(layout.trained(b)) for b in blocks), sum(b.frozen_parameters for b in blocks)


def test_all_weights_are_there_and_the_work_is_that_of_all_tokens() -> None:
    model = load_model(VISION)
    assert isinstance(model, ArchitectureSpec)
    tower = [e for e in entries(model, 1024) if e.tower]
    held = sum(e.parameters * e.held for e in tower)
    assert weights(scenario()) == (total_parameters(model), 0.0)
    assert weights(scenario(images={})) == (total_parameters(model) - held, 0.0)
    with_images, without = (simulate(s).layout.model_flops for s in (scenario(), scenario(images={})))
    # 16 samples of two images of 1,024 patches each; the backward takes twice the forward.
    assert with_images - without == pytest.approx(3 * 16 * 2 * 1024 * sum(e.flops * e.runs for e in tower), rel=1e-9)


def test_a_projector_meets_joined_patches() -> None:
    """2 x 2 patches of 1,024 channels become one token of 2,048: 4,096 -> 4,096 -> 2,048, once for four patches."""
    model = load_model(VISION)
    assert isinstance(model, ArchitectureSpec)
    (tower,) = (stack for stack in model.stacks if stack.tower)
    assert tower.merge == 4
    flops = {e.node: e.flops for e in entries(model, 1024) if e.tower}
    assert flops["vision/merger_1"] == 2 * 4096 * 4096 / 4
    assert flops["vision/merger_2"] == 2 * 4096 * 2048 / 4


@pytest.mark.parametrize("frozen", ["encoder", "all"])
def test_what_is_frozen_has_a_forward_alone(frozen: str) -> None:
    trained, still = weights(scenario())[0], weights(scenario(images={"per_sample": 2, "tokens": 1024, "frozen": frozen}))
    assert sum(still) == trained
    chosen = prepare(scenario({"zero_stage": 0}, {"per_sample": 2, "tokens": 1024, "frozen": frozen}), detail="stage").layout
    blocks = chosen.stage_blocks[0]
    names = [b.name for b in blocks if b.options.frozen]
    assert names[:1] == ["vision"]
    assert ("vision_projector" in names) is (frozen == "all")
    assert all(not b.backward and not b.saved and b.weight_gradient == () for b in blocks if b.options.frozen)
    whole, less = simulate(scenario()), simulate(scenario(images={"per_sample": 2, "tokens": 1024, "frozen": frozen}))
    assert less.step_time_s < whole.step_time_s
    assert less.layout.model_flops < whole.layout.model_flops
    assert less.communication_s["dp"] < whole.communication_s["dp"]
    assert less.memory[0].allocated_bytes < whole.memory[0].allocated_bytes
    static = [dict(result.memory[0].static) for result in (whole, less)]
    assert static[1]["parameters"] == static[0]["parameters"]
    assert static[1]["gradients"] == pytest.approx(static[0]["gradients"] * still[0] / trained)


def test_context_ranks_do_not_share_an_encoders_work() -> None:
    """Each runs it on all inputs (Megatron-LM), so that on twice the context ranks the encoder's blocks cost the same."""
    layouts = [prepare(scenario({"cp": cp}), detail="stage").layout for cp in (1, 2)]
    (one, two) = ([b for b in layout.stage_blocks[0] if b.name.startswith("vision")] for layout in layouts)
    assert [b.forward for b in one] == [b.forward for b in two]
    assert all(b.options.degrees.cp == 1 for b in two)


def test_frozen_weights_are_gathered_where_they_are_sharded() -> None:
    """Forward and backward gather trained weights, frozen ones pass once as well; nothing of them is reduced."""
    given = [{"per_sample": 2, "tokens": 1024, "frozen": frozen} for frozen in ("none", "all")]
    layouts = [prepare(scenario({"zero_stage": 3}, images), detail="stage").layout for images in given]
    amounts = []
    for layout in layouts:
        names = [b.name for b in layout.stage_blocks[0]]
        at = names.index("vision")
        amounts.append([sum(c.bytes for c in state_collectives(layout, key(0, at, at + 1))) for key in (Gather, Reduce)])
    assert amounts[1][0] == amounts[0][0] > 0
    assert amounts[1][1] == 0.0 < amounts[0][1]


def test_adapters_leave_encoders_frozen() -> None:
    trained, still = weights(scenario(trainable="lora"))
    assert 0 < trained < still
    with pytest.raises(InputError, match=r"training\.images\.frozen"):
        scenario(images={"per_sample": 1, "tokens": 64, "frozen": "all"}, trainable="lora")


@pytest.mark.parametrize("plan", [
    {"pp": 2}, {"pp": 4, "encoder_stages": 1}, {"pp": 4, "encoder_stages": 2, "zero_stage": 0}, {"pp": 2, "virtual_stages": 2},
    {"pp": 2, "schedule": "zb-v"}, {"pp": 2, "tp": 2, "cp": 2}, {"pp": 4, "encoder_stages": 1, "layers_per_stage": "auto"},
    {"zero_stage": 3},
])  # fmt: skip
def test_every_detail_tells_the_same(plan: dict[str, Any]) -> None:
    framework = {"framework": "torchtitan"} if plan.get("zero_stage") == 3 else {}
    chosen = scenario(plan).model_copy(update=framework)
    stage, layer, op = (simulate(chosen, detail=detail) for detail in ("stage", "layer", "op"))
    assert layer.step_time_s == pytest.approx(stage.step_time_s, rel=1e-9)
    assert op.step_time_s <= layer.step_time_s * (1 + 1e-9)
    for other in (layer, op):
        assert other.communication_s == pytest.approx(stage.communication_s, rel=1e-6)
    assert all(seconds >= 0 for _, seconds in layer.waterfall())
    assert [m.allocated_bytes for m in layer.memory] == pytest.approx([m.allocated_bytes for m in stage.memory])


def test_stages_of_their_own() -> None:
    """Vision on the first stage: it sends the projected tokens, and the embedding lies on the second."""
    layout = prepare(scenario({"pp": 4, "encoder_stages": 1, "tp": 2}), detail="stage").layout
    names = [[block.name for block in blocks] for blocks in layout.stage_blocks]
    assert set(names[0]) == {"vision", "vision_projector"}
    assert names[1][0] == "embedding"
    assert [stage.count for stage in layout.stages] == [0, 9, 10, 9]
    assert layout.embedding_stage == 1
    # 2 images x 256 joined tokens x 2,048 channels, 16 bits, on every tensor rank; then the split stream of 2,048 tokens.
    assert layout.entering_bytes(1) == 2 * 256 * 2048 * 2
    assert layout.entering_bytes(2) == 2048 * 2048 * 2 / 2
    cut = prepare(scenario({"pp": 4, "encoder_stages": 2}), detail="stage").layout
    assert cut.entering_bytes(1) == 2 * 1024 * 1024 * 2


def test_a_stage_of_its_own_may_have_its_own_tensor_parallelism() -> None:
    chosen = make_scenario({
        "model": VISION, "cluster": {"hardware": "dgx-h100", "num_nodes": 2},
        "plan": {"pp": 3, "stage_tp": [4, 8, 4], "dp": 1, "encoder_stages": 1},
        "training": {"sequence_length": 2048, "global_batch_size": 8, "images": {"per_sample": 1, "tokens": 1024}},
    })  # fmt: skip
    layout = prepare(chosen, detail="stage").layout
    assert [{block.options.degrees.tp for block in blocks} for blocks in layout.stage_blocks] == [{4}, {8}, {4}]
    assert simulate(chosen).fits


def test_tied_embeddings_are_reduced_from_where_they_lie() -> None:
    program = prepare(scenario({"pp": 4, "encoder_stages": 1}), detail="stage").program
    names = {str(stream) for stream in program.streams if stream.kind == "pp_embedding"}
    assert len(names) == 2
    assert {stream.role for stream in program.streams if stream.kind == "pp_embedding"} == {1, 3}


@pytest.mark.parametrize(("plan", "training", "field"), [
    ({}, {"images": {"tokens": 64}}, "training.images.tokens"),
    ({}, {"images": {"per_sample": 1}}, "training.images.tokens"),
    ({}, {"images": {"per_sample": 1, "tokens": 3}}, "training.images.tokens"),
    ({}, {"images": {"per_sample": 9, "tokens": 1024}}, "training.images.per_sample"),
    ({}, {"audio": {"per_sample": 1, "tokens": 64}}, "training.audio.per_sample"),
    ({"pp": 2, "encoder_stages": 1}, {}, "plan.encoder_stages"),
    ({"pp": 2, "encoder_stages": 2}, {"images": {"per_sample": 1, "tokens": 64}}, "plan.encoder_stages"),
    ({"pp": 2, "encoder_stages": 1, "layers_per_stage": [4, 24]}, {"images": {"per_sample": 1, "tokens": 64}},
     "plan.layers_per_stage"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(plan: dict[str, Any], training: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        scenario(plan, **{"images": {}, **training})
    assert field in {violation.field for violation in caught.value.violations}


def test_what_is_left_out_is_said() -> None:
    assert any("training.images.per_sample" in note for note in scenario_notes(scenario(images={})))
    assert not any("left out" in note for note in scenario_notes(scenario()))


# -- what crosses stages beside the stream -------------------------------------------------------------------------------

STEP = {"branches": [{"kind": "mlp", "width": 64}]}


def attention(**fields: Any) -> dict[str, Any]:
    return {"branches": [{"kind": "attention", "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **fields}]}


def model_of(pattern: list[str], **layers: Any) -> ArchitectureSpec:
    stack = {"hidden_size": 64, "pattern": pattern, "layers": {name: {"sublayers": steps} for name, steps in layers.items()}}
    made = model_from_table({"kind": "layers", "vocab_size": 128, "stacks": [stack]})
    assert isinstance(made, ArchitectureSpec)
    return made


def test_shared_keys_and_values_cross_until_their_last_reader() -> None:
    model = model_of(
        ["own", "local", "plain", "reads", "plain", "reads_local", "plain"],
        own=[attention()], local=[attention(window=8)], plain=[STEP], reads=[attention(key_value="shared")],
        reads_local=[attention(key_value="shared", window=8)],
    )  # fmt: skip
    # Two heads of 16 for keys and as many for values: 64 more from the layer that makes them to the one that reads them last.
    assert boundary_elements(model, 1) == (64, 128, 192, 192, 128, 128, 64, 64)


def test_a_choice_of_keys_crosses_with_the_layers_that_use_it_again() -> None:
    indexer = {"num_heads": 2, "head_dim": 8, "top_k": 32}
    model = model_of(
        ["own", "again", "again", "own"], own=[attention(indexer=indexer)], again=[attention(indexer={**indexer, "owned": False})]
    )
    assert boundary_elements(model, 10) == (640, 640 + 640, 640 + 640, 640, 640)


def test_an_encoders_output_passes_all_decoder_layers() -> None:
    model = load_model("t5-11b")
    assert isinstance(model, ArchitectureSpec)
    found = boundary_elements(model, 1)
    assert found == (1024,) * 25 + (2048,) * 23 + (1024,)
    short = make_scenario({"model": "switch-base", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"pp": 8},
                           "training": {"sequence_length": 512, "global_batch_size": 8}})  # fmt: skip
    network = prepare(short, detail="stage").layout.network
    assert set(network.boundary_elements) == {512.0 * 768, 2 * 512.0 * 768}
    assert network.boundary_elements[12:14] == (512.0 * 768, 2 * 512.0 * 768)


def test_weights_that_layers_share_are_held_once_on_a_stage() -> None:
    shared = {**STEP, "shared_weights": "one"}
    table = {"kind": "layers", "vocab_size": 128, "stacks": [
        {"hidden_size": 64, "pattern": ["a*4"], "layers": {"a": {"sublayers": [attention(), shared]}}}
    ]}  # fmt: skip
    base = {"cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "training": {"sequence_length": 256, "global_batch_size": 64}}
    parameters = []
    for pp in (1, 2):
        layout = prepare(make_scenario({"model": table, "plan": {"pp": pp}, **base}), detail="stage").layout
        parameters.append(sum(sum(layout.block_parameters(s, 0, len(b))) for s, b in enumerate(layout.stage_blocks)))
    assert parameters[0] == total_parameters(model_from_table(table))
    assert parameters[1] == parameters[0] + 3 * 64 * 64 + 64  # gated, with its norm, on the second stage as well


# -- a reference beside the model ----------------------------------------------------------------------------------------


def with_reference(plan: dict[str, Any], *, reference: bool = True, **training: Any) -> Scenario:
    return make_scenario({
        "model": "llama3.1-8b", "plan": plan, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 2048, "global_batch_size": 16, "reference_model": reference, **training},
        **({"framework": "torchtitan"} if plan.get("zero_stage") == 3 else {}),
    })  # fmt: skip


@pytest.mark.parametrize(
    "plan", [{"pp": 2, "tp": 2}, {"zero_stage": 3}, {"pp": 4, "layers_per_stage": "auto"}, {"recompute": "full"}]
)
def test_a_reference_adds_its_forward_and_its_weights(plan: dict[str, Any]) -> None:
    with_, without = (with_reference(plan, reference=given) for given in (True, False))
    whole, plain = simulate(with_), simulate(without)
    assert whole.layout.model_flops == pytest.approx(4 / 3 * plain.layout.model_flops)
    assert 1.1 * plain.step_time_s < whole.step_time_s < 1.6 * plain.step_time_s
    assert whole.step_time_s == pytest.approx(simulate(with_, detail="stage").step_time_s, rel=1e-9)
    assert whole.hardware_flops - plain.hardware_flops == pytest.approx(plain.layout.model_flops / 3)
    frozen = sum(b.frozen_parameters for blocks in whole.layout.stage_blocks for b in blocks)
    trained = sum(b.dense_parameters for blocks in whole.layout.stage_blocks for b in blocks)
    assert frozen == trained
    assert sum(m.allocated_bytes for m in whole.memory) > sum(m.allocated_bytes for m in plain.memory)
    if "pp" in plan:
        assert whole.layout.entering_bytes(1) == 2 * plain.layout.entering_bytes(1)
        assert whole.layout.stages == plain.layout.stages


def test_the_reference_of_adapters_is_their_base() -> None:
    plain, whole = (simulate(with_reference({"tp": 2}, reference=given, trainable="lora")) for given in (False, True))
    assert sum(b.frozen_parameters for blocks in whole.layout.stage_blocks for b in blocks) == 0.0
    assert dict(whole.memory[0].static) == dict(plain.memory[0].static)
    assert whole.step_time_s > plain.step_time_s


def test_layers_are_shared_out_beside_an_encoder() -> None:
    """The first stage, which runs the encoder too, gets fewer layers than without it."""
    split = {"pp": 2, "layers_per_stage": "auto"}
    beside, alone = (decided(scenario(split, images)).plan.layers_per_stage for images in (None, {}))
    assert isinstance(beside, tuple)
    assert isinstance(alone, tuple)
    assert sum(beside) == sum(alone) == 28
    assert beside[0] < alone[0]


def test_a_forward_alone_holds_frozen_weights_too() -> None:
    given = [{"per_sample": 1, "tokens": 64, "frozen": frozen} for frozen in ("none", "all")]
    trained, frozen = (dict(simulate(scenario(images=images, optimizer="none")).memory[0].static) for images in given)
    assert frozen["parameters"] == trained["parameters"]
