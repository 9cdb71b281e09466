"""What a kernel's name says, what an op of a CPU does itself, and packed products beside those that run one by one."""

from __future__ import annotations

import pytest

from simpar.interop.kineto import communication, kernel_class
from simpar.interop.kineto_step import _own_time, kernel_kind
from simpar.live.trace_align import align_compute
from simpar.live.trace_slices import Slice


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "gemm"), ("triton_tem_fused_mm_3", "gemm"),
        ("triton_tem_fused_addmm_relu_7", "gemm"),
        ("triton_mm", "gemm"), ("triton_poi_fused_add_mul_2", "memory_bound"), ("triton_red_fused__to_copy_sum_1", "memory_bound"),
        ("triton_per_fused_rms_norm_0", "norm"), ("void compute_dot_do_o<Kernel_traits>", "attention"),
        ("triton_tem_fused_flex_attention_1", "attention"), ("void deep_ep::intranode::dispatch<8, 768>", "nccl"),
        ("one_shot_all_reduce_kernel", "nccl"), ("multimem_all_gather_kernel", "nccl"), ("nvshmemi_transfer_rma_nbi", "nccl"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", "nccl"), ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "nccl"),
        ("_permute_kernel", "permute"), ("void moe_align_block_size_kernel<int>", "permute"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Adam>", "optimizer"),
        ("void at::native::elementwise_kernel<128, 2>", "memory_bound"), ("Memcpy DtoD", "copy"),
    ],
)  # fmt: skip
def test_a_kernel_is_classed_by_its_name(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_communication_without_nccl_says_what_and_for_whom() -> None:
    assert communication("void deep_ep::internode::combine<4>") == ("all_to_all", "ep")
    assert communication("userbuffers_fp16_sum_inplace_gpu_rr_rs") == ("reduce_scatter", "tp")
    assert communication("userbuffers_fp16_sum_inplace_gpu_rr_ag") == ("all_gather", "tp")
    assert communication("two_shot_all_reduce_kernel_inplace") == ("all_reduce", "")
    assert communication("vectorized_elementwise_kernel") is None
    assert kernel_class("deep_ep::dispatch", "kernel", {}) == "nccl"


def test_parents_keep_the_time_that_they_compute() -> None:
    spans = [
        (0.0, 10.0, "aten::_fused_adamw_"), (1.0, 2.0, "aten::empty"), (4.0, 5.0, "aten::copy_"),
        (20.0, 30.0, "autograd::engine::evaluate_function: MmBackward"), (22.0, 27.0, "aten::mm"),
        (23.0, 26.0, "aten::resolve_conj"),
        (40.0, 50.0, "aten::linear"), (41.0, 48.0, "aten::addmm"),
    ]  # fmt: skip
    total: dict[str, float] = {}
    for begin, end, name in _own_time(list(spans)):
        total[name] = total.get(name, 0.0) + end - begin
    assert total == {
        "aten::_fused_adamw_": 8.0, "aten::empty": 1.0, "aten::copy_": 1.0, "aten::mm": 5.0, "aten::linear": 3.0,
        "aten::addmm": 7.0,
    }  # fmt: skip


def row(names: list[str], phase: str = "F", begin: float = 0.0) -> list[Slice]:
    """Products of a second each; "core" is attention."""
    kinds = ["attention" if "core" in name else "gemm" for name in names]
    return [
        Slice(begin + i, begin + i + 1, kind, n, "compute", phase) for i, (n, kind) in enumerate(zip(names, kinds, strict=True))
    ]


PACKED = ["attention/qkv", "attention/core", "attention/proj", "mlp/fc1", "mlp/fc2"]
APART = ["q", "k", "v", "core", "o", "gate", "up", "down"]


def test_packed_products_are_paired_with_those_that_run_apart() -> None:
    pairs, problem = align_compute(row(PACKED), row(APART))
    assert problem == ""
    assert [([s.name for s in p.predicted], [s.name for s in p.measured]) for p in pairs] == [
        (["attention/qkv"], ["q", "k", "v"]), (["attention/core"], ["core"]), (["attention/proj"], ["o"]),
        (["mlp/fc1"], ["gate", "up"]), (["mlp/fc2"], ["down"]),
    ]  # fmt: skip


def test_gradients_of_a_packed_product_go_together() -> None:
    backward = ["mlp/fc2.dgrad", "mlp/fc2.wgrad", "mlp/fc1.dgrad", "mlp/fc1.wgrad"]
    apart = ["down.d", "down.w", "up.d", "up.w", "gate.d", "gate.w"]
    pairs, problem = align_compute(row(backward, "B"), row(apart, "B"))
    assert problem == ""
    assert [len(p.measured) for p in pairs] == [1, 1, 4]
    assert [s.name for s in pairs[2].measured] == apart[2:]


def test_other_differences_stay_sums() -> None:
    pairs, problem = align_compute(row(PACKED[2:]), row(["o", "gate", "up", "down", "more"]))
    assert len(pairs) == 1
    assert "1 of 1 runs of matmuls differ in number" in problem
