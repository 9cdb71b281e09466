"""torchtitan's main branch after v0.2.2: a Python function that returns the configuration, in the names of one commit."""

from __future__ import annotations

import json
import textwrap
from typing import Any, Final

from simpar.interop.meaning import meaning, recompute_of
from simpar.interop.torchtitan_models import MAIN_ONLY
from simpar.specs.scenario import Scenario

COMMIT: Final = "b5bcd76c6 (21 August 2026)"
"""Of pytorch/torchtitan: the recipe imports and names what stands there; main moves on every day."""
_DISPATCHERS: Final = {"deepep": "deepep", "hybridep": "hybridep"}


def compiled_parts(scenario: Scenario) -> list[str]:
    """Components that torchtitan compiles."""
    asked = scenario.training.compile
    return [asked] if isinstance(asked, str) else ["model", "loss"]


def limits(scenario: Scenario) -> list[str]:
    """What the recipe cannot say though the TOML file can, one sentence each."""
    found, spec = [], recompute_of(scenario)
    if scenario.training.precision in ("fp8", "fp8-rowwise", "mxfp8"):
        found.append(
            f"training.precision = {scenario.training.precision!r}: add a converter to model_registry(..., converters=[...])"
        )
    if spec.granularity == "full" and (spec.num_layers is not None or spec.every > 1):
        found.append("plan.recompute of every n-th layer: all layers are recomputed here")
    if scenario.plan.cp > 1 and scenario.plan.cp_style == "ring":
        found.append("plan.cp_style = 'ring': context parallelism gathers keys and values here")
    if scenario.training.optimizer == "adam":
        found.append("training.optimizer = 'adam': AdamW stands here, with the same work per step")
    return found


def recipe(scenario: Scenario, key: tuple[str, str], parallelism: dict[str, Any], assets: str) -> str:
    """The module's text; its function is called `layout`.

    Args:
        key: torchtitan's name and flavor of the model.
        parallelism: the settings of the layout.
        assets: folder of the tokenizer.
    """
    plan, training = scenario.plan, scenario.training
    notes = "".join(f"\n    {line}" for line in limits(scenario))
    chunked = training.cross_entropy == "chunked"
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    spec = recompute_of(scenario)
    remat = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}[spec.granularity]
    imports = _imports(scenario, MAIN_ONLY.get(key[0], key[0]), remat, chunked)
    fields = {
        "num_tokens_per_microbatch_per_dp_rank": training.micro_batch_size * training.sequence_length,
        "num_tokens_per_train_step": training.global_batch_size * training.sequence_length,
        "max_context_length": training.sequence_length,
        "steps": 50,
        "enable_cpu_offload": plan.offload.optimizer or plan.offload.parameters,
        "disable_cuda_graphs": not training.cuda_graphs,
        "mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    dispatcher = f", moe_comm_backend={plan.ep_dispatcher!r}" if plan.ep > 1 and plan.ep_dispatcher in _DISPATCHERS else ""
    body = f"""\
    model_spec = model_registry({key[1]!r}{dispatcher})
    config = Trainer.Config(
        loss={f"ChunkedLossWrapper.Config(loss_fn={loss})" if chunked else loss},
        hf_assets_path={assets!r},
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
{_arguments(fields, 12)}
        ),
        parallelism=ParallelismConfig(
{_arguments(parallelism, 12)}
        ),
        dataloader=GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4"])),
        activation_checkpoint={remat},
    )
"""
    if meaning(scenario)["training.compile"]:
        body += f"    config.compile = CompileConfig(enable=True, components={json.dumps(compiled_parts(scenario))}"
        body += ", enable_async_tensor_parallel=True)\n" if plan.overlap_tp and plan.tp > 1 else ")\n"
    body += "    return config\n"
    description = f'"""{scenario.name}: torchtitan main at {COMMIT}.'.replace("\\", "/")
    said = f"\n\nNot said here, though the TOML file says it:{notes}\n" if notes else ""
    return f'{description}{said}"""\n\n{imports}\n\n\ndef layout() -> Trainer.Config:\n    """The whole run."""\n{body}'


def _imports(scenario: Scenario, model: str, remat: str, chunked: bool) -> str:
    settings = ["ParallelismConfig", "TrainingConfig"]
    lines = [
        "from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader",
        f"from torchtitan.components.loss import {'ChunkedLossWrapper, ' if chunked else ''}CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        "from torchtitan.hf_datasets.text_datasets import DATASETS",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{model} import model_registry",
        "from torchtitan.trainer import Trainer",
    ]
    if remat != "None":
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {remat.removesuffix('.Config()')}")
    if meaning(scenario)["training.compile"]:
        settings.insert(0, "CompileConfig")
    lines.append(f"from torchtitan.config import {', '.join(settings)}")
    return "\n".join(sorted(lines))


def _arguments(fields: dict[str, Any], indent: int) -> str:
    lines = []
    for name, value in fields.items():
        if isinstance(value, list):
            inner = "\n".join(f"    {json.dumps(part)}," for part in value)
            lines.append(f"{name}=[\n{inner}\n],")
        else:
            lines.append(f"{name}={value!r},")
    return textwrap.indent("\n".join(lines), " " * indent)
