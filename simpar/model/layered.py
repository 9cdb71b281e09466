"""A model of any layers as the graphs that a pipeline cuts: embedding, layers by kind, head."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from simpar.graph.types import Layer, Lookup
from simpar.model.carried import boundary_elements
from simpar.model.forms import general
from simpar.model.mixers import write_branch
from simpar.model.network import EncoderInput, EncoderLayer, Network, packed
from simpar.model.writer import NORMS, TOKENS, Batch, Writer
from simpar.specs.architecture import ArchitectureSpec, LayerSpec, StackSpec, SublayerSpec, TokenModel
from simpar.specs.mixers import WeightSpec
from simpar.specs.model import TransformerSpec


def layer_graph(stack: StackSpec, name: str, batch: Batch) -> Layer:
    """The graph of one kind of layer."""
    w = Writer(name, stack.hidden_size, batch, stack.norm)
    made = w.graph.done(_layer(w, stack.layers[name], w.graph.input("input_norm_in", TOKENS)))
    return replace(made, shared=tuple((f"{stack.name}/{name}", node) for name, node in w.shared))


def _layer(w: Writer, layer: LayerSpec, x: str) -> str:
    """The nodes of a layer on `x`; its output."""
    last = len(layer.sublayers) - 1
    for number, step in enumerate(layer.sublayers):
        label = "attention" if number == 0 and last else "mlp" if number == last and last else f"step_{number}"
        begin = len(w.graph.nodes)
        x = _sublayer(w, step, x, label if last else "")
        if step.shared_weights:
            own = (node.name for node in w.graph.nodes[begin:] if node.parameters)
            w.shared += [(f"{step.shared_weights}/{name}", name) for name in own]
    return w.weights("", x, layer.extra, "residual")


def mtp_graph(stack: StackSpec, batch: Batch) -> Layer:
    """A multi-token-prediction module: two norms, a projection of the pair, a layer as the stack's last, a norm; its head is
    separate. A stack whose layers are single mixers or feed-forwards (Nemotron) gives the last of each.
    """
    w = Writer("mtp_layer", stack.hidden_size, batch, stack.norm)
    g, kind = w.graph, NORMS[stack.norm]
    pair = w.axis("pair", parts=("hidden", "hidden"))
    normed = [
        g.norm(f"mtp/{n}_norm", g.input(f"mtp/{n}_norm_in", TOKENS), kind=kind, module="mtp") for n in ("hidden", "embedding")
    ]
    (both,) = g.view(normed, ("mtp/pair", f"batch sequence {pair}"))
    x = g.linear("mtp/proj", both, TOKENS, module="mtp")
    for layer in mtp_layers(stack):
        x = _layer(w, layer, x)
    return g.done(g.norm("mtp/final_norm", x, kind=kind, module="mtp"))


def mtp_layers(stack: StackSpec) -> tuple[LayerSpec, ...]:
    """The last layer with attention; where that has no feed-forward, the last one with a feed-forward after it."""
    found: list[LayerSpec] = []
    order = [stack.layers[name] for name in reversed(stack.sequence())]
    for wanted in (("attention", "latent_attention"), ("mlp", "experts")):
        if not any(_has(layer, wanted) for layer in found):
            found += [layer for layer in order if _has(layer, wanted)][:1]
    return tuple(found or order[:1])


def _has(layer: LayerSpec, kinds: tuple[str, ...]) -> bool:
    return any(branch.kind in kinds for step in layer.sublayers for branch in step.branches)


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
    if step.modulated:
        scaled = w.graph.elementwise(w.path(f"{name}_modulation"), [normed[0]], "modulation", module="layernorm")
        normed = [scaled] * len(step.branches)
    outs = [out for branch, given in zip(step.branches, normed, strict=True) for out in write_branch(w, branch, given)]
    if step.norm in ("post", "sandwich"):
        outs[0] = w.norm(f"{label or 'layer'}_post_norm", outs[0])
    if step.modulated:
        outs[0] = w.graph.elementwise(w.path(f"{name}_gating"), [outs[0]], "gating", module="residual")
    outs[0] = w.weights("", outs[0], step.extra, "residual")
    return w.graph.residual(w.path(f"{label}_residual" if label else "residual"), *outs, x)


def embedding_graph(model: ArchitectureSpec, batch: Batch) -> Layer:
    """Tokens to channels, with every weight outside the layers that is not the head's."""
    stack = model.text
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


