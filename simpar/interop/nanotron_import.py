"""nanotron's YAML (config classes of 2024 to 2026, src/nanotron/config) read into a scenario."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Unpack

from pydantic import ConfigDict, Field

from simpar.boundary import parse_yaml, reader
from simpar.errors import InputError, Violation
from simpar.interop.carried import Imported, Outside, Reading, settled_on_gpus
from simpar.interop.resolved import inner
from simpar.specs.base import Spec, validate
from simpar.specs.counts import split_by_cost
from simpar.specs.model import TransformerSpec

Positive = Annotated[int, Field(gt=0)]
ENGINES: Final = {"1f1b": "1f1b", "gpipe": "afab"}
DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHAPE: Final = (
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "tie_word_embeddings", "vocab_size", "attention_bias",
)  # fmt: skip
_KIND: Final = re.compile(r"is_\w+_config")
_KINDS: Final = ("is_llama_config", "is_qwen2_config")
_USUAL: Final[dict[str, Any]] = {
    "_attn_implementation": "flash_attention_2", "_use_doc_masking": False, "flex_attention_mask": None, "no_rope_layer": None,
    "z_loss_enabled": False,
}  # fmt: skip
"""Settings of a model that may change a step, and what is taken for them."""


def cost_split(model: TransformerSpec, stages: int) -> tuple[int, ...]:
    """Layers of each stage as nanotron deals them out: matmul weights of a block, and of the head."""
    hidden = model.hidden_size
    block = 4 * model.num_attention_heads * model.head_dim * hidden + 3 * model.intermediate_size * hidden
    return split_by_cost(model.num_hidden_layers, float(block), float(model.vocab_size * hidden), stages)


def placement(*, experts: bool) -> str:
    """The order in which nanotron numbers ranks (parallel/context.py, without and with mixture of experts)."""
    return "tp-cp-ep-pp-dp" if experts else "tp-cp-ep-dp-pp"


class _Table(Spec):
    """A table of the file; what is not read here is nanotron's own business."""

    model_config = ConfigDict(extra="ignore")


class _Parallelism(_Table):
    dp: Positive = 1
    pp: Positive = 1
    tp: Positive = 1
    context_parallel_size: Positive = 1
    expert_parallel_size: Positive = 1
    pp_engine: str | None = None
    tp_mode: str | None = None
    tp_linear_async_communication: bool | None = None
    recompute_layer: bool = False


class _Experts(_Table):
    """What is left out is as in nanotron's class, whatever the model's width."""

    num_experts: Positive = 8
    top_k: Positive = 2
    moe_intermediate_size: Positive = 1408
    enable_shared_expert: bool = False
    shared_expert_intermediate_size: Positive = 5632


class _ModelConfig(_Table):
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    vocab_size: Positive
    num_key_value_heads: Positive | None = None
    max_position_embeddings: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    hidden_act: str = "silu"
    sliding_window_size: Positive | None = None
    moe_config: _Experts | None = None


class _Model(_Table):
    model_config_: _ModelConfig = Field(alias="model_config")
    dtype: str = "bfloat16"
    make_vocab_size_divisible_by: Positive = 1


class _Factory(_Table):
    name: str = "adamW"


class _Optimizer(_Table):
    zero_stage: Annotated[int, Field(ge=0)] = 0
    accumulate_grad_in_fp32: bool = True
    optimizer_factory: _Factory = _Factory()


class _Tokens(_Table):
    micro_batch_size: Positive
    sequence_length: Positive
    batch_accumulation_per_replica: Positive = 1


class _File(_Table):
    """What is read of a configuration (nanotron src/nanotron/config/config.py)."""

    parallelism: _Parallelism
    model: _Model
    tokens: _Tokens
    optimizer: _Optimizer = _Optimizer()


def _warnings(table: dict[str, Any], file: str, accept: Collection[str]) -> list[str]:
    """What may change a step and is not read.

    Raises:
        InputError: what makes another model or step and is not read, where it is not in `accept`.
    """
    config = inner(table, "model", "model_config")
    experts = inner(config, "moe_config")
    layers = experts.get("layers", [-1])
    kinds = [name for name, on in config.items() if on is True and _KIND.fullmatch(name) and name not in _KINDS]
    another: list[tuple[str, Any]] = [(f"model.model_config.{name}", True) for name in kinds]
    if layers not in ([-1], list(range(config.get("num_hidden_layers") or 0))):
        another.append(("model.model_config.moe_config.layers", layers))
    if table.get("doremi"):
        another.append(("doremi", "..."))
    refused = [(name, value) for name, value in another if not {name, "all"} & set(accept)]
    if refused:
        rule = "makes another model or step, and is not read"
        raise InputError(
            [Violation(n, v, rule, f"a scenario by hand, or --accept {n} to go on without it", file) for n, v in refused]
        )
    found = [f"{name} = {value}: left out, as accepted; the model is another one without it" for name, value in another]
    for part, section, usual in (
        (inner(table, "parallelism"), "parallelism", {"tp_recompute_allgather": True}),
        (inner(table, "model"), "model", {"ddp_bucket_cap_mb": 25}),
        (config, "model.model_config", _USUAL),
        (experts, "model.model_config.moe_config", {"token_dispatcher_type": "alltoall"}),
    ):
        for name, value in usual.items():
            if part.get(name) not in (value, None):
                found.append(f"{section}.{name} = {part[name]} is not read; taken as {value}")
    return found


