"""What a run costs: money, energy, carbon."""

from __future__ import annotations

from dataclasses import dataclass

from simpar.planning.outcome import Outcome
from simpar.planning.run_model import RunModel

HOUR_S = 3600.0
YEAR_S = 365.25 * 86400.0
JOULE_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Ownership:
    """Machines bought; all in US dollars."""

    usd_per_gpu_all_in: float
    """Accelerator, server and network."""
    life_s: float
    """Time in use over which it is written off."""
    usd_per_kwh: float
    staff_usd_per_s: float


@dataclass(frozen=True, slots=True)
class Economics:
    """Prices and power as numbers."""

    gpus_per_node: int
    gpu_busy_w: float
    gpu_idle_w: float
    node_other_w: float
    pue: float
    carbon_kg_per_kwh: float
    rent_usd_per_gpu_hour: float | None = None
    rent_includes_spares: bool = True
    own: Ownership | None = None

    def energy_kwh(self, model: RunModel, outcome: Outcome) -> float:
        """Energy of the building: training GPUs at idle + (busy - idle) * utilisation, all others idle, times PUE."""
        utilisation = _utilisation(model)
        joules = 0.0
        for (phase, stage), busy_s in outcome.busy.items():
            extra = (self.gpu_busy_w - self.gpu_idle_w) * utilisation[phase, stage]
            joules += busy_s * model.stages[stage].gpus * extra
        idle_node_w = self.gpus_per_node * self.gpu_idle_w + self.node_other_w
        joules += outcome.node_s * idle_node_w
        return joules * self.pue / JOULE_PER_KWH

    def cost_usd(self, model: RunModel, outcome: Outcome) -> float | None:
        """Rent, or amortisation + energy + staff; None without prices."""
        gpu_s = outcome.node_s * self.gpus_per_node
        if self.rent_usd_per_gpu_hour is not None:
            return (gpu_s if self.rent_includes_spares else outcome.gpu_s) / HOUR_S * self.rent_usd_per_gpu_hour
        if self.own is None:
            return None
        return (
            gpu_s * self.own.usd_per_gpu_all_in / self.own.life_s
            + self.energy_kwh(model, outcome) * self.own.usd_per_kwh
            + outcome.wall_s * self.own.staff_usd_per_s
        )


def _utilisation(model: RunModel) -> dict[tuple[int, int], float]:
    """(phase, stage) -> utilisation, averaged over the pieces of the phase by their time."""
    result = {}
    for index, stage in enumerate(model.stages):
        for phase in {piece.phase for piece in stage.pieces}:
            pieces = [piece for piece in stage.pieces if piece.phase == phase]
            time = sum(piece.ideal_s for piece in pieces)
            result[phase, index] = sum(piece.ideal_s * piece.utilisation for piece in pieces) / time
    return result
