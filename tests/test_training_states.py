"""Widths of training states, losses without logits, adapters and offload: bytes by hand, torch's own, what may not be combined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.api.first_plan import first_layout
from simpar.costs import host
from simpar.costs.host import launch_seconds, slowdown
from simpar.costs.pricer import LayoutPricer
from simpar.errors import InputError
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.work import Gemm, GroupedGemm, LocalOp, MemoryWork
from simpar.result.gathers import Gathers
from simpar.result.ideal import ideal_seconds as result_ideal
from simpar.result.memory import static_state
from simpar.result.result import Result
from simpar.specs.framework import framework
from simpar.specs.losses import linear_chunks, loss_of
from simpar.specs.notes import scenario_notes
from simpar.specs.optimizers import KINDS
from simpar.specs.scenario import Scenario, make_scenario
from simpar.specs.training import BASE_BYTES
from simpar.step import cost_models, prepare, simulate

HIDDEN, FFN, LAYERS, VOCABULARY, TOKENS = 1024, 4096, 2, 32768, 2048
MODEL = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip
IN_MATMULS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
OUTSIDE = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
WEIGHTS = IN_MATMULS + OUTSIDE
NORMS = (2 * LAYERS + 1) * HIDDEN


def small(
    name: str = "torchtune", gpus: int = 1, version: str | None = None, plan: dict[str, Any] | None = None, **training: Any
) -> Scenario:
    return make_scenario(
        {
            "model": MODEL, "framework": name, "framework_version": version,
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": gpus},
            "plan": {"zero_stage": 0, **(plan or {})},
            "training": {"sequence_length": TOKENS, "global_batch_size": gpus, **training},
        }
    )  # fmt: skip


def resting(scenario: Scenario) -> dict[str, float]:
    return dict(static_state(prepare(scenario).layout, [0]))


def allocated(scenario: Scenario) -> float:
    return max(rank.allocated_bytes for rank in _result(scenario).memory)


def _result(scenario: Scenario) -> Result:
    return simulate(scenario)


def test_model_flops_leave_out_gradients_of_frozen_weights() -> None:
    """6 FLOPs per weight and token where all is trained, 4 where adapters are; attention's are the same."""
    matmuls = (IN_MATMULS + VOCABULARY * HIDDEN) * TOKENS
    full, adapters = (prepare(small(trainable=name)).layout for name in ("all", "lora"))
    assert full.attention_model_flops == adapters.attention_model_flops == 12 * LAYERS * HIDDEN * TOKENS * TOKENS / 2
    assert full.model_flops == 6 * matmuls + full.attention_model_flops
    assert adapters.model_flops == 4 * matmuls + full.attention_model_flops
    assert result_ideal(adapters) / result_ideal(full) == pytest.approx(adapters.model_flops / full.model_flops)


def test_fields_of_adapters_that_nothing_reads_are_named() -> None:
    assert any("training.lora_rank: without effect" in note for note in _result(small(lora_rank=8)).notes)
    assert not any("without effect" in note for note in _result(small(lora_rank=8, trainable="lora")).notes)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer", "weights", "states"),
    [
        ("torchtune", "adamw", 2.0, 4.0),  # bf16 throughout: 8 bytes a weight with its gradient
        ("torchtune", "adamw-8bit", 2.0, 2.0 * (1 + 4 / 256)),
        ("torchtune", "adamw-4bit", 2.0, 2.0 * (0.5 + 4 / 128)),
        ("torchtune", "adamw-fp8", 2.0, 2.0 * (1 + 4 / 256)),
        ("torchtune", "lion", 2.0, 2.0),
        ("torchtune", "sgd-momentum", 2.0, 2.0),
        ("torchtune", "adamw-8bit-paged", 2.0, 0.0),
        ("plain", "adamw", 2.0, 4.0 + 8.0),
        ("plain", "adamw-8bit-paged", 2.0, 4.0),  # the fp32 weights stay
    ],
)
def test_states_rest_in_their_width(name: str, optimizer: str, weights: float, states: float) -> None:
    found = resting(small(name, optimizer=optimizer))
    assert found["parameters"] == weights * WEIGHTS
    assert found["optimizer"] == pytest.approx(states * WEIGHTS, abs=8.0 * NORMS)  # vectors keep 32-bit states


@pytest.mark.parametrize("ranks", [2, 8])
def test_accelerate_keeps_sharded_weights_in_fp32_whatever_they_were_loaded_in(ranks: int) -> None:
    """16 bytes a weight over the ranks; a list of operations holds one more fp32 tensor during the update."""
    layout = prepare(small("transformers", ranks, "2024-06", {"zero_stage": 3})).layout
    assert (layout.state_bytes.parameter, layout.state_bytes.gradient, layout.state_bytes.optimizer) == (0.0, 4.0, 12.0)
    assert layout.state_bytes.reduce == 2.0
    assert resting(layout.scenario)["optimizer"] == 12.0 * WEIGHTS / ranks
    assert layout.update_bytes == 4.0
    assert prepare(small("transformers", ranks, "2025-10", {"zero_stage": 3})).layout.update_bytes == 0.0  # fused


@pytest.mark.parametrize("name", ["transformers", "torch-autocast"])
@pytest.mark.parametrize(("training", "own"), [({"precision": "bf16"}, 4.0), ({"precision": "bf16", "pure_bf16": True}, 2.0)])
def test_ddp_buckets_rest_beside_the_gradients(name: str, training: dict[str, Any], own: float) -> None:
    """A rank of several holds as many bytes more as its gradients have, a GPU alone none."""
    ranks = {n: small(name, n, "2025-10", **training) for n in (1, 4)}
    held = {n: resting(scenario).get("communication_buffers", 0.0) for n, scenario in ranks.items()}
    assert held == {1: 0.0, 4: own * WEIGHTS}
    assert allocated(ranks[4]) - allocated(ranks[1]) == pytest.approx(own * WEIGHTS, rel=0.02)


def test_ddp_buckets_are_not_there_where_states_are_shared() -> None:
    assert "communication_buffers" not in resting(small("transformers", 4, "2025-10", {"zero_stage": 3}))


def test_ddp_buckets_of_adapters_are_small() -> None:
    state = small("transformers", 4, "2025-10", trainable="lora", lora_rank=8)
    layout = prepare(state).layout
    adapters = resting(state)["communication_buffers"] / layout.state_bytes.gradient
    assert 0 < adapters < 0.2 * WEIGHTS


def test_the_trainer_holds_whole_gradients_until_the_last_micro_batch() -> None:
    """2 bytes a weight beside the shards, in one block of the allocator each; torchtitan reduces after every backward."""
    for name, whole in (("transformers", 2.0 * WEIGHTS), ("torchtitan", 0.0)):
        one, four = (small(name, 2, "2026-06", {"zero_stage": 3}, global_batch_size=2 * m) for m in (1, 4))
        assert resting(one).get("fsdp_buffers", 0.0) == 0.0
        assert resting(four).get("fsdp_buffers", 0.0) == whole
        assert allocated(four) - allocated(one) >= 0.9 * whole


