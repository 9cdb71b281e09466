"""From a run's model columns to a transformer spec."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_machine import CannotExpress
from simpar.evidence.row_values import Row, denied
from simpar.model.huggingface import read
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.framework_run import Conventions
from simpar.specs.models_io import load_model, model_names

GPT2_VOCAB: Final = 50257
LLAMA_VOCAB: Final = 32000

_GPT2: Final = {"gated_mlp": False, "norm": "layernorm", "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
MLP: Final[dict[str, dict[str, Any]]] = {
    "swiglu": {"gated_mlp": True, "activation": "silu", "norm": "rmsnorm"},
    "geglu": {"gated_mlp": True, "activation": "gelu", "norm": "rmsnorm"},
    "squared_relu": {"gated_mlp": False, "activation": "squared_relu", "norm": "layernorm"},
    "gelu": {**_GPT2, "activation": "gelu"},
    "gelu_new": {**_GPT2, "activation": "gelu_new"},
    "relu": {"gated_mlp": False, "activation": "relu", "norm": "layernorm", "mlp_bias": True},
}  # fmt: skip
"""First word of mlp_type -> what goes with it in the published models of that kind; gelu_new: written out in elementary kernels."""
_OF_GPT2: Final = ("gelu", "gelu_new")

_FAMILIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (r"qwen-?(1\.5|2)", {"attention_bias": True}),
    (r"qwen-?3|olmo-?[23]", {"qk_norm": True}),
    (r"gemma-?2|grok", {"block_norms": 4}),
    (r"gpt-oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "swiglu_limit": 7.0}),
)
"""Pattern in model_name -> fields (config.json of the published checkpoints)."""


_OWN_CODE: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (r"gpt-?2(?![.\d])", {"activation": "gelu_new", "dropout": 0.1}),
    (r"gpt-?neo(?!-?x)", {"activation": "gelu_new"}),
    (r"\bopt-?\d", {"dropout": 0.1}),
)
"""Pattern in model_name -> what transformers' code of the published checkpoint does (config.json: activation_function, resid_pdrop,
dropout) and columns that say "gelu" do not."""

_POSITIONS: Final = (("nope", "none"), ("absolute", "learned"))
"""Other words for positions."""

_OTHER: Final = re.compile(
    r"diffusion|\bdit\b|unet|\bcnn\b|resnet|dlrm|encoder|\bbert\b|\bt5\b|\bvlm\b|\bvision\b|\bvit\b", re.IGNORECASE
)
"""In arch: what columns cannot describe, or not as text."""

HYBRID: Final = re.compile(r"hybrid|mamba|rwkv|state.space|\bssm\b|\bsparse.attention|\b[cdn]sa\b", re.IGNORECASE)
"""In arch: layers that columns cannot describe; attention to chosen keys alone is priced a multiple too long as whole attention."""
DIFFUSION: Final = re.compile(r"diffusion|\b(?:mm)?dit\b", re.IGNORECASE)
"""In arch: transformers whose layers only a shipped model of their name describes."""
SHIPPED: Final = "shipped_model"
"""Column of a completed row: the shipped model that it names and whose layers it has."""


def model_of(row: Row) -> tuple[dict[str, Any], list[str]]:
    """The table of a TransformerSpec and what was assumed.

    Raises:
        CannotExpress: not a pure transformer, or a dimension is missing.
    """
    arch = str(row.get("arch") or "dense")
    if HYBRID.search(arch):
        raise CannotExpress(f"{arch}: layers that no shipped model of the row's name and size describes (`simpar models`)")
    text_encoder = encodes(row)
    if not text_encoder and _OTHER.search(arch):
        raise CannotExpress(f"not a transformer of text: {arch}")
    notes: list[str] = []
    needed = [k for k in ("layers", "hidden", "heads") if not row.get(k)]
    if not row.get("ffn") and not row.get("moe_ffn"):
        needed.append("ffn")
    if needed:
        raise CannotExpress(f"model dimensions not stated: {', '.join(needed)}")
    if not row.get("seq_len"):
        raise CannotExpress("sequence length not stated")
    if text_encoder:
        return encoder_of(row), ["an encoder of text: BERT's layers"]
    heads = int(row["heads"])
    if not re.search(r"swiglu|silu|geglu|relu|gelu", _mlp_text(row)):
        notes.append(f"feed-forward {row['mlp_type']!r} unknown: swiglu")
    table: dict[str, Any] = {
        "kind": "transformer",
        "name": str(row.get("model_name") or ""),
        "hidden_size": int(row["hidden"]),
        "num_hidden_layers": int(row["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(row.get("kv_heads") or heads),
        "head_dim": int(row.get("head_dim") or row["hidden"] // heads),
        "intermediate_size": int(row.get("dense_ffn") or row.get("ffn") or row["moe_ffn"]),
        "vocab_size": _vocab(row, notes),
        "max_position_embeddings": int(row["seq_len"]),
        "tie_word_embeddings": bool(row.get("tied_embeddings", _style(row) in _OF_GPT2)),
        **MLP[_style(row)],
        **_position(row),
    }
    for pattern, fields in _FAMILIES:
        if re.search(pattern, str(row.get("model_name") or ""), re.IGNORECASE):
            table |= fields
    if "bias" in str(row.get("mlp_type") or ""):
        table["mlp_bias"] = True
    if "parallel block" in arch:
        table["parallel_block"] = True
    if (layers := _by_layer(row)) is not None:
        return layers, notes
    table |= _window(row, notes)
    if row.get("moe_experts"):
        table["moe"] = _moe(row)
    if "mla" in arch or row.get("mla"):
        table["mla"] = _mla(row)
    if row.get("mtp_layers"):
        table["num_nextn_predict_layers"] = int(row["mtp_layers"])
    return table, notes


def in_its_own_code(model: dict[str, Any], conventions: Conventions) -> dict[str, Any]:
    """`model` with what its published code does beyond the columns, where a framework runs that code.

    >>> from simpar.specs.framework import framework
    >>> gpt = {"kind": "transformer", "name": "gpt2-medium", "activation": "gelu"}
    >>> [in_its_own_code(gpt, framework(name).conventions)["activation"] for name in ("transformers", "torch-autocast")]
    ['gelu_new', 'gelu']
    """
    if not conventions.model_dropout or model.get("kind") != "transformer":
        return model
    own = next((own for pattern, own in _OWN_CODE if re.search(pattern, str(model["name"]), re.IGNORECASE)), {})
    return {**model, **{key: value for key, value in own.items() if key != "activation" or model["activation"] == "gelu"}}


def _style(row: Row) -> str:
    text = re.sub(r"relu\^?2|squared relu", "squared_relu", _mlp_text(row))
    words = re.findall(r"swiglu|geglu|squared_relu|gelu_new|gelu|relu", text)
    return words[0] if words else "swiglu"


def _mlp_text(row: Row) -> str:
    return str(row.get("mlp_type") or "swiglu").lower()


def _position(row: Row) -> dict[str, Any]:
    stated = str(row.get("position") or "").lower()
    for word, position in (*((word, word) for word in ("rope", "learned", "alibi", "relative", "none")), *_POSITIONS):
        if stated.startswith(word):
            return {"position": position}
    return {"position": "learned" if _style(row) in _OF_GPT2 else "rope"}


def _vocab(row: Row, notes: list[str]) -> int:
    vocab = row.get("vocab")
    if not vocab:
        vocab = GPT2_VOCAB if _style(row) in _OF_GPT2 else LLAMA_VOCAB
        notes.append(f"vocabulary not stated: {vocab}")
    return int(vocab)


def _by_layer(row: Row) -> dict[str, Any] | None:
    """The shipped model of the row's name where layers differ in their windows, with the row's vocabulary; none = no such model."""
    name = str(row.get("model_name") or "").lower()
    if not isinstance(row.get("attn_window"), str) or name not in model_names():
        return None
    model = load_model(name)
    if not isinstance(model, ArchitectureSpec) or len(model.stacks) != 1:
        return None
    stack = model.stacks[0]
    if (stack.hidden_size, len(stack.pattern)) != (int(row["hidden"]), int(row["layers"])):
        return None
    table = model.model_dump(mode="json", exclude_defaults=True, exclude={"published_parameters", "source"})
    scaled = str(row.get("position") or "").lower().startswith("yarn")
    for layer in table["stacks"][0]["layers"].values():
        for part in (part for sublayer in layer["sublayers"] for part in sublayer["branches"]):
            part["kind"] = "experts" if "num_experts" in part else "attention"
            if part.get("rope_factor"):
                part["rope_factor"] = scaled
    return {**table, "kind": "layers", "vocab_size": int(row.get("vocab") or model.vocab_size)}


def _window(row: Row, notes: list[str]) -> dict[str, Any]:
    stated = row.get("attn_window")
    if not stated:
        return {}
    if re.match(r"\s*(?:none|no|full|off)\b", str(stated), re.IGNORECASE):
        return {}
    alone = re.fullmatch(r"\D*?(\d+)\s*(?:tokens?)?", str(stated).strip())
    if alone and not re.search(r"every|alternat|other|\d+ layers", str(stated), re.IGNORECASE):
        return {"sliding_window": int(alone[1])}
    notes.append(f"attention window {stated!r} taken as full attention")
    return {}


def _moe(row: Row) -> dict[str, Any]:
    layers, dense = int(row["layers"]), int(row.get("moe_dense_layers") or 0)
    table: dict[str, Any] = {
        "num_experts": int(row["moe_experts"]),
        "num_experts_per_tok": int(row.get("moe_topk") or 1),
        "moe_intermediate_size": int(row.get("moe_ffn") or row["ffn"]),
        "shared_expert_intermediate_size": int(row.get("moe_shared_ffn") or 0),
    }
    if dense and dense * 2 == layers:
        table["moe_layer_freq"] = 2  # every other layer dense (Llama 4 Maverick, GLaM)
    elif dense:
        table["first_k_dense_replace"] = dense
    groups = re.search(r"node-limited (\d+)", str(row.get("moe_routing") or ""))
    if groups:
        table |= {"n_group": 2 * int(groups[1]), "topk_group": int(groups[1])}
    if row.get("mla"):
        table["router_bias"] = True
    if re.search(r"llama-?4", str(row.get("model_name") or ""), re.IGNORECASE):
        table["transformers_class"] = "every"
    return table


MLA_FIELDS: Final = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim",
    "v": "v_head_dim",
}  # fmt: skip
_LATENT: Final = re.compile(r"\b(q_lora|kv_lora|qk_nope|qk_rope|v)(?:_rank|_head_dim|_dim)?\W{0,3}(\d+)")


def latent_ranks(text: str) -> dict[str, int]:
    """The ranks and head sizes of a latent attention in words: this schema's, config.json's, or heads as "qk 128+64".

    >>> latent_ranks("kv_lora_rank=512, qk 128+64, v 128")
    {'kv_lora': 512, 'v': 128, 'qk_nope': 128, 'qk_rope': 64}
    """
    found = {name: int(value) for name, value in _LATENT.findall(text)}
    if heads := re.search(r"\bqk\W{0,3}(\d+)\s*\+\s*(\d+)", text):
        found = {**found, "qk_nope": int(heads[1]), "qk_rope": int(heads[2])}
    return found


def _mla(row: Row) -> dict[str, int]:
    found = latent_ranks(str(row.get("mla") or ""))
    if missing := [name for name in MLA_FIELDS if name not in found and name != "q_lora"]:
        raise CannotExpress(f"ranks of the multi-head latent attention not stated: {', '.join(missing)}")
    return {MLA_FIELDS[name]: value for name, value in found.items()}


_ENCODER: Final = re.compile(r"(?<![a-z])(?:encoder(?:[- ]only)?|(?:ro)?bert(?:[- ](?:base|large))?)(?![a-z])", re.IGNORECASE)
_OTHER_ENCODER: Final = re.compile(
    r"encoder[- /]+decoder|vision|\bvit\b|audio|speech|whisper|\bclip\b|modern|nomic|deberta|\bt5\b|conv|cross", re.IGNORECASE
)
"""Encoders of something else, and those whose layers are not BERT's."""
_PRETRAINS: Final = re.compile(r"pre-?train|masked|\bmlm\b", re.IGNORECASE)
BERT_VOCAB: Final = {"bert": 30522, "roberta": 50265}
"""Words of the published checkpoints (config.json)."""


