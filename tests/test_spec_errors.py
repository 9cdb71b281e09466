"""What a user reads who writes a wrong value: the field as it stands in the file, a rule without names of Python or pydantic."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from simpar.errors import InputError
from simpar.specs import base
from simpar.specs.base import read_toml, validate
from simpar.specs.cluster import ClusterSpec
from simpar.specs.effects import EffectsSpec
from simpar.specs.hardware import HardwareProfile, profile_path
from simpar.specs.model import CnnSpec, MlpSpec, TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.plan import PlanSpec
from simpar.specs.planfile import PlanFile
from simpar.specs.scenario import Scenario, apply_override, make_scenario, read_scenario
from simpar.specs.training import TrainingSpec

SPECS = (Scenario, PlanSpec, TrainingSpec, ClusterSpec, EffectsSpec, TransformerSpec, MlpSpec, CnnSpec, HardwareProfile, PlanFile)
WRONG: tuple[object, ...] = (None, True, 3.5, -1, "x", [], ["x"], {}, {"x": 1}, [{"x": 1}])
INNER = re.compile(
    r"Sourced|Annotated|Validator|Spec\b|function-|literal\[|pydantic|NoneType|instance of|\bdict\b|tagged|tuple\[|Input"
)


def nested(spec: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`spec` and every spec inside it."""
    seen: list[type[BaseModel]] = []

    def visit(annotation: Any) -> None:
        is_class = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
        if is_class and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.append(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for inner in get_args(annotation):
            visit(inner)

    visit(spec)
    return iter(seen)


EVERY = {inner.__name__: inner for spec in SPECS for inner in nested(spec)}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_no_message_shows_inner_names(name: str) -> None:
    spec = EVERY[name]
    for field in spec.model_fields:
        for value in WRONG:
            try:
                validate(spec, {field: value})
            except InputError as error:
                for violation in error.violations:
                    told = f"{violation.field}: {violation.rule}; {violation.right.partition('known fields')[0]}"
                    assert not INNER.search(told), told
                    first = violation.field.partition(".")[0]
                    assert first in spec.model_fields, f"{violation.field} is no field of what was written"


@pytest.mark.parametrize(
    ("spec", "table", "told"),
    [
        (PlanSpec, {"recompute": "many"}, ["recompute = 'many': must be 'none', 'selective' or 'full', or a table"]),
        (PlanSpec, {"recompute": {"granularity": 3}}, ["recompute.granularity = 3: must be 'none', 'selective' or 'full'"]),
        (PlanSpec, {"recompute": {"modles": 1}}, ["recompute.modles = 1: unknown field; did you mean 'modules'?"]),
        (PlanSpec, {"tp": "x", "offload": 3}, ["tp = 'x': must be a whole number", "offload = 3: must be a table"]),
        (PlanSpec, {"layers_per_stage": [1, "x"]}, ["layers_per_stage.1 = 'x': must be a whole number"]),
        (PlanSpec, {"layers_per_stage": "x"}, ["layers_per_stage = 'x': must be a list, or 'auto'"]),
        (TrainingSpec, {}, ["global_batch_size: is required"]),
        (
            ClusterSpec,
            {"hardware": 3, "num_nodes": 1.5},
            [
                'hardware = 3: must be a text; in quotes: hardware = "3", on the command line --set \'hardware="3"\'',
                "num_nodes = 1.5: must be a whole number",
            ],
        ),
        (ClusterSpec, {"hardware": "a", "num_nodes": 1, "sharp": "x"}, ["sharp = 'x': must be true or false"]),
    ],
)
def test_messages_by_hand(spec: type[BaseModel], table: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(InputError) as stop:
        validate(spec, table)
    assert str(stop.value).splitlines() == told
    with pytest.raises(InputError) as built:
        spec(**table)
    assert str(built.value) == str(stop.value), "the same words for a spec built in code"


def test_specs_read_from_files_are_still_told_together() -> None:
    """Building inside of validation must not stop at the first wrong table."""
    with pytest.raises(InputError) as stop:
        validate(Scenario, {"name": "x", "plan": {"tp": 0}, "cluster": {"hardware": "a", "num_nodes": 0}})
    fields = {v.field for v in stop.value.violations}
    assert {"plan.tp", "cluster.num_nodes", "model", "training"} <= fields


def profile_table() -> dict[str, Any]:
    return {key: value for key, value in read_toml(profile_path("dgx-h100")).items() if key not in ("kernels", "collectives")}


def test_a_bare_value_of_a_profile_counts_as_assumed() -> None:
    table = profile_table()
    table["gpu"]["memory"] = "144 GB"
    table["gpu"]["sm_count"] = 148
    table["gpu"]["peak_flops"]["bf16"] = "1 PFLOP/s"
    profile = validate(HardwareProfile, table)
    assert (profile.gpu.memory.value, profile.gpu.memory.kind) == (144e9, "assumed")
    assert (profile.gpu.sm_count.value, profile.gpu.sm_count.kind) == (148, "assumed")
    assert profile.gpu.peak_flops["bf16"].value == 1e15
    assert profile.gpu.memory_bandwidth.kind == "published", "what says more keeps it"


@pytest.mark.parametrize(
    ("value", "told"),
    [("144", "gpu.memory = '144': the unit is missing"), (144, "gpu.memory = 144: a quantity with a unit is needed"),
     ({"value": "1 GB"}, "gpu.memory.kind: is required")],
)  # fmt: skip
def test_wrong_values_of_a_profile(value: object, told: str) -> None:
    table = profile_table()
    table["gpu"]["memory"] = value
    with pytest.raises(InputError) as stop:
        validate(HardwareProfile, table, file="my.toml")
    assert str(stop.value).startswith(f"my.toml: {told}")


def test_the_location_is_the_written_one() -> None:
    assert base._written(("model", "mlp", "width"), {"model": {"kind": "mlp"}}, missing=True) == ("model", "width")
    assert base._written(("a", 1, "T", "b"), {"a": [0, {"b": 1}]}, missing=False) == ("a", 1, "b")
    assert base._written(("plan", "PlanSpec", "tp"), {"plan": PlanSpec()}, missing=False) == ("plan", "tp")


def test_pydantic_itself_is_not_raised() -> None:
    with pytest.raises(InputError) as stop:
        PlanSpec(pq=1)  # type: ignore[call-arg]
    assert not isinstance(stop.value, ValidationError)


def test_a_field_of_a_named_model_can_be_set() -> None:
    """The preset is copied: what is published of it, and of the scenario, is not said of the copy."""
    plain = read_scenario("korthikanti-22b_a100x8_tp8pp1")
    table: dict[str, Any] = {"model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
             "training": {"sequence_length": 4096, "global_batch_size": 8}}  # fmt: skip
    apply_override(table, "model.num_hidden_layers=16")
    found = make_scenario(table).model
    preset = load_model("llama3.1-8b")
    assert found.model_dump(exclude={"name", "source", "published_parameters", "num_hidden_layers"}) == preset.model_dump(
        exclude={"name", "source", "published_parameters", "num_hidden_layers"}
    )
    assert (found.num_hidden_layers, found.name) == (16, "llama3.1-8b, changed")  # type: ignore[union-attr]
    assert plain.published
    assert not read_scenario("korthikanti-22b_a100x8_tp8pp1", ["model.vocab_size=1024"]).published
    with pytest.raises(InputError, match=r"'x/config\.json' is no shipped model whose fields can be set"):
        apply_override({"model": "x/config.json"}, "model.num_hidden_layers=16")


def test_a_field_of_a_model_in_a_file_is_set(tmp_path: Path) -> None:
    """The file lies beside its scenario; a scenario without a folder (of a page) opens none."""
    table = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
             "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_nextn_predict_layers": 1}  # fmt: skip
    (tmp_path / "own.json").write_text(json.dumps(table))
    text = 'model = "own.json"\n[cluster]\nhardware = "dgx-h100"\nnum_nodes = 1\n'
    (tmp_path / "s.toml").write_text(f"{text}[training]\nsequence_length = 128\nglobal_batch_size = 8\n")
    before, after = (read_scenario(tmp_path / "s.toml", over).model for over in ([], ["model.num_nextn_predict_layers=0"]))
    assert [m.num_nextn_predict_layers for m in (before, after)] == [1, 0]  # type: ignore[union-attr]
    with pytest.raises(InputError, match="no shipped model"):
        apply_override({"model": str(tmp_path / "own.json")}, "model.num_nextn_predict_layers=0")


def test_a_pair_of_low_rank_does_not_outgrow_its_matrix() -> None:
    table = {
        "model": "llama3.2-1b",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1},
        "training": {"sequence_length": 64, "global_batch_size": 1, "trainable": "lora", "lora_rank": 2048},
    }
    assert make_scenario(table).training.lora_rank == 2048
    with pytest.raises(InputError, match=r"training\.lora_rank = 2049: is more than hidden_size \(2048\).*; at most 2048"):
        make_scenario({**table, "training": {**table["training"], "lora_rank": 2049}})
