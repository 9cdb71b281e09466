"""Framework semantics: every row applies, versions date, names resolve, stages are cut as nanotron cuts them."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import simpar
from simpar.costs.pricer import LayoutPricer
from simpar.errors import UnknownNameError
from simpar.evidence.row_framework import framework_of
from simpar.graph.kernels import kernels
from simpar.parallel.layout import Layout
from simpar.parallel.work import AttentionWork
from simpar.specs.calibration import Constant, calibrated_by
from simpar.specs.counts import split_by_cost
from simpar.specs.framework import NEWEST, POLICY_OF, framework, framework_names, month_of
from simpar.specs.framework_releases import ALIASES, RELEASES
from simpar.specs.framework_rows import FRAMEWORKS
from simpar.specs.losses import loss_of
from simpar.specs.scenario import make_scenario
from simpar.step import cost_models, prepare

FIELDS = set(POLICY_OF)
FAST_LLM = {
    "fused_norm": True, "fused_rope": True, "loss": "fused", "wgrad_accumulation_fusion": False, "gradient_adds": "always",
    "attention": (("", "fa2"),), "gradient_dtype": "fp32",
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_row_has_a_source_known_fields_and_its_place_in_time(name: str) -> None:
    base, rows = FRAMEWORKS[name]
    assert {"", *FRAMEWORKS} >= (set(base.values()) if isinstance(base, dict) else {base})
    assert [row.since for row in rows] == sorted(row.since for row in rows)
    for row in rows:
        assert row.source
        assert set(row.changes) <= FIELDS


@pytest.mark.parametrize(
    ("name", "fuses"),
    [("megatron-bridge", (True, "")), ("megatron-bridge-tuning", (False, "")), ("megatron-bridge-defaults", (False, "offset")),
     ("megatron-deepspeed", (False, "halves"))],
)  # fmt: skip
def test_what_megatrons_children_leave_unfused(name: str, fuses: tuple[bool, str]) -> None:
    """Rotary embedding in one kernel; gates in elementary operations. Norms stay fused."""
    kernels_of = framework(name, "2026-01").kernels
    assert (kernels_of.fused_rope, kernels_of.gate_chains) == fuses
    assert kernels_of.fused_norm


@pytest.mark.parametrize("name", ["megatron-bridge-tuning", "megatron-bridge-defaults"])
def test_library_recipes_of_megatron_bridge_keep_and_reduce_gradients_in_fp32(name: str) -> None:
    """Those of its performance scripts do so in bf16, as the library's did at first."""
    for version, dtype in (("2025-11", "bf16"), ("2025-12", "fp32")):
        found = framework(name, version).optimizer
        assert (found.gradient_dtype, found.gradient_reduce_dtype) == (dtype, dtype)
    assert framework("megatron-bridge", "2026-08").optimizer.gradient_dtype == "bf16"


def test_fast_llm_adds_weight_gradients_by_a_kernel_of_its_own() -> None:
    """Its norms, rotations and losses are one kernel each; a 16-bit weight gradient meets its fp32 sum after the product."""
    assert framework_of({"framework": "Fast-LLM"})[0] == "fast-llm"
    found = framework("fast-llm", "2026-07")
    assert {name: getattr(getattr(found, POLICY_OF[name]), name) for name in FAST_LLM} == FAST_LLM


@pytest.mark.parametrize("name", framework_names())
def test_every_name_resolves_at_every_time(name: str) -> None:
    for version in (None, "2019", "2021-07", "2023", "2026-08"):
        spec = framework(name, version)
        assert spec.name == ALIASES.get(name, name)
        assert "" in dict(spec.kernels.attention)


@pytest.mark.parametrize("name", RELEASES)
def test_releases_are_in_order(name: str) -> None:
    numbers = sorted(RELEASES[name], key=lambda text: tuple(int(part) for part in text.split(".")))
    modern = [n for n in numbers if not (name == "megatron-core" and n in ("2.4", "3.0"))]
    assert [RELEASES[name][n] for n in modern] == sorted(RELEASES[name][n] for n in modern)


