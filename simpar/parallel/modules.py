"""How many modules a framework on plain torch modules makes of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from simpar.graph.types import Einsum, Layer

_CONTAINERS: Final = 3
"""Attention, feed-forward and the layer around them: their hooks run as well."""


@lru_cache(maxsize=4096)
def modules(layer: Layer) -> int:
    """Linear modules, norms and containers of a layer; transformers' models hold each projection in a module of its own.

    Experts of a grouped product count as one: models whose experts are modules each are leaf modules to ZeRO-3.
    """
    found = _CONTAINERS if layer.name not in ("embedding", "head") else 0
    for node in layer.nodes:
        if isinstance(node, Einsum) and node.weight:
            packed = layer.axis[layer.tensor[node.outputs[0]].axes[-1]].parts
            experts = len(layer.tensor[node.weight].axes) > 2
            found += 1 if experts else max(len(packed), 1)
        else:
            found += len(node.parameters) > 0
    return found


__all__ = ["modules"]