def test_autocast_holds_casts_of_fp32_weights_until_the_backward_unless_layers_are_recomputed() -> None:
    kept = prepare(small("transformers", version="2024-06")).layout.state_bytes
    assert (kept.parameter, kept.gradient, kept.optimizer) == (2.0, 4.0, 12.0)
    again = prepare(small("transformers", version="2024-06", plan={"recompute": "full"})).layout.state_bytes
    assert (again.parameter, again.optimizer) == (0.0, 12.0)
    assert prepare(small("transformers", version="2026-06")).layout.pure_bf16  # checkpoints are loaded as they are


@pytest.mark.torch
def test_torch_keeps_moments_as_wide_as_the_weight() -> None:
    torch = pytest.importorskip("torch")
    for dtype, width in ((torch.bfloat16, 2.0), (torch.float32, 4.0)):
        weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], foreach=True)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = optimizer.state[weight]
        moments = sum(state[name].numel() * state[name].element_size() for name in ("exp_avg", "exp_avg_sq"))
        assert KINDS["adamw"].beside(width).moments == moments / weight.numel()


def test_narrow_states_move_less_and_paged_ones_cross_the_host_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of the benchmarks: a slower one is still launching this small update when the device is through with it."""
    monkeypatch.setattr(host, "USUAL_X86", 1.0)

    def step_s(optimizer: str) -> float:
        return _result(small(optimizer=optimizer)).step_time_s

    assert step_s("adamw-4bit") < step_s("adamw")
    priced = prepare(small(optimizer="adamw-8bit-paged"))
    link = priced.layout.hardware.node.host_device_bandwidth
    assert link is not None
    away = WEIGHTS * 2.0 * (1 + 4 / 256) / link.value
    assert step_s("adamw-8bit-paged") - step_s("adamw-8bit") >= 0.9 * away


def test_an_update_in_the_backward_holds_no_gradients() -> None:
    whole = {"sequence_length": 64, "cross_entropy": "unfused"}  # by pieces, gradients of the head alone would be the peak
    usual, early = (small(plan={"recompute": "full"}, **whole, optimizer_in_backward=on) for on in (False, True))
    assert allocated(early) < allocated(usual)
    assert prepare(early).layout.update_bytes == 0.0


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "hidden", "chunks"),
    [(4096, 32000, 4096, 8), (4096, 128256, 4096, 32), (16384, 128256, 4096, 32), (8192, 151936, 3584, 32),
     (8192, 151936, 1024, 128), (8192, 262144, 2304, 64)],
)  # fmt: skip
def test_pieces_of_ligers_linear_cross_entropy(tokens: int, vocabulary: int, hidden: int, chunks: int) -> None:
    assert linear_chunks(tokens, vocabulary, hidden) == chunks


def logits_held(scenario: Scenario) -> float:
    """Bytes per logit from the forward to the backward at its peak."""
    head = prepare(scenario).layout.stage_blocks[0][-1]
    return sum(v for name, v in head.saved if name == "head/logits") / (TOKENS * VOCABULARY)


@pytest.mark.parametrize(
    ("name", "version", "loss", "held"),
    [
        ("transformers", "2025-10", "unfused", 12.0),  # 16-bit logits, log-softmax, its gradient and a transient
        ("transformers", "2025-10", "fused", 6.0),  # 16-bit logits and the loss's fp32 copy, turned into its gradient
        ("transformers", "2024-06", "fused", 8.0),  # fp32 logits from the head, turned into their gradient, and its 16-bit copy
        ("transformers", "2025-10", "chunked", 12.0 / 8),
        ("torchtune", "2025-03", "auto", 6.0),  # 16-bit logits and the fp32 softmax of all pieces
        ("torchtitan", "2024-05", "unfused", 16.0),  # the fp32 logits stay over the backward as well
        ("torchtitan", "2024-06", "unfused", 12.0),
        ("lit-gpt", "2024-03", "unfused", 12.0),
        ("prime-rl", "2026-01", "auto", 16.0),  # fp32 logits of the head stay beside torch's cross-entropy
        ("prime-rl", "2025-12", "tiled", 16.0 / (VOCABULARY / 8192)),
        ("prime-rl", "2026-01", "tiled", 16.0 / (VOCABULARY / 2048)),
        ("deepspeed", "2026-06", "linear", 2.0 / (VOCABULARY / HIDDEN)),
    ],
)
def test_bytes_per_logit(name: str, version: str, loss: str, held: float) -> None:
    assert logits_held(small(name, version=version, cross_entropy=loss)) == held


def test_a_linear_loss_keeps_the_gradient_of_a_trained_head_and_of_no_other() -> None:
    def kept(**training: Any) -> float:
        head = prepare(small("deepspeed", version="2026-06", cross_entropy="linear", **training)).layout.stage_blocks[0][-1]
        return dict(head.saved).get("head/logits.weight_gradient", 0.0)

    assert kept() == 2.0 * VOCABULARY * HIDDEN
    assert kept(trainable="lora") == 0.0


def test_a_tiled_loss_computes_the_logits_twice() -> None:
    def products(loss: str) -> int:
        head = prepare(small("prime-rl", version="2026-01", cross_entropy=loss)).layout.stage_blocks[0][-1]
        return sum(op.name.startswith("head/logits") for op in (*head.forward, *head.backward))

    assert products("unfused") == 3
    assert products("tiled") == 4


@given(st.integers(1, 1 << 17), st.integers(1000, 300_000), st.integers(64, 16384))
def test_a_piece_of_a_linear_loss_takes_about_the_room_of_the_hidden_vectors(tokens: int, vocabulary: int, hidden: int) -> None:
    chunks = linear_chunks(tokens, vocabulary, hidden)
    assert 1 <= chunks <= tokens
    assert tokens / chunks * vocabulary <= 4.0 * (tokens * hidden + vocabulary * (tokens / chunks > 1) + vocabulary)


def test_less_is_kept_the_more_a_loss_is_cut() -> None:
    spec, sizes = framework("transformers", "2025-10"), (8192.0, 128256.0, 4096.0)
    found = [loss_of(spec, kind, compiled=False, tp=1, sizes=sizes) for kind in ("unfused", "fused", "chunked", "linear")]
    held = [(2.0 + 4.0 * loss.fp32_copies) / loss.chunks for loss in found]
    assert held == sorted(held, reverse=True)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trainable", "again"), [("all", ["attention_in", "mlp_in", "head_in"]), ("lora", [])])
def test_only_gradients_of_weights_gather_the_input_again(trainable: str, again: list[str]) -> None:
    """Megatron-LM's LinearWithFrozenWeight has none, and an adapter reads what the forward gathered."""
    chosen = small("megatron-core", gpus=2, plan={"tp": 2, "sequence_parallel": True}, trainable=trainable)
    blocks = Layout.of(chosen, 1).stage_blocks[0][1:]
    names = [op.name for block in dict.fromkeys(blocks) for op in block.backward if op.name.endswith(".regather")]
    assert sorted({name.removesuffix(".regather") for name in names}) == sorted(again)


def lora(name: str = "torchtune", plan: dict[str, Any] | None = None, **training: Any) -> Scenario:
    return small(name, plan=plan, trainable="lora", lora_rank=8, **training)


# -- autocast ----------------------------------------------------------------------------------------------------------


def with_fp32_weights(**changes: Any) -> LocalBlock:
    chosen = small("transformers", version="2026-07", plan={"recompute": "none"}, **{"pure_bf16": False, **changes})
    return prepare(chosen).layout.stage_blocks[0][1]


