"""Hybrid models as Megatron-LM's flags: pattern, state-space sizes and layer spec, out and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.interop.argv import options
from simpar.interop.meaning import meaning
from simpar.interop.megatron import flags, launch_script
from simpar.interop.megatron_import import load, read_options
from simpar.model.huggingface import from_huggingface
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate

MODELS = Path(__file__).parent / "data" / "models"


def scenario(name: str, **plan: Any) -> Scenario:
    model = from_huggingface(json.loads((MODELS / name).read_text())).model_dump()
    table = {
        "name": "hybrid", "model": model, "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 8},
        "plan": {"tp": 2, "pp": 2, **plan}, "training": {"sequence_length": 4096, "global_batch_size": 64},
    }  # fmt: skip
    return make_scenario(table, file="s.toml")


@pytest.mark.parametrize(
    ("name", "letters"),
    [
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json", "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        ("mamba2.json", "M" * 64),
        ("granitemoehybrid.json", "ME" * 32),
    ],
)
def test_a_hybrid_model_goes_out_and_comes_back(name: str, letters: str) -> None:
    given = scenario(name, ep=4 if "E" in letters else 1)
    text = launch_script(given)
    assert f'--hybrid-override-pattern "{letters}"' in text
    assert "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec" in text
    assert " pretrain_mamba.py " in text
    back = load(text).scenario
    assert meaning(back) == meaning(given)
    one, other = (simulate(s, detail="stage") for s in (given, back))
    assert other.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
    assert other.worst_rank.allocated_bytes == one.worst_rank.allocated_bytes


def test_a_published_pattern_is_read() -> None:
    """The sizes of Nemotron 3 Nano as flags, without the comment lines of an export."""
    lines = flags(scenario("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json"))
    reading = read_options(options(" ".join(lines).replace('"', "").split()))
    assert not reading.wrong
    stack = reading.table["model"]["stacks"][0]
    assert stack["pattern"].count("mamba") == 23
    assert stack["layers"]["mamba"]["sublayers"][0]["branches"][0]["num_groups"] == 8
    assert stack["layers"]["moe"]["sublayers"][0]["branches"][0]["activation"] == "relu2"


@pytest.mark.parametrize(
    ("name", "plan", "what"),
    [
        ("Qwen3-Next-80B-A3B.json", {}, "no letter for it"),
        ("falcon_h1.json", {}, "one branch each"),
        ("Jamba-1.5-Mini.json", {}, "no letter for it"),
        ("mamba2.json", {"virtual_stages": 2}, "one stage a rank"),
    ],
)
def test_what_the_stack_cannot_say_is_refused(name: str, plan: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        launch_script(scenario(name, **plan))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (("--hybrid-override-pattern", "MXM"), "holds X"),
        (("--num-layers", "7"), "letters for 7 layers"),
        (("--position-embedding-type", "learned_absolute"), "rope or none"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(changes: tuple[str, str], what: str) -> None:
    words = " ".join(flags(scenario("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json"))).replace('"', "").split()
    words[words.index(changes[0]) + 1] = changes[1]
    assert any(what in f"{v.rule} {v.right}" for v in read_options(options(words)).wrong)
