"""What a row leaves out and follows from the rest of it, or from the model it names.

Nothing here guesses: a size that neither arithmetic nor a published model gives stays missing, and the rule that needs it says so.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, Final

from simpar.evidence.row_model import DIFFUSION, HYBRID, MLA_FIELDS, MLP, SHIPPED, latent_ranks
from simpar.evidence.row_values import Row
from simpar.model.ledger import active_parameters, total_parameters
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, preset_described

RATE_ALONE: Final = "rate_alone"
"""Column of a completed row that states a rate per GPU and no batch: the global batch that it has is of micro-batches of one."""
RATES: Final = (
    "tokens_per_s_per_gpu_best", "tokens_per_s_per_gpu", "tokens_per_s_per_gpu_from_flops", "tokens_per_s", "samples_per_s",
    "samples_per_s_per_gpu",
)  # fmt: skip
"""Columns that say how fast a run is whatever its batch, the surest first."""
FLOP_RATES: Final = ("tflops_per_gpu", "mfu")
"""Columns that say so where it is known what they count."""
MICRO_BATCHES_A_STAGE: Final = 8
"""Of a pipeline whose batch is not stated, for each of its ranks: the median over the sources of validation/runs, and what a third
of them have. One alone would leave all ranks but one idle."""
MOST_MICRO_BATCHES: Final = 8192
"""A step of more is a slip of units: a batch counted in tokens."""
_REPLICATED: Final = re.compile(r"\bDDP\b|distributed ?data ?parallel", re.IGNORECASE)
"""In a framework's name: every rank holds the whole model."""
NEARLY: Final = 0.02
"""How far a time and a rate, both rounded, may be apart from a whole batch."""
_DIMENSIONS: Final = ("layers", "hidden", "heads")
_WIDTHS: Final = ("hidden", "heads", "ffn", "moe_experts")
"""Dimensions that tell a model from another of its name; one that has them is that model cut or grown in depth."""
_SPELLED: Final = (
    (r"deepseek-r1-distill-qwen-(?=(7|14|32)b)", "qwen2.5-"),  # that of 1.5B has a head of its own
    (r"deepseek-r1-distill-llama-", "llama3.1-"),
    (r"(?<![a-z])(?<!code-)(open-?llama|vicuna|alpaca|wizardlm|llama)-(v\d(\.\d)?-)?(?=(7|13)b)", "llama2-"),
    (r"deepseek-?v3-(?=16b)", "deepseek-v2-lite-"),  # torchtitan models/deepseek_v3, "16B"
    (r"flux(\.?1)?-\[?(dev|schnell)\]?", "flux-dev"),  # FLUX.1 [schnell] lacks the guidance embedding alone
    (r"gemma-([23])-", r"gemma\1-"),
    (r"olmo-2-(1124-)?", "olmo2-"),
    (r"nemotron-4-", "nemotron4-"),
    (r"(?<![a-z])(mistral|zephyr)-7b", "mistral-7b-v0.3"),
    (r"qwen2(\.5)?-((coder|math)-)?(?=\d)", "qwen2.5-"),
    (r"stable-diffusion-(?=3)", "sd"),
    (r"wan-?2\.[12]-(t2v-)?(?=14b)", "wan-t2v-"),
)
"""Names of models -> those of shipped ones of the same dimensions (config.json at Hugging Face; vocabularies within 3 %)."""
_SIZE: Final = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([bt])(?![a-z\d])")
"""In a model's name: its parameters, total or (apart from the A of "A3B") active."""
_SAME_SIZE: Final = 0.15
"""How far a size in a name may be from the parameters counted: the 7B of Llama 2 has 6.7."""
_WINDOWS: Final = ((r"mistral-7b-(.*-)?v0\.1|zephyr-7b", 4096),)
"""Names of models -> the window of their attention, which the shipped one lacks (sliding_window of their config.json)."""


def completed(row: Row) -> tuple[dict[str, Any], list[str]]:
    """`row` with what follows from it, and a note on each addition."""
    notes: list[str] = []
    unlike = any(layers.search(str(row.get("arch") or "")) for layers in (HYBRID, DIFFUSION))
    found = dict(row)
    found = (_with_shipped_layers if unlike else _with_dimensions)(found, notes)
    found = _with_layout(found, notes)
    _with_batch(found, notes)
    return found, notes


