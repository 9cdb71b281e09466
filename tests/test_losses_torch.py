"""What losses by pieces and compiled ones leave to their backward, against torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from simpar.specs.framework import framework
from simpar.specs.losses import loss_of
from simpar.specs.scenario import make_scenario
from simpar.step import prepare

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

HIDDEN, WORDS, TOKENS, PIECES = 256, 4096, 512, 8
SIZES = (float(TOKENS), float(WORDS), float(HIDDEN))


def _cross_entropy(logits: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


@pytest.mark.parametrize(("compiled", "held"), [(True, 2), (False, 4)])
def test_a_compiled_loss_keeps_its_16_bit_logits(compiled: bool, held: int) -> None:
    """By torch's own partitioner; eager it keeps the fp32 log-softmax."""
    loss = torch.compile(_cross_entropy, backend="aot_eager_decomp_partition") if compiled else _cross_entropy
    logits = torch.zeros(TOKENS, WORDS, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss(logits, torch.zeros(TOKENS, dtype=torch.long))
    found = {t.data_ptr(): t.nbytes for t in kept if t.numel() == logits.numel()}  # two ops keep the log-softmax
    assert sum(found.values()) == held * logits.numel()


@pytest.mark.parametrize(("name", "returned"), [("torch-autocast", True), ("plain", False)])
def test_logits_returned_beside_a_compiled_loss_have_zeros_for_a_gradient(name: str, returned: bool) -> None:
    """Autograd hands a compiled backward a tensor for every output that may have a gradient, as wide as the output: nanoGPT's
    model returns logits and loss, nanochat's its loss alone."""
    from torch._dynamo.backends.common import aot_autograd

    handed: list[tuple[torch.Size, Any]] = []

    def backward(graph: Any, inputs: Any) -> Any:
        handed.extend((t.shape, t.dtype) for t in inputs)
        return graph

    def model(hidden: Any, weight: Any) -> Any:
        logits = torch.nn.functional.linear(hidden, weight)
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.long))
        return (logits, loss) if returned else loss

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)
    hidden, weight = (torch.zeros(n, 8, requires_grad=True) for n in (TOKENS, WORDS))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(model, backend=backend)(hidden, weight)
    (found[1] if returned else found).backward()
    assert handed.count((torch.Size([TOKENS, WORDS]), torch.bfloat16)) == int(returned)
    loss = loss_of(framework(name, "2025-02"), "auto", compiled=True, tp=1, sizes=SIZES)
    assert loss.logit_bytes(2.0) == (6.0 if returned else 4.0)  # 16-bit logits, their gradient and the zeros


def _most_asked(step: Callable[[], None]) -> float:
    """Most bytes that `step` holds at once beside what was there, as the allocator counts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    asked = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return float(max(accumulate(asked)))


def test_a_loss_of_16_bit_logits_makes_no_fp32() -> None:
    """Logits, their log-softmax, its gradient and that of the logits, two bytes each."""
    logits = torch.zeros(TOKENS, WORDS, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        torch.nn.functional.cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.long)).backward()

    loss = loss_of(framework("torchtitan", "2026-04"), "half", compiled=True, tp=1, sizes=SIZES)
    assert _most_asked(step) + logits.nbytes == pytest.approx((2.0 + 4.0 * loss.fp32_copies) * logits.numel(), rel=0.01)


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2.0), ("float32", 4.0)])
@pytest.mark.parametrize(("name", "held"), [("plain", True), ("nemo-automodel", True), ("torchtitan", False)])
def test_logits_that_a_loop_holds_stand_beside_what_the_loss_makes_of_them(
    dtype: str, element: float, name: str, held: bool
) -> None:
    """Log-softmax, its gradient and that of the logits in fp32; the logits as wide as they are, unless they were given back."""
    hidden = torch.zeros(TOKENS, 8, dtype=getattr(torch, dtype), requires_grad=True)
    weight, loop = torch.zeros(WORDS, 8, dtype=hidden.dtype, requires_grad=True), {}

    def step() -> None:
        loop["logits"] = torch.nn.functional.linear(hidden, weight)
        loss = torch.nn.functional.cross_entropy(loop["logits"].float(), torch.zeros(TOKENS, dtype=torch.long))
        if not held:
            del loop["logits"]
        loss.backward()

    loss = loss_of(framework(name, "2025-02"), "unfused", compiled=False, tp=1, sizes=SIZES)
    assert _most_asked(step) == pytest.approx(loss.logit_bytes(element) * TOKENS * WORDS, rel=0.02)


def _worst_backward() -> float:
    """Most bytes that the backward of a loss by pieces over whole logits asks for, in 16 bits.

    It runs in fp32, twice as wide: a CPU without instructions for bf16 makes fp32 scratch of every 16-bit product.
    """

    class Compiled(torch.autograd.Function):  # type: ignore[misc, name-defined]
        """Keeps the logits and makes their gradient, as wide as they are."""

        @staticmethod
        def forward(ctx: Any, logits: Any) -> Any:
            ctx.save_for_backward(logits)
            return logits[0, 0] * 1.0

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return torch.zeros_like(ctx.saved_tensors[0])

    weight = torch.zeros(WORDS, HIDDEN, requires_grad=True)
    hidden = torch.zeros(TOKENS, HIDDEN)
    logits = [torch.nn.functional.linear(piece, weight) for piece in hidden.tensor_split(PIECES)]
    total = sum(Compiled.apply(piece) for piece in logits)
    del logits
    return _most_asked(total.backward) / 2.0


def test_pieces_of_whole_logits_add_up_the_gradient_of_the_head() -> None:
    """Torch goes through all losses, then through all products; the first two gradients of the head and their sum stand beside the
    logits' gradients of the other pieces."""
    logits, weight = 2.0 * TOKENS * WORDS, 2.0 * WORDS * HIDDEN
    most = logits * (1.0 - 2.0 / PIECES) + 3.0 * weight
    assert _worst_backward() == pytest.approx(most, rel=0.01)

    model = {
        "name": "small", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": WORDS,
    }  # fmt: skip
    training = {"sequence_length": TOKENS, "global_batch_size": 1, "compile": True, "cross_entropy": "chunked"}
    scenario = make_scenario(
        {
            "model": model, "framework": "torchtune", "framework_version": "2024-11", "plan": {"zero_stage": 0},
            "cluster": {"hardware": "dgx-h100", "num_nodes": 1, "num_gpus": 1}, "training": training,
        }
    )  # fmt: skip
    head = prepare(scenario).layout.stage_blocks[0][-1]
    saved = dict(head.saved)["head/logits"]
    assert saved == logits * (1.0 + 1.0 / PIECES)
    assert saved + head.transient == most + 2.0 * TOKENS * HIDDEN


