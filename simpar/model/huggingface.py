"""Hugging Face config.json -> the model it describes, for every family of the table and, by their keys, for others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from simpar.errors import InputError, Violation
from simpar.model.alone import PAIRS
from simpar.model.audio import AUDIO_TOWERS, audio_stack
from simpar.model.config_keys import TIED, Keys, class_defaults
from simpar.model.decoder import Decoder
from simpar.model.diffusion import DIFFUSION_READERS
from simpar.model.families import ALIASES, GENERAL, READERS, TABLE
from simpar.model.forms import short
from simpar.model.pieces import linear
from simpar.model.projectors import BY_PARENT, BY_TOWER, joined_weight
from simpar.model.remote import SPEECH, WORDS, deepseek_ocr
from simpar.model.speech import CONFORMERS
from simpar.model.towers import TOWERS, TYPE_OF_PARENT, WHOLE, joined_patches, vision_stack
from simpar.specs.architecture import ArchitectureSpec, StackSpec
from simpar.specs.mixers import WeightSpec
from simpar.specs.model import TransformerSpec

TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
VISION = ("vision_config", "vision_tower_config", "vit_config")
AUDIO = ("audio_config",)
NEVER_TIED = ("voxtral", "qwen2_audio", "mllama", "audioflamingo3", "musicflamingo", "molmo2")
"""Classes of transformers 5.24 whose head is a matrix of its own, whatever the file says."""
TEXT_SAYS = ("llama4", "shieldgemma2")
"""Classes whose decoder ties by its own keys."""
TEXT_TOO = (
    "fast_vlm", "glm4v", "glm4v_moe", "glm_ocr", "llava", "llava_next_video", "llava_onevision", "minimax_m3_vl", "perception_lm",
    "qwen2_5_vl", "qwen2_vl", "vibevoice", "video_llama_3",
)  # fmt: skip
"""Classes that take over a decoder's tied embeddings; the others of transformers 5.24 do not ask it."""
TEXT_ONLY = ("gemma4_unified", "fuyu")
"""Families that nest their decoder's keys and have no encoder."""


def from_huggingface(
    config: dict[str, Any], *, file: str = "config.json", approximate: bool = False
) -> TransformerSpec | ArchitectureSpec:
    """The model that a config.json describes: a TransformerSpec where all of it can be said in one, else the general form.

    Raises:
        InputError: as `read`.
    """
    model = read(config, file=file, approximate=approximate)
    name = str(config.get("_name_or_path") or config.get("model_type") or config.get("_class_name"))
    model = model.model_copy(update={"name": name, "source": f"Hugging Face {file}"})
    return (None if model.notes else short(model)) or model


