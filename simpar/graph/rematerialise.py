"""Rematerialise: a cut of the joint graph. Tensors that are dropped after the forward are made again from those that stay.

Modules are checkpointed in two ways. A plain one keeps what enters it and what leaves it and makes the rest again; one that
discards its outputs (Megatron-LM core, `CheckpointWithoutOutput`) keeps what enters it and drops all that it makes. Which nodes run
again follows from the edges: those between what stays and what was dropped, with the collectives on their way.

Sources: Megatron-LM recompute modules (core/transformer), Korthikanti et al. 2022, torchtitan's per-op selective checkpointing
(every second matmul is saved).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.graph.differentiate import kept, makers
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.types import Attention, Einsum, Elementwise, Layer, Node, Norm, Permute, View
from simpar.specs.plan import MODULES, Module

ROUTED: Final = ("moe", "moe_act", "router")
"""Modules of a layer's routed experts."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a plan recomputes in each layer.

    Attributes:
        full: the whole layer from its input.
        modules: selected modules (see MODULES).
        stops: of a whole layer only what makes tensors that the backward reads (`Kernels.recompute_stops_early`).
        inner: what enters the layer is made again too, by the layer before it in one chunk.
    """

    full: bool = False
    modules: frozenset[str] = field(default_factory=frozenset)
    stops: bool = False
    inner: bool = False

    def in_chunk(self, offset: int, length: int, count: int) -> Recompute:
        """What a layer recomputes, the one at `offset` of `count`, where chunks of so many layers keep what enters them alone
        (Megatron-LM, TransformerBlock._checkpointed_forward, method uniform): all of a chunk runs again before its backward, the
        layers before its last one up to what they put out."""
        ends = (offset + 1) % length == 0 or offset + 1 == count
        return replace(self, inner=offset % length > 0, stops=self.stops and ends)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one layer drops and runs again.

    Attributes:
        dropped: tensors freed after the forward.
        repeated: nodes that run again before the backward, in order.
        parts: node -> share of it that runs again, of products that stand for several of a framework's.
        kept_parts: tensor -> share of it that stays.
        entries: tensors that stay because what runs again starts from them, although no kernel keeps them.
        reduces: reductions of partial outputs run again as well; per-op policies keep their results.
    """

    dropped: frozenset[str] = frozenset()
    repeated: tuple[str, ...] = ()
    parts: tuple[tuple[str, float], ...] = ()
    kept_parts: tuple[tuple[str, float], ...] = ()
    entries: tuple[str, ...] = ()
    reduces: bool = True


@lru_cache(maxsize=8192)
def cut(layer: Layer, plan: KernelPlan, recompute: Recompute) -> Cut:
    """The cut of `layer` under `recompute`."""
    saved = kept(layer, plan)
    if recompute.full:
        entries = () if recompute.inner else layer.inputs
        inside = frozenset(saved) - set(entries)
        again = _between(layer, plan, set(inside)) if recompute.stops else {node.name for node in layer.nodes}
        return Cut(inside, tuple(node.name for node in layer.nodes if node.name in again), entries=entries)
    if "op" in recompute.modules:
        return _per_op(layer, plan, recompute.modules)
    dropped: set[str] = set()
    for name in recompute.modules & MODULES.keys():
        dropped |= _dropped(layer, plan, MODULES[name])
    repeated = _between(layer, plan, dropped)
    order = tuple(node.name for node in layer.nodes if node.name in repeated)
    return Cut(frozenset(dropped), order, entries=_entries(layer, repeated, saved))


@lru_cache(maxsize=4096)
def staying(
    layer: Layer, plan: KernelPlan, recomputes: tuple[Recompute, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], NDArray[np.float64]]:
    """(Tensors that kernels may keep, what enters what runs again, shares of both that stay [recomputes, tensors])."""
    cuts = [cut(layer, plan, each) for each in recomputes]
    names, entered = tuple(kept(layer, plan)), tuple(dict.fromkeys(name for made in cuts for name in made.entries))
    found = np.zeros((len(cuts), len(names) + len(entered)))
    for row, made, each in zip(found, cuts, recomputes, strict=True):
        shares = dict(made.kept_parts)
        if not each.full:
            row[: len(names)] = [0.0 if name in made.dropped else shares.get(name, 1.0) for name in names]
        row[len(names) :] = [shares.get(name, 1.0) if name in made.entries else 0.0 for name in entered]
    return names, entered, found


def _entries(layer: Layer, repeated: set[str], saved: Container[str]) -> tuple[str, ...]:
    """What norms that run again read, where nothing else keeps it or makes it again."""
    again = [node for node in layer.nodes if node.name in repeated]
    made = {name for node in again for name in node.outputs}
    return tuple(node.inputs[0] for node in again if isinstance(node, Norm) and node.inputs and node.inputs[0] not in made
                 and node.inputs[0] not in saved)  # fmt: skip


def _dropped(layer: Layer, plan: KernelPlan, module: Module) -> set[str]:
    """Kept tensors that a checkpoint of `module` frees."""
    found, made_by = set(), makers(layer, plan)
    for name in kept(layer, plan):
        maker = made_by.get(name)
        if maker is None or maker.module not in module.nodes:
            continue
        edge = name in layer.tensor
        leaves = edge and any(node.module not in module.nodes for node in layer.consumers.get(name, ()))
        if module.discards or not leaves:
            found.add(name)
    return found


