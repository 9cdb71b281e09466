"""Families that share one thing with no other: positions among the products, adapters by language, two stacks run in turns."""

from __future__ import annotations

from typing import Any

from simpar.model.bert import Bert
from simpar.model.decoder import Decoder
from simpar.model.family import Weights
from simpar.model.pieces import in_turn, linear, lookup, matrix, norm_extra, vector
from simpar.specs.architecture import SublayerSpec
from simpar.specs.mixers import AttentionSpec, FeedForwardSpec, WeightSpec


class RemBert(Bert):
    """A narrow embedding at the input, a wide one of its own before the logits."""

    def outside(self) -> dict[str, Any]:
        fields, h, rows = super().outside(), self.hidden, self.vocabulary()
        narrow, wide = fields["embedding_size"] or h, self.k.number("output_embedding_size", default=1664)
        kept = tuple(w for w in fields["extra"] if not w.name.startswith("head_"))
        dense = linear("head_dense", h, wide)
        rest = (matrix("head_rest", wide - narrow, rows),) if wide > narrow else ()
        return {**fields, "tie_word_embeddings": False, "extra": (*kept, dense, norm_extra("head_norm", "layernorm", wide), *rest)}


class RocBert(Bert):
    """Embeddings of a character's sound and shape beside that of its meaning."""

    def tables(self, width: int) -> Weights:
        k, joined, found = self.k, self.hidden, list(super().tables(width))
        concatenated = k.get("concat_input", default=True)
        for name in ("pronunciation", "shape"):
            rows, wide = k.number(f"{name}_vocab_size"), k.number(f"{name}_embed_dim")
            found.append(lookup(name, rows, wide))
            joined += wide if k.get(f"enable_{name}", default=True) else 0
        if concatenated:
            found.append(linear("joined", joined, self.hidden))
        return tuple(found)


class Xmod(Bert):
    """An adapter for each language in every layer, of which a token meets one."""

    def final_norm(self) -> bool:
        return self.layout(0) == "pre"

    def layer_extra(self, i: int) -> Weights:
        k, h = self.k, self.hidden
        languages, inner = len(k.get("languages", default=["en_XX"])), h // k.get("adapter_reduction_factor", default=2)
        adapters: list[WeightSpec] = [
            linear(f"adapter_{n}", a, b, copies=languages, uses=1.0) for n, a, b in (("down", h, inner), ("up", inner, h))
        ]
        if k.get("adapter_layer_norm", default=False):
            adapters.append(norm_extra("adapter_norm", "layernorm", h))
        return tuple(adapters)


class TrOcr(Decoder):
    """A decoder that attends the patches of a line of text: 24 x 24 of an image of 384 pixels, and a class token."""

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        own = self.attention_fields(i)
        width = self.k.get("cross_attention_hidden_size", default=None)
        self.k.note("no encoder is given: 577 image tokens are attended")
        over = {**own, "cross": True, "causal": False, "keys": 577, **({"kv_hidden_size": width} if width else {})}
        return in_turn(AttentionSpec(**own), AttentionSpec(**over), self.mlp(i), norm="post")

    def outside(self) -> dict[str, Any]:
        fields = super().outside()
        learned = self.k.get("use_learned_position_embeddings", default=True)
        normed = self.k.get("layernorm_embedding", default=True)
        kept = tuple(w for w in fields["extra"] if (w.name != "position" or learned) and (w.name != "embedding_norm" or normed))
        return {**fields, "extra": kept}


class Looped(Decoder):
    """Layers run more than once by the same weights: `order` names the layer that runs at each depth."""

    order: list[str]

    def sublayers(self, i: int) -> tuple[SublayerSpec, ...]:
        steps = enumerate(super().sublayers(i))
        return tuple(step.model_copy(update={"shared_weights": f"{self.order[i]}_{n}"}) for n, step in steps)


class HrmText(Looped):
    """Two stacks run in turns (HRM): `H_cycles` times, the low one `L_cycles` times and the high one once, by the same weights."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        cycles, low = keys.number("H_cycles", default=2), keys.number("L_cycles", default=3)
        each = keys.get("num_layers_per_stack", default=self.num_layers)  # where it stands, num_hidden_layers counts the passes
        self.order = [f"{name}_{n}" for _ in range(cycles) for name in (*["low"] * low, "high") for n in range(each)]
        self.num_layers = len(self.order)
        self.types = ["full_attention"] * self.num_layers


class Ouro(Looped):
    """All layers run `total_ut_steps` times, each pass behind the final norm and a gate that may end them."""

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        passes = keys.number("total_ut_steps", default=4)
        self.order = [f"layer_{n}" for n in range(self.num_layers)] * passes
        self.types, self.num_layers = self.types * passes, self.num_layers * passes


class Dory(Looped):
    """nGPT's scaled vectors instead of norms with weights; all but the first and the last layers run `n_recurrent_loops` times.

    Files count the attention and the feed-forward of a layer as two.
    """

    def __init__(self, keys: Any, family: Any) -> None:
        super().__init__(keys, family)
        half = 2 if "mlp" in self.types else 1
        first, last = (keys.get(name, default=8) // half for name in ("n_input_layers", "n_output_layers"))
        kinds = self.types[::half]
        if first + last > len(kinds):
            keys.violate("n_input_layers", first * half, f"and n_output_layers are more than the {len(kinds) * half} layers")
            first = last = 0
        core = list(range(first, len(kinds) - last)) * keys.number("n_recurrent_loops", default=2)
        runs = (*range(first), *core, *range(len(kinds) - last, len(kinds)))
        self.order = [f"layer_{n}" for n in runs]
        self.num_layers, self.types = len(runs), [kinds[n] for n in runs]

    def mlp(self, i: int) -> FeedForwardSpec:
        mlp = super().mlp(i)
        return mlp.model_copy(update={"extra": (vector("scales", 2 * mlp.width + 2 * self.hidden),)})