@pytest.mark.slow
def test_megatrons_own_fused_loss_holds_one_fp32_tensor_and_the_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps between all-reduces compiled by torch: fp32 logits beside the 16-bit ones, turned into their softmax in place;
    with the forward the 16-bit logits go, the backward adds their gradient."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    @torch.compile
    def largest(logits: Any) -> Any:
        wide = logits.float()
        return wide, wide.max(-1)[0]

    @torch.compile
    def exponentials(wide: Any, targets: Any, most: Any) -> Any:
        wide -= most.unsqueeze(-1)
        own = wide[torch.arange(TOKENS), targets].clone()
        torch.exp(wide, out=wide)
        return own, wide.sum(-1), wide

    @torch.compile
    def normalised(wide: Any, own: Any, total: Any) -> Any:
        loss = torch.log(total) - own
        wide.div_(total.unsqueeze(-1))
        return wide, loss

    @torch.compile
    def gradients(softmax: Any, targets: Any, incoming: Any) -> Any:
        softmax[torch.arange(TOKENS), targets] -= 1.0
        softmax.mul_(incoming.unsqueeze(-1))
        return softmax.to(torch.bfloat16)

    def step() -> None:
        logits = torch.ones(TOKENS, WORDS, dtype=torch.bfloat16)
        wide, most = largest(logits)
        own, total, wide = exponentials(wide, targets, most)
        wide, _ = normalised(wide, own, total)
        del logits
        gradients(wide, targets, incoming)

    targets, incoming = torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS)
    with torch.no_grad():
        step()
        held = _most_asked(step) / (TOKENS * WORDS)
    native, engine = (
        loss_of(framework("megatron-bridge", v), "auto", compiled=False, tp=2, sizes=SIZES) for v in ("2025-09", "2025-11")
    )
    assert held == pytest.approx(2.0 + 4.0 * native.fp32_copies, rel=0.01)
    assert engine.fp32_copies == 0.0


@pytest.mark.parametrize(
    ("version", "kind", "compiled", "copies"),
    [
        ("2024-11", "chunked", True, 0.5 / 8),
        ("2024-11", "chunked", False, 1.0),
        ("2024-11", "unfused", True, 1.5),  # fp32 logits of the model and their fp32 gradient: 8 bytes
        ("2025-06", "chunked", True, 0.5 / 8),
    ],
)
def test_fp32_copies_of_torchtune(version: str, kind: str, compiled: bool, copies: float) -> None:
    found = loss_of(framework("torchtune", version), kind, compiled=compiled, tp=1, sizes=SIZES)
    assert (found.fp32_copies, found.chunks, found.pieces) == (copies, 1, 8 if kind == "chunked" else 1)


@pytest.mark.parametrize(
    ("version", "copies"), [("2024-10", 2.5), ("2024-11", 0.5), ("2024-12", 2.5), ("2025-03", 2.5), ("2025-04", 0.5)]
)
def test_when_torchtitan_compiled_its_loss(version: str, copies: float) -> None:
    """Commits e10cb9494 of 2024-10-22 (on), e8977b007 of 2024-12-18 (off), bbb1b616e of 2025-04-02 (on)."""
    assert loss_of(framework("torchtitan", version), "unfused", compiled=True, tp=1, sizes=SIZES).fp32_copies == copies


def test_a_model_of_own_layers_has_its_logits_in_as_many_pieces_as_another() -> None:
    """Gemma 4: 262,144 words over 2,816 are 94 times, 8,192 tokens so 88 a piece, 128 as a power of two: 64 pieces."""
    table = {
        "name": "pieces", "model": "gemma-4-26b-a4b", "framework": "transformers", "framework_version": "2026-06",
        "cluster": {"hardware": "dgx-b200", "num_nodes": 1}, "plan": {"zero_stage": 3, "recompute": "full"},
        "training": {"sequence_length": 8192, "global_batch_size": 8, "precision": "bf16", "cross_entropy": "linear"},
    }  # fmt: skip
    layout = prepare(make_scenario(table)).layout
    assert layout.kernels.loss.chunks == 64
    assert dict(layout.stage_blocks[0][-1].saved)["head/logits"] == pytest.approx(2.0 * 8192 * 262_144 / 64)
