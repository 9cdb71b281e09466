"""Rematerialise: a cut of the joint graph. Tensors that are dropped after the forward are made again from those that stay.

Modules are checkpointed in two ways. A plain one keeps what enters it and what leaves it and makes the rest again; one that
discards its outputs (Megatron-LM core, `CheckpointWithoutOutput`) keeps what enters it and drops all that it makes. Which nodes run
again follows from the edges: those between what stays and what was dropped, with the collectives on their way.

Sources: Megatron-LM recompute modules (core/transformer), Korthikanti et al. 2022, torchtitan's per-op selective checkpointing
(every second matmul is saved).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import lru_cache

from simpar.graph.differentiate import kept, makers
from simpar.graph.kernel_types import KernelPlan
from simpar.graph.types import Attention, Elementwise, Layer, Norm, View
from simpar.specs.recompute_modules import MODULES, Module


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a plan recomputes in each layer.

    Attributes:
        full: the whole layer from its input.
        modules: selected modules (see MODULES).
        stops: of a whole layer only what makes tensors that the backward reads (`Kernels.recompute_stops_early`).
    """

    full: bool = False
    modules: frozenset[str] = field(default_factory=frozenset)
    stops: bool = False


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
        inside = frozenset(saved) - set(layer.inputs)
        again = _between(layer, plan, set(inside)) if recompute.stops else {node.name for node in layer.nodes}
        return Cut(inside, tuple(node.name for node in layer.nodes if node.name in again), entries=layer.inputs)
    dropped: set[str] = set()
    for name in recompute.modules & MODULES.keys():
        dropped |= _dropped(layer, plan, MODULES[name])
    repeated = _between(layer, plan, dropped)
    parts: dict[str, float] = {}
    shares: dict[str, float] = {}
    if "op_unlisted" in recompute.modules:
        # No product is among the ops that are saved: what attention puts out stays, and all before and after it runs again.
        made_by = makers(layer, plan)
        dropped |= {name for name in saved if name not in layer.inputs and not isinstance(made_by.get(name), Attention)}
        repeated |= _between(layer, plan, dropped)
    elif "op" in recompute.modules:
        names, again = _per_op(layer, plan, attention="op_attention" in recompute.modules)
        dropped, repeated = dropped | names, repeated | again
        parts, shares = _halves(layer, repeated)
    if "op_compiled" in recompute.modules:
        # Nothing in the backward reads the output of w2, so the partitioner does not keep it (torch 2.13, backend
        # aot_eager_decomp_partition: x, wq, wv, attention output, row statistics and w1 are what is saved).
        dropped |= {"mlp_norm_in"} & saved.keys()
    order = tuple(node.name for node in layer.nodes if node.name in repeated)
    entries = _entries(layer, repeated, saved)
    return Cut(frozenset(dropped), order, tuple(parts.items()), tuple(shares.items()), entries, "op" not in recompute.modules)


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
        if edge if module.discards else not leaves:
            found.add(name)
    return found


def _between(layer: Layer, plan: KernelPlan, dropped: set[str]) -> set[str]:
    """Nodes that make `dropped` again from what stays."""
    saved, made_by = kept(layer, plan), makers(layer, plan)
    wanted, found = list(dropped), set[str]()
    while wanted:
        name = wanted.pop()
        maker = made_by.get(name)
        if maker is None or maker.name in found:
            continue
        if isinstance(maker, View) and any(other in saved and other not in dropped for other in maker.outputs):
            continue  # a part of a tensor of which another part stays
        found.add(maker.name)
        wanted += [source for source in maker.inputs if source in dropped or source not in saved]
    return {name for name in found if name}


def _per_op(layer: Layer, plan: KernelPlan, *, attention: bool) -> tuple[set[str], set[str]]:
    """torchtitan keeps wq, wv, the attention output, w1 and w2 outputs and repeats the rest of a dense layer.

    Args:
        attention: the attention kernel is none of the ops that are saved, so that it runs again too.
    """
    dropped, again = set[str](), set[str]()
    made_by = makers(layer, plan)
    if attention:
        runs = {node.name for node in layer.nodes if isinstance(node, Attention)}
        dropped |= {name for name in kept(layer, plan) if (maker := made_by.get(name)) is not None and maker.name in runs}
        again |= runs
    for node in layer.nodes:
        norm = isinstance(node, Norm) and node.module == "layernorm"
        if norm or (node.module == "mlp" and isinstance(node, Elementwise)):
            dropped |= {*node.outputs, f"{node.name}_fp32", f"{node.name}_normed", f"{node.name}_gate"}
            again.add(node.name)
        elif isinstance(node, Attention):
            # What repeats keys and values is no product and runs again.
            path = node.name.rsplit("/", 1)[0]
            dropped |= {f"{path}/repeated_keys", f"{path}/repeated_values"}
        elif node.name in ("attention/rope", "attention/proj"):
            again.add(node.name)
    return dropped & kept(layer, plan).keys(), again


def _halves(layer: Layer, repeated: set[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Per-op selective checkpointing repeats every second matmul: of q, k, v the second, of a gated pair the second."""
    parts: dict[str, float] = {}
    shares: dict[str, float] = {}
    for node in layer.nodes:
        axis = layer.axis[layer.tensor[node.outputs[0]].axes[-1]] if node.outputs else None
        if axis is None or node.name in repeated or node.name not in ("attention/qkv", "mlp/fc1"):
            continue
        if node.name == "attention/qkv":
            parts[node.name] = layer.volume(axis.parts[1]) / layer.size(axis.name)
            shares["attention/qkv_out"] = 1.0 - parts[node.name]
        elif len(axis.parts) == 2:
            parts[node.name] = shares["mlp/activation_in"] = 0.5
    return parts, shares
