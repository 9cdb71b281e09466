"""Which constants price a GPU, what provenance says, and how one measurement changes it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from simpar import simulate
from simpar.costs.compute import GemmShapes, gemm_seconds
from simpar.costs.kernel_choice import FITTED_ON, band_at, fitted, resolve, widened
from simpar.costs.kernels import KernelModel
from simpar.costs.price import Provenance
from simpar.errors import InputError
from simpar.parallel.local_layer import sdpa_kernel
from simpar.parallel.work import AttentionWork, Gemm
from simpar.specs.base import data_dir, read_toml, validate
from simpar.specs.framework import framework
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.kernel_constants import Band, KernelConstants, MeasuredPoint
from simpar.specs.scenario import make_scenario
from simpar.step import prepare
from validation.tools.fit_kernels import dump


def without(name: str) -> HardwareProfile:
    """The profile with no kernel constants."""
    return load_hardware(name).model_copy(update={"kernels": KernelConstants()})


@pytest.mark.parametrize("name", sorted(FITTED_ON))
def test_fitted_files_state_their_error(name: str) -> None:
    c = fitted(name)
    assert c.gpu
    for g in c.gemm:
        assert g.fit.rows >= 100
        assert 0 < g.fit.median < 0.08
        assert g.bands
        assert g.derived or g.fit.held_out_median <= 1.3 * g.fit.median + 0.002
    assert {g.mode for g in c.gemm} == {"sustained", "burst"}


@pytest.mark.parametrize("name", sorted(FITTED_ON))
def test_files_survive_writing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(dump(fitted(name)))
    assert path.read_text() == (data_dir("hardware_profiles") / "fitted" / f"{name}.kernels.toml").read_text()
    assert validate(KernelConstants, read_toml(path)) == fitted(name)


def test_own_constants_are_a_model_and_others_scaled() -> None:
    own, bare = KernelModel(load_hardware("dgx-h200")), KernelModel(without("dgx-h200"))
    a, b = own.gemm(Gemm(8192, 8192, 8192)), bare.gemm(Gemm(8192, 8192, 8192))
    assert a.provenance is Provenance.MODEL
    assert b.provenance is Provenance.SCALED
    assert b.high / b.low > 1.2 * a.high / a.low
    assert b.seconds == pytest.approx(a.seconds, rel=0.1)


@pytest.mark.parametrize(("name", "limit"), [("dgx-b200", 0.35), ("dgx-a100-80gb", 0.25), ("gb200-nvl72", 0.35)])
def test_interval_of_an_unknown_gpu_reaches_the_fitted_price(name: str, limit: float) -> None:
    """Scaled from peaks only, most big products stay inside the wider interval."""
    own, bare = KernelModel(load_hardware(name)), KernelModel(without(name))
    shapes = [(m, n, k) for m in (4096, 8192) for n in (4096, 14336) for k in (4096, 8192)]
    inside = [bare.gemm(Gemm(*s)).low <= own.gemm(Gemm(*s)).seconds <= bare.gemm(Gemm(*s)).high for s in shapes]
    error = [abs(bare.gemm(Gemm(*s)).seconds / own.gemm(Gemm(*s)).seconds - 1) for s in shapes]
    assert np.median(error) < limit
    assert sum(inside) >= 0.6 * len(shapes)


def test_a_measured_shape_wins() -> None:
    point = MeasuredPoint(op="gemm", shape=(512, 1024, 2048), seconds=1e-3)
    kernels = load_hardware("dgx-h100").kernels.model_copy(update={"points": (point,)})
    model = KernelModel(load_hardware("dgx-h100").model_copy(update={"kernels": kernels}))
    price = model.gemm(Gemm(512, 1024, 2048))
    assert (price.seconds, price.provenance) == (1e-3, Provenance.MEASURED)
    assert model.gemm(Gemm(512, 1024, 4096)).provenance is Provenance.MODEL


def test_library_choice() -> None:
    hardware = load_hardware("dgx-h100")
    deep = KernelModel(hardware, library="deepgemm_block_incl_quant")
    c, _ = deep.gemm_set("fp8_block")
    assert c.schedule == "min_waves_sm90"
    assert deep.gemm_set("bf16")[0].dtype == "bf16"


def test_base_and_scale() -> None:
    pcie, sxm = KernelModel(load_hardware("a100-pcie")), KernelModel(load_hardware("dgx-a100-80gb"))
    ratio = pcie.gemm(Gemm(8192, 8192, 8192)).seconds / sxm.gemm(Gemm(8192, 8192, 8192)).seconds
    assert ratio == pytest.approx(1 / 0.924, rel=0.02)
    assert pcie.resolved.spread > sxm.resolved.spread == 0


@pytest.mark.parametrize(
    ("name", "tera", "fp32"),
    [
        ("rtx-5090", 237.0, 67.5), ("rtx-pro-6000", 413.0, 77.1), ("rtx-a6000", 123.3, 23.9), ("a40", 122.3, None),
        ("l4", 58.0, None), ("t4", 42.0, 4.35), ("dgx1-v100-16gb", 94.8, 14.06), ("l40s", 269.2, 46.9), ("rtx-3090", 76.5, 24.7),
        ("rtx-4090", 165.0, 54.5), ("a10", 56.0, 14.0), ("a10g", 66.6, 23.2), ("h100-pcie", 495.9, 37.0),
        ("rtx-6000-ada", None, 35.3),
    ],
)  # fmt: skip
def test_cards_reach_what_torch_s_largest_products_do(name: str, tera: float | None, fp32: float | None) -> None:
    """zzc0721/torch-performance-test-data and chsasank/device-benchmarks: the best of their 16-bit products, most of them of 8,192
    to 16,384 rows, and of those in fp32, outside tensor cores. An H100's constants are those of its power limit: its cards are as
    far behind it as there."""
    model = KernelModel(load_hardware(name))
    size = 16384
    beside = 790.6e12 * KernelModel(load_hardware("dgx-h100")).gemm(Gemm(size, size, size)).seconds / (2 * size**3)
    for dtype, measured in (("fp16", tera), ("fp32", fp32)):
        if measured is not None:
            rate = 2 * size**3 / model.gemm(Gemm(size, size, size, dtype)).seconds
            assert rate * (beside if name == "h100-pcie" else 1.0) == pytest.approx(measured * 1e12, rel=0.08), dtype


def test_fp32_outside_tensor_cores_goes_by_what_was_measured() -> None:
    """By peaks an RTX 4090 would reach half of its bf16 rate in fp32: it reaches a third. A T4 has no TF32: it runs fp32."""
    profile = load_hardware("rtx-4090")
    without_it = profile.model_copy(update={"kernels": profile.kernels.model_copy(update={"fp32_over_bf16": None})})
    work = {dtype: Gemm(8192, 8192, 8192, dtype) for dtype in ("bf16", "tf32", "fp32")}
    known, by_peaks, t4 = (KernelModel(p) for p in (profile, without_it, load_hardware("t4")))
    assert known.gemm(work["fp32"]).seconds / by_peaks.gemm(work["fp32"]).seconds == pytest.approx(0.5 / 0.33, rel=0.02)
    assert known.gemm(work["tf32"]).seconds == by_peaks.gemm(work["tf32"]).seconds
    assert t4.gemm(work["tf32"]).seconds == pytest.approx(t4.gemm(work["fp32"]).seconds)


def test_what_a_profile_measured_beside_its_base_is_not_called_scaled() -> None:
    """As a calibration writes it: products of its own, everything else from the base."""
    profile = load_hardware("a100-pcie")
    own = fitted("a100").gemm
    kernels = profile.kernels.model_copy(update={"gemm": own})
    based, mine = KernelModel(profile), KernelModel(profile.model_copy(update={"kernels": kernels}))
    a, b = based.gemm(Gemm(8192, 8192, 8192)), mine.gemm(Gemm(8192, 8192, 8192))
    assert (a.provenance, b.provenance) == (Provenance.SCALED, Provenance.MODEL)
    assert b.high / b.low < a.high / a.low
    assert mine.memory_bound("norm", 1e9).provenance is Provenance.SCALED


def test_attention_scales_apart_from_products() -> None:
    def seconds(name: str, direction: str) -> float:
        work = AttentionWork(2, 8192, 8192, 64, 8, 128, 128, backward=direction == "backward", kernel="cudnn")
        return KernelModel(load_hardware(name)).attention(work).seconds

    base, sibling = "gb200-nvl72", "gb300-nvl72"
    assert seconds(base, "forward") / seconds(sibling, "forward") == pytest.approx(1.17, rel=0.01)
    assert seconds(base, "backward") / seconds(sibling, "backward") == pytest.approx(1.10, rel=0.01)
    products = [KernelModel(load_hardware(name)).gemm(Gemm(8192, 8192, 8192)).seconds for name in (base, sibling)]
    assert products[0] / products[1] == pytest.approx(load_hardware(sibling).kernels.compute_scale, rel=0.02)


def test_unknown_base_is_an_input_error() -> None:
    hardware = load_hardware("dgx-h100").model_copy(update={"kernels": KernelConstants(base="h999")})
    with pytest.raises(InputError, match="h100"):
        resolve(hardware)


def test_bands_by_size_and_widening() -> None:
    bands = (Band(from_size=0, low=0.8, high=1.3), Band(from_size=1e12, low=0.95, high=1.05))
    assert band_at(bands, 1e11, 0.0) == (0.8, 1.3)
    assert band_at(bands, 1e13, 0.0) == (0.95, 1.05)
    wide = widened(bands[1], 0.2)
    assert wide.low == pytest.approx(math.exp(-math.hypot(math.log(0.95), 0.2)))


def test_prices_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    c = fitted("h100").gemm[0]
    rng = np.random.default_rng(1)
    m, n, k = (rng.integers(64, 9000, 300).astype(float) for _ in range(3))
    whole = gemm_seconds(c, 132.0, GemmShapes(m, n, k))
    monkeypatch.setattr("simpar.costs.compute.CHUNK", 7)
    assert np.array_equal(whole, gemm_seconds(c, 132.0, GemmShapes(m, n, k)))


def test_torch_runs_cudnn_of_its_release_on_blackwell() -> None:
    """torch 2.11 of March 2026 comes with cuDNN 9.19, 2.10 with 9.10; where nobody measured the new one the old prices stay."""
    for name in ("deepspeed", "transformers", "torchtitan"):
        before, after = (framework(name, month).kernels for month in ("2026-02", "2026-03"))
        assert before.attention_kernel("blackwell") == "cudnn"
        assert after.attention_kernel("blackwell") == "cudnn9.19"
        assert after.attention_kernel("hopper") == before.attention_kernel("hopper")
    seconds = {}
    for hardware in ("dgx-b200", "gb200-nvl72"):
        for kernel in ("cudnn", "cudnn9.19"):
            for direction in ("forward", "backward"):
                work = AttentionWork(1, 131072, 131072, 32, 8, 128, 128, backward=direction == "backward", kernel=kernel)
                seconds[hardware, kernel, direction] = KernelModel(load_hardware(hardware)).attention(work).seconds
    for direction, gain in (("forward", 1.08), ("backward", 1.15)):
        assert seconds["dgx-b200", "cudnn", direction] > gain * seconds["dgx-b200", "cudnn9.19", direction]
        assert seconds["gb200-nvl72", "cudnn", direction] == seconds["gb200-nvl72", "cudnn9.19", direction]


def test_a_mask_that_is_a_tensor_takes_torch_s_memory_efficient_kernel() -> None:
    """1,343 us against 715 of FlashAttention-2, A100, 72 heads of 128, 2,048 tokens (xformers issue 924); no pair is left out."""

    def seconds(hardware: str, kernel: str, *, causal: bool, window: int | None = None) -> float:
        work = AttentionWork(1, 8192, 8192, 32, 8, 128, 128, causal, kernel=kernel, window=window)
        return KernelModel(load_hardware(hardware)).attention(work).seconds

    for hardware in ("dgx-a100-80gb", "dgx-h100", "rtx-pro-6000"):
        masked = seconds(hardware, "efficient", causal=True)
        assert masked == seconds(hardware, "efficient", causal=False) == seconds(hardware, "efficient", causal=True, window=1024)
        assert masked / seconds(hardware, "fa2", causal=False) == pytest.approx(1343 / 715, rel=0.05)
        assert masked > 3.0 * seconds(hardware, "fa2", causal=True)


@pytest.mark.parametrize(
    ("first", "head_dim", "masked", "runs"),
    [
        ("cudnn", 128, True, "cudnn"),  # takes masks, no heads above 128
        ("cudnn9.19", 256, False, "fa2"),
        ("cudnn9.19", 256, True, "efficient"),
        ("fa2", 128, True, "efficient"),  # takes no mask, no heads above 256
        ("fa2", 512, False, "efficient-causal"),
        ("fa2", 256, False, "fa2"),
    ],
)
def test_torch_s_sdpa_runs_the_first_kernel_that_takes_heads_and_mask(
    first: str, head_dim: int, runs: str, *, masked: bool
) -> None:
    assert sdpa_kernel(first, head_dim, masked=masked) == runs


def test_a_window_comes_to_torch_s_sdpa_as_a_mask() -> None:
    """Gemma 3's windows of 512 under transformers: at 8,192 tokens their mask is a tensor, at 256 there is none to see."""

    def kernels(sequence_length: int, attention_kernel: str = "auto") -> set[tuple[str, bool]]:
        table = {
            "model": "gemma3-1b", "framework": "transformers", "framework_version": "2025-10",
            "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1, "num_gpus": 1},
            "training": {"sequence_length": sequence_length, "global_batch_size": 1, "attention_kernel": attention_kernel},
        }  # fmt: skip
        blocks = prepare(make_scenario(table)).layout.stage_blocks[0]
        works = (op.work for block in blocks for op in block.forward)
        return {(work.kernel, work.causal) for work in works if isinstance(work, AttentionWork)}

    assert kernels(256) == {("fa2", True)}
    assert kernels(8192) == {("fa2", True), ("efficient", False)}
    assert kernels(8192, "fa2") == {("fa2", True)}


