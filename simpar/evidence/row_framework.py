"""From what a run says about its software to a framework, its month, a precision and an attention kernel."""

from __future__ import annotations

import re
from typing import Final

from simpar.evidence.row_adapters import adapted
from simpar.evidence.row_values import Row, first_match
from simpar.specs.framework_releases import NEWEST, Month, month_of
from simpar.specs.framework_rows import FRAMEWORKS
from simpar.specs.framework_run import Conventions
from simpar.specs.hardware import load_hardware

FRAMEWORK_PATTERNS: Final = (
    (r"nanotron", "nanotron"),
    (r"prime-?rl", "prime-rl"),
    (r"torchtune", "torchtune"),
    (r"modalities", "modalities"),
    (r"tinyllama", "tinyllama"),
    (r"olmo-?core", "olmo-core"),
    (r"\bllm\.c\b", "llm.c"),
    (r"kempner-?forge", "kempnerforge"),
    (r"torch[- ]?titan", "torchtitan"),
    (r"llm[- ]?foundry|composer|mosaic", "llm-foundry"),
    (r"zero[- ]?bubble|vocabulary ?parallelism", "zero-bubble"),
    (r"bigscience|megatron-?deepspeed|neox\b", "megatron-deepspeed"),
    (r"aa-scaling|aleph", "aa-scaling"),
    (r"internevo|internlm-train", "internevo"),
    (r"hai-?llm", "hai-llm"),
    (r"swift.*deepspeed|transformers.*deepspeed", "deepspeed"),
    (r"megatron-?bridge", "megatron-bridge"),
    (r"^megatron-core\b.*\bnemo", "megatron-core"),
    (r"\bnemo.?auto-?model", "nemo-automodel"),
    (r"\b(bio)?nemo|nvidia release|\bngc\b", "nemo"),
    (r"primus.*maxtext|maxtext.*primus", "maxtext"),
    (r"megatron|\bmcore\b|megascale|primus|vescale|flagscale|nnscaler", "megatron-core"),
    (r"\bfast-?llm\b", "fast-llm"),
    (r"meta internal", "llama3-internal"),
    (r"praxis|paxml|\bpax\b", "pax"),
    (r"maxtext|\bjax\b|\bxla\b", "maxtext"),
    (r"\bverl\b.*\bfsdp2|\bfsdp2\b.*\bverl\b", "verl-fsdp2"),
    (r"\bverl\b", "verl"),
    (r"colossal", "colossal-ai"),
    (r"deepspeed", "deepspeed"),
    (r"\btrl\b", "trl"),
    (r"\bms-?swift\b|^swift\b", "swift"),
    (r"accelerate\b|axolotl|llama[- ]?factory|hf trainer|^(?!.*fsdp).*transformers", "transformers"),
    (r"fms-fsdp", "torch-fsdp"),
    (r"lit[- ]?(gpt|llama)", "lit-gpt"),
    (r"picotron(?!.*fsdp)", "picotron"),
    (r"(?<!modded[- ])nano-?gpt", "torch-autocast"),
    (r"fsdp2", "torchtitan"),
    (r"fsdp|fairscale|metaseq|lightning", "torch-fsdp"),
)
"""First match in the framework's name wins; then NEAREST's; then the same in the source's name; then plain torch."""

NEAREST: Final = (
    (r"primus.*torchtitan|picotron.*fsdp|veomni|\blingua\b|torchforge", "torchtitan", "it builds on torch's FSDP2"),
    (r"megablocks", "megatron-core", "Megatron-LM trains with it"),
    (r"pith-?train", "torchtitan", "it drives torch's FSDP2 and compiler"),
    (
        r"\balpa\b|levanter|easylm|t5x|gspmd|jaxformer|flax|mesh[- ]?(tf|tensorflow)|tensorflow|\bkeras\b",
        "maxtext",
        "XLA partitions the program",
    ),
    (
        r"openrlhf|arctic ?training|deepspeed-?chat|bmtrain|fastmoe|\btutel\b|lmflow|x-moe",
        "deepspeed",
        "it builds on DeepSpeed or its ZeRO",
    ),
    (
        r"galvatron|\bhetu\b|libai|oneflow|paddle|mindspore|mindformers|merak|varuna|pipedream|\bslime\b",
        "megatron-core",
        "its layouts are Megatron's",
    ),
    (
        r"\bolmo\b|xtuner|llama-?(recipes|cookbook)|mistral-finetune|\bopen[-_]lm\b|sagemaker|instruct-?lab",
        "torch-fsdp",
        "it drives torch's own data parallelism",
    ),
    (
        r"unsloth|hugging ?face|\bhf\b|(?<!\bown )(?<!\bcustom )trainer|peft|fastchat|\boumi\b|"
        r"stanford alpaca|^qlora\b",
        "transformers",
        "it drives the Trainer of transformers",
    ),
)
"""Frameworks without rows of their own, the nearest that has some, and why."""

