"""The GEMM residual grid: a partition of unity, linear between nodes, fitted back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.costs.gemm_residual import NODES, corners, correction
from validation.tools.fit_gemm import fit_grid


@given(*[st.floats(1.0, 2e5)] * 3)
def test_grid_weights_are_a_partition(m: float, n: float, k: float) -> None:
    indices, weights = corners(np.array([m]), np.array([n]), np.array([k]))
    assert weights.sum() == pytest.approx(1.0)
    assert weights.min() >= 0.0
    assert 0 <= indices.min() <= indices.max() < np.prod(NODES)


def test_the_grid_is_linear_between_nodes_and_fades_out() -> None:
    levels = np.arange(NODES[0])[:, None, None] * np.ones(NODES) / 100
    grid = tuple(levels.ravel().tolist())
    m = np.array([512.0, 1024.0, 512 * 2**0.5, 4096.0, 1e6])
    found = correction(grid, m, np.full(5, 4096.0), np.full(5, 4096.0))
    assert found == pytest.approx([0.0, 0.01, 0.005, 0.03, 0.06])
    assert correction((0.1,) * int(np.prod(NODES)), np.array([256.0, 362.04]), *[np.full(2, 4096.0)] * 2) == pytest.approx(
        [0.0, 0.05], abs=1e-3
    )


def test_a_known_grid_comes_back_despite_outliers() -> None:
    rng = np.random.default_rng(3)
    m, n, k = (512 * 2 ** rng.uniform(0, top - 1, 6000) for top in NODES)
    truth = 0.05 * np.log2(n / 4096)
    logs = truth + np.where(rng.random(6000) < 0.1, 0.6, 0.0)
    left = truth - correction(fit_grid(m, n, k, logs), m, n, k)
    assert float(np.median(np.abs(left))) < 0.02
