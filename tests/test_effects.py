"""Effects through the main path: uneven experts, HSDP and FSDP traffic, faults by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpar.engine.effects import expected_load_factor
from simpar.errors import InputError
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.traffic import state_collectives
from simpar.result.result import Result
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model
from simpar.specs.notes import scenario_notes
from simpar.specs.scenario import Scenario, make_scenario, read_scenario
from simpar.specs.training import spread_of
from simpar.step import prepare, simulate
from simpar.topology.cluster import Cluster

ROOT = Path(__file__).parent.parent
MIXTRAL = ROOT / "scenarios" / "mixtral-8x22b_h100x128_tp2pp8ep8.toml"
LLAMA = ROOT / "scenarios" / "llama3.1-70b_h100x64_tp4cp2pp4.toml"


def mixtral(*overrides: str) -> Scenario:
    return read_scenario(MIXTRAL, list(overrides))


def test_uneven_routing_costs_time_and_memory() -> None:
    """More skew, slower and fuller; a capacity factor bounds both."""
    even = simulate(mixtral())
    mild = simulate(mixtral("training.routing.kind=zipf", "training.routing.alpha=0.3"))
    strong = simulate(mixtral("training.routing.kind=zipf", "training.routing.alpha=1.0"))
    assert even.step_time_s < mild.step_time_s < strong.step_time_s
    assert even.worst_rank.allocated_bytes < mild.worst_rank.allocated_bytes < strong.worst_rank.allocated_bytes
    capped = simulate(mixtral("training.routing.kind=zipf", "training.routing.alpha=1.0", "training.routing.capacity_factor=1.25"))
    assert even.step_time_s < capped.step_time_s < strong.step_time_s


def test_uneven_routing_gives_distributions() -> None:
    result = simulate(mixtral("training.routing.kind=zipf", "training.routing.alpha=0.5", "effects.repetitions=20"), detail="stage")
    found = json.loads(json.dumps(result.to_json()))["repetitions"]
    assert found["count"] == 20
    for name in ("step_time_s", "peak_memory_bytes"):
        assert found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["peak_memory_bytes"]["p99"] > found["peak_memory_bytes"]["p50"]


def sharded(*overrides: str) -> Scenario:
    base = ["framework=torchtitan", "plan.pp=1", "plan.virtual_stages=1", "plan.tp=1", "plan.cp=1", "plan.dp=64",
            "plan.zero_stage=3", "plan.schedule=1f1b", "training.global_batch_size=64"]  # fmt: skip
    return read_scenario(LLAMA, [*base, *overrides])


def bytes_by_name(scenario: Scenario) -> dict[str, float]:
    """Bytes of all state collectives of a step by (collective, dimension)."""
    priced = prepare(scenario)
    found: dict[str, float] = {}
    for price in priced.program.price:
        key = priced.program.price_keys[price]
        if isinstance(key, Gather | Reduce):
            for call in state_collectives(priced.layout, key):
                name = f"{call.name}/{call.dimension}"
                found[name] = found.get(name, 0.0) + call.bytes
    return found


def test_fsdp_bytes_per_step() -> None:
    """Gathers of 2 P forward and (all but the last group, which stays) backward in bf16; one fp32 reduce-scatter of 4 P."""
    scenario = sharded()
    layout = prepare(scenario).layout
    total, _ = layout.block_parameters(0, 0, len(layout.stage_blocks[0]))
    last, _ = layout.block_parameters(0, len(layout.stage_blocks[0]) - 1, len(layout.stage_blocks[0]))
    found = bytes_by_name(scenario)
    assert found["all_gather/dp"] == pytest.approx(2 * total + 2 * (total - last))
    assert found["reduce_scatter/dp"] == pytest.approx(4 * total)


def test_keeping_parameters_halves_the_gathers() -> None:
    kept = bytes_by_name(sharded("plan.reshard_after_forward=false"))
    layout = prepare(sharded()).layout
    total, _ = layout.block_parameters(0, 0, len(layout.stage_blocks[0]))
    assert kept["all_gather/dp"] == pytest.approx(2 * total)


def test_hybrid_sharding_reduces_over_replicas() -> None:
    """HSDP: the same bytes inside the shard group, and a 1/shard all-reduce over the replicas."""
    found = bytes_by_name(sharded("plan.shard_size=8"))
    assert set(found) == {"all_gather/shard", "reduce_scatter/shard", "all_reduce/replica"}
    assert found["all_reduce/replica"] == pytest.approx(found["reduce_scatter/shard"] / 8)


def test_experts_that_full_sharding_leaves_out_rest_whole_and_are_averaged_after_the_backward() -> None:
    """Halo: FSDP ignores EP modules; one sweep averages their gradients over the replicas (expert-parallelism.md)."""

    def run(**plan: bool) -> tuple[Layout, Result]:
        table = {
            "model": "qwen3-30b-a3b", "framework": "torchtitan", "framework_version": "2026-06",
            "cluster": {"hardware": "dgx-h200", "num_nodes": 1}, "plan": {"zero_stage": 3, "ep": 2, **plan},
            "training": {"sequence_length": 4096, "global_batch_size": 8, "pure_bf16": True},
        }  # fmt: skip
        scenario = make_scenario(table)
        return prepare(scenario).layout, simulate(scenario)

    (layout, within), (other, apart) = run(), run(shard_experts=False)
    dense, experts = layout.block_parameters(0, 0, len(layout.stage_blocks[0]))
    assert (layout.expert_shard_ranks, other.expert_shard_ranks) == (4, 1)
    gathered = [sum(c.bytes for c in state_collectives(each, Gather(0, 0, len(each.stage_blocks[0])))) for each in (layout, other)]
    assert gathered == [pytest.approx(2 * (dense + experts)), pytest.approx(2 * dense)]
    assert sum(block.gathered_parameters for block in other.stage_blocks[0]) == pytest.approx(dense)
    static = [dict(found.memory[0].static) for found in (within, apart)]
    assert static[1]["parameters"] - static[0]["parameters"] == pytest.approx(2 * experts * (1 - 1 / 4))
    assert static[1]["optimizer"] - static[0]["optimizer"] == pytest.approx(4 * experts * (1 - 1 / 4))
    # The update moves four times the states and waits for 2 (4 - 1) / 4 of the experts' gradients to pass each link.
    assert apart.step_time_s > within.step_time_s


def test_megatron_bytes_per_step() -> None:
    """Distributed optimizer: one reduce-scatter of 4 P and one gather of 2 P; plain data parallelism: one all-reduce of 4 P."""
    layout = prepare(read_scenario(LLAMA)).layout
    total = sum(layout.block_parameters(s, 0, len(b))[0] for s, b in enumerate(layout.stage_blocks))
    found = bytes_by_name(read_scenario(LLAMA, ["training.gradient_dtype=fp32"]))
    assert found["reduce_scatter/dp"] == pytest.approx(4 * total)
    assert found["all_gather/dp"] == pytest.approx(2 * total)
    plain = bytes_by_name(read_scenario(LLAMA, ["plan.zero_stage=0", "training.gradient_dtype=fp32"]))
    assert plain == {"all_reduce/dp": pytest.approx(4 * total)}


def test_published_zero_states() -> None:
    """Rajbhandari et al. 2020, Figure 1: 120, 31.4, 16.6 and 1.9 GB per device for 7.5B parameters on 64 devices."""
    for stage, published in enumerate((120.0, 31.4, 16.6, 1.9)):
        result = simulate(read_scenario(ROOT / "scenarios" / f"zero-7.5b_a100x64_zero{stage}.toml"))
        static = dict(result.memory[0].static)
        states = sum(static[name] for name in ("parameters", "gradients", "optimizer")) / 1e9
        assert states == pytest.approx(published, rel=0.005, abs=0.05)  # to the printed digits


def test_an_unknown_link_is_named() -> None:
    with pytest.raises(InputError, match="no such link"):
        simulate(read_scenario(LLAMA, ['effects.link_faults=[{link="nic:99999"}]']))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("{link='0', period='1 s'}", "needs both period and down"),
        ("{link='0', period='1 s', down='1 s'}", "must exceed down"),
        ("{link='0'}, {link='0', factor=0.1}", "has two schedules"),
    ],
)
def test_wrong_link_faults_are_named(faults: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulate(read_scenario(LLAMA, [f"effects.link_faults=[{faults}]"]))


def test_a_slow_link_slows_the_step() -> None:
    """The uplink of the NIC that the pipeline and data-parallel traffic of GPU 0 leaves by, at 2 %."""
    shared = ["effects.contention=true", "plan.dp=8", "plan.cp=1", "plan.tp=2", "plan.pp=4"]
    base = simulate(read_scenario(LLAMA, shared), detail="stage").step_time_s
    cluster = Cluster(read_scenario(LLAMA, shared).hardware, 8)
    link = next(link for link in cluster.route(0, 8) if "nic" in cluster.name_of(link))
    fault = f"effects.link_faults=[{{link='{link}', factor=0.02}}]"
    assert simulate(read_scenario(LLAMA, [*shared, fault]), detail="stage").step_time_s > 1.01 * base


def test_loads_nobody_states_are_a_trained_routers() -> None:
    """7 % apart under a bias that balances them, else 60 %, of few experts less; even only where it is said."""
    text = ["training.routing={}"]
    trained, biased = mixtral(*text), read_scenario(ROOT / "scenarios" / "deepseek-v3_h800x2048_pp16ep64.toml")
    fine = load_model("qwen3-30b-a3b")
    assert isinstance(fine, TransformerSpec)
    assert fine.moe is not None
    assert spread_of(trained.training.routing, fine, fine.moe) == 0.6
    for scenario, share in ((trained, "15%"), (biased, "7%")):
        assert any(f"loads differ by {share} of their mean" in note for note in scenario_notes(scenario))
        assert expected_load_factor(scenario) > 1.02
    given = mixtral(*text, "training.routing.spread=0.15")
    assert expected_load_factor(given) == expected_load_factor(trained)
    assert not any("loads differ" in note for note in [*scenario_notes(given), *scenario_notes(mixtral())])
    assert expected_load_factor(mixtral()) == 1.0
    assert simulate(trained).step_time_s > simulate(mixtral()).step_time_s


def test_a_bias_beside_biased_experts_balances_nothing() -> None:
    """GPT-OSS: the router's bias is one of its linear layer."""
    assert load_model("gpt-oss-20b").even_routing is False  # type: ignore[union-attr]
    assert load_model("kimi-k2").even_routing is True  # type: ignore[union-attr]
