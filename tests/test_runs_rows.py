"""From rows to scenarios: every rule table, the layout language, what is skipped and why, what was measured."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from simpar.errors import InputError
from simpar.evidence.predicted import predict
from simpar.evidence.row_complete import completed
from simpar.evidence.row_experts import chosen_freely, routing_of
from simpar.evidence.row_framework import FRAMEWORK_PATTERNS, NEAREST, attention_of, framework_of, month_of_row, precision_of
from simpar.evidence.row_layers import RECOMPUTE_MODULES, layout_of, parse_layout, recompute_of
from simpar.evidence.row_machine import MACHINES, USUAL_BOARDS, CannotExpress, machine_of, node_gigabits
from simpar.evidence.row_model import model_of
from simpar.evidence.row_open import USUAL
from simpar.evidence.row_plan import SCHEDULE_PATTERNS
from simpar.evidence.run_rows import measured_of, read_runs, run_of
from simpar.evidence.spread import predict_run
from simpar.model.ledger import total_parameters
from simpar.runlogs.row import columns_of
from simpar.schedules import SCHEDULES
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.framework import framework
from simpar.specs.hardware import load_hardware, profile_names
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, model_from_table
from simpar.specs.node_size import with_gpus_per_node

DENSE: dict[str, Any] = {
    "id": "x-1", "source": "somewhere", "task": "pretrain", "model_name": "Llama3-8B", "arch": "dense", "layers": 32,
    "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256, "seq_len": 8192,
    "mlp_type": "swiglu", "position": "rope", "flash_attention": True, "gpu": "H100", "gpu_mem_gb": 80, "n_gpus": 64,
    "gpus_per_node": 8, "tp": 2, "sp": True, "pp": 4, "vpp": 2, "cp": 1, "ep": 1, "dp": 8, "zero_stage": 1,
    "micro_batch": 1, "global_batch": 128, "recompute": "none", "precision": "bf16", "framework": "Megatron-LM",
    "framework_version": "core 0.13", "step_time_s": 5.0,
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**DENSE, **changes}.items() if value is not None}


def test_a_plain_row() -> None:
    run = run_of(row())
    assert run.skipped == ""
    assert run.assumptions == ("network not stated: that of dgx-h100",)
    s = run.scenario
    assert s is not None
    assert isinstance(s.model, TransformerSpec)
    assert s.model.gated_mlp
    assert s.model.norm == "rmsnorm"
    assert not s.model.mlp_bias
    assert (s.framework, s.framework_version, s.cluster.hardware, s.world_size) == ("megatron-core", "2025-07", "dgx-h100", 64)
    assert (s.plan.schedule, s.plan.virtual_stages, s.plan.sequence_parallel) == ("interleaved", 2, True)
    assert run.group["tp"] == 2
    assert run.measured.step_time_s == 5.0


@pytest.mark.parametrize("rule", MACHINES, ids=lambda rule: f"{rule.gpu} {rule.text}")
def test_every_machine_rule_names_a_profile(rule: Any) -> None:
    assert rule.profile in profile_names()


@pytest.mark.parametrize(
    ("changes", "profile", "cluster"),
    [
        ({"gpu": "A100", "gpu_mem_gb": 40}, "dgx-a100-40gb", {}),
        ({"gpu": "A100", "interconnect": "800 Gbps InfiniBand per node"}, "dgx-a100-80gb", {"nics_per_node": 4}),
        ({"gpu": "A100", "interconnect": "4 x 100Gb RoCE per node"}, "dgx-a100-80gb", {"nics_per_node": 2}),
        ({"gpu": "GB200", "domain_size": 32}, "gb200-nvl72", {"domain_size": 32}),
        ({"gpu": "GB200", "interconnect": "two NVL72 domains of 32 GPUs each"}, "gb200-nvl72", {"domain_size": 32}),
        ({"interconnect": "AWS p5 EFA 3200 Gbps/node"}, "aws-p5-h100", {}),
        ({"gpu": "A100", "gpu_mem_gb": 40, "interconnect": "AWS p4d, EFA 400 Gbps per node"}, "aws-p4d-a100", {}),
        ({"gpu": "A100", "gpu_mem_gb": 80, "interconnect": "4 x 100 Gbps EFA per node"}, "aws-p4de-a100", {}),
        ({"gpu_mem_gb": 96}, "dgx-h100-96gb-500w", {}),
        ({"interconnect": "RoCE 400 Gbps per GPU, Grand Teton, H100 700W"}, "grand-teton-h100-roce", {}),
        ({"gpu": "GB200", "gpus_per_node": 4, "gpu_mem_gb": 186}, "gb200-nvl72", {"num_nodes": 16}),
        ({"n_gpus": 4, "dp": 1, "pp": 2, "global_batch": 16}, "dgx-h100", {"num_nodes": 1, "num_gpus": 4}),
        ({"gpu": "L40S", "gpus_per_node": 4, "gpu_mem_gb": 48}, "l40s", {"num_nodes": 16, "gpus_per_node": 4}),
        ({"gpus_per_node": 8}, "dgx-h100", {"num_nodes": 8, "gpus_per_node": None, "memory_scale": None}),
        ({"interconnect": "100 Gb/s Ethernet per node"}, "dgx-h100", {"nics_per_node": 1, "nic_bandwidth_scale": 0.25}),
        ({"gpu": "NVIDIA A100-SXM4-40GB", "gpu_mem_gb": None}, "dgx-a100-40gb", {}),
        ({"gpu": "8 x NVIDIA H100 80GB HBM3", "gpu_mem_gb": None}, "dgx-h100", {}),
        ({"gpu": "Cloud TPU v5p", "gpu_mem_gb": 95}, "tpu-v5p", {}),
        ({"gpu": "Google TPU v6e-256", "gpu_mem_gb": 32}, "tpu-v6e", {}),
    ],
)
def test_machines(changes: dict[str, Any], profile: str, cluster: dict[str, int]) -> None:
    found = machine_of(row(**changes))[0]
    assert found["hardware"] == profile
    assert {key: found.get(key) for key in cluster} == cluster


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("Selene DGX A100, 8x HDR200 IB per node", 1600),
        ("NVL72 NVLink5, 800G per GPU", 3200),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", 3200),
        ("Management: 1x Ethernet 10GB/Sec", None),
        ("2 x dual HDR100 InfiniBand", 400),
        ("HPE Slingshot 11, 4 NICs per node (200 Gb/s each)", 800),
        ("4 x HPE Slingshot 11", 800),
        ("BF3 200Gbps for NS and 2xBF3 400Gbps for EW", 800),
        ("8 x 400 Gbps", 3200),
        ("8x400 IB", 3200),
        ("400 Gb/s x8", 3200),
        ("IB HDR 200Gb/s x 4", 800),
        ("3.2 Tb/s per node", 3200),
        ("50 GB/s per GPU", 3200),
        ("8x H100 nodes with 400 Gb/s per node", 400),
        ("NDR 400 Gb/s InfiniBand", None),
        ("NVLink single node", None),
        ("", None),
    ],
)
def test_bandwidth_in_words(text: str, gigabits: float | None) -> None:
    assert node_gigabits(text, 4 if "NVL72" in text else 8) == gigabits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "GPU is not stated"),
        ({"gpu": "TPU-v3"}, "no hardware profile for GPU 'TPU-v3'"),
        ({"gpu": "Trainium2"}, "no hardware profile for GPU 'Trainium2'"),
        ({"arch": "hybrid mamba2/attention"}, "layers that no shipped model"),
        ({"arch": "hybrid", "model_name": "Nemotron-H-56B", "layers": 54}, "layers that no shipped model"),
        ({"arch": "moe (sparse attention)"}, "moe (sparse attention): layers that no shipped model"),
        ({"arch": "moe, DSA"}, "moe, DSA: layers that no shipped model"),
        ({"task": "layer microbenchmark"}, "microbenchmark"),
        ({"tp": None, "pp": None}, "layout not stated: tp, pp"),
        ({"dp": 7}, "is not n_gpus"),
        ({"fsdp": "DeepSpeed ZeRO-3", "notes": "ZeRO++ (quantised gathers)"}, "quantised values"),
        ({"layers": None, "model_name": "ours"}, "dimensions not stated: layers"),
        ({"layers": None, "hidden": 2048}, "dimensions not stated: layers"),
        ({"seq_len": None}, "sequence length not stated"),
        ({"arch": "diffusion transformer"}, "not a transformer of text"),
        ({"arch": "encoder-decoder (T5)"}, "not a transformer of text"),
        ({"arch": "vision encoder"}, "not a transformer of text"),
        ({"global_batch": None}, "global batch not stated"),
        ({"gpu": "MI300", "gpu_mem_gb": 128, "gpus_per_node": 4}, "no hardware profile for GPU 'MI300'"),
        ({"global_batch": 100}, "not a multiple"),
        ({"global_batch": 4_194_312}, "524289 micro batches a step: is the global batch of 4194312 in tokens?"),
        ({"pp_layout": "every other Tuesday"}, "not understood"),
        ({"n_gpus": None, "dp": None}, "number of GPUs is not stated"),
        ({"tp": True}, "unexpected value: tp: True is not a number"),
        ({"layers": -1}, "is negative"),
        ({"pp": 2.5}, "is not a whole number"),
        ({"step_time_s": None}, "nothing measured"),
        ({"layers": "many"}, "unexpected value"),
        ({"tp": 64, "pp": 1, "dp": 1}, "not a valid scenario"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes: dict[str, Any], reason: str) -> None:
    assert reason in run_of(row(**changes)).skipped


@pytest.mark.parametrize(("position", "scaled"), [("yarn", True), ("rope", False)])
def test_rows_with_windows_by_layer_take_the_shipped_model(position: str, scaled: bool) -> None:
    sizes = {"model_name": "GPT-OSS-120B", "hidden": 2880, "layers": 36, "attn_window": "128 on alternate layers"}
    table, notes = model_of(row(**sizes, vocab=128256, position=position))
    model = model_from_table(table)
    assert isinstance(model, ArchitectureSpec)
    (stack,) = model.stacks
    attentions = [stack.layers[name].sublayers[0].branches[0] for name in stack.pattern]
    assert [a.window for a in attentions] == [128, None] * 18
    assert all(a.rope_factor is scaled for a in attentions)
    assert (model.vocab_size, notes) == (128256, [])
    for changes in ({"layers": 24}, {"model_name": "another"}, {"attn_window": 4096}):
        assert model_of(row(**{**sizes, **changes}))[0]["kind"] == "transformer"


@pytest.mark.parametrize("name", [name for _, name in FRAMEWORK_PATTERNS])
def test_every_framework_rule_names_a_framework(name: str) -> None:
    assert framework(name).name == name


def test_schedules_of_two_chunks_in_a_v_have_two_chunks() -> None:
    for text, name in (("V-Half", "v-half"), ("V-Min (controllable memory)", "v-min"), ("ZB-V", "zb-v")):
        scenario = run_of(row(pp_schedule=text, vpp=1)).scenario
        assert scenario is not None
        assert (scenario.plan.schedule, scenario.plan.virtual_stages) == (name, 2)


@pytest.mark.parametrize("name", [name for _, name in SCHEDULE_PATTERNS])
def test_every_schedule_rule_names_a_schedule(name: str) -> None:
    assert name in SCHEDULES


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"framework": "torchtitan (PyTorch FSDP2)"}, "torchtitan"),
        ({"framework": "Megatron-LM + zero-bubble"}, "zero-bubble"),
        ({"framework": "VocabularyParallelism, a fork of Megatron-LM"}, "zero-bubble"),
        ({"framework": "lit-gpt (TinyLlama)"}, "tinyllama"),
        ({"framework": "NVIDIA NeMo Framework Release 25.09"}, "nemo"),
        ({"framework": "ms-swift + DeepSpeed"}, "deepspeed"),
        ({"framework": "CUDA 12.3", "source": "MLPerf Training v4.0 results"}, "nemo"),
        ({"framework": "something new"}, "plain"),
        ({"framework": "something new", "precision": "bf16 (autocast)"}, "torch-autocast"),
        ({"framework": "nanoGPT train.py"}, "torch-autocast"),
        ({"framework": "modded-nanogpt"}, "plain"),
        ({"framework": "own loop", "precision": "fp8 (torchao rowwise)"}, "plain"),
        ({"framework": "own loop", "precision": "fp8 (TransformerEngine)"}, "torch-te"),
        ({"framework": "own trainer, TransformerEngine layers", "precision": "mxfp8"}, "torch-te"),
        ({"framework": "own trainer, TransformerEngine layers", "precision": "bf16"}, "plain"),
        ({"framework": "HF transformers, own loop"}, "transformers"),
        ({"framework": "HF transformers, own loop", "precision": "fp8 by TransformerEngine"}, "torch-te"),
        ({"framework": "accelerate", "precision": "fp8 by TransformerEngine", "zero_stage": 3}, "transformers"),
        ({"framework": "torch FSDP (transformers)"}, "torch-fsdp"),
        ({"framework": "DeepSpeed (PipelineModule)"}, "deepspeed"),
        ({"framework": "BioNeMo"}, "nemo"),
        ({"framework": "PyTorch, accelerated by ROCm"}, "plain"),
    ],
)
def test_frameworks(changes: dict[str, Any], name: str) -> None:
    assert framework_of(row(**changes))[0] == name


def test_months_take_the_best_evidence() -> None:
    assert month_of_row(row(source="MLPerf Training v5.1 results", framework_version="Release 23.09"), "nemo") == (2025, 11)
    old = row(framework_version=None, flash_attention=False, source_version="2024-09")
    assert month_of_row(old, "megatron-core") == (2022, 4)
    assert month_of_row(row(framework_version=None, source="Paper (arXiv 2401.10241)"), "zero-bubble") == (2024, 1)
    assert month_of_row(row(framework_version=None, source_version="Feb 2022"), "megatron-deepspeed") == (2022, 2)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bf16", "bf16"), ("fp16 mixed", "fp16"), ("FP8-CS", "fp8"), ("FP8-MX", "mxfp8"), ("MXFP8", "mxfp8"),
        ("fp8 (fine-grained 1x128/128x128)", "fp8-block"), ("fp8 blockwise", "fp8-block"), ("NVFP4", "nvfp4"),
        ("mxfp4 (last 5 layers bf16)", "nvfp4"), ("FP4", "nvfp4"),
        ("nvfp4 (FP4=True, NVTE_DPA_FP8=True)", "nvfp4"), ("fp8 (float8 tensorwise linear, fp8 all-gather) + bf16", "fp8"),
    ],
)  # fmt: skip
def test_precisions(text: str, precision: str) -> None:
    assert precision_of({"precision": text}, (2025, 1))[0] == precision


def test_precision_before_bf16_became_usual() -> None:
    assert precision_of({}, (2021, 6))[0] == "fp16"
    assert precision_of({}, (2024, 6))[0] == "bf16"


def test_precision_of_a_gpu_without_bf16() -> None:
    run = run_of(row(gpu="V100-SXM2-32GB", gpu_mem_gb=None, precision=None))
    assert run.scenario is not None, run.skipped
    assert run.scenario.training.precision == "fp16"
    assert "precision not stated: fp16" in run.assumptions
    assert "has no bf16 arithmetic" in run_of(row(gpu="V100", gpu_mem_gb=32)).skipped


@pytest.mark.parametrize(
    ("changes", "profile"),
    [
        ({"gpu": "Tesla V100-SXM2-16GB"}, "dgx1-v100-16gb"), ({"gpu": "V100", "gpus_per_node": 16}, "dgx2-v100-32gb"),
        ({"gpu": "Quadro RTX 8000"}, "rtx-8000"), ({"gpu": "RTX8000"}, "rtx-8000"),
        ({"gpu": "T4"}, "t4"), ({"gpu": "NVIDIA L4"}, "l4"), ({"gpu": "L40S"}, "l40s"),
        ({"gpu": "A10G"}, "a10g"), ({"gpu": "A10"}, "a10"),
        ({"gpu": "GeForce RTX 3090"}, "rtx-3090"), ({"gpu": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"}, "rtx-pro-6000"),
        ({"gpu": "NVIDIA GB10"}, "gb10"), ({"gpu": "2 x NVIDIA DGX Spark"}, "gb10"), ({"gpu": "RTX 3090 Ti"}, "rtx-3090-ti"),
        ({"gpu": "NVIDIA GeForce RTX 4060 Laptop GPU"}, "rtx-4060-laptop"), ({"gpu": "GeForce RTX 4090"}, "rtx-4090"),
        ({"gpu": "NVIDIA RTX PRO 4000 Blackwell"}, "rtx-pro-4000"),
        ({"gpu": "NVIDIA L40"}, "l40"), ({"gpu": "RTX 5090"}, "rtx-5090"), ({"gpu": "A40"}, "a40"),
        ({"gpu": "RTX 6000 Ada Generation"}, "rtx-6000-ada"),
        ({"gpu": "H100 NVL"}, "h100-nvl"), ({"gpu": "NVIDIA H100 PCIe"}, "h100-pcie"), ({"gpu": "H200 NVL"}, "h200-nvl"),
        ({"gpu": "A100", "gpus_per_node": 4, "gpu_mem_gb": 40}, "hgx-a100-4gpu-40gb"),
        ({"gpu": "GH200 480GB", "gpus_per_node": 4, "gpu_mem_gb": 96}, "gh200-quad"),
        ({"gpu": "GH200", "gpus_per_node": 1}, "gh200"), ({"gpu": "MI350X"}, "mi350x"),
        ({"gpu": "AMD Instinct MI250X", "gpu_mem_gb": 64}, "mi250x"), ({"gpu": "AMD Instinct MI100"}, "mi100"),
        ({"gpu": "MI210", "gpu_mem_gb": 64}, "mi210"), ({"gpu": "MI325X"}, "mi325x"),
        ({"gpu": "MI355X OAM"}, "mi355x"), ({"gpu": "MI355"}, "mi355x"), ({"gpu": "AMD MI300", "gpu_mem_gb": 192}, "mi300x"),
        ({"gpu": "MI300", "gpus_per_node": 8}, "mi300x"),
        ({"gpu": "B300 SXM"}, "dgx-b300"), ({"gpu": "B300", "interconnect": "p6 with EFA"}, "aws-p6-b300"),
        ({"gpu": "B200", "interconnect": "AWS"}, "aws-p6-b200"),
        ({"gpu": "A800 80GB PCIe"}, "a100-pcie"), ({"gpu": "A800-SXM4-80GB"}, "hgx-a800"),
        ({"gpu": "RTX A6000 (48 GB)"}, "rtx-a6000"), ({"gpu": "NVIDIA L4 24GB"}, "l4"), ({"gpu": "NVIDIA A40-48G"}, "a40"),
    ],
)  # fmt: skip
def test_names_of_gpus(changes: dict[str, Any], profile: str) -> None:
    assert machine_of(row(**{"gpu_mem_gb": None, **changes}))[0]["hardware"] == profile


@pytest.mark.parametrize(
    ("gpu", "scale"),
    [("A10G", None), ("A10G 24GB", None), ("GH200 480GB", None), ("NVIDIA GH200 480GB", None), ("A100-PCIE-40GB", 0.505)],
)
def test_memory_in_a_gpu_s_name(gpu: str, scale: float | None) -> None:
    found = machine_of(row(gpu=gpu, gpu_mem_gb=None))[0].get("memory_scale")
    assert found == (None if scale is None else pytest.approx(scale, rel=1e-2))


@pytest.mark.parametrize(
    "gpu",
    ["Trainium2", "Gaudi 3", "A30", "RTX 5080", "RTX 4090 Laptop GPU", "RTX 5090 Laptop GPU", "RTX 4060", "MI300A", "Ascend 910B"],
)
def test_a_gpu_without_a_profile_is_not_taken_for_another(gpu: str) -> None:
    assert run_of(row(gpu=gpu, gpu_mem_gb=None)).skipped == f"no hardware profile for GPU {gpu!r}"


@pytest.mark.parametrize(
    ("name", "normed"), [("OLMo2-7B", True), ("OLMo-2-1124-13B", True), ("OLMo-7B", False), ("Qwen3-8B", True)]
)
def test_families_that_normalise_queries_and_keys(name: str, normed: bool) -> None:
    model = run_of(row(model_name=name)).scenario.model  # type: ignore[union-attr]
    assert isinstance(model, TransformerSpec)
    assert model.qk_norm is normed


@pytest.mark.parametrize(
    ("notes", "loss"),
    [
        ("apex fused cross entropy", "fused"), ("flash-attn's xentropy kernel", "fused"), ("fused linear cross entropy", "linear"),
        ("no fused cross entropy", "auto"), ("unfused cross entropy", "unfused"), ("", "auto"),
        ("fused RMSNorm, rotary embedding and cross entropy", "fused"),
    ],
)  # fmt: skip
def test_losses_in_words(notes: str, loss: str) -> None:
    run = run_of(row(pp=1, vpp=None, tp=1, dp=64, framework="FSDP", framework_version="2024-03", notes=notes or None))
    assert run.scenario is not None
    assert run.scenario.training.cross_entropy == loss


def test_attention_kernels() -> None:
    assert attention_of({"notes": "attention/norm kernel: flash_attentionv1.0.8"}) == "fa1"
    assert attention_of({"notes": "attention/norm kernel: flash_attention2 + RMS kernel"}) == "fa2"
    assert attention_of({"notes": "attention/norm kernel: fused"}) == "unfused"
    assert attention_of({"flash_attention": False}) == "unfused"
    assert attention_of({"flash_attention": False, "notes": "built without cuDNN"}) == "unfused"
    assert attention_of({"notes": "cuDNN attention"}) == "cudnn"
    assert attention_of({"notes": "TE + DeepEP + FlexAttn"}) == "flex"
    assert attention_of({"flash_attention": "flash attention 4"}) == "fa4"
    assert attention_of({"notes": "memory-efficient attention", "flash_attention": True}) == "efficient"
    assert attention_of({"flash_attention": True}) == "auto"
    assert attention_of({"flash_attention": "SDPA math backend"}) == attention_of({"notes": "eager attention"}) == "unfused"


@pytest.mark.parametrize(
    ("stated", "usual", "month", "kernel"),
    [
        ("torch SDPA", "unfused", (2023, 7), "fa1"), ("scaled_dot_product_attention", "unfused", (2024, 2), "fa2"),
        ("torch SDPA", "fa2", (2023, 7), "auto"), ("none of its own", "unfused", (2024, 2), "auto"),
        (True, "unfused", (2023, 9), "fa2"), (True, "unfused", (2023, 7), "fa1"),
    ],
)  # fmt: skip
def test_a_kernel_that_a_framework_had_not_yet(stated: object, usual: str, month: tuple[int, int], kernel: str) -> None:
    assert attention_of({"flash_attention": stated}, usual, month) == kernel


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Et*4|(t*4|)*14tmL", (4, *(4,) * 14, 1)),
        ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0)),
        ("E|t|t|L", (0, 1, 1, 0)),
    ],
)
def test_layout_language(text: str, counts: tuple[int, ...]) -> None:
    assert parse_layout(text) == counts
    assert layout_of(text, sum(counts), len(counts)) == {"layers_per_stage": counts}


def test_layout_in_words() -> None:
    fewer = {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
    assert layout_of("first/last stage one layer fewer", 62, 32) == fewer
    counted = "embedding layers counted as layers in the partition (type:transformer|embedding)"
    assert layout_of(counted, 70, 12) == fewer
    assert layout_of("first/last stage one layer fewer", 62, 64) == {"layers_per_stage": (0, *(1,) * 62, 0)}
    assert layout_of("", 94, 96) == {"layers_per_stage": (0, *(1,) * 94, 0)}
    with pytest.raises(CannotExpress, match="has 4 layers in 2 stages"):
        layout_of("ttt|tL", 5, 2)


@pytest.mark.parametrize(
    ("word", "detail", "expected"),
    [
        ("none", "", "none"),
        ("full", "full activation recompute per layer", "full"),
        ("selective", "", {"core_attn"}),
        ("selective modules", "mla_up_proj", {"mla_up_proj"}),
        ("selective modules", "moe,layernorm,core_attn,moe_act", {"moe", "layernorm", "core_attn", "moe_act"}),
        ("selective modules", "layernorm,moe_act", {"layernorm", "moe_act"}),
        ("selective", "per-op SAC", {"op"}),
        ("selective modules", "mla_up_proj,mlp", {"mla_up_proj", "mlp"}),
    ],
)
def test_recomputation_in_words(word: str, detail: str, expected: Any) -> None:
    found = recompute_of({"recompute": word, "recompute_detail": detail}, framework("megatron-core"), [])
    assert (set(found["modules"]) if isinstance(found, dict) else found) == expected


def test_every_recompute_module_is_one_the_plan_documents() -> None:
    text = Path("simpar/specs/plan.py").read_text()
    for _, module in RECOMPUTE_MODULES:
        assert re.search(rf"\b{module}\b", text)


def test_missing_recomputation_is_the_frameworks_of_that_time_and_is_named() -> None:
    notes: list[str] = []
    assert recompute_of({}, framework("megatron-core", "2021-07"), notes) == "full"
    assert recompute_of({}, framework("megatron-core", "2025-07"), notes) == "none"
    assert len(notes) == 2


def test_moe_and_mla() -> None:
    run = run_of(
        row(
            arch="moe-mla", layers=61, ffn=2048, dense_ffn=18432, heads=128, kv_heads=128, head_dim=192, hidden=7168,
            moe_experts=256, moe_topk=8, moe_ffn=2048, moe_shared_ffn=2048, moe_dense_layers=3, mtp_layers=1, ep=8,
            mla="q_lora 1536, kv_lora 512, qk_nope 128, qk_rope 64, v 128", vpp=1, tp=1, dp=16, sp=False,
            moe_routing="force-balanced, dropless; dispatcher hybridep", pp_layout=None,
        )
    )  # fmt: skip
    assert run.skipped == ""
    assert run.scenario is not None
    model = run.scenario.model
    assert isinstance(model, TransformerSpec)
    assert model.moe is not None
    assert model.mla is not None
    assert (model.intermediate_size, model.moe.moe_intermediate_size, model.moe.first_k_dense_replace) == (18432, 2048, 3)
    assert (model.mla.q_lora_rank, model.mla.kv_lora_rank, model.mla.v_head_dim) == (1536, 512, 128)
    assert run.scenario.plan.ep_dispatcher == "hybridep"


def test_stages_of_nanotron_are_cut_by_cost() -> None:
    run = run_of(row(framework="nanotron", vpp=1, framework_version="2025-02"))
    assert run.scenario is not None
    counts = run.scenario.plan.layers_per_stage
    assert counts is not None
    assert sum(counts) == 32
    assert counts[0] > counts[-1]


def test_hai_llm_leaves_fewer_layers_on_the_ends_and_exchanges_by_deepep() -> None:
    run = run_of(row(framework="HAI-LLM", framework_version="2025", layers=61, tp=1, pp=16, vpp=None, n_gpus=128,
                     global_batch=256, moe_experts=64, moe_topk=4, moe_ffn=2048, ep=8))  # fmt: skip
    assert run.scenario is not None, run.skipped
    assert run.scenario.plan.layers_per_stage == (3, *(4,) * 14, 2)
    assert run.scenario.plan.ep_dispatcher == "deepep"


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 5.0),
        ({"step_time_s": None, "tokens_per_s_per_gpu_best": 1000.0}, 128 * 8192 / 64e3),
        ({"step_time_s": None, "tokens_per_s": 64e3}, 128 * 8192 / 64e3),
        ({"step_time_s": None, "samples_per_s": 4.0}, 32.0),
        ({"step_time_s": None, "tflops_per_gpu": 400}, None),
    ],
)  # fmt: skip
def test_measured_step_time(changes: dict[str, Any], seconds: float | None) -> None:
    found = measured_of(row(**changes)).step_time_s
    assert found is None if seconds is None else found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        ("BF16 model TFLOPs/GPU", 0.5), ("model FLOPs, causal-halved attention, no recompute", 0.5),
        ("non-causal model FLOPs", 1.0), ("6N + 12 L h s", 1.0), ("Megatron's log: full attention, logits", 1.0),
    ],
)  # fmt: skip
def test_a_step_time_from_flops_alone(words: str, attention: float) -> None:
    run = run_of(row(step_time_s=None, tflops_per_gpu=400.0, tflops_def=words))
    products = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) + 4096 * 128256
    per_token = 6 * products + 3 * 4 * 32 * 4096 * 8192 * attention
    assert run.measured.step_time_s == pytest.approx(128 * 8192 * per_token / (64 * 400e12), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "month", "attention"),
    [
        ("Megatron-LM", "2024-06", 1.0), ("Megatron-LM's log", "2025-03", 1.0), ("Megatron-Bridge", "2025-04", 0.5),
        ("Megatron-LM", "2023-10", None), ("NeMo", "2025-07", None), ("Megatron-LM, non-causal", "2025-07", 1.0),
        ("torchtitan, 989 TFLOP/s", "2025-11", 1.0),
    ],
)  # fmt: skip
def test_a_log_counts_what_its_framework_did_then(words: str, month: str, attention: float | None) -> None:
    run = run_of(row(step_time_s=None, tflops_per_gpu=400.0, tflops_def=words, framework_version=month))
    if attention is None:
        assert run.skipped.startswith("nothing measured: TFLOP/s or MFU alone")
        return
    products = 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) + 4096 * 128256
    per_token = 6 * products + 3 * 4 * 32 * 4096 * 8192 * attention
    assert run.measured.step_time_s == pytest.approx(128 * 8192 * per_token / (64 * 400e12), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "recompute", "attention", "passes"),
    [
        ("hardware FLOPs", "full", 1.0, 4), ("HFU, causal", "full", 0.5, 4), ("hardware FLOPs", "none", 1.0, 3),
    ],
)  # fmt: skip
def test_hardware_flops_have_what_is_recomputed(words: str, recompute: str, attention: float, passes: int) -> None:
    run = run_of(row(step_time_s=None, tflops_per_gpu=400.0, tflops_def=words, recompute=recompute))
    layers = 2 * 32 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) + 4 * 32 * 4096 * 8192 * attention
    per_token = passes * layers + 6 * 4096 * 128256
    assert run.measured.step_time_s == pytest.approx(128 * 8192 * per_token / (64 * 400e12), rel=1e-3)


@pytest.mark.parametrize(("words", "attention"), [("hardware FLOPs", 1.0), ("HFU, causal", 0.5)])
def test_hardware_flops_have_again_only_the_layers_that_are(words: str, attention: float) -> None:
    run = run_of(row(step_time_s=None, tflops_per_gpu=400.0, tflops_def=words, recompute="full (block, 1 layer)"))
    layer = 2 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336) + 4 * 4096 * 8192 * attention
    per_token = (3 * 32 + 8) * layer + 6 * 4096 * 128256  # one of the layers of each of 4 x 2 stages
    assert run.measured.step_time_s == pytest.approx(128 * 8192 * per_token / (64 * 400e12), rel=1e-3)


@pytest.mark.parametrize("peak", [312.0, None])
def test_a_step_time_from_a_share_of_the_peak_alone(peak: float | None) -> None:
    run = run_of(row(step_time_s=None, mfu=40.0, mfu_def="non-causal model FLOPs", peak_tflops_used=peak))
    same = run_of(row(step_time_s=None, tflops_per_gpu=0.4 * (peak or 989.4), tflops_def="non-causal model FLOPs"))
    assert run.measured.step_time_s == pytest.approx(same.measured.step_time_s, rel=1e-3)
    assert run.measured.step_time_from == "mfu"
    assert run_of(row(step_time_s=None, mfu="40%", mfu_def="non-causal", peak_tflops_used=peak)).measured == run.measured


@pytest.mark.parametrize("stated", [0.45, "0.45", 1.0])
def test_a_share_where_percent_are_meant_is_refused(stated: object) -> None:
    run = run_of(row(step_time_s=None, mfu=stated, mfu_def="non-causal"))
    assert (
        run.skipped
        == f"nothing measured: mfu {float(str(stated)):g} is in percent and too small for one; a share of 0.45 is written 45"
    )
    assert run_of(row(mfu=stated)).skipped == ""


@pytest.mark.parametrize("words", ["model FLOPs with recomputation", None])
def test_other_flops_tell_no_step_time(words: str | None) -> None:
    run = run_of(row(step_time_s=None, tflops_per_gpu=400.0, tflops_def=words))
    assert run.skipped.startswith("nothing measured: TFLOP/s or MFU alone")
    assert run_of(row(step_time_s=None, mfu=40.0, mfu_def=words)).skipped.startswith("nothing measured: TFLOP/s or MFU alone")
    assert (
        run_of(row(step_time_s=None, tflops_per_gpu=4.0, tflops_def="hardware", recompute="selective")).measured.step_time_s is None
    )
    assert run_of(row(tflops_per_gpu=400.0, tflops_def="causal")).measured.step_time_s == 5.0


@pytest.mark.parametrize(
    ("kind", "expected", "first"),
    [
        ("max reserved (caching allocator), maximum over all ranks", "reserved", False),
        ("max_memory_allocated/2^30 on the logging rank (rank 0 normally)", "allocated", True),
        ("nvidia-smi used memory of the first/last node (allocator reserved + context)", "device", False),
        ("whole device, % of the card (wandb)", "device", False),
        ("rocm-smi", "device", False),
        ("max allocated, after 1 iteration", "first_step", False),
        ("max allocated in the first step, logging rank 0", "first_step", True),
        ("max allocated, after 10 iterations", "allocated", False),
        ("max reserved, after 1 iteration", "reserved", False),
        ("unknown: max allocated or reserved (nanotron logs both)", "band", True),
        ("peak per GPU as written by the authors (kind not stated)", "band", False),
        (None, "band", False),
    ],
)
def test_memory_kinds(kind: str | None, expected: str, first: bool) -> None:
    found = measured_of(row(mem_gib=10.0, mem_kind=kind))
    assert (found.peak_memory_bytes, found.memory_kind, found.memory_first_rank) == (10 * 2**30, expected, first)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"dp": None}, "dp not stated: 8, from the number of GPUs"),
        ({"n_gpus": None}, "number of GPUs not stated: 64, the product of the degrees"),
        ({"tp": None, "pp": None, "vpp": None, "dp": 64, "zero_stage": 3}, "layout not stated: tp, pp 1"),
        (
            {"tp": None, "pp": None, "vpp": None, "dp": None, "framework": "own loop, PyTorch DDP", "sp": None},
            "layout not stated: tp, pp 1 beside DistributedDataParallel",
        ),
        ({"global_batch": None, "grad_accum": 16}, "global batch not stated: 128"),
        ({"global_batch": None, "micro_batch": 4, "tokens_per_s_per_gpu": 9000.0}, "global batch not stated: 352, from step time"),
        ({"global_batch": None, "micro_batch": 4, "tokens_per_s_per_gpu": 1e3}, "batch not stated: 32 micro-batches of 4 per rank"),
        ({"global_batch": None, "step_time_s": None, "samples_per_s": 9.0, "pp": 1, "vpp": 1, "dp": 32}, "one micro-batch of 1"),
        ({"micro_batch": None, "framework": "torchtitan", "framework_version": "2025-02"}, "not stated: local batch / pp"),
        ({"heads": None}, "heads not stated: 32"),
        ({"tp": None, "pp": None, "dp": None, "vpp": None, "n_gpus": 1}, "tp, pp, dp 1, as there is one GPU"),
        ({"tp": None, "pp": None, "vpp": None, "dp": 64}, "layout not stated: tp, pp 1, as the others take all GPUs"),
        ({"layers": None, "hidden": None, "heads": None}, "those of llama3.1-8b"),
        ({"framework": "Alpa", "framework_version": None}, "framework 'Alpa': as maxtext"),
        ({"precision": "int3"}, "precision 'int3' unknown"),
        ({"n_params_b": "lots"}, "n_params_b left out: 'lots' is not a number"),
    ],
)
def test_what_follows_is_filled_and_named(changes: dict[str, Any], note: str) -> None:
    run = run_of(row(**changes))
    assert run.skipped == ""
    assert any(note in text for text in run.assumptions), run.assumptions


def test_values_of_other_types_mean_the_same() -> None:
    odd = row(tp="2", pp=4.0, n_gpus="64", sp="yes", step_time_s="5", global_batch="128", vocab="128,256", zero_stage="1")
    assert run_of(odd).scenario == run_of(row()).scenario
    assert run_of(odd).measured == run_of(row()).measured


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Meta-Llama-3-8B-Instruct", "llama3.1-8b"), ("Llama 2 70B", "llama2-70b"), ("Llama-3.3-70B", "llama3.1-70b"),
        ("Mixtral 8x7B v0.1", "mixtral-8x7b"), ("GPT-3 175B", "gpt3-175b"), ("DeepSeek-V3", "deepseek-v3"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"), ("Llama-3.2-1B", "llama3.2-1b"), ("Kimi-K2", "kimi-k2"), ("ours", None),
    ],
)  # fmt: skip
def test_a_named_model_has_its_published_dimensions(name: str, preset: str | None) -> None:
    found, notes = completed({"model_name": name})
    assert notes == ([f"model dimensions not stated: those of {preset}"] if preset else [])
    if preset is None:
        assert "layers" not in found
        return
    model = load_model(preset)
    table, _ = model_of({**found, "seq_len": 4096})
    assert isinstance(model, TransformerSpec)
    again = TransformerSpec.model_validate({**table, "name": model.name})
    assert total_parameters(again) == pytest.approx(total_parameters(model), rel=2e-3)


def test_ranks_of_latent_attention_are_those_of_the_named_model() -> None:
    said = "q_lora 1536, kv_lora 512, qk_nope 128, qk_rope 64, v 128"
    sizes = {"layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432}
    found, notes = completed({"model_name": "DeepSeek-V3", "mla": True, **sizes})
    assert found["mla"] == said
    assert notes == ["model dimensions not stated: those of deepseek-v3"]
    assert completed({"model_name": "DeepSeek-V3", "mla": True, **sizes, "hidden": 4096})[0]["mla"] is True
    other = completed({"model_name": "DeepSeek-V3", "mla": "kv_lora 256, v 64", **sizes})[0]["mla"]
    assert other == "q_lora 1536, kv_lora 256, qk_nope 128, qk_rope 64, v 64"


@pytest.mark.parametrize(("pattern", "name", "why"), NEAREST)
def test_every_stand_in_names_a_framework_and_says_why(pattern: str, name: str, why: str) -> None:
    assert framework(name).name == name
    assert why


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("HF accelerate FSDP2", "transformers"), ("HF Trainer", "transformers"), ("TRL", "trl"), ("torchtune", "torchtune"),
        ("prime-rl (torch FSDP2, own torchtitan-like parallel code)", "prime-rl"), ("DeepSpeed (HF Trainer)", "deepspeed"),
        ("litgpt", "lit-gpt"), ("OLMo-core", "olmo-core"), ("llm.c", "llm.c"), ("torch-titan", "torchtitan"),
        ("LLM Foundry", "llm-foundry"),
    ],
)  # fmt: skip
def test_frameworks_of_fine_tuning_have_rows_of_their_own(stated: str, name: str) -> None:
    assert framework_of({"framework": stated}) == (name, [])


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("PyTorch Lightning", "torch-fsdp"),
        ("MaxText", "maxtext"), ("GPT-NeoX", "megatron-deepspeed"), ("Colossal-AI", "colossal-ai"), ("Alpa", "maxtext"),
        ("MegaScale", "megatron-core"), ("veScale", "megatron-core"), ("nnScaler", "megatron-core"),
        ("Primus", "megatron-core"), ("Primus (TorchTitan)", "torchtitan"), ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("axolotl", "transformers"), ("unsloth", "transformers"), ("LLaMA-Factory", "transformers"), ("PEFT", "transformers"),
        ("verl", "verl"), ("OpenRLHF", "deepspeed"), ("torch DDP", "plain"),
        ("EleutherAI NeoX", "megatron-deepspeed"), ("LLaMA Factory", "transformers"), ("LMFlow", "deepspeed"),
        ("ms-swift 3.1", "swift"), ("Oumi", "transformers"), ("QLoRA (bitsandbytes)", "transformers"),
        ("llama-recipes", "torch-fsdp"), ("mistral-finetune", "torch-fsdp"), ("open_lm", "torch-fsdp"),
        ("ArcticTraining", "deepspeed"), ("Lit-LLaMA", "lit-gpt"), ("Stanford Alpaca", "transformers"),
    ],
)  # fmt: skip
def test_other_frameworks_take_the_nearest_and_say_so(stated: str, name: str) -> None:
    found, notes = framework_of({"framework": stated})
    assert found == name
    known = stated.lower() in ("maxtext", "verl", "colossal-ai", "megatron-deepspeed", "ms-swift 3.1")
    assert known == (notes == [])


@pytest.mark.parametrize(
    ("stated", "fsdp", "name"),
    [
        ("HF Trainer", "DeepSpeed ZeRO-3", "deepspeed"), ("axolotl", "deepspeed zero2", "deepspeed"),
        ("somebody's trainer", "DeepSpeed ZeRO-3", "deepspeed"), ("HF Trainer", "FSDP2", "transformers"),
        ("Megatron-DeepSpeed", "DeepSpeed ZeRO-1", "megatron-deepspeed"), ("torchtitan", "not DeepSpeed's", "torchtitan"),
    ],
)  # fmt: skip
def test_a_trainer_under_deepspeed_runs_as_deepspeed(stated: str, fsdp: str, name: str) -> None:
    assert framework_of({"framework": stated, "fsdp": fsdp})[0] == name


@pytest.mark.parametrize(
    ("precision", "pure"),
    [
        ("bf16 autocast, fp32 weights", False), ("bf16 (fp32 master weights)", False), ("bf16, float32 parameters", False),
        ("bf16", None), ("bf16 weights, fp32 reduction", None),
    ],
)  # fmt: skip
def test_weights_said_to_rest_in_fp32_do(precision: str, pure: bool | None) -> None:
    """transformers 5 keeps the checkpoint's 16 bits unless a run says otherwise."""
    given = row(framework="HF Trainer", framework_version="2026-03", tp=1, pp=1, vpp=None, dp=64, zero_stage=0, sp=None)
    scenario = run_of({**given, "precision": precision}).scenario
    assert scenario is not None
    assert scenario.training.pure_bf16 is pure