_TORCH_ALONE: Final = re.compile(
    r"(?:(?:plain|native|vanilla|pure|raw|eager|own|custom|training) )*(?:py)?torch(?: ?v?[\d.]+\S*)?"
    r"(?: (?:ddp|distributed ?data ?parallel|loop|script))?",
    re.IGNORECASE,
)
"""A framework that is torch and nothing on top of it, whatever its source is called."""

_STAND_INS: Final = re.compile(
    r"neox\b|lit[- ]?llama|megascale|primus|vescale|flagscale|nnscaler|fairscale|metaseq|lightning|"
    r"transformers|axolotl|llama[- ]?factory",
    re.IGNORECASE,
)
"""Names of FRAMEWORK_PATTERNS that share another framework's rows."""

_DRIVERS: Final = (None, "transformers", "trl", "swift", "torch-fsdp")
"""Frameworks that hand the step to whatever shards the states."""

_MLPERF_ROUNDS: Final[dict[str, Month]] = {
    "2.0": (2022, 6), "2.1": (2022, 11), "3.0": (2023, 6), "3.1": (2023, 11), "4.0": (2024, 6), "4.1": (2024, 11),
    "5.0": (2025, 6), "5.1": (2025, 11), "6.0": (2026, 6),
}  # fmt: skip
"""Publication months of MLPerf Training rounds (mlcommons.org)."""

_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

PRECISIONS: Final = (
    (r"(nv|mx|\b)fp4", "nvfp4"),
    (r"mx[-_ ]?fp8|fp8[-_ ]?mx", "mxfp8"),
    (r"fp8.*(block|fine-grained|1x128|128x128|deepgemm|sub-?channel)|block.*fp8", "fp8-block"),
    (r"(fp8|float8).*row-?wise|row-?wise.*(fp8|float8)", "fp8-rowwise"),
    (r"fp8|float8|e4m3", "fp8"),
    (r"fp16|(?<!b)float16|\bhalf\b|\b16-mixed", "fp16"),
    (r"bf16|bfloat16", "bf16"),
    (r"tf32", "tf32"),
    (r"fp32|float32", "fp32"),
)

_DEFAULT_PRECISION: Final[tuple[tuple[Month, str], ...]] = (((0, 0), "fp16"), ((2022, 6), "bf16"))
"""Precision of runs that do not say, from a month on."""

_UNFUSED: Final[dict[str, Month]] = {"megatron-core": (2022, 4), "nemo": (2022, 4)}
"""The month that a run without flash attention shows where nothing else dates it: the last before FlashAttention."""

ATTENTION_KERNELS: Final = (
    (r"flash[ _-]?attention[ _-]?(4|v4)|\bfa4\b", "fa4"),
    (r"flash[ _-]?attention[ _-]?(3|v3)|\bfa3\b", "fa3"),
    (r"flash[ _-]?attention[ _-]?(2|v2)|\bfa2\b", "fa2"),
    (r"flash[ _-]?attention[ _-]?v?1|\bfa1\b", "fa1"),
    (r"\bflex[ _-]?att(n|ention)", "flex"),
    (r"memory[- ]efficient attention", "efficient"),
    (r"(?<!without )(?<!no )cudnn", "cudnn"),
    (r"kernel: (torch|fused)\b|\bsdpa math\b|\bmath (backend|sdpa)\b|\beager attention\b|attention\W+eager\b", "unfused"),
)


