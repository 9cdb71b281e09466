"""Parameter counts: every preset against its published count, and closed forms."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameter_ledger import (
    Model,
    active_parameters,
    embedding_parameters,
    layer_parameters,
    mtp_parameters,
    num_layers,
    parameters,
    total,
    total_parameters,
)

from simpar.model import ledger as graph_ledger
from simpar.model.huggingface import read
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.model import MlpSpec, TransformerSpec
from simpar.specs.models_io import load_model, table_names

SCALES = {"M": 6, "B": 9, "T": 12}


def printed(text: str) -> tuple[int, int]:
    """("145.6B") -> the value and one unit of its last digit."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([MBT])", text)
    assert match is not None, f"{text}: not a count like 175B"
    whole, fraction, letter = match[1], match[2] or "", match[3]
    unit = 10 ** (SCALES[letter] - len(fraction))
    return int(whole + fraction) * unit, unit


def counted(model: Model) -> int:
    """What the published count of `model` counts."""
    count = total_parameters(model)
    if isinstance(model, TransformerSpec) and model.published_scope == "non_embedding":
        count -= embedding_parameters(model)
    return count


@pytest.mark.parametrize("name", table_names())
def test_graphs_hold_what_the_ledger_says(name: str) -> None:
    model = load_model(name)
    assert (graph_ledger.total_parameters(model), graph_ledger.active_parameters(model)) == (
        total_parameters(model), active_parameters(model),
    )  # fmt: skip


@pytest.mark.parametrize("name", table_names())
def test_presets_equal_their_published_count(name: str) -> None:
    model = load_model(name)
    assert not isinstance(model, ArchitectureSpec)
    assert model.source, "a preset says where it comes from"
    if model.published_parameters:
        assert counted(model) == model.published_parameters
        return
    value, unit = printed(model.published_as)
    truncated = isinstance(model, TransformerSpec) and model.published_rounding == "truncated"
    low, high = (value, value + unit) if truncated else (value - unit / 2, value + unit / 2)
    assert low <= counted(model) < high, f"{name}: {counted(model):,} is not printed as {model.published_as}"


@pytest.mark.parametrize(
    ("name", "h", "layers"),
    [("megatron-1.7b", 2304, 24), ("megatron-18.4b", 6144, 40), ("megatron-529.6b", 20480, 105)],
)
def test_megatron_equation_2(name: str, h: int, layers: int) -> None:
    """arXiv 2104.04473, equation 2, multiplied out; it leaves out the final norm's 2 h."""
    equation = 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h
    assert total_parameters(load_model(name)) == equation + 2 * h


@pytest.mark.parametrize(
    ("name", "billions", "unit"),
    [
        ("mixtral-8x7b", 12.9, 0.1),  # arXiv 2401.04088
        ("deepseek-v2", 21, 1),  # arXiv 2405.04434
        ("deepseek-v3", 37, 1),  # arXiv 2412.19437; truncated: 37.55
        ("qwen3-30b-a3b", 3.3, 0.1),  # model card
        ("qwen3-235b-a22b", 22, 1),  # model card
        ("mixtral-8x22b", 39, 1),  # Mistral AI, 2024-04-17
    ],
)
def test_active_parameters_of_mixtures(name: str, billions: float, unit: float) -> None:
    assert abs(active_parameters(load_model(name)) / 1e9 - billions) < unit


def test_active_equals_total_without_experts() -> None:
    for name in ("llama3.1-8b", "gpt3-175b", "alexnet", "mlp-4096x24"):
        assert active_parameters(load_model(name)) == total_parameters(load_model(name))


def test_deepseek_v3_prediction_module_has_the_published_size() -> None:
    """The checkpoint's README counts 14 B of MTP weights: 11.5 B of its own, and copies of embedding and head."""
    model = load_model("deepseek-v3")
    own = total(mtp_parameters(model))
    assert round(own / 1e8) == 116
    assert 13e9 < own + embedding_parameters(model) < 14e9