def read_config(text: str, file: str = "", accept: Collection[str] = ()) -> Reading:
    """What a configuration says by itself.

    Args:
        accept: names of what is not read and left out all the same; "all" for every one.

    Raises:
        InputError: no configuration of nanotron, or every key that is missing or of another kind, together.
    """
    table = parse_yaml(text, file or "the configuration")
    if not isinstance(table, dict) or not {"parallelism", "model", "tokens"} <= set(table):
        right = "parallelism, model and tokens"
        raise InputError([Violation("file", file or "-", "is no configuration of nanotron", right)])
    warnings = _warnings(table, file, accept)
    said = validate(_File, {k: v for k, v in table.items() if v is not None or k != "optimizer"}, file=file)
    parallel, tokens, optimizer = said.parallelism, said.tokens, said.optimizer
    gpus = parallel.dp * parallel.pp * parallel.tp * parallel.context_parallel_size
    name = Path(file).stem if file else "imported"
    reading = Reading({"name": name, "framework": "nanotron", "cluster": {"num_gpus": gpus}}, warnings)
    reading.table["model"] = model = _read_model(said.model.model_config_, file)
    if (unit := said.model.make_vocab_size_divisible_by) > 1:
        model["vocab_size"] = -(-model["vocab_size"] // (unit * parallel.tp)) * unit * parallel.tp
    names = {engine: name for name, engine in ENGINES.items()}
    plan: dict[str, Any] = {
        "dp": parallel.dp,
        "pp": parallel.pp,
        "tp": parallel.tp,
        "cp": parallel.context_parallel_size,
        "schedule": names.get((parallel.pp_engine or "afab").lower(), "gpipe"),
        "sequence_parallel": (parallel.tp_mode or "").upper() == "REDUCE_SCATTER" or parallel.tp == 1,
        "overlap_tp": bool(parallel.tp_linear_async_communication) and parallel.tp > 1,
        "zero_stage": optimizer.zero_stage,
        "recompute": "full" if parallel.recompute_layer else "none",
    }
    plan["placement"] = placement(experts="moe" in model)
    if "moe" in model:
        plan |= {"ep": parallel.expert_parallel_size, "etp": 1 if parallel.expert_parallel_size > 1 else parallel.tp}
    if parallel.pp > 1:
        plan["layers_per_stage"] = list(cost_split(validate(TransformerSpec, model, file=file, prefix="model"), parallel.pp))
    reading.table["plan"] = plan
    dtype = {v: k for k, v in DTYPES.items()}.get(said.model.dtype, "bf16")
    reading.table["training"] = {
        "sequence_length": tokens.sequence_length,
        "micro_batch_size": tokens.micro_batch_size,
        "global_batch_size": tokens.micro_batch_size * tokens.batch_accumulation_per_replica * parallel.dp,
        "precision": dtype,
        "optimizer": "sgd" if optimizer.optimizer_factory.name.lower() == "sgd" else "adamw",
        "gradient_dtype": "fp32" if optimizer.accumulate_grad_in_fp32 else dtype,
    }
    return reading


def _read_model(config: _ModelConfig, file: str) -> dict[str, Any]:
    heads = config.num_attention_heads
    if config.hidden_size < heads:
        rule = f"must be at least num_attention_heads ({heads})"
        raise InputError([Violation("model.model_config.hidden_size", config.hidden_size, rule, "a multiple of it", file)])
    found: dict[str, Any] = {name: value for name in SHAPE if (value := getattr(config, name)) is not None}
    found.setdefault("num_key_value_heads", heads)
    found |= {"head_dim": config.hidden_size // heads, "activation": config.hidden_act}
    if config.sliding_window_size:
        found["sliding_window"] = config.sliding_window_size
    if (experts := config.moe_config) is not None:
        found["moe"] = {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.moe_intermediate_size,
        }
        if experts.enable_shared_expert:
            shared = {"shared_expert_intermediate_size": experts.shared_expert_intermediate_size, "shared_expert_gate": True}
            found["moe"] |= shared
    return found


@reader("file", "a configuration of nanotron, YAML")
def load(text: str, *, file: str = "", accept: Collection[str] = (), **outside: Unpack[Outside]) -> Imported:
    """The scenario of a configuration.

    Raises:
        InputError: no such configuration, or rules that the scenario breaks; all together.
    """
    return settled_on_gpus(read_config(text, file, accept), text, file, outside)
