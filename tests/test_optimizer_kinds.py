"""Optimizers by kind: bytes kept and moved per weight by hand, states and FLOPs of torch's own optimizers, matrices dealt out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.costs.price import Price, Provenance
from simpar.costs.update_price import DECOMPOSITION_SHARE, update_price
from simpar.errors import InputError
from simpar.parallel.layout import Layout
from simpar.parallel.optimizers import Matrix, dealt_out, matrices, more_moments, newton_schulz_flops, whole_flops
from simpar.parallel.work import Collective, Gemm, MemoryWork, OptimizerWork, Work
from simpar.searching.request import make_space
from simpar.specs.framework import framework as framework_of
from simpar.specs.models_io import load_model, model_names
from simpar.specs.optimizers import KINDS
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import prepare, simulate

RUNS = Path(__file__).parent.parent / "validation" / "runs"
HIDDEN, WIDTH, VOCABULARY, LAYERS, HEADS, KV, HEAD_DIM = 64, 96, 256, 3, 4, 2, 16
MATRICES_OF_LAYER = (
    (HIDDEN, HIDDEN), (KV * HEAD_DIM, HIDDEN), (KV * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH),
)  # fmt: skip
"""Queries, keys, values, output, gate and up, down."""


def small(optimizer: str, *, nodes: int = 1, gpus: int | None = 1, framework: str = "megatron-core", **plan: Any) -> Scenario:
    return make_scenario(
        {
            "model": {
                "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                "num_key_value_heads": KV, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
            },
            "framework": framework,
            "cluster": {"hardware": "dgx-h100", "num_nodes": nodes, "num_gpus": gpus},
            "plan": plan,
            "training": {"sequence_length": 128, "global_batch_size": 64, "optimizer": optimizer},
        }
    )  # fmt: skip


def works(scenario: Scenario) -> list[Work]:
    """What the update of pipeline rank 0 asks the prices of."""
    asked: list[Work] = []

    def work(one: Work) -> Price:
        asked.append(one)
        return Price(1.0, 1.0, 1.0, Provenance.MODEL)

    priced = prepare(scenario)
    update_price(priced.layout, priced.held[0], work, 0.0)
    return asked


def moved(asked: list[Work]) -> float:
    """HBM bytes of the elementwise part."""
    return sum(w.parameters * w.bytes_per_parameter for w in asked if isinstance(w, OptimizerWork))


LAYER_MATRICES = sum(a * b for a, b in MATRICES_OF_LAYER) * LAYERS
TABLES = 2 * VOCABULARY * HIDDEN
VECTORS = (2 * LAYERS + 1) * HIDDEN
WEIGHTS = LAYER_MATRICES + TABLES + VECTORS


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # gradient 4, its norm 4, weight 4 + 4, copy 2, moments 4 bytes read and written each
        ("adamw", 34 * WEIGHTS),
        ("adam", 34 * WEIGHTS),
        ("sgd", 18 * WEIGHTS),
        ("sgd-momentum", 26 * WEIGHTS),
        ("adamw-bf16-moments", 26 * WEIGHTS),
        # the gradient twice more and the weight once more; vectors keep a moment; rows and columns of every matrix
        ("adafactor", 30 * WEIGHTS + 8 * VECTORS
         + 8 * (LAYERS * sum(a + b for a, b in MATRICES_OF_LAYER) + 2 * (VOCABULARY + HIDDEN))),
        # three rotated matrices of fp32; two factors for each of both sides read and written; tables under Adam, with the passes
        ("soap", 46 * WEIGHTS + 2 * 8 * LAYERS * sum(a**2 + b**2 for a, b in MATRICES_OF_LAYER)),
        # 16-bit copies into and out of the iteration; embedding, head and norms under Adam
        ("muon", 30 * LAYER_MATRICES + (30 + 8) * (TABLES + VECTORS)),
    ],
)  # fmt: skip
def test_bytes_that_a_step_moves(optimizer: str, expected: float) -> None:
    asked = works(small(optimizer))
    assert Layout.of(small(optimizer), 1).framework.optimizer.optimizer_traffic_bytes == 34.0
    assert moved(asked) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("optimizer", "framework", "kernel", "each"),
    [
        ("adamw-foreach", "plain", "foreach", 92.0),
        ("adamw-fused", "torch-fsdp", "fused", 34.0),
        ("adamw-foreach", "llm-foundry", "foreach", 72.0),  # its own, counted from its update rule
        ("adamw-fused", "torchtitan", "fused", 32.0),
        ("adamw", "torch-fsdp", "foreach", 92.0),
    ],
)
def test_a_run_may_say_how_torch_goes_over_the_weights(optimizer: str, framework: str, kernel: str, each: float) -> None:
    scenario = small(optimizer, framework=framework, zero_stage=0)
    asked = [w for w in works(scenario) if isinstance(w, OptimizerWork)]
    assert {w.implementation for w in asked} == {kernel}
    assert moved(asked) == pytest.approx(each * WEIGHTS)
    layout = Layout.of(scenario, 1)
    assert layout.update_bytes == layout.framework.optimizer.update_bytes + (4.0 if kernel == "foreach" else 0.0)


@pytest.mark.parametrize(
    ("name", "month", "kernel", "each"),
    [
        ("torchtitan", "2024-03", "foreach", 92.0), ("torchtitan", "2025-02", "foreach", 92.0),
        ("torchtitan", "2025-03", "fused", 32.0), ("torchtune", "2024-11", "fused", 32.0),
        ("olmo-core", "2025-01", "fused", 32.0), ("lit-gpt", "2024-05", "fused", 32.0),
    ],
)  # fmt: skip
def test_torchtitan_goes_over_the_weights_in_lists_until_2025_03(name: str, month: str, kernel: str, each: float) -> None:
    """PR 881 of 2025-02-24; what is built on it has a fused update of its own."""
    policy = framework_of(name, month).optimizer
    assert (policy.optimizer_kernel, policy.optimizer_traffic_bytes) == (kernel, each)


def test_apex_has_one_way() -> None:
    with pytest.raises(InputError, match=r"adamw-foreach.*megatron-core does not have it"):
        small("adamw-foreach")


def test_whole_gradients_are_read_whatever_the_optimizer() -> None:
    """Megatron's 16 bytes: a buffer of all gradients under ZeRO 1, of a rank's half where its own FSDP has sharded them."""
    for optimizer in ("adamw", "sgd"):
        for framework, stage, held in (("megatron-core", 1, WEIGHTS), ("megatron-core", 3, WEIGHTS / 2)):
            scenario = small(optimizer, framework=framework, gpus=2, zero_stage=stage)
            found = [w.bytes_moved for w in works(scenario) if isinstance(w, MemoryWork)]
            assert found == pytest.approx([16.0 * held])


@pytest.mark.parametrize(("framework", "copied"), [("megatron-core", 6.0), ("megatron-bridge", 0.0)])
def test_megatrons_own_fsdp_fills_its_buckets(framework: str, copied: float) -> None:
    """A 16-bit gradient read, written in fp32; matmuls that add into the bucket leave nothing to copy."""
    scenario = small("adamw", framework=framework, gpus=2, zero_stage=3)
    assert Layout.of(scenario, 1).options.reduce_copy_bytes == copied


def test_muon_multiplies_every_matrix_of_the_layers() -> None:
    asked = [w for w in works(small("muon")) if isinstance(w, Gemm)]
    shapes = {tuple(sorted(m)) for m in MATRICES_OF_LAYER}
    assert {(w.m, w.n, w.k) for w in asked} == {
        product for a, b in shapes for product in ((a, a, b), (a, a, a), (a, b, a))
    }  # fmt: skip
    assert not [w for w in works(small("adamw")) if isinstance(w, Gemm)]


def test_flops_of_the_iteration() -> None:
    # 5 steps of X X^T (2 a a b), its square (2 a a a) and the product with X (2 a a b)
    assert newton_schulz_flops([Matrix(2, 3)]) == 5 * (2 * 2 * 2 * 3 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 3)
    assert newton_schulz_flops([Matrix(3, 2, count=4)]) == 4 * newton_schulz_flops([Matrix(2, 3)])


def test_sides_that_have_factors() -> None:
    """SOAP leaves a side out that is too long; Shampoo cuts it into blocks, each with factors of both of its sides."""
    soap, shampoo = KINDS["soap"].factors, KINDS["shampoo"].factors
    assert soap is not None
    assert shampoo is not None
    assert list(soap.sides(3, 5)) == [(3, 5, 1), (5, 3, 1)]
    assert list(soap.sides(20_000, 5)) == [(5, 20_000, 1)]
    assert list(shampoo.sides(16_384, 5)) == [(8192, 5, 2), (5, 8192, 2)]


def test_flops_of_preconditioning() -> None:
    # Statistics, gradient, momentum and update with each side; every tenth step a power iteration (2 n^3) and a QR (8/3 n^3).
    both = 4 * 2 * (2 * 2 * 3 + 3 * 3 * 2) + (2 + 8 / 3) * (2**3 + 3**3) / 10
    assert whole_flops(KINDS["soap"], [Matrix(2, 3, count=4)]) == pytest.approx(4 * both)


def test_soap_is_as_slow_as_it_was_measured_beside_adam() -> None:
    """GPT-2 124M on 8 H100: 363 ms a step where Muon took 216 (KellerJordan/modded-nanogpt, 9 and 10 October 2024). The
    difference is products in fp32 and decompositions; nothing was fitted to it."""
    rows = {row["id"]: row for row in map(json.loads, (RUNS / "modded_nanogpt_records.jsonl").open())}
    soap, muon = (rows[f"mng-2024-10-{name}"] for name in ("09-soap", "10-muon"))
    found = [simulate(make_scenario(row["scenario"])).step_time_s for row in (soap, muon)]
    measured = soap["measured"]["step_time_s"] - muon["measured"]["step_time_s"]
    assert found[0] - found[1] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_products_of_the_price_are_the_flops(name: str) -> None:
    scenario = small(name, framework="torchtitan", zero_stage=0)
    layout = prepare(scenario).layout
    kind, rate = KINDS[name], DECOMPOSITION_SHARE * layout.hardware.gpu.peak_flops["fp32"].value
    found = [m for m in matrices(layout.stage_blocks[0]) if not m.outside]
    counted: list[float] = []

    def work(one: Work) -> Price:
        flops = 2.0 * one.m * one.n * one.k if isinstance(one, Gemm) else 0.0
        return Price(flops, flops, flops, Provenance.MODEL)

    counted.append(update_price(layout, [0], work, 0.0).seconds)
    fixed = layout.framework.host.optimizer_cpu_s + layout.calibration.step_s
    factors, slow = kind.factors, 0.0
    if factors is not None:  # decompositions are seconds already
        sides = [side for m in found for side, _, _ in factors.sides(m.rows, m.columns)]
        slow = factors.decomposition * sum(n**3 for n in sides) / factors.every
    flops = whole_flops(kind, found) - slow + slow / rate
    assert counted[0] - fixed == pytest.approx(flops * layout.calibration.compute, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in model_names() if getattr(load_model(name), "vocab_size", 1)])
def test_matrices_and_vectors_are_all_weights(name: str) -> None:
    scenario = make_scenario(
        {"model": name, "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1}, "plan": {},
         "training": {"sequence_length": 128, "global_batch_size": 1}}
    )  # fmt: skip
    layout = Layout.of(scenario, 1)
    for block in layout.stage_blocks[0]:
        whole = sum(m.weights for m in matrices([block]))
        if block.name == "head" and not block.dense_parameters:
            continue  # the head again, for multi-token prediction
        # A tied head is a matrix of the head's block and no weights of it.
        tied = layout.tied_extra if block.name == "head" and layout.network.tied else 0.0
        total = block.dense_parameters + block.expert_parameters + tied
        assert whole <= total
        # What is no matrix is norms and biases: a few values per row of the widest.
        assert total - whole <= max(0.02 * total, 1.0)


def test_tensor_and_expert_parallelism_cut_the_matrices() -> None:
    halves = [(m.rows, m.columns) for m in matrices(prepare(small("muon", gpus=2, tp=2)).layout.stage_blocks[0]) if not m.outside]
    wanted = [(HIDDEN // 2, HIDDEN), (KV * HEAD_DIM // 2, HIDDEN), (KV * HEAD_DIM // 2, HIDDEN), (HIDDEN, HIDDEN // 2),
              (WIDTH, HIDDEN), (HIDDEN, WIDTH // 2)]  # fmt: skip
    assert sorted(halves) == sorted(wanted * LAYERS)
    moe = make_scenario(
        {"model": "mixtral-8x7b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"ep": 4},
         "training": {"sequence_length": 128, "global_batch_size": 8, "optimizer": "muon"}}
    )  # fmt: skip
    experts = [m for m in matrices(prepare(moe).layout.stage_blocks[0]) if m.expert]
    assert {(m.rows, m.columns, m.count) for m in experts} == {(2 * 14336, 4096, 2), (4096, 14336, 2)}
    assert len(experts) == 2 * 32


def test_cut_matrices_are_gathered_whole() -> None:
    """Queries, keys, values, output, gate and up, down of every layer over two tensor ranks; the products are of whole matrices."""
    asked = works(small("muon", gpus=2, tp=2))
    found: dict[float, float] = {}
    for one in asked:
        if isinstance(one, Collective):
            assert (one.name, one.dimension) == ("all_gather", "tp")
            found[one.bytes] = found.get(one.bytes, 0) + one.repeat
    wanted: dict[float, float] = {}
    for a, b in MATRICES_OF_LAYER:
        wanted[2.0 * a * b] = wanted.get(2.0 * a * b, 0) + LAYERS
    assert found == wanted
    alone = [w for w in works(small("muon")) if isinstance(w, Gemm)]
    assert {w for w in asked if isinstance(w, Gemm)} == set(alone)


def test_whole_matrices_are_dealt_out() -> None:
    # Four ranks: the big one alone, the six small ones two to each of the others.
    found = (Matrix(100, 10), *[Matrix(10, 10)] * 6)
    assert sum(m.weights for m in dealt_out(KINDS["muon"], found, 4)) == 1000
    # Twelve equal ones over five ranks: three on the fullest; over six: two.
    assert sum(m.count for m in dealt_out(KINDS["muon"], (Matrix(4, 4, 12),), 5)) == 3
    assert sum(m.count for m in dealt_out(KINDS["muon"], (Matrix(4, 4, 12),), 6)) == 2
    assert dealt_out(KINDS["muon"], found, 1) == found


def test_full_sharding_gathers_momenta_and_updates() -> None:
    def gathers(zero: int) -> list[Collective]:
        return [w for w in works(small("muon", gpus=4, zero_stage=zero)) if isinstance(w, Collective)]

    assert [(c.name, c.bytes, c.dimension) for c in gathers(3)] == [("all_gather", 2.0 * LAYER_MATRICES, "shard")] * 2
    assert gathers(0) == gathers(1) == []
    assert not [w for w in works(small("adamw", gpus=4, zero_stage=3)) if isinstance(w, Collective)]
    result = simulate(small("muon", gpus=4, zero_stage=3))
    assert result.exposed_communication_s["dp"] > simulate(small("adamw", gpus=4, zero_stage=3)).exposed_communication_s["dp"]


def test_bytes_at_rest() -> None:
    def optimizer(kind: str, **plan: Any) -> float:
        return dict(simulate(small(kind, **plan)).memory[0].static)["optimizer"] - 4.0 * WEIGHTS / plan.get("gpus", 1)

    assert optimizer("adamw") == 8.0 * WEIGHTS
    assert optimizer("sgd") == 0.0
    assert optimizer("sgd-momentum") == optimizer("adamw-bf16-moments") == 4.0 * WEIGHTS
    assert optimizer("muon") == 4.0 * WEIGHTS + 4.0 * (TABLES + VECTORS)
    rows_and_columns = LAYERS * sum(a + b for a, b in MATRICES_OF_LAYER) + 2 * (VOCABULARY + HIDDEN)
    assert optimizer("adafactor") == 4.0 * (VECTORS + rows_and_columns)
    assert optimizer("muon", gpus=4, zero_stage=1) == (4.0 * WEIGHTS + 4.0 * (TABLES + VECTORS)) / 4


def test_every_kind_has_a_price_of_its_own() -> None:
    large = {"model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {"tp": 8}}
    training = {"sequence_length": 2048, "global_batch_size": 8}
    seconds = {
        kind: simulate(make_scenario({**large, "framework": "plain", "training": {**training, "optimizer": kind}})).step_time_s
        for kind in KINDS
        if kind not in ("adam", "adamw-bf16-moments", "adamw-fp8", "adamw-8bit", "adamw-fused")
    }
    # Of 14,336 rows SOAP leaves that side out, Shampoo cuts it in two.
    order = ["none", "sgd", "adamw-4bit", "lion", "adafactor", "adamw", "adamw-foreach", "adamw-8bit-paged", "muon", "soap",
             "shampoo"]  # fmt: skip
    del seconds["sgd-momentum"]  # one state as wide as the weight, as Lion's
    assert sorted(seconds, key=seconds.__getitem__) == order
    assert len(set(seconds.values())) == len(order)


def test_muon_stays_on_the_device() -> None:
    with pytest.raises(InputError, match="muon multiplies whole matrices"):
        small("muon", offload={"optimizer": True})


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.whole])
def test_a_search_leaves_whole_matrices_on_the_device(name: str) -> None:
    """Neither the update goes to the host, nor the weights where the update would go along (torch's FSDP)."""
    table = {
        "model": "llama3.1-8b", "framework": "transformers", "cluster": {"hardware": "dgx-h100", "num_nodes": 1}, "plan": {},
        "training": {"sequence_length": 4096, "global_batch_size": 16, "optimizer": name},
    }  # fmt: skip
    fixed = ["zero_stage=3", "tp=1", "cp=1", "pp=1", "micro_batch_size=1", "recompute=none", "offload_activations=0"]
    space = make_space(table, fix=fixed)
    found = [choice.scenario(space.template) for choice in space.choices()]
    assert found
    assert not any(s.plan.offload.optimizer for s in found)
    away = make_space(table, fix=fixed, allow=["offload_parameters=true,false"])
    assert not any(state.offload_parameters for group in away.groups for state in away.states(group))
    usual = make_space({**table, "training": {**table["training"], "optimizer": "adamw"}})  # type: ignore[dict-item]
    assert any(offload.optimizer for offload in usual.offloads)


def test_low_rank_pairs_are_matrices() -> None:
    scenario = make_scenario(
        {"model": "llama3.1-8b", "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1}, "plan": {},
         "training": {"sequence_length": 128, "global_batch_size": 1, "trainable": "lora", "lora_rank": 8, "optimizer": "muon"}}
    )  # fmt: skip
    layout = prepare(scenario).layout
    layer = layout.stage_blocks[0][1]
    assert sum(m.weights for m in matrices([layer])) == layer.lora_parameters > 0
    assert more_moments(KINDS["muon"], [layer]) == (0.0, 0.0)


@pytest.mark.torch
class TestTorch:
    """torch's own optimizers on real tensors."""

    SHAPES = ((6, 10), (10, 4), (7,))

    def states(self, name: str, **options: Any) -> float:
        """Bytes of the states after one step, step counters apart."""
        torch = pytest.importorskip("torch")
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in self.SHAPES if name != "Muon" or len(shape) == 2]
        optimizer = getattr(torch.optim, name)(parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        states = [v for p in parameters for v in optimizer.state[p].values() if torch.is_tensor(v) and v.dim()]
        return float(sum(v.numel() * v.element_size() for v in states))

    def expected(self, kind: str) -> float:
        row = KINDS[kind]
        whole = [Matrix(*shape) for shape in self.SHAPES if len(shape) == 2]
        vectors = 0 if kind == "muon" else 7
        found = sum(m.weights for m in whole) * row.moments + vectors * row.other_moments
        return found + (sum(4.0 * (m.rows + m.columns) for m in whole) if row.factored else 0.0)

    @pytest.mark.parametrize(
        ("name", "kind", "options"),
        [("AdamW", "adamw", {}), ("SGD", "sgd", {"lr": 0.1}), ("SGD", "sgd-momentum", {"lr": 0.1, "momentum": 0.9}),
         ("Adafactor", "adafactor", {}), ("Muon", "muon", {})],
    )  # fmt: skip
    def test_states(self, name: str, kind: str, options: dict[str, Any]) -> None:
        assert self.states(name, **options) == self.expected(kind)

    @pytest.mark.parametrize("shape", [(6, 10), (10, 4), (8, 8)])
    def test_flops_of_muon(self, shape: tuple[int, int]) -> None:
        torch = pytest.importorskip("torch")
        from torch.utils.flop_counter import FlopCounterMode

        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        optimizer = torch.optim.Muon([parameter])
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert counter.get_total_flops() == newton_schulz_flops([Matrix(*shape)])