def encodes(row: Row) -> bool:
    """Whether `row` is of an encoder of text with BERT's layers: its arch says so, and neither it nor the name says another.

    >>> encodes({"arch": "encoder", "model_name": "BERT-large"}), encodes({"arch": "encoder-decoder"})
    (True, False)
    """
    arch = str(row.get("arch") or "")
    return not denied(arch) and bool(_ENCODER.search(arch)) and not _OTHER_ENCODER.search(f"{arch} {row.get('model_name') or ''}")


def encoder_of(row: Row) -> dict[str, Any]:
    """The table of an ArchitectureSpec: learned positions, norms behind the blocks, biases, a masked-language head in
    pre-training and a pooler alone in fine-tuning, whose own head is of some classes (transformers modeling_bert.py).

    Args:
        row: columns layers, hidden, heads, ffn and seq_len are there.
    """
    kind = "roberta" if re.search("roberta", f"{row.get('arch')} {row.get('model_name')}", re.IGNORECASE) else "bert"
    head = _PRETRAINS.search(str(row.get("task") or "pretrain"))
    config = {
        "model_type": kind, "architectures": ["BertForMaskedLM" if head else "BertModel"], "hidden_act": "gelu",
        "hidden_size": int(row["hidden"]), "num_hidden_layers": int(row["layers"]), "num_attention_heads": int(row["heads"]),
        "intermediate_size": int(row["ffn"]), "vocab_size": int(row.get("vocab") or BERT_VOCAB[kind]),
        "max_position_embeddings": max(512, int(row["seq_len"])), "type_vocab_size": 2 if kind == "bert" else 1,
        "hidden_dropout_prob": 0.1,
    }  # fmt: skip
    model = read(config, file="the row's columns")
    table = model.model_dump(mode="json", exclude_none=True, exclude={"published_parameters", "source", "notes"})
    return {**table, "kind": "layers", "name": str(row.get("model_name") or kind)}
