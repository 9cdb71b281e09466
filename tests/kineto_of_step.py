"""Kineto traces of simulated steps, with known distortions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simpar.live.trace_slices import Slice, predicted_slices
from simpar.parallel.keys import BlockOp, LaunchGap
from simpar.parallel.work import Gemm, GroupedGemm
from simpar.program.program import PriceTable
from simpar.result.interpret import Priced, interpret
from simpar.result.result import Result
from simpar.step import run

AHEAD_US, DELAY_US = 900.0, 4.0
"""How far the host runs ahead, and the least time from its call to the kernel."""
NAMES = {
    "gemm": "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", "attention": "void flash_fwd_kernel<cutlass::bfloat16_t>",
    "memory_bound": "void at::native::vectorized_elementwise_kernel<4>",
    "optimizer": "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "copy": "Memcpy HtoD",
}  # fmt: skip
WIRE = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce",
        "all_to_all": "all_to_allv", "send_recv": "send", "exposed": "alltoall"}  # fmt: skip


def slower_gemms(priced: Priced, factor: float) -> Priced:
    """Every matmul takes `factor` times as long."""
    seconds = priced.table.seconds.copy()
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, BlockOp) and isinstance(_work(priced, key), Gemm | GroupedGemm):
            seconds[index] *= factor
    return replace(priced, table=PriceTable(seconds, priced.table.interference))


def later_gaps(priced: Priced, extra_s: float) -> Priced:
    """The host is late by so much more at the end of every block."""
    seconds = priced.table.seconds.copy()
    for index, key in enumerate(priced.program.price_keys):
        if isinstance(key, LaunchGap):
            seconds[index] += extra_s
    return replace(priced, table=PriceTable(seconds, priced.table.interference))


def one_late(priced: Priced, op: int, extra_s: float) -> Priced:
    """One op alone takes so much longer."""
    program, table = priced.program, priced.table
    price = program.price.copy()
    price[op] = len(program.price_keys)
    more = replace(program, price=price, price_keys=(*program.price_keys, program.price_keys[program.price[op]]))
    seconds = np.append(table.seconds, table.seconds[program.price[op]] + extra_s)
    interference = np.append(table.interference, table.interference[program.price[op]])
    prices = (*priced.prices, priced.prices[program.price[op]])
    return replace(priced, program=more, prices=prices, table=PriceTable(seconds, interference))


def _work(priced: Priced, key: BlockOp) -> Any:
    block = priced.layout.stage_blocks[key.stage][key.block]
    lists = {"F": block.forward, "B": block.backward, "I": block.input_gradient, "W": block.weight_gradient}
    return lists[key.phase][key.index].work


def stepped(priced: Priced) -> Result:
    """The distorted step's result."""
    return interpret(priced, run(priced))


def write_kineto(
    priced: Priced, path: Path, role: int = 0, rank: int = 0, *, steps: int = 1, launches: bool = True, marks: bool = True,
    spin: bool = True,
) -> float:  # fmt: skip
    """Write the trace of `role`; returns the length of a step as the trace shows it.

    Args:
        launches: with the host's calls.
        marks: with ProfilerStep annotations.
        spin: a receive begins when the rank has nothing else to do and waits for the other side.
    """
    result = stepped(priced)
    slices = predicted_slices(priced, result, role)
    first, length = min(s.start_s for s in slices if s.kind != "launch"), result.step_time_s
    events: list[dict[str, Any]] = []
    for step in range(steps):
        begin = 1e6 + step * length * 1e6
        if marks:
            at = begin + first * 1e6 - AHEAD_US - 50
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step + 3}", "pid": 1, "tid": 1, "ts": at,
                    "dur": length * 1e6 - 60}  # fmt: skip
            events.append(mark)
        events += _events(priced, slices, begin, launches=launches, spin=spin, rank=rank, base=step * 1_000_000)
    info = {"backend": "nccl", "rank": rank, "world_size": priced.layout.mesh.world_size}
    text = json.dumps({"traceEvents": events, "distributedInfo": info}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return length


def _events(
    priced: Priced, slices: list[Slice], begin: float, *, launches: bool, spin: bool, rank: int, base: int
) -> list[dict[str, Any]]:  # fmt: skip
    mesh = priced.layout.mesh
    found: list[dict[str, Any]] = []
    lanes = {lane: 7 + i for i, lane in enumerate(sorted({s.lane for s in slices}))}
    busy_until, late_until = begin, 0.0
    for number, item in enumerate(slices, start=base):
        if item.kind == "launch":
            late_until = begin + item.end_s * 1e6
            continue
        ts, dur = begin + item.start_s * 1e6, item.seconds * 1e6
        free = busy_until
        if spin and item.name == "receive" and max(busy_until, late_until) < ts:
            # Posted once the host gets to it, it runs until the data comes.
            posted = max(busy_until, late_until)
            ts, dur = posted, dur + ts - posted
        args: dict[str, Any] = {"stream": lanes[item.lane], "correlation": number}
        name = NAMES.get(item.kind, "")
        if item.collective:
            name = f"ncclDevKernel_{'SendRecv' if item.collective == 'send_recv' else item.collective}_RING_LL()"
            dim = "dp_cp" if item.kind == "dp" else item.kind
            # bf16 elements; of an all-gather the output is counted.
            args |= {"Collective name": WIRE[item.collective], "In msg nelems": int(item.bytes // 2),
                     "Out msg nelems": int(item.bytes // 2), "dtype": "BFloat16", "Group size": mesh.size(dim),
                     "Process Group Ranks": str(list(mesh.group_of(rank, dim)))}  # fmt: skip
        else:
            busy_until = max(busy_until, ts + dur)
        category = "gpu_memcpy" if item.kind == "copy" else "kernel"
        tid = lanes[item.lane]
        found.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args})
        if launches:
            late = late_until and late_until <= ts + 1e-3 and item.kind != "dp"
            call = (late_until if late else min(ts, free) - AHEAD_US) - DELAY_US
            found.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": call, "dur": 2.0,
                          "args": {"correlation": number}})  # fmt: skip
            late_until = 0.0 if late else late_until
    return found
