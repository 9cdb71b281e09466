"""A layer's work on one rank: forward and backward op lists (parallel/op_lists.py), saved activations, weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from simpar.graph.ledger import node_flops
from simpar.graph.rematerialise import Recompute
from simpar.graph.types import Attention, Layer
from simpar.parallel.adapters import trained_weights
from simpar.parallel.backward_peak import transient
from simpar.parallel.op_lists import Lists
from simpar.parallel.split_options import SplitOptions
from simpar.parallel.work import LocalOp, OpList

_PLAIN: Final = Recompute()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBlock:
    """One rank's share of a layer; a key of memos by itself, not by what it holds.

    Attributes:
        name: the layer's.
        forward, backward: op lists; `backward` starts with what is recomputed.
        saved: (tensor, bytes) kept from forward to backward.
        working: bytes alive only while the layer's backward runs (recomputed activations).
        transient: bytes of the largest gradient pair alive in the backward.
        deferred: bytes that stay from the input gradient to the weight gradient where the two are apart.
        dense_parameters, expert_parameters: weights on this rank.
        lora_parameters, lora_experts: trained weights under low-rank adaptation; those beside experts among them.
        frozen_parameters: weights on this rank where nothing of the layer is trained; those above are 0 then.
        frozen_experts: those of experts among them.
        model_flops: forward FLOPs of the whole micro-batch over all ranks, causal attention halved.
        attention_flops: attention's part of them.
        repeated_flops: of them, those that recomputation repeats.
        layer, options: what was split, and how.
    """

    name: str
    forward: tuple[LocalOp, ...]
    backward: tuple[LocalOp, ...]
    saved: tuple[tuple[str, float], ...] = ()
    working: float = 0.0
    transient: float = 0.0
    deferred: float = 0.0
    dense_parameters: float = 0.0
    expert_parameters: float = 0.0
    lora_parameters: float = 0.0
    lora_experts: float = 0.0
    frozen_parameters: float = 0.0
    frozen_experts: float = 0.0
    model_flops: float
    attention_flops: float
    repeated_flops: float = 0.0
    layer: Layer = field(repr=False)
    options: SplitOptions = field(repr=False)

    @property
    def input_gradient(self) -> tuple[LocalOp, ...]:
        """The first half of a backward that is split, for zero-bubble schedules."""
        return _halves(self.layer, self.options)[0]

    @property
    def weight_gradient(self) -> tuple[LocalOp, ...]:
        """The second half."""
        return _halves(self.layer, self.options)[1]

    @property
    def passes(self) -> tuple[float, float]:
        """Model FLOPs of a step over those of the forward, of attention and of the rest.

        A backward has twice as many; products whose weights low-rank adaptation leaves frozen have the gradient of their input
        alone.
        """
        if self.options.frozen:
            return 1.0, 1.0
        return 3.0, 2.0 if self.options.lora_rank else 3.0

    @property
    def step_flops(self) -> float:
        """Model FLOPs of one micro-batch, forward and backward."""
        attention, rest = self.passes
        return attention * self.attention_flops + rest * (self.model_flops - self.attention_flops)

    @property
    def halved_flops(self) -> float:
        """Of `attention_flops`, those of masks that leave keys out; of attention to both sides all pairs are counted."""
        flops = _flops(self.layer)
        return sum(flops[node.name] for node in self.layer.nodes if isinstance(node, Attention) and node.mask.causal)

    @property
    def saved_bytes(self) -> float:
        """Total kept from forward to backward."""
        return sum(amount for _, amount in self.saved)

    @property
    def offloadable_bytes(self) -> float:
        """What activation offloading takes to the host: of layers, not of the embedding or the loss, whose backward is next."""
        return 0.0 if self.outside_layers else self.saved_bytes

    @property
    def outside_layers(self) -> bool:
        """Whether it is an end of the model, the embedding or the head."""
        return self.name in ("embedding", "head")

    @property
    def gathered_parameters(self) -> float:
        """Weights on this rank that full sharding gathers."""
        apart = self.expert_parameters + self.frozen_experts if self.options.experts_apart else 0.0
        return self.dense_parameters + self.expert_parameters + self.frozen_parameters - apart


@lru_cache(maxsize=4096)
def _flops(layer: Layer) -> dict[str, float]:
    """Model FLOPs of the forward of each node of a whole layer, causal attention halved."""
    return {node.name: node_flops(layer, node, halved=True) for node in layer.nodes}


@lru_cache(maxsize=65536)
def op_lists(layer: Layer, options: SplitOptions) -> tuple[tuple[LocalOp, ...], tuple[LocalOp, ...]]:
    """Forward and backward of `layer` on one rank; the forward is the same whatever runs again."""
    lists = Lists(layer, options)
    if options.recompute == _PLAIN:
        made = OpList()
        lists.put_copies("gather.copy", options.gather_copy_bytes, made)
        lists.put_forward(made)
        forward = made.done()
    else:
        forward = op_lists(layer, replace(options, recompute=_PLAIN))[0]
    backward = OpList()
    if not options.frozen:
        lists.put_again(backward)
        lists.put_backward(backward, None)
        lists.put_end(backward)
    return forward, backward.done()


def span_lists(layer: Layer, options: SplitOptions, span: range) -> tuple[tuple[LocalOp, ...], tuple[LocalOp, ...]]:
    """Of `op_lists` without recomputation what nodes at these positions do."""
    lists, forward, backward = Lists(layer, options), OpList(), OpList()
    lists.put_forward(forward, span=span)
    if not options.frozen:
        lists.put_backward(backward, None, span)
    return forward.done(), backward.done()


@lru_cache(maxsize=65536)
def split_block(layer: Layer, options: SplitOptions) -> LocalBlock:
    """`layer` on one rank under `options`; a frozen one keeps nothing for a backward and has none."""
    lists, flops = Lists(layer, options), _flops(layer)
    forward, backward = op_lists(layer, options)
    own = [node for node in layer.nodes if node.name not in options.borrowed]
    held = [(lists.layout(node) == "expert", lists.shards.weights(node)) for node in own]
    experts = sum(amount for expert, amount in held if expert)
    common: dict[str, Any] = {
        "name": layer.name, "forward": forward, "backward": backward, "layer": layer, "options": options,
        "model_flops": sum(flops.values()),
        "attention_flops": sum(flops[node.name] for node in layer.nodes if isinstance(node, Attention)),
    }  # fmt: skip
    if options.frozen:
        return LocalBlock(**common, frozen_parameters=sum(amount for _, amount in held), frozen_experts=experts)
    saved, working = lists.saved()
    pairs = [(lists.layout(node) == "expert", trained_weights(lists, node)) for node in layer.nodes]
    return LocalBlock(
        **common, saved=saved, working=working, transient=transient(lists), deferred=lists.deferred(),
        dense_parameters=sum(amount for expert, amount in held if not expert), expert_parameters=experts,
        lora_parameters=sum(amount for _, amount in pairs), lora_experts=sum(amount for expert, amount in pairs if expert),
        repeated_flops=sum(flops[n] for n in frozenset(lists.cut.repeated)) + sum(flops[n] * s for n, s in lists.cut.parts),
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _halves(layer: Layer, options: SplitOptions) -> tuple[tuple[LocalOp, ...], tuple[LocalOp, ...]]:
    """Input and weight gradients of `layer` on one rank, where they run apart."""
    if options.frozen:
        return (), ()
    lists = Lists(layer, options)
    inputs, weights = OpList(), OpList()
    lists.put_again(inputs)
    lists.put_backward(inputs, weights)
    lists.put_end(weights)
    return inputs.done(), weights.done()
