"""Encoders of text in flat rows, and what the Trainer of their time holds on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_framework import dropout_of, framework_of
from simpar.evidence.row_model import encodes, model_of
from simpar.evidence.run_rows import run_of
from simpar.graph.attention_kernels import score_parts
from simpar.graph.kernel_types import KernelPlan
from simpar.model.ledger import total_parameters
from simpar.parallel.lifetimes import lifetimes
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.framework import framework
from simpar.specs.models_io import model_from_table
from simpar.step import prepare, simulate

MiB = 2.0**20


def bert(**changes: Any) -> dict[str, Any]:
    """BERT-large under the Trainer of 2022-01 on one V100 (transformers docs/source/performance.mdx)."""
    row: dict[str, Any] = {
        "id": "bert", "source": "documentation", "arch": "encoder", "model_name": "BERT-large", "layers": 24, "hidden": 1024,
        "heads": 16, "ffn": 4096, "gpu": "V100", "gpu_mem_gb": 16, "n_gpus": 1, "framework": "transformers Trainer",
        "framework_version": "2022-01", "task": "sft", "seq_len": 512, "micro_batch": 4, "global_batch": 4, "precision": "fp32",
        "optimizer": "AdamW", "recompute": "none", "step_time_s": 0.451,
    }  # fmt: skip
    return {**row, **changes}


def spec_of(**changes: Any) -> ArchitectureSpec:
    model = model_from_table(model_of(bert(**changes))[0])
    assert isinstance(model, ArchitectureSpec)
    return model


def test_columns_give_the_published_encoders() -> None:
    """Of bert-large-uncased 335.1 million, with the masked-language head 30,522 biases and a dense layer more."""
    encoder, pretraining = spec_of(), spec_of(task="pretrain")
    assert total_parameters(encoder) == 335_141_888
    assert total_parameters(pretraining) == 335_174_458
    assert encoder.dropout == pretraining.dropout == 0.1
    roberta = spec_of(model_name="RoBERTa-large", task="pretrain")
    assert total_parameters(roberta) == pytest.approx(355.4e6, rel=2e-3)


@pytest.mark.parametrize(
    ("arch", "name", "said"),
    [
        ("encoder", "", True), ("encoder-only", "", True), ("BERT", "", True), ("encoder (RoBERTa)", "", True),
        ("encoder-decoder", "T5", False), ("vision encoder", "", False), ("encoder", "ModernBERT-base", False),
        ("dense", "BERT-large", False), ("not an encoder", "", False), ("encoder", "ViT-L", False),
    ],
)  # fmt: skip
def test_which_rows_are_of_berts_layers(arch: str, name: str, said: bool) -> None:
    assert encodes({"arch": arch, "model_name": name}) is said


MEASURED = [
    ({}, 14949),
    ({"micro_batch": 1}, 8681),
    ({"micro_batch": 1, "recompute": "full"}, 6775),
    ({"precision": "fp16 mixed"}, 13939),
    ({"precision": "fp16 mixed", "micro_batch": 1, "recompute": "full"}, 7275),
    ({"optimizer": "Adafactor"}, 12295),
]


@pytest.mark.parametrize(("changes", "mib"), MEASURED)
def test_the_trainer_of_2022_holds_what_its_documentation_measured(changes: dict[str, Any], mib: float) -> None:
    """Gradients that stay, dropout with its masks, fp32 scores under autocast, an update tensor by tensor, a whole CUDA context."""
    scenario = run_of(bert(**changes)).scenario
    assert scenario is not None
    assert max(m.device_bytes for m in simulate(scenario).memory) == pytest.approx(mib * MiB, rel=0.1)


def test_scores_are_kept_as_they_are_computed() -> None:
    """Softmax in fp32 under autocast, whose product reads a cast copy; under dropout a copy and a mask."""
    assert score_parts(KernelPlan()) == (2.0,)
    assert score_parts(KernelPlan(dropout=0.1)) == (2.0, 2.0, 1.0)
    assert score_parts(KernelPlan(element=4.0, dropout=0.1)) == (4.0, 4.0, 1.0)
    assert score_parts(KernelPlan(autocast="own")) == (4.0, 2.0)
    assert score_parts(KernelPlan(autocast="own", dropout=0.1)) == (4.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("version", "persist", "kernel", "attention"),
    [
        ("2022-01", True, "loop", "unfused"), ("2023-03", False, "loop", "fa1"), ("2023-08", False, "foreach", "fa1"),
        ("2023-09", False, "foreach", "fa2"),
    ],
)  # fmt: skip
def test_the_trainer_by_date(version: str, persist: bool, kernel: str, attention: str) -> None:
    spec = framework("transformers", version)
    assert (spec.optimizer.gradients_persist, spec.optimizer.optimizer_kernel) == (persist, kernel)
    assert dict(spec.kernels.attention)[""] == attention


@pytest.mark.parametrize("name", ["transformers", "torch-fsdp", "trl", "torchtitan"])
def test_the_cuda_context_is_that_of_the_run_not_of_the_oldest_row(name: str) -> None:
    assert framework(name, "2022-01").allocator.context_bytes == 1.5 * 2**30
    assert framework(name, "2022-10").allocator.context_bytes == 426 * MiB


def test_moments_of_no_elements_are_no_list() -> None:
    """Adafactor keeps rows and columns alone; torch's list of operations has nothing to make."""
    scenario = run_of(bert(optimizer="Adafactor", framework_version="2024-01", gpu="A100", gpu_mem_gb=80)).scenario
    assert scenario is not None
    assert max(m.reserved_bytes for m in simulate(scenario).memory) > 0


