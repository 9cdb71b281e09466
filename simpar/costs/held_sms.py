"""How much compute slows beside a collective that holds SMs of the same GPU.

Kernels of many short blocks lose the SMs that are held. Hopper's matmuls are persistent: one block to each SM, with its tiles
handed out in turn beforehand. The blocks of held SMs start when the first blocks end, and their tiles come in a second wave: FSDP
on H100, twice as long for a matmul that is met (pytorch issue 143988). Blackwell hands tiles out as SMs become free (cluster
launch control); before Hopper there is a block to each tile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from simpar.costs.expert_parallel import TRAINED_SMS
from simpar.costs.price import Price
from simpar.parallel.beside import ops_of
from simpar.parallel.layout import Layout
from simpar.parallel.work import ExpertExchange, Gemm, GroupedGemm, LocalOp

TILE: Final = (128, 256)
"""Outputs of one block, rows and columns: cuBLAS's largest tile on Hopper, which it takes where it fills the device."""
PERSISTENT: Final = ("hopper",)
"""Architectures whose matmuls hand their tiles out beforehand."""


def second_wave(work: Gemm | GroupedGemm, sms: float, held: float, *, one_kernel: bool = False) -> float:
    """Tiles of a block of the second wave over those of one of the first; 0 where every block finds a free SM at once.

    Args:
        one_kernel: the products of all experts are one persistent kernel. Else they are kernels on several streams, and while the
            last blocks of one finish, those of the others have the free SMs.
    """
    groups = max(work.groups, 1) if isinstance(work, GroupedGemm) else 1
    if groups > 1 and not one_kernel:
        return 0.0
    rows = work.tokens / groups if isinstance(work, GroupedGemm) else work.m / work.pieces
    outputs = {"forward": (rows, work.n), "dgrad": (rows, work.k), "wgrad": (work.n, work.k)}[work.direction]
    tiles = groups * math.prod(math.ceil(max(size, 1.0) / side) for size, side in zip(outputs, TILE, strict=True))
    return max(tiles // sms, 1.0) / math.ceil(tiles / sms) if tiles > sms - held else 0.0


def loads(layout: Layout, price: Callable[[LocalOp], Price]) -> Iterator[tuple[object, float]]:
    """(Work, seconds) of the compute of all blocks, forward and backward."""
    ops, counts = dict[object, LocalOp](), Counter[object]()
    for block, alike in Counter(block for blocks in layout.stage_blocks for block in blocks).items():
        for op in (op for phase in ("F", "B") for op in ops_of(layout, block, phase) if op.stream == "compute"):
            ops.setdefault(op.work, op)
            counts[op.work] += alike
    return ((work, count * price(ops[work]).seconds) for work, count in counts.items())


def slowed(
    work: Iterable[tuple[object, float]], sms: float, held: float, architecture: str, idle_s: float = 0.0, *,
    one_kernel: bool = False,
) -> float:  # fmt: skip
    """How much longer compute takes beside a collective on `held` of `sms` SMs: 0.2 = a fifth.

    Args:
        work: each with its seconds; none = the least there is.
        idle_s: time of the same passes in which the device waits for the host, and loses nothing. Without it a kernel that gets
            faster where the host is the slower side would leave the rest a greater share of a time that is no shorter.
        one_kernel: of experts, see `second_wave`.
    """
    if not 0 < held < sms:
        return 0.0
    least = held / (sms - held)
    if architecture not in PERSISTENT:
        return least
    lost = [
        (seconds, seconds * max(least, second_wave(each, sms, held, one_kernel=one_kernel)))
        if isinstance(each, Gemm | GroupedGemm)
        else (seconds, seconds * least)
        for each, seconds in work
    ]
    # Exact sums: a search and `simulate` meet the blocks in another order.
    total = math.fsum((idle_s, *(seconds for seconds, _ in lost)))
    return max(math.fsum(later for _, later in lost) / total, least) if total else least


def by_exchanges(ops: Iterable[LocalOp], sms: float, channels: Callable[[float], int]) -> float:
    """How much longer compute that its SMs bound takes beside the expert exchanges of `ops`, on the SMs that they leave.

    Args:
        channels: bytes that a rank sends -> SMs of an all-to-all.
    """
    sent = [op.work for op in ops if isinstance(op.work, ExpertExchange)]
    each = (
        TRAINED_SMS.get(work.dispatcher) or channels(work.tokens * work.moe.num_experts_per_tok * work.hidden * work.element_bytes)
        for work in sent
    )
    held = max(each, default=0)
    return held / (sms - held) if held < sms else 0.0
