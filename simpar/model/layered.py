"""A model of any layers as the graphs that a pipeline cuts: embedding, layers by kind, head."""

from __future__ import annotations

from functools import lru_cache

from simpar.graph.types import Layer
from simpar.model.blocks import TOKENS, Batch
from simpar.model.mixers import write_branch
from simpar.model.network import Network
from simpar.model.writer import Writer
from simpar.specs.architecture import ArchitectureSpec, StackSpec, SublayerSpec, WeightSpec


def text_stack(model: ArchitectureSpec) -> StackSpec:
    """The stack whose tokens the head sees: the last one that is not a tower."""
    return [stack for stack in model.stacks if not stack.tower][-1]


def layer_graph(stack: StackSpec, name: str, batch: Batch) -> Layer:
    """The graph of one kind of layer."""
    w = Writer(name, stack.hidden_size, batch, stack.norm)
    layer = stack.layers[name]
    x = w.graph.input("input_norm_in", TOKENS)
    last = len(layer.sublayers) - 1
    for number, step in enumerate(layer.sublayers):
        label = "attention" if number == 0 and last else "mlp" if number == last and last else f"step_{number}"
        x = _sublayer(w, step, x, label if last else "")
    x = w.weights("", x, layer.extra, "residual")
    return w.graph.done(x)


def _sublayer(w: Writer, step: SublayerSpec, x: str, label: str) -> str:
    """Norms, branches, residual: the stream after it."""
    before = step.norm in ("pre", "sandwich")
    norms = step.num_norms if step.num_norms is not None else 1
    name = "mlp_norm" if label.startswith("mlp") else "input_norm" if label in ("attention", "") else "norm"
    normed = [x] * len(step.branches)
    if before and norms:
        made = [w.norm(name if i == 0 else "mlp_norm", x) for i in range(norms)]
        normed = [made[min(i, norms - 1)] for i in range(len(step.branches))]
    elif before:
        (plain,) = (w.graph.norm(w.path(name), x, kind="l2"),)
        normed = [plain] * len(step.branches)
    outs = [out for branch, given in zip(step.branches, normed, strict=True) for out in write_branch(w, branch, given)]
    if step.norm in ("post", "sandwich"):
        outs[0] = w.norm(f"{label or 'layer'}_post_norm", outs[0])
    outs[0] = w.weights("", outs[0], step.extra, "residual")
    return w.graph.residual(w.path(f"{label}_residual" if label else "residual"), *outs, x)


def embedding_graph(model: ArchitectureSpec, batch: Batch) -> Layer:
    """Tokens to channels, with every weight outside the layers that is not the head's."""
    stack = text_stack(model)
    w = Writer("embedding", stack.hidden_size, batch, stack.norm)
    g = w.graph
    ids = g.input("embedding/ids", "batch sequence", data=True, format="int64")
    if model.vocab_size:
        rows = model.embedding_rows or batch.vocabulary or model.vocab_size
        vocab = w.axis("vocab", rows, "tensor")
        width = w.axis("embedding_size", model.embedding_size) if model.embedding_size else "hidden"
        x = g.lookup("embedding/word", ids, f"{vocab} {width}", f"batch sequence {width}")
    else:
        x = g.input("embedding/in", TOKENS, data=True)
    x = w.weights("embedding", x, tuple(e for e in model.extra if not _at_head(e)), "embedding")
    for other in model.stacks:
        if not other.tower:
            x = _stack_weights(w, other, x)
    if model.embedding_size:
        (x,) = g.view([x], ("embedding/projected", TOKENS))
    return g.done(x)


def _stack_weights(w: Writer, stack: StackSpec, x: str) -> str:
    """What a stack holds outside its layers, an encoder's final norm with it: it has no layer of its own."""
    x = w.weights(stack.name, x, stack.extra, "embedding")
    if stack.final_norm and stack.name == "encoder":
        x = w.norm(f"{stack.name}/final_norm", x)
    return x


def _at_head(weight: WeightSpec) -> bool:
    return weight.name.startswith(("head_", "pooler"))


def head_graph(model: ArchitectureSpec, batch: Batch) -> Layer:
    """Final norm, what stands before the logits, logits and loss; without a vocabulary a plain loss."""
    stack = text_stack(model)
    w = Writer("head", stack.hidden_size, batch, stack.norm)
    g = w.graph
    x = g.input("final_norm_in", TOKENS)
    if stack.final_norm:
        x = w.norm("final_norm", x)
    x = w.weights("head", x, tuple(e for e in model.extra if _at_head(e)), "head")
    if not model.vocab_size or not model.head:
        return g.done(g.loss("head/loss", x, "batch sequence", kind="classes"))
    if model.embedding_size:
        (x,) = g.view([x], ("head/narrow", f"batch sequence {w.axis('embedding_size', model.embedding_size)}"))
    vocab = w.axis("vocab", batch.vocabulary or model.vocab_size, "tensor")
    logits = g.linear("head/logits", x, f"batch sequence {vocab}", module="head", to="head/logits", bias=model.head_bias, wide=True)
    return g.done(g.loss("head/loss", logits, "batch sequence"))


@lru_cache(maxsize=256)
def layered_network(model: ArchitectureSpec, micro_batch: int, sequence: int, vocab: int = 0) -> Network:
    """The layers of `model` for one micro-batch of `micro_batch` sequences; towers are not among them."""
    batch = Batch(micro_batch, sequence, vocab)
    layers: list[Layer] = []
    for stack in model.stacks:
        if not stack.tower:
            kinds = {name: layer_graph(stack, name, batch) for name in dict.fromkeys(stack.sequence())}
            layers += [kinds[name] for name in stack.sequence()]
    last = text_stack(model)
    boundary = float(micro_batch * sequence * last.hidden_size * last.residual_streams)
    return Network(
        embedding_graph(model, batch), tuple(layers), head_graph(model, batch), (), None, (boundary,) * (len(layers) + 1),
        model.tie_word_embeddings,
    )  # fmt: skip
