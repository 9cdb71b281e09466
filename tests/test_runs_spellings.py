"""Flat rows in other words than ours: the same run, whatever a file calls it."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_model import latent_ranks
from simpar.evidence.row_values import read_values
from simpar.evidence.run_rows import measured_of, run_of
from simpar.specs.plan import RecomputeSpec
from simpar.specs.scenario import Scenario

DENSE: dict[str, Any] = {
    "id": "x-1", "source": "somewhere", "task": "pretrain", "model_name": "Llama3-8B", "arch": "dense", "layers": 32,
    "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256, "seq_len": 8192,
    "mlp_type": "swiglu", "position": "rope", "flash_attention": True, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 64,
    "gpus_per_node": 8, "tp": 2, "sp": True, "pp": 4, "vpp": 2, "cp": 1, "ep": 1, "dp": 8, "zero_stage": 1,
    "micro_batch": 1, "global_batch": 128, "recompute": "none", "precision": "bf16", "framework": "Megatron-LM",
    "framework_version": "core 0.13", "step_time_s": 5.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"arch": "moe", "moe_experts": 8, "moe_topk": 2, "moe_ffn": 14336, "ep": 8}
SHARDED: dict[str, Any] = {"tp": 1, "pp": 1, "vpp": None, "dp": 64, "zero_stage": None}


def scenario(**changes: Any) -> Scenario:
    run = run_of({key: value for key, value in {**DENSE, **changes}.items() if value is not None})
    assert run.scenario is not None, run.skipped
    return run.scenario


@pytest.mark.parametrize(
    ("word", "granularity"),
    [
        ("off", "none"), ("No", "none"), ("disabled", "none"), ("without recomputation", "none"), ("None", "none"),
        ("AC full", "full"), ("yes", "full"), ("gradient checkpointing", "full"), ("uniform", "full"), ("every layer", "full"),
        ("activation checkpointing", "full"), ("per-layer", "full"), ("layer", "full"),
        ("SAC", "selective"), ("selective activation checkpointing", "selective"), ("partial", "selective"),
        ("layernorm", "selective"), ("core_attn", "selective"),
        ("activation checkpointing off", "none"), ("gradient checkpointing disabled", "none"), ("recompute=False", "none"),
        ("activation checkpointing (selective)", "selective"), ("full, use_reentrant=False", "full"), ("0", "none"), ("1", "full"),
        ("full use_reentrant=False", "full"), ("selective; offload disabled", "selective"), ("yes (selective)", "selective"),
        ("on (core attention only)", "selective"), ("AC full (core attention too)", "full"),
        ("every transformer block", "full"), ("activation_checkpointing", "full"), ("selective checkpointing", "selective"),
        ("selective (full attention)", "selective"),
    ],
)  # fmt: skip
def test_recomputation(word: str, granularity: str) -> None:
    found = scenario(recompute=word).plan.recompute
    assert (found.granularity if isinstance(found, RecomputeSpec) else found) == granularity


@pytest.mark.parametrize(
    ("word", "layers"),
    [
        ("1/2 of layers", 2), ("0.5 of layers", 2), ("50 % of the layers", 2), ("8 of 32 layers", 1),
        ("full (block, 3 layers)", 3),
    ],
)  # fmt: skip
def test_recomputation_of_a_share_of_the_layers(word: str, layers: int) -> None:
    found = scenario(recompute=word).plan.recompute  # 4 layers in each of 8 stages
    assert found == RecomputeSpec(granularity="full", method="block", num_layers=layers)


@pytest.mark.parametrize(("word", "every"), [("every 2nd layer", 2), ("full (every 4th layer)", 4), ("every second layer", 2)])
def test_recomputation_of_every_nth_layer(word: str, every: int) -> None:
    assert scenario(recompute=word).plan.recompute == RecomputeSpec(granularity="full", every=every)


def test_modules_named_beside_a_recomputation_that_is_on() -> None:
    found = scenario(recompute="on (core attention only)").plan.recompute
    assert isinstance(found, RecomputeSpec)
    assert found.modules == ("core_attn",)


def test_an_unknown_recomputation_is_said() -> None:
    notes = run_of({**DENSE, "recompute": "as usual"}).assumptions
    assert "recomputation 'as usual' unknown: selective" in notes
    assert not any("unknown" in note for note in run_of({**DENSE, "recompute": "selective"}).assumptions)


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("no CPU offload", ()), ("without CPU", ()), ("off (CPU too small)", ()), ("not on", ()), ("cpu offload disabled", ()),
        ("cpu_offload=False", ()), ("on", ("optimizer",)), ("optimizer on CPU, no parameters", ("optimizer",)),
        ("optimizer (activations not offloaded)", ("optimizer",)), ("activations to CPU", ("activations",)),
        ("activations of expert_fc1 (fine-grained, fraction 1.0)", ()), ("activations of moe_act; optimizer", ("optimizer",)),
    ],
)  # fmt: skip
def test_offload(word: str, parts: tuple[str, ...]) -> None:
    found = scenario(offload=word).plan.offload
    assert tuple(name for name in ("activations", "optimizer", "parameters") if found and getattr(found, name)) == parts


@pytest.mark.parametrize(
    ("word", "compiled"),
    [
        ("not compiled", False), ("uncompiled", False), ("without torch.compile", False), ("torch.compile off", False),
        ("loss only compiled", "loss"), ("only the loss", "loss"), ("eager", False),
        ("torch.compile", True), ("model only", "model"),
    ],
)  # fmt: skip
def test_compilation(word: str, compiled: bool | str) -> None:
    changes = {**SHARDED, "framework": "torchtitan", "fsdp": "FSDP2"}
    assert scenario(**changes, compile=word).training.compile == compiled


@pytest.mark.parametrize(
    ("column", "word", "stage"),
    [
        ("zero_stage", "no_shard", 0), ("zero_stage", "FSDP NO_SHARD", 0), ("zero_stage", "FSDP SHARD_GRAD_OP", 2),
        ("zero_stage", "FULL_SHARD", 3), ("zero_stage", "without ZeRO", 0), ("zero_stage", "ZeRO-1, not ZeRO-3", 1),
        ("fsdp", "FSDP no_shard", 0), ("fsdp", "not used", 0), ("fsdp", "no reshard after forward", 3),
    ],
)  # fmt: skip
def test_sharding(column: str, word: str, stage: int) -> None:
    changes = {**SHARDED, "framework": "PyTorch FSDP", "zero_stage": 0 if column == "fsdp" and stage == 0 else None, column: word}
    run = run_of({key: value for key, value in {**DENSE, **changes}.items() if value is not None})
    assert run.scenario is not None, run.skipped
    assert run.scenario.plan.zero_stage == stage
    assert ("fsdp" in run.row) is (column == "fsdp" and stage == 3)


def test_a_stage_that_it_is_not_is_no_stage() -> None:
    assert "'not ZeRO-3' says which stage it is not" in run_of({**DENSE, "zero_stage": "not ZeRO-3"}).skipped


@pytest.mark.parametrize(
    ("word", "graphs"),
    [
        ("off", False), ("no", False), ("disabled", False), ("not used", False), ("on", True), ("full", True),
        ("moe_router, moe_preprocess", False), ("transformer_engine / attn, moe_router", True), ("attention, moe router", True),
    ],
)  # fmt: skip
def test_graphs(word: str, graphs: bool) -> None:
    assert scenario(cuda_graphs=word).training.cuda_graphs is graphs


@pytest.mark.parametrize(
    ("word", "precision"),
    [
        ("fp8_mx", "mxfp8"), ("MX-FP8", "mxfp8"), ("E4M3", "fp8"), ("fp8 sub-channel scaling", "fp8-block"), ("float16", "fp16"),
        ("half", "fp16"), ("bfloat16", "bf16"),
    ],
)  # fmt: skip
def test_precisions(word: str, precision: str) -> None:
    gpu = "GB200" if precision == "mxfp8" else "H100"
    assert scenario(precision=word, gpu=gpu, gpu_mem_gb=None).training.precision == precision


@pytest.mark.parametrize(
    ("word", "dtype"), [("float32", "fp32"), ("BF16", "bf16"), ("bfloat16 reduce", "bf16"), ("float16", "fp16"), ("FP32", "fp32")]
)
def test_gradients(word: str, dtype: str) -> None:
    assert scenario(grad_dtype=word).training.gradient_dtype == dtype


@pytest.mark.parametrize("word", ["no", "0", "off", "DDP", "NO_SHARD", 0, False, "false"])
def test_what_says_that_nothing_is_sharded(word: Any) -> None:
    assert scenario(**SHARDED, fsdp=word).plan.zero_stage == 1  # Megatron-LM's own


@pytest.mark.parametrize("word", ["HSDP", "FSDP1 HYBRID_SHARD"])
def test_hybrid_sharding_is_within_a_node_unless_a_row_says_otherwise(word: str) -> None:
    assert scenario(**SHARDED, framework="PyTorch FSDP", fsdp=word).plan.shard_size == 8
    assert scenario(**SHARDED, framework="PyTorch FSDP", fsdp=word, hsdp_replicas=2).plan.shard_size == 32


@pytest.mark.parametrize(
    ("changes", "dispatcher"),
    [
        ({"moe_routing": "hybrid-ep, forced balance"}, "hybridep"),
        ({"moe_routing": "deep_ep"}, "deepep"),
        ({"notes": "DeepEP dispatcher"}, "deepep"),
        ({"notes": "without DeepEP"}, "alltoall"),
        ({"moe_routing": "natural; HybridEP", "notes": "DeepEP would be slower"}, "hybridep"),
        ({"moe_routing": "DeepEP not used"}, "alltoall"),
        ({"notes": "HybridEP was disabled"}, "alltoall"),
        ({"notes": "DeepEP: off"}, "alltoall"),
        ({"moe_routing": "DeepEP, not HybridEP"}, "deepep"),
        ({"moe_routing": "DeepEP not overlapped"}, "deepep"),
        ({"moe_routing": "DeepEP (not HybridEP)"}, "deepep"),
        ({"moe_routing": "all-to-all by DeepEP"}, "deepep"),
        ({"framework": "Hai-LLM", "moe_routing": "alltoall dispatcher"}, "alltoall"),
        ({"moe_routing": "allgather dispatcher"}, "allgather"),
        ({"framework": "Hai-LLM"}, "deepep"),
        ({"framework": "Hai-LLM", "notes": "all-to-all traffic over InfiniBand"}, "deepep"),
    ],
)
def test_dispatchers(changes: dict[str, Any], dispatcher: str) -> None:
    assert scenario(**EXPERTS, **changes).plan.ep_dispatcher == dispatcher


@pytest.mark.parametrize("over", ["UCCL (EFA)", "NVSHMEM-libfabric"])
def test_deepep_over_adapters_that_it_does_not_drive_is_not_priced_as_deepep(over: str) -> None:
    run = run_of({**DENSE, **EXPERTS, "moe_routing": f"DeepEP over {over}"})
    assert run.scenario is None
    assert "EFA" in run.skipped
    assert scenario(**EXPERTS, moe_routing="alltoall over EFA").plan.ep_dispatcher == "alltoall"


@pytest.mark.parametrize(
    ("changes", "beside", "dispatcher"),
    [
        ({}, True, "hybridep"),
        ({"overlap_ep": False, "moe_routing": "DeepEP"}, False, "deepep"),
        ({"moe_routing": "alltoall dispatcher, forced balance"}, False, "alltoall"),
        ({"notes": "DeepEP"}, False, "deepep"),
        ({"moe_routing": "all-to-all", "overlap_ep": True}, True, "alltoall"),
        ({"framework_version": "2026-01"}, False, "alltoall"),
        ({"cuda_graphs": "attention, moe_router"}, False, "alltoall"),
        ({"cuda_graphs": "full iteration assumed"}, False, "alltoall"),
        ({"vpp": 1}, False, "hybridep"),
        ({"pp": 1, "dp": 32, "vpp": None}, True, "hybridep"),
    ],
)
def test_what_the_framework_exchanges_beside_in_graphs_of_whole_iterations(
    changes: dict[str, Any], beside: bool, dispatcher: str
) -> None:
    row = {"framework": "Megatron-Bridge", "framework_version": "2026-07", "cuda_graphs": "full iteration", **EXPERTS, **changes}
    plan = scenario(**row).plan
    assert (plan.overlap_ep, plan.ep_dispatcher) == (beside, dispatcher)


@pytest.mark.parametrize(
    ("word", "kind", "capacity"),
    [
        ("token drop cf 1.25", "balanced", 1.25), ("capacity factor=1.0", "balanced", 1.0), ("capacity 1.5", "balanced", 1.5),
        ("token drop (capacity), 25.09", "balanced", 1.0),
        ("dropless, real routing", "lognormal", None), ("dropless", "balanced", None),
    ],
)  # fmt: skip
def test_routing(word: str, kind: str, capacity: float | None) -> None:
    routing = scenario(**EXPERTS, moe_routing=word).training.routing
    assert (routing.kind, routing.capacity_factor) == (kind, capacity)


@pytest.mark.parametrize(
    ("word", "window"),
    [("4096 tokens", 4096), ("sliding window 4096", 4096), ("no", None), ("full", None), ("128 on every second layer", None)],
)
def test_windows(word: str, window: int | None) -> None:
    model: Any = scenario(attn_window=word).model
    assert model.sliding_window == window


def test_latent_attention() -> None:
    ours = "q_lora 1536, kv_lora 512, qk_nope 128, qk_rope 64, v 128"
    names = "q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128"
    assert latent_ranks(names) == latent_ranks(ours) == latent_ranks("q_lora 1536; kv_lora 512; qk 128+64; v 128")
    assert "q_lora" not in latent_ranks("no q_lora, kv_lora 512")
    cut = {"arch": "moe-mla", "model_name": "a small one", "mla": "kv_lora_rank 512"}
    assert "not stated: qk_nope, qk_rope, v" in run_of({**DENSE, **cut}).skipped


@pytest.mark.parametrize(("word", "stated"), [("NoPE", "none"), ("absolute", "learned"), ("RoPE", "rope"), ("rotary", "rope")])
def test_positions(word: str, stated: str) -> None:
    model: Any = scenario(position=word).model
    assert model.position == stated


@pytest.mark.parametrize(("word", "kernel"), [("eager", "unfused"), ("SDPA math", "unfused"), ("flex", "flex"), ("fa3", "fa3")])
def test_attention_in_its_own_column(word: str, kernel: str) -> None:
    framework = "torchtitan" if kernel == "flex" else "Megatron-LM"
    changes = SHARDED if kernel == "flex" else {}
    assert scenario(**changes, flash_attention=word, framework=framework).training.attention_kernel == kernel


@pytest.mark.parametrize(
    ("word", "optimizer"),
    [
        ("AdamW, moments in bf16", "adamw-bf16-moments"),
        ("Adam (use-precision-aware-optimizer; fp32 moments)", "adam"),
        ("Adam, precision-aware", "adamw-bf16-moments"),
    ],
)
def test_widths_of_moments(word: str, optimizer: str) -> None:
    assert scenario(optimizer=word).training.optimizer == optimizer


@pytest.mark.parametrize(
    ("stated", "name"),
    [("MCore 0.14", "megatron-core"), ("VeOmni", "torchtitan"), ("MegaBlocks", "megatron-core"), ("llama-recipes", "torch-fsdp")],
)
def test_frameworks(stated: str, name: str) -> None:
    changes = {} if name == "megatron-core" else SHARDED
    assert scenario(**changes, framework=stated).framework == name


@pytest.mark.parametrize(
    ("changes", "dp"),
    [
        ({**EXPERTS, "dp": 1}, 8),  # beside 8 expert ranks
        ({"cp": 2, "dp": 8}, 4),  # with those of a sequence that two share
        ({"cp": 2, "dp": 4}, 4),
    ],
)
def test_data_ranks_counted_otherwise(changes: dict[str, Any], dp: int) -> None:
    assert scenario(**changes).plan.dp == dp


def test_a_batch_in_tokens() -> None:
    assert scenario(global_batch=4194304).training.global_batch_size == 512
    assert scenario(global_batch="1,048,576 tokens").training.global_batch_size == 128
    assert scenario(global_batch="65536 tokens").training.global_batch_size == 8
    assert scenario(global_batch="262144 tokens", seq_len="4k").training.global_batch_size == 64
    assert "no whole number of sequences of seq_len 8192" in run_of({**DENSE, "global_batch": "1000000 tokens"}).skipped
    assert "of seq_len not stated" in run_of({**DENSE, "global_batch": "1048576 tokens", "seq_len": None}).skipped
    assert "in tokens?" in run_of({**DENSE, "global_batch": 4194305 * 8}).skipped


@pytest.mark.parametrize(
    ("column", "value", "read"),
    [
        ("seq_len", "8k", 8192), ("seq_len", "8192 tokens", 8192), ("seq_len", "8Ki", 8192), ("seq_len", "8k tokens", 8192),
        ("zero_stage", "ZeRO-2", 2), ("zero_stage", "stage 3", 3), ("zero_stage", "stage: 3", 3), ("zero_stage", "ZeRO stage-1", 1),
        ("n_gpus", "64 GPUs", 64), ("layers", "32 layers", 32), ("tokens_per_s", "9,000 tok/s", 9000.0), ("mfu", "45 %", 45.0),
        ("global_batch", "1,024 sequences", 1024), ("step_time_s", "~5.2 s", 5.2), ("mem_gib", "70.5 GiB", 70.5),
        ("compile", "max-autotune", True), ("compile", "model", "model"), ("compile", "no", False),
    ],
)  # fmt: skip
def test_figures_in_words(column: str, value: str, read: object) -> None:
    assert read_values({column: value}).row[column] == read


@pytest.mark.parametrize(
    ("column", "value"),
    [("step_time_s", "5000 ms"), ("step_time_s", "5000 tokens"), ("mem_gib", "70 GB"), ("global_batch", "4M tokens"),
     ("n_gpus", "8 layers"), ("layers", "32 GPUs"), ("hidden", "4096 tokens"), ("tokens_per_s", "9000 samples/s")],
)  # fmt: skip
def test_figures_in_other_units_are_not_guessed(column: str, value: str) -> None:
    run = run_of({**DENSE, column: value})
    assert run.scenario is None
    assert f"{column}: {value!r} is not a number in the unit of the column" in run.skipped


@pytest.mark.parametrize(
    ("kind", "read"), [("reserved", "reserved"), ("torch max_memory_reserved", "reserved"), ("peak allocated", "allocated")]
)
def test_kinds_of_memory(kind: str, read: str) -> None:
    assert measured_of({"mem_gib": 50.0, "mem_kind": kind}).memory_kind == read


def test_layers_of_several_kinds_in_a_pipeline_without_virtual_stages() -> None:
    windows = {
        "model_name": "gpt-oss-20b", "arch": "moe", "layers": 24, "hidden": 2880, "ffn": 2880, "heads": 64, "head_dim": 64,
        "vocab": 201088, "moe_experts": 32, "moe_topk": 4, "moe_ffn": 2880, "attn_window": "128 on alternate layers", "vpp": None,
    }  # fmt: skip
    assert scenario(**windows).plan.pp == 4