def _between(layer: Layer, plan: KernelPlan, dropped: set[str], stays: Container[str] = ()) -> set[str]:
    """Nodes that make `dropped` again from what stays: kept tensors, and what the nodes `stays` put out."""
    saved, made_by = kept(layer, plan), makers(layer, plan)
    wanted, found = list(dropped), set[str]()
    while wanted:
        name = wanted.pop()
        maker = made_by.get(name)
        if maker is None or maker.name in found or maker.name in stays:
            continue
        if isinstance(maker, View) and any(other in saved and other not in dropped for other in maker.outputs):
            continue  # a part of a tensor of which another part stays
        found.add(maker.name)
        wanted += [source for source in maker.inputs if source in dropped or source not in saved]
    return {name for name in found if name}


def _per_op(layer: Layer, plan: KernelPlan, modules: Container[str]) -> Cut:
    """torchtitan's selective checkpointing by op: what attention and every second linear put out is saved, all else runs again.

    Of a dense layer wq, wv, attention, w1 and w2. Grouped products, and the router's, are none of the ops that are saved: routed
    experts run again, from what the exchange brought where tokens are exchanged. Run eagerly every op whose output is not saved
    runs again, and saved outputs that nothing reads stay too; the partitioner of a compiled layer leaves both out.

    Args:
        modules: "op_attention": the attention kernel is none of the ops that are saved; "op_unlisted": products are none;
            "op_exchanged": tokens are exchanged between ranks, whose results are saved; "op_compiled".
    """
    saved, made_by, compiled = kept(layer, plan), makers(layer, plan), "op_compiled" in modules
    stays, parts, shares = _saved_ops(layer, modules)
    turned = {node.name for node in layer.nodes if isinstance(node, Elementwise) and node.op.endswith("rope")}
    counted = set[str]()
    for node in layer.nodes:
        if not all(name in layer.producer and layer.producer[name].name in stays for name in node.inputs):
            continue
        if isinstance(node, View):
            stays.add(node.name)
        elif node.name in turned and len(node.inputs) == len(node.outputs) == 1:
            # What stays is the product's output; it is counted as what attention keeps, which has the same bytes.
            (before,), (after,) = node.inputs, node.outputs
            stays.add(node.name)
            counted.add(before)
            if before in shares:
                shares[after] = shares.pop(before)
    dropped = set[str]()
    for name in saved:
        maker = made_by.get(name)
        if name in layer.inputs or maker is None:
            continue
        beside = isinstance(maker, Permute) and name not in maker.outputs
        # What repeats keys and values is no op that is saved.
        if maker.name not in stays or beside or name.endswith(("/repeated_keys", "/repeated_values")):
            dropped.add(name)
    again = _between(layer, plan, dropped, stays) | turned
    if not compiled:
        last = max((at for at, node in enumerate(layer.nodes) if node.name in again), default=-1)
        again |= {node.name for node in layer.nodes[: last + 1] if node.name not in stays}
    starts = {name for node in layer.nodes if node.name in again for name in node.inputs}
    starts |= {name for node in layer.nodes if isinstance(node, View) and starts & {*node.outputs} for name in node.inputs}
    entries, known = [name for name in layer.inputs if name in starts and name not in saved], saved.keys() | counted
    for node in layer.nodes:
        if node.name in stays and not isinstance(node, View | Permute):
            entries += [name for name in node.outputs if name not in known and (name in starts or not compiled)]
        elif isinstance(node, Permute) and node.back and node.name in stays:
            entries.append(node.inputs[0])
    order = tuple(node.name for node in layer.nodes if node.name in again)
    return Cut(frozenset(dropped), order, tuple(parts.items()), tuple(shares.items()), tuple(entries), reduces=False)


def _saved_ops(layer: Layer, modules: Container[str]) -> tuple[set[str], dict[str, float], dict[str, float]]:
    """Nodes whose output is saved; of products that stand for several linears the share that runs again, and that stays."""
    stays, parts, shares = set[str](), dict[str, float](), dict[str, float]()
    linears = 0
    for node in _in_code_order(layer):
        if isinstance(node, Attention):
            if "op_attention" not in modules:
                stays.add(node.name)
        elif isinstance(node, Permute):
            if "op_exchanged" in modules:
                stays.add(node.name)
        elif isinstance(node, Einsum) and node.weight and node.module not in ROUTED and "op_unlisted" not in modules:
            skipped = [(linears + i) % 2 == 1 for i in range(node.linears)]
            linears += node.linears
            axis = layer.axis[layer.tensor[node.outputs[0]].axes[-1]]
            sizes = [layer.volume(part) for part in axis.parts] if len(axis.parts) == node.linears else [1.0] * node.linears
            share = sum(size for size, skip in zip(sizes, skipped, strict=True) if skip) / sum(sizes)
            if share < 1.0:
                stays.add(node.name)
            if 0.0 < share < 1.0:
                parts[node.name], shares[node.outputs[0]] = share, 1.0 - share
    return stays, parts, shares


def _in_code_order(layer: Layer) -> list[Node]:
    """Nodes in the order of a module's code, which finishes one input of an op before it begins the next."""
    found: dict[str, Node] = {}

    def visit(node: Node) -> None:
        for name in node.inputs:
            if (maker := layer.producer.get(name)) is not None and maker.name not in found:
                visit(maker)
        found[node.name] = node

    for node in layer.nodes[::-1]:
        if not any(name in layer.consumers for name in node.outputs) and node.name not in found:
            visit(node)
    return list(found.values())
