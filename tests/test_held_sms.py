"""Compute beside a collective that holds SMs: persistent matmuls come in waves, other kernels lose the SMs."""

from __future__ import annotations

import pytest

from simpar.costs.held_sms import second_wave, slowed
from simpar.parallel.work import Gemm, GroupedGemm, MemoryWork
from simpar.specs.framework import framework
from simpar.specs.scenario import make_scenario
from simpar.step import prepare

SMS, HELD = 132, 16


def tiles(count: int, direction: str = "forward") -> Gemm:
    """A matmul of `count` tiles of 128 x 256 outputs."""
    m, n, k = {"forward": (128 * count, 256, 512), "dgrad": (128 * count, 512, 256), "wgrad": (512, 128 * count, 256)}[direction]
    return Gemm(m, n, k, "bf16", direction)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    ("count", "wave"),
    [(100, 0.0), (116, 0.0), (117, 1.0), (132, 1.0), (133, 0.5), (264, 1.0), (265, 2 / 3), (1320, 1.0), (1321, 10 / 11)],
)
def test_the_second_wave_has_the_tiles_of_the_last_blocks(count: int, wave: float, direction: str) -> None:
    """Blocks 0..131 take tiles in turn: where they do not divide, the last blocks have one tile less than the first."""
    assert second_wave(tiles(count, direction), SMS, HELD) == pytest.approx(wave)


def test_pieces_are_matmuls_of_their_own() -> None:
    whole = Gemm(128 * 264, 256, 512, "bf16", "forward")
    assert second_wave(whole, SMS, HELD) == 1.0
    assert second_wave(Gemm(128 * 264, 256, 512, "bf16", "forward", pieces=4), SMS, HELD) == 0.0


def test_experts_on_several_streams_leave_no_sm_idle_and_those_of_one_kernel_wait_together() -> None:
    experts = GroupedGemm(4, 4 * 128.0 * 200, 256, 512, "bf16", "forward")
    assert second_wave(experts, SMS, HELD) == 0.0
    assert second_wave(experts, SMS, HELD, one_kernel=True) == pytest.approx(6 / 7)  # 800 tiles on 132 SMs
    alone = GroupedGemm(1, 128.0 * 264, 256, 512, "bf16", "forward")
    assert second_wave(alone, SMS, HELD) == second_wave(alone, SMS, HELD, one_kernel=True) == 1.0


@pytest.mark.parametrize(("name", "one"), [("megatron-core", False), ("nemo", False), ("hai-llm", True), ("torchtitan", True)])
def test_which_frameworks_multiply_for_all_experts_in_one_kernel(name: str, one: bool) -> None:
    assert framework(name).kernels.experts_in_one_kernel is one


def test_only_persistent_matmuls_wait_for_a_second_wave() -> None:
    work = [(tiles(1320), 3.0), (MemoryWork("norm", 1e6), 1.0)]
    least = HELD / (SMS - HELD)
    assert slowed(work, SMS, HELD, "hopper") == pytest.approx((3.0 + least) / 4.0)
    # Half as much again in which the device waits for the host; never less than the SMs that are held.
    assert slowed(work, SMS, HELD, "hopper", 2.0) == pytest.approx((3.0 + least) / 6.0)
    assert slowed(work, SMS, HELD, "hopper", 1e6) == least
    assert slowed(work, SMS, HELD, "ampere") == slowed(work, SMS, HELD, "blackwell") == slowed([], SMS, HELD, "hopper") == least


def test_fully_sharded_training_on_hopper_loses_more_beside_a_collective() -> None:
    found = {}
    for hardware in ("dgx-a100-80gb", "dgx-h100", "dgx-b200"):
        run = make_scenario(
            {
                "model": "llama3.1-8b", "framework": "torchtitan", "framework_version": "2025-02",
                "cluster": {"hardware": hardware, "num_nodes": 4}, "plan": {"zero_stage": 3},
                "training": {"sequence_length": 4096, "global_batch_size": 32, "micro_batch_size": 1},
            }
        )  # fmt: skip
        found[hardware] = float(prepare(run).table.interference.max())
    assert 0.4 < found["dgx-h100"] < 1.0
    assert 0.0 < found["dgx-b200"] < 0.3
    assert 0.0 < found["dgx-a100-80gb"] < 0.4
