"""Measured collectives: their fit, and the efficiencies of a profile set so that its prices agree with them.

The fit is the law of docs/formulas_collectives.md, t(S) = alpha + beta S + gamma sqrt(S), least squares of the relative error
with all three not negative. A profile has no place for a law per group size; what carries over to other groups is the share
of the link that a collective reaches, so large messages set the efficiencies and latencies stay the base's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from typing import Any

import numpy as np

from simpar.costs.collective_defaults import constants_of
from simpar.costs.collective_law import packed
from simpar.costs.collectives import COLLECTIVES, CollectiveModel
from simpar.errors import InputError, Violation
from simpar.specs.collective_constants import CollectiveConstants
from simpar.specs.hardware import HardwareProfile

LARGE_BYTES = 16 * 2**20
"""Messages from which bandwidth decides; a series without any gives its largest."""
LEAST_FACTOR = 0.02
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSeries:
    """One collective on one group.

    Attributes:
        collective: simpar's name.
        ranks, nodes: the group.
        bytes, seconds: measured points [points], sizes as nccl-tests count.
        buffers: "out-of-place" or "in-place".
        alpha_s, beta_s_per_byte, gamma_s_per_sqrt_byte: the fit.
        mape: mean |fit / measured - 1|.
        source: the file.
    """

    collective: str
    ranks: int
    nodes: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    buffers: str
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_sqrt_byte: float
    mape: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        return {
            "collective": self.collective, "ranks": self.ranks, "nodes": self.nodes, "buffers": self.buffers, "kind": "measured",
            "source": self.source, "alpha_s": self.alpha_s, "beta_s_per_byte": self.beta_s_per_byte,
            "gamma_s_per_sqrt_byte": self.gamma_s_per_sqrt_byte, "mape": self.mape, "bytes": list(self.bytes),
            "seconds": list(self.seconds),
        }  # fmt: skip

    @staticmethod
    def from_json(row: Mapping[str, Any], where: str) -> CollectiveSeries:
        """The series of `to_json`, fitted again.

        Raises:
            InputError: fields are missing or wrong.
        """
        try:
            size, seconds = [float(b) for b in row["bytes"]], [float(s) for s in row["seconds"]]
            points = list(zip(size, seconds, strict=True))
            return fit(row["collective"], int(row["ranks"]), int(row["nodes"]), points, row["buffers"], row["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: not a measured collective ({error}); write it with `simpar import nccl-tests`") from None


def law_of(bytes_: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(alpha, beta, gamma) >= 0 of least sum((fit / measured - 1)^2): every set of positive terms is tried."""
    size, time = np.asarray(bytes_, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(size), size, np.sqrt(size)], axis=1) / time[:, None]
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    best, found = float("inf"), (0.0, 0.0, 0.0)
    for count in range(1, min(3, len(set(size.tolist()))) + 1):
        for chosen in combinations(range(3), count):
            part = columns[:, list(chosen)] / scale[list(chosen)]
            x = np.linalg.lstsq(part, np.ones_like(time), rcond=None)[0]
            error = float(((part @ x - 1.0) ** 2).sum())
            if (x >= 0).all() and error < best - 1e-12:
                values = [0.0, 0.0, 0.0]
                for i, j in enumerate(chosen):
                    values[j] = float(x[i] / scale[j])
                best, found = error, (values[0], values[1], values[2])
    return found


def fit(
    collective: str, ranks: int, nodes: int, points: Sequence[tuple[float, float]], buffers: str, source: str
) -> CollectiveSeries:
    """The series of `points` (bytes, seconds) with its law.

    Raises:
        InputError: no points, an unknown collective, sizes or times that are not positive.
    """
    wrong = []
    if collective not in COLLECTIVES:
        wrong.append(Violation("collective", collective, "unknown", f"one of {', '.join(COLLECTIVES)}", source))
    if ranks < 2 or nodes < 1 or ranks % nodes:
        rule = "a group has 2 ranks at least, as many on every node"
        wrong.append(Violation("ranks", f"{ranks} on {nodes} nodes", rule, "", source))
    if not points or any(not (b > 0 and 0 < s < float("inf")) for b, s in points):
        wrong.append(Violation("points", len(points), "sizes and times must be positive, one at least", "", source))
    if wrong:
        raise InputError(wrong)
    ordered = sorted(points)
    size, seconds = tuple(b for b, _ in ordered), tuple(s for _, s in ordered)
    alpha, beta, gamma = law_of(size, seconds)
    error = [abs((alpha + beta * b + gamma * b**0.5) / s - 1.0) for b, s in ordered]
    return CollectiveSeries(collective, ranks, nodes, size, seconds, buffers, alpha, beta, gamma, sum(error) / len(error), source)


def _large(series: CollectiveSeries) -> list[tuple[float, float]]:
    points = list(zip(series.bytes, series.seconds, strict=True))
    return [p for p in points if p[0] >= LARGE_BYTES] or points[-1:]


def _paths(hardware: HardwareProfile, series: CollectiveSeries, ring_known: bool) -> tuple[Path, ...]:
    """Which efficiencies the large messages of `series` depend on."""
    name = series.collective
    across = packed(hardware, series.ranks, series.nodes).num_domains > 1
    if name in ("all_to_all", "gather", "scatter"):
        return (("network", "peer_efficiency"),) if across else (("scale_up", "peer", "efficiency"),)
    if name == "send_recv":
        return (("network", "ring_efficiency"),) if across else (("scale_up", "peer", "pair_efficiency"),)
    if not across:
        ring: Path = ("scale_up", "ring", "efficiency", name)
        return (ring, ("scale_up", "nvls", "efficiency")) if name == "all_reduce" else (ring,)
    if name == "all_reduce":
        tree: Path = ("network", "tree_efficiency")
        return (tree,) if ring_known else (tree, ("network", "ring_efficiency"))
    return (("network", "ring_efficiency"),)


