"""What passes from layer to layer: the residual stream, and what later layers read of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator

from simpar.specs.architecture import ArchitectureSpec, LayerSpec
from simpar.specs.mixers import AttentionSpec, BranchSpec, IndexerSpec

INDEX_ELEMENTS = 2
"""Of a chosen key's number, 32 bits, in elements of 16."""


def boundary_elements(model: ArchitectureSpec, tokens: int) -> tuple[float, ...]:
    """Elements that pass before each layer and after the last: the stream, an encoder's or the embedding's output on its way to a
    layer that reads it again, keys and values or choices of keys that a later layer shares.

    Args:
        tokens: of a micro-batch.
    """
    stacks = [stack for stack in model.stacks if not stack.tower]
    found, begin = [0], 0
    for number, stack in enumerate(stacks):
        layers = [stack.layers[name] for name in stack.sequence()]
        width = stack.hidden_size * stack.residual_streams
        found += [width] * len(layers)
        found[begin] = found[begin] or width  # between two stacks the first one's stream alone
        for first, last, elements in _shared(layers):
            for at in range(begin + first + 1, begin + last + 1):
                found[at] += elements
        beside = [(i, w - stack.hidden_size) for i, layer in enumerate(layers) for w in _second_streams(layer)]
        for at in range(begin + 1, begin + beside[-1][0] + 1) if beside else ():
            found[at] += beside[-1][1]
        crossing = [i for i, layer in enumerate(layers) if any(_reads_another(b) for b in _branches(layer))]
        if number and crossing:
            before = stacks[number - 1]
            for at in range(begin + 1, begin + crossing[-1] + 1):
                found[at] += before.hidden_size * before.residual_streams
        begin += len(layers)
    return tuple(float(tokens * each) for each in found)


def _branches(layer: LayerSpec) -> Iterator[BranchSpec]:
    return (branch for step in layer.sublayers for branch in step.branches)


def _second_streams(layer: LayerSpec) -> Iterator[int]:
    """Widths of the stream with the embedding's output behind it, where attention reads both (Zamba)."""
    for branch in _branches(layer):
        if isinstance(branch, AttentionSpec) and not branch.cross and branch.kv_hidden_size:
            yield branch.kv_hidden_size


def _reads_another(branch: BranchSpec) -> bool:
    """Cross-attention to the stack before."""
    return isinstance(branch, AttentionSpec) and branch.cross and branch.keys is None


def _shared(layers: list[LayerSpec]) -> Iterator[tuple[int, int, int]]:
    """(layer that makes it, last layer that reads it, elements of a token) of what layers share.

    A layer without keys and values of its own reads those of the last one before it with the same mask and heads; one that
    chooses no keys of its own, the last choice.
    """
    made: dict[object, tuple[int, int]] = {}
    read: dict[tuple[object, int], tuple[int, int]] = {}
    for at, layer in enumerate(layers):
        for branch in _branches(layer):
            for name, elements, own in _sharable(branch):
                if own:
                    made[name] = (at, elements)
                elif name in made:
                    first, amount = made[name]
                    read[name, first] = (at, amount)
    yield from ((first, last, elements) for (_, first), (last, elements) in read.items())


def _sharable(branch: BranchSpec) -> Iterator[tuple[object, int, bool]]:
    """(what tells it apart, elements of a token, whether it is made here)."""
    if isinstance(branch, AttentionSpec) and not branch.cross and branch.key_value != "query_only":
        widths = (branch.head_dim,) if branch.key_value == "key_only" else (branch.head_dim, branch.v_head_dim or branch.head_dim)
        name = ("keys", branch.window, branch.chunk, branch.num_key_value_heads, branch.head_dim)
        yield name, branch.num_key_value_heads * sum(widths), branch.key_value != "shared"
    indexer = getattr(branch, "indexer", None)
    if isinstance(indexer, IndexerSpec):
        yield "choice", indexer.top_k // indexer.block * INDEX_ELEMENTS, indexer.owned
