"""Dropout inside fused attention: random numbers of every score, drawn beside nothing else."""

from __future__ import annotations

import json
from typing import Final

import pytest

from simpar.costs.kernel_attention import DROPOUT_INTEGERS
from simpar.costs.kernels import KernelModel
from simpar.parallel.work import AttentionWork
from simpar.specs.base import data_dir
from simpar.specs.hardware import load_hardware

PARTS: Final = ("forward", "both")


@pytest.mark.parametrize(
    ("kernel", "backward", "integers"), [("cudnn", False, 13.3), ("cudnn", True, 7.2), ("fa2", False, 5.4), ("fa3", True, 7.3)]
)
def test_scores_inside_the_mask_cost_integer_instructions(kernel: str, backward: bool, integers: float) -> None:
    """2 x 32 heads of 4,096 x 4,096 / 2 scores over 132 SMs of 64 lanes at 1.755 GHz."""
    model = KernelModel(load_hardware("dgx-h100"))
    work = AttentionWork(2, 4096, 4096, 32, 32, 128, 128, backward=backward, kernel=kernel)
    more = model.attention(work._replace(dropout=True)).seconds - model.attention(work).seconds
    assert more == pytest.approx(2 * 32 * 4096**2 / 2 * integers / (132 * 64 * 1.755e9))


def test_it_is_near_what_an_h100_measured() -> None:
    """cuDNN 9.19, batch 1, 32 heads of 128, 8,192 tokens: 1.027 ms without and 1.959 ms with dropout."""
    model = KernelModel(load_hardware("dgx-h100"))
    work = AttentionWork(1, 8192, 8192, 32, 32, 128, 128, kernel="cudnn")
    more = model.attention(work._replace(dropout=True)).seconds - model.attention(work).seconds
    assert more == pytest.approx(0.93e-3, rel=0.1)


def test_its_instructions_are_those_of_the_measured_shapes() -> None:
    """All five shapes of host.jsonl together: seconds that dropout adds, over scores, on 132 SMs."""
    lines = (data_dir("validation") / "measured" / "h100-2026-11" / "host.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    seconds = {tuple(r["case"].split()[1:]): r["seconds"] for r in found if r["case"].startswith("attention ") and "seconds" in r}
    for backend, kernel in (("FLASH_ATTENTION", "flash"), ("CUDNN_ATTENTION", "cudnn")):
        scores = added = both = 0.0
        for name, *sizes, causal, dropout, part in seconds:
            if (name, dropout, part) == (backend, "p=0.1", "forward"):
                batch, heads, tokens, _ = (int(size[1:]) for size in sizes)
                scores += batch * heads * tokens**2 / (2 if causal == "causal=True" else 1)
                more = [seconds[name, *sizes, causal, "p=0.1", p] - seconds[name, *sizes, causal, "p=0.0", p] for p in PARTS]
                added, both = added + more[0], both + more[1]
        rate = 132 * 64 * 1.755e9 / scores
        assert DROPOUT_INTEGERS[kernel] == pytest.approx((added * rate, (both - added) * rate), abs=0.06)


def test_unfused_attention_has_its_dropout_in_the_passes_over_the_scores() -> None:
    """Those are counted with it."""
    model = KernelModel(load_hardware("dgx-a100-80gb"))
    work = AttentionWork(1, 2048, 2048, 16, 16, 128, 128, kernel="unfused")
    assert model.attention(work._replace(dropout=True)).seconds == model.attention(work).seconds
