"""Host time of torch's FSDP and of the update: hooks by group and weight, tensors of the optimizer, what a drained host shows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpar.costs import host
from simpar.costs.gloo import MESSAGE_S, check_seconds
from simpar.costs.host import launch_seconds
from simpar.costs.pricer import LayoutPricer
from simpar.costs.update_price import HOST_ADAM_BYTES_PER_S, _tensor_by_tensor
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import Gather, Reduce
from simpar.parallel.layout import Layout
from simpar.parallel.modules import containers, linears, matrices, module_experts, pairs, weights
from simpar.parallel.traffic import state_collectives
from simpar.specs.base import data_dir
from simpar.specs.hardware import USUAL_X86, read_profile
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models, simulate


@pytest.fixture(autouse=True)
def _the_host_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are compared as they were measured, where a linear layer's forward takes the host 13.5 us."""
    monkeypatch.setattr(host, "USUAL_X86", 1.0)


def tiny(framework: str = "torchtitan", zero_stage: int = 3, *, compile: bool = True, **training: Any) -> Scenario:
    """Qwen3 0.6B, one short sequence on each of 8 H100."""
    return make_scenario({
        "model": "qwen3-0.6b", "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": zero_stage, "recompute": "none"},
        "training": {"sequence_length": 256, "global_batch_size": 8, "compile": compile, **training},
    })  # fmt: skip


def pricer_of(scenario: Scenario) -> LayoutPricer:
    layout = Layout.of(scenario, 1)
    return LayoutPricer(layout, *cost_models(scenario, layout.hardware))