@pytest.mark.parametrize(
    ("notes", "fused"),
    [
        ("Liger norm, rotary and activation", True),
        ("no liger", False),
        ("foak-fast-kernels; Liger fused linear cross entropy", ("norm", "rope")),
        ("flash-attn's fused RMSNorm, cross entropy and rotary", ("norm", "rope")),
        ("xformers' SwiGLU", ("activation",)),
        ("fused rope / SwiGLU / RMSNorm", True),
        ("fused AdamW, gradient norm of 1.0; no fused RMSNorm", False),
    ],
)
def test_a_library_s_kernels_are_read_beside_16_bit_weights(notes: str, fused: bool | tuple[str, ...]) -> None:
    given = row(framework="HF Trainer", precision="bf16 (pure)", tp=1, pp=1, vpp=None, dp=64, zero_stage=0, sp=None, notes=notes)
    scenario = run_of(given).scenario
    assert scenario is not None
    assert (scenario.training.pure_bf16, scenario.training.fused_kernels) == (True, fused)


@pytest.mark.parametrize(
    ("framework", "name", "fused"),
    [
        ("own trainer, TransformerEngine layers", "plain", True),
        ("custom trainer", "plain", False),
        ("HF Trainer", "transformers", False),
    ],
)
def test_an_own_trainer_is_not_that_of_transformers(framework: str, name: str, *, fused: bool) -> None:
    given = row(framework=framework, precision="bf16", tp=1, pp=1, vpp=None, dp=64, zero_stage=0, sp=None)
    scenario = run_of(given).scenario
    assert scenario is not None
    assert (scenario.framework, scenario.training.fused_kernels) == (name, fused)


