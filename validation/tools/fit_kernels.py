"""Kernel constants of every GPU in a folder of measured tables, written as hardware_profiles/fitted/{gpu}.kernels.toml.

One set per GPU, kernel library and power mode. Where a GPU has no sustained table, sustained constants are derived from a
GPU with the same die and power cap; every such set says so in `derived`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simpar.costs.compute import GemmShapes, gemm_seconds
from simpar.costs.kernel_choice import UNREAL
from simpar.errors import InputError
from simpar.evidence.kernel_tables import attention_name, column_source, columns, gemm_name, profile_of, tables, there, time_columns
from simpar.specs.hardware import HardwareProfile
from simpar.specs.kernel_constants import (
    AttentionConstants,
    BackwardConstants,
    FitRecord,
    GemmConstants,
    GroupedConstants,
    KernelConstants,
)
from simpar.toml import toml
from validation.tools import fit_attention, fit_gemm, fit_memory, fit_training

HEADER = """# Written by `python -m validation.tools.fit kernels --data DIR`; do not edit by hand.
# Forms and sources: docs/formulas_kernels.md. `fit` holds the error reached, |predicted / measured - 1|;
# `held_out_*` on shapes that the fit did not see. `bands` are 80 % intervals of measured / predicted.

"""
TRAINING_MACHINES = {"a100_pcie": "a100", "b200": "b200"}
"""Machine of `simumax_ops.csv` -> GPU whose constants its rows refine."""
SAME_DIE = {"h100": "h200"}
"""GPU without a sustained table -> GPU of the same die and power cap that has one."""
SAME_KERNELS = {"b200": "gb200"}
"""GPU without a sustained fp8 table -> GPU of the architecture that has one beside its burst table."""
DEFAULTS = {
    "a100": ("sglang0510", "trtllm100"),
    "h100": ("trtllm130rc10",),
    "h200": ("vllm0220_sustained", "trtllm130rc10"),
    "b200": ("vllm0220_sustained", "trtllm130rc20"),
    "gb200": ("trtllm130rc17_sustained", "trtllm130rc10"),
}
"""Libraries first in order: the defaults of their dtype and mode."""
LARGE = GemmShapes(np.array([8192.0, 4096.0, 16384.0]), np.array([8192.0, 8192.0, 8192.0]), np.array([8192.0, 8192.0, 4096.0]))
"""Typical big GEMMs, for ratios between power modes."""
SUSTAINED_PRIOR = 0.88
"""Sustained over burst rate where no GPU of the family has both (H200 0.87, B200 0.94, GB200 0.87 on big GEMMs)."""


@dataclass(slots=True)
class Found:
    """What the tables gave for one GPU."""

    gemm: list[GemmConstants] = field(default_factory=list)
    attention: list[AttentionConstants] = field(default_factory=list)
    same_die: list[GemmConstants] = field(default_factory=list)
    """Sets of the GPU of the same die and power cap, or of the same kernels, where there is one."""


def _say(text: str) -> None:
    print(text, flush=True)


def _told(fit: FitRecord) -> str:
    return f"{fit.median:.2%} / {fit.p90:.2%}, held out {fit.held_out_median:.2%} / {fit.held_out_p90:.2%}"


def _gemm(path: Path, hardware: HardwareProfile) -> Iterator[GemmConstants | None]:
    gpu, dtype = gemm_name(path)
    table = columns(path, ("m", "n", "k"))
    for column in time_columns(table):
        yield fit_gemm.fit_column(table, column, column_source(gpu, dtype, column), hardware, path.name)


KINDS: dict[str, tuple[str, Callable[[Path], tuple[str, ...]], Callable[[Path, HardwareProfile], Iterable[Any]]]] = {
    "gemm_*.csv": ("gemm", gemm_name, _gemm),
    "attention_*.csv": ("attention", attention_name, lambda path, hardware: (fit_attention.fit_table(path, hardware),)),
}
"""Tables -> field of `Found`, what their names say (the GPU first), and the constants of one."""


def fit_tables(data: Path) -> dict[str, Found]:
    """Fits of every GEMM and attention table of a known GPU."""
    found: dict[str, Found] = defaultdict(Found)
    for pattern, (kind, name, fit) in KINDS.items():
        for path in (path for path in tables(data, pattern) if "model" not in path.stem):
            gpu = name(path)[0]
            hardware = profile_of(gpu)
            if hardware is None:
                _say(f"{path.name}: no profile for {gpu}, left out")
                continue
            for c in fit(path, hardware):
                if c is not None:
                    getattr(found[gpu], kind).append(c)
                    _say(f"{c.fit.source}: {_told(c.fit)}")
    return found


def _typical(c: GemmConstants, sm_count: float) -> float:
    return float(np.median(gemm_seconds(c, sm_count, LARGE)))


def _sustained_ratios(sets: list[GemmConstants], sm_count: float, dtype: str = "bf16") -> dict[str, float]:
    """Library of a measured sustained set -> burst over its time of big GEMMs: the share of the rate that the power cap leaves.

    Sets of real operands come first: they price.
    """
    burst = [c for c in sets if c.dtype == dtype and c.mode == "burst" and "uninit" not in c.library]
    held = [c for c in sets if c.dtype == dtype and c.mode == "sustained" and not c.derived]
    order = sorted(held, key=lambda c: any(word in c.library for word in UNREAL))
    return {c.library: _typical(burst[0], sm_count) / _typical(c, sm_count) for c in order} if burst else {}


def derive_sustained(found: dict[str, Found]) -> None:
    """Adds sustained bf16 sets where a GPU has burst tables only."""
    for gpu, own in found.items():
        twin = SAME_DIE.get(gpu)
        kin = twin or SAME_KERNELS.get(gpu)
        own.same_die = found[kin].gemm if kin in found else []
        bf16 = [c for c in own.gemm if c.dtype == "bf16"]
        if bf16 and not any(c.mode == "sustained" for c in bf16):
            donor = next((c for c in own.same_die if c.dtype == "bf16" and c.mode == "sustained"), None)
            if twin and donor is not None:
                text = f"{twin} {donor.library} (same die and power cap) with the memory bandwidth of {gpu}"
                own.gemm.append(donor.model_copy(update={"bandwidth_bytes_per_s": bf16[0].bandwidth_bytes_per_s, "derived": text}))
            else:
                text = f"{bf16[0].library}: no sustained table; random cold operands at 400 W"
                own.gemm.append(bf16[0].model_copy(update={"mode": "sustained", "derived": text}))


def narrow_sustained(sets: list[GemmConstants], same_die: list[GemmConstants], sm_count: float) -> list[GemmConstants]:
    """Sustained fp8 sets where there are burst ones only: the burst rate times the sustained over burst ratio of bf16.

    One for each power state that bf16 was measured in; all but the first take the name of its library. The first, which prices,
    takes the ratio of fp8 itself where a GPU of the same kernels has both.
    """
    ratios = _sustained_ratios(sets, sm_count) or _sustained_ratios(same_die, sm_count) or {"": SUSTAINED_PRIOR}
    of_fp8 = list(_sustained_ratios(same_die, sm_count, "fp8").values())
    ratios |= {next(iter(ratios)): of_fp8[0]} if of_fp8 else {}
    made = []
    for dtype in ("fp8", "fp8_block"):
        own = [c for c in sets if c.dtype == dtype]
        if own and not any(c.mode == "sustained" for c in own):
            for count, (library, share) in enumerate(ratios.items()):
                of = "fp8 on a kin" if of_fp8 and not count else "bf16"
                text = f"{own[0].library} at {share:.3f} of its rate, the sustained over burst ratio of {of}"
                update = {"mode": "sustained", "rate_flops_per_s": own[0].rate_flops_per_s * share, "derived": text}
                made.append(own[0].model_copy(update=update | ({"library": library} if count else {})))
    return made


def _ordered(gpu: str, sets: list[GemmConstants]) -> list[GemmConstants]:
    order = DEFAULTS.get(gpu, ())

    def rank(c: GemmConstants) -> tuple[int, int]:
        unreal = int("uninit" in c.library or "constW" in c.library)
        return (unreal, order.index(c.library) if c.library in order else len(order))

    return sorted(sets, key=rank)


def assemble(data: Path, gpu: str, own: Found, hardware: HardwareProfile) -> KernelConstants:
    """Everything known about one GPU."""
    sm_count = float(hardware.gpu.sm_count.value)
    gemm, attention = _ordered(gpu, own.gemm), list(own.attention)
    training, charts, membound = (data / f"{n}.csv" for n in ("simumax_ops", "flash_attention_charts", "membound"))
    directions, grouped = None, None
    for machine, parent in TRAINING_MACHINES.items():
        base = next((c for c in gemm if c.dtype == "bf16"), None)
        if parent == gpu and there(training) and base is not None:
            pair = fit_training.fit_machine(training, machine, base, sm_count)
            if pair is not None:
                gemm.append(pair[0])
                directions = pair[1]
                grouped = fit_training.fit_grouped(training, machine, pair[0], pair[1], sm_count)
                attention += fit_training.fit_sdp(training, machine, sm_count)
                _say(f"{training.name} {machine}: {pair[0].fit.median:.2%} / {pair[0].fit.p90:.2%}, scalar {directions.scale:.3f}")
    gemm += narrow_sustained(gemm, own.same_die, sm_count)
    backward: tuple[BackwardConstants, ...] = ()
    if there(charts):
        attention += fit_attention.forward_constants(charts, gpu, sm_count)
        backward = fit_attention.backward_constants(charts, gpu)
    memory, best = fit_memory.fit_classes(membound, gpu, hardware.gpu.architecture) if there(membound) else ({}, None)
    return KernelConstants(
        gpu=hardware.gpu.name,
        gemm=tuple(gemm),
        attention=tuple(attention),
        backward=backward,
        directions=directions,
        grouped=grouped,
        memory=memory,
        memory_bandwidth_share=best,
    )


def _between(a: GroupedConstants, b: GroupedConstants) -> GroupedConstants:
    """Geometric mean of two generations' factors, with an interval that reaches both."""
    values = {name: float(np.sqrt(getattr(a, name) * getattr(b, name))) for name in ("forward", "dgrad", "wgrad_accumulate")}
    source = f"assumed: between {a.source} and {b.source}"
    streams = round(float(np.sqrt(a.streams * b.streams)))
    return GroupedConstants(**values, streams=streams, low=min(a.low, b.low), high=max(a.high, b.high), source=source)


