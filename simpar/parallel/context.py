"""Context parallelism: ring with zigzag chunks, all-gather of keys and values (Llama 3), Ulysses all-to-all; torch's ring.

The causal work of every rank is 1/cp of the whole in all three (zigzag or head-tail order balances it).
"""

from __future__ import annotations

from simpar.graph.masks import Mask
from simpar.parallel.degrees import Degrees
from simpar.parallel.work import AttentionWork, Collective, MemoryWork, OpList


def element_bytes(work: AttentionWork) -> float:
    """Bytes of a query, key or value element on the wire."""
    return 4.0 if work.dtype in ("fp32", "tf32") else 2.0


def key_value_bytes(work: AttentionWork, degrees: Degrees) -> float:
    """Keys and values of one rank's part of the sequence."""
    local = work.batch * (work.sequence_q / degrees.cp)
    return element_bytes(work) * local * work.kv_heads * (work.head_dim + work.v_head_dim)


def attention(name: str, whole: AttentionWork, mask: Mask, degrees: Degrees, kernels: int, ops: OpList) -> None:
    """Put the attention of one rank; `whole` is the whole sequence's work with this rank's heads.

    Keys of another input (a prompt's) are no part of the sequence: every rank has all of them.
    """
    cp = degrees.cp
    if cp == 1 or mask.kind == "fixed":
        ops.compute(name, whole._replace(sequence_q=whole.sequence_q // cp), kernels)
        return
    if degrees.ring_merges and degrees.cp_style != "ulysses":
        _torch_ring(name, whole, degrees, kernels, ops)
        return
    {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}[degrees.cp_style](name, whole, degrees, kernels, ops)


def pairs(work: AttentionWork) -> float:
    """Query-key pairs inside the mask, per sequence and head; causal attention halves the score matrix."""
    q, k = float(work.sequence_q), float(work.sequence_kv)
    if not work.causal:
        return q * k
    window = float(min(work.window or k, k))
    return q * window - window * window / 2.0


def _zigzag(whole: AttentionWork, cp: int) -> tuple[AttentionWork, AttentionWork]:
    """One rank's first step, on its own keys, and each later one.

    Every later step of a causal mask meets half of the score block: full attention of all queries with half the keys (or the
    reverse). A window leaves little for them: what the first step does not cover of a rank's pairs.
    """
    local = whole.sequence_q // cp
    first = whole._replace(sequence_q=local, sequence_kv=max(whole.sequence_kv // cp, 1))
    if not whole.causal:
        return first, first
    rest = max(pairs(whole) / cp - pairs(first), 0.0) / max(cp - 1, 1)
    return first, first._replace(sequence_kv=max(int(rest / local), 1), causal=False, window=None)


def _ring(name: str, whole: AttentionWork, degrees: Degrees, kernels: int, ops: OpList) -> None:
    """cp steps; the next keys and values travel (twice the bytes backward: their gradients too) while one is computed."""
    cp = degrees.cp
    first, later = _zigzag(whole, cp)
    amount = key_value_bytes(whole, degrees) * (2 if whole.backward else 1)
    for step in range(cp):
        transfer = None
        if step < cp - 1:
            transfer = ops.start(f"{name}.ring{step}", Collective("send_recv", amount, "cp"), "cp")
        ops.compute(f"{name}.step{step}", first if step == 0 else later, kernels)
        if transfer is not None:
            ops.wait(transfer)


MERGE_BYTES = {"forward": (12.0, 32.5), "backward": (34.0, 51.0)}
"""Traffic of merging one step's result, bytes per element of the output: (fused by a compiler, elementary operations).

Forward: the partial output in fp32 and the running one through out - sigmoid(lse' - lse) (out - out'), half of the steps on
half of the queries and put back by a copy. Backward: three fp32 gradients added to, those of keys and values packed to be sent.
"""


def _torch_ring(name: str, whole: AttentionWork, degrees: Degrees, kernels: int, ops: OpList) -> None:
    """torch's context_parallel (torch 2.6-2.13, distributed/tensor/experimental, `_templated_ring_attention`).

    Keys and values of all query heads travel (torchtitan repeats them before attention): gathered once beside the first step
    (the default), or from rank to rank; in the backward again. Their gradients go from rank to rank in fp32, each send after
    the step's own part was added, the last one exposed. Partial outputs are merged in fp32 after every step but the first.
    Under a compiler nothing runs beside a collective: while a graph is traced, functional collectives are waited for where they
    are called (torch 2.4-2.13, distributed/_functional_collectives.py, `_maybe_wrap_tensor`), and Inductor keeps that order.
    """
    cp, phase = degrees.cp, "backward" if whole.backward else "forward"
    first, later = _zigzag(whole, cp)
    elements = first.batch * first.sequence_q * whole.heads
    amount = element_bytes(whole) * elements * (whole.head_dim + whole.v_head_dim)
    merge = MemoryWork("copy", MERGE_BYTES[phase][0 if degrees.ring_merges == "fused" else 1] * elements * whole.v_head_dim,
                       2 if degrees.ring_merges == "fused" else 8, "framework")  # fmt: skip
    gradients = Collective("send_recv", 4.0 * elements * (whole.head_dim + whole.v_head_dim), "cp")
    traced = degrees.ring_merges == "fused"
    arriving: int | None = None
    sent: int | None = None
    for step in range(cp):
        if arriving is not None:
            ops.wait(arriving)
            arriving = None
        if degrees.cp_style == "all_gather" and step == 0:
            arriving = ops.start(f"{name}.all_gather", Collective("all_gather", cp * amount, "cp"), "cp")
        elif degrees.cp_style == "ring" and step < cp - 1:
            arriving = ops.start(f"{name}.ring{step}", Collective("send_recv", amount, "cp"), "cp")
        if traced and arriving is not None:
            ops.wait(arriving)
        ops.compute(f"{name}.step{step}", later if step else first, kernels)
        if sent is not None:
            ops.wait(sent)
        if step or whole.backward:
            ops.compute(f"{name}.merge{step}", merge, merge.launches)
        if whole.backward:
            sent = ops.start(f"{name}.gradients{step}", gradients, "cp")
            if traced:
                ops.wait(sent)
    if sent is not None:
        ops.wait(sent)


def _all_gather(name: str, whole: AttentionWork, degrees: Degrees, kernels: int, ops: OpList) -> None:
    """Keys and values gathered before, their gradients reduce-scattered after; neither overlaps."""
    total = key_value_bytes(whole, degrees) * degrees.cp
    ops.blocking(f"{name}.all_gather", Collective("all_gather", total, "cp"), "cp")
    local = whole.sequence_q // degrees.cp
    # Head-tail chunks see on average half of all keys: the same work as s/cp queries on s/2 keys; of a window its mean.
    keys = max(int(pairs(whole) / whole.sequence_q), 1)
    ops.compute(name, whole._replace(sequence_q=local, sequence_kv=keys, causal=False, window=None), kernels)
    if whole.backward:
        ops.blocking(f"{name}.reduce_scatter", Collective("reduce_scatter", total, "cp"), "cp")


def _ulysses(name: str, whole: AttentionWork, degrees: Degrees, kernels: int, ops: OpList) -> None:
    """All-to-all from sequence-split to head-split for q, k, v and back for the output (mirrored backward)."""
    cp = degrees.cp
    each = element_bytes(whole) * whole.batch * whole.sequence_q / cp
    query = each * whole.heads * whole.head_dim
    output = each * whole.heads * whole.v_head_dim
    pair = each * whole.kv_heads * (whole.head_dim + whole.v_head_dim)
    before, after = (output, query + pair) if whole.backward else (query + pair, output)
    ops.blocking(f"{name}.all_to_all_in", Collective("all_to_all", before, "cp"), "cp")
    heads = whole._replace(heads=max(whole.heads // cp, 1), kv_heads=max(whole.kv_heads // cp, 1))
    ops.compute(name, heads, kernels)
    ops.blocking(f"{name}.all_to_all_out", Collective("all_to_all", after, "cp"), "cp")