@pytest.mark.parametrize(
    "stated",
    [
        "bf16 (pure: weights and AdamW states bf16)",
        "bf16 (weights, gradients and AdamW states bf16)",
        "bf16 weights and AdamW states",
    ],
)
def test_sharded_weights_and_states_of_16_bits_are_read(stated: str) -> None:
    given = row(framework="TRL", precision=stated, tp=1, pp=1, vpp=None, dp=64, zero_stage=3, sp=None, fsdp="FSDP2")
    scenario = run_of(given).scenario
    assert scenario is not None
    assert (scenario.plan.zero_stage, scenario.training.pure_bf16) == (3, True)


@pytest.mark.parametrize(
    ("fsdp", "reshards"),
    [("FSDP2", None), ("FSDP2, reshard_after_forward never", False), ("FSDP2 (reshard_after_forward=False)", False),
     ("FSDP2, reshard_after_forward default", None), ("params not resharded after forward", False), ("shard_grad_op", False)],
)  # fmt: skip
def test_weights_that_stay_gathered(fsdp: str, reshards: bool | None) -> None:
    run = run_of(row(**RATE_ALONE | {"fsdp": fsdp}))
    assert run.usual is not None
    assert run.usual["plan"].get("reshard_after_forward") == reshards
    named_after = run_of(row(**RATE_ALONE | {"fsdp": fsdp, "zero_stage": 2}))
    assert named_after.usual is not None
    assert named_after.usual["plan"]["zero_stage"] == (2 if reshards is None else 3)  # weights rest in shards all the same


