"""Layers per pipeline stage where blocks are dealt out by what they cost."""

from __future__ import annotations


def split_by_cost(layers: int, layer_cost: float, head_cost: float, stages: int) -> tuple[int, ...]:
    """Layers per stage when blocks are dealt out by compute cost: a stage is closed by the block that passes its share.

    nanotron's build_model: blocks in order, the embedding free, the head as `head_cost`; a block goes to the current stage,
    and the stage ends when the running cost reaches its threshold, total * (stage + 1) / stages. Its later sources want it
    exceeded; the 16 layers of its published sweep, whose head costs four, say reached: the first rank's memory and the step time
    are those of 10 layers of two stages and of 5 of four.

    >>> split_by_cost(16, 1.0, 4.0, 2)
    (10, 6)
    """
    total = layers * layer_cost + head_cost
    counts, stage, running = [0] * stages, 0, 0.0
    for _ in range(layers):
        counts[stage] += 1
        running += layer_cost
        if running >= total * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(counts)