def _inherit(all_of: dict[str, KernelConstants]) -> None:
    """Direction and grouped factors measured on one GPU serve those without, by generation; Hopper's grouped lie between."""
    ampere, blackwell = all_of.get("a100"), all_of.get("b200")
    for gpu, c in all_of.items():
        donor = blackwell if gpu.startswith(("b", "gb", "h")) else ampere
        if donor is None or c.directions is not None:
            continue
        update: dict[str, object] = {"grouped": donor.grouped}
        if gpu.startswith("h") and ampere is not None and ampere.grouped is not None and donor.grouped is not None:
            update["grouped"] = _between(ampere.grouped, donor.grouped)
        if donor.directions is not None:
            update["directions"] = donor.directions.model_copy(update={"scale": 1.0, "machine": f"as {donor.directions.machine}"})
        all_of[gpu] = c.model_copy(update=update)


def dump(constants: KernelConstants) -> str:
    """The file of `constants`, single tables first; fields at their defaults are left out."""

    def number(value: float) -> str:
        text = f"{value:.5g}"
        return text if any(c in text for c in ".en") else f"{text}.0"

    table = constants.model_dump(exclude_defaults=True)
    table = dict(sorted(table.items(), key=lambda item: isinstance(item[1], tuple | list)))
    return HEADER + toml(table, inline=lambda depth, _: depth > 1, number=number)


def run(data: Path, out: Path) -> int:
    """Fit every table in `data` and write one file per GPU into `out`.

    Raises:
        InputError: `data` is no folder or holds no table.
    """
    if not data.is_dir():
        raise InputError(f"{data}: no such folder of measured tables")
    found = fit_tables(data)
    if not found:
        raise InputError(f"{data}: no gemm_*.csv or attention_*.csv of a known GPU")
    derive_sustained(found)
    all_of: dict[str, KernelConstants] = {}
    for gpu, own in found.items():
        hardware = profile_of(gpu)
        assert hardware is not None
        all_of[gpu] = assemble(data, gpu, own, hardware)
    _inherit(all_of)
    out.mkdir(parents=True, exist_ok=True)
    for gpu, constants in all_of.items():
        name = re.sub(r"[^a-z0-9_]", "_", gpu)
        (out / f"{name}.kernels.toml").write_text(dump(constants), encoding="utf-8")
        counts = f"{len(constants.gemm)} GEMM, {len(constants.attention)} attention sets"
        _say(f"{out / name}.kernels.toml: {counts}")
    return 0
