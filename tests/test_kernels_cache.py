"""Chains of elementary kernels whose tensors stay in the L2 cache."""

from __future__ import annotations

import pytest

from simpar.costs.kernels import KernelModel
from simpar.costs.memory_bound import KERNEL_LATENCY_S
from simpar.graph.kernels import RMSNORM_CHAIN
from simpar.specs.hardware import load_hardware

CACHE = 72e6
"""Bytes of an RTX 4090's L2."""


def traffic_s(kernel: str, moved: float, *, launches: int = 1, hardware: str = "rtx-4090", cache: bool = True) -> float:
    """Seconds of the traffic of `launches` kernels that move `moved` together."""
    profile = load_hardware(hardware)
    if not cache:
        profile = profile.model_copy(update={"gpu": profile.gpu.model_copy(update={"l2_cache": None})})
    price = KernelModel(profile).memory_bound(kernel, moved, implementation="eager", launches=launches)
    return price.seconds - launches * KERNEL_LATENCY_S


@pytest.mark.parametrize("kernel", ["stream", "composite"])
def test_a_chain_reads_from_the_cache_what_it_wrote_there(kernel: str) -> None:
    """Half of the traffic up to half the cache, all of it from the whole cache on, between them in proportion."""
    for share, from_memory in ((0.1, 0.5), (0.5, 0.5), (0.75, 0.75), (1.0, 1.0), (10.0, 1.0)):
        moved = share * CACHE
        assert traffic_s(kernel, moved) == pytest.approx(from_memory * traffic_s(kernel, moved, cache=False)), share
    assert traffic_s(kernel, 4 * 0.5 * CACHE, launches=4) == pytest.approx(4 * traffic_s(kernel, 0.5 * CACHE))


def test_one_kernel_of_its_own_finds_nothing_in_the_cache() -> None:
    """Copies of gathered weights, updates, what follows a product, and kernels whose rate is not the memory's."""
    for kernel in ("copy", "adam", "norm", "cast", "cross_entropy", "embedding", "activation", "residual"):
        assert traffic_s(kernel, 0.1 * CACHE) == traffic_s(kernel, 0.1 * CACHE, cache=False)


@pytest.mark.parametrize("hardware", ["mi300x", "tpu-v4", "rtx-4090"])
def test_only_caches_whose_chains_were_measured_count(hardware: str) -> None:
    cached, memory = (traffic_s("stream", 1e6, hardware=hardware, cache=cache) for cache in (True, False))
    assert cached == pytest.approx(memory / 2 if hardware == "rtx-4090" else memory)


def test_the_multiprocessors_bound_a_chain_in_the_cache() -> None:
    """An H100's move 10.4 x 132 x 1.755 GHz = 2.41 TB/s in chains that cast, less than its memory's 3.35."""
    cached, memory = (traffic_s("composite", 1e6, hardware="dgx-h100", cache=cache) for cache in (True, False))
    assert cached == memory == pytest.approx(1e6 / (10.4 * 132 * 1.755e9))
    cached, memory = (traffic_s("stream", 1e6, hardware="dgx-h100", cache=cache) for cache in (True, False))
    assert cached == pytest.approx(memory / 2)


def test_chains_take_as_long_as_published() -> None:
    """RMSNorm of transformers, forward and backward: 8,192 x 4,096 values on an H100 (1.785 ms, 25 kernels), 2,048 x 32,768 on an
    A100 (6.91)."""
    norm = sum(RMSNORM_CHAIN[:2])
    latency = 25 * KERNEL_LATENCY_S
    h100 = traffic_s("composite", norm * 8192 * 4096, hardware="dgx-h100")
    assert h100 + latency == pytest.approx(1.785e-3, rel=0.06)
    a100 = traffic_s("composite", norm * 2048 * 32768, hardware="dgx-a100-80gb")
    assert a100 + latency == pytest.approx(6.91e-3, rel=0.02)


def test_more_bytes_never_take_less_time() -> None:
    sizes = [0.01 * CACHE * k for k in range(1, 300)]
    seconds = [traffic_s("stream", moved) for moved in sizes]
    assert seconds == sorted(seconds)