def test_what_a_run_drops_where_it_does_not_say() -> None:
    trainer, megatron = framework("transformers", "2022-01"), framework("megatron-core", "2021-06")
    assert dropout_of({}, trainer.conventions) is None
    assert dropout_of({"dropout": 0.0}, trainer.conventions) == 0.0
    assert dropout_of({}, megatron.conventions) == megatron.conventions.dropout


def test_swift_trains_what_it_loads() -> None:
    """ms-swift docs/source_en/LLM/Benchmark.md: 18.16 and 73.37 GiB of full fine-tuning in bf16, 8 bytes a weight."""
    assert framework_of({"framework": "ms-swift (transformers, PEFT)"})[0] == "swift"
    assert framework_of({"framework": "Megatron-SWIFT"})[0] == "megatron-core"
    assert framework_of({"framework": "ms-swift + DeepSpeed"})[0] == "deepspeed"
    sizes = {"model_name": "Qwen-7B", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 151936, "arch": "dense"}
    sizes |= {"mlp_type": "swiglu", "tied_embeddings": False, "framework": "ms-swift", "framework_version": "2024-03"}
    row = bert(**sizes, gpu="A100", gpu_mem_gb=80, precision="bf16", micro_batch=1, global_batch=16, recompute="full")
    scenario = run_of(row).scenario
    assert scenario is not None
    assert max(m.reserved_bytes for m in simulate(scenario).memory) == pytest.approx(73.37 * 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("plain", {}, "half"), ("plain", {"compile": "model"}, "half"), ("plain", {"compile": True}, "unfused"),
        ("plain", {"pure_bf16": False}, "unfused"), ("plain", {"cross_entropy": "unfused"}, "unfused"),
        ("torchtune", {}, "chunked"), ("transformers", {}, "unfused"),
    ],
)  # fmt: skip
def test_16_bit_weights_make_16_bit_logits_in_loops_of_their_own(name: str, changes: dict[str, Any], kind: str) -> None:
    """torch.nn.functional.cross_entropy outside of autocast stays in the dtype of the logits."""
    sizes = {"arch": "dense", "mlp_type": "gelu", "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072}
    scenario = run_of(bert(**sizes, gpu="A100", gpu_mem_gb=80, precision="bf16", framework="own loop")).scenario
    assert scenario is not None
    training = scenario.training.model_copy(update={"pure_bf16": True, **changes})
    own = scenario.model_copy(update={"framework": name, "framework_version": "2025-03", "training": training})
    assert prepare(own, detail="stage").layout.kernels.loss.kind == kind


def test_a_gelu_that_is_written_out() -> None:
    sizes = {"arch": "dense", "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072}
    table, _ = model_of(bert(**sizes, mlp_type="gelu_new (own code)"))
    same, _ = model_of(bert(**sizes, mlp_type="gelu"))
    assert {k for k in table if table[k] != same[k]} == {"activation"}
    assert table["activation"] == "gelu_new"


@pytest.mark.parametrize(("precision", "kept"), [("fp16 mixed", [4, 2, 1]), ("fp32", [4, 4, 1])])
def test_each_tensor_of_the_scores_is_asked_for_alone(precision: str, kept: list[int]) -> None:
    """Output, what is multiplied with the values, mask; gradients before and after dropout as wide as the softmax computes."""
    scenario = run_of(bert(precision=precision)).scenario
    assert scenario is not None
    block = prepare(scenario, detail="stage").layout.stage_blocks[0][1]
    scores = 4 * 16 * 512 * 512
    forward, backward = (
        [size // scores for tensor, size in steps if size and size % scores == 0 and part in tensor]
        for steps, part in ((lifetimes(block).forward, "softmax"), (lifetimes(block).backward, "scores"))
    )
    assert sorted(forward, reverse=True) == kept
    assert backward == [4, 4, 4]