def read(config: dict[str, Any], *, file: str = "config.json", approximate: bool = False) -> ArchitectureSpec:
    """The model that a config.json describes, in the general form.

    `approximate` turns structural keys that were not read into notes.

    Raises:
        InputError: every missing, wrong or unread structural key, together; else the key whose value stopped the reading.
    """
    try:
        return _read(config, file, approximate)
    except ODD as error:
        said = repr(error)
        odd = _odd_value(config, lambda table: _stumble(table, file) == said)
        if odd is None:
            raise
        rule = f"holds a value that cannot be read ({str(error)[:160] or said})"
        raise InputError([Violation(*odd, rule, "", file)]) from error


ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a value of the wrong kind raises where a reader computes with it."""


def _odd_value(table: dict[str, Any], stumbles: Callable[[dict[str, Any]], bool]) -> tuple[str, Any] | None:
    """(Key, value) without which reading `table` no longer stumbles."""
    for name, value in sorted(table.items(), key=lambda pair: type(pair[1]) is int):  # whole numbers are seldom the cause
        if name == "model_type" or stumbles({key: kept for key, kept in table.items() if key != name}):
            continue
        inside = _odd_value(value, lambda part: stumbles({**table, name: part})) if isinstance(value, dict) else None  # noqa: B023
        return (f"{name}.{inside[0]}", inside[1]) if inside else (name, value if not isinstance(value, dict) else "...")
    return None


def _stumble(table: dict[str, Any], file: str) -> str:
    """What stops the reading of `table` beside rules; empty where nothing does."""
    try:
        _read(table, file, approximate=True)
    except InputError:
        return ""
    except ODD as error:
        return repr(error)
    return ""


def _read(config: dict[str, Any], file: str, approximate: bool) -> ArchitectureSpec:
    config = translated(config)
    keys = Keys(config, file)
    if not keys.model_type and not config.get("_class_name"):
        raise InputError([Violation("model_type", None, "is required", "the key by which transformers knows the class", file)])
    try:
        model = _whole(keys)
    except InputError:
        if keys.all_violations():  # what follows from a size that is missing says less than that it is
            raise InputError(keys.all_violations()) from None
        raise
    violations = keys.all_violations()
    for name, value, rule in keys.doubts():
        shown = value if isinstance(value, (int, float, str, bool)) else "..."
        if approximate:
            keys.note(f"{name} = {shown!r}: {rule}")
        else:
            violations.append(Violation(name, shown, rule, "--approximate accepts and notes it", file))
    if violations:
        raise InputError(violations)
    return model.model_copy(update={"notes": (*model.notes, *keys.all_notes())})


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """A file without a type of its own (mamba_ssm's; Grok 2 goes by GIT's), in transformers' words."""
    if "Grok1ForCausalLM" in (config.get("architectures") or ()):
        return {**config, "model_type": "grok-1"}
    if config.get("model_type") in WORDS:
        return WORDS[config["model_type"]](config)
    named = {} if config.get("model_type") else _type_of_class(config)
    if named:
        return {**config, **named}
    return _state_spaces(config) if "ssm_cfg" in config and not config.get("model_type") else config


def _type_of_class(config: dict[str, Any]) -> dict[str, str]:
    """The type of a file that names its class alone: MiniCPM3ForCausalLM is minicpm3."""
    classes = config.get("architectures")
    plain = re.split(r"For[A-Z]|Model$|LMHead", str(classes[0] if isinstance(classes, list) and classes else ""))[0].lower()
    known = {re.sub("[_-]", "", name): name for name in (*READERS, *TABLE)}
    return {"model_type": known[plain]} if plain in known else {}


