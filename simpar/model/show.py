"""What `simpar models` and `simpar models show` print: parameters, FLOPs and layers of any model."""

from __future__ import annotations

from typing import Any

from simpar.errors import InputError, Violation
from simpar.model.forms import general
from simpar.model.ledger import active_parameters, pattern_of, total_parameters, totals
from simpar.specs.architecture import ArchitectureSpec, TokenModel
from simpar.specs.counts import layer_count
from simpar.specs.mixers import AttentionSpec, LatentAttentionSpec
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model


def describe_model(name_or_path: str, sequence_length: int, *, approximate: bool = False) -> dict[str, Any]:
    """The object of `simpar models show --json` for a preset, a config.json or a TOML table.

    Raises:
        InputError: as `load_model`.
    """
    model = load_model(name_or_path, approximate=approximate)
    found = {"model": name_or_path, "name": model.name, "sequence_length": sequence_length}
    fields = {"kind": model.kind, "fields": model.model_dump(mode="json", exclude_none=True)}
    if not isinstance(model, TokenModel):
        raise InputError(
            [Violation("model", name_or_path, "has no tokens to count FLOPs of", "a transformer or a model of layers")]
        )
    layers = general(model)
    counted = totals(layers, sequence_length)
    notes = list(layers.notes)
    if layers.num_nextn_predict_layers:
        notes.append(f"{layers.num_nextn_predict_layers} modules for multi-token prediction are not counted")
    return {
        **found,
        "parameters": counted.parameters,
        "parameters_without_embeddings": counted.parameters_without_embeddings,
        "active_parameters": counted.active_parameters,
        "forward_flops_per_token": counted.forward_flops_per_token,
        "layers": pattern_of(layers),
        "notes": notes,
        **fields,
    }


def facts(name: str) -> dict[str, Any]:
    """What a person chooses a preset by."""
    model = load_model(name)
    heads: int | None = None
    hidden: int | None = None
    longest: int | None = None
    moe = None
    if isinstance(model, TransformerSpec):
        heads, hidden, longest, moe = model.num_attention_heads, model.hidden_size, model.max_position_embeddings, model.moe
    elif isinstance(model, ArchitectureSpec):
        attention = (b.num_heads for b in model.branches() if isinstance(b, (AttentionSpec, LatentAttentionSpec)))
        heads, hidden, longest, moe = max(attention, default=None), model.text.hidden_size, model.max_position_embeddings, model.moe
    return {
        "name": name, "kind": model.kind, "parameters": total_parameters(model), "active_parameters": active_parameters(model),
        "layers": layer_count(model), "hidden_size": hidden, "heads": heads, "experts": moe.num_experts if moe else None,
        "max_sequence_length": longest,
    }  # fmt: skip