_COLUMN_ALONE: Final = ((r"\b(?:math|eager)\b|\b(?:no|without) flash", "unfused"), (r"^flex$", "flex"))
"""The same where the column of the kernel says it, whose words stand for other things elsewhere."""

OFF: Final = r"[ :=(]{0,2}(?:(?:is|are|was|were) )?(?:not (?:used|enabled|available|installed|supported|in use)|disabled|off)\b"
"""What says after a name that it is not in use."""
_BESIDE: Final = r"(?:eager|math)\b(?:(?: or |[,/] ?)(?:eager|math)\b)*"
_DENIED: Final = re.compile(
    rf"\b(?:no|not|without|than|over|vs\.?|versus|instead of|compared (?:to|with)) (?:with )?(?:the |an? )?(?:sdpa )?{_BESIDE}"
    rf"|\b{_BESIDE}(?: \w+)??{OFF}",
    re.IGNORECASE,
)
"""A kernel that a run did without, or that it is compared with."""

_ENGINE: Final = r"transformer[ -]?engine"
"""In the words for an own loop or its precision: who makes narrow formats there."""


_TUNES: Final = re.compile(r"(?!pre-?train)(?:sft|q?lora|dpo|full(?!.*pre-?train)|.*fine[- ]?tun)", re.IGNORECASE)
"""Tasks that start from a trained model."""
_LIBRARY: Final = {
    "megatron-bridge": (
        (r"llama|nemotron|hybrid|mamba", "megatron-bridge"),
        (r"deep-?seek|moonlight|kimi|glm|gpt-?oss|mla|vl\b|omni|qwen-?3\.[5-9]", "megatron-bridge-tuning"),
        ("", "megatron-bridge-defaults"),
    ),
}
"""Framework with recipes for performance -> models and what the recipes of its library are, by what they fuse of rotary embedding
and gates."""
_PERFORMANCE: Final = re.compile(r"deep-?seek|gpt-?oss|kimi|llama|nemotron|qwen|glm|hybrid|mamba", re.IGNORECASE)
"""Models that have recipes for performance (Megatron-Bridge scripts/performance/configs, perf_recipes)."""
_RECIPE: Final = re.compile(r"_(?:pretrain|sft|peft|finetune)_config(?:_32nodes)?\b")
"""A recipe of the library by name; one for performance names a GPU behind or inside that."""


def framework_of(row: Row) -> tuple[str, list[str]]:
    """The framework's name and what was assumed."""
    stated, source = str(row.get("framework") or ""), str(row.get("source") or "")
    if stated in FRAMEWORKS:
        return stated, []
    name, notes = _named(stated)
    if name is None and "mlperf" in source.lower():
        name, notes = "nemo", ["MLPerf language models: NeMo"]
    if name is None and _TORCH_ALONE.fullmatch(stated.strip()) is None:
        name, notes = _named(source)
    if re.search("deepspeed", str(row.get("fsdp") or ""), re.IGNORECASE) and name in _DRIVERS:
        return "deepspeed", [f"framework {stated!r}: as deepspeed, which shards its states"]
    if name in _UNPIPELINED and _unpipelined(row):
        name = _UNPIPELINED[name]
    if name in _LIBRARY and _of_a_library(row):
        name = first_match(_LIBRARY[name], f"{row.get('model_name')} {row.get('arch')}")
    precision = str(row.get("precision") or "")
    narrow = re.search("fp8|fp4", precision) and re.search(_ENGINE, f"{stated} {precision}", re.IGNORECASE)
    if narrow and row.get("zero_stage") != 3 and name in _DRIVERS:
        return "torch-te", [f"framework {stated!r}: as torch-te, TransformerEngine's linears in plain torch"]
    cast = bool(re.search(r"autocast|\bamp\b", precision, re.IGNORECASE))
    if name in _UNDER_AUTOCAST and cast and "MixedPrecision" not in precision:
        return _UNDER_AUTOCAST[name], [*notes, "autocast alone: weights are gathered, gradients reduced in fp32"]
    if name is None:
        # One that names no precision may hold its weights in 16 bits.
        name, what = ("torch-autocast", "plain torch under autocast") if cast else ("plain", "plain torch")
        return name, [f"framework {stated!r} unknown: {what}" if stated else f"framework not stated: {what}"]
    return name, notes