def test_a_part_with_other_memory_is_scaled() -> None:
    cluster = machine_of(row(gpu="A100", gpu_mem_gb=64, gpus_per_node=8))[0]
    memory = load_hardware(cluster["hardware"]).gpu.memory.value * cluster["memory_scale"]
    assert memory == pytest.approx(64 * 2**30)


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_parts_with_four_stacks_have_less_bandwidth_too(gpu: str) -> None:
    cluster = machine_of(row(gpu=gpu, gpu_mem_gb=64, gpus_per_node=4))[0]
    assert cluster["hardware"] == f"hgx-{gpu.lower()}-4gpu-64gb"
    assert "memory_scale" not in cluster
    usual = load_hardware("dgx-h100" if gpu == "H100" else "dgx-a100-80gb").gpu
    assert load_hardware(cluster["hardware"]).gpu.memory_bandwidth.value < 0.85 * usual.memory_bandwidth.value


def test_gigabytes_are_the_framework_s_own() -> None:
    said = {"mem_gib": 49.2, "mem_unit_as_stated": "GB", "mem_kind": "peak"}
    assert measured_of(row(**said)).peak_memory_bytes == 49.2 * 2**30
    assert measured_of(row(**said, framework="Megatron-Bridge")).peak_memory_bytes == 49.2e9  # its log divides by 1e9


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
def test_nodes_of_any_size(name: str, gpus: int) -> None:
    old, new = load_hardware(name), with_gpus_per_node(load_hardware(name), gpus)
    assert new.gpus_per_node == gpus
    size = new.domain_size
    assert size % gpus == 0 or gpus % size == 0 or old.scale_up.torus
    assert new.nic.count >= (old.nic.count > 0)
    if old.nic.count * gpus >= old.gpus_per_node:
        assert new.nic.count / gpus == pytest.approx(old.nic.count / old.gpus_per_node, rel=0.51)
    if old.scale_up.kind in ("nvlink-mesh", "xgmi"):
        assert size <= old.domain_size, "a mesh has no links for more GPUs"
    assert with_gpus_per_node(old, old.gpus_per_node) is old


