"""Seconds of the optimizer's update on one pipeline rank: traffic of its states, products of whole matrices, gradient norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from simpar.costs.block_price import worst_each
from simpar.costs.host import hooks_slowdown, slowdown
from simpar.costs.key_price import KeyPrice, scaled
from simpar.costs.price import Price, Provenance
from simpar.parallel import modules
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout
from simpar.parallel.optimizers import NEWTON_SCHULZ_STEPS, Matrix, dealt_out, matrices, more_moments
from simpar.parallel.work import Collective, Dimension, Gemm, HostCopy, MemoryWork, OptimizerWork, Work
from simpar.specs.hardware import HardwareProfile
from simpar.specs.optimizers import ADAM_BYTES, Factors

HOST_ADAM_BYTES_PER_S = 25e9
"""Host memory traffic of one GPU's share of a CPU Adam step. Assumed: a two-socket host's 400 GB/s at half efficiency over 8."""
TENSOR_SYNC_S = 50e-6
"""Host time to update one tensor and wait for it: a kernel's launch and a synchronisation of the device (assumed; 24 us for torch's
loop over tensors alone)."""
MATRIX_BYTES = 2.0
"""Per weight of a momentum or an update on its way between the ranks that share a matrix: 16 bits, as in Liu et al. 2025 ("Muon is
scalable for LLM training")."""
DECOMPOSITION_SHARE = 0.03
"""Of a GPU's fp32 peak that decompositions of symmetric matrices reach. cuSOLVER's eigenvalues use less than 3 % of an H100 (arXiv
2410.02170); QR decompositions and other GPUs are assumed alike."""
Pricing = Callable[[Work], Price]


def update_price(layout: Layout, stages: Sequence[int], work: Pricing, norm_s: float, lead_s: float = 0.0) -> KeyPrice:
    """Update of the shard a rank owns, plus the gradient-norm all-reduce and the host's work.

    Gradients of experts that full sharding leaves out are averaged first, in one sweep after the backward (whitecircle/halo
    agent-docs/parallelism/expert-parallelism.md, deferred cross-replica sync, read 2026-11).

    Args:
        stages: model stages the rank holds.
        work: the price of any work alone.
        norm_s: seconds of the norm's all-reduce.
        lead_s: seconds by which the host is ahead of the device when it begins.
    """
    spec, kind, calibration = layout.framework, layout.optimizer, layout.calibration
    weights = layout.held_parameters(stages, trainable=True)
    shards = _shards(layout)
    own = weights[0] / shards[0] + weights[1] / shards[1]
    if layout.plan.offload.optimizer:
        state = layout.state_bytes
        # Gradients that rest there came with their reductions.
        down = 0.0 if layout.gradients_away and layout.shares_state else state.gradient
        copies = work(HostCopy(own * (down + 2.0)))
        traffic = own * (state.gradient + 2.0 * state.optimizer + spec.optimizer.host_update_bytes)
        seconds = copies.seconds + traffic / HOST_ADAM_BYTES_PER_S
        seconds += norm_s + spec.host.optimizer_cpu_s * calibration.host
        spread = (("optimizer", 0.6 * seconds, 0.4 * seconds),)
        return KeyPrice(seconds, (("optimizer", seconds),), spread, 0.0, (), (("optimizer", Provenance.ASSUMED),))
    kernel, each = layout.optimizer.update_kernel(layout.framework.optimizer)
    parts = [scaled(work(OptimizerWork(own, each * kind.traffic(layout.weight_bytes), kernel)), calibration.memory)]
    blocks = [block for stage in stages for block in layout.stage_blocks[stage]]
    if more := sum(amount / ranks for amount, ranks in zip(more_moments(kind, blocks), shards, strict=True)):
        moved = OptimizerWork(more, 2.0 * each / ADAM_BYTES, kernel)
        parts.append(scaled(work(moved), calibration.memory))
    if kind.paged:
        # Up for the update and down again: two directions of one link.
        parts.append(work(HostCopy(own * kind.moments)))
    if spec.optimizer.whole_gradient_bytes:
        held = own if layout.plan.zero_stage >= 2 else sum(weights)  # as much as a rank's buffer of gradients holds by then
        parts.append(scaled(work(MemoryWork("copy", held * spec.optimizer.whole_gradient_bytes)), calibration.memory))
    gathers: list[Price] = []
    if not layout.plan.shard_experts and weights[1] and layout.placement("edp").size > 1:
        gathers.append(work(Collective("all_reduce", weights[1] * layout.state_bytes.reduce, "edp")))
    cut: list[Price] = []
    if kind.whole:
        found = tuple(m for m in matrices(blocks) if not m.outside)
        for expert in (False, True):
            same = tuple(m for m in found if m.expert is expert)
            owned = dealt_out(kind, same, shards[expert])
            joined = [m.joined for m in owned]
            products = (
                _preconditioning(layout, kind.factors, joined, work) if kind.factors else _newton_schulz(layout, joined, work)
            )
            parts += [scaled(price, calibration.compute) for price in products]
            cut += _tensor_gathers(owned, work, expert=expert)
            gathers += _matrix_gathers(layout, same, work, expert=expert)
    tensors = sum(map(modules.trained, blocks))
    launches_s = hooks_slowdown(layout) * spec.host.optimizer_tensor_cpu_s * tensors
    update_s = max(sum(p.seconds for p in parts), launches_s - lead_s) + _tensor_by_tensor(layout, blocks)
    update_s += norm_s + spec.host.optimizer_cpu_s * calibration.host + calibration.step_s
    if kind.synchronises:
        update_s += calibration.host * TENSOR_SYNC_S * tensors
    busy = tuple((name, sum(p.seconds for p in prices)) for name, prices in (("tp", cut), ("dp", gathers)) if prices)
    spreads = [_spread("optimizer", parts), *(_spread(name, prices) for name, prices in (("tp", cut), ("dp", gathers)) if prices)]
    kinds = worst_each(
        (name, p.provenance) for name, prices in (("optimizer", parts), ("tp", cut), ("dp", gathers)) for p in prices
    )
    return KeyPrice(update_s + sum(s for _, s in busy), (("optimizer", update_s), *busy), tuple(spreads), 0.0, busy, kinds)


def _tensor_by_tensor(layout: Layout, blocks: Sequence[LocalBlock]) -> float:
    """Host seconds of a step of fully sharded weights in which the device has no more to do than that: norms before its update,
    weights that stay whole after it (`Host.sharded_step_cpu_s`). Of the biases of linears nothing is counted."""
    host = layout.framework.host
    norm_s, gather_s = host.sharded_step_cpu_s
    if layout.plan.zero_stage < 3 or not norm_s:
        return 0.0
    kept = sum(modules.kept_whole(block.layer) for block in blocks)
    python = norm_s * sum(map(modules.trained, blocks)) + gather_s * kept
    collectives = kept if layout.placement("shard").size > 1 else 0
    return hooks_slowdown(layout) * python + slowdown(layout) * host.collective_cpu_s * collectives


def _shards(layout: Layout) -> tuple[int, int]:
    """Ranks that share the update of the same dense and of the same expert weights."""
    return (layout.shard_ranks, layout.expert_shard_ranks) if layout.plan.zero_stage >= 1 else (1, 1)


def _spread(name: str, prices: Sequence[Price]) -> tuple[str, float, float]:
    seconds = sum(p.seconds for p in prices)
    return name, sum(p.high for p in prices) - seconds, seconds - sum(p.low for p in prices)


def _newton_schulz(layout: Layout, held: Sequence[Matrix], work: Pricing) -> list[Price]:
    """Products of the iteration, matrix by matrix: of a x b with a <= b, X X^T, its square, and their sum times X.

    Every tensor rank iterates on the whole matrix (--muon-tp-mode duplicated, the default of Megatron-LM's training scripts).
    """
    dtype = _half(layout.hardware)
    shapes: Counter[tuple[int, int]] = Counter()
    for matrix in held:
        shapes[min(matrix.rows, matrix.columns), max(matrix.rows, matrix.columns)] += matrix.count
    found = []
    for (a, b), count in shapes.items():
        products = [work(Gemm(a, n, k, dtype, "forward")) for n, k in ((a, b), (a, a), (b, a))]
        found += [scaled(price, float(count * NEWTON_SCHULZ_STEPS)) for price in products]
    return found


def _preconditioning(layout: Layout, factors: Factors, held: Sequence[Matrix], work: Pricing) -> list[Price]:
    """Products of both sides' factors in fp32, side by side, and a step's share of their decompositions."""
    sides: Counter[tuple[int, int]] = Counter()
    for matrix in held:
        for side, across, many in factors.sides(matrix.rows, matrix.columns):
            sides[side, across] += matrix.count * many
    rate = DECOMPOSITION_SHARE * layout.hardware.gpu.peak_flops["fp32"].value
    found = []
    for (n, across), count in sides.items():
        found.append(scaled(work(Gemm(n, n, across, "fp32", "forward")), float(count)))
        found.append(scaled(work(Gemm(n, across, n, "fp32", "forward")), float(count * (factors.products - 1))))
        found.append(scaled(work(Gemm(n, n, n, "fp32", "forward")), count / factors.every))
        seconds = count / factors.every * factors.decomposition * n**3 / rate
        found.append(Price(seconds, 0.5 * seconds, 2.0 * seconds, Provenance.ASSUMED))
    return found


def _half(hardware: HardwareProfile) -> str:
    """The 16-bit type that matrices are multiplied in, fp32 where there is none."""
    return next((dtype for dtype in ("bf16", "fp16") if dtype in hardware.gpu.peak_flops), "fp32")


def _tensor_gathers(owned: Sequence[Matrix], work: Pricing, *, expert: bool) -> list[Price]:
    """Matrices that tensor parallelism cuts are gathered before the iteration; a rank keeps its part of the update."""
    group: Dimension = "etp" if expert else "tp"
    counts: Counter[float] = Counter()
    for matrix in owned:
        if matrix.whole is not None:
            counts[matrix.joined.weights / matrix.count] += matrix.count
    return [work(Collective("all_gather", weights * MATRIX_BYTES, group, count)) for weights, count in counts.items()]


def _matrix_gathers(layout: Layout, found: Sequence[Matrix], work: Pricing, *, expert: bool) -> list[Price]:
    """Under full sharding momenta are gathered for the ranks that own a matrix, and updates for those that hold its shards
    (DeepSpeed stage3.py); with sharded states alone whole matrices are dealt out and nothing more moves."""
    group: Dimension = "expert_shard" if expert else "shard"
    amount = sum(m.weights for m in found) * MATRIX_BYTES
    if layout.plan.zero_stage < 3 or not amount or _shards(layout)[expert] == 1:
        return []
    return [work(Collective("all_gather", amount, group)) for _ in ("momenta", "updates")]
