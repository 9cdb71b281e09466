"""Parameters and forward FLOPs of a model, summed over the nodes of its layers: the same that are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from simpar.graph.ledger import node_flops
from simpar.graph.types import Custom, Einsum, Layer, Lookup, Node, View
from simpar.model.forms import general
from simpar.model.layered import embedding_graph, head_graph, layer_graph
from simpar.model.network import simple_network
from simpar.model.writer import Batch, Writer, attention_mask
from simpar.specs.architecture import ArchitectureSpec, StackSpec, TokenModel
from simpar.specs.mixers import BranchSpec
from simpar.specs.model import CnnSpec, MlpSpec


@dataclass(frozen=True, slots=True)
class Totals:
    """What `models show` prints. FLOPs are of one token, forward, in a document of `sequence_length` tokens.

    FLOPs count every matmul weight once per use by one text token, the mask's attended keys exactly and scans in chunks;
    of an encoder-decoder, one token of each; towers are left out.
    """

    parameters: int
    parameters_without_embeddings: int
    active_parameters: int
    forward_flops_per_token: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One node of one kind of layer: its weights, those that a token meets, FLOPs per token; `runs` layers have it, of which
    `held` hold weights of their own (shared ones are held once).
    """

    place: str
    node: str
    parameters: int
    active: int
    flops: float
    runs: int
    held: int
    lookup: bool
    tower: bool


def totals(model: ArchitectureSpec, sequence_length: int) -> Totals:
    """The totals of `model`."""
    every = tuple(entries(model, sequence_length))
    parameters = sum(entry.parameters * entry.held for entry in every)
    return Totals(
        parameters=parameters,
        parameters_without_embeddings=parameters - sum(e.parameters * e.held for e in every if e.lookup and not e.tower),
        active_parameters=sum(entry.active * entry.held for entry in every),
        forward_flops_per_token=sum(entry.flops * entry.runs for entry in every if not entry.tower),
    )


def total_parameters(model: TokenModel | MlpSpec | CnnSpec) -> int:
    """All parameters of `model`, without multi-token prediction."""
    if isinstance(model, MlpSpec | CnnSpec):
        return simple_network(model, 1, 1).parameters
    return totals(general(model), 1).parameters


def active_parameters(model: TokenModel | MlpSpec | CnnSpec) -> int:
    """Parameters that one token meets: routed experts count num_experts_per_tok times, all the rest once."""
    if isinstance(model, MlpSpec | CnnSpec):
        return total_parameters(model)
    return totals(general(model), 1).active_parameters


def entries(model: ArchitectureSpec, sequence_length: int) -> Iterator[Entry]:
    """Every node of `model` with its weights and work; the head's matrix counts with the embeddings."""
    batch = Batch(1, sequence_length)
    yield from _entries("embedding", embedding_graph(model, batch), 1)
    tied = model.tie_word_embeddings
    for entry in _entries("head", head_graph(model, batch), 1):
        if entry.node != "head/logits":
            yield entry
            continue
        bias = model.vocab_size if model.head_bias else 0
        weight = entry.parameters - bias
        yield Entry(entry.place, entry.node, weight, weight, entry.flops, 1, 0 if tied else 1, lookup=True, tower=False)
        yield Entry(entry.place, "head/bias", bias, bias, 0.0, 1, 1, lookup=False, tower=False)
    for stack in model.stacks:
        yield from _stack(stack, stack is model.text, batch)


def _stack(stack: StackSpec, last: bool, batch: Batch) -> Iterator[Entry]:
    """A stack's layers, and what it holds beside them where the embedding or the head does not write it."""
    held: set[str] = set()
    for name, count in Counter(stack.sequence()).items():
        layer = layer_graph(stack, name, batch)
        shared = {node: key for key, node in layer.shared}
        for entry in _entries(stack.name, layer, count, stack.tower):
            key = shared.get(entry.node)
            yield entry if key is None else replace(entry, held=int(key not in held))
            held |= {key} if key else set()
    if stack.tower or (not last and stack.final_norm and stack.name != "encoder"):
        w = Writer(stack.name, stack.hidden_size, batch, stack.norm)
        x = w.graph.input("in", "batch sequence hidden")
        x = w.weights(stack.name, x, stack.extra if stack.tower else ())
        if stack.final_norm:
            x = w.norm("final_norm", x)
        yield from _entries(stack.name, w.graph.done(x), 1, stack.tower)


def _entries(place: str, layer: Layer, count: int, tower: bool = False) -> Iterator[Entry]:
    length = layer.size("sequence")
    for node in layer.nodes:
        weights, flops = layer.weights(node), node_flops(layer, node)
        if weights or flops:
            active = _active(layer, node, weights, length)
            yield Entry(place, node.name, weights, active, flops / length, count, count, isinstance(node, Lookup), tower)


def _active(layer: Layer, node: Node, weights: int, tokens: int) -> int:
    """Parameters of `node` that one token meets: the experts it is routed to, all of anything else."""
    if isinstance(node, Einsum) and node.weight and "rows" in layer.tensor[node.outputs[0]].axes:
        experts = layer.tensor[node.weight].axes[0]
        return round(weights / layer.size(experts) * layer.size("rows") / tokens)
    if isinstance(node, Custom | View) and node.parameters and layer.tensor[node.parameters[0]].axes[0].endswith(".copies"):
        used = node.flops / 2.0 / tokens if isinstance(node, Custom) else 0.0
        return round(weights * used / layer.elements(node.parameters[0]))
    return weights


def pattern_of(model: ArchitectureSpec) -> list[dict[str, object]]:
    """Kinds of layers with their counts and a description of each, in order of appearance."""
    found: list[dict[str, object]] = []
    for stack in model.stacks:
        for name, count in Counter(stack.sequence()).items():
            parts = [describe(b) for s in stack.layers[name].sublayers for b in s.branches]
            found.append({"stack": stack.name, "layer": name, "count": count, "parts": parts})
    return found


def describe(branch: BranchSpec) -> str:
    """A branch in a few words."""
    match branch.kind:
        case "attention":
            heads = f"{branch.num_heads} heads of {branch.head_dim}, {branch.num_key_value_heads} for keys and values"
            return f"{'cross-' if branch.cross else ''}attention ({heads}; {attention_mask(branch).describe()})"
        case "latent_attention":
            sparse = (
                f"top {branch.indexer.top_k} keys" if branch.indexer else f"window {branch.window}" if branch.window else "causal"
            )
            return f"latent attention ({branch.num_heads} heads; {sparse})"
        case "mlp":
            return f"mlp ({branch.width}{', gated' if branch.gated else ''})"
        case "experts":
            shared = f", shared {branch.shared_width}" if branch.shared_width else ""
            return f"experts ({branch.num_experts} of {branch.width}, {branch.num_experts_per_tok} per token{shared})"
        case "custom":
            return branch.label
        case "delta":
            return f"gated delta rule ({branch.num_value_heads} heads)"
        case "mamba2" | "linear_attention":
            return f"{branch.kind.replace('_', ' ')} ({branch.num_heads} heads)"
    return branch.kind.replace("_", " ")
