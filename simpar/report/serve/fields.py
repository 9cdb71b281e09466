"""What the page lets one change: each field's key in the address, its place in a scenario, its label and its slider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from simpar.schedules import SCHEDULES
from simpar.specs.framework import framework_names
from simpar.specs.hardware import profile_names
from simpar.specs.models_io import model_names

Kind = Literal["int", "float", "word", "text"]
Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Field:
    """One control.

    Attributes:
        key: in the address and in element ids.
        path: dotted field of the scenario; empty for what is not of the scenario (tokens, price, goodput).
        kind: int, float, word (a choice) or text (tokens such as "15.6T").
        group: heading it stands under.
        stops: values of its slider; empty = no slider.
        choices: values of a word.
        hint: unit, or what an empty box means.
        profile, unit: figure of the hardware profile that the number replaces, and its unit; "" for all other controls.
    """

    key: str
    path: str
    label: str
    kind: Kind
    group: str
    stops: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    hint: str = ""
    profile: str = ""
    unit: str = ""


_NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
_TP = (1, 2, 4, 8, 16, 32, 64)
_PP = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 28, 30, 32, 35, 36, 40, 42, 48, 56, 60, 63, 64, 72, 80, 96,
    126, 128,
)  # fmt: skip
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
_OVER = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 16.0)
_PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
AS_WRITTEN: Final = "as written"
"""A choice that stands for a table in the scenario, such as recomputation by modules."""

OWN_MODEL: Final = "own config.json"
"""The model that the user dropped on the page."""

MODEL, CLUSTER, OWN_GPU, LAYOUT, TRAINING, RUN = "Model", "Cluster", "My own GPU", "Layout", "Training step", "Run: cost and days"


def fields() -> tuple[Field, ...]:
    """All controls, in the order shown."""
    return (
        Field("model", "model", "model", "word", MODEL, choices=(*model_names(), OWN_MODEL)),
        Field("framework", "framework", "framework", "word", MODEL, choices=tuple(framework_names())),
        Field("hardware", "cluster.hardware", "hardware", "word", CLUSTER, choices=tuple(profile_names())),
        Field("nodes", "cluster.num_nodes", "nodes", "int", CLUSTER, _NODES),
        Field("nic_bw", "cluster.nic_bandwidth_scale", "network bandwidth", "float", CLUSTER, _SCALES, hint="× profile"),
        Field("nvlink_bw", "cluster.scale_up_bandwidth_scale", "NVLink bandwidth", "float", CLUSTER, _SCALES, hint="× profile"),
        Field("over", "cluster.oversubscription", "oversubscription", "float", CLUSTER, _OVER, hint="to 1; empty: profile"),
        Field("gpu_mem", "", "memory", "float", OWN_GPU, hint="GB", profile="gpu.memory", unit="GB"),
        Field("gpu_flops", "", "dense bf16 peak", "float", OWN_GPU, hint="TFLOP/s", profile="gpu.peak_flops.bf16", unit="TFLOP/s"),
        Field("gpu_bw", "", "memory bandwidth", "float", OWN_GPU, hint="GB/s", profile="gpu.memory_bandwidth", unit="GB/s"),
        Field("gpu_link", "", "NVLink or PCIe", "float", OWN_GPU, hint="GB/s, one way", profile="scale_up.bandwidth", unit="GB/s"),
        Field("gpn", "cluster.gpus_per_node", "GPUs per node", "int", OWN_GPU, hint="empty: profile"),
        # Choices stand first in a group: from a drop-down that ends one, Tab goes back to the group's start.
        Field("schedule", "plan.schedule", "schedule", "word", LAYOUT, choices=("auto", *SCHEDULES)),
        Field("tp", "plan.tp", "tensor (tp)", "int", LAYOUT, _TP),
        Field("pp", "plan.pp", "pipeline (pp)", "int", LAYOUT, _PP),
        Field("mbs", "training.micro_batch_size", "micro-batch", "int", LAYOUT, _POWERS[:6], hint="sequences"),
        Field("recompute", "plan.recompute", "recomputation", "word", LAYOUT, choices=("none", "selective", "full")),
        Field("cp", "plan.cp", "context (cp)", "int", LAYOUT),
        Field("ep", "plan.ep", "expert (ep)", "int", LAYOUT),
        Field("v", "plan.virtual_stages", "virtual stages", "int", LAYOUT),
        Field("zero", "plan.zero_stage", "ZeRO stage", "int", LAYOUT),
        Field("precision", "training.precision", "precision", "word", TRAINING, choices=_PRECISIONS),
        Field("gbs", "training.global_batch_size", "global batch", "int", TRAINING, hint="sequences"),
        Field("seq", "training.sequence_length", "sequence length", "int", TRAINING),
        Field("tokens", "", "tokens to train", "text", RUN, hint='such as "15.6T"'),
        Field("usd", "", "price", "float", RUN, hint="$ per GPU-hour"),
        Field("goodput", "", "goodput", "float", RUN, hint="share that trains"),
    )


FIELDS: Final = fields()
BY_KEY: Final = {f.key: f for f in FIELDS}
SLIDERS: Final = tuple(f for f in FIELDS if f.stops)
GROUPS: Final = tuple(dict.fromkeys(f.group for f in FIELDS))
RUN_DEFAULTS: Final[dict[str, Value]] = {"tokens": "1T", "usd": 2.0, "goodput": 0.9}
"""Assumed until the user says otherwise: round figures, labelled as such on the page."""
