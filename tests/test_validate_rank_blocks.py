"""Single blocks, eager, compiled and in fp8: one list of kernels, priced, calibrated and run; prices frozen and compared."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_validate_rank_shapes import key_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("the torch extra is not installed", allow_module_level=True)

from simpar.errors import InputError
from simpar.interop.kineto_step import kernel_kind
from simpar.live.bench_shapes import cases
from simpar.live.block_predict import PricedBlock, block_shapes, compare_blocks, predictions
from simpar.live.block_sizes import BLOCKS, PARTS, STYLES, key_of_block
from simpar.live.gpu_blocks import products_of_block
from simpar.live.rank_command import RankOptions, run
from simpar.live.rank_frozen import freeze, read_frozen, read_frozen_blocks
from simpar.report.rank_view import rank_page, rank_report

pytestmark = pytest.mark.torch
GPU = "dgx-h200"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", BLOCKS)
def test_priced_calibrated_and_executed_are_one_list(name: str, style: str) -> None:
    block = PricedBlock(name, style, GPU)
    calibrated = {key for shape in block.shapes() if (key := key_of(shape))}
    for part in PARTS:
        run_by_torch = {tuple(key): calls for *key, calls in products_of_block(name, style, backward=part == "step")}
        if "linear" in BLOCKS[name]:
            # Linear attention is one priced kernel; torch runs products of a chunk's size for it.
            heads = BLOCKS[name]["heads"] * BLOCKS[name]["s"] // 64
            run_by_torch = {key: calls for key, calls in run_by_torch.items() if key[:2] != ("grouped_gemm", heads)}
        priced = block.products(part)
        assert run_by_torch == priced
        assert set(priced) <= calibrated
    assert calibrated == set(block.products("step"))


def test_products_are_calibrated_in_the_format_in_which_they_run() -> None:
    formats = {
        style: {s["dtype"] for s in PricedBlock("experts 2560", style, GPU).shapes() if s["op"] == "gemm"} for style in STYLES
    }
    # The router stays in 16 bits.
    assert formats == {"eager": {"bf16"}, "compiled": {"bf16"}, "fp8": {"bf16", "fp8"}, "fp8_row": {"bf16", "fp8_row"}}
    assert {s["dtype"] for s in block_shapes(GPU) if s["op"] == "grouped_gemm"} == {"bf16"}


def test_every_shape_of_a_block_is_one_that_calibrate_runs() -> None:
    shapes = block_shapes(GPU)
    assert {s["op"] for s in shapes} == {"gemm", "grouped_gemm", "attention", "memory"}
    assert {s["dims"].get("compiled", 0) for s in shapes if s["op"] == "memory"} == {0, 1}
    kinds = {tuple(s.get(k) for k in ("op", "kernel", "dtype", "direction")): s for s in shapes}
    for case in cases(list(kinds.values()), "cpu", small=True):
        case.build()()


@pytest.mark.parametrize("name", BLOCKS)
def test_compiling_fuses_and_fp8_multiplies_faster(name: str) -> None:
    seconds = {style: PricedBlock(name, style, GPU).seconds("step") for style in STYLES}
    assert seconds["compiled"] < seconds["eager"]
    assert seconds["fp8"] < seconds["compiled"]
    assert PricedBlock(name, "eager", GPU).seconds("forward") < seconds["eager"]


def test_blocks_are_frozen_and_compared_with_what_was_frozen(tmp_path: Path) -> None:
    frozen, store = tmp_path / "p.json", tmp_path / "blocks.jsonl"
    said = predictions(GPU)
    assert set(said) == {key_of_block(n, s, p) for n in BLOCKS for s in STYLES for p in PARTS}
    sha256 = freeze([], frozen, said)
    assert read_frozen(frozen) == ({}, sha256)
    assert read_frozen_blocks(frozen)[0] == pytest.approx(said)
    lines: list[dict[str, Any]] = [{"key": key, "kind": "probe", "seconds": 1.05 * time_s} for key, time_s in said.items()]
    lines += [{"key": "machine", "kind": "machine", "device": "a made up GPU"}, {"key": "block/x", "failed": "no memory"}]
    store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(RankOptions(measured=store, predictions=frozen), kernel_kind)
    assert not isinstance(report, str)
    assert report.exit_code == 0
    assert len(report.rows) == len(said)
    assert [row.error for row in report.rows] == pytest.approx([-1 / 21] * len(said))
    assert sha256 in report.notes[0]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rank_report(report))
    assert "single block: dense 3072/compiled/step" in console.export_text()
    assert "dense 3072/compiled/step" in rank_page(report)
    assert not all(row.within for row in compare_blocks(lines, {key: 1.3 * value for key, value in said.items()}))
    with pytest.raises(InputError, match="give --predictions or --hardware"):
        run(RankOptions(measured=store), kernel_kind)
