"""Rows of diffusion transformers: read as the shipped model of their name; attention to both sides and to a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from simpar.evidence.row_layers import recompute_of
from simpar.evidence.run_rows import run_of
from simpar.parallel.work import AttentionWork
from simpar.specs.framework import framework
from simpar.specs.scenario import make_scenario
from simpar.step import prepare, simulate

WAN: dict[str, Any] = {
    "id": "wan", "source": "somewhere", "task": "pretrain", "model_name": "Wan 2.1 14B", "arch": "diffusion transformer (video)",
    "seq_len": 32768, "gpu": "H100", "n_gpus": 16, "gpus_per_node": 8, "framework": "Megatron-Bridge",
    "framework_version": "2026-02", "tp": 2, "sp": True, "pp": 1, "cp": 4, "dp": 2, "micro_batch": 1, "global_batch": 2,
    "precision": "bf16", "recompute": "none", "tflops_per_gpu": 325.0, "tflops_def": "model FLOP/s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("named", "arch", "model"),
    [
        ("Wan 2.1 14B", "diffusion transformer (video)", "wan-t2v-14b"), ("Wan2.1-T2V-14B", "DiT", "wan-t2v-14b"),
        ("FLUX.1-schnell", "mmdit", "flux-dev"), ("FLUX.1 [dev]", "diffusion", "flux-dev"),
        ("Stable Diffusion 3.5 Large", "diffusion transformer", "sd3.5-large"),
    ],
)  # fmt: skip
def test_a_diffusion_transformer_is_the_shipped_one_of_its_name(named: str, arch: str, model: str) -> None:
    run = run_of({**WAN, "model_name": named, "arch": arch})
    assert run.scenario is not None, run.skipped
    assert run.scenario.model.name == model
    assert any(note == f"layers that are not alike: those of {model}" for note in run.assumptions)


def test_one_that_is_not_shipped_has_a_reason() -> None:
    for named in ("Wan 2.1 1.3B", "PixArt"):
        assert "not a transformer of text" in run_of({**WAN, "model_name": named}).skipped


def test_a_rate_of_flops_counts_all_pairs_once() -> None:
    """Attention to both sides has no half to add, whatever the row says of the mask."""
    seconds = [run_of({**WAN, "tflops_def": words}).measured.step_time_s for words in ("model FLOP/s", "non-causal", "hardware")]
    linear = 40 * (4 * 5120**2 + 2 * 5120**2 + 2 * 5120 * 13824) + 5120 * (64 + 64)
    attention = 40 * 2 * 32768 * 5120 * (32768 + 512)
    assert seconds == pytest.approx([2 * (6 * linear * 32768 + 3 * 2 * attention) / 16 / 325e12] * 3, rel=0.002)


def attention_flops(model: str, cp: int, style: str) -> float:
    """Score and value FLOPs of one rank's forward of all layers, by its attention ops."""
    plan, training = {"tp": 2, "cp": cp, "dp": 8 // cp, "cp_style": style}, {"sequence_length": 8192, "global_batch_size": 8}
    cluster = {"hardware": "dgx-h100", "num_nodes": 2}
    layout = prepare(make_scenario({"name": "m", "model": model, "cluster": cluster, "plan": plan, "training": training})).layout
    work = [op.work for block in layout.stage_blocks[0] for op in block.forward if isinstance(op.work, AttentionWork)]
    return sum(2.0 * w.batch * w.heads * w.sequence_q * w.sequence_kv * (w.head_dim + w.v_head_dim) for w in work)


@pytest.mark.parametrize("style", ["ring", "all_gather"])
@pytest.mark.parametrize("model", ["wan-t2v-14b", "modernbert-base"])
def test_ranks_that_split_the_sequence_split_the_pairs(model: str, style: str) -> None:
    """Of queries and a prompt's keys, which every rank has; of a window to both sides."""
    assert attention_flops(model, 4, style) == pytest.approx(attention_flops(model, 1, style) / 4, rel=0.01)


def test_a_prompt_has_its_own_number_of_keys() -> None:
    assert attention_flops("wan-t2v-14b", 1, "ring") == pytest.approx(40 * 4.0 * 8192 * (8192 + 512) * 2560)


def saved_bytes(modulated: bool) -> float:
    """What one feed-forward of a diffusion transformer keeps of a sample, beside the vectors of the sample."""
    step = {"branches": [{"kind": "mlp", "width": 512, "gated": False, "activation": "gelu"}], "modulated": modulated}
    stack = {
        "hidden_size": 128,
        "layers": {"a": {"sublayers": [step]}},
        "pattern": ["a"],
        "norm": "unweighted",
        "final_norm": False,
    }
    given = {
        "name": "m", "model": {"kind": "layers", "name": "m", "head": False, "stacks": [stack]}, "framework": "plain",
        "cluster": {"hardware": "rtx-4090", "num_nodes": 1, "num_gpus": 1}, "plan": {},
        "training": {"sequence_length": 64, "global_batch_size": 1, "pure_bf16": True},
    }  # fmt: skip
    return prepare(make_scenario(given)).layout.stage_blocks[0][1].saved_bytes


def test_modulation_keeps_what_torch_keeps() -> None:
    """y = norm(x); x + gate * f(y * (1 + scale) + shift): y and f's result, which the vectors' gradients read."""
    torch = pytest.importorskip("torch")

    def kept(modulated: bool) -> int:
        x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
        scale, shift, gate = (torch.randn(128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        up, down = (torch.nn.Linear(a, b, bias=False, dtype=torch.bfloat16) for a, b in ((128, 512), (512, 128)))
        found: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            if tensor.dim() == 2 and tensor.shape[0] == 64 and tensor.shape[1] > 1:
                found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            held.append(tensor)
            return tensor

        held: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = torch.nn.functional.layer_norm(x, (128,))
            z = down(torch.nn.functional.gelu(up(y * (1 + scale) + shift if modulated else y)))
            _ = x + (gate * z if modulated else z)
        return sum(found.values())

    assert kept(True) - kept(False) == saved_bytes(True) - saved_bytes(False) == 2 * 64 * 128 * 2


def test_the_non_causal_convention_adds_what_a_causal_mask_leaves_out() -> None:
    def result(model: str) -> Any:
        training = {"sequence_length": 8192, "global_batch_size": 8}
        cluster = {"hardware": "dgx-h100", "num_nodes": 1}
        given = {"name": "m", "model": model, "cluster": cluster, "plan": {"tp": 8}, "training": training}
        return simulate(make_scenario(given), detail="stage")

    wan, llama = result("wan-t2v-14b"), result("llama3.1-8b")
    assert wan.mfu_non_causal == wan.mfu
    layout = llama.layout
    assert llama.mfu_non_causal / llama.mfu == pytest.approx(1.0 + layout.attention_model_flops / layout.model_flops)


def test_a_share_of_the_blocks_is_one_of_the_layers() -> None:
    row = {"recompute": "full", "recompute_detail": "25 % of the blocks", "layers": 56, "pp": 1}
    found = recompute_of(row, framework("torchtitan"), [])
    assert found == {"granularity": "full", "method": "block", "num_layers": 14}