@pytest.mark.parametrize(
    ("name", "version", "month"),
    [
        ("nemo", "NeMo 25.04.00", (2025, 4)),
        ("nemo", "NVIDIA NeMo Framework Release 23.09", (2023, 9)),
        ("megatron-core", "0.13.1", (2025, 7)),
        ("megatron-core", "2021", (2021, 7)),
        ("torchtitan", "torch 2024-12-23, torchtitan 9dec370 (2024-12-26)", (2024, 12)),
        ("nanotron", "playbook 2025-02 (torch 2.1+cu121)", (2025, 2)),
        ("llm-foundry", "llm-foundry v0.0.4, torch 2.1.0", (2023, 9)),
        ("torchtitan", "torchtitan 217cc94e2", NEWEST),
        ("torchtitan", "torch 2.9.0.dev20250815, torchtitan 6fc499f6", (2025, 8)),
        ("torchtitan", None, NEWEST),
    ],
)
def test_versions_are_dated(name: str, version: str | None, month: tuple[int, int]) -> None:
    assert month_of(name, version) == month


def test_later_rows_build_on_earlier_ones() -> None:
    early, late = framework("megatron-core", "2021-07"), framework("megatron-core", "2025-06")
    assert early.kernels.attention_kernel("ampere") == "unfused"
    assert late.kernels.attention_kernel("hopper") == "cudnn"
    assert early.conventions.recompute_default == "full"
    assert late.conventions.recompute_default == "none"
    assert framework("nemo", "25.04").kernels.attention == late.kernels.attention


@pytest.mark.parametrize(
    ("month", "hardware", "model", "kernels"),
    [
        ("2025-04", "dgx-b200", "deepseek-v3", {192: "unfused"}),
        ("2025-07", "dgx-b200", "deepseek-v3", {192: "cudnn"}),
        ("2025-04", "dgx-h100", "deepseek-v3", {192: "cudnn"}),
        ("2026-06", "dgx-b200", "gemma-4-26b-a4b", {256: "fa2", 512: "unfused"}),
        ("2026-06", "dgx-h100", "gemma-4-26b-a4b", {256: "cudnn", 512: "unfused"}),
        ("2026-06", "dgx-b300", "gemma-4-26b-a4b", {256: "unfused", 512: "unfused"}),
        ("2026-06", "gb300-nvl72", "deepseek-v3", {192: "cudnn"}),
        ("2026-06", "dgx-b200", "glm-5", {256: "cudnn"}),  # keys that are chosen by their content have kernels of their own
    ],
)
def test_wide_heads_run_unfused_until_the_library_takes_them(
    month: str, hardware: str, model: str, kernels: dict[int, str]
) -> None:
    """TransformerEngine common/fused_attn/fused_attn.cpp and get_attention_backend; layers of one model by their own heads."""
    table = {"model": model, "framework": "megatron-core", "framework_version": month,
             "cluster": {"hardware": hardware, "num_nodes": 1},
             "training": {"sequence_length": 4096, "global_batch_size": 8}}  # fmt: skip
    layout = prepare(make_scenario(table)).layout
    works = [op.work for block in layout.stage_blocks[0] for op in block.forward if isinstance(op.work, AttentionWork)]
    assert {work.head_dim: work.kernel for work in works} == kernels


def test_automodel_is_no_megatron() -> None:
    assert framework_of({"framework": "NeMo AutoModel"}) == ("nemo-automodel", [])
    assert framework_of({"framework": "NeMo 25.04"}) == ("nemo", [])
    spec = framework("nemo-automodel", "2025-11")
    assert spec.data.zero_stage_default == 3
    assert spec.conventions.ep_dispatcher == "deepep"


def test_an_unknown_name_lists_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'nanotron'"):
        framework("nanotrn")


def test_buckets() -> None:
    new = framework("megatron-core")
    assert new.bucket_elements(8) == 40e6
    assert new.bucket_elements(64) == 64e6
    assert math.isinf(framework("megatron-core", "2021").bucket_elements(8))
    # DistributedDataParallel counts a bucket by the weights that train, in 16 bits here, whatever gradients are summed in.
    assert framework("nanotron").bucket_elements(8, 2.0) == 25 * 2**20 / 2