def test_the_memory_efficient_kernel_without_a_mask_is_as_far_behind_flash_attention() -> None:
    model = KernelModel(load_hardware("dgx-a100-80gb"))
    efficient, flash = (
        model.attention(AttentionWork(1, 8192, 8192, 32, 8, 128, 128, causal=True, kernel=kernel)).seconds
        for kernel in ("efficient-causal", "fa2")
    )
    assert efficient / flash == pytest.approx(1.85)


@pytest.mark.parametrize(
    ("kernel", "tokens", "head_dim", "kv_heads", "window", "measured_ms"),
    [
        ("efficient", 2048, 256, 8, 1024, 4.65), ("efficient", 8192, 256, 8, 1024, 61.8), ("efficient", 32768, 256, 8, 1024, 941.0),
        ("efficient-causal", 2048, 512, 2, None, 6.53), ("efficient-causal", 4096, 512, 2, None, 19.7),
        ("fa2", 2048, 256, 8, 1024, 0.78), ("fa2", 8192, 256, 8, 1024, 1.74), ("fa2", 32768, 256, 8, 1024, 6.98),
    ],
)  # fmt: skip
def test_attention_with_wide_heads_on_a_b300(
    kernel: str, tokens: int, head_dim: int, kv_heads: int, window: int | None, measured_ms: float
) -> None:
    """Forward and backward of 16 heads (whitecircle/halo agent-docs/models/gemma4.md and tests/gpu/profiling, 2026-10)."""
    model = KernelModel(load_hardware("dgx-b300"))
    work = AttentionWork(1, tokens, tokens, 16, kv_heads, head_dim, head_dim, kernel=kernel, window=window)
    found = sum(model.attention(work._replace(backward=backward)).seconds for backward in (False, True))
    assert found * 1e3 == pytest.approx(measured_ms, rel=0.2 if tokens > 2048 else 0.5)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "measured_us"), [(2, 8192, 8, 15580), (2, 4096, 8, 4017), (8, 2048, 20, 10063)]
)
def test_the_memory_efficient_kernel_s_backward_on_an_a100(batch: int, length: int, heads: int, measured_us: float) -> None:
    """Heads of 128, no mask (NVIDIA/cutlass PR 992)."""
    work = AttentionWork(batch, length, length, heads, heads, 128, 128, causal=False, backward=True, kernel="efficient")
    assert KernelModel(load_hardware("dgx-a100-80gb")).attention(work).seconds * 1e6 == pytest.approx(measured_us, rel=0.05)


