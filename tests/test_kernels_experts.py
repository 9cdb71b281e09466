"""Fused experts and the GEMM residual grid: closed forms and metamorphic relations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.costs.gemm_residual import NODES, corners, correction
from simpar.evidence.fit_residual import fit_grid
from simpar.evidence.moe import MoeShapes, moe_seconds, moe_shapes
from simpar.specs.kernel_constants import MoeConstants

PLAIN = MoeConstants(
    library="x",
    mode="burst",
    dtype="bf16",
    rate_flops_per_s=1e15,
    k_overhead=0.0,
    bandwidth_bytes_per_s=1e12,
    permute_bytes_per_s=1e30,
    latency_s=0.0,
    token_s=0.0,
    wave_beta=0.0,
    overlap_power=20.0,
    element_bytes=2.0,
)
"""No routing, no permutes, every height at the full rate."""


def layer(tokens: float = 1024, **changes: float) -> MoeShapes:
    sizes = {"tokens": tokens, "hidden": 4096.0, "inter": 2048.0, "topk": 8.0, "experts": 64.0, "tp": 1.0, "ep": 1.0, **changes}
    return moe_shapes({name: np.array([value]) for name, value in sizes.items()}, np.array([0.0]))


def seconds(c: MoeConstants, a: MoeShapes) -> float:
    return float(moe_seconds(c, 128.0, a)[0])


def test_few_tokens_cost_one_read_of_the_weights() -> None:
    """8 rows an expert: 64 experts x 3 x 4096 x 2048 x 2 bytes at 1 TB/s."""
    assert seconds(PLAIN, layer(64)) == pytest.approx(64 * 3 * 4096 * 2048 * 2 / 1e12, rel=0.02)


def test_a_further_row_tile_reads_the_weights_again() -> None:
    """512 rows an expert are two tiles of 256 rows: twice the weights where the cache keeps nothing of them."""
    c = PLAIN.model_copy(update={"rate_flops_per_s": 1e18})
    once = seconds(c, layer(4096))
    assert seconds(c.model_copy(update={"reread": 1.0}), layer(4096)) == pytest.approx(2 * once, rel=1e-3)


def test_a_planned_tile_is_never_faster_than_the_best() -> None:
    heights = {"height_efficiency": (0.2, 0.4, 0.6, 0.8, 1.0), "reread": 0.3}
    exact, even = (PLAIN.model_copy(update={**heights, "plan": plan}) for plan in ("exact", "even"))
    for tokens in (512, 1536, 3072, 5000, 16384):
        assert seconds(even, layer(tokens)) >= seconds(exact, layer(tokens)) - 1e-15


def test_sorting_outside_the_fused_routing_kernel_costs_more() -> None:
    c = PLAIN.model_copy(update={"routing_choice_s": 1e-9, "routing_expert_s": 1e-11})
    assert seconds(c, layer()) == seconds(PLAIN, layer())
    many = layer(experts=512.0)
    assert seconds(c, many) - seconds(PLAIN, many) == pytest.approx(1024 * 8e-9 + 1024 * 512e-11)


def test_rows_of_other_ranks_move_only_where_they_are_kept() -> None:
    c = PLAIN.model_copy(update={"permute_bytes_per_s": 1e12})
    kept = c.model_copy(update={"remote_share": 1.0})
    assert seconds(kept, layer(ep=1.0)) == seconds(c, layer(ep=1.0))
    assert seconds(kept, layer(ep=8.0)) > seconds(c, layer(ep=8.0))


def test_tuned_layers_are_faster_and_odd_widths_slower() -> None:
    c = PLAIN.model_copy(update={"tuned": ((64, 2048),), "untuned": 0.5, "unaligned": 0.3})
    own, other = seconds(c, layer(8192)), seconds(c, layer(8192, inter=4096.0, tp=2.0, experts=32.0))
    assert own == seconds(PLAIN, layer(8192))
    assert other > 1.5 * seconds(PLAIN, layer(8192, inter=4096.0, tp=2.0, experts=32.0))
    odd = layer(8192, inter=2040.0)
    assert seconds(PLAIN.model_copy(update={"unaligned": 0.3}), odd) == pytest.approx(np.exp(0.3) * seconds(PLAIN, odd))


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