@pytest.mark.parametrize(("name", "held"), [("lit-gpt", 2.0), ("torchtune", 0.0)])
def test_replicas_that_torch_wraps_hold_buckets_as_wide_as_their_weights(name: str, held: float) -> None:
    """DistributedDataParallel: 2 bytes a weight beside 16-bit weights; torchtune's single-device recipes wrap nothing."""
    model = {"name": "two layers", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024}  # fmt: skip
    training = {"sequence_length": 256, "global_batch_size": 8, "pure_bf16": True}
    cluster = {"hardware": "dgx-a100-80gb", "num_nodes": 1}
    table = {"model": model, "framework": name, "framework_version": "2024-05", "cluster": cluster,
             "plan": {"dp": 8, "zero_stage": 0}, "training": training}  # fmt: skip
    assert prepare(make_scenario(table)).layout.state_bytes.bucket == held


def test_compiled_loss_keeps_fewer_copies() -> None:
    def copies(version: str, *, compiled: bool) -> float:
        spec = framework("torchtitan", version)
        return loss_of(spec, "auto", compiled=compiled, tp=1, sizes=(4096.0, 128256.0, 4096.0)).fp32_copies

    assert copies("2025-06", compiled=True) < copies("2025-06", compiled=False)
    assert copies("2024-12", compiled=True) == copies("2024-12", compiled=False)


@given(st.integers(1, 130), st.floats(0.1, 10), st.floats(0, 60), st.integers(1, 40))
def test_split_by_cost_keeps_every_layer_and_no_early_stage_is_far_off(layers: int, layer: float, head: float, stages: int) -> None:
    counts = split_by_cost(layers, layer, head, stages)
    assert sum(counts) == layers
    assert len(counts) == stages
    share = (layers * layer + head) / stages
    assume(share >= layer)
    done = 0.0
    for index, count in enumerate(counts[:-1]):
        done += count * layer
        assert done <= share * (index + 1) + layer * 1.0001


def _compared(node: ast.Compare) -> Iterator[object]:
    """Constants that a comparison mentions, those of tuples, lists and sets included."""
    for side in (node.left, *node.comparators):
        if isinstance(side, ast.Tuple) and len(side.elts) == 2 and all(isinstance(e, ast.Constant) for e in side.elts):
            yield tuple(e.value for e in side.elts if isinstance(e, ast.Constant))
        for part in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else (side,):
            if isinstance(part, ast.Constant):
                yield part.value


def _branches(text: str, foreign: bool = False) -> Iterator[int]:
    """Lines that compare something with the name of a framework or with a month.

    Args:
        foreign: the text reads or writes files of frameworks, whose own words count only where they are held against a scenario's.
    """
    names = set(framework_names())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if foreign and not any(isinstance(side, ast.Attribute) and side.attr == "framework" for side in sides):
                continue
            for value in _compared(node):
                month = isinstance(value, tuple) and all(isinstance(v, int) for v in value) and 2015 < value[0] < 2040
                if month or (isinstance(value, str) and value in names):
                    yield node.lineno


def test_no_code_branches_on_a_framework_or_its_version() -> None:
    """Words of options and of layout names are not frameworks: "simpar search --export megatron", "pp2-zbv"."""
    package = Path(simpar.__file__).parent
    paths = [p for p in sorted(package.rglob("*.py")) if p.parent.name != "cli" and p.name != "cluster_layouts.py"]
    found = [
        f"{path.relative_to(package)}:{line}"
        for path in paths
        for line in _branches(path.read_text(), path.parent.name in ("interop", "runlogs"))
    ]
    assert not found, "a field of a policy and a dated row belong there instead"


@pytest.mark.parametrize(
    "text",
    ['if spec.name == "torchtitan": pass', 'x = name in ("nemo", "a")', "if spec.since < (2022, 5): pass", 'y = "deepspeed" != f'],
)  # fmt: skip
def test_a_branch_on_a_framework_would_be_found(text: str) -> None:
    assert list(_branches(text)) == [1]


def test_a_branch_on_a_scenarios_framework_would_be_found_where_files_are_read() -> None:
    assert list(_branches('if scenario.framework == "trl": pass', foreign=True)) == [1]
    assert not list(_branches('if strategy == "megatron": pass', foreign=True))


@pytest.mark.parametrize(("month", "kernel"), [("2022-06", "unfused"), ("2023-02", "fa1"), ("2024-01", "fa2")])
@pytest.mark.parametrize("name", ["plain", "torch-autocast"])
def test_own_loops_have_the_attention_of_torch_then(name: str, month: str, kernel: str) -> None:
    assert framework(name, month).kernels.attention_kernel("ampere") == kernel


