"""From a run's model columns to an encoder of text with BERT's layers."""

from __future__ import annotations

import re
from typing import Any, Final

from simpar.evidence.row_values import Row, denied
from simpar.model.huggingface import read

_ENCODER: Final = re.compile(r"(?<![a-z])(?:encoder(?:[- ]only)?|(?:ro)?bert(?:[- ](?:base|large))?)(?![a-z])", re.IGNORECASE)
_OTHER: Final = re.compile(
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
    return not denied(arch) and bool(_ENCODER.search(arch)) and not _OTHER.search(f"{arch} {row.get('model_name') or ''}")


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