def test_the_memory_efficient_kernel_s_backward_runs_small_tiles_where_shared_memory_is_small() -> None:
    """RTX 3090, 16 heads of 128: 12.4 TFLOP/s of the backward at 1,024 tokens (flash-attention issue 416)."""
    work = AttentionWork(16, 1024, 1024, 16, 16, 128, 128, causal=False, backward=True, kernel="efficient")
    flops = 10.0 * 16 * 16 * 1024 * 1024 * 128
    assert flops / KernelModel(load_hardware("rtx-3090")).attention(work).seconds == pytest.approx(12.4e12, rel=0.05)
    behind = {}
    for hardware in ("dgx-h100", "l40s", "rtx-pro-6000"):
        model = KernelModel(load_hardware(hardware))
        for size in (64, 128):
            both = [
                model.attention(work._replace(kernel=kernel, head_dim=size, v_head_dim=size)).seconds
                for kernel in ("efficient", "fa2")
            ]
            behind[hardware, size] = pytest.approx(both[0] / both[1])
    assert behind["l40s", 128] == behind["rtx-pro-6000", 128] == 3.5
    assert behind["dgx-h100", 128] == behind["dgx-h100", 64] == behind["l40s", 64] == 2.15


def test_products_of_b300_follow_its_power() -> None:
    """1,100 against 1,000 W; GB300 over GB200, 1,400 against 1,200 W: 1.22."""
    power = math.log(1.22) / math.log(1400 / 1200)
    scale = load_hardware("dgx-b300").kernels.compute_scale
    assert scale == pytest.approx((1100 / 1000) ** power, abs=0.01)


