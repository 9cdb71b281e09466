"""Counts of the einsum workload against independent ones: the parameter ledger, published formulas, closed forms."""

from __future__ import annotations

from dataclasses import fields

import pytest
from parameter_ledger import mtp_parameters, parameters

from simpar.graph.kernel_types import KernelPlan
from simpar.graph.rematerialise import Recompute
from simpar.model.layered import token_network
from simpar.model.network import simple_network
from simpar.parallel.blocks import split_block
from simpar.parallel.degrees import Degrees
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import Collective
from simpar.specs.framework_policies import Kernels
from simpar.specs.model import TransformerSpec
from simpar.specs.models_io import load_model, table_names

STYLE = KernelPlan()


def dense(**changes: object) -> TransformerSpec:
    base = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    }  # fmt: skip
    return TransformerSpec(**{**base, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", table_names())
def test_every_preset_has_the_ledgers_parameters(name: str) -> None:
    model = load_model(name)
    ledger = sum(count for _, count in (*parameters(model), *mtp_parameters(model)))
    if isinstance(model, TransformerSpec):
        network = token_network(model, 1, 16)
    else:
        network = simple_network(model, 1, 1)
    assert network.parameters == ledger


def saved(model: TransformerSpec, degrees: Degrees, recompute: Recompute = Recompute(), style: KernelPlan = STYLE) -> float:
    """Saved bytes per token of one layer."""
    block = token_network(model, 1, 1024).layers[-1]
    return split_block(block, SplitOptions(degrees, style, recompute)).saved_bytes / 1024


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_activations_of_a_fused_layer(tp: int) -> None:
    """(8h + 4nd + 4kv d + 4n + 6f + 8) / t with sequence parallelism, from what TransformerEngine saves."""
    h, n, k, d, f = 4096, 32, 8, 128, 14336
    expected = (8 * h + 4 * n * d + 4 * k * d + 4 * n + 6 * f + 8) / tp
    assert saved(dense(), Degrees(tp=tp, sequence_parallel=tp > 1)) == pytest.approx(expected)


def test_saved_activations_without_sequence_parallelism() -> None:
    """The norm inputs and outputs stay whole on every rank."""
    h, n, k, d, f, t = 4096, 32, 8, 128, 14336, 4
    expected = (8 * h + 8) + (4 * n * d + 4 * k * d + 4 * n + 6 * f) / t
    assert saved(dense(), Degrees(tp=t)) == pytest.approx(expected)


def test_saved_activations_of_an_eager_layer() -> None:
    """8h + 4nd + 4kv d + 4n + 8f + 8: torch eager keeps the gate and the product too (measured with saved_tensors_hooks)."""
    model = dense(hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2)
    assert saved(model, Degrees(), style=KernelPlan(Kernels(fused_activation=False))) == 42024


def test_gpt_layer_is_32h_without_dropout() -> None:
    """Korthikanti et al. 2022: 34h with two dropout masks; 32h (plus row statistics) without."""
    model = dense(intermediate_size=4 * 4096, num_key_value_heads=32, gated_mlp=False)
    per_token = saved(model, Degrees())
    assert per_token == pytest.approx(32 * 4096 + 4 * 32 + 8)


def test_full_recomputation_keeps_the_input() -> None:
    assert saved(dense(), Degrees(), Recompute(full=True)) == 2 * 4096


def test_layernorm_recomputation_frees_4h() -> None:
    """Both norms' outputs, and the statistic (fp32) that each keeps of a row, which is worked out again with them."""
    freed = saved(dense(), Degrees()) - saved(dense(), Degrees(), Recompute(modules=frozenset({"layernorm"})))
    assert freed == 4 * 4096 + 2 * 4


def collectives(degrees: Degrees, recompute: Recompute = Recompute()) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    model = dense()
    block = token_network(model, 1, 8192).layers[-1]
    local = split_block(block, SplitOptions(degrees, STYLE, recompute))
    found: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for into, ops in zip(found, (local.forward, local.backward), strict=True):
        for op in ops:
            if isinstance(op.work, Collective):
                into.setdefault(op.work.name, []).append(op.work.bytes)
    return found


def test_tensor_parallel_collectives_with_sequence_parallelism() -> None:
    """6 all-gathers and 4 reduce-scatters per layer, each of the whole 2 T h bytes (Megatron-LM layers.py)."""
    forward, backward = collectives(Degrees(tp=8, sequence_parallel=True))
    whole = 2.0 * 8192 * 4096
    assert forward == {"all_gather": [whole] * 2, "reduce_scatter": [whole] * 2}
    assert backward == {"all_gather": [whole] * 4, "reduce_scatter": [whole] * 2}


def test_tensor_parallel_collectives_without_sequence_parallelism() -> None:
    forward, backward = collectives(Degrees(tp=8))
    whole = 2.0 * 8192 * 4096
    assert forward == backward == {"all_reduce": [whole] * 2}


def test_full_recomputation_repeats_the_forward_collectives() -> None:
    _, backward = collectives(Degrees(tp=8, sequence_parallel=True), Recompute(full=True))
    assert len(backward["all_gather"]) == 6
    assert len(backward["reduce_scatter"]) == 4


@pytest.mark.parametrize("degrees", [Degrees(tp=2), Degrees(tp=4, sequence_parallel=True), Degrees(tp=8, cp=2), Degrees(cp=4)])
def test_matmul_work_is_conserved(degrees: Degrees) -> None:
    """Shards times their number is the whole, forward and both gradients."""
    from simpar.parallel.work import Gemm

    model = dense()
    block = token_network(model, 1, 8192).layers[-1]

    def flops(d: Degrees) -> float:
        local = split_block(block, SplitOptions(d, STYLE))
        works = [op.work for op in (*local.forward, *local.backward) if isinstance(op.work, Gemm)]
        return sum(2.0 * w.m * w.n * w.k for w in works)

    assert flops(degrees) * degrees.tp * degrees.cp == pytest.approx(flops(Degrees()))


@pytest.mark.parametrize("style", ["ring", "all_gather"])
def test_context_parallel_attention_work_is_balanced(style: str) -> None:
    """Every rank computes 1/cp of the causal score block."""
    from simpar.parallel.work import AttentionWork

    model = dense()
    block = token_network(model, 1, 8192).layers[-1]

    def pairs(d: Degrees) -> float:
        local = split_block(block, SplitOptions(d, STYLE))
        works = [op.work for op in local.forward if isinstance(op.work, AttentionWork)]
        return sum(w.heads * w.sequence_q * w.sequence_kv * (0.5 if w.causal else 1.0) for w in works)

    assert pairs(Degrees(cp=4, cp_style=style)) * 4 == pytest.approx(pairs(Degrees()))


def test_degree_one_is_the_identity() -> None:
    """A degree of 1 adds no op and no byte."""
    model = dense()
    block = token_network(model, 1, 8192).layers[-1]
    one = split_block(block, SplitOptions(Degrees(), STYLE))
    assert not any(isinstance(op.work, Collective) for op in (*one.forward, *one.backward))
    sequence = split_block(block, SplitOptions(Degrees(sequence_parallel=True), STYLE))
    for field in (f.name for f in fields(one) if f.name != "options"):
        assert getattr(sequence, field) == getattr(one, field), field