def test_a_smaller_mesh_keeps_what_a_pair_has() -> None:
    old, new = load_hardware("mi300x"), with_gpus_per_node(load_hardware("mi300x"), 4)
    pair = [hw.scale_up.bandwidth.value / (hw.domain_size - 1) for hw in (old, new)]
    assert pair[0] == pytest.approx(pair[1])
    assert new.scale_up.bandwidth.kind == "assumed"


def test_a_file_with_a_bad_line_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(row()) + "\n{not json\n")
    with pytest.raises(InputError, match=r"runs\.jsonl:2: not JSON"):
        list(read_runs(path))
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="JSON object"):
        list(read_runs(path))
    with pytest.raises(InputError, match="no such file"):
        list(read_runs(tmp_path / "missing.jsonl"))


def test_a_row_without_an_id_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n" + json.dumps(row(id=None)) + "\n")
    assert [run.id for run in read_runs(path)] == ["runs.jsonl:2"]


@pytest.mark.parametrize(
    ("stated", "task", "routing"),
    [
        ("", "pretrain", {"kind": "balanced"}),
        ("force-balanced, dropless", "sft", {"kind": "balanced"}),
        ("natural (random init)", "pretrain", {"kind": "lognormal", "spread": 1.0}),
        ("aux-loss-free balanced, dropless", "pretrain", {"kind": "lognormal"}),
        ("", "sft", {"kind": "lognormal"}),
        ("", "Fine-tuning", {"kind": "lognormal"}),
        ("", "full pre-training", {"kind": "balanced"}),
        ("dropless, router as loaded", "lora", {"kind": "lognormal"}),
        ("capacity factor 1.5", "sft", {"kind": "balanced", "capacity_factor": 1.5}),
        ("forced balance, real data", "pretrain", {"kind": "balanced"}),
        ("force load balancing; real tokens", "pretrain", {"kind": "balanced"}),
        ("Natural, no forced balance", "pretrain", {"kind": "lognormal"}),
        ("not real routing", "sft", {"kind": "balanced"}),
        ("capacity 4096 tokens", "pretrain", {"kind": "balanced"}),
        ("capacity 64 tokens", "pretrain", {"kind": "balanced"}),
        ("token drop, capacity 4096", "pretrain", {"kind": "balanced", "capacity_factor": 1.0}),
        ("capacity factor 1.", "pretrain", {"kind": "balanced", "capacity_factor": 1.0}),
    ],
)
def test_fine_tuning_keeps_the_router_of_its_checkpoint(stated: str, task: str, routing: dict[str, object]) -> None:
    """Loads of experts are even only where a source says so, or where recipes force it."""
    assert routing_of(stated, task) == routing