def test_hooks_of_a_sharded_layer_cost_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13's FSDP2 around nine weights: 1.0 ms a forward, 1.4 ms a backward, in a virtual machine, which is a usual host; the
    norms of queries and keys are one node. Nothing is gathered under ZeRO-2."""
    monkeypatch.setattr(host, "USUAL_X86", USUAL_X86)
    sharded, whole = pricer_of(tiny()), pricer_of(tiny(zero_stage=2))
    block = sharded.layout.stage_blocks[0][1]
    assert (weights(block.layer), containers(block.layer)) == (10, 3)
    for phase, group, weight in (("F", 0.36e-3, 67e-6), ("B", 0.42e-3, 108e-6)):
        price = sharded.block(block, phase)
        other = whole.block(whole.layout.stage_blocks[0][1], phase)
        more = launch_seconds(sharded.layout, price, phase) - launch_seconds(whole.layout, other, phase)
        assert more == pytest.approx(group + 10 * weight, abs=0.05e-3)


def zero3(version: str, nodes: int = 1) -> Scenario:
    return make_scenario({
        "model": {"kind": "transformer", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16,
                  "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 51200,
                  "intermediate_size": 8192, "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "position": "learned",
                  "max_position_embeddings": 2048},
        "framework": "deepspeed", "framework_version": version, "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": nodes},
        "plan": {"zero_stage": 3, "recompute": "none"},
        "training": {"sequence_length": 2048, "global_batch_size": 8 * nodes, "precision": "fp16"},
    })  # fmt: skip


def test_early_zero3_handles_each_weight_as_a_list_of_its_ranks() -> None:
    """DeepSpeed 0.4: a list for each of four matrices in a forward, two in a backward, behind what the device does."""
    early = {ranks: pricer_of(zero3("2021-07", ranks // 8)) for ranks in (8, 32)}
    for phase, lists in (("F", 4), ("B", 8)):
        host = {}
        for ranks, pricer in early.items():
            block = pricer.layout.stage_blocks[0][1]
            assert matrices(block.layer) == 4
            price = pricer.block(block, phase)
            host[ranks] = launch_seconds(pricer.layout, price, phase) - price.seconds
            assert host[ranks] > lists * ranks * 9e-6
        assert host[32] - host[8] == pytest.approx(lists * 24 * 9e-6, rel=1e-6)
    assert not Layout.of(zero3("2022-02"), 1).framework.host.fsdp_rank_lists
    later = simulate(zero3("2022-02"))
    first = simulate(zero3("2021-07"))
    assert first.exposed_communication_s["dp"] > 1.5 * later.exposed_communication_s["dp"]  # nothing is fetched ahead


@pytest.mark.parametrize(("version", "apart"), [("2024-07", True), ("2025-11", False)])
def test_zero_3_fetches_each_linear_of_each_expert(version: str, apart: bool) -> None:
    """Mixtral's layer: queries, keys, values, output, router and three linears of each of 8 experts come in a collective each; two
    norms and the modules around have hooks besides, and so have pairs. Leaf modules of 2025 are fetched whole; gpt-oss has its
    experts in tensors."""

    def block_of(model: str, expert_ranks: int = 1, **training: object) -> tuple[LayoutPricer, LocalBlock]:
        pricer = pricer_of(make_scenario({
            "model": model, "framework": "deepspeed", "framework_version": version,
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"zero_stage": 3, "ep": expert_ranks},
            "training": {"sequence_length": 512, "global_batch_size": 8, **training},
        }))  # fmt: skip
        return pricer, pricer.layout.stage_blocks[0][1]

    pricer, block = block_of("mixtral-8x7b", trainable="lora", lora_rank=8, lora_modules="all")
    ranks = module_experts(pricer.layout)
    assert linears(block.layer, ranks) == (5, 3 * 8 if apart else 2)
    assert containers(block.layer, ranks) == 3 + (8 if apart else 0)
    assert pairs(block, ranks) == 4 + (3 * 8 if apart else 0)
    dense, experts = state_collectives(pricer.layout, Gather(0, 1, 2))
    assert (dense.repeat, experts.repeat) == (5, 24 if apart else 2)
    if apart:
        assert experts.bytes == pytest.approx(4096 * 14336 * 2)
        price = pricer.block(block, "F")
        assert launch_seconds(pricer.layout, price, "F") > (5 + 24 + 2 + 11 + 3.5 * 28) * 0.29e-3
    pricer, block = block_of("mixtral-8x7b", 8)
    assert linears(block.layer, module_experts(pricer.layout))[1] == (3 if apart else 2)
    assert module_experts(block_of("gpt-oss-20b")[0].layout) == 0


def test_hooks_of_zero_3_run_on_one_gpu_too() -> None:
    """DeepSpeed's parameter coordinator fetches modules whatever the number of ranks; torch's FSDP has nothing to gather there."""
    for framework, gap in (("deepspeed", 0.2e-3), ("torchtitan", 0.0)):
        host = {}
        for zero in (2, 3):
            scenario = make_scenario({
                "model": "llama3.2-1b", "framework": framework, "framework_version": "2024-01",
                "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1, "num_gpus": 1}, "plan": {"zero_stage": zero},
                "training": {"sequence_length": 256, "global_batch_size": 1},
            })  # fmt: skip
            pricer = pricer_of(scenario)
            block = pricer.layout.stage_blocks[0][1]
            host[zero] = launch_seconds(pricer.layout, pricer.block(block, "F"), "F")
        assert host[3] - host[2] >= 7 * gap
        assert (host[3] > host[2]) == bool(gap)


@pytest.mark.parametrize("framework", ["torchtitan", "torch-fsdp", "transformers"])
def test_small_models_wait_for_the_hooks(framework: str) -> None:
    """Compiled or not, hooks of full sharding are Python."""
    gap = {zero: simulate(tiny(framework, zero)).breakdown.get("launch", 0.0) for zero in (2, 3)}
    assert gap[3] > gap[2] + 28 * 1.5e-3


def test_only_a_drained_host_shows_the_tensors_of_its_update() -> None:
    """The Trainer reads loss and norm before it updates; torchtitan's host is ahead where the device is the slower one."""
    long: dict[str, Any] = {"sequence_length": 16384}
    drained, ahead = pricer_of(tiny("transformers", **long)), pricer_of(tiny("torchtitan", **long))
    assert drained._host_lead_s([0]) == 0.0
    assert ahead._host_lead_s([0]) > 0.05
    behind = pricer_of(tiny("torchtitan"))
    # What of the last block the device has still to do once the host has launched all of it.
    assert behind._host_lead_s([0]) < 1e-3
    spec = behind.layout.framework.host
    tensors = 28 * 10 + 2
    update = simulate(tiny("torchtitan")).breakdown["optimizer"]
    assert update == pytest.approx(tensors * spec.optimizer_tensor_cpu_s + spec.optimizer_cpu_s, rel=0.1)