def test_the_stream_is_fp32_under_autocast_whatever_linears_multiply_in() -> None:
    """TransformerEngine's linears in a torch model: autocast turns what they read into 16 bits, sums and norms are of fp32."""
    chosen = small("torch-te", version="2025-10", plan={"recompute": "none"}, precision="fp8")
    saved = dict(prepare(chosen).layout.stage_blocks[0][1].saved)
    names = ("input_norm_fp32", "attention/qkv_cast_in", "attention/proj_cast_in", "attention/out", "mlp/fc1_cast_in")
    assert [saved[name] for name in names] == [n * TOKENS * HIDDEN for n in (4, 3, 1, 2, 2)]
    assert "input_norm_in" not in saved
    assert saved["mlp/fc2_in"] == TOKENS * FFN


@pytest.mark.torch
def test_fp32_weights_under_autocast_make_an_fp32_stream_that_every_linear_casts() -> None:
    """A norm of transformers' Llama and the three linears behind it: what is cast, and what is kept."""
    torch = pytest.importorskip("torch")
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    casts: list[int] = []

    class Casts(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::_to_copy":
                casts.append(args[0].nbytes + made.nbytes)
            return made

    tokens, width = 32, 64
    x = torch.randn(tokens, width, requires_grad=True)
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in ((width,), *[(width, width)] * 3)]
    kept: dict[int, int] = {}

    def pack(t: Any) -> Any:
        if t.dim() == 2 and t.shape == (tokens, width):
            kept[t.data_ptr()] = t.nbytes
        return t

    with Casts(), torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        wide = x.to(torch.float32)
        normed = weights[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        out = sum(torch.nn.functional.linear(normed, w) for w in weights[1:])
    forward, each = sum(casts), 6 * (3 * tokens * width + 3 * width * width)
    casts.clear()
    with Casts():
        torch.autograd.grad(out, [x, *weights], torch.zeros_like(out))
    assert forward == sum(casts) == each
    assert sum(kept.values()) == tokens * width * (4 + 4 + 3 * 2)

    layer = with_fp32_weights()
    saved = dict(layer.saved)
    names = ("input_norm_fp32", "input_norm_normed", "attention/qkv_cast_in", "mlp/fc1_cast_in", "attention/out", "mlp/fc2_in")
    sizes = [4 * HIDDEN, 4 * HIDDEN, 3 * 2 * HIDDEN, 2 * 2 * HIDDEN, 2 * HIDDEN, 2 * FFN]
    assert [saved[name] for name in names] == [TOKENS * size for size in sizes]
    for ops, suffix in ((layer.forward, ""), (layer.backward, ".backward")):
        found = {op.name: op for op in ops if op.name.endswith(f".autocast{suffix}")}
        moved = [op.work.bytes_moved for op in found.values() if isinstance(op.work, MemoryWork)]
        expected = [3 * HIDDEN * (TOKENS + HIDDEN), HIDDEN * HIDDEN, 2 * HIDDEN * (TOKENS + FFN), FFN * HIDDEN]
        assert moved == [6 * n for n in (expected if not suffix else expected[::-1])]
        assert sum(op.kernels for op in found.values()) == 6 + 1 + 4 + 1


@pytest.mark.parametrize(
    ("keys", "stated"),
    [({"resid_pdrop": 0.1, "attn_pdrop": 0.3}, 0.1), ({"resid_pdrop": 0.0}, 0.0), ({}, 0.0)], ids=["stated", "zero", "left out"],
)  # fmt: skip
def test_dropout_is_what_the_models_file_states_where_its_own_code_runs(
    tmp_path: Path, keys: dict[str, float], stated: float
) -> None:
    """Masks of one byte after attention and feed-forward."""
    config = {"model_type": "gpt2", "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 8, "n_positions": TOKENS, "vocab_size": 512}
    (path := tmp_path / "gpt2.json").write_text(json.dumps({**config, **keys}))

    def run(name: str, **training: Any) -> tuple[float, bool]:
        table = small(name, plan={"recompute": "none"}, **training).model_dump(exclude_none=True, exclude={"model", "file"})
        chosen = make_scenario({**table, "model": str(path)})
        saved = dict(prepare(chosen).layout.stage_blocks[0][1].saved)
        said = any(note.startswith("dropout 0.1, as the model's file says") for note in scenario_notes(chosen))
        return sum(amount for key, amount in saved.items() if key.endswith("_mask")), said

    masks = 2.0 * TOKENS * HIDDEN
    assert run("transformers") == (masks if stated else 0.0, stated > 0)
    assert run("transformers", dropout=0.0) == run("torchtune") == (0.0, False)
    assert run("torchtune", dropout=0.2) == (masks, False)


def test_models_with_one_matrix_of_queries_keys_and_values_cast_and_adapt_once(tmp_path: Path) -> None:
    """transformers modeling_gpt2.py: c_attn, one Conv1D."""
    config = {"model_type": "gpt2", "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 8, "n_positions": TOKENS, "vocab_size": 512}
    (path := tmp_path / "gpt2.json").write_text(json.dumps(config))

    def run(**training: Any) -> Layout:
        usual = small("transformers", version="2026-07", plan={"recompute": "none"}, **training)
        table = usual.model_dump(exclude_none=True, exclude={"model", "file"})
        return prepare(make_scenario({**table, "model": str(path)})).layout

    layout = run(pure_bf16=False)
    assert dict(layout.stage_blocks[0][1].saved)["attention/qkv_cast_in"] == 2 * TOKENS * HIDDEN
    adapted = run(trainable="lora", lora_rank=8)
    assert sum(adapted.trained(adapted.stage_blocks[0][1])) == 8 * ((HIDDEN + 3 * HIDDEN) + 2 * HIDDEN)


@pytest.mark.parametrize("changes", [{"pure_bf16": True}, {"trainable": "lora"}, {"precision": "tf32"}])
def test_16_bit_weights_and_fp32_training_cast_no_operand(changes: dict[str, Any]) -> None:
    assert not [op for op in with_fp32_weights(**changes).forward if "autocast" in op.name]


def test_a_layer_under_autocast_is_recomputed_from_an_fp32_input() -> None:
    chosen = small("transformers", plan={"recompute": "full"}, pure_bf16=False)
    assert dict(prepare(chosen).layout.stage_blocks[0][1].saved) == {"input_norm_in": 4 * TOKENS * HIDDEN}


QKV, PROJ, GATE_UP, DOWN = (8 * n for n in (3 * (2 * HIDDEN), 2 * HIDDEN, 2 * (HIDDEN + FFN), FFN + HIDDEN))
"""r (in + out) of every linear's pair."""


@pytest.mark.parametrize(("name", "shared"), [("torchtune", 0), ("transformers", 0), ("nemo", 1)])
@pytest.mark.parametrize("modules", ["attention", "qv", "mlp", "all"])
def test_every_adapted_matrix_has_a_pair(name: str, shared: int, modules: str) -> None:
    """r (in + out) of every linear; Megatron's packed products have one A for queries, keys and values and for gate and up, and for
    queries and values alone the whole of that product's pair."""
    layout = prepare(lora(name, lora_modules=modules)).layout
    trained = sum(sum(layout.trained(b)) for b in layout.stage_blocks[0])
    attention = QKV + PROJ - shared * 2 * 8 * HIDDEN
    if modules == "qv":
        attention = QKV - shared * 2 * 8 * HIDDEN if shared else 8 * 2 * (2 * HIDDEN)
    feed_forward = GATE_UP + DOWN - shared * 8 * HIDDEN
    assert trained == LAYERS * (attention * (modules != "mlp") + feed_forward * (modules in ("all", "mlp")))
    several = prepare(lora(name, lora_modules=modules, lora_adapters=4)).layout
    assert sum(sum(several.trained(b)) for b in several.stage_blocks[0]) == 4 * trained


def test_pairs_of_experts_are_of_feed_forwards() -> None:
    def trained(modules: str) -> float:
        table = {
            "model": "qwen3-30b-a3b", "framework": "transformers",
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1},
            "training": {"sequence_length": 64, "global_batch_size": 1, "trainable": "lora", "lora_modules": modules},
        }  # fmt: skip
        layout = prepare(make_scenario(table)).layout
        return sum(sum(layout.trained(b)) for b in layout.stage_blocks[0])

    assert trained("mlp") == trained("all") - trained("attention") > 0


def test_adapters_of_experts_are_as_expert_as_they() -> None:
    """Each rank holds those of its experts alone: nothing of them is sharded or reduced over the other ranks' (Megatron-Core)."""
    table = {
        "model": "qwen3-30b-a3b", "framework": "megatron-core", "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "plan": {"ep": 8, "zero_stage": 1},
        "training": {"sequence_length": 1024, "global_batch_size": 8, "trainable": "lora", "lora_rank": 16, "lora_modules": "all"},
    }  # fmt: skip
    layout = prepare(make_scenario(table)).layout
    blocks = layout.stage_blocks[0]
    dense, experts = layout.block_parameters(0, 0, len(blocks), trainable=True)
    moe, hidden, layers, rank = 768, 2048, 48, 16
    assert experts == layers * (128 / 8) * rank * (2 * moe + hidden + moe + hidden)
    assert dense == sum(b.lora_parameters for b in blocks) - experts > 0.0
    found = dict(static_state(layout, [0]))
    assert found["optimizer"] == pytest.approx(12.0 * (dense / 8 + experts))


def test_narrow_products_of_linears_or_of_experts_alone() -> None:
    table = {
        "model": "qwen3-30b-a3b", "framework": "torchtitan", "cluster": {"hardware": "dgx-b200", "num_nodes": 1},
        "training": {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 8, "precision": "mxfp8"},
    }  # fmt: skip

    def types(parts: str) -> tuple[set[str], set[str]]:
        made = make_scenario({**table, "training": {**table["training"], "narrow_modules": parts}})  # type: ignore[dict-item]
        works = [op.work for op in prepare(made).layout.stage_blocks[0][1].forward]
        dense = {w.dtype for w in works if isinstance(w, Gemm) and w.n > 128}  # the router stays wide
        return dense, {w.dtype for w in works if isinstance(w, GroupedGemm)}

    assert types("all") == ({"mxfp8"}, {"mxfp8"})
    assert types("linears") == ({"mxfp8"}, {"bf16"})
    assert types("experts") == ({"bf16"}, {"mxfp8"})
    for changes, said in (
        ({"precision": "bf16", "narrow_modules": "experts"}, "is not below 16 bits"),
        ({"framework": "megatron-core", "narrow_modules": "experts"}, "one precision for all"),
        ({"model": "llama3.1-8b", "narrow_modules": "linears"}, "has no experts"),
    ):
        other = {k: v for k, v in changes.items() if k in table}
        with pytest.raises(InputError, match=said):
            make_scenario(
                {**table, **other, "training": {**table["training"], **{k: v for k, v in changes.items() if k not in table}}}
            )  # type: ignore[dict-item]


def test_fp8_weights_may_be_gathered_in_16_bits() -> None:
    """Twice the bytes on the wire, and casts of whole weights: maximum and cast (5 bytes) forward, a byte more backward."""
    table = {
        "model": "llama3.1-8b", "framework": "torchtitan", "framework_version": "2025-02",
        "plan": {"zero_stage": 3, "recompute": "none"}, "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
    }  # fmt: skip
    training = {"sequence_length": 4096, "global_batch_size": 8, "precision": "fp8", "compile": True}

    def layer(gather: bool) -> tuple[float, float, float]:
        layout = prepare(make_scenario({**table, "training": {**training, "fp8_gather": gather}})).layout
        block = layout.stage_blocks[0][1]
        cast = [sum(op.work.bytes_moved for op in ops if ".cast" in op.name) for ops in (block.forward, block.backward)]
        return layout.state_bytes.gather, cast[0], cast[1]

    weights = 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    narrow, wide = layer(True), layer(False)
    assert (narrow[0], wide[0]) == (1.0, 2.0)
    assert wide[1] - narrow[1] == pytest.approx(5.0 * weights)
    assert wide[2] - narrow[2] == pytest.approx(1.0 * weights)
    for changes in ({"precision": "bf16"}, {"precision": "fp8-rowwise"}):
        with pytest.raises(InputError, match=r"training\.fp8_gather = False: is of fp8 weights with one scale a tensor"):
            make_scenario({**table, "training": {**training, **changes, "fp8_gather": False}})
    whole = {**table, "plan": {"zero_stage": 0}, "training": {**training, "fp8_gather": False}}
    with pytest.raises(InputError, match=r"plan\.zero_stage = 0: no weights are gathered"):
        make_scenario(whole)
    # What a layout decides is no fault of what a search, or the first plan, begins with.
    assert first_layout({k: v for k, v in whole.items() if k != "plan"})[0]["plan"]["zero_stage"] == 3


@pytest.mark.torch
def test_values_of_a_packed_linear_keep_all_that_it_made() -> None:
    """Queries and keys are turned out of place; a view of the values keeps the storage of all three (GPT-NeoX, Qwen, lit-gpt)."""
    torch = pytest.importorskip("torch")
    tokens, heads, head = 64, 4, 16
    wide = heads * head
    linear = torch.nn.Linear(wide, 3 * wide, bias=False, dtype=torch.bfloat16)
    x, cosine = torch.zeros(1, tokens, wide, dtype=torch.bfloat16), torch.ones(tokens, head)
    kept: dict[int, int] = {}

    def pack(t: Any) -> Any:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def turned(y: Any) -> Any:
        first, second = y.chunk(2, -1)
        return (y * cosine + torch.cat((-second, first), -1) * cosine).type_as(y)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        q, k, v = linear(x).view(1, tokens, 3, heads, head).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    of_hidden = [n for n in kept.values() if n in (2 * tokens * wide, 6 * tokens * wide)]
    assert out.nbytes == x.nbytes
    found = sum(of_hidden) - x.nbytes - out.nbytes  # of the product's and attention's own
    table = small("transformers", plan={"recompute": "none"}).model_dump(mode="json")
    packed, apart = (
        dict(prepare(make_scenario({**table, "model": {**MODEL, "packed_attention": p}})).layout.stage_blocks[0][1].saved)
        for p in (True, False)
    )
    assert packed["attention/qkv_out"] + packed["attention/qkv_copies"] == found * (TOKENS * HIDDEN) / (tokens * wide)
    assert "attention/qkv_copies" not in apart
    lit = prepare(small("lit-gpt")).layout.framework.kernels.qkv_copies
    assert lit == packed["attention/qkv_copies"] / packed["attention/qkv_out"]


def adapters_of(scenario: Scenario) -> tuple[list[LocalOp], list[LocalOp]]:
    """What adapters add to a layer's forward and backward."""
    layer = prepare(scenario).layout.stage_blocks[0][1]
    return [op for op in layer.forward if ".lora" in op.name], [op for op in layer.backward if ".lora" in op.name]


@pytest.mark.torch
@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_of_peft_are_fp32(autocast: bool, dropout: float) -> None:
    """peft tuners/lora/layer.py, Linear.forward, beside a 16-bit weight: kernels, bytes they move and what is kept."""
    torch = pytest.importorskip("torch")
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    seen: list[tuple[str, int]] = []

    class Seen(mode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            name = func._schema.name.removeprefix("aten::")
            if name in ("mm", "_to_copy", "mul", "add") or "dropout" in name:
                tensors = [t for t in (*args, *(made if isinstance(made, tuple) else (made,))) if isinstance(t, torch.Tensor)]
                seen.append((name, sum(t.nbytes for t in tensors)))
            return made

    tokens, k, n, r = 32, 64, 128, 8
    x, base = torch.zeros(tokens, k, dtype=torch.bfloat16, requires_grad=True), torch.zeros(n, k, dtype=torch.bfloat16)
    a, b = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((r, k), (n, r)))
    kept: dict[int, int] = {}

    def pack(t: Any) -> Any:
        kept[t.data_ptr()] = t.nbytes
        return t

    linear, inner = torch.nn.functional.linear, x * 1.0
    with (
        Seen(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        read = inner.to(a.dtype)
        if dropout:
            read = torch.native_dropout(read, dropout, True)[0]
        out = (linear(inner, base) + linear(linear(read, a), b) * 2.0).to(torch.bfloat16)
    forward, gradient = list(seen), torch.zeros_like(out)
    seen.clear()
    with Seen():
        torch.autograd.grad(out, [inner, a, b], gradient)
    backward = list(seen)
    assert inner.data_ptr() not in kept
    kept.pop(base.data_ptr())
    width = 2 if autocast else 4  # a copy of x, A x, both weights, and which elements are dropped
    assert sum(kept.values()) == width * (tokens * k + tokens * r + r * (k + n)) + (tokens * k if dropout else 0)

    usual = small("transformers", version="2026-07", plan={"recompute": "none"}, trainable="lora", lora_rank=r, lora_modules="all",
                  lora_dropout=dropout, pure_bf16=None if autocast else True)  # fmt: skip
    sources, outputs = TOKENS * (3 * HIDDEN + HIDDEN + 2 * HIDDEN + FFN), TOKENS * (3 * HIDDEN + HIDDEN + 2 * FFN + HIDDEN)
    for back, (ops, found) in enumerate(zip(adapters_of(usual), (forward, backward), strict=True)):
        assert sum(op.kernels for op in ops) == 7 * (len(found) - 1)  # less the frozen product itself
        # Of the input: casts of 6 bytes, what drops, and backward the sum of its two gradients. Of both weights: casts. The rest is
        # of the output.
        of_input = (12 if autocast else 6) * tokens * k + sum(moved for name, moved in found if "dropout" in name)
        of_input += back * 6 * tokens * k
        of_weights = 6 * r * (k + n) * autocast
        of_output = sum(moved for name, moved in found if name != "mm") - of_input - of_weights
        expected = of_input * sources / (tokens * k) + of_output * outputs / (tokens * n)
        expected += 6 * (QKV + PROJ + GATE_UP + DOWN) * autocast
        assert sum(op.work.bytes_moved for op in ops if isinstance(op.work, MemoryWork)) == pytest.approx(expected)
    saved = dict(prepare(usual).layout.stage_blocks[0][1].saved)
    copies = {"attention/qkv": 3 * HIDDEN, "attention/proj": HIDDEN, "mlp/fc1": 2 * HIDDEN, "mlp/fc2": FFN}
    each = width + (1 if dropout else 0)
    assert {name: saved[f"{name}_adapter_in"] for name in copies} == {name: each * TOKENS * k for name, k in copies.items()}
    assert "input_norm_out" not in saved
    products = [op.work for op in adapters_of(usual)[0] if isinstance(op.work, Gemm)]
    assert {w.dtype for w in products} == {"bf16" if autocast else "fp32"}


@pytest.mark.parametrize(("changes", "kernels"), [
    ({"version": "2024-04"}, 4), ({"plan": {"zero_stage": 3}, "gpus": 2}, 8), ({"base_weights": "nf4"}, 6), ({"compile": True}, 4),
    ({"plan": {"zero_stage": 2}, "gpus": 2}, 4), ({"pure_bf16": True}, 6), ({}, 8),
])  # fmt: skip
def test_adapters_of_16_bits_cast_nothing(changes: dict[str, Any], kernels: int) -> None:
    """Before peft 0.11, under DeepSpeed or a compiler; FSDP's shards are fp32 where the pair asks for their type. Those beside
    bitsandbytes' weights cast no input, but A and B themselves."""
    chosen = small("transformers", **{"version": "2026-07", **changes}, trainable="lora", lora_modules="all")
    forward, _ = adapters_of(chosen)
    assert sum(op.kernels for op in forward) == 7 * kernels


def test_adapters_in_fp32_rest_so() -> None:
    """fp32 weights, gradients and moments, and the copies that autocast keeps until the backward."""
    found = resting(small("transformers", version="2026-07", plan={"recompute": "none"}, trainable="lora", lora_rank=8))
    trained = LAYERS * (QKV + PROJ)
    assert (found["parameters"], found["optimizer"]) == (2.0 * WEIGHTS + 2.0 * trained, 12.0 * trained)


@pytest.mark.parametrize(("base", "each"), [("auto", 2.0), ("int8", 1.0009765625), ("nf4", 0.5625), ("nf4-double", 0.515869140625)])
def test_frozen_weights_rest_in_the_format_of_the_base(base: str, each: float) -> None:
    assert BASE_BYTES.get(base, 2.0) == each
    layout = prepare(lora(base_weights=base)).layout
    frozen = sum(layout.frozen_bytes(b) * (b.dense_parameters + b.expert_parameters) for b in layout.stage_blocks[0])
    assert frozen == pytest.approx(each * IN_MATMULS + 2.0 * OUTSIDE, rel=1e-3)


@pytest.mark.torch
def test_frozen_weights_of_fp32_leave_16_bit_copies_behind() -> None:
    """torch.autocast casts a frozen weight for each product without a cache; autograd keeps that copy for its input's gradient."""
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(48, 80, bias=False).requires_grad_(False)
    kept: list[tuple[Any, int]] = []

    def pack(t: Any) -> Any:
        kept.append((t.dtype, t.nbytes))
        return t

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(torch.randn(8, 48, requires_grad=True))
    assert kept == [(torch.bfloat16, 2 * 48 * 80)]

    def held(recompute: str = "none", zero: int = 0, gpus: int = 1) -> float:
        plan = {"recompute": recompute, "zero_stage": zero}
        layout = prepare(small("transformers", gpus, plan=plan, trainable="lora", lora_rank=8, base_weights="fp32")).layout
        return sum(layout.frozen_bytes(b) * (b.dense_parameters + b.expert_parameters) for b in layout.stage_blocks[0])

    embedding = VOCABULARY * HIDDEN
    assert held() == 6.0 * WEIGHTS - 2.0 * embedding
    assert held("full") == held(zero=3, gpus=2) == 4.0 * WEIGHTS


def test_frozen_weights_of_fp32_are_cast_in_a_forward_and_make_an_fp32_stream() -> None:
    narrow, wide = (
        prepare(small("transformers", version="2024-04", plan={"recompute": "none"}, trainable="lora", base_weights=base)).layout
        for base in ("auto", "fp32")
    )
    assert (narrow.kernels.autocast, wide.kernels.autocast) == ("", "own")
    block = wide.stage_blocks[0][1]
    moved = sum(op.work.bytes_moved for op in block.forward if op.name.endswith(".autocast") and isinstance(op.work, MemoryWork))
    assert moved >= 6.0 * IN_MATMULS / LAYERS
    assert not any(op.name.endswith(".autocast.backward") for op in block.backward)
    assert not any(op.name.endswith(".dequantise") for op in block.forward)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("torchtune", {}), ("transformers", {"pure_bf16": True}), ("transformers", {"precision": "tf32"}), ("plain", {})],
)
def test_frozen_weights_of_fp32_need_autocast(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="base_weights"):
        lora(name, base_weights="fp32", **changes)


def test_half_of_fp16_alone() -> None:
    """Weights that a loop turns into fp16 whole: two bytes each of weight, gradient and either moment, and nothing in fp32."""
    usual, whole = (small("transformers", version="2024-05", precision="fp16", pure_bf16=pure) for pure in (None, True))
    assert (prepare(usual).layout.pure_bf16, prepare(whole).layout.pure_bf16) == (False, True)
    found = resting(whole)
    assert (found["parameters"], found["optimizer"]) == (2.0 * WEIGHTS, 4.0 * WEIGHTS)
    assert prepare(whole).layout.state_bytes.gradient == 2.0
    with pytest.raises(InputError, match="pure_bf16"):
        small("transformers", precision="fp32", pure_bf16=True)


@pytest.mark.parametrize(("name", "version", "base", "inputs"), [
    ("transformers", "2024-06", "nf4", True), ("transformers", "2024-08", "nf4", False), ("transformers", "2024-06", "auto", False),
    ("transformers", "2024-06", "fp32", False),
    ("lit-gpt", "2024-06", "nf4", True), ("lit-gpt", "2024-09", "nf4", False), ("torchtune", "2024-06", "nf4", False),
])  # fmt: skip
def test_products_of_bitsandbytes_kept_their_inputs(name: str, version: str, base: str, inputs: bool) -> None:
    """Until its PR 1270, autograd/_functions.py MatMul4Bit: ctx.tensors = (A, B); adapters keep what they read in any case."""
    made = small(name, version=version, plan={"recompute": "none"}, trainable="lora", lora_modules="qv", base_weights=base)
    layer = prepare(made).layout.stage_blocks[0][1]
    kept = dict(layer.saved)
    assert kept.get("mlp/fc2_in", 0.0) == (2.0 * TOKENS * FFN if inputs else 0.0)
    assert kept.get("mlp_norm_out", 0.0) == (2.0 * TOKENS * HIDDEN if inputs else 0.0)


def test_prime_rl_holds_frozen_weights_in_fp32() -> None:
    """Its optimization_dtype is that of every weight; gathered they are of 16 bits."""
    layout = prepare(lora("prime-rl", plan={"zero_stage": 3})).layout
    assert {layout.frozen_bytes(block) for block in layout.stage_blocks[0]} == {4.0}
    assert layout.state_bytes.gather == 2.0


def test_frozen_fp8_weights_have_no_transposed_copy() -> None:
    """On Hopper a trained one has: both layouts are multiplied in every step."""
    adapter = {"trainable": "lora", "lora_rank": 8}
    trained, frozen = (
        prepare(small("nemo", 1, "2024-04", precision="fp8", **more)).layout.state_bytes.parameter for more in ({}, adapter)
    )
    assert (trained, frozen) == (2.0, 1.0)
    assert prepare(small("nemo", 1, "2024-03", precision="fp8")).layout.state_bytes.parameter == 4.0


def test_a_quantised_base_is_turned_into_16_bits_before_each_use() -> None:
    def casts(**training: Any) -> list[str]:
        layer = prepare(lora(**training)).layout.stage_blocks[0][1]
        return [op.name for op in (*layer.forward, *layer.backward) if op.name.endswith("dequantise")]

    assert casts() == []
    assert len(casts(base_weights="nf4")) == 2 * 4  # forward and input gradient of each of a layer's four products
    assert _result(lora(base_weights="nf4")).step_time_s > _result(lora()).step_time_s
    assert allocated(lora(base_weights="nf4")) < allocated(lora())


@pytest.mark.torch
def test_a_frozen_linear_keeps_no_input() -> None:
    torch = pytest.importorskip("torch")
    kept: list[int] = []

    def pack(tensor: Any) -> Any:
        kept.append(tensor.data_ptr())
        return tensor

    hidden = torch.zeros(4, 8, requires_grad=True)
    for trained in (True, False):
        kept.clear()
        linear = torch.nn.Linear(8, 16, bias=False).requires_grad_(trained)
        inner = hidden * 2.0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            linear(inner)
        assert (inner.data_ptr() in kept) == trained
    names = dict(prepare(lora()).layout.stage_blocks[0][1].saved)
    assert "mlp/fc2_in" not in names
    assert "mlp_norm_out" not in names
    assert {"input_norm_out", "attention/out"} <= names.keys()
    assert {"mlp/fc2_in", "mlp_norm_out"} <= dict(prepare(lora(lora_modules="all")).layout.stage_blocks[0][1].saved).keys()


# -- offload -----------------------------------------------------------------------------------------------------------


def test_parameters_in_host_memory_leave_the_device_and_come_up_for_each_gather() -> None:
    usual, away = (
        small("deepspeed", 2, "2026-06", {"zero_stage": 3, "offload": {"optimizer": True, "parameters": parameters}})
        for parameters in (False, True)
    )
    assert resting(usual)["parameters"] == 2.0 * WEIGHTS / 2
    assert resting(away)["parameters"] == 0.0
    assert _result(away).step_time_s > _result(usual).step_time_s


@pytest.mark.parametrize("name", ["deepspeed", "torchtune"])
def test_one_gpu_takes_its_weights_from_the_host(name: str) -> None:
    """Fully sharded over one rank: the shard is the whole, and comes up before each pass of a layer (ZeRO-Infinity on one GPU)."""
    usual, away = (
        small(name, 1, "2025-06", {"zero_stage": 3, "offload": {"optimizer": True, "parameters": parameters}})
        for parameters in (False, True)
    )
    assert resting(usual)["parameters"] > resting(away)["parameters"] == 0.0
    # DeepSpeed holds what comes again within 1e9 weights, here all of them.
    assert allocated(away) < allocated(usual) or (name == "deepspeed" and allocated(away) == allocated(usual))
    up_s = 2.0 * 2.0 * WEIGHTS / prepare(away).layout.hardware.node.pcie_bandwidth.value  # forward and backward
    assert _result(usual).step_time_s < _result(away).step_time_s < _result(usual).step_time_s + 2.0 * up_s


def test_fsdp_takes_gradients_and_states_to_the_host_with_the_weights() -> None:
    alone, both = (
        small("torchtune", 2, "2025-06", {"zero_stage": 3, "offload": {"optimizer": optimizer, "parameters": True}})
        for optimizer in (False, True)
    )
    for key in ("parameters", "gradients", "optimizer"):
        assert resting(alone)[key] == 0.0
    assert _result(alone).step_time_s == _result(both).step_time_s
    assert allocated(alone) == allocated(both) < allocated(small("torchtune", 2, "2025-06", {"zero_stage": 3}))
    assert resting(small("deepspeed", 2, "2026-06", {"zero_stage": 3, "offload": {"parameters": True}}))["optimizer"] > 0.0


def test_zero_accumulates_in_the_dtype_of_the_weights_but_in_pipelines() -> None:
    def gradients(version: str, precision: str, **plan: int) -> float:
        scenario = small("megatron-deepspeed", 8, version, {"zero_stage": 1, **plan}, precision=precision, micro_batch_size=1)
        return prepare(scenario).layout.state_bytes.gradient

    assert gradients("2023-12", "bf16") == gradients("2023-12", "fp16") == 2.0
    assert gradients("2022-12", "bf16") == gradients("2023-12", "bf16", pp=2) == 6.0  # fp32 sums beside what autograd makes


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_deepspeed_lie_where_its_optimizer_does(stage: int) -> None:
    usual, away = (
        small("deepspeed", 2, "2026-06", {"zero_stage": stage, "offload": {"optimizer": o}}, global_batch_size=4)
        for o in (False, True)
    )
    assert resting(usual)["gradients"] > 0.0
    assert resting(away)["gradients"] == 0.0
    assert (
        resting(small("transformers", 2, "2026-06", {"zero_stage": 3, "offload": {"optimizer": True}}))["gradients"]
        == (resting(small("transformers", 2, "2026-06", {"zero_stage": 3}))["gradients"])
    )


def test_offloaded_activations_are_those_of_layers() -> None:
    layout = prepare(small(plan={"offload": {"activations": 1.0}})).layout
    assert [b.offloadable_bytes > 0 for b in layout.stage_blocks[0]] == [False, *[True] * LAYERS, False]
    long = {"sequence_length": 16384, "cross_entropy": "fused"}
    assert allocated(small(plan={"offload": {"activations": 1.0}}, **long)) < allocated(small(**long))


# -- what there is not -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plan", "training", "message"),
    [
        ("megatron-core", {}, {"pure_bf16": True}, "megatron-core does not have it; a framework that does: deepspeed"),
        ("nanotron", {}, {"optimizer": "adamw-8bit"}, "nanotron does not have it"),
        ("megatron-core", {}, {"cross_entropy": "linear"}, "megatron-core does not have it; auto, unfused, fused"),
        ("deepspeed", {}, {"optimizer_in_backward": True}, "deepspeed does not have it"),
        ("nanotron", {}, {"trainable": "lora", "base_weights": "nf4"}, "nanotron does not have it"),
        ("torchtune", {"offload": {"parameters": True}}, {}, "plan.zero_stage = 3"),
        ("torchtune", {}, {"optimizer_in_backward": True, "global_batch_size": 2}, "allows no second micro-batch; 2, or"),
        ("torchtune", {"zero_stage": 1}, {"optimizer_in_backward": True}, "leaves no gradients to shard; 0 or 3"),
        ("torchtune", {"offload": {"optimizer": True}}, {"optimizer_in_backward": True}, "runs on the device; false"),
        ("torchtune", {}, {"optimizer_in_backward": True, "optimizer": "none"}, "no update without an optimizer"),
        ("torchtune", {}, {"base_weights": "nf4"}, 'training.trainable = "lora"'),
        ("torchtune", {}, {"lora_adapters": 2}, 'training.trainable = "lora"'),
        ("torchtune", {}, {"pure_bf16": True, "precision": "fp32"}, "contradicts training.precision"),
        ("megatron-core", {}, {"fused_kernels": True}, "megatron-core does not have it"),
    ],
)
def test_what_a_framework_has_not_is_refused_with_what_is_right(name: str, plan: Any, training: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(name, plan=plan, **training)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_memory_option_costs_memory(kind: str) -> None:
    if kind in ("none", "muon"):
        return
    base = allocated(small(optimizer=kind))
    for plan, training in (({"recompute": "full"}, {}), ({}, {"cross_entropy": "linear"}), ({}, {"optimizer_in_backward": True})):
        assert allocated(small(optimizer=kind, plan=plan, **training)) <= base * 1.0001


def test_fused_kernels_of_a_library_save_no_composite_norms() -> None:
    usual, library = (Layout.of(small(version="2025-03", fused_kernels=on), 1) for on in (False, True))
    assert any(name.endswith("_fp32") for name, _ in usual.stage_blocks[0][1].saved)
    assert not any(name.endswith("_fp32") for name, _ in library.stage_blocks[0][1].saved)


# -- full sharding as it runs ------------------------------------------------------------------------------------------


def moved(scenario: Scenario, name: str, phase: str) -> float:
    """Bytes per weight that a layer's copies around its collectives move in one phase."""
    layer = prepare(scenario).layout.stage_blocks[0][1]
    ops = layer.forward if phase == "F" else layer.backward
    return sum(op.work.bytes_moved for op in ops if op.name.removesuffix(".backward") == name) / layer.dense_parameters


def test_sharded_weights_rest_in_fp32_unless_a_run_leaves_them_as_loaded() -> None:
    """accelerate's fsdp2_prepare_model turns them into fp32 where its mixed precision is on; axolotl's own does not."""
    usual, loaded = (resting(small("transformers", 2, "2026-01", {"zero_stage": 3}, pure_bf16=pure)) for pure in (None, True))
    assert usual["parameters"] + usual["optimizer"] == 12.0 * WEIGHTS / 2
    assert loaded["parameters"] + loaded["optimizer"] == 6.0 * WEIGHTS / 2


def test_weights_that_are_not_resharded_stay_from_forward_to_backward() -> None:
    """FSDP1's SHARD_GRAD_OP, FSDP2's reshard_after_forward off: at the loss a rank holds the whole model gathered."""
    freed, kept = (
        prepare(small("transformers", 2, "2026-01", {"zero_stage": 3, "reshard_after_forward": reshards})).layout
        for reshards in (True, False)
    )
    blocks = kept.stage_blocks[0]
    weights = [2.0 * block.dense_parameters for block in blocks]
    own, other = Gathers.of(kept, blocks), Gathers.of(freed, freed.stage_blocks[0])
    assert own.forward[-1] == own.begin[-1] == sum(weights)
    assert own.forward[0] == other.forward[0]
    assert other.begin[-1] == weights[0] + weights[-1]  # the ends of the model are one group


def test_gathered_weights_and_reduced_gradients_are_copied_on_the_compute_stream() -> None:
    sharded = small("torchtitan", 4, "2025-06", {"zero_stage": 3})
    assert [moved(sharded, "gather.copy", phase) for phase in "FB"] == [4.0, 4.0]
    assert moved(sharded, "reduce.copy", "B") == 6.0  # 16 bits read, 32 written
    assert moved(small("torchtune", 4, "2025-06", {"zero_stage": 3}), "reduce.copy", "B") == 4.0
    assert moved(small("torchtitan", 1, "2025-06"), "gather.copy", "F") == 0.0
    frozen = small("torchtitan", 4, "2025-06", {"zero_stage": 3}, trainable="lora", lora_rank=8)
    assert moved(frozen, "gather.copy", "F") == 4.0
    assert 0.0 < moved(frozen, "reduce.copy", "B") < 0.2


def test_hooks_of_a_module_hold_the_host_of_an_eager_zero_3_step_and_no_compiled_one() -> None:
    """Seven projections, two norms and three containers; long kernels cover all their hooks."""

    def host_s(phase: str, **changes: Any) -> tuple[float, float]:
        plan = {"zero_stage": 3, **changes.pop("plan", {})}
        priced = prepare(small("deepspeed", 4, "2026-06", plan, **changes))
        pricer = LayoutPricer(priced.layout, *cost_models(priced.layout.scenario, priced.layout.hardware))
        price = pricer.block(priced.layout.stage_blocks[0][1], phase)
        assert price.weights + price.containers == 12
        return launch_seconds(pricer.layout, price, phase), price.seconds

    hook = 0.29e-3
    short, recomputed = host_s("F"), host_s("B", plan={"recompute": "full"})
    assert short[0] >= 12 * hook > short[1]
    assert recomputed[0] >= 24 * hook > recomputed[1]
    long = host_s("F", sequence_length=65536)
    assert long[0] == long[1] > 12 * hook
    assert host_s("F", compile=True)[0] < 5 * hook


@pytest.mark.parametrize(("gpus", "collectives"), [(4, 7), (1, 0)])
def test_the_host_starts_a_gather_for_each_linear_under_zero_3(gpus: int, collectives: int) -> None:
    """The hooks were measured without NCCL; norms stay gathered (param_persistence_threshold), one rank has nothing to gather."""
    layout = prepare(small("deepspeed", gpus, "2026-06", {"zero_stage": 3}, global_batch_size=4)).layout
    price = LayoutPricer(layout, *cost_models(layout.scenario, layout.hardware)).block(layout.stage_blocks[0][1], "F")
    assert price.linears == 7
    apart = launch_seconds(layout, price, "F") - launch_seconds(layout, replace(price, linears=0), "F")
    assert apart == pytest.approx(collectives * 50e-6 * slowdown(layout))


def test_a_narrow_format_is_what_an_nvfp4_matmul_keeps() -> None:
    def kept(precision: str) -> float:
        table = {"hardware": "dgx-b200", "num_nodes": 1}
        scenario = small("torchtitan", 8, "2026-06", {"zero_stage": 3, "recompute": "none"})
        cluster, training = scenario.cluster.model_copy(update=table), scenario.training.model_copy(update={"precision": precision})
        scenario = scenario.model_copy(update={"cluster": cluster, "training": training})
        return dict(Layout.of(scenario, 1).stage_blocks[0][1].saved)["mlp/fc2_in"] / (TOKENS * FFN)

    assert [kept(precision) for precision in ("bf16", "mxfp8", "nvfp4")] == [2.0, 2.0, 0.5625]


def test_recomputed_layers_run_eager_where_their_forward_cannot_be_traced() -> None:
    """torch utils/checkpoint.py: a checkpointed call with a graph break inside is not compiled, nor what it calls."""

    def fused(name: str, recompute: str, version: str = "2026-01") -> bool:
        plan = {"zero_stage": 3, "recompute": recompute}
        return Layout.of(small(name, 8, version, plan, compile=True), 1).kernels.library.fused_norm

    assert fused("prime-rl", "none")
    assert not fused("prime-rl", "full")
    assert fused("prime-rl", "full", "2026-10")  # pull requests 3753 and 3754: no break is left
    assert fused("torchtitan", "full")


def test_pairs_of_queries_and_values_alone_are_half_of_attentions() -> None:
    """Neither keys nor the output projection have one."""
    ops = {m: adapters_of(lora("transformers", lora_modules=m)) for m in ("attention", "qv")}
    launches = {m: [sum(op.kernels for op in each) for each in both] for m, both in ops.items()}
    assert launches["qv"] == [n / 2 for n in launches["attention"]]
    layer = prepare(lora("transformers", lora_modules="qv")).layout.stage_blocks[0][1]
    assert any(op.name == "attention/qkv.lora" for op in layer.forward)
    assert not any(op.name.startswith("attention/proj.lora") for op in layer.forward)


def test_latent_attention_has_no_pair_of_values() -> None:
    table = lora("transformers").model_dump(mode="json")
    with pytest.raises(InputError, match="latent attention"):
        make_scenario({**table, "model": "deepseek-v2-lite", "training": {**table["training"], "lora_modules": "qv"}})


@pytest.mark.torch
def test_a_compiled_stream_of_fp32_keeps_what_torch_s_partitioner_saves() -> None:
    """GPT-2's block under autocast: its input normalised in fp32, and in 16 bits as the product reads it; not the stream itself."""
    torch = pytest.importorskip("torch")
    aot = pytest.importorskip("torch._functorch.aot_autograd")
    partition = pytest.importorskip("torch._functorch.partitioners").min_cut_rematerialization_partition
    table = pytest.importorskip("torch._inductor.decomposition").select_decomp_table()
    functional, tokens, width = torch.nn.functional, 128, 64
    kept: list[int] = []

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
            sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
            self.linears = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)

        def forward(self, x: Any) -> Any:
            qkv = self.linears[0](self.norms[0](x)).split(width, dim=2)
            q, k, v = (t.view(1, tokens, 2, width // 2).transpose(1, 2) for t in qkv)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.linears[1](attended.transpose(1, 2).contiguous().view(1, tokens, width))
            return x + self.linears[3](functional.gelu(self.linears[2](self.norms[1](x))))

    def counted(joint: Any, inputs: Any, **options: Any) -> Any:
        parts = partition(joint, inputs, **options)
        made = next(n for n in parts[0].graph.nodes if n.op == "output").args[0][1:]
        # The alias is attention's output before it is laid out by tokens, as it is from the first on a GPU.
        made = [n for n in made if getattr(n, "op", "placeholder") != "placeholder" and "alias" not in str(n.target)]
        kept.append(
            sum(n.meta["val"].nbytes for n in made if tokens in n.meta["val"].shape and n.meta["val"].numel() >= tokens * width)
        )
        return parts

    def run(graph: Any, _: Any) -> Any:
        return graph

    def backend(graph: Any, examples: Any) -> Any:
        made = {"fw_compiler": run, "bw_compiler": run, "partition_fn": counted, "decompositions": table}
        return aot.aot_module_simplified(graph, examples, **made)

    for blocks in (2, 3):
        stack = torch.nn.Sequential(*[Block() for _ in range(blocks)])
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(stack, backend=backend)(torch.randn(1, tokens, width, requires_grad=True))

    gpt = {**MODEL, "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "position": "learned",
           "num_key_value_heads": MODEL["num_attention_heads"], "intermediate_size": 4 * HIDDEN}  # fmt: skip
    base = small("torch-autocast", compile=True).model_dump(exclude_unset=True)
    saved = prepare(make_scenario({**base, "model": gpt})).layout.stage_blocks[0][1].saved
    rest = sum(size for name, size in saved if not name.endswith(("stats", "lse")))
    assert (kept[1] - kept[0]) / (tokens * width) == rest / (TOKENS * HIDDEN) == 36.0