@pytest.mark.parametrize(
    ("made_with", "said", "routing"),
    [
        ("Megatron-Bridge, recipe moonlight_16b_pretrain_16gpu_h100_bf16_config", "", {"kind": "lognormal", "spread": 1.0}),
        ("Megatron-Bridge, recipe moonlight_16b_pretrain_config", "forced balance", {"kind": "balanced"}),
        (
            "Megatron-Bridge, recipe moonlight_16b_pretrain_config",
            "capacity factor 1.25",
            {"kind": "balanced", "capacity_factor": 1.25},
        ),
        ("Megatron-Bridge, recipe moonlight_16b_sft_config", "", {"kind": "balanced"}),
        ("Megatron-Bridge", "", {"kind": "balanced"}),
        ("Megatron-Bridge, recipe deepseek_v3_pretrain_256gpu_b200_bf16_config", "", {"kind": "balanced"}),
    ],
)
def test_a_library_recipe_leaves_an_untrained_router_to_itself(made_with: str, said: str, routing: dict[str, object]) -> None:
    """Megatron-Bridge forces an even load in its recipes for performance alone."""
    model = "Moonlight-16B-A3B" if "moonlight" in made_with else "DeepSeek-V3"
    stated = {"framework": made_with, "model_name": model, "moe_routing": said}
    free = chosen_freely(stated, framework(framework_of(stated)[0]))
    assert routing_of(said, "pretrain", free=free) == routing


@pytest.mark.parametrize(
    ("task", "modules"),
    [
        ("lora rank 8", "attention"),
        ("lora rank 8, q_proj and v_proj", "qv"),
        ("lora rank 8 on q, v", "qv"),
        ("lora, all linear", "all"),
        ("lora rank 10 on gate, up, down", "mlp"),
        ("lora rank 10, gate_proj, up_proj and down_proj", "mlp"),
        ("lora rank 10, MLP alone", "mlp"),
    ],
)
def test_adapters_are_where_a_run_says(task: str, modules: str) -> None:
    run = run_of(row(task=task, framework="transformers", framework_version="2025-06"))
    assert run.scenario is not None, run.skipped
    assert run.scenario.training.lora_modules == modules


