"""Prices and power of a plan as numbers, with the hardware profile where the plan says nothing."""

from __future__ import annotations

from typing import TypeVar

from simpar.planning.economics import YEAR_S, Economics, Ownership
from simpar.planning.notes import Notes
from simpar.specs.hardware import HardwareProfile, Sourced
from simpar.specs.planfile import PlanFile

Q = TypeVar("Q")
UNKNOWN_GPU_W = 700.0
IDLE_SHARE = 0.15


def resolve_economics(plan: PlanFile, profile: HardwareProfile | None, per_node: int, notes: Notes) -> Economics:
    """The plan's prices and power; what it leaves out comes from `profile` or is assumed."""
    power, gpu = plan.power, profile.gpu if profile else None
    busy = power.gpu_busy
    if busy is None:
        busy = _known("power.gpu_busy", gpu.power if gpu else None, UNKNOWN_GPU_W, "no hardware profile", notes)
    idle = power.gpu_idle
    if idle is None:
        idle = _known("power.gpu_idle", gpu.idle_power if gpu else None, IDLE_SHARE * busy, f"{IDLE_SHARE:.0%} of busy", notes)
    other = power.node_other
    if other is None:
        other = _known("power.node_other", profile.node.host_power if profile else None, 0.0, "unknown, left out", notes)
    for name in ("pue", "carbon_kg_per_kwh"):
        if name not in power.model_fields_set:
            notes.assume(f"power.{name}", getattr(power, name), "assumed: default")
    return Economics(
        per_node,
        busy,
        idle,
        other,
        power.pue,
        power.carbon_kg_per_kwh,
        rent_usd_per_gpu_hour=_rent(plan, notes),
        rent_includes_spares=plan.prices.rent.includes_spares if plan.prices.rent else True,
        own=_ownership(plan, notes),
    )


def _known(name: str, known: Sourced[float] | None, default: float, reason: str, notes: Notes) -> float:
    """The profile's number, else the default; written down either way."""
    if known is None:
        notes.assume(name, f"{default:g} W", f"assumed: {reason}")
        return default
    notes.assume(name, f"{known.value:g} W", known.source, known.kind)
    return known.value


def _rent(plan: PlanFile, notes: Notes) -> float | None:
    rent = plan.prices.rent
    if rent is None:
        return None
    price = _by_hardware(plan, rent.by_hardware, rent.usd_per_gpu_hour)
    notes.assume("prices.rent", f"${price:g} per GPU-hour", "the plan file", "given")
    return price


def _ownership(plan: PlanFile, notes: Notes) -> Ownership | None:
    own = plan.prices.own
    if own is None:
        return None
    all_in = _by_hardware(plan, own.by_hardware, own.usd_per_gpu) * own.server_overhead * own.interconnect_overhead
    notes.assume(
        "prices.own",
        f"${all_in:,.0f} per GPU with server and network over {own.lifetime_years:g} years",
        "the plan file; overheads within arXiv 2405.21015",
        "given",
    )
    return Ownership(
        all_in, own.lifetime_years * YEAR_S * own.utilisation_of_life, own.usd_per_kwh, own.staff_usd_per_year / YEAR_S
    )


def _by_hardware(plan: PlanFile, prices: dict[str, float], default: float) -> float:
    return prices.get(plan.cluster.hardware or "", default)
