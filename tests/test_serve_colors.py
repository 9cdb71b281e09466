"""Colours that stand side by side stay apart for readers without red, green or blue cones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from simpar.report import palette
from simpar.report.gantt import FOLDED, KINDS
from simpar.report.palette import PHASES, TRANSFERS

Vector = NDArray[np.float64]
# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear sRGB.
SIGHT = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
# Ottosson 2020: linear sRGB -> cone response -> OKLab.
CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
         (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
LAB = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
       (0.0259040371, 0.7827717662, -0.8086757660))  # fmt: skip


def seen(color: str, sight: str) -> Vector:
    """OKLab of a colour as seen."""
    part = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return np.array(LAB) @ np.cbrt(np.array(CONES) @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1))


def apart(first: str, second: str, sight: str) -> float:
    """Distance; 0.02 is just noticeable side by side, white and black are 1 apart."""
    return float(np.linalg.norm(seen(first, sight) - seen(second, sight)))


def test_the_measure_knows_black_white_and_what_deuteranopes_mix_up() -> None:
    assert apart("#000000", "#ffffff", "usual") == pytest.approx(1.0, abs=1e-3)
    # The two that the Gantt had before: purple and bluish green.
    assert apart("#cc79a7", "#009e73", "usual") > 0.25
    assert apart("#cc79a7", "#009e73", "deuteranopia") < 0.08


@pytest.mark.parametrize("sight", list(SIGHT))
def test_what_the_compute_stream_runs_is_told_apart(sight: str) -> None:
    shades = [(name, color) for name, both in PHASES.items() for color in dict.fromkeys(both)]
    shades += [("idle", palette.IDLE), ("folded", palette.FOLDED)]
    near = {
        (a, b): apart(x, y, sight)
        for (a, x), (b, y) in itertools.combinations(shades, 2)
        if a != b
    }  # fmt: skip
    assert min(near.values()) > 0.07, min(near, key=lambda pair: near[pair])
    # Full shades, which the legend shows, are further apart.
    assert min(apart(x[0], y[0], sight) for x, y in itertools.combinations(PHASES.values(), 2)) > 0.09


@pytest.mark.parametrize("sight", list(SIGHT))
def test_shades_of_odd_and_even_micro_batches_are_told_apart(sight: str) -> None:
    assert min(apart(a, b, sight) for a, b in PHASES.values() if a != b) > 0.08


@pytest.mark.parametrize("sight", list(SIGHT))
def test_what_other_streams_run_is_told_apart(sight: str) -> None:
    near = {(a, b): apart(TRANSFERS[a], TRANSFERS[b], sight) for a, b in itertools.combinations(TRANSFERS, 2)}
    assert min(near.values()) > 0.07, min(near, key=lambda pair: near[pair])
    assert min(apart(color, palette.IDLE, sight) for color in TRANSFERS.values()) > 0.07


def test_every_kind_of_op_takes_its_colours_from_the_palette() -> None:
    known = {color for both in PHASES.values() for color in both} | {*TRANSFERS.values(), palette.FOLDED}
    assert {color for _, *both in (*KINDS.values(), FOLDED) for color in both} <= known


@pytest.mark.parametrize("sight", list(SIGHT))
def test_the_two_colours_of_curves_and_tornado_are_told_apart(sight: str) -> None:
    assert apart(palette.BLUE, palette.VERMILION, sight) > 0.1
    assert apart(palette.BLUE, palette.ORANGE, sight) > 0.1