@pytest.mark.parametrize(("version", "norm_s"), [("2023-12", 49e-6), ("2024-01", 36e-6)])
def test_zero_3_takes_norms_and_gathers_what_stays_whole_one_by_one(version: str, norm_s: float) -> None:
    """Between the backward and the update, and after it, so on top of the update whatever that takes the device."""

    def found(zero: int = 3, gpus: int = 8, **training: Any) -> tuple[float, float]:
        scenario = make_scenario({
            "model": "llama3.1-8b", "framework": "deepspeed", "framework_version": version,
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": gpus}, "plan": {"zero_stage": zero},
            "training": {"sequence_length": 256, "global_batch_size": gpus, **training},
        })  # fmt: skip
        layout = pricer_of(scenario).layout
        return _tensor_by_tensor(layout, layout.stage_blocks[0]), simulate(scenario).breakdown["optimizer"]

    gradients, norms, gather_s = 32 * 9 + 3, 32 * 2 + 1, 77e-6 + 50e-6
    more, update = found()
    assert more == pytest.approx(norm_s * gradients + gather_s * norms)
    assert found(gpus=1)[0] == pytest.approx(norm_s * gradients + 77e-6 * norms)
    assert found(2)[0] == 0.0
    assert update - found(2)[1] == pytest.approx(more, rel=0.02)
    pairs = 32 * 7
    lora = found(trainable="lora", lora_rank=8, lora_modules="all")[0]
    assert lora == pytest.approx(norm_s * 2 * pairs + gather_s * norms)


def test_an_update_on_the_host_moves_what_the_framework_adds_to_adam() -> None:
    """DeepSpeed scales the gradients and casts the weights there: 14 bytes a weight beside Adam's 28; they came there before."""
    found = {}
    for version in ("2021-12", "2022-01"):  # the first is older than what was read
        scenario = make_scenario({
            "model": "llama3.1-8b", "framework": "deepspeed", "framework_version": version,
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"zero_stage": 3, "offload": {"optimizer": True}},
            "training": {"sequence_length": 1024, "global_batch_size": 8},
        })  # fmt: skip
        result = simulate(scenario)
        found[version] = result.breakdown["optimizer"]
    link = result.layout.hardware.node.host_device_bandwidth.value
    more = 8.03e9 / 8 * (12.0 / HOST_ADAM_BYTES_PER_S - 2.0 / link)
    assert found["2022-01"] - found["2021-12"] == pytest.approx(more, rel=0.01)


def test_nothing_runs_beside_what_save_on_cpu_copies() -> None:
    def scenario(framework: str, share: float) -> Scenario:
        return make_scenario({
            "model": "llama3.1-8b", "framework": framework, "framework_version": "2025-03",
            "cluster": {"hardware": "aws-p5-h100", "num_nodes": 1},
            "plan": {"dp": 8, "zero_stage": 3, "recompute": "full", "offload": {"activations": share}},
            "training": {"sequence_length": 8192, "global_batch_size": 8},
        })  # fmt: skip

    alone, waiting, beside = (
        simulate(scenario(framework, share))
        for framework, share in (("torch-fsdp", 0.0), ("torch-fsdp", 1.0), ("transformers", 1.0))
    )
    down = sum(block.saved_bytes for block in Layout.of(scenario("torch-fsdp", 1.0), 1).stage_blocks[0]) / 24.5e9
    assert waiting.breakdown["host"] == pytest.approx(2 * down, rel=0.02)
    assert waiting.step_time_s - alone.step_time_s == pytest.approx(2 * down, rel=0.05)
    assert beside.breakdown.get("host", 0.0) < 0.2 * down


@pytest.mark.parametrize("framework", ["torchtitan", "deepspeed"])
def test_copies_around_a_group_are_no_recomputation(framework: str) -> None:
    pricer = pricer_of(tiny(framework, compile=False))
    block = pricer.layout.stage_blocks[0][1]
    again = pricer.block(block, "B")
    assert {"gather.copy.backward", "reduce.copy.backward"} <= {op.name for op in block.backward}
    assert "recompute" not in dict(again.terms)
    assert not again.repeats_modules


