"""Host time of values that a step reads from the device: the host is no further than the device there."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.costs.host import HostTimes, launch_seconds
from simpar.costs.pricer import LayoutPricer
from simpar.parallel.layout import Layout
from simpar.specs.scenario import make_scenario
from simpar.step import cost_models

SLOW = 1.6
"""An x86 host of which no more is known."""
PAIRS = 7
"""Of a layer: queries, keys, values, output, gate, up, down."""


def waits(block: int, phase: str, *, version: str = "2026-01", hardware: str = "dgx-h100", gpus: int = 1, **changes: Any) -> float:
    """Host seconds of one of prime-rl's blocks over those of its launches, without the device's own: a forward's, or the head's."""
    plan = {"zero_stage": 3, "recompute": "full", **changes.pop("plan", {})}
    chosen = make_scenario({
        "model": "qwen3-8b", "framework": "prime-rl", "framework_version": version,
        "cluster": {"hardware": hardware, "num_nodes": 1, "num_gpus": gpus}, "plan": plan,
        "training": {"sequence_length": 4096, "global_batch_size": gpus, "cross_entropy": "tiled", **changes},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    pricer = LayoutPricer(layout, *cost_models(chosen, layout.hardware))
    blocks = layout.stage_blocks[0]
    head = block == -1
    drained = pricer.block(blocks[block], phase if head else "F").seconds  # of a layer's backward, its repeated forward
    found = HostTimes(pricer.layout, pricer.block).seconds(blocks[block], phase)
    more = found - launch_seconds(pricer.layout, pricer.block(blocks[block], phase), phase)
    return more - drained if more else 0.0


def test_a_loop_over_tokens_comes_between_the_head_s_forward_and_its_backward() -> None:
    """Of each token the host's part, on a host of which no more is known, and the device's answer."""
    assert waits(-1, "B") == pytest.approx(4096 * (SLOW * 4.3e-6 + 12.9e-6))
    assert waits(-1, "B", gpus=8) == pytest.approx(4096 * (SLOW * 4.3e-6 + 12.9e-6))
    assert waits(-1, "F") == waits(1, "B") == 0.0


def test_when_and_where_it_is() -> None:
    """Reinforcement learning alone, from August 2025 to June 2026."""
    assert waits(-1, "B", cross_entropy="unfused") == 0.0
    assert waits(-1, "B", version="2025-08") == waits(-1, "B", version="2026-07") == 0.0


@pytest.mark.parametrize(
    ("hardware", "version", "reads"), [("dgx-h100", "2026-01", 2), ("dgx-b200", "2026-01", 10), ("dgx-b200", "2026-02", 2)]
)
def test_pairs_of_several_adapters_read_how_many_tokens_each_has(hardware: str, version: str, reads: int) -> None:
    lora = {"trainable": "lora", "lora_modules": "all", "lora_adapters": 4, "hardware": hardware, "version": version}
    forward = PAIRS * reads * 2 * 9e-6 * SLOW
    assert waits(1, "F", **lora) == pytest.approx(forward)
    assert waits(1, "B", **lora) == pytest.approx(forward)
    assert waits(1, "B", plan={"recompute": "none"}, **lora) == 0.0


def layout_of(framework: str, *, gpus: int = 8, adapters: int = 1) -> LayoutPricer:
    """A run of low-rank adapters beside every product."""
    chosen = make_scenario({
        "model": "qwen3-8b", "framework": framework, "framework_version": "2026-01",
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": gpus}, "plan": {"zero_stage": 3},
        "training": {"sequence_length": 4096, "global_batch_size": 8, "trainable": "lora", "lora_modules": "all",
                     "lora_adapters": adapters},
    })  # fmt: skip
    layout = Layout.of(chosen, 1)
    return LayoutPricer(layout, *cost_models(chosen, layout.hardware))


@pytest.mark.parametrize(("phase", "each"), [("F", 67e-6), ("B", 108e-6)])
def test_weights_of_all_adapters_pass_through_the_hooks_of_their_layer(phase: str, each: float) -> None:
    one, four = layout_of("prime-rl"), layout_of("prime-rl", adapters=4)
    seconds = [launch_seconds(p.layout, p.block(p.layout.stage_blocks[0][1], phase), phase) for p in (one, four)]
    assert seconds[1] - seconds[0] == pytest.approx(PAIRS * 2 * 3 * each)


def test_weights_are_sharded_on_one_rank_too() -> None:
    assert layout_of("prime-rl", gpus=1).layout.gathers_by_layer
    assert not layout_of("torchtitan", gpus=1).layout.gathers_by_layer