def transformer_embedding(model: TransformerSpec, batch: Batch) -> Layer:
    """Token (and learned position) lookup and its dropout, BLOOM's norm after it."""
    w = Writer("embedding", model.hidden_size, batch, model.norm)
    g = w.graph
    g.axis("vocab", batch.vocabulary or model.vocab_size, "tensor")
    ids = g.input("embedding/ids", "batch sequence", data=True, format="int64")
    x = g.lookup("embedding/word", ids, "vocab hidden", TOKENS)
    if model.position == "learned":
        g.axis("positions", model.max_position_embeddings)
        x = g.lookup("embedding/position", ids, "positions hidden", TOKENS, add=x)
    x = g.elementwise("embedding/dropout", [x], "dropout", module="embedding")
    if model.embedding_norm:
        x = w.norm("embedding/norm", x)
    if model.num_decoder_layers and model.final_norm:
        # The encoder's own final norm; it has no layer of its own.
        x = w.norm("embedding/encoder_final_norm", x)
    if model.relative_position_buckets:
        g.axis("buckets", model.relative_position_buckets)
        g.axis("bias_heads", model.num_attention_heads)
        tables = range(2 if model.num_decoder_layers else 1)
        held = tuple(g.parameter(f"embedding/relative.weight{i}", "buckets bias_heads") for i in tables)
        bias = g.tensor("embedding/relative.out", "buckets bias_heads")
        g.add(Lookup("embedding/relative", (), (bias,), "embedding", held))
    return g.done(x)


def _stack_weights(w: Writer, stack: StackSpec, x: str) -> str:
    """What a stack holds outside its layers, an encoder's final norm with it: it has no layer of its own."""
    x = w.weights(stack.name, x, stack.extra, "embedding")
    if stack.final_norm and stack.name == "encoder":
        x = w.norm(f"{stack.name}/final_norm", x)
    return x


def _at_head(weight: WeightSpec) -> bool:
    return weight.name.startswith(("head_", "pooler"))


def head_graph(model: ArchitectureSpec, batch: Batch, *, norm: bool = True) -> Layer:
    """Final norm (a multi-token-prediction module brings its own), what stands before the logits, logits and loss; without a
    vocabulary a plain loss.
    """
    stack = model.text
    w = Writer("head", stack.hidden_size, batch, stack.norm)
    g = w.graph
    has_norm = stack.final_norm and norm
    x = g.input("final_norm_in" if has_norm else "head/in", TOKENS)
    if has_norm:
        x = w.norm("final_norm", x)
    x = w.weights("head", x, tuple(e for e in model.extra if _at_head(e)), "head")
    if not model.vocab_size or not model.head:
        return g.done(g.loss("head/loss", x, "batch sequence", kind="classes"))
    if model.embedding_size:
        (x,) = g.view([x], ("head/narrow", f"batch sequence {w.axis('embedding_size', model.embedding_size)}"))
    vocab = w.axis("vocab", batch.vocabulary or model.vocab_size, "tensor")
    logits = g.linear("head/logits", x, f"batch sequence {vocab}", module="head", to="head/logits", bias=model.head_bias, wide=True)
    return g.done(g.loss("head/loss", logits, "batch sequence"))


def encoder_layers(model: ArchitectureSpec, given: EncoderInput, carried: float) -> list[EncoderLayer]:
    """The layers of an encoder on its inputs, and its weights beside them as one more: stem, final norm, projector.

    Args:
        carried: elements of other encoders' outputs that pass through.
    """
    stack = next(stack for stack in model.stacks if stack.name == given.encoder)
    batch, still = Batch(given.count, given.tokens), given.frozen != "none"
    kinds = {name: layer_graph(stack, name, batch) for name in dict.fromkeys(stack.sequence())}
    inside = float(given.count * given.tokens * stack.hidden_size * stack.residual_streams) + carried
    w = Writer(f"{stack.name}_projector", stack.hidden_size, batch, stack.norm)
    x = w.graph.input(f"{stack.name}/out", TOKENS, data=still)
    x = w.weights(stack.name, x, stack.extra, "projector")
    if stack.final_norm:
        x = w.norm("final_norm", x)
    outside = float(given.count * (given.tokens // stack.merge) * model.text.hidden_size) + carried
    return [
        *(EncoderLayer(kinds[name], still, inside) for name in stack.sequence()),
        EncoderLayer(w.graph.done(x), given.frozen == "all", outside),
    ]


@lru_cache(maxsize=512)
def token_network(
    spec: TokenModel, micro_batch: int, sequence: int, vocab: int = 0, inputs: tuple[EncoderInput, ...] = (),
    documents: tuple[int, ...] = (),
) -> Network:  # fmt: skip
    """The layers of a model for one micro-batch of `micro_batch` sequences; of towers those that have `inputs`."""
    model, batch = general(spec), Batch(micro_batch, sequence, vocab)
    embedding = transformer_embedding(spec, batch) if isinstance(spec, TransformerSpec) else embedding_graph(model, batch)
    layers: list[Layer] = []
    for stack in model.stacks:
        if not stack.tower:
            kinds = {name: layer_graph(stack, name, batch) for name in dict.fromkeys(stack.sequence())}
            layers += [kinds[name] for name in stack.sequence()]
    last = model.text
    modules = (mtp_graph(last, batch),) * model.num_nextn_predict_layers
    encoders: list[EncoderLayer] = []
    for given in inputs:
        encoders += encoder_layers(model, given, encoders[-1].passes_on if encoders else 0.0)
    made = Network(
        embedding, tuple(layers), head_graph(model, batch), modules,
        head_graph(model, batch, norm=False) if modules else None, boundary_elements(model, micro_batch * sequence),
        model.tie_word_embeddings, tuple(encoders),
    )  # fmt: skip
    return packed(made, documents)
