"""Audio encoders beside a decoder: Whisper's layers over a convolutional stem, and what leads from them to the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from simpar.model.config_keys import Keys
from simpar.model.pieces import encoder_attention, in_turn, linear, matrix, norm_extra, uniform, vector
from simpar.model.projectors import Projector, Weights, aligner, joined_weight, mlp2
from simpar.specs.architecture import LayerSpec, StackSpec
from simpar.specs.mixers import FeedForwardSpec, NormKind


@dataclass(frozen=True, slots=True)
class AudioTower:
    """What an audio encoder's class builds without asking its file."""

    stem: Literal["1d", "2d"] = "1d"
    """1d: two convolutions over time (Whisper); 2d: three over time and frequency, and a projection."""
    positions: bool = True
    """A table of positions among the parameters."""
    k_bias: bool = False
    square: bool = False
    """The heads' widths add up to the width, of keys too."""
    norm: NormKind = "layernorm"
    gated: bool = False
    streams: bool = False
    """Causal, with a window; only the last matrix of the feed-forward has a bias (Voxtral Realtime)."""
    joined: int = 0
    """Frames that become one token of the text; 0 = as many as the projector reads side by side."""
    projector: Projector = aligner


def audio_stack(file: Keys, k: Keys, tower: AudioTower, text: int) -> StackSpec:
    """The layers of an audio encoder with its stem and projector; `text` is the text's width."""
    h, depth = k.number("d_model", "hidden_size"), k.number("encoder_layers", "num_hidden_layers")
    heads, width = k.number("encoder_attention_heads", "num_attention_heads"), k.number("encoder_ffn_dim", "intermediate_size")
    k.get("n_window", "n_window_infer", "conv_chunksize", "vocab_size", "num_hidden_layers")
    file.get("head_dim")
    kv, dim = k.get("num_key_value_heads", default=heads), k.get("head_dim", default=h // heads)
    if tower.square:
        k.meet("head_dim", dim, h / heads, f"hidden_size / num_attention_heads ({heads})")
        k.meet("num_key_value_heads", kv, heads, "num_attention_heads")
    window = k.get("sliding_window") if tower.streams else None
    attention = encoder_attention(
        heads, h, num_key_value_heads=kv, head_dim=dim, causal=tower.streams, window=window, position="absolute",
        k_bias=tower.k_bias,
    )  # fmt: skip
    down = (vector("down_bias", h),) if tower.streams else ()
    mlp = FeedForwardSpec(width=width, gated=tower.gated, bias=not tower.streams, activation="gelu", extra=down)
    layer = LayerSpec(sublayers=in_turn(attention, mlp))
    frames = k.number("max_source_positions", default=1500)
    positions = (vector("positions", frames * h),) if tower.positions else ()
    projector = tower.projector(file, k, h, text)
    joined = tower.joined or max(next((w.inputs for w in projector if w.kind == "linear"), h) // h, 1)
    projector = tuple(joined_weight(w, joined) for w in projector)
    return uniform(
        "audio", layer, depth, name="audio", hidden_size=h, norm=tower.norm, tower=True,
        extra=(*_stem(k, tower, h), *positions, *projector), input_tokens=frames, merge=joined,
    )  # fmt: skip


def _stem(k: Keys, tower: AudioTower, h: int) -> Weights:
    """From the spectrogram to the first layer."""
    bins = k.number("num_mel_bins", "feature_size", default=128)
    if tower.stem == "1d":
        return (linear("convolution_1", 3 * bins, h), linear("convolution_2", 3 * h, h))
    c = k.number("downsample_hidden_size", default=480)
    down = (linear("convolution_1", 9, c), linear("convolution_2", 9 * c, c, copies=2))
    wide = c * -(-bins // 8)
    k.meet("conv_output_size", k.get("conv_output_size", default=wide), wide, "what three convolutions leave of num_mel_bins")
    return (*down, matrix("convolution_out", wide, h))


def _frames(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Voxtral: four frames side by side, two layers without biases."""
    file.get("hidden_size")
    return mlp2("projector", k.number("intermediate_size"), text, text, bias=False)


def _frames_realtime(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Voxtral Realtime: so many frames side by side, two layers without biases."""
    file.get("hidden_size", "audio_length_per_tok", "default_num_delay_tokens")
    return mlp2("projector", h * file.number("downsample_factor", default=4), text, text, bias=False)


def _merged(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """MOSS: some frames side by side, two layers and a norm."""
    file.get("audio_chunk_size")
    wide, bias = h * file.number("audio_merge_size", default=4), bool(file.get("projector_bias", default=True))
    return (*mlp2("projector", wide, text, text, bias), norm_extra("projector_norm", "layernorm", text))


def _omni(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """Qwen 2.5 Omni: one layer, and embeddings of begin and end."""
    out = k.number("output_dim", default=text)
    return (linear("projector", h, out), vector("begin_end", 2 * out))


def _adapter(file: Keys, k: Keys, h: int, text: int) -> Weights:
    """dots3: a norm and two layers."""
    out = k.number("adapter_out_dim", default=text)
    return (norm_extra("adapter_norm", "layernorm", h), *mlp2("adapter", h, out, out))


AUDIO_TOWERS: Final[dict[str, AudioTower]] = {
    "qwen2_audio_encoder": AudioTower(joined=2, projector=lambda file, k, h, text: (linear("projector", h, text),)),
    "voxtral_encoder": AudioTower(projector=_frames),
    "voxtral_realtime_encoder": AudioTower(positions=False, norm="rmsnorm", gated=True, streams=True, projector=_frames_realtime),
    "dots3_note_audio_encoder": AudioTower(stem="2d", positions=False, norm="rmsnorm", gated=True, square=True, projector=_adapter),
    "moss_transcribe_diarize_audio": AudioTower(projector=_merged),
    "audioflamingo3_encoder": AudioTower(),
    "glmasr_encoder": AudioTower(  # four frames side by side, twice the text's width between
        positions=False, projector=lambda file, k, h, text: mlp2("projector", k.number("intermediate_size"), 2 * text, text)),
    "qwen2_5_omni_audio_encoder": AudioTower(positions=False, joined=2, projector=_omni),
    **dict.fromkeys(
        ("qwen3_asr_encoder", "qwen3_omni_moe_audio_encoder"),
        AudioTower(
            stem="2d", positions=False, k_bias=True,
            projector=lambda file, k, h, text: mlp2("projector", h, h, k.number("output_dim", default=text)))),
}  # fmt: skip
"""Audio encoder's model_type -> what it builds."""