def _at(table: Mapping[str, Any], path: Path) -> float | None:
    value: Any = table
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, float) else None


def _scaled(constants: CollectiveConstants, paths: Sequence[Path], factor: float) -> CollectiveConstants:
    """`constants` with the efficiencies at `paths` times `factor`."""
    table = constants.model_dump()
    for path in paths:
        inner = table
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = min(1.0, inner[path[-1]] * factor)
    return CollectiveConstants.model_validate(table)


def _bias(hardware: HardwareProfile, constants: CollectiveConstants, series: Sequence[CollectiveSeries]) -> float:
    """Median of log(predicted / measured) over the large messages of `series`."""
    model = CollectiveModel(hardware.model_copy(update={"collectives": constants}))
    logs = []
    for one in series:
        placement = packed(hardware, one.ranks, one.nodes)
        logs += [log(model.time(one.collective, b, placement).seconds / s) for b, s in _large(one)]
    return float(np.median(logs))


def _solve(
    hardware: HardwareProfile, constants: CollectiveConstants, paths: Sequence[Path], series: Sequence[CollectiveSeries]
) -> tuple[CollectiveConstants, str]:
    """`constants` with the factor on `paths` that takes the bias away, by bisection, and what stands in the way of it."""
    table = constants.model_dump()
    there = [path for path in paths if _at(table, path) is not None]
    label = f"{series[0].collective} ({', '.join(dict.fromkeys(s.source for s in series))})"
    if not there:
        return constants, f"{label}: this profile has no efficiency for it; not taken"
    top = 1.0 / max(_at(table, path) or 1.0 for path in there)
    low, high = log(LEAST_FACTOR), log(top)
    if _bias(hardware, _scaled(constants, there, top), series) > 0.01:
        return constants, f"{label}: faster than the links of the profile allow; not taken: check link and NIC counts and rates"
    if _bias(hardware, _scaled(constants, there, LEAST_FACTOR), series) < 0:
        return constants, f"{label}: so slow that another part of the machine must limit it; not taken"
    for _ in range(40):
        middle = (low + high) / 2
        if _bias(hardware, _scaled(constants, there, exp(middle)), series) > 0:
            low = middle
        else:
            high = middle
    return _scaled(constants, there, exp(high)), ""


def _fits_in(hardware: HardwareProfile, one: CollectiveSeries) -> str:
    """Why `one` cannot be a measurement on `hardware`; empty where it can."""
    if one.ranks > one.nodes * hardware.gpus_per_node:
        return f"{one.ranks} ranks on {one.nodes} nodes of {hardware.gpus_per_node} GPUs"
    if hardware.gpu.vendor == "cpu" or hardware.scale_up.kind in ("ici", "shared-memory"):
        return f"collectives of {hardware.name} have no efficiencies to set"
    return ""


def tune(hardware: HardwareProfile, series: Sequence[CollectiveSeries]) -> tuple[HardwareProfile, list[str]]:
    """`hardware` with the efficiencies that `series` show, and notes on those that could not be taken.

    Out-of-place points count where a group has both. All-gathers and the like come first, since they alone show a ring's
    share of the NIC; then an all-reduce settles the tree's.
    """
    known = constants_of(hardware)
    expert = hardware.collectives.expert
    constants = CollectiveConstants(scale_up=known.scale_up, network=known.network, expert=expert, bands=known.bands)
    groups: dict[tuple[Path, ...], list[CollectiveSeries]] = {}
    notes, taken = [], []
    both = {(s.collective, s.ranks, s.nodes) for s in series if s.buffers == "out-of-place"}
    used = [s for s in series if s.buffers == "out-of-place" or (s.collective, s.ranks, s.nodes) not in both]
    used.sort(key=lambda s: s.collective == "all_reduce")
    for one in used:
        if why := _fits_in(hardware, one):
            notes.append(f"{one.source}: {one.collective}: {why}; not taken")
            continue
        ring_known = any(("network", "ring_efficiency") in paths for paths in groups)
        groups.setdefault(_paths(hardware, one, ring_known), []).append(one)
    for paths, members in groups.items():
        constants, note = _solve(hardware, constants, paths, members)
        if note:
            notes.append(note)
        else:
            taken += [(paths[0][0], s.source) for s in members]
    if not taken:
        return hardware, notes
    return hardware.model_copy(update={"collectives": _labelled(constants, taken)}), notes


def _labelled(constants: CollectiveConstants, taken: Sequence[tuple[str, str]]) -> CollectiveConstants:
    """`constants` that say which files their efficiencies come from; errors of the fit before no longer hold."""
    table = constants.model_dump()
    for part in ("scale_up", "network"):
        files = list(dict.fromkeys(source for name, source in taken if name == part))
        if files and table[part] is not None:
            before = table[part]["fit"]["source"] or table[part]["machine"]
            table[part]["kind"] = "measured"
            table[part]["fit"] = {"source": f"efficiencies: {', '.join(files)}; the rest: {before}"}
    return CollectiveConstants.model_validate(table)
