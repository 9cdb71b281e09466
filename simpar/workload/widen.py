"""A transformer in fp32: the activations that other precisions keep and send in 2 bytes an element take 4."""

from __future__ import annotations

from dataclasses import replace

from simpar.workload.network import Network
from simpar.workload.ops import Block, Op, Seam

HALF, FULL = 2.0, 4.0


def widened_block(block: Block) -> Block:
    """`block` with 4 bytes where its ops and seams count 2; statistics, masks and ids keep their width."""
    return replace(block, items=tuple(_widened(item) for item in block.items))


def _widened(item: Op | Seam) -> Op | Seam:
    if isinstance(item, Seam):
        return replace(item, element_bytes=FULL)
    return replace(
        item, saves=tuple(replace(t, element_bytes=FULL) if t.element_bytes == HALF else t for t in item.saves),
        forward_bytes=tuple((axes, each * FULL / HALF) for axes, each in item.forward_bytes),
        backward_bytes=tuple((axes, each * FULL / HALF) for axes, each in item.backward_bytes),
    )  # fmt: skip


def widened(network: Network) -> Network:
    """`network`, whose bytes stand for 16-bit activations, in fp32; equal layers stay one object."""
    known: dict[int, Block] = {}

    def of(block: Block) -> Block:
        if id(block) not in known:
            known[id(block)] = widened_block(block)
        return known[id(block)]

    def maybe(block: Block | None) -> Block | None:
        return None if block is None else of(block)

    return Network(
        maybe(network.embedding), tuple(of(b) for b in network.layers), maybe(network.head), tuple(of(b) for b in network.mtp),
        maybe(network.mtp_head), tuple(b * FULL / HALF for b in network.boundary_bytes), network.tied,
    )  # fmt: skip
