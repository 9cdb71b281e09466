"""Models and batches of real runs: a small default, or those of the user's scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.live.cluster_in_step import TINY
from simpar.live.cluster_layouts import SPLIT_BACKWARD, RunLayout
from simpar.live.cluster_predict import Predicted, Setup
from simpar.specs.model import MlpSpec, TransformerSpec
from simpar.specs.scenario import Scenario, read_scenario

TRANSFORMER: Final[dict[str, Any]] = {
    "kind": "transformer", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 2048,
}  # fmt: skip
TINY_MODEL: Final[dict[str, Any]] = {
    **TRANSFORMER, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "vocab_size": 64,
}  # fmt: skip
"""Its step is all launches."""
MOE: Final[dict[str, Any]] = {**TRANSFORMER, "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}}
MLP: Final[dict[str, Any]] = {"kind": "mlp", "width": 512, "depth": 8}
TRAINING: Final[dict[str, Any]] = {"sequence_length": 128, "global_batch_size": 8, "micro_batch_size": 1}
TINY_TRAINING: Final[dict[str, Any]] = {"sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 1}
MLP_TRAINING: Final[dict[str, Any]] = {"sequence_length": 1, "global_batch_size": 1024, "micro_batch_size": 128}


def references_of(layouts: Sequence[RunLayout], device: str) -> list[RunLayout]:
    """Layouts of one rank that tell how long compute takes inside the steps of `layouts`: one a model, one sharded, one a model
    whose backward is split, and on a CPU, where launches do not run ahead of kernels, a tiny one."""
    if all(layout.world_size == 1 for layout in layouts):
        return []  # they would be the layouts themselves
    models = dict.fromkeys((*(x.model for x in layouts), *((TINY,) if device == "cpu" else ())))
    found = [RunLayout({"transformer": "single"}.get(m, m), model=m) for m in models]
    sharded = dict.fromkeys(x.model for x in layouts if x.fsdp)
    found += [RunLayout({"transformer": "fsdp1"}.get(m, f"{m}-fsdp1"), model=m, fsdp=True) for m in list(sharded)[:1]]
    split = dict.fromkeys(x.model for x in layouts if x.schedule in SPLIT_BACKWARD)
    return found + [RunLayout(f"{m}-split", model=m, split=True) for m in split]


def sharded_over(reference: RunLayout, ranks: int) -> RunLayout:
    """The sharded reference as a group of `ranks` would run it."""
    return replace(reference, name=f"{reference.name} of {ranks}", dp=ranks)


def setup_of(scenario: Path | None, layouts: Sequence[RunLayout], hardware: str, precision: str) -> Setup:
    """The models that `layouts` need.

    Raises:
        InputError: the scenario's model has what the ranks' program has not.
    """
    models: dict[str, dict[str, Any]] = {"transformer": TRANSFORMER, "moe": MOE, "mlp": MLP}
    training: dict[str, dict[str, Any]] = {"transformer": TRAINING, "moe": TRAINING, "mlp": MLP_TRAINING}
    models[TINY], training[TINY] = TINY_MODEL, TINY_TRAINING
    if scenario is not None:
        chosen = read_scenario(scenario)
        found = unsupported(chosen)
        if found:
            raise InputError(found)
        kind = "mlp" if isinstance(chosen.model, MlpSpec) else "moe" if chosen.model.moe else "transformer"  # type: ignore[union-attr]
        models[kind] = chosen.model.model_dump(exclude_defaults=True) | {"kind": chosen.model.kind}
        t = chosen.training
        training[kind] = {
            "sequence_length": t.sequence_length, "global_batch_size": t.global_batch_size, "micro_batch_size": t.micro_batch_size,
        }  # fmt: skip
        if kind == "moe" and not any(layout.model == "transformer" for layout in layouts):
            models.pop("transformer")
    return Setup(models, training, hardware, precision)


def unsupported(scenario: Scenario) -> list[Violation]:
    """What of a scenario's model the ranks do not have."""
    model = scenario.model
    if isinstance(model, MlpSpec):
        sizes = {model.input_size, model.output_size} - {None, model.width}
        right = "leave out input_size and output_size"
        return [Violation("model", sizes, "layers of a real run are square", right)] if sizes else []
    if not isinstance(model, TransformerSpec):
        return [Violation("model.kind", model.kind, "real runs train transformers and MLPs", "choose one of those")]
    wanted: dict[str, object] = {
        "gated_mlp": True, "activation": "silu", "norm": "rmsnorm", "position": "rope", "attention_bias": False,
        "attention_out_bias": False, "mlp_bias": False, "qk_norm": False, "embedding_norm": False, "final_norm": True,
        "block_norms": 2, "parallel_block": False, "head_bias": False, "sliding_window": None, "num_decoder_layers": 0,
        "num_nextn_predict_layers": 0, "mla": None, "tie_word_embeddings": False,
    }  # fmt: skip
    found = [
        Violation(f"model.{field}", getattr(model, field), "a real run trains Llama's model", f"must be {right!r}", scenario.file)
        for field, right in wanted.items() if getattr(model, field) != right
    ]  # fmt: skip
    if model.moe and (model.moe.shared_expert_intermediate_size or model.moe.first_k_dense_replace or model.moe.moe_layer_freq > 1):
        found.append(Violation("model.moe", "shared or dense layers", "every layer of a real run has routed experts only"))
    return found


def config_of(setup: Setup, predictions: Sequence[Predicted]) -> dict[str, Any]:
    """What the ranks are told to run: no more than JSON and torch can say.

    Args:
        predictions: of the layouts to run: they say which layers a stage holds and, where torch has none, the schedule.
    """
    from simpar.live.cluster_layouts import HAS_CLASS

    shapes = {}
    for name, table in setup.models.items():
        plain = dict(table)
        if table.get("kind") == "mlp":
            plain.setdefault("bias", True)
        else:
            plain.setdefault("moe", None)
        shapes[name] = plain
    return {
        "precision": setup.precision, "models": shapes, "training": dict(setup.training),
        "layouts": [p.layout.as_json() for p in predictions],
        "stage_layers": {p.layout.name: [stage.count for stage in p.priced.layout.stages] for p in predictions},
        "schedules": {
            p.layout.name: p.schedule_csv for p in predictions if p.layout.pp > 1 and p.layout.schedule not in HAS_CLASS
        },
    }  # fmt: skip