_PIPELINED: Final = r"pipelined? (?:collectives|all-?gathers?|reduce-?scatters?)"
"""XLA's flags that let collectives of the next iteration of a loop run beside the computation of one."""
_NOT_PIPELINED: Final = re.compile(
    rf"\b(?:no|without|un-?)\W?{_PIPELINED}|{_PIPELINED}{OFF}|\bxla's (?:own )?defaults?\b", re.IGNORECASE
)
_UNDER_AUTOCAST: Final = {"torch-fsdp": "torch-fsdp-autocast"}
"""Framework that has a mixed precision of its own -> its rows without it."""
_UNPIPELINED: Final = {"maxtext": "maxtext-unpipelined"}
"""Framework whose recipes set these flags -> its rows without them."""


def _unpipelined(row: Row) -> bool:
    """Whether XLA pipelines no collectives: a run says so, or has the flags of ROCm's images."""
    said = f"{row.get('framework')} {row.get('notes') or ''}"
    if _NOT_PIPELINED.search(said):
        return True
    return re.match(r"(?:AMD )?(?:Instinct )?MI\d", str(row.get("gpu"))) is not None and re.search(_PIPELINED, said) is None


def _of_a_library(row: Row) -> bool:
    """Whether no recipe for performance made a run: it tunes, names one of the library, or its model has none."""
    named, model = _RECIPE.search(f"{row.get('framework')} {row.get('notes') or ''}"), row.get("model_name")
    return tunes(row) or named is not None or bool(model and not _PERFORMANCE.search(f"{model} {row.get('arch')}"))


def tunes(row: Row) -> bool:
    """Whether a run fine-tunes: its task says so, or it trains adapters."""
    return _TUNES.match(str(row.get("task") or "")) is not None or adapted(row)


def _named(text: str) -> tuple[str | None, list[str]]:
    """The framework that `text` names or is nearest to, and a note where it is not the framework itself."""
    if name := first_match(FRAMEWORK_PATTERNS, text):
        return name, [f"framework {text!r}: as {name}"] if _STAND_INS.search(text) else []
    found = next(((name, why) for pattern, name, why in NEAREST if re.search(pattern, text, re.IGNORECASE)), None)
    return (found[0], [f"framework {text!r}: as {found[0]}, {found[1]}"]) if found else (None, [])


def month_of_row(row: Row, name: str) -> Month:
    """The month whose behaviour the run shows, from the best evidence there is.

    MLPerf rounds come first (their framework texts are often stale), then the version, the framework's text, what was
    assumed, an unfused attention kernel (which dates a Megatron run before FlashAttention), the source's version, its
    arXiv number, its title.
    """
    source = str(row.get("source") or "")
    mlperf = re.search(r"mlperf training v?(\d\.\d)", source, re.IGNORECASE)
    if mlperf and mlperf[1] in _MLPERF_ROUNDS:
        return _MLPERF_ROUNDS[mlperf[1]]
    assumed = " ".join(a for a in row.get("assumed") or () if re.search(r"megatron.* 20\d\d", a, re.I))
    for text in (row.get("framework_version"), row.get("framework"), assumed):
        if (month := _read(name, text)) != NEWEST:
            return month
    if row.get("flash_attention") is False and name in _UNFUSED:
        return _UNFUSED[name]
    for text in (row.get("source_version"), _arxiv(source), source):
        if (month := _read(name, text)) != NEWEST:
            return month
    return NEWEST


def _read(name: str, text: object) -> Month:
    """The month in `text`, "Feb 2022" included."""
    words = str(text or "")
    named = re.search(r"\b(" + "|".join(_MONTHS) + r")[a-z]*\.? (20[12]\d)\b", words, re.IGNORECASE)
    if named:
        return int(named[2]), _MONTHS.index(named[1].lower()) + 1
    return month_of(name, words)