def test_checked_collectives_cost_the_host_a_barrier_and_two_gathers() -> None:
    """Monitored barrier and two all-gathers through gloo: 3 hand-overs, messages, those that the first handles; no sends."""
    assert read_profile("cpu-gloo").scale_up.latency.value == pytest.approx(MESSAGE_S)
    assert [check_seconds(n) for n in (1, 2, 8)] == pytest.approx([0.0, 600e-6, 1656e-6])
    nanotron = {
        "model": "llama3.1-8b", "framework": "nanotron", "cluster": {"hardware": "dgx-h100", "num_nodes": 2},
        "plan": {"tp": 8, "pp": 2}, "training": {"sequence_length": 4096, "global_batch_size": 8},
    }  # fmt: skip
    plain = pricer_of(make_scenario(nanotron))
    checked = pricer_of(make_scenario(nanotron | {"training": {**nanotron["training"], "collective_checks": True}}))
    for phase, collectives in (("F", 4), ("B", 6)):
        host = [p.host.seconds(p.layout.stage_blocks[0][1], phase) for p in (checked, plain)]
        slow = plain.layout.hardware.node.host_slowdown
        assert host[0] - host[1] == pytest.approx(slow * collectives * 1656e-6)


def test_checks_before_the_gathers_of_sharded_weights() -> None:
    """FSDP gathers in the forward, gathers again and scatters in the backward, over eight ranks."""
    plain, checked = pricer_of(tiny()), pricer_of(tiny(collective_checks=True))
    for phase, collectives in (("F", 1), ("B", 2)):
        host = [p.host.seconds(p.layout.stage_blocks[0][1], phase) for p in (checked, plain)]
        assert host[0] - host[1] == pytest.approx(plain.layout.hardware.node.host_slowdown * collectives * 1656e-6)


def test_checked_gradients_of_distributed_data_parallel() -> None:
    """Each of DDP's buckets is compared by the data ranks before it is reduced, the gradients' norm by all ranks."""
    nanotron = {
        "model": "llama3.2-1b", "framework": "nanotron", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"zero_stage": 0}, "training": {"sequence_length": 4096, "global_batch_size": 8},
    }  # fmt: skip
    plain, checked = (
        pricer_of(make_scenario(nanotron | {"training": {**nanotron["training"], "collective_checks": on}})) for on in (False, True)
    )
    reduce = Reduce(0, 0, len(plain.layout.stage_blocks[0]))
    buckets = sum(call.repeat for call in state_collectives(plain.layout, reduce))
    assert buckets > 20
    assert checked.price(reduce).seconds - plain.price(reduce).seconds == pytest.approx(buckets * 1656e-6)
    assert checked.norm_s - plain.norm_s == pytest.approx(1656e-6)


def test_distributed_tensors_cost_an_eager_layer_its_dispatch() -> None:
    """Each of ten weights goes through DTensor where two ranks share it; inside a compiled graph none does."""
    for phase, each in (("F", 0.23e-3), ("B", 0.29e-3)):
        own = []
        for compile in (False, True):
            pricer = pricer_of(tiny(compile=compile))
            split = pricer_of(make_scenario({**plain_of(compile), "plan": {"zero_stage": 3, "recompute": "none", "tp": 2}}))
            found = [launch_seconds(p.layout, p.block(p.layout.stage_blocks[0][1], phase), phase) for p in (split, pricer)]
            kernels = [p.block(p.layout.stage_blocks[0][1], phase) for p in (split, pricer)]
            host = split.layout.framework.host
            launch = host.compiled_launch_s if compile else host.launch_s if phase == "F" else host.backward_launch_s
            calls = (kernels[0].kernels - kernels[1].kernels) * launch
            own.append(found[0] - found[1] - calls - (kernels[0].collectives - kernels[1].collectives) * host.collective_cpu_s)
        assert own == pytest.approx([10 * each, 0.0], abs=1e-9)


def plain_of(compile: bool) -> dict[str, Any]:
    """`tiny` as a table, in the scenario's own terms."""
    return {
        "model": "qwen3-0.6b", "framework": "torchtitan", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "training": {"sequence_length": 256, "global_batch_size": 8, "compile": compile},
    }  # fmt: skip