def _with_batch(row: dict[str, Any], notes: list[str]) -> None:
    """A global batch where none is stated: of the micro-batches that are, or of as many as a step usually has, for a rate."""
    micro, pieces, ranks, pp = (int(row.get(key) or 0) for key in ("micro_batch", "grad_accum", "dp", "pp"))
    stated, length = int(row.get("global_batch") or 0), int(row.get("seq_len") or 0)
    if ranks and length and stated // ((micro or 1) * ranks) > MOST_MICRO_BATCHES and stated % length == 0:
        row["global_batch"] = stated // length
        notes.append(f"global batch of {stated} taken as tokens: {row['global_batch']} sequences")
    if row.get("global_batch") or not ranks or not ((micro and pieces) or any(row.get(key) for key in (*RATES, *FLOP_RATES))):
        return
    if not (micro and pieces) and (batch := _batch_of_step(row, (micro or 1) * ranks)):
        row["global_batch"] = batch
        notes.append(f"global batch not stated: {batch}, from step time and rate")
        return
    count = pieces or (MICRO_BATCHES_A_STAGE * pp if pp > 1 else 1)
    row["global_batch"] = (micro or 1) * count * ranks
    if micro and pieces:
        notes.append(f"global batch not stated: {row['global_batch']}, micro batch x accumulation x dp")
        return
    each = "one micro-batch" if count == 1 else f"{count} micro-batches"
    notes.append(f"batch not stated: {each}{f' of {micro}' if micro else ''} per rank, for a rate")
    if not micro:
        row[RATE_ALONE] = True


def _batch_of_step(row: Row, multiple: int) -> int | None:
    """Sequences that a step of the stated time takes at the stated rate, where that is nearly a multiple of what all ranks take."""
    seconds, gpus = row.get("step_time_s_best") or row.get("step_time_s"), row.get("n_gpus")
    key = next((key for key in RATES if row.get(key)), None)
    if not seconds or not gpus or key is None or (key.startswith("tokens") and not row.get("seq_len")):
        return None
    sequences = row[key] * seconds * (gpus if "per_gpu" in key else 1) / (row["seq_len"] if key.startswith("tokens") else 1)
    batch = multiple * round(sequences / multiple)
    return batch if batch and abs(sequences / batch - 1) <= NEARLY else None


