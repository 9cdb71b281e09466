"""What a step works on beside a layout (images, sound, packed documents, a reference model): every export says or refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from simpar.errors import InputError
from simpar.interop import chakra, simai
from simpar.interop.export import FORMATS, check_model, export_files, not_launched
from simpar.interop.launch import WORK
from simpar.specs.models_io import load_model
from simpar.specs.scenario import Scenario, make_scenario

VISION: Final = {"sequence_length": 2048, "images": {"per_sample": 1, "tokens": 1024}}
AUDIO: Final = "audio"
"""A model with an audio encoder, made here: none is shipped."""
FIELDS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "training.images": ("qwen2.5-vl-7b", {}, VISION, {"images": {}}),
    "training.audio": (AUDIO, {}, {"sequence_length": 2048, "audio": {"per_sample": 1, "tokens": 1500}}, {"audio": {}}),
    "training.reference_model": ("llama3.1-8b", {}, {"reference_model": True}, {"reference_model": False}),
    "training.document_lengths": ("llama3.1-8b", {}, {"document_lengths": [512, 2048, 900]}, {"document_lengths": []}),
    "training.launch_blocking": ("llama3.1-8b", {"zero_stage": 0}, {"launch_blocking": True}, {"launch_blocking": False}),
    "training.collective_checks": ("llama3.1-8b", {}, {"collective_checks": True}, {"collective_checks": False}),
    "plan.encoder_stages": ("qwen2.5-vl-7b", {"pp": 2, "zero_stage": 1, "encoder_stages": 1}, VISION, {}),
}
"""Field -> model, plan and training that set it, and training that does not."""
FRAMEWORKS: Final = {"torchtitan": "torchtitan", "deepspeed": "deepspeed", "nanotron": "nanotron"}
SHARDED: Final = ("torchtitan", "huggingface", "axolotl", "torchtune")


def _with_sound() -> dict[str, Any]:
    table = load_model("qwen2.5-vl-7b").model_dump(mode="json")
    return {**table, "name": AUDIO, "stacks": [{**s, "name": AUDIO} if s["name"] == "vision" else s for s in table["stacks"]]}


def _made(field: str, name: str, *, without: bool = False) -> Scenario:
    model, plan, training, left_out = FIELDS[field]
    return make_scenario({
        "name": "work", "model": _with_sound() if model == AUDIO else model, "framework": FRAMEWORKS.get(name, "megatron-core"),
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"sequence_parallel": False, "zero_stage": 3 if name in SHARDED else 1, **plan,
                 **({"encoder_stages": 0} if without and "encoder_stages" in plan else {})},
        "training": {"sequence_length": 4096, "global_batch_size": 16, **training, **(left_out if without else {})},
    })  # fmt: skip


def _chakra(scenario: Scenario, out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in chakra.write(scenario, out)}


EXPORTS: Final[dict[str, Callable[[Scenario, Path], Any]]] = {
    **{name: lambda scenario, _, name=name: export_files(name, scenario) for name in FORMATS},  # type: ignore[misc]
    "simai": lambda scenario, _: simai.export(scenario),
    "chakra": _chakra,
}


def _files_or_refusal(name: str, scenario: Scenario, out: Path) -> tuple[Any, set[str]]:
    """The files, or the fields that are refused."""
    try:
        return EXPORTS[name](scenario, out), set()
    except InputError as error:
        return None, {v.field.removesuffix(".per_sample") for v in error.violations}


def test_every_field_is_here() -> None:
    assert set(FIELDS) == set(WORK)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", EXPORTS)
def test_it_is_said_or_refused(name: str, field: str, tmp_path: Path) -> None:
    """Files that are the same with the field and without do not say it."""
    files, told = _files_or_refusal(name, _made(field, name), tmp_path / "with")
    if files is None:
        assert told & {field, "model"}, told
    else:
        assert files != EXPORTS[name](_made(field, name, without=True), tmp_path / "without")


@pytest.mark.parametrize("name", FORMATS)
def test_a_reference_model_is_refused_in_words(name: str) -> None:
    with pytest.raises(InputError, match="a reference model beside the trained one") as caught:
        export_files(name, _made("training.reference_model", name))
    assert [v.field for v in caught.value.violations] == ["training.reference_model"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_teacher_is_refused_by_its_name(name: str) -> None:
    made = _made("training.reference_model", name)
    teacher = make_scenario({**made.model_dump(exclude={"training"}), "model": "llama3.1-8b",
                             "training": {**made.training.model_dump(), "reference_model": "llama3.1-70b"}})  # fmt: skip
    with pytest.raises(InputError, match="a reference model beside the trained one") as caught:
        export_files(name, teacher)
    assert [(v.field, v.value) for v in caught.value.violations] == [("training.reference_model", "Llama 3.1 70B")]


@pytest.mark.parametrize("name", ["deepspeed", "huggingface", "axolotl", "torchtune"])
def test_packed_documents_are_said(name: str) -> None:
    texts = export_files(name, _made("training.document_lengths", name)).values()
    assert any("documents of 1153 tokens on average, packed" in text for text in texts)


@pytest.mark.parametrize("name", ["huggingface", "torchtune"])
def test_packed_documents_do_not_share_sequences_over_ranks(name: str) -> None:
    made = _made("training.document_lengths", name)
    split = made.model_copy(update={"plan": made.plan.model_copy(update={"cp": 2, "cp_style": "all_gather"})})
    with pytest.raises(InputError) as caught:
        export_files(name, split)
    assert "training.document_lengths" in {v.field for v in caught.value.violations}


@pytest.mark.parametrize("name", ["megatron", *FRAMEWORKS])
def test_the_work_of_a_step_rules_out_no_layout(name: str) -> None:
    """A search over layouts finds some; only their export is refused, and that at once."""
    for field in ("training.reference_model", "training.document_lengths"):
        made = _made(field, name)
        assert not not_launched(made)
        if field == "training.reference_model":
            with pytest.raises(InputError, match="reference model"):
                check_model(name, made)