def test_a_mask_that_is_a_tensor_does_not_know_documents() -> None:
    def step_s(kernel: str, **more: object) -> float:
        training = {"sequence_length": 4096, "global_batch_size": 1, "attention_kernel": kernel, **more}
        table = {
            "model": "qwen3-0.6b",
            "framework": "transformers",
            "cluster": {"hardware": "dgx-a100-80gb", "num_nodes": 1, "num_gpus": 1},
        }
        return simulate(make_scenario({**table, "training": training})).step_time_s

    assert (
        step_s("efficient") == step_s("efficient", document_lengths=(512,)) > step_s("fa2") > step_s("fa2", document_lengths=(512,))
    )


def test_flex_attention_is_behind_the_kernels_of_its_generation() -> None:
    """PyTorch's blog on FlexAttention's FlashAttention-4 backend: 1.6 to 3.2 forward, 1.85 to 2.3 backward on Blackwell."""

    def seconds(hardware: str, kernel: str, *, backward: bool) -> float:
        work = AttentionWork(1, 8192, 8192, 32, 8, 128, 128, backward=backward, kernel=kernel)
        return KernelModel(load_hardware(hardware)).attention(work).seconds

    for backward, (low, high) in ((False, (1.6, 3.2)), (True, (1.85, 2.3))):
        assert low < seconds("dgx-b200", "flex", backward=backward) / seconds("dgx-b200", "fa4", backward=backward) < high
        for hardware in ("dgx-a100-80gb", "rtx-4090"):
            assert seconds(hardware, "flex", backward=backward) == seconds(hardware, "fa2", backward=backward)
    assert framework("torchtitan", "2026-05").kernels.attention_kernel("blackwell") == "cudnn9.19"
    assert framework("torchtitan", "2026-06").kernels.attention_kernel("blackwell") == "flex"