def _arxiv(source: str) -> str:
    number = re.search(r"arXiv[: ](\d\d)(\d\d)\.\d{4,5}", source, re.IGNORECASE)
    return f"20{number[1]}-{number[2]}" if number else ""


def stated_precision(row: Row) -> str | None:
    """The precision in the words of `row`, None where there is none."""
    return first_match(PRECISIONS, str(row.get("precision") or ""))


def narrow_modules(row: Row) -> str:
    """Which products have a run's narrow precision where it says that its experts alone, or all but them, are of bf16."""
    text, narrow = str(row.get("precision") or ""), r"(?:fp8|fp4)"
    if not row.get("moe_experts") or stated_precision(row) == "bf16":
        return "all"
    if re.search(rf"{narrow}\w* (?:experts?|grouped)\b.*\bbf16\b", text) or re.search(r"\bbf16 linears\b", text):
        return "experts"
    return "linears" if re.search(r"\b(?:experts?|grouped)\b(?: \w+)?? bf16\b|\bbf16 (?:experts?|grouped)\b", text) else "all"


def precision_of(row: Row, month: Month, hardware: str = "") -> tuple[str, list[str]]:
    """The precision and what was assumed: bf16, or fp16 before bf16 became usual on A100 (2022) and on a GPU without it."""
    if found := stated_precision(row):
        return found, []
    stated = str(row.get("precision") or "")
    usual = next(precision for since, precision in reversed(_DEFAULT_PRECISION) if month >= since)
    default = "fp16" if hardware and "bf16" not in load_hardware(hardware).gpu.peak_flops else usual
    return default, [f"precision {stated!r} unknown: {default}" if stated else f"precision not stated: {default}"]


_FLASH: Final[tuple[tuple[Month, str], ...]] = (((0, 0), "fa1"), ((2023, 8), "fa2"))
"""What a run with flash attention takes that its framework's scripts had not, from a month on (FlashAttention-2: 2023-07)."""

_SDPA: Final[tuple[tuple[Month, str], ...]] = (((0, 0), "fa1"), ((2024, 1), "fa2"))
"""What torch's scaled_dot_product_attention runs, from a month on (torch 2.0, torch 2.2)."""


def attention_of(row: Row, usual: str = "", month: Month = NEWEST) -> str:
    """The attention kernel: stated in the notes, unfused where flash attention was off, else the framework's.

    Args:
        usual: the framework's kernel; where that is unfused and the run says that it had flash attention or torch's, it had that of
            `month`.
    """
    kernel = row.get("flash_attention")
    if isinstance(kernel, str) and (said := first_match(_COLUMN_ALONE, _DENIED.sub("_", kernel))):
        return said
    texts = (row.get("notes"), kernel if isinstance(kernel, str) else "", (row.get("extra") or {}).get("attention"))
    if stated := first_match(ATTENTION_KERNELS, _DENIED.sub("_", " ".join(str(text or "") for text in texts))):
        return stated
    dates = _FLASH if kernel is True else _SDPA if re.search(r"\bsdpa\b|scaled[_ ]dot[_ ]product", str(kernel), re.I) else ()
    if dates and usual == "unfused":
        return next(kernel for since, kernel in reversed(dates) if month >= since)
    return "unfused" if row.get("flash_attention") is False else "auto"


_DROPOUT: Final = re.compile(
    r"(?<!no )(?<!without )(?<!lora )(?<!lora_)(?<!adapter )"
    r"\bdropout[ _]?(?:prob(?:ability)?|p|rate)?[ :=]{1,3}(?:of )?(0?\.\d+)(?![\d%])"
    r"|\b(?:no|without) dropout\b",
    re.IGNORECASE,
)
"""A model's dropout in words; that of adapters is theirs (row_adapters)."""


def dropout_of(row: Row, conventions: Conventions) -> float | None:
    """As stated, in its column or the notes; none where the model's own code runs, which has what its file states; else the
    framework's."""
    if row.get("dropout") is not None:
        return float(row["dropout"])
    if said := _DROPOUT.search(str(row.get("notes") or "")):
        return 0.0 if said[1] is None else float(said[1])
    return None if conventions.model_dropout else conventions.dropout