def test_a_measured_host_scales_what_a_framework_spends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer's forward of 13.5 us, which host times were measured at, and of 27 us: twice the time of hooks and launches.
    A host of which nothing is known lies between that Xeon and the machine that was measured, 34.4 us; a framework whose host times
    were read off runs has their hosts."""
    monkeypatch.setattr(host, "USUAL_X86", USUAL_X86)
    text = (data_dir("hardware_profiles") / "dgx-h100.toml").read_text()

    def seconds(linear: str, framework: str = "torchtitan") -> float:
        line = f'host_linear = {{ value = "{linear} us", kind = "measured", source = "a test" }}' if linear else ""
        (profile := tmp_path / f"host{linear}.toml").write_text(text.replace("[node]\n", f"[node]\n{line}\n", 1))
        own = {"framework": framework, "cluster": {"hardware": str(profile), "num_nodes": 1}}
        p = pricer_of(make_scenario(plain_of(compile=False) | own))
        return p.host.seconds(p.layout.stage_blocks[0][1], "F")

    assert seconds("27") == pytest.approx(2.0 * seconds("13.5"))
    assert seconds("") == pytest.approx(math.sqrt(13.5 * 34.4) / 13.5 * seconds("13.5"), rel=0.01)
    assert seconds("", "nanotron") == pytest.approx(seconds("13.5", "nanotron"))


@pytest.mark.parametrize(
    ("framework", "zero_stage", "forward_s", "backward_s"),
    [
        ("transformers", 0, 25e-6, 0.0), ("deepspeed", 3, 1.04e-3, 0.58e-3),
        ("transformers", 3, 25e-6 + 2 * 0.92e-3, 2 * 1.28e-3),
    ],
)  # fmt: skip
def test_pairs_of_low_rank_hold_the_host(framework: str, zero_stage: int, forward_s: float, backward_s: float) -> None:
    """peft's modules of seven pairs, and under ZeRO-3 their hooks: 5.7 ms forward and 3.3 backward where a layer's own take 3.3 and
    3.2 (14 modules). Under FSDP its A and its B are groups of their own (peft utils/other.py fsdp_auto_wrap_policy; 217 of a
    Qwen2.5-0.5B with four pairs a layer, MakazhanAlpamys/Soup benchmarks/gate-h100-validation.md: 24 x (1 + 8) + 1). A checkpointed
    layer's forward runs again; a compiled one has neither."""

    def more(phase: str, recompute: str = "none", **training: Any) -> tuple[float, float]:
        given: dict[str, Any] = {"sequence_length": 256, "global_batch_size": 8, "trainable": "lora"}
        table = {
            "model": "qwen3-0.6b", "framework": framework, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
            "plan": {"zero_stage": zero_stage, "recompute": recompute}, "training": given | training,
        }  # fmt: skip
        pricer = pricer_of(make_scenario(table))
        price = pricer.block(pricer.layout.stage_blocks[0][1], phase)
        without = launch_seconds(pricer.layout, replace(price, pairs=0), phase)
        return price.pairs, launch_seconds(pricer.layout, price, phase) - without

    assert more("F", lora_modules="all") == pytest.approx((7, 7 * forward_s))
    assert more("F", lora_modules="qv") == pytest.approx((2, 2 * forward_s))
    assert more("B", lora_modules="all") == pytest.approx((7, 7 * backward_s))
    assert more("B", "full", lora_modules="all") == pytest.approx((7, 7 * (forward_s + backward_s)))
    assert more("F", trainable="all") == (0, 0.0)


def test_a_matrix_that_holds_queries_keys_and_values_is_one_module() -> None:
    """As in GPT-2, Qwen and Phi-3; transformers' Llama has three."""
    table = make_scenario({
        "model": "llama3.2-1b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1},
        "training": {"sequence_length": 64, "global_batch_size": 1},
    })  # fmt: skip
    packed = table.model_copy(update={"model": table.model.model_copy(update={"packed_attention": True})})
    found = [weights(Layout.of(scenario, 1).stage_blocks[0][1].layer) for scenario in (table, packed)]
    assert found == [9, 7]


def test_a_policy_that_keeps_outputs_one_by_one_holds_the_host_of_an_eager_layer() -> None:
    """torch's per-op selective checkpointing; neither the ends of the model nor a compiled layer pass through its modes."""

    def forward_s(block: int, modules: tuple[str, ...], *, compile: bool = False) -> float:
        scenario = tiny(compile=compile)
        recompute = RecomputeSpec(granularity="selective", modules=modules)
        plan = scenario.plan.model_copy(update={"recompute": recompute})
        pricer = pricer_of(scenario.model_copy(update={"plan": plan}))
        return launch_seconds(pricer.layout, pricer.block(pricer.layout.stage_blocks[0][block], "F"), "F")

    assert forward_s(1, ("op",)) - forward_s(1, ("core_attn",)) == pytest.approx(1.45e-3)
    assert forward_s(0, ("op",)) == forward_s(0, ("core_attn",))
    assert forward_s(1, ("op",), compile=True) == forward_s(1, ("core_attn",), compile=True)