@pytest.mark.parametrize("name", table_names())
def test_layers_and_outside_add_up(name: str) -> None:
    model = load_model(name)
    outside = sum(count for path, count in parameters(model) if not path.startswith("layers."))
    layers = sum(total(layer_parameters(model, index)) for index in range(num_layers(model)))
    assert outside + layers == total_parameters(model)
    assert all(count > 0 for _, count in parameters(model))


def test_dense_layers_come_first_in_deepseek() -> None:
    model = load_model("deepseek-v3")
    kinds = ["moe/router" in dict(layer_parameters(model, i)) for i in range(61)]
    assert kinds == [False] * 3 + [True] * 58


def test_every_other_switch_layer_has_experts_in_both_stacks() -> None:
    model = load_model("switch-base")
    kinds = ["moe/router" in dict(layer_parameters(model, i)) for i in range(num_layers(model))]
    assert kinds == [False, True] * 12
    crossed = ["cross_attention/q" in dict(layer_parameters(model, i)) for i in (0, 11, 12, 23)]
    assert crossed == [False, False, True, True]


def test_alexnet_by_hand() -> None:
    """Weights and biases of Krizhevsky et al. 2012, written out."""
    conv = [(96, 3, 11), (256, 48, 5), (384, 256, 3), (384, 192, 3), (256, 192, 3)]
    linear = [(4096, 6 * 6 * 256), (4096, 4096), (1000, 4096)]
    expected = sum(o * i * k * k + o for o, i, k in conv) + sum(o * i + o for o, i in linear)
    assert total_parameters(load_model("alexnet")) == expected == 60_965_224


@given(
    h=st.integers(1, 8).map(lambda n: 64 * n),
    layers=st.integers(1, 12),
    kv=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(10, 5000),
    tied=st.booleans(),
)
def test_llama_closed_form(h: int, layers: int, kv: int, vocab: int, tied: bool) -> None:
    d, f = h // 8, 3 * h
    model = TransformerSpec(
        hidden_size=h, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=kv,
        head_dim=d, vocab_size=vocab, tie_word_embeddings=tied,
    )  # fmt: skip
    layer = 2 * h * h + 2 * h * kv * d + 3 * h * f + 2 * h
    assert total_parameters(model) == layers * layer + (1 if tied else 2) * vocab * h + h
    assert graph_ledger.total_parameters(model) == total_parameters(model)


@given(width=st.integers(1, 300), depth=st.integers(1, 40), ends=st.tuples(st.integers(1, 99), st.integers(1, 99)))
def test_mlp_closed_form(width: int, depth: int, ends: tuple[int, int]) -> None:
    square = depth * (width * width + width)
    assert total_parameters(MlpSpec(width=width, depth=depth)) == square
    model = MlpSpec(width=width, depth=depth, input_size=ends[0], output_size=ends[1])
    assert total_parameters(model) == square + ends[0] * width + width + width * ends[1] + ends[1]


@pytest.mark.parametrize("rank", [16, 40])
def test_queries_from_a_latent_that_heads_share_by_hand(rank: int) -> None:
    """Step-3 (arXiv 2507.19427): down, a norm, up to all heads; keys and values of one head; experts where the file lists them."""
    h, heads, d, dense, wide, shared, experts, vocab = 64, 6, 8, 96, 32, 48, 4, 100
    model = read({
        "model_type": "step3_text", "hidden_size": h, "num_attention_heads": heads, "num_attention_groups": 1, "head_dim": d,
        "share_q_dim": rank, "num_hidden_layers": 3, "intermediate_size": dense, "moe_intermediate_size": wide,
        "moe_num_experts": experts, "moe_top_k": 2, "share_expert_dim": shared, "moe_layers_enum": "1,2",
        "vocab_size": vocab, "tie_word_embeddings": False,
    })  # fmt: skip
    attention = h * rank + rank + rank * heads * d + 2 * h * d + heads * d * h + 2 * h
    routed = h * experts + 3 * h * wide * experts + 3 * h * shared
    found = graph_ledger.totals(model, 64)
    assert found.parameters == 3 * attention + 3 * h * dense + 2 * routed + 2 * vocab * h + h
    assert found.active_parameters == found.parameters - 2 * 3 * h * wide * (experts - 2)
