"""Fine-tuning tasks: memory options as axes; runs measured nearby."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from simpar.api.measured_runs import _counted, combination, measured_nearby
from simpar.cli import main
from simpar.searching.abilities import ABILITIES
from simpar.searching.tasks import TASKS, recipes
from simpar.specs.plan import PlanSpec
from simpar.specs.scenario import make_scenario

ASKED = ("search", "--model", "llama3.1-8b", "--hardware", "rtx-4090", "--num-gpus", "2", "--quiet", "--workers", "1",
         "--allow", "offload_activations=0", "--allow", "micro_batch_size=1,8", "--fix", "zero_stage=0")  # fmt: skip


def run(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().out


def test_adapters_on_two_cards_fit_and_quantised_weights_need_less(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run((*ASKED, "--task", "lora", "--json"), capsys)
    found = json.loads(out)
    assert code == 0
    best = {layout["recipe"]: layout for layout in found["best"]}
    assert set(best) == {name for name, _ in recipes("lora", {})}, "one row for each"
    assert all(b["fit_probability"] >= 0.9 and b["world_size"] == 2 for b in best.values())
    assert all(b["design"].startswith(recipe) for recipe, b in best.items())

    def plain(recipe: str) -> float:
        return float(best[recipe]["peak_memory_bytes"]["device"])

    liger = ", Liger loss and kernels"
    quantised = next(name for name in best if name.startswith("QLoRA") and name.endswith(liger))
    assert plain(quantised) < plain(f"LoRA on 8-bit weights{liger}")
    assert found["best"][0]["recipe"].endswith(liger)


def test_a_full_fine_tune_says_what_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    full = (*ASKED, "--task", "full", "--set", "training.pure_bf16=true", "--framework", "transformers")
    code, out = run(full, capsys)
    assert code == 1
    assert "needs 39.68 GiB" in out
    assert "communication buffers 14.96" in " ".join(out.split()), "DDP's, as large as the weights"
    code, out = run((*ASKED, "--task", "lora", "--set", "cluster.memory_scale=0.65"), capsys)
    assert code == 0
    assert "Do not fit, whatever else is chosen: LoRA on 16-bit weights" in out
    assert "QLoRA (4-bit weights, double quantisation), Liger loss and kernels; dp2" in out


def test_a_full_fine_tune_fits_where_the_host_holds_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """One micro-batch a step: what rests on a card is activations and the weights of a layer."""
    sharded = tuple("zero_stage=3" if word == "zero_stage=0" else word for word in ASKED)
    code, out = run((*sharded, "--task", "full", "--set", "training.optimizer=adamw", "--json"), capsys)
    assert code == 0
    found = json.loads(out)["best"]
    assert {b["recipe"] for b in found} == {f"AdamW{states}{loss}" for states in ("", ", bf16 throughout")
                                            for loss in ("", ", Liger loss and kernels")}  # fmt: skip
    assert all(b["choice"]["offload_parameters"] and "parameters on the host" in b["design"] for b in found)
    assert all(b["peak_memory_bytes"]["device"] < 0.85 * 24 * 2**30 for b in found)


def test_what_the_training_table_says_is_no_axis() -> None:
    every = recipes("full", {})
    assert len(every) == len({name for name, _ in every}) == 24
    kept = recipes("full", {"optimizer": "adafactor", "global_batch_size": 4})
    assert {changed["optimizer"] for _, changed in kept} == {"adafactor"}
    assert all(changed["global_batch_size"] == 4 for _, changed in kept)
    assert all(changed["trainable"] == "lora" for _, changed in recipes("lora", {}))


def test_an_unknown_task_names_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ASKED, "--task", "qlora"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(task in said for task in TASKS)


def test_transformers_shards_or_does_not() -> None:
    assert ABILITIES["transformers"].values["zero_stage"] == (0, 3)
    assert ABILITIES["transformers"].values["tp"] == (1,)


# -- measured nearby -----------------------------------------------------------------------------------------------------------


def scenario(**plan: object) -> dict[str, object]:
    return {
        "model": "llama3.1-8b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": plan, "training": {"sequence_length": 8192, "global_batch_size": 8},
    }  # fmt: skip


def test_the_evidence_knows_what_was_run() -> None:
    counted = sum(sum(each.values()) for each in _counted().values())
    assert counted > 1000
    rows = sum(len(path.read_text().splitlines()) for path in (Path(__file__).parents[1] / "validation" / "runs").glob("*.jsonl"))
    assert counted < rows
    usual = measured_nearby(make_scenario(scenario(tp=4, pp=2)))
    assert usual > 0
    assert measured_nearby(make_scenario(scenario(tp=2, pp=4))) == usual, "degrees alone are no other combination"
    assert measured_nearby(make_scenario(scenario(tp=2, pp=2, schedule="zb-h1"))) < usual
    assert measured_nearby(make_scenario({**scenario(tp=4, pp=2), "framework": "deepspeed"})) != usual
    other = {**scenario(tp=4, pp=2), "cluster": {"hardware": "hgx-h800", "num_nodes": 1}}
    assert measured_nearby(make_scenario(other)) == usual, "of one architecture"
    other = {**scenario(tp=4, pp=2), "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1}}
    assert measured_nearby(make_scenario(other)) != usual


def test_combinations_differ_in_what_meets() -> None:
    plan, training = PlanSpec().model_dump(), {"precision": "bf16"}
    changes = [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "virtual_stages": 2}, {"ep": 8}, {"zero_stage": 3},
               {"recompute": "full"}, {"recompute": {"granularity": "selective", "modules": ["mlp"]}},
               {"offload": {"optimizer": True}}]  # fmt: skip
    found = Counter(combination("megatron-core", {**plan, **change}, training) for change in changes)
    assert len(found) == len(changes)
    assert combination("nemo", plan, training) == combination("megatron-core", plan, training)
    assert combination("nemo", plan, {"precision": "fp8"}) not in found
