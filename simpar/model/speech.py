"""Encoders of speech: wav2vec 2.0 and its kin on the waveform, Conformers on a spectrogram."""

from __future__ import annotations

from simpar.model.config_keys import Keys
from simpar.model.family import Family
from simpar.model.pieces import depthwise, encoder_attention, in_turn, linear, lookup, matrix, norm_extra, uniform, vector
from simpar.model.projectors import Weights, gemma3n_embedder
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec
from simpar.specs.mixers import AttentionSpec, CustomSpec, FeedForwardSpec


class Wav2Vec2:
    """Convolutions over the waveform, a grouped convolution for positions, BERT's layers, a head for CTC (also HuBERT)."""

    norm_of_convolutions = "group"
    kind = "audio"
    final_norm = True
    words = 32
    """Of the vocabulary, where the file does not say."""

    def __init__(self, keys: Keys, family: Family) -> None:
        self.file = self.k = keys

    def architecture(self) -> ArchitectureSpec:
        k = self.k
        h, depth = k.size("hidden_size") if k is self.file else k.number("hidden_size"), k.number("num_hidden_layers")
        stack = uniform(
            self.kind, self.layer(h), depth, name="audio", hidden_size=h, norm="layernorm",
            final_norm=self.final_norm,
            extra=(*self.stem(h), *self.adapter(h), linear("head_ctc", h, self.file.number("vocab_size", default=self.words))),
        )  # fmt: skip
        return ArchitectureSpec(head=False, stacks=(stack,))

    def layer(self, h: int) -> LayerSpec:
        k, heads = self.k, self.k.number("num_attention_heads")
        mlp = FeedForwardSpec(width=k.number("intermediate_size"), gated=False, bias=True, activation="gelu")
        norm = "pre" if k.get("do_stable_layer_norm", default=False) else "post"
        steps = in_turn(encoder_attention(heads, h, position="absolute"), mlp, norm=norm)
        return LayerSpec(sublayers=steps, extra=self.gates(h // heads, heads))

    def adapter(self, h: int) -> Weights:
        """What shortens the frames that leave the encoder."""
        return ()

    def gates(self, head_dim: int, heads: int) -> Weights:
        """What a layer holds beside attention and feed-forward."""
        return ()

    def positions(self, h: int) -> Weights:
        """A grouped convolution over time, with its weight norm."""
        k = self.k
        groups, wide = k.number("num_conv_pos_embedding_groups", default=16), k.number("num_conv_pos_embeddings", default=128)
        return (linear("position_convolution", h // groups * wide, h), vector("position_weight_norm", wide))

    def stem(self, h: int) -> Weights:
        """Convolutions (with a norm after the first, or after each), a projection, positions, the masked frame."""
        k = self.k
        widths, taps = k.get("conv_dim", default=[512] * 7), k.get("conv_kernel", default=[10, 3, 3, 3, 3, 2, 2])
        bias, each = (
            bool(k.get("conv_bias", default=False)),
            k.get("feat_extract_norm", default=self.norm_of_convolutions) == "layer",
        )
        found = [linear(f"convolution_{n}", taps[n] * (widths[n - 1] if n else 1), w, bias=bias) for n, w in enumerate(widths)]
        found.append(vector("convolution_norms", 2 * (sum(widths) if each else widths[0])))
        last = widths[-1]
        found += [norm_extra("projection_norm", "layernorm", last)] if k.get("feat_proj_layer_norm", default=True) else []
        found += [linear("projection", last, h), vector("masked_frame", h)]
        return (*found, *self.positions(h))


class WavLM(Wav2Vec2):
    """Relative positions, gated by the token in every layer (Chen et al. 2021, arXiv 2110.13900)."""

    def gates(self, head_dim: int, heads: int) -> Weights:
        gate = linear("position_gate", head_dim, 8, uses=float(heads))
        return (gate, vector("position_gate_scale", heads))

    def positions(self, h: int) -> Weights:
        rows = lookup("relative_positions", self.k.number("num_buckets", default=320), self.k.number("num_attention_heads"))
        return (*super().positions(h), rows)


class Data2VecAudio(Wav2Vec2):
    """Several grouped convolutions for positions, norms after every convolution."""

    norm_of_convolutions = "layer"

    def positions(self, h: int) -> Weights:
        k = self.k
        groups, taps = k.number("num_conv_pos_embedding_groups", default=16), k.number("conv_pos_kernel_size", default=19)
        return (linear("position_convolution", h // groups * taps, h, copies=k.number("num_conv_pos_embeddings", default=5)),)


def conformer_layer(h: int, attention: AttentionSpec, mlp: FeedForwardSpec, inside: Weights) -> LayerSpec:
    """Half a feed-forward, attention, a convolution of the weights `inside`, half a feed-forward, a norm (Gulati et al. 2020, arXiv
    2005.08100)."""
    convolution = CustomSpec(label="convolution", extra=inside)
    return LayerSpec(sublayers=in_turn(mlp, attention, convolution, mlp), extra=(vector("norm_out", 2 * h),))


def gated_convolution(h: int, taps: int, *, bias: bool) -> Weights:
    """A pointwise convolution with a gate, a depthwise one with a norm, a pointwise one."""
    return (
        linear("pointwise_1", h, 2 * h, bias=bias), depthwise("depthwise", taps, h, bias=bias),
        linear("pointwise_2", h, h, bias=bias), vector("convolution_norm", 2 * h),
    )  # fmt: skip


class Wav2Vec2Conformer(Wav2Vec2):
    """wav2vec 2.0's convolutions under a Conformer's layers."""

    kind = "conformer"

    def place(self, h: int) -> Weights:
        """What attention holds for its positions."""
        k, heads = self.k, self.k.number("num_attention_heads")
        match k.get("position_embeddings_type", default="relative"):
            case "relative":
                return (matrix("relative_keys", h, h), vector("relative_biases", 2 * h))
            case "relative_key":
                rows = 1 + k.number("left_max_position_embeddings") + k.number("right_max_position_embeddings")
                return (vector("distances", rows * (h // heads)),)
        return ()

    def layer(self, h: int) -> LayerSpec:
        k = self.k
        attention = encoder_attention(k.number("num_attention_heads"), h, position="relative", extra=self.place(h))
        mlp = FeedForwardSpec(width=k.number("intermediate_size"), gated=False, bias=True)
        return conformer_layer(
            h, attention, mlp, gated_convolution(h, k.number("conv_depthwise_kernel_size", default=31), bias=False)
        )

    def adapter(self, h: int) -> Weights:
        """Strided convolutions that shorten what leaves the encoder; only such as keep its width are read."""
        k = self.k
        taps, stride = k.number("adapter_kernel_size", default=3), k.number("adapter_stride", default=2)
        depth, out = k.number("num_adapter_layers", default=3), k.get("output_hidden_size", default=h)
        if not k.get("add_adapter", default=False):
            return ()
        if out != h:
            k.unknown.append(("output_hidden_size", out, "an adapter of another width than the encoder is left out"))
            return ()
        frames = ((n, stride ** -(n + 1.0)) for n in range(depth))
        return tuple(w.model_copy(update={"uses": share * w.copies}) for n, share in frames for w in self.shortened(h, n, taps))

    def shortened(self, h: int, n: int, taps: int) -> Weights:
        """One layer of the adapter."""
        return (linear(f"adapter_{n}", taps * h, 2 * h),)


class Wav2Vec2Bert(Wav2Vec2Conformer):
    """w2v-BERT 2.0: a Conformer on a spectrogram."""

    final_norm = False

    def stem(self, h: int) -> Weights:
        k = self.k
        bins = k.number("feature_projection_input_dim", default=160)
        masks = k.get("mask_time_prob", default=0.05) or k.get("mask_feature_prob", default=0.0)
        masked = (vector("masked_frame", h),) if masks else ()
        return (norm_extra("projection_norm", "layernorm", bins), linear("projection", bins, h), *masked)

    def shortened(self, h: int, n: int, taps: int) -> Weights:
        """Attention beside a shortened residual, a feed-forward."""
        wide = self.k.number("intermediate_size")
        return (
            vector(f"adapter_{n}_norms", 6 * h), linear(f"adapter_{n}_convolutions", taps * h, 2 * h, copies=2),
            linear(f"adapter_{n}_attention", h, h, copies=4), linear(f"adapter_{n}_up", h, wide),
            linear(f"adapter_{n}_down", wide, h),
        )  # fmt: skip


class Conformer(Wav2Vec2):
    """Feed-forward, attention with relative positions, convolution, feed-forward (Gulati et al. 2020, arXiv 2005.08100), with a
    subsampling stem (Fast Conformer) and a head for CTC.
    """

    kind, final_norm, words = "conformer", False, 1025

    def __init__(self, keys: Keys, family: Family) -> None:
        self.file = keys
        self.k = keys.child("encoder_config", like="parakeet_encoder") or keys

    def layer(self, h: int) -> LayerSpec:
        k = self.k
        heads, bias = k.number("num_attention_heads"), bool(k.get("attention_bias", default=True))
        own = (matrix("relative_keys", h, h), vector("relative_biases", 2 * h))
        kv = k.get("num_key_value_heads", default=heads)
        attention = encoder_attention(heads, h, bias=bias, num_key_value_heads=kv, position="relative", extra=own)
        mlp = FeedForwardSpec(width=k.number("intermediate_size"), gated=False, bias=bias)
        taps, with_bias = k.number("conv_kernel_size", default=9), bool(k.get("convolution_bias", default=True))
        return conformer_layer(h, attention, mlp, gated_convolution(h, taps, bias=with_bias))

    def stem(self, h: int) -> Weights:
        """Convolutions that halve time and frequency, depthwise and pointwise after the first; a projection."""
        k = self.k
        bins, c, taps = k.number("num_mel_bins", default=80), k.number("subsampling_conv_channels", default=256), 9
        halved = k.number("subsampling_factor", default=8).bit_length() - 1
        down = (linear("convolution_1", taps, c), linear("pointwise", c, c, copies=halved - 1))
        taken = depthwise("depthwise", taps, c, bias=True, copies=halved - 1)
        return (*down, taken, linear("subsampled", c * (bins >> halved), h))


def phi4_audio(file: Keys, k: Keys, text: int) -> StackSpec:
    """Phi-4-multimodal's Conformer: gated feed-forwards, convolutions behind a gated pointwise one, a bias of the distance that all
    layers share; two projectors, for sound alone and beside images."""
    h, heads, wide = k.number("hidden_size"), k.number("num_attention_heads"), k.number("intermediate_size")
    c, out, inner = k.number("nemo_conv_channels"), k.number("ext_pw_out_channel"), k.number("depthwise_separable_out_channel")
    bins, halved = k.number("input_size"), k.number("time_reduction").bit_length() - 1
    last = -(-bins // 2**halved)  # of the spectrogram's bins, halved by every convolution and rounded up
    k.meet("nemo_final_size", k.get("nemo_final_size", default=last), last, "input_size / time_reduction")
    fanned = h * k.number("depthwise_multiplier", default=1)
    taken = depthwise("depthwise", k.number("kernel_size"), fanned, bias=True)
    inside = (linear("gate", h, 2 * out), vector("gate_biases", 2 * out), taken, linear("pointwise_1", fanned, inner))
    mlp = FeedForwardSpec(width=wide, bias=True)
    attention = encoder_attention(heads, h, position="relative")
    layer = conformer_layer(h, attention, mlp, (*inside, linear("pointwise_2", h, out)))
    taps = depthwise("stem_depthwise", 9, c, bias=True, copies=halved - 1)
    stem = (linear("stem", 9, c), taps, linear("stem_pointwise", c, c, copies=halved - 1), linear("subsampled", c * last, h))
    distances = 2 * k.number("bias_max_distance", default=1000)
    ends = (linear("projector_1", h, text, copies=2), linear("projector_2", text, text, copies=2))
    return uniform(
        "conformer", layer, k.number("num_blocks"), name="audio", hidden_size=h, norm="layernorm", final_norm=False, tower=True,
        extra=(*stem, lookup("distances", distances, heads), *ends),
    )  # fmt: skip


def gemma4_audio(file: Keys, k: Keys, text: int) -> StackSpec:
    """Gemma 4's Conformer with two matrices behind it."""
    out = k.number("output_proj_dims", default=1536)
    return _gemma_audio(k, (linear("output", k.number("hidden_size"), out), matrix("projector", out, text)))


def gemma3n_audio(file: Keys, k: Keys, text: int) -> StackSpec:
    """The same Conformer in Gemma 3n, behind it a table of hard words, norms and one matrix."""
    return _gemma_audio(k, gemma3n_embedder(file, k, k.number("hidden_size"), text))


def _gemma_audio(k: Keys, behind: Weights) -> StackSpec:
    """Feed-forwards and attention between norms, a windowed attention with projected distances, a gated pointwise convolution
    before the depthwise one; two strided convolutions in front.
    """
    h, heads = k.number("hidden_size"), k.number("num_attention_heads", "conf_num_attention_heads")
    first, second = k.get("subsampling_conv_channels", "sscp_conv_channel_size", default=[128, 32])
    # Gemma 3n's matrix has as many inputs as its file has bins of sound, Gemma 4's as many as its first convolution has channels.
    bins = k.number("input_feat_size", default=first)
    left = k.number("attention_context_left", "conf_attention_context_left", default=13)
    taps = k.number("conv_kernel_size", "conf_conv_kernel_size", default=5)
    attention = AttentionSpec(
        num_heads=heads, num_key_value_heads=heads, head_dim=h // heads, window=left,
        position="relative", extra=(vector("scale_by_channel", h // heads), matrix("distances", h, h)),
    )  # fmt: skip
    inside = (matrix("gate", h, 2 * h), depthwise("depthwise", taps, h), matrix("pointwise", h, h), vector("norm", h))
    mlp, mixed = in_turn(FeedForwardSpec(width=4 * h, gated=False), attention, norm="sandwich")
    steps = (mlp, mixed, *in_turn(CustomSpec(label="convolution", extra=inside)), mlp)
    stem = (
        matrix("convolution_1", 9, first), matrix("convolution_2", 9 * first, second),
        vector("convolution_norms", first + second), matrix("subsampled", bins // 4 * second, h),
    )  # fmt: skip
    return uniform(
        "conformer", LayerSpec(sublayers=steps, extra=(vector("norm_out", h),)),
        k.number("num_hidden_layers", "conf_num_hidden_layers"), name="audio", hidden_size=h, norm="rmsnorm", final_norm=False,
        tower=True, extra=(*stem, *behind),
    )  # fmt: skip


CONFORMERS = {"phi4_multimodal_audio": phi4_audio, "gemma4_audio": gemma4_audio, "gemma3n_audio": gemma3n_audio}
"""Audio encoders beside a decoder that are no Whisper's layers."""