def test_unfused_attention_multiplies_and_keeps_scores_in_its_own_type() -> None:
    """On a V100 fp32 runs at 0.148 of the rate of tensor cores, and what a tile takes beside its products, 84.8 elements of k at
    theirs, are 12.55 at its. Scores of 4 bytes: a mask and a softmax, each read and written, are 16."""
    model = KernelModel(load_hardware("dgx1-v100-16gb"))
    overheads = [model.gemm_set(dtype)[0].k_overhead for dtype in ("bf16", "fp32")]
    assert overheads == pytest.approx([84.822, 12.554], rel=1e-3)
    scores = 96 * 512 * 512
    for dtype, each, launches in (("fp32", 16.0, 2), ("bf16", 16.0, 3)):
        products = [model.gemm(Gemm(512, n, k, dtype), 96).seconds for n, k in ((512, 64), (64, 512))]
        passes = model.memory_bound("softmax", each * scores, implementation="eager", launches=launches).seconds
        work = AttentionWork(8, 512, 512, 12, 12, 64, 64, kernel="eager", dtype=dtype)
        assert model.attention(work).seconds == pytest.approx(sum(products) + passes)
    backward = AttentionWork(8, 512, 512, 12, 12, 64, 64, backward=True, kernel="eager", dtype="fp32")
    products = [2.0 * model.gemm(Gemm(512, n, k, "fp32"), 96).seconds for n, k in ((512, 64), (64, 512))]
    passes = model.memory_bound("softmax", 12.0 * scores, implementation="eager").seconds
    assert model.attention(backward).seconds == pytest.approx(sum(products) + passes)


@pytest.mark.parametrize(("precision", "slower"), [("fp16", True), ("fp32", False)])
def test_torchs_math_backend_multiplies_in_fp32_since_2_5(precision: str, slower: bool) -> None:
    def seconds(version: str) -> float:
        model = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512}  # fmt: skip
        return simulate(make_scenario({
            "model": model, "framework": "plain", "framework_version": version,
            "cluster": {"hardware": "dgx1-v100-16gb", "num_nodes": 1, "num_gpus": 1},
            "training": {"sequence_length": 2048, "global_batch_size": 1, "precision": precision, "attention_kernel": "unfused"},
        })).step_time_s  # fmt: skip

    assert seconds("2024-10") == pytest.approx(seconds("2024-09")) if not slower else seconds("2024-10") > 1.1 * seconds("2024-09")