@pytest.mark.parametrize(
    ("changes", "rank", "modules", "base"),
    [
        ({"task": "LoRA", "notes": "r=64, alpha 16"}, 64, "attention", "auto"),
        ({"task": "qlora", "precision": "4bit"}, 16, "attention", "nf4"),
        ({"task": "sft (QLoRA, rank 8, all-linear)"}, 8, "all", "nf4"),
        ({"task": "sft", "lora_rank": 32, "lora_modules": "q_proj v_proj", "quantization": "int8"}, 32, "qv", "int8"),
        ({"task": "lora", "notes": "rank 16, base weights in fp32"}, 16, "attention", "fp32"),
        ({"task": "lora", "notes": "no base weights in fp32"}, 16, "attention", "auto"),
        ({"task": "sft", "lora_r": "8", "lora_target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"}, 8, "all",
         "auto"),
    ],
)  # fmt: skip
def test_adapters_of_any_spelling(changes: dict[str, Any], rank: int, modules: str, base: str) -> None:
    given = row(**{"framework": "transformers", "framework_version": "2025-06", "tp": 1, "pp": 1, "vpp": None, "sp": None, "dp": 64,
                   "zero_stage": 0, **changes})  # fmt: skip
    training = run_of(given).scenario.training  # type: ignore[union-attr]
    assert (training.trainable, training.lora_rank, training.lora_modules, training.base_weights) == ("lora", rank, modules, base)


@pytest.mark.parametrize("changes", [{"task": "sft"}, {"task": "sft, no LoRA"}, {"task": "pretrain", "notes": "LoRA is elsewhere"}])
def test_a_run_without_adapters_trains_all_weights(changes: dict[str, Any]) -> None:
    assert run_of(row(**changes)).scenario.training.trainable == "all"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("task", "precision", "dropout", "pure"),
    [
        ("lora rank 8", "bf16", 0.0, None),
        ("lora rank 8 with dropout 0.05", "bf16", 0.05, None),
        ("lora rank 8, lora_dropout 0.1", "bf16 (pure)", 0.1, None),
        ("lora rank 8", "bf16 (pure, no autocast)", 0.0, True),
        ("lora rank 8", "bf16 weights, no autocast", 0.0, True),
    ],
)
def test_adapters_compute_as_a_run_says(task: str, precision: str, dropout: float, pure: bool | None) -> None:
    """16-bit weights that are frozen say nothing of autocast."""
    run = run_of(row(task=task, precision=precision, framework="transformers", framework_version="2025-06", dp=64, tp=1, pp=1,
                     vpp=None, sp=None, zero_stage=0))  # fmt: skip
    assert run.scenario is not None, run.skipped
    assert (run.scenario.training.lora_dropout, run.scenario.training.pure_bf16) == (dropout, pure)


def test_a_dense_model_that_is_tuned_has_no_router() -> None:
    run = run_of(row(task="sft"))
    assert run.skipped == ""
    assert run.scenario is not None
    assert run.scenario.training.routing.kind == "balanced"


RATE_ALONE: dict[str, Any] = {
    "pp": 1, "vpp": None, "tp": 1, "dp": 8, "n_gpus": 8, "zero_stage": 3, "fsdp": "FSDP2", "framework": "torchtitan",
    "framework_version": "2025-02", "layers": 4, "seq_len": 2048, "micro_batch": None, "global_batch": None, "step_time_s": None,
    "tokens_per_s_per_gpu": 4096.0,
}  # fmt: skip


def test_a_rate_without_a_batch_is_that_of_the_micro_batch_that_its_memory_tells() -> None:
    run = run_of(row(**RATE_ALONE))
    assert {"training.micro_batch_size", "training.global_batch_size"} <= set(run.open_facts)
    assert run.measured.step_time_s == pytest.approx(0.5)  # of one sequence
    four = predict(run_of(row(**RATE_ALONE | {"micro_batch": 4, "global_batch": 32})).scenario)  # type: ignore[arg-type]
    seen = run_of(row(**RATE_ALONE, mem_gib=four.reserved_bytes / 2**30, mem_kind="max reserved"))
    found, answer = predict_run(seen, predict)
    assert answer is not None
    likeliest = answer.readings[0]
    assert dict(likeliest.values)["training.micro_batch_size"] == 4
    assert likeliest.seconds == pytest.approx(four.step_time_s / 4)
    assert found.reserved_bytes == four.reserved_bytes
    assert sum(found.waterfall.values()) == pytest.approx(sum(four.waterfall.values()) / 4)


def test_a_rate_of_a_pipeline_without_a_batch_fills_the_pipeline() -> None:
    run = run_of(row(**RATE_ALONE | {"pp": 4, "dp": 2, "zero_stage": 1, "fsdp": None, "framework": "Megatron-LM"}))
    assert run.scenario is not None
    assert run.scenario.training.global_batch_size == 8 * 4 * 2
    several = run_of(row(**RATE_ALONE | {"pp": 2, "dp": 4, "pp_schedule": "DualPipeV", "framework": "PithTrain"}))
    assert several.scenario is not None
    assert (several.scenario.framework, several.scenario.training.micro_batch_size) == ("torchtitan", 1)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("Nemotron_3_Nano", 52), ("NVIDIA Nemotron-H-56B", 118), ("DeepSeekV4 Flash", 43), ("Qwen3-Next-80B-A3B", 48),
     ("Qwen3.5-35B-A3B", 40)],
)  # fmt: skip
def test_layers_that_are_not_alike_are_those_of_the_shipped_model(name: str, layers: int) -> None:
    sizes = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "vpp"))
    arch = "moe (sparse attention)" if "DeepSeek" in name else "hybrid mamba2/attention"
    run = run_of(row(arch=arch, model_name=name, pp=1, dp=32, **sizes))
    assert run.skipped == ""
    assert run.scenario is not None
    assert isinstance(run.scenario.model, ArchitectureSpec)
    assert run.scenario.model.num_layers == layers
    assert run_of(row(arch="hybrid", model_name=name, **sizes | {"hidden": 1234})).skipped


@pytest.mark.parametrize(("task", "kind"), [("sft", "lognormal"), ("pretrain", "balanced")])
def test_experts_of_shipped_layers_keep_their_router_when_tuned(task: str, kind: str) -> None:
    sizes = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "vpp"))
    run = run_of(row(arch="hybrid moe (Mamba-2)", model_name="Nemotron_3_Nano", pp=1, dp=32, task=task, **sizes))
    assert run.scenario is not None
    assert run.scenario.training.routing.kind == kind


@pytest.mark.parametrize(("gpu", "graphs"), [("GB200", True), ("GB300", True), ("GH200", False), ("H100", False)])
def test_graphs_that_a_row_does_not_state_are_those_of_its_machines_recipes(gpu: str, graphs: bool) -> None:
    """NVIDIA's performance recipes are for GB200 and GB300; beside a Grace of GH200 there are none."""
    run = run_of(row(framework="Megatron-Bridge", source_version="2026-05", gpu=gpu, gpus_per_node=4, cuda_graphs=None))
    assert run.scenario is not None
    assert run.scenario.training.cuda_graphs is graphs


@pytest.mark.parametrize("words", [("full", "block, 3 layers"), ("full (block method, 3)", None)])
def test_full_recomputation_of_some_layers(words: tuple[str, str | None]) -> None:
    found = recompute_of(row(recompute=words[0], recompute_detail=words[1]), framework("megatron-core"), [])
    assert found == {"granularity": "full", "method": "block", "num_layers": 3}
    whole = row(recompute="full", recompute_detail="per block, non-reentrant")
    assert recompute_of(whole, framework("megatron-core"), []) == "full"


def test_bf16_without_zero_shards_states_where_the_framework_does() -> None:
    stages = {"Megatron-DeepSpeed": 1, "Megatron-LM": 0}
    for name, stage in stages.items():
        run = run_of(row(framework=name, framework_version="2023-06", zero_stage=0, vpp=1))
        assert run.scenario is not None
        assert run.scenario.plan.zero_stage == stage
    older = run_of(row(framework="Megatron-DeepSpeed", framework_version="2023-06", zero_stage=0, vpp=1, precision="fp16"))
    assert older.scenario is not None
    assert older.scenario.plan.zero_stage == 0


@pytest.mark.parametrize(
    ("words", "dealt"),
    [("force-balanced (even)", True), ("round-robin", True), ("uneven, balanced", None), ("even, by a bias", None)],
)
def test_a_balance_that_deals_experts_in_turn(words: str, dealt: bool | None) -> None:
    assert routing_of(words, "pretrain").get("in_turn") is dealt


def test_packed_documents_of_a_stated_length() -> None:
    run = run_of(row(document_tokens=512, pp=1, vpp=1, dp=32))
    whole = run_of(row(pp=1, vpp=1, dp=32))
    assert run.scenario is not None
    assert whole.scenario is not None
    assert run.scenario.training.document_lengths == (512,)
    assert predict(run.scenario).step_time_s < predict(whole.scenario).step_time_s  # attention stays inside a document
    columns = columns_of(run.scenario)
    assert columns["document_tokens"] == 512
    assert "document_tokens" not in columns_of(whole.scenario)
    assert "document_tokens" in run_of(row(document_tokens=1.5)).skipped


