"""What launch files of fine-tuning frameworks share: rules, the batch per device, adapters, names of models on the Hub."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from simpar.errors import Violation
from simpar.interop.launch import documents_text, gpu_violations, work_violations
from simpar.interop.meaning import data_ranks, meaning, recompute_of
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import preset_of
from simpar.specs.scenario import Scenario
from simpar.specs.training import FusedKernel

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
QV: Final = ("q_proj", "v_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
ALL: Final = (*ATTENTION, *MLP)
_PLAIN: Final[dict[str, Any]] = {
    "plan.pp": 1, "plan.virtual_stages": 1, "plan.microbatch_group_size": None, "plan.ep": 1, "plan.overlap_tp": False,
    "plan.overlap_ep": False, "plan.delay_wgrad": False, "training.cuda_graphs": False, "training.routing": None,
    "training.lora_adapters": 1, "training.dropout": 0.0,
}  # fmt: skip
"""What none of them has a setting for, and the one value that it runs."""
LIGER: Final[dict[FusedKernel, str]] = {"norm": "rms_norm", "rope": "rope", "activation": "swiglu"}
"""Kernels of the Liger library by the names of its own switches, which the Trainer hands on (liger_kernel_config)."""
LIGER_KEYS: Final = {**LIGER, "activation": "glu_activation"}
"""The same by axolotl's keys (liger_...)."""
HUB: Final = {
    "llama2-7b": "meta-llama/Llama-2-7b-hf", "llama2-13b": "meta-llama/Llama-2-13b-hf", "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B", "llama3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama3.1-405b": "meta-llama/Llama-3.1-405B", "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
}  # fmt: skip
"""Preset -> the model's name on the Hugging Face Hub."""


def rules(scenario: Scenario, framework: str, *, zero: Collection[int], losses: Mapping[str, Any], optimizers: Mapping[str, Any],
          plain: Mapping[str, Any] | None = None) -> Iterator[Violation]:  # fmt: skip
    """What of a scenario `framework` cannot run or its files cannot say.

    Args:
        zero: stages that it shards by.
        losses, optimizers: those it has.
        plain: further fields without a setting, and the value that it runs.
    """
    yield from gpu_violations(scenario, framework)
    yield from work_violations(scenario, framework, documents=True)
    if not fine_tunes(scenario):
        yield Violation("model", scenario.model.kind, f"{framework} fine-tunes models of transformers", "a model of its classes")
        return
    means, plan, training = meaning(scenario), scenario.plan, scenario.training
    for path, value in {**_PLAIN, **(plain or {})}.items():
        if means[path] != value:
            yield Violation(path, means[path], f"{framework} has no setting for this", f"{value!r}")
    if plan.zero_stage not in zero and data_ranks(scenario) > 1:
        right = " or ".join(map(str, zero))
        yield Violation("plan.zero_stage", plan.zero_stage, f"{framework} does not shard so", right)
    for path, chosen, known in (
        ("training.cross_entropy", training.cross_entropy, losses),
        ("training.optimizer", training.optimizer, optimizers),
        ("training.precision", training.precision, ("bf16", "fp16", "fp32", "tf32")),
    ):
        if chosen not in known:
            yield Violation(path, chosen, f"{framework} does not have it", f"one of {', '.join(known)}")
    spec = recompute_of(scenario)
    if spec.granularity == "selective" or spec.num_layers is not None or spec.uniform_layers * spec.every > 1:
        yield Violation("plan.recompute", plan.recompute, f"{framework} checkpoints every layer or none", "full or none")
    if plan.offload.activations not in (0.0, 1.0):
        yield Violation("plan.offload.activations", plan.offload.activations, "all activations go to the host or none", "0 or 1")
    if training.base_weights != "auto" and training.trainable != "lora":
        yield Violation("training.base_weights", training.base_weights, "quantises frozen weights", 'auto, or trainable = "lora"')


def fine_tunes(scenario: Scenario) -> bool:
    """Whether the model is one of a framework that fine-tunes: no plain MLP, CNN or encoder-decoder of a paper."""
    return isinstance(scenario.model, TransformerSpec) or scenario.model.kind not in ("mlp", "cnn")


def whole_sequences(scenario: Scenario, framework: str) -> Iterator[Violation]:
    """A violation where documents are packed and ranks share a sequence by torch's context parallelism."""
    if scenario.plan.cp > 1 and scenario.training.document_lengths:
        rule = f"context parallelism of {framework} attends over whole sequences"
        yield Violation("training.document_lengths", scenario.training.document_lengths, rule, "leave it out, or plan.cp = 1")


def whole_activations(scenario: Scenario, framework: str) -> Iterator[Violation]:
    """A violation where tensor-parallel ranks share the activations between matmuls, as no fine-tuning framework's do."""
    if scenario.plan.tp > 1 and scenario.plan.sequence_parallel:
        rule = f"{framework}'s tensor parallelism keeps activations whole"
        yield Violation("plan.sequence_parallel", True, rule, "false")


def offloaded_together(scenario: Scenario) -> Iterator[Violation]:
    """A violation where FSDP would keep the optimizer's states on the host and parameters on the device."""
    offload = scenario.plan.offload
    if offload.optimizer and not offload.parameters:
        rule = "FSDP sends states to the host with parameters"
        yield Violation("plan.offload", offload.model_dump(), rule, "optimizer and parameters")


def data_comment(scenario: Scenario) -> str:
    """A comment line over a file that says "packed": what it does not, the documents' lengths; empty without such."""
    text = documents_text(scenario)
    return f"# The data set has {text}.\n" if text else ""


def hub_name(scenario: Scenario) -> str:
    """The model's name on the Hub, or a placeholder that says whose it is."""
    name = preset_of(scenario.model)
    return HUB.get(name or "", f"path/to/{getattr(scenario.model, 'name', '') or name or 'model'}")


def lora_modules(scenario: Scenario) -> list[str]:
    """Names of the matmuls with an adapter, as Llama-like models have them."""
    return list({"all": ALL, "qv": QV, "mlp": MLP}.get(scenario.training.lora_modules, ATTENTION))
