"""Every tensor by name and lifetime: the sum at the peak is what memory says, and replays free what they ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpar.result.allocations import Replays
from simpar.result.tensors import Tensor, alive_at_peak
from simpar.specs.scenario import read_scenario
from simpar.step import simulate

SCENARIOS = Path(__file__).parent.parent / "scenarios"
NAMES = [
    "mixtral-8x22b_h100x128_tp2pp8ep8", "llama3.1-70b_h100x64_tp4cp2pp4", "korthikanti-22b_a100x8_tp8pp1", "mlp-4096x24_a100x8_pp8",
    "deepseek-v3_h800x2048_pp16ep64", "llama3.1-405b_h100x16384_tp8cp16pp16",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_tensors_alive_at_the_peak_are_the_memory_that_comes_and_goes(name: str) -> None:
    """Beside gradients in flight of the whole rank and rounding, a few per cent."""
    result = simulate(read_scenario(SCENARIOS / f"{name}.toml"), detail="stage")
    worst = result.worst_rank
    alive = alive_at_peak(result.tensors(worst))
    moving = worst.allocated_bytes - sum(amount for _, amount in worst.static)
    assert sum(a.size for a in alive) == pytest.approx(moving, rel=0.06)
    assert [a.size for a in alive] == sorted((a.size for a in alive), reverse=True)
    assert all(0 <= a.mean_life_s <= result.step_time_s for a in alive)


@pytest.mark.parametrize("name", [*NAMES, "alexnet_gtx580x2_tp2"])
def test_a_replay_allocates_what_memory_says(name: str) -> None:
    """Schedules that mix whole and split backwards (DualPipe) and convolutions included."""
    worst = simulate(read_scenario(SCENARIOS / f"{name}.toml"), detail="stage").worst_rank
    assert isinstance(worst.replays, Replays)
    assert 0.9 < worst.replays.peak(worst.rank).allocated_bytes / worst.allocated_bytes < 1.4


def test_lifetimes_lie_on_the_timeline() -> None:
    """What a forward saves lives from its pass to the end of the backward that uses it."""
    result = simulate(read_scenario(SCENARIOS / "llama3.1-70b_h100x64_tp4cp2pp4.toml"), detail="stage")
    tensors = result.tensors(result.memory[-1])
    assert all(0 <= t.start_s <= t.end_s <= result.step_time_s * (1 + 1e-9) for t in tensors)
    assert all(t.asked < t.freed and t.size > 0 for t in tensors)
    saved = [t for t in tensors if t.name == "attention/qkv_out"]
    passing = [t for t in tensors if t.name.endswith(".gradient")]
    last = [t for t in saved if t.stage == max(t.stage for t in saved)]
    # What the last stage saves is used by the backward that follows at once.
    assert max(t.end_s - t.start_s for t in last) < 0.2 * max(t.end_s - t.start_s for t in saved)
    assert min(t.end_s - t.start_s for t in saved) > 1.5 * max(t.end_s - t.start_s for t in passing)


def test_the_peak_is_where_most_bytes_live() -> None:
    def one(name: str, size: int, asked: int, freed: int) -> Tensor:
        return Tensor(name, 0, 0, size, asked, freed, 0.0, 2.0)

    found = alive_at_peak([one("a", 5, 1, 4), one("b", 3, 2, 3), one("b", 4, 5, 9), one("b", 2, 6, 9), one("a", 3, 7, 8)])
    assert [(a.name, a.count, a.size) for a in found] == [("b", 2, 6), ("a", 1, 3)]


def test_json_lists_them() -> None:
    rows = json.loads(json.dumps(simulate(read_scenario(SCENARIOS / "korthikanti-22b_a100x8_tp8pp1.toml")).tensors_at_peak()))
    assert {"mlp/fc2_in", "mlp/activation_in", "attention/qkv_out"} <= {row["tensor"] for row in rows}
    assert set(rows[0]) == {"tensor", "count", "bytes", "mean_life_s"}