def _with_layout(row: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The one of tensor, pipeline and data ranks and GPUs that is missing follows from the others; where those that are stated take
    all GPUs, the rest are 1.

    A run that shards all its weights, or has DistributedDataParallel around them, and says nothing of other dimensions has none.
    """
    replicated = _REPLICATED.search(str(row.get("framework") or "")) is not None
    if row.get("fsdp") or row.get("zero_stage") == 3 or replicated:
        assumed = [key for key in ("tp", "pp") if not row.get(key)]
        row |= dict.fromkeys(assumed, 1)
        if assumed:
            beside = "DistributedDataParallel" if replicated else "fully sharded data parallelism"
            notes.append(f"layout not stated: {', '.join(assumed)} 1 beside {beside}")
    missing = [key for key in ("tp", "pp", "dp", "n_gpus") if not row.get(key)]
    known = prod(int(row.get(key) or 1) for key in ("tp", "pp", "cp", "dp"))
    if not missing:
        _with_data_ranks(row, notes)
    elif row.get("n_gpus") and known == int(row["n_gpus"]):
        row |= dict.fromkeys(missing, 1)
        why = "there is one GPU" if known == 1 else "the others take all GPUs"
        notes.append(f"layout not stated: {', '.join(missing)} 1, as {why}")
        return row
    if len(missing) != 1:
        return row
    if missing == ["n_gpus"]:
        row["n_gpus"] = known
        notes.append(f"number of GPUs not stated: {known}, the product of the degrees")
    elif int(row["n_gpus"]) % known == 0:
        row[missing[0]] = int(row["n_gpus"]) // known
        notes.append(f"{missing[0]} not stated: {row[missing[0]]}, from the number of GPUs")
    return row


def _with_data_ranks(row: dict[str, Any], notes: list[str]) -> None:
    """Data ranks that count expert ranks apart, or those of a split sequence in, as this schema counts them."""
    gpus, others, ranks = int(row["n_gpus"]), int(row["tp"]) * int(row["pp"]), int(row["dp"])
    cp, ep = int(row.get("cp") or 1), int(row.get("ep") or 1)
    if others * cp * ranks == gpus:
        return
    if others * cp * ranks * ep == gpus:
        row["dp"] = ranks * ep
        notes.append(f"dp {ranks} beside ep {ep}: {row['dp']} data ranks")
    elif others * ranks == gpus and ranks % cp == 0:
        row["dp"] = ranks // cp
        notes.append(f"dp {ranks} with those of cp {cp}: {row['dp']} data ranks")


def _with_dimensions(row: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if not row.get("heads") and row.get("hidden") and row.get("head_dim"):
        row["heads"] = max(1, int(row["hidden"]) // int(row["head_dim"]))
        notes.append(f"heads not stated: {row['heads']}, the hidden size over the head size")
    stated = latent_ranks(str(row.get("mla") or ""))
    latent = row.get("mla") or "mla" in str(row.get("arch") or "")
    ranks = not latent or all(name in stated for name in MLA_FIELDS if name != "q_lora")
    complete = all(row.get(key) for key in _DIMENSIONS) and (row.get("ffn") or row.get("moe_ffn")) and ranks
    name = None if complete else _named(row)
    named = load_model(name) if name else None
    known = model_columns(named) if isinstance(named, TransformerSpec) else {}
    if name and not known and not any(row.get(key) for key in (*_DIMENSIONS, "ffn")):
        return _with_shipped_layers(row, notes)
    if not known or any(row.get(key) not in (None, 0, known.get(key)) for key in _WIDTHS):
        return row  # another model under that name
    window = next((size for pattern, size in _WINDOWS if re.search(pattern, _spelled(row))), None)
    if window and not row.get("attn_window"):
        row["attn_window"] = window
    depth = int(row.get("layers") or known["layers"])
    notes.append(f"model dimensions not stated: those of {name}{f', with {depth} layers' if depth != known['layers'] else ''}")
    ranked = {**latent_ranks(str(known.get("mla") or "")), **stated}
    return {**known, **row} | ({} if ranks else {"mla": ", ".join(f"{name} {size}" for name, size in ranked.items())})


def _with_shipped_layers(row: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Layers that are not alike are those of the shipped model that the row names, unless its sizes are others."""
    name = _named(row)
    model = load_model(name) if name else None
    if not isinstance(model, ArchitectureSpec) or sum(not stack.tower for stack in model.stacks) != 1:
        return row
    known = {"layers": model.num_layers, "hidden": model.text.hidden_size, "vocab": model.vocab_size}
    if any(row.get(key) not in (None, 0, size) for key, size in known.items()):
        return row
    notes.append(f"layers that are not alike: those of {name}")
    return {**row, **known, SHIPPED: name}


def _named(row: Row) -> str | None:
    """The shipped model with the dimensions of the one that `row` names, or None."""
    text = _spelled(row)
    if not re.search(r"moe|expert", text):
        for pattern, spelled in _SPELLED:
            text = re.sub(pattern, spelled, text)
    name = preset_described(text)
    return name if name and _of_its_size(text, name) else None


def _of_its_size(text: str, name: str) -> bool:
    """Whether the sizes in `text`, a model's name, agree with the shipped model `name`: a DeepSeek-V3 of 16B is a smaller one."""
    stated = {*_SIZE.findall(text)} - {*_SIZE.findall(name)}
    if not stated:
        return True
    sizes = [float(size) * (1e12 if unit == "t" else 1e9) for size, unit in stated]
    model = load_model(name)
    own = (total_parameters(model), active_parameters(model))
    return any(abs(size / parameters - 1) <= _SAME_SIZE for size in sizes for parameters in own)


def _spelled(row: Row) -> str:
    """The model's name in lower case, words joined by dashes."""
    return re.sub(r"[\s_]+", "-", str(row.get("model_name") or "").lower())


def model_columns(model: TransformerSpec) -> dict[str, Any]:
    """The columns of a row that describe `model`."""
    columns: dict[str, Any] = {
        "layers": model.num_hidden_layers, "hidden": model.hidden_size, "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads, "head_dim": model.head_dim, "ffn": model.intermediate_size,
        "vocab": model.vocab_size, "mlp_type": _mlp_word(model), "position": model.position,
        "tied_embeddings": model.tie_word_embeddings,
    }  # fmt: skip
    if (moe := model.moe) is not None:
        columns |= {
            "moe_experts": moe.num_experts, "moe_topk": moe.num_experts_per_tok, "moe_ffn": moe.moe_intermediate_size,
            "moe_shared_ffn": moe.shared_expert_intermediate_size, "moe_dense_layers": moe.first_k_dense_replace,
            "dense_ffn": model.intermediate_size,
        }  # fmt: skip
    if (mla := model.mla) is not None:
        stated = {word: getattr(mla, field) for word, field in MLA_FIELDS.items()}
        columns["mla"] = ", ".join(f"{word} {rank}" for word, rank in stated.items() if rank)
    return {key: value for key, value in columns.items() if value is not None}


def _mlp_word(model: TransformerSpec) -> str:
    if model.gated_mlp:
        return "geglu" if "gelu" in model.activation else "swiglu"
    return model.activation if model.activation in MLP else "gelu"
