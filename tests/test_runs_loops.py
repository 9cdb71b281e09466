"""What rows of own loops and fine-tuning scripts say: plain torch, denials, sharding strategies, links and adapters."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.errors import InputError
from simpar.evidence.row_framework import dropout_of, framework_of
from simpar.evidence.row_machine import machine_of
from simpar.evidence.row_model import in_its_own_code
from simpar.evidence.run_rows import run_of
from simpar.interop import axolotl, huggingface
from simpar.specs.framework import framework
from simpar.specs.scenario import Scenario, make_scenario

GPT2: dict[str, Any] = {
    "id": "gpt", "source": "somewhere", "task": "pretrain", "model_name": "gpt2-medium", "arch": "dense", "layers": 24,
    "hidden": 1024, "heads": 16,
    "ffn": 4096, "vocab": 50257, "mlp_type": "gelu", "position": "learned", "tied_embeddings": True, "gpu": "A100",
    "gpu_mem_gb": 80, "n_gpus": 1, "framework": "HF transformers Trainer", "framework_version": "2023-05", "seq_len": 512,
    "micro_batch": 4, "global_batch": 4, "precision": "bf16", "optimizer": "AdamW", "recompute": "none", "step_time_s": 0.2,
}  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    run = run_of({key: value for key, value in {**GPT2, **changes}.items() if value is not None})
    assert run.scenario is not None, run.skipped
    return run.scenario


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("torch DDP", "plain"), ("PyTorch", "plain"), ("torch 2.5.1", "plain"), ("native PyTorch DistributedDataParallel", "plain"),
        ("own PyTorch loop", "plain"), ("torch FSDP", "torch-fsdp"), ("torchtune", "torchtune"), ("", "transformers"),
        ("somebody's", "transformers"),
    ],
)  # fmt: skip
def test_a_source_does_not_name_the_framework_of_plain_torch(stated: str, name: str) -> None:
    assert framework_of({"framework": stated, "source": "dist-trainer (2 T4)"})[0] == name
    assert framework_of({"framework": "torch DDP", "source": "a trainer", "precision": "fp16 autocast"})[0] == "torch-autocast"


@pytest.mark.parametrize(
    ("notes", "dropout"),
    [
        ("dropout 0.1; attention written out", 0.1), ("dropout: 0.2", 0.2), ("dropout=0.0", 0.0), ("dropout p=0.1", 0.1),
        ("no dropout", 0.0), ("without dropout", 0.0), ("LoRA dropout 0.05", None), ("lora_dropout=0.05", None), ("dropout", None),
        ("", None),
    ],
)  # fmt: skip
def test_dropout_in_words(notes: str, dropout: float | None) -> None:
    conventions = framework("transformers", "2024-01").conventions
    assert dropout_of({"notes": notes}, conventions) == dropout
    assert dropout_of({"notes": notes, "dropout": 0.3}, conventions) == 0.3


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        ("SGD", "sgd"), ("SGD without momentum", "sgd"), ("torch.optim.SGD, momentum=0", "sgd"),
        ("SGD, momentum 0.9", "sgd-momentum"), ("SGD with momentum", "sgd-momentum"),
        ("none (forward and backward)", "none"), ("no optimizer", "none"),
        ("forward and backward only", "none"), ("AdamW", "adamw"), ("Adam, no weight decay", "adam"),
    ],
)  # fmt: skip
def test_optimizers_that_keep_nothing(stated: str, kind: str) -> None:
    """torch.optim.SGD has no momentum unless it is given one."""
    assert scenario(optimizer=stated).training.optimizer == kind


def test_logits_of_16_bits_in_words() -> None:
    assert scenario(notes="cross entropy of bf16 logits").training.cross_entropy == "half"
    assert scenario(notes="cross entropy").training.cross_entropy == "auto"


def test_whole_fp16_is_read() -> None:
    training = scenario(precision="fp16 (pure)").training
    assert (training.precision, training.pure_bf16) == ("fp16", True)


@pytest.mark.parametrize(
    ("fsdp", "stage", "expected"),
    [
        ("FSDP shard_grad_op", 2, (3, False)),
        ("FSDP full_shard", 3, (3, True)),
        ("FSDP SHARD_GRAD_OP", None, (3, False)),
        (None, 2, (2, True)),
    ],
)
def test_shard_grad_op_shards_weights_too(fsdp: str | None, stage: int | None, expected: tuple[int, bool]) -> None:
    """torch.distributed.fsdp.ShardingStrategy: gathered in the forward, kept until after the backward, sharded outside of both."""
    plan = scenario(n_gpus=4, dp=4, tp=1, pp=1, global_batch=16, fsdp=fsdp, zero_stage=stage).plan
    assert (plan.zero_stage, plan.reshard_after_forward) == expected


@pytest.mark.parametrize(
    ("text", "slower"),
    [
        ("PCIe: PIX between all pairs, no NVLink", True), ("NVLink disabled", True), ("PCIe, NVLink not used", True),
        ("single node NVLink", False), ("NVLink domain of 4 GPUs, MNNVL disabled", False), ("", False),
    ],
)  # fmt: skip
def test_boards_without_their_links_meet_over_pcie(text: str, slower: bool) -> None:
    given = {"gpu": "H100 80GB HBM3", "n_gpus": 4, "gpus_per_node": 8, "interconnect": text}
    assert machine_of(given)[0].get("scale_up_bandwidth_scale") == (pytest.approx(63 / 450) if slower else None)
    assert "scale_up_bandwidth_scale" not in machine_of({**given, "gpu": "RTX 3090", "interconnect": "no NVLink"})[0]


def test_a_rate_alone_is_a_node_of_one_gpu() -> None:
    given = {"gpu": "A10", "n_gpus": 4, "gpus_per_node": 1, "interconnect": "Ethernet 24.6 Gbps (eth0)"}
    cluster = machine_of(given)[0]
    assert cluster["nics_per_node"] * cluster["nic_bandwidth_scale"] == pytest.approx(0.246)
    assert "nic_bandwidth_scale" not in machine_of({**given, "n_gpus": 16, "gpus_per_node": 8})[0]


def test_published_code_of_small_models() -> None:
    """config.json of gpt2-medium: activation_function gelu_new, resid_pdrop 0.1; own loops call the model so as well."""
    assert (scenario().model.activation, scenario().model.dropout) == ("gelu_new", 0.1)  # type: ignore[union-attr]
    own = scenario(framework="nanoGPT").model
    assert (own.activation, own.dropout) == ("gelu", 0.0)  # type: ignore[union-attr]
    conventions = framework("transformers", "2023-05").conventions
    names = {"gpt-neo-1.3B": ("gelu_new", 0.0), "gpt-neox-20b": ("gelu", 0.0), "opt-350m": ("gelu", 0.1), "gpt2.5": ("gelu", 0.0)}
    for name, expected in names.items():
        found = in_its_own_code({"kind": "transformer", "name": name, "activation": "gelu"}, conventions)
        assert (found["activation"], found.get("dropout", 0.0)) == expected
    swiglu = in_its_own_code({"kind": "transformer", "name": "gpt2-swiglu", "activation": "silu"}, conventions)
    assert swiglu["activation"] == "silu"


def test_launch_files_of_frozen_weights_in_fp32() -> None:
    def lora(name: str) -> Scenario:
        training = {"sequence_length": 512, "global_batch_size": 8, "trainable": "lora", "base_weights": "fp32"}
        return make_scenario({
            "model": "llama3.2-1b", "framework": name, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
            "plan": {"zero_stage": 0, "recompute": "none"}, "training": training,
        })  # fmt: skip

    assert huggingface.sft_arguments(lora("trl"))["dtype"] == "float32"
    assert any("base_weights" in v.field for v in axolotl.violations(lora("transformers")))
    with pytest.raises(InputError, match="base_weights"):
        lora("torchtune")
