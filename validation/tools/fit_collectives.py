"""Constants of the collective laws from tables of measured collectives, written as fitted/*.collectives.toml.

Stages, each with the earlier ones fixed: (1) links of a scale-up fabric, by GPU generation and fabric kind, on groups inside
one domain; (2) the cost that a benchmark program itself adds; (3) the network, by generation, fabric and NIC kind, on groups
across domains; (4) what each remote rank costs an all-to-all, by NIC kind. All series (hardware, nodes, collective) weigh the
same; within one, large and small messages apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from simpar.costs.collective_defaults import NETWORKS
from simpar.errors import InputError
from simpar.evidence.collective_rows import Cell, Harnesses, Key, errors, predict, read_rows
from simpar.evidence.kernel_tables import there
from simpar.evidence.robust import Array
from simpar.specs.collective_constants import (
    CollectiveConstants,
    CollectiveFit,
    NetworkConstants,
    ScaleUpConstants,
    Scope,
    TimeBand,
)
from simpar.toml import toml
from validation.tools.collective_cells import cells_of
from validation.tools.collective_stages import NO_NETWORK, fit_harnesses, fit_network, fit_pipelines, fit_scale_up
from validation.tools.fit_expert import band, fit_expert

HEADER = (
    "# Written by `python -m validation.tools.fit collectives --data DIR`; do not edit.\n"
    "# SI units; efficiencies are fractions of the raw link or NIC rate. Laws: docs/formulas_collectives.md.\n"
)
HARNESSES = "\n# What a benchmark program adds to a collective's time, and the share of the rate it reaches.\n\n"
C = TypeVar("C", ScaleUpConstants, NetworkConstants)
TABLE = "collectives_fit.csv"
DECADES = (0.0, 2.0**16, 2.0**20, 2.0**24, 2.0**28)
"""Message sizes at which the interval changes."""
FEWEST = 12
"""Rows that a band of its own needs."""
STAND_INS: dict[Key, Key] = {("volta", "nvswitch"): ("ampere", "nvswitch")}
RCCL = "xgmi"
"""Scale-up kind of the machines that run another library, measured on one node count: its start and rate hold what peers cost."""


@dataclass(slots=True)
class Fitted:
    """Everything the fit found."""

    ups: dict[Key, ScaleUpConstants] = field(default_factory=dict)
    nets: dict[Key, NetworkConstants] = field(default_factory=dict)
    harnesses: Harnesses = field(default_factory=dict)

    def predict(self, cell: Cell) -> Array:
        """Predicted seconds [rows of the cell]."""
        up = self.ups[STAND_INS.get(cell.key[:2], cell.key[:2])]
        return predict(cell, up, self.nets.get(cell.key, NO_NETWORK), self.harnesses)


def _keyed(cells: Iterable[Cell], length: int | None) -> dict[Key, list[Cell]]:
    found: dict[Key, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.key[:length]].append(cell)
    return dict(sorted(found.items()))


def exchanges(cells: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """All-to-alls across domains of machines measured with several numbers of domains, and all other cells.

    Only these tell what a remote rank costs from what the start does; all else is fitted without them.
    """

    def across(cell: Cell) -> bool:
        return cell.collective == "all_to_all" and cell.geometry.domains > 1

    far = _keyed(filter(across, cells), None)
    several = {key: mine for key, mine in far.items() if len({c.geometry.domains for c in mine}) > 1}
    return list(chain(*several.values())), [c for c in cells if not (across(c) and c.key in several)]


def pipeline(key: Key, measured: Mapping[str, float]) -> float:
    """`peer_pipeline_s` of a network: that `measured` on its kind of NIC, else on the kind that lends its constants."""
    kind = key[2] if key[2] in measured else NETWORKS.get(key[2], "")
    return 0.0 if key[1] == RCCL else measured.get(kind, 0.0)


def fit_all(cells: Sequence[Cell]) -> Fitted:
    """The four stages over all cells."""
    several, cells = exchanges(cells)
    near, far = [c for c in cells if c.geometry.domains == 1], [c for c in cells if c.geometry.domains > 1]
    plain = _keyed((c for c in near if not c.harness and c.key[:2] not in STAND_INS), 2)
    result = Fitted({key: fit_scale_up(key, mine, {}) for key, mine in plain.items()})
    for _ in range(2):  # a benchmark's cost and what only that benchmark measured depend on each other
        result.harnesses = fit_harnesses([c for c in near if c.key[:2] in result.ups], result.ups)
        for key, mine in _keyed((c for c in near if c.key[:2] in result.ups), 2).items():
            if {c.collective for c in mine} - {c.collective for c in plain[key]}:
                result.ups[key] = fit_scale_up(key, mine, result.harnesses)
    for key, mine in _keyed((c for c in far if c.key[:2] in result.ups), None).items():
        result.nets[key] = fit_network(mine, result.ups, result.harnesses)
    pipelines = fit_pipelines([c for c in several if c.key in result.nets], result.ups, result.nets, result.harnesses)
    result.nets = {key: net.model_copy(update={"peer_pipeline_s": pipeline(key, pipelines)}) for key, net in result.nets.items()}
    return result


def bands_of(cells: Sequence[Cell], model: Callable[[Cell], Array]) -> tuple[TimeBand, ...]:
    """80 % intervals of measured / predicted by scope and size, where there are rows enough."""
    found = []
    scopes: tuple[tuple[Scope, bool], ...] = (("domain", False), ("network", True))
    for scope, far in scopes:
        mine = [c for c in cells if (c.geometry.domains > 1) == far]
        if not mine:
            continue
        ratio = np.concatenate([c.measured_s / model(c) for c in mine])
        size = np.concatenate([c.bytes_ for c in mine])
        for start, stop in zip(DECADES, (*DECADES[1:], np.inf), strict=True):
            inside = ratio[(size >= start) & (size < stop)]
            inside = inside if len(inside) >= FEWEST else ratio
            found.append(band(scope, inside, start))
    return tuple(found)


def held_out(cells: Sequence[Cell], label: Callable[[Cell], int], refit: Callable[[list[Cell]], Callable[[Cell], Array]]) -> float:
    """Mean error over series of at least 1 MiB when each label (node count, group size) is predicted from the others."""
    labels = sorted({label(c) for c in cells})
    if len(labels) < 3:
        return 0.0
    found: list[float] = []
    for left_out in labels:
        model = refit([c for c in cells if label(c) != left_out])
        _, _, by_series = errors([c for c in cells if label(c) == left_out], model)
        found += [large for large, _ in by_series.values() if np.isfinite(large)]
    return float(np.mean(found))


def _record(cells: Sequence[Cell], model: Callable[[Cell], Array], held: float) -> CollectiveFit:
    large, small, by_series = errors(cells, model)
    bias = float(np.median(np.concatenate([model(c) / c.measured_s - 1 for c in cells])))
    return CollectiveFit(
        source=TABLE, rows=sum(len(c.bytes_) for c in cells), series=len(by_series), mape_large=round(large, 4),
        mape_small=round(small, 4), bias=round(bias, 4), held_out_mape_large=round(held, 4),
    )  # fmt: skip


def held_out_network(key: Key, cells: Sequence[Cell], result: Fitted) -> float:
    """Leave-one-node-count-out error of one network."""

    def refit(rest: list[Cell]) -> Callable[[Cell], Array]:
        net = fit_network(rest, result.ups, result.harnesses)
        return lambda cell: predict(cell, result.ups[cell.key[:2]], net, result.harnesses)

    return held_out([c for c in cells if c.key == key and c.geometry.domains > 1], lambda c: c.series[1], refit)


def held_out_scale_up(key: Key, cells: Sequence[Cell], result: Fitted) -> float:
    """Leave-one-group-size-out error of one scale-up fabric, over what nccl-tests measured."""
    mine = [c for c in cells if c.key[:2] == key and c.geometry.domains == 1 and not c.harness]

    def refit(rest: list[Cell]) -> Callable[[Cell], Array]:
        up = fit_scale_up(key, rest, result.harnesses, result.ups[key])
        return lambda cell: predict(cell, up, NO_NETWORK, result.harnesses)

    return held_out([c for c in mine if c.collective != "send_recv"], lambda c: c.geometry.size, refit)


def finished(cells: Sequence[Cell], result: Fitted) -> dict[Key, CollectiveConstants]:
    """Constants with the errors they reach and their intervals, one set per (generation, scale-up kind, NIC kind)."""

    def described(constants: C, key: Key, far: bool, held_out: Callable[[Key, Sequence[Cell], Fitted], float]) -> C:
        mine = [c for c in cells if (c.key if far else c.key[:2]) == key and (c.geometry.domains > 1) == far]
        fit = _record(mine, result.predict, held_out(key, cells, result))
        reached = {"machine": " ".join(key), "kind": "measured", "fit": fit}
        return constants.model_copy(update=reached)

    ups = {key: described(up, key, False, held_out_scale_up) for key, up in result.ups.items()}
    nets = {key: described(net, key, True, held_out_network) for key, net in result.nets.items()}
    found: dict[Key, CollectiveConstants] = {}
    for key in sorted({c.key for c in cells if c.key[:2] in ups}):
        mine = [c for c in cells if c.key == key or (c.key[:2] == key[:2] and c.geometry.domains == 1)]
        bands = bands_of(mine, result.predict)
        found[key] = CollectiveConstants(scale_up=ups[key[:2]], network=nets.get(key), bands=bands)
    return found


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """`table` without empty tables in it."""
    return {key: _given(value) if isinstance(value, dict) else value for key, value in table.items() if value != {}}


def _write(out: Path, key: Key, constants: CollectiveConstants) -> None:
    """The file of a key; measured points belong to profiles and are left out."""
    table = _given(constants.model_dump(exclude={"points"}))
    path = out / f"{'_'.join(key)}.collectives.toml"
    path.write_text(HEADER + toml(table, number="{:.5g}".format), encoding="utf-8")


def add_kernels(data: Path, out: Path, found: dict[Key, CollectiveConstants]) -> None:
    """Adds the constants of expert-parallel kernels to what is written already."""
    expert = fit_expert(data)
    for key, constants in found.items():
        if key[0] in expert:
            fitted, interval = expert[key[0]]
            bands = (*(b for b in constants.bands if b.scope != "expert"), interval)
            _write(out, key, constants.model_copy(update={"expert": fitted, "bands": bands}))
    for name, (fitted, _) in expert.items():
        record = fitted.fit
        print(f"{name:36s} kernels  {record.rows:5d} rows  mean error {record.mape_large:6.1%}  ({record.source})")


def run(data: Path, out: Path) -> int:
    """Fits on DATA/collectives_fit.csv and writes OUT/*.collectives.toml; prints what it reached.

    Raises:
        InputError: the table is missing or has no row to fit on.
    """
    path = data / TABLE if data.is_dir() else data
    if not there(path):
        raise InputError(f"{path}: no such file; --data names the folder that holds {TABLE}")
    cells = cells_of(read_rows(path))
    if not cells:
        raise InputError(f"{path}: no row can be fitted; rows need hardware, nodes, gpus, collective, bytes, time_us")
    result = fit_all(cells)
    out.mkdir(parents=True, exist_ok=True)
    programs = {name: {"added_s": added, "rate": rate} for name, (added, rate) in sorted(result.harnesses.items())}
    text = HEADER + HARNESSES + toml(programs, number="{:.5g}".format)
    (out / "benchmark_programs.toml").write_text(text, encoding="utf-8")
    several, rest = exchanges(cells)
    found = finished(rest, result)
    for key, constants in found.items():
        _write(out, key, constants)
    add_kernels(path.parent, out, found)
    for key, constants in found.items():
        up, net = constants.scale_up, constants.network
        for part, r in (("links", up.fit if up else None), ("network", net.fit if net else None)):
            if r is not None:
                print(f"{' '.join(key):36s} {part:8s} {r.series:3d} series {r.rows:5d} rows  >=1 MiB {r.mape_large:6.1%}  "
                      f"below {r.mape_small:6.1%}  held out {r.held_out_mape_large:6.1%}")  # fmt: skip
    for key, mine in _keyed(several, None).items():
        print(f"{' '.join(key):36s} exchange {len(mine):3d} series {sum(len(c.bytes_) for c in mine):5d} rows  "
              f">=1 MiB {errors(mine, result.predict)[0]:6.1%}")  # fmt: skip
    large, small, by_series = errors(cells, result.predict)
    print(f"all {len(by_series)} series: >=1 MiB {large:.1%}, below {small:.1%}")
    return 0