def test_packed_documents_of_several_lengths() -> None:
    run = run_of(row(document_tokens=[64, "448", 1536], pp=1, vpp=1, dp=32))
    assert run.scenario is not None
    assert run.scenario.training.document_lengths == (64, 448, 1536)
    assert columns_of(run.scenario)["document_tokens"] == [64, 448, 1536]
    assert "document_tokens" in run_of(row(document_tokens=[64, 0.5])).skipped


@pytest.mark.parametrize(
    ("changes", "board", "is_open"),
    [
        ({"source": "torchao README"}, "dgx-h100-96gb-500w", True),
        ({"source": "torchtitan docs", "gpu": "B200", "gpu_mem_gb": 180}, "dgx-b200-750w", True),
        ({"source": "torchtitan docs", "gpu_mem_gb": 96}, "dgx-h100-96gb-500w", False),
        ({"source": "torchtitan docs", "interconnect": "AWS p5"}, "aws-p5-h100", False),
        ({"source": "PyTorch blog"}, "dgx-h100", False),
        ({"source": "torchtitan issue 1789"}, "dgx-h100", False),
        ({"source": "torchtitan pull request 1690"}, "dgx-h100-96gb-500w", True),
        ({"source": "a tuner of torchtitan"}, "dgx-h100", False),
    ],
)
def test_tables_of_pytorch_s_repositories_may_be_from_its_own_machines(changes: dict[str, Any], board: str, is_open: bool) -> None:
    run = run_of(row(**changes))
    assert run.scenario is not None
    assert run.scenario.cluster.hardware == board
    assert ("cluster.hardware" in run.open_facts) == is_open
    if is_open:
        assert run.table is not None
        assert run.table["cluster"]["hardware"] == {
            "any_of": [board, USUAL_BOARDS[board]],
            "weights": [USUAL, pytest.approx(1 - USUAL)],
        }


@pytest.mark.parametrize(
    ("text", "precision", "parts"),
    [
        ("mxfp8 experts (grouped), linears bf16", "mxfp8", "experts"),
        ("mxfp8 grouped, bf16 linears", "mxfp8", "experts"),
        ("fp8 linears, experts bf16", "fp8", "linears"),
        ("fp8 linears, experts in bf16", "fp8", "linears"),
        ("fp8, bf16 experts", "fp8", "linears"),
        ("nvfp4, last 5 layers bf16", "nvfp4", "all"),
        ("fp8 tensorwise linears, attention bf16", "fp8", "all"),
        ("bf16 (weights and gradients)", "bf16", "all"),
        ("mxfp8", "mxfp8", "all"),
    ],
)
def test_a_precision_of_parts_is_read(text: str, precision: str, parts: str) -> None:
    experts = {"moe_experts": 8, "moe_topk": 1, "moe_ffn": 8192, "arch": "moe"}
    given = row(precision=text, gpu="B200", gpu_mem_gb=180, framework="torchtitan", framework_version="2026-01", **experts)
    scenario = run_of(given).scenario
    assert scenario is not None
    assert (scenario.training.precision, scenario.training.narrow_modules) == (precision, parts)


def test_torchtitan_splits_the_sequence_unless_a_row_says_otherwise() -> None:
    for stated, framework_name, expected in (
        (None, "torchtitan", True),
        (False, "torchtitan", False),
        (None, "Megatron-LM", False),
    ):
        scenario = run_of(row(sp=stated, framework=framework_name, framework_version=None)).scenario
        assert scenario is not None
        assert scenario.plan.sequence_parallel == expected


@pytest.mark.parametrize(
    ("routing", "ep", "is_open"),
    [
        ("natural (random init)", 4, True),
        ("natural (random init)", 1, False),
        ("natural, aux loss balances (random init)", 4, False),
        ("force-balanced", 4, False),
        ("natural", 4, False),
    ],
)
def test_an_untrained_router_may_choose_the_same_experts(routing: str, ep: int, is_open: bool) -> None:
    experts = {"moe_experts": 8, "moe_topk": 1, "moe_ffn": 8192, "arch": "moe", "layers": 2, "moe_routing": routing, "ep": ep}
    run = run_of(row(**RATE_ALONE | experts | {"micro_batch": 4, "global_batch": 32}))
    assert ("training.routing" in run.open_facts) == is_open
    if is_open:
        found, answer = predict_run(run, predict)
        assert answer is not None
        assert len(answer.readings) == 2
        seconds = {dict(r.values)["training.routing"]["kind"]: r.seconds for r in answer.readings}
        assert seconds["zipf"] > 1.1 * seconds["lognormal"]
        assert seconds["lognormal"] < found.step_time_s < seconds["zipf"]


def test_a_run_that_holds_more_than_predicted_may_take_longer() -> None:
    full = {"micro_batch": 4, "global_batch": 32, "mem_kind": "max reserved"}
    plain = predict(run_of(row(**RATE_ALONE | full)).scenario)  # type: ignore[arg-type]
    for share in (0.8, 1.0, 1.25):
        run = run_of(row(**RATE_ALONE | full, mem_gib=share * plain.reserved_bytes / 2**30))
        found, _ = predict_run(run, predict)
        wider = math.hypot(math.log(plain.step_high_s / plain.step_time_s), max(math.log(share), 0.0))
        assert (found.step_time_s, found.step_low_s) == (plain.step_time_s, plain.step_low_s)
        assert found.step_high_s == pytest.approx(plain.step_time_s * math.exp(wider))


@pytest.mark.parametrize(
    ("changes", "usual", "is_open"),
    [
        ({"gpu": "GB200"}, True, True),
        ({"gpu": "GB200", "cuda_graphs": "none"}, False, False),
        ({"gpu": "GB200", "cuda_graphs": "on (layer)"}, True, False),
        ({"gpu": "H100"}, False, False),
        ({"gpu": "GB200", "framework": "Megatron-LM"}, False, False),
    ],
)
def test_recipes_beside_a_slow_host_have_graphs_unless_a_row_says_otherwise(
    changes: dict[str, Any], usual: bool, is_open: bool
) -> None:
    run = run_of(row(**{"framework": "NeMo", "framework_version": "25.04", "gpu_mem_gb": None} | changes))
    assert run.scenario is not None
    assert run.scenario.training.cuda_graphs == usual
    assert ("training.cuda_graphs" in run.open_facts) == is_open
    if is_open:
        assert run.table is not None
        assert run.table["training"]["cuda_graphs"] == {"any_of": [True, False], "weights": [USUAL, pytest.approx(1 - USUAL)]}


@pytest.mark.parametrize(
    ("optimizer", "framework", "ours"),
    [("AdamW (torch.optim, foreach)", "own loop", "adamw-foreach"), ("fused AdamW", "own loop", "adamw"),
     ("AdamW (fused)", "FSDP", "adamw-fused"), ("adamw_torch_fused", "FSDP", "adamw-fused"),
     ("AdamW, foreach", "FSDP", "adamw"), ("AdamW (foreach)", "Megatron-LM", "adamw"),
     ("fused 8-bit AdamW", "FSDP", "adamw-8bit")],
)  # fmt: skip
def test_kernels_of_an_update(optimizer: str, framework: str, ours: str) -> None:
    scenario = run_of(row(optimizer=optimizer, framework=framework)).scenario
    assert scenario is not None
    assert scenario.training.optimizer == ours


def test_kernels_of_an_update_of_bf16_states() -> None:
    scenario = run_of(row(optimizer="AdamW (foreach), bf16 states", framework="own loop", precision="bf16 (pure)")).scenario
    assert scenario is not None
    assert (scenario.training.optimizer, scenario.training.pure_bf16) == ("adamw-foreach", True)


def test_an_optimizer_nobody_knows_is_said() -> None:
    assert "optimizer LAMB: as adamw" in run_of(row(optimizer="LAMB")).assumptions
    assert not [note for note in run_of(row(optimizer="AdamW")).assumptions if "optimizer" in note]


@pytest.mark.parametrize(("figure", "counted"), [("tflops_per_gpu", True), ("mfu", True), ("step_time_s", False)])
def test_a_rate_in_flops_needs_no_batch(figure: str, counted: bool) -> None:
    """As one in tokens: the step is then of as many micro-batches as usual; a time per step of an unknown batch says nothing."""
    figures = dict.fromkeys(("step_time_s", "tflops_per_gpu", "mfu")) | {figure: 40.0}
    run = run_of(row(**figures, tflops_def="causal", mfu_def="causal", global_batch=None, micro_batch=None, grad_accum=None))
    assert (run.scenario is not None) == counted
    if counted:
        assert run.measured.step_time_s
        assert "batch not stated: 32 micro-batches per rank, for a rate" in run.assumptions
