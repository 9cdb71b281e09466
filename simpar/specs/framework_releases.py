"""Dated rows of frameworks and the words that they are written in, other names of frameworks, when releases came out, and the month
that a version stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

Month = tuple[int, int]
"""Year and month."""

NEWEST: Month = (9999, 12)

Base = str | dict[str, str]
"""What a framework builds on: "" = nothing, another one, or one for each part of it ("kernels", "head", ...; "" = all others)."""


@dataclass(frozen=True, slots=True)
class FrameworkRow:
    """What changes from a month on; the rest carries over from the row before it.

    Attributes:
        since: first month it holds for.
        changes: field of a policy -> value.
        source: where the facts stand.
    """

    since: Month
    changes: dict[str, Any]
    source: str

    @property
    def month(self) -> str:
        """As text: "2025-10"."""
        return f"{self.since[0]}-{self.since[1]:02d}"


RELEASES: Final[dict[str, dict[str, Month]]] = {
    "megatron-core": {
        "0.1": (2023, 5), "0.2": (2023, 8), "0.3": (2023, 10), "0.4": (2023, 12), "0.5": (2024, 1), "0.6": (2024, 3),
        "0.7": (2024, 5), "0.8": (2024, 7), "0.9": (2024, 10), "0.10": (2025, 2), "0.11": (2025, 3), "0.12": (2025, 5),
        "0.13": (2025, 7), "0.14": (2025, 10), "0.15": (2025, 12), "0.16": (2026, 2), "0.17": (2026, 4),
        "0.18": (2026, 5), "0.19": (2026, 7), "0.20": (2026, 8), "2.4": (2021, 6), "3.0": (2022, 9),
    },
    "torchtitan": {"0.0": (2024, 4), "0.1": (2025, 6), "0.2": (2026, 2)},
    "llm-foundry": {"0.0": (2023, 9), "0.3": (2023, 9), "0.4": (2023, 12), "0.5": (2024, 1), "0.7": (2024, 4)},
    "deepspeed": {"0.3": (2020, 9), "0.5": (2021, 9), "0.6": (2022, 3), "0.9": (2023, 4), "0.14": (2024, 3),
     "0.16": (2024, 11)},
    "nanotron": {"0.1": (2024, 1), "0.4": (2024, 2)},
}  # fmt: skip
"""Release -> month, for versions that carry no date. Release tags of the projects' repositories, to the month."""

_DATE = re.compile(r"(?<!\d)(20[12]\d)(?:[-./ ](0?[1-9]|1[0-2])(?!\d))?")
_NIGHTLY = re.compile(r"dev(20[12]\d)(0[1-9]|1[0-2])[0-3]\d(?!\d)")
_CALENDAR_RELEASE = re.compile(r"(?<!\d)(2[0-9])\.(0[1-9]|1[0-2])(?!\d)")
_RELEASE = re.compile(r"(?<![\d.])v?(\d+\.\d+)(?:\.\d+)*")


def month_of(name: str, version: str | None) -> Month:
    """The month that `version` of framework `name` stands for; the newest when nothing in the text says.

    Understands releases of the table ("0.13", "torch 2.1"), calendar releases ("NeMo 25.04", "23.09"), years and
    months.
    """
    if not version:
        return NEWEST
    if (calendar := _CALENDAR_RELEASE.search(version)) is not None:
        return 2000 + int(calendar[1]), int(calendar[2])
    if (nightly := _NIGHTLY.search(version)) is not None:
        return int(nightly[1]), int(nightly[2])
    if (date := _DATE.search(version)) is not None:
        return int(date[1]), int(date[2] or 7)
    known = RELEASES.get(name, {})
    for release in _RELEASE.findall(version):
        if release in known:
            return known[release]
    return NEWEST


AttentionKernel = Literal["unfused", "fa1", "fa2", "fa3", "flex", "cudnn", "cudnn9.19", "aiter", "aotriton", "aotriton0.11"]
GradientDtype = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Placeholders = Literal["none", "each", "shapes"]
Ability = Literal[
    "pure_bf16", "optimizer_in_backward", "narrow_optimizers", "quantised_base", "host_parameters", "fused_kernels"
]  # fmt: skip
Lack = Literal[
    "tensor_parallelism", "context_parallelism", "expert_parallelism", "pipelines", "dropless_experts", "partial_sharding"
]  # fmt: skip
LossKind = Literal["fused", "unfused", "half", "chunked", "linear", "tiled"]

LOSS_WORK: Final = (
    ("fused", "cross_entropy", 6.0, 6.0), ("unfused", "loss_chain", 18.0, 18.0), ("compiled", "cross_entropy", 4.0, 4.0),
    ("half", "loss_chain", 4.0, 8.0), ("chunked", "cross_entropy", 10.0, 10.0), ("linear", "cross_entropy", 6.0, 0.0),
    ("tiled", "cross_entropy", 4.0, 4.0),
)  # fmt: skip
"""Fused: TransformerEngine's and flash-attn's kernels (logits read twice and turned into their gradient in place, then scaled).
Unfused: torch's cross_entropy over a cast to fp32; half: over 16-bit logits as they are. Compiled: the 16-bit logits read twice,
and read and turned into their gradient. Linear: Liger's kernel on each piece of the logits, all of it in the forward
(liger_kernel/ops/cross_entropy.py). Tiled: log-probabilities tile by tile, the logits computed again in the backward (TRL; Apple's
cut cross-entropy in the matmul)."""

ALIASES: Final[dict[str, str]] = {
    "megatron": "megatron-core",
    "megatron-lm": "megatron-core",
    "megatron-swift": "megatron-core",
    "primus": "megatron-core",
    "fsdp": "torchtitan",
    "fms-fsdp": "torch-fsdp",
    "composer": "llm-foundry",
    "hagemann": "aa-scaling",
    "bloom": "megatron-deepspeed",
    "torch": "plain",
    "pytorch": "plain",
    "nanogpt": "torch-autocast",
    "accelerate": "transformers",
    "huggingface": "transformers",
    "axolotl": "transformers",
    "llama-factory": "transformers",
    "peft": "transformers",
    "ms-swift": "swift",
}
"""Other names -> canonical ones."""
