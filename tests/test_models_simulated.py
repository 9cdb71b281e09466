"""Models of any layers in the simulator: hybrids, windows, sparse attention, layers of their own sizes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.graph.masks import Mask
from simpar.model.layered import token_network
from simpar.model.ledger import totals
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.models_io import load_model
from simpar.specs.notes import scenario_notes
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, simulate

BASE: dict[str, Any] = {
    "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 1},
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "tp4pp4": {"tp": 4, "pp": 4, "sequence_parallel": True, "zero_stage": 1},
    "tp2cp2": {"tp": 2, "cp": 2, "pp": 4, "sequence_parallel": True, "zero_stage": 1},
    "full": {"tp": 4, "pp": 4, "sequence_parallel": True, "zero_stage": 1, "recompute": "full"},
    "fsdp": {"tp": 1, "pp": 1, "zero_stage": 3},
}
MODELS = (
    "nemotron-h-56b",
    "gpt-oss-20b",
    "qwen3-next-80b-a3b",
    "falcon-h1-7b",
    "olmo-3.1-32b",
    "jamba-1.5-mini",
    "nemotron-super-49b",
)


def scenario(model: str, plan: str, **training: Any) -> Scenario:
    return make_scenario({**BASE, "model": model, "plan": PLANS[plan], "training": {**BASE["training"], **training}}, file="s.toml")


@lru_cache(maxsize=64)
def flops(model: str, plan: str) -> float:
    return prepare(scenario(model, plan)).layout.model_flops


@pytest.mark.parametrize("model", MODELS)
def test_simulated_flops_are_the_ledgers(model: str) -> None:
    """Three times the forward of every token, with causal masks halved as MFU does: below the exact count, by the diagonal."""
    whole = load_model(model)
    assert isinstance(whole, ArchitectureSpec)
    exact = 3 * totals(whole, 4096).forward_flops_per_token * 4096 * 64
    assert 0.97 * exact < flops(model, "tp4pp4") < 1.001 * exact  # the vocabulary is padded


@pytest.mark.parametrize("model", ["nemotron-h-56b", "gpt-oss-20b", "falcon-h1-7b"])
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_flops_do_not_depend_on_the_plan(model: str, plan: str) -> None:
    assert flops(model, plan) == pytest.approx(flops(model, "tp4pp4"), rel=2e-4)


def test_a_window_makes_attention_cheaper_and_costs_no_weights() -> None:
    def gemma(window: int | None) -> dict[str, Any]:
        attention = {"kind": "attention", "num_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "window": window}
        steps = [{"branches": [attention]}, {"branches": [{"kind": "mlp", "width": 8192}]}]
        stack = {"hidden_size": 2048, "pattern": ["local*8"], "layers": {"local": {"sublayers": steps}}}
        return {"kind": "layers", "vocab_size": 32000, "max_position_embeddings": 32768, "stacks": [stack]}

    def run(window: int | None) -> Any:
        table = {**BASE, "model": gemma(window), "plan": PLANS["fsdp"], "training": {**BASE["training"], "sequence_length": 32768}}
        return simulate(make_scenario(table, file="s.toml"))

    full, local = run(None), run(1024)
    assert local.step_time_s < 0.8 * full.step_time_s
    assert prepare_parameters(run_model=gemma(None)) == prepare_parameters(run_model=gemma(1024))


def prepare_parameters(run_model: dict[str, Any]) -> int:
    made = make_scenario({**BASE, "model": run_model, "plan": PLANS["fsdp"]}, file="s.toml").model
    assert isinstance(made, ArchitectureSpec)
    return totals(made, 64).parameters


def test_what_no_step_runs_is_said() -> None:
    assert any("vision encoder" in note for note in scenario_notes(scenario("qwen3-vl-8b", "fsdp")))


def test_degrees_must_divide_every_mixer() -> None:
    bad = {**PLANS["tp4pp4"], "tp": 64, "pp": 1, "sequence_parallel": False}
    with pytest.raises(InputError, match="the value heads of delta") as caught:
        make_scenario({**BASE, "model": "qwen3-next-80b-a3b", "plan": bad}, file="s.toml")
    assert "plan.tp" in {violation.field for violation in caught.value.violations}


def test_layers_of_a_file_far_too_long_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1000000000, "num_attention_heads": 2, "vocab_size": 9}'
    )
    with pytest.raises(InputError, match="num_hidden_layers"):
        load_model(str(tmp_path))


def test_every_layer_is_prepared_once_per_kind() -> None:
    layers = prepare(scenario("nemotron-h-56b", "tp4pp4")).layout.network.layers
    assert len(layers) == 118
    assert len({id(layer) for layer in layers}) == 3


def test_residual_streams_travel_between_stages() -> None:
    model = load_model("deepseek-v4-flash")
    assert isinstance(model, ArchitectureSpec)
    network = token_network(model, 2, 128)
    assert set(network.boundary_elements) == {2 * 128 * 4096 * 4.0}


def test_prediction_modules_run_on_the_last_stage() -> None:
    """A layer and a head more, of a model of layers too; single mixers and feed-forwards (Nemotron) give one of each."""
    model = load_model("deepseek-v3.2")
    assert isinstance(model, ArchitectureSpec)
    network, without = (
        token_network(model, 1, 512),
        token_network(model.model_copy(update={"num_nextn_predict_layers": 0}), 1, 512),
    )
    assert (len(network.mtp), without.mtp, without.mtp_head) == (1, (), None)
    layer = sum(network.layers[-1].weights(node) for node in network.layers[-1].nodes)
    assert network.parameters - without.parameters == layer + 2 * 7168 * 7168 + 3 * 7168  # a projection of pairs, three norms
    hybrid = load_model("nemotron-3-super-120b-a12b")
    assert isinstance(hybrid, ArchitectureSpec)
    (module,) = token_network(hybrid, 1, 512).mtp
    assert {"attention/core", "moe/router"} <= {node.name for node in module.nodes}


def test_groups_are_split_or_replicated_whole() -> None:
    plan = {"tp": 12, "pp": 1, "zero_stage": 1}
    stack = {
        "hidden_size": 240, "pattern": ["a"],
        "layers": {"a": {"sublayers": [
            {"branches": [{"kind": "attention", "num_heads": 24, "num_key_value_heads": 8, "head_dim": 10}]},
        ]}},
    }  # fmt: skip
    table = {**BASE, "model": {"kind": "layers", "vocab_size": 100, "stacks": [stack]}, "plan": plan}
    with pytest.raises(InputError, match=r"num_key_value_heads \(8\)"):
        make_scenario({**table, "cluster": {"hardware": "dgx-h100", "num_nodes": 3}}, file="s.toml")


def test_patterns_have_an_end() -> None:
    stack = {"hidden_size": 8, "pattern": ["a*1000000000"], "layers": {"a": {"sublayers": []}}}
    with pytest.raises(InputError, match="at most 10,000"):
        make_scenario({**BASE, "model": {"kind": "layers", "vocab_size": 9, "stacks": [stack]}, "plan": {}}, file="s.toml")


LARGE = {"framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 128}}
KINDS = [
    "deepseek-v3.2", "deepseek-v4-flash", "glm-5.2", "kimi-k3", "llama4-scout", "mimo-v2-flash", "nemotron-3-super-120b-a12b",
    "jamba-1.5-mini", "gated-deltanet-1.3b", "modernbert-base",
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_mixer_runs(name: str) -> None:
    tp = 1 if name in ("gated-deltanet-1.3b", "modernbert-base") else 8
    training = {**BASE["training"], "global_batch_size": 1024}
    table = {**LARGE, "model": name, "plan": {"tp": tp, "pp": 1, "zero_stage": 3}, "training": training}
    result = simulate(make_scenario(table, file="s.toml"))
    assert result.step_time_s > 0
    assert 0 < result.mfu < 0.7


@pytest.mark.parametrize(("model", "plan"), [("flux-dev", "full"), ("wan-t2v-14b", "tp2cp2"), ("sd3.5-large", "fsdp")])
def test_diffusion_models_are_simulated(model: str, plan: str) -> None:
    """Their tokens and conditions are given, their loss is elementwise; details agree as for any model."""
    chosen = scenario(model, plan)
    stage, layer = (simulate(chosen, detail=detail) for detail in ("stage", "layer"))
    assert layer.step_time_s == pytest.approx(stage.step_time_s, rel=1e-9)
    assert layer.communication_s == pytest.approx(stage.communication_s, rel=1e-6)
    assert any("are given" in note for note in layer.notes)
    whole = load_model(model)
    assert isinstance(whole, ArchitectureSpec)
    exact = 3 * totals(whole, 4096).forward_flops_per_token * 4096 * 64
    assert layer.layout.model_flops == pytest.approx(exact, rel=1e-3)


def test_packed_documents_attend_themselves() -> None:
    """Documents of 2 and 4 tokens: 3 + 10 causal pairs in six tokens, twice that in twelve; with a window of two 3 + 7."""
    assert Mask(documents=(2, 4)).attended(6) == 13.0
    assert Mask(documents=(2, 4)).attended(12) == 26.0
    assert Mask("window", 2, documents=(2, 4)).attended(6) == 10.0
    assert Mask("bidirectional", documents=(2, 4)).attended(6) == 4.0 + 16.0
    assert Mask(documents=(100,)).attended(6) == Mask().attended(6) == 21.0
    assert Mask(documents=(2, 4)).mean_document(6) == 20.0 / 6.0


@pytest.mark.parametrize("model", ["llama3.1-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("cp_style", ["ring", "all_gather", "ulysses"])
def test_shorter_documents_take_less_attention_alone(model: str, cp_style: str) -> None:
    """Not where the host puts documents in order one by one (tests/test_host_documents.py)."""
    framework = "torchtitan" if cp_style == "ulysses" else BASE["framework"]

    def run(*documents: int) -> Any:
        plan = {"tp": 2, "cp": 2, "pp": 2, "cp_style": cp_style}
        training = {"sequence_length": 32768, "global_batch_size": 16, "document_lengths": documents}
        given = {**BASE, "model": model, "framework": framework, "plan": plan, "training": training}
        return simulate(make_scenario(given), detail="stage")

    whole, one, some, short = run(), run(40_000), run(4096, 16384), run(1024)
    assert one.step_time_s == whole.step_time_s
    assert whole.step_time_s > some.step_time_s > short.step_time_s
    # Causal pairs are halved as MFU does: S^2 / 2 of a sequence, of documents their share of it.
    layout = whole.layout
    share = (4096**2 + 16384**2) / (4096 + 16384) / 32768
    if model == "llama3.1-8b":
        assert some.layout.attention_model_flops == pytest.approx(share * layout.attention_model_flops)
        assert short.layout.attention_model_flops == pytest.approx(layout.attention_model_flops / 32)
    for shorter in (some, short):
        assert shorter.layout.model_flops - shorter.layout.attention_model_flops == pytest.approx(
            layout.model_flops - layout.attention_model_flops
        )
        assert shorter.communication_s == pytest.approx(whole.communication_s)
