"""Steps whose buffers a compiler places before they run: nothing is cached, and the loss is part of the graph."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.specs.scenario import make_scenario
from simpar.step import simulate

BASE: dict[str, Any] = {
    "name": "planned",
    "model": "llama3.1-8b",
    "framework": "maxtext",
    "framework_version": "2025-06",
    "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
    "plan": {"zero_stage": 3, "recompute": "full"},
    "training": {"sequence_length": 8192, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16"},
}
LOGITS = 8192 * 128_256


def test_a_planned_step_reserves_what_it_allocates() -> None:
    memory = simulate(make_scenario(BASE)).memory[0]
    assert memory.reserved_bytes == memory.allocated_bytes
    cached = simulate(make_scenario(BASE | {"framework": "torchtitan"})).memory[0]
    assert cached.reserved_bytes > 1.05 * cached.allocated_bytes


@pytest.mark.parametrize("framework", ["maxtext", "maxtext-unpipelined"])
def test_a_loss_inside_the_step_stores_its_logits_and_their_gradient_of_16_bits(framework: str) -> None:
    head = simulate(make_scenario(BASE | {"framework": framework})).layout.stage_blocks[0][-1]
    assert dict(head.saved)["head/logits"] == pytest.approx(4.0 * LOGITS)
