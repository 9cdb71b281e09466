"""Mamba 2's scan as its kernels run: bytes and launches by hand, and the host's time where Triton launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simpar.costs import host
from simpar.costs.pricer import LayoutPricer
from simpar.costs.scans import BANDWIDTH, price
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.work import KernelWork
from simpar.specs.scenario import make_scenario
from simpar.step import cost_models

TOKENS = 8192
NANO = "nemotron3-nano-30b-a3b"
"""64 heads of 64, 8 groups, state 128, chunks of 128: 6,144 channels of inputs, B and C."""


def priced(model: str = NANO, framework: str = "megatron-core", **training: Any) -> tuple[LayoutPricer, LocalBlock]:
    """A pricer and the first block with a scan."""
    chosen = make_scenario({
        "model": model, "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {},
        "training": {"sequence_length": TOKENS, "global_batch_size": 8, **training},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
    return pricer, next(b for b in layout.stage_blocks[0] if any(isinstance(op.work, KernelWork) for op in b.forward))


def work_of(block: LocalBlock, phase: str) -> KernelWork:
    """The scan of a block."""
    return next(op.work for op in (block.forward if phase == "F" else block.backward) if isinstance(op.work, KernelWork))


@pytest.mark.parametrize(("phase", "mixed", "out", "head", "state", "group", "launches"), [
    ("F", 4, 2, 26, 4 + 4 + 2 + 2, 4 + 4, 5),
    ("B", 5 * 2 + 2 + 4, 5 * 2, 146, 4 + 8 + 4 + 8 + 4 + 3 * 2, 12 + 12, 35),
])  # fmt: skip
def test_mamba_2_moves_what_its_kernels_do(
    phase: str, mixed: int, out: int, head: int, state: int, group: int, launches: int
) -> None:
    pricer, block = priced()
    work = work_of(block, phase)
    token = mixed * 6144 + out * 64 * 64 + head * 64 + state * 64 * 64 * 128 / 128 + group * 128 * 8
    assert work.bytes_moved == pytest.approx(TOKENS * token)
    assert work.launches == launches
    bandwidth = pricer.layout.hardware.gpu.memory_bandwidth.value
    assert price(pricer.kernels, work).seconds >= work.bytes_moved / (BANDWIDTH * bandwidth)


def test_the_rate_of_mamba_2_is_that_of_its_benchmark() -> None:
    """128 heads of 64, one group, state 128, chunks of 256: 8.45 MFLOP a token, 10.7 to 12.9 million tokens/s."""
    pricer, _ = priced()
    flops = 2 * 256 * 128 + 2 * 256 * 128 * 64 + 4 * 128 * 128 * 64
    found = price(pricer.kernels, KernelWork("ssd", 1e5 * flops, 0.0, 0, backward=False)).seconds
    assert 10.7e6 < 1e5 / found < 12.9e6
    assert price(pricer.kernels, KernelWork("ssd", 1e5 * flops, 0.0, 0, backward=True)).seconds == pytest.approx(2.67 * found)


def further(monkeypatch: pytest.MonkeyPatch, phase: str, **given: Any) -> float:
    """Host seconds of a layer with a scan that Triton's launches add, over what another launch takes, were that nothing."""
    pricer, block = priced(**given)
    found = pricer.block(block, phase)
    with monkeypatch.context() as patched:
        slow = host.launch_seconds(pricer.layout, found, phase)
        patched.setattr(host, "TRITON_LAUNCH_S", 0.0)
        return (slow - host.launch_seconds(pricer.layout, found, phase)) / host.hooks_slowdown(pricer.layout)


def test_triton_launches_take_the_host_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert further(monkeypatch, "F") == pytest.approx(5 * 58e-6)
    assert further(monkeypatch, "B") == pytest.approx(14 * 58e-6)
    assert further(monkeypatch, "F", model="qwen3.5-9b", framework="torchtitan", compile=True) == pytest.approx(5 * 58e-6)
    assert further(monkeypatch, "B", model="qwen3.5-9b", framework="torchtitan", compile=True) == pytest.approx(10 * 58e-6)
    assert further(monkeypatch, "F", cuda_graphs=True) == 0.0
    assert further(monkeypatch, "F", framework="maxtext") == 0.0


def test_a_triton_launch_replaces_the_usual_one() -> None:
    pricer, block = priced()
    found = pricer.block(block, "F")
    assert found.triton_kernels == 5
    usual = host.launch_seconds(pricer.layout, replace(found, triton_kernels=0), "F")
    more = host.launch_seconds(pricer.layout, found, "F") - usual
    assert more == pytest.approx(host.slowdown(pricer.layout) * 5 * (58e-6 - 9e-6))


def test_in_a_compiled_layer_it_replaces_a_compiled_launch() -> None:
    pricer, block = priced("qwen3.5-9b", "torchtitan", compile=True)
    layout, found = pricer.layout, pricer.block(block, "F")
    usual = host.launch_seconds(layout, replace(found, triton_kernels=0), "F")
    more = host.launch_seconds(layout, found, "F") - usual
    assert more == pytest.approx(5 * (host.hooks_slowdown(layout) * 58e-6 - host.slowdown(layout) * 3e-6))