def _state_spaces(config: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(config["ssm_cfg"] or {})
    second, hidden = sizes.pop("layer", "Mamba1") == "Mamba2", int(config.get("d_model") or 0)
    rows, multiple = int(config.get("vocab_size") or 0), int(config.get("pad_vocab_size_multiple") or 1)
    found: dict[str, Any] = {
        "model_type": "mamba2" if second else "mamba", "hidden_size": hidden or None, "num_hidden_layers": config.get("n_layer"),
        "vocab_size": -(-rows // multiple) * multiple, "tie_word_embeddings": config.get("tie_embeddings", True),
        "state_size": 128 if second else 16, **({"head_dim": 64, "n_groups": 1} if second else {"time_step_rank": "auto"}),
        **{SSM_NAMES.get(str(name), str(name)): value for name, value in sizes.items()},
        **{name: config[name] for name in ("attn_layer_idx", "attn_cfg", "d_intermediate") if config.get(name)},
    }  # fmt: skip
    heads = {"num_heads": int(found.get("expand", 2) * hidden) // found["head_dim"]} if second else {}
    return {**found, **heads}


SSM_NAMES = {
    "d_state": "state_size", "d_conv": "conv_kernel", "headdim": "head_dim", "ngroups": "n_groups", "dt_rank": "time_step_rank",
}  # fmt: skip
"""mamba_ssm's names and transformers'."""


def _whole(keys: Keys) -> ArchitectureSpec:
    """A model of one stream, or a decoder with the encoders beside it."""
    for name in (str(keys.config.get("_class_name")), keys.model_type):
        if name in DIFFUSION_READERS:
            diffusion: ArchitectureSpec = DIFFUSION_READERS[name](keys).architecture()
            return diffusion
    if "Transformer" in str(keys.config.get("_class_name")) or str(keys.config.get("_class_name")).startswith("UNet"):
        known = ", ".join(name for name in DIFFUSION_READERS if name.endswith("Model"))
        rule = "a class of diffusers that is not read"
        raise InputError([Violation("_class_name", keys.config["_class_name"], rule, f"known are {known}", keys.file)])
    text = None if keys.model_type in PAIRS else _text_keys(keys)
    if text is None:
        return _text(keys)
    keys.used.update(name for name, value in keys.config.items() if text.config.get(name) == value)
    silent = [name for name in SPEECH if keys.has(name)]
    if silent:
        keys.note(f"{', '.join(silent)}: what speaks is a model of its own, not counted")
    if text.config.keys() & set(TEXT):
        return _whole(text)
    model = _text(text)
    if keys.model_type == "fuyu":  # patches straight into the decoder
        side, channels = keys.number("patch_size", default=30), keys.number("num_channels", default=3)
        model = model.model_copy(update={"extra": (*model.extra, patch_embedding(side * side * channels, text))})
    tied = _tied(keys, text)
    towers = _towers(keys, model.stacks[-1].hidden_size)
    if not towers and "vision_config" in class_defaults()["parts"].get(keys.model_type, {}):
        keys.note("vision_config is missing: the decoder alone is read")
    if not towers and not keys.unknown and keys.model_type not in (*BY_PARENT, *TYPE_OF_PARENT, *ALIASES, *TEXT_ONLY):
        _unknown_family(keys)
    return model.model_copy(update={"tie_word_embeddings": tied, "stacks": (*towers, *model.stacks)})


def patch_embedding(inputs: int, text: Keys) -> WeightSpec:
    """A linear layer from pixels to the decoder's width; no text token meets it."""
    return linear("patches", inputs, text.number("hidden_size"), uses=0.0)


def _text_keys(keys: Keys) -> Keys | None:
    """The decoder's keys where the file nests them, or where it is flat beside a vision_config; None = nothing but a decoder."""
    parent = keys.model_type
    known = class_defaults()["defaults"]
    like = next((name for name in (f"{parent}_text", f"{parent}_text_model") if name in known or name in TABLE), parent)
    inside = keys.child(*TEXT, like=like)
    if inside is not None:
        if inside.model_type == parent:  # Qwen writes the whole model's type into both
            inside.retype(like)
        return inside
    if keys.has(*VISION) or (parent in TYPE_OF_PARENT and parent != "mllama"):
        flat = Keys(keys.config, keys.file, "", like)
        keys.used |= flat.used
        flat.used = keys.used
        keys.children.append(flat)
        return flat
    return None


def _text(keys: Keys) -> ArchitectureSpec:
    """The model of one stream, by its family."""
    model_type = ALIASES.get(keys.model_type, keys.model_type)
    if model_type != keys.model_type:
        own = (keys.defaults, keys.names) if keys.defaults.get("hidden_size") else None
        keys.retype(model_type)
        keys.defaults, keys.names = own or (keys.defaults, keys.names)  # built as another, with defaults of its own
    family = TABLE.get(model_type)
    if family is None and model_type not in READERS:
        _unknown_family(keys)
    read_by: Any = READERS.get(model_type, Decoder)(keys, family or GENERAL)
    model: ArchitectureSpec = read_by if isinstance(read_by, ArchitectureSpec) else read_by.architecture()
    return model


def _unknown_family(keys: Keys) -> None:
    """A family without a line: read as Llama-like, unless transformers knows it (then it may well be something else)."""
    keys.note(f"model_type {keys.model_type!r} is not in the table of families: read by its keys, as Llama is built")
    if keys.model_type in class_defaults()["defaults"] or keys.get("is_encoder_decoder", default=False):
        known = "a family of transformers without a line in the table"
        keys.unknown.append(("model_type", keys.model_type, known))


def _tied(keys: Keys, text: Keys) -> bool:
    """Tied embeddings, as the class of the whole file takes its word and the decoder's; of a class that is not known the file's
    word, else the decoder's.
    """
    keys.used.update(("vocab_size", *TIED))
    text.used.update(TIED)
    if keys.model_type in (*NEVER_TIED, *TEXT_SAYS):
        return keys.model_type in TEXT_SAYS and bool(text.get("tie_word_embeddings", default=False))
    inside = bool(text.get("tie_word_embeddings", default=False))
    if keys.model_type not in class_defaults()["parts"]:
        return bool(keys.get("tie_word_embeddings", default=inside))
    whole = bool(keys.get("tie_word_embeddings", default=False))
    if whole and not inside and text.has("tie_word_embeddings") and not keys.has("tie_word_embeddings"):
        # A word against a default: such weights are published with a head, which transformers keeps on loading (InternVL 3).
        keys.note(f"{text.path}tie_word_embeddings = False is read; the class of {keys.model_type} ties weights that have no head")
        return False
    return whole or (inside and keys.model_type in TEXT_TOO)


def _towers(keys: Keys, hidden: int) -> tuple[StackSpec, ...]:
    """The vision and audio encoders with their projectors."""
    found: list[StackSpec] = []
    vision = keys.child(*VISION)
    if vision is None and keys.model_type == "step3p7":
        keys.note("vision_config is missing: the class's default vision encoder")
        vision = Keys({}, keys.file, "vision_config.", "step3p5_vision")
    if vision is not None:
        found += _vision(keys, vision, hidden)
    audio = keys.child(*AUDIO)
    for tower in (vision, audio):
        if tower is not None:
            tower.used.add("tie_word_embeddings")  # an encoder has none
    if audio is not None and audio.model_type in CONFORMERS:
        found.append(CONFORMERS[audio.model_type](keys, audio, hidden))
    elif audio is not None and audio.model_type in AUDIO_TOWERS:
        found.append(audio_stack(keys, audio, AUDIO_TOWERS[audio.model_type], hidden))
    elif audio is not None:
        _unknown_tower(keys, audio, "audio")
    return tuple(found)


def _vision(keys: Keys, vision: Keys, hidden: int) -> list[StackSpec]:
    """The vision encoder, twice where images and videos have one each."""
    parent = keys.model_type
    if parent == "deepseek_ocr":
        return deepseek_ocr(keys, vision, hidden, lambda k: vision_stack(k, TOWERS["clip_vision_model"]))
    kind = TYPE_OF_PARENT.get(parent, vision.model_type)
    kind = kind if kind in TOWERS else parent
    if kind not in TOWERS:
        return _unknown_tower(keys, vision, "vision")
    if vision.model_type != kind:
        vision.retype(kind)
    stack = WHOLE[kind](vision) if kind in WHOLE else vision_stack(vision, TOWERS[kind])
    projector = BY_PARENT.get(parent) or BY_TOWER.get(kind)
    if projector is None:
        keys.unknown.append(("vision_config", kind, f"no projector is known for {parent!r}"))
        return [stack]
    joined = joined_patches(keys, vision, stack.input_tokens)
    extra = tuple(joined_weight(w, joined) for w in projector(keys, vision, stack.hidden_size, hidden))
    whole = stack.model_copy(update={"extra": (*stack.extra, *extra), "merge": joined})
    return [whole, stack.model_copy(update={"name": "video"})] if parent == "video_llava" else [whole]


def _unknown_tower(keys: Keys, tower: Keys, kind: str) -> list[StackSpec]:
    """An encoder that no table has: nothing of it is read; the text is, where the user accepts that."""
    tower.used.update(tower.config)
    keys.unknown.append((f"{kind}_config", tower.model_type or "...", f"a {kind} encoder that is not known: left out"))
    return []