@pytest.mark.parametrize(("architecture", "kernel"), [("volta", "unfused"), ("turing", "fa1"), ("ampere", "fa2"), ("cdna4", "fa2")])
def test_gpus_before_ampere_have_no_flash_attention_2(architecture: str, kernel: str) -> None:
    assert framework("torch-fsdp").kernels.attention_kernel(architecture) == kernel
    assert framework("megatron-core", "2021-04").kernels.attention_kernel(architecture) == "unfused"


LOSSES = [
    ("megatron-core", "2021-06", "auto", (38.0, 14.0)), ("megatron-core", "2024-06", "auto", (38.0, 14.0)),
    ("megatron-core", "2024-06", "fused", (24.0, 14.0)), ("megatron-core", "2025-03", "auto", (24.0, 14.0)),
    ("megatron-core", "2025-06", "auto", (6.0, 6.0)), ("megatron-core", "2025-06", "unfused", (38.0, 14.0)),
    ("nemo", "2023-06", "auto", (38.0, 14.0)), ("nemo", "2024-07", "auto", (24.0, 14.0)),
    ("nemo", "2025-06", "auto", (6.0, 6.0)), ("internevo", "2023-09", "auto", (6.0, 6.0)),
    ("torchtitan", "2024-12", "auto", (18.0, 18.0)), ("torchtitan", "2025-06", "auto", (4.0, 4.0)),
    ("plain", "2024-10", "auto", (4.0, 4.0)), ("plain", "2024-10", "fused", (6.0, 6.0)),
    ("olmo-core", "2025-01", "auto", (8.0, 10.0)), ("olmo-core", "2026-08", "auto", (8.0, 10.0)),
    ("llm.c", "2024-07", "auto", (2.0, 4.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "version", "asked", "bytes_per_logit"), LOSSES)
def test_what_a_loss_moves(name: str, version: str, asked: str, bytes_per_logit: tuple[float, float]) -> None:
    table = {"name": "loss", "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
             "framework": name, "framework_version": version,
             "training": {"sequence_length": 4096, "global_batch_size": 8, "compile": True, "cross_entropy": asked}}  # fmt: skip
    layout = Layout.of(make_scenario(table), 1)
    assert layout.network.head is not None
    (loss,) = [kernel for kernel in kernels(layout.network.head, layout.kernels) if kernel.node.name == "head/loss"]
    for traffic, expected in zip((loss.forward, loss.backward), bytes_per_logit, strict=True):
        assert [amount for _, amount in traffic] == [expected]


def test_a_chain_over_the_logits_runs_at_the_rate_of_copies_in_a_step_too() -> None:
    table = {"name": "loss", "model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
             "framework": "megatron-core", "framework_version": "2024-06",
             "training": {"sequence_length": 4096, "global_batch_size": 8}}  # fmt: skip
    layout = Layout.of(make_scenario(table), 1)
    (loss,) = [op for op in layout.stage_blocks[0][-1].forward if op.name == "head/loss"]
    with calibrated_by((Constant(name="memory", value=1.5),)):
        seconds = LayoutPricer(layout, *cost_models(layout.scenario, layout.hardware)).op_price(loss).seconds
        assert layout.calibration.memory == 1.5
    assert 38.0 * 4096 * 128256 / 3.35e12 < seconds < 1.3 * 38.0 * 4096 * 128256 / 3.35e12


@pytest.mark.parametrize(
    ("name", "month", "beside"),
    [("megatron-core", "2021-08", False), ("megatron-core", "2021-09", True), ("megatron-deepspeed", "2022-02", False),
     ("zero-bubble", "2024-07", True)],
)  # fmt: skip
def test_input_gradients_are_reduced_beside_the_weight_gradient_since_2021_09(name: str, month: str, beside: bool) -> None:
    """Megatron-LM commit 16c9044; the BigScience fork of v2.4 never took it over."""
    assert framework(name, month).kernels.tp_backward_overlap is beside


def test_pipeline_ranks_of_megatron_reduce_together_since_gradients_overlap() -> None:
    assert [framework("megatron-core", month).data.reduces_together for month in ("2023-07", "2023-08")] == [False, True]
    assert not framework("torchtitan", "2025-06").data.reduces_together
