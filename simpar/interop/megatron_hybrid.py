"""Hybrid models among Megatron-LM's flags: one letter a residual step, layers of the Mamba stack (--spec).

Letters as in megatron/core/ssm/mamba_hybrid_layer_allocation.py (core 0.12 to 0.15): M a Mamba 2 mixer, * attention, - a
feed-forward, E experts. The mixer's convolution over 4 tokens, its scan in pieces of 128 and its norm are those of
megatron/core/ssm/mamba_mixer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from simpar.errors import Violation
from simpar.interop.megatron_flags import Flags
from simpar.parallel.pipeline import split_layers
from simpar.specs.architecture import ArchitectureSpec
from simpar.specs.counts import model_stages
from simpar.specs.mixers import AttentionSpec, BranchSpec, ExpertsSpec, FeedForwardSpec, Mamba2Spec
from simpar.specs.scenario import Scenario

SPEC: Final = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
_LETTERS: Final[dict[str, str]] = {"mamba2": "M", "attention": "*", "mlp": "-", "experts": "E"}
_NAMES: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SQUARED: Final = ("relu2", "squared_relu")
_CHUNK: Final = 128
_NORMS: Final = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


def steps_of(model: ArchitectureSpec) -> tuple[BranchSpec, ...] | None:
    """The branch of every residual step of the decoder, in order; None where a step is not one branch after a norm."""
    if len(model.stacks) != 1 or model.stacks[0].residual_streams > 1 or model.stacks[0].extra:
        return None
    stack, found = model.stacks[0], []
    for name in stack.sequence():
        for step in stack.layers[name].sublayers:
            if len(step.branches) != 1 or step.norm != "pre" or step.num_norms or step.shared_weights or step.extra:
                return None
            found.append(step.branches[0])
        if stack.layers[name].extra:
            return None
    return tuple(found)


def steps_per_stage(model: ArchitectureSpec, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Residual steps of each stage of `counts` layers."""
    stack = model.stacks[0]
    steps = iter([len(stack.layers[name].sublayers) for name in stack.sequence()])
    return tuple(sum(next(steps) for _ in range(count)) for count in counts)


def violations(scenario: Scenario, model: ArchitectureSpec) -> list[Violation]:
    """What of a model of layers Megatron-LM's hybrid stack has no flags for."""
    steps = steps_of(model)
    if steps is None or model.extra or not model.head or model.head_bias or model.embedding_size or model.embedding_rows:
        rule = "Megatron-LM's hybrid models are one stack of steps with one branch each, after a norm"
        return [Violation("model", model.kind, rule, "a model of mamba2, attention, mlp and experts, or of kind transformer")]
    found = [Violation("model.stacks", what, rule, right) for what, rule, right in _branch_rules(steps)]
    if model.stacks[0].norm not in _NORMS:
        found.append(Violation("model.stacks", model.stacks[0].norm, "Megatron-LM has no such norm", " or ".join(_NORMS)))
    if model.num_nextn_predict_layers:
        rule = "modules of multi-token prediction have a pattern of their own, which is not written"
        found.append(Violation("model.num_nextn_predict_layers", model.num_nextn_predict_layers, rule, "0"))
    plan = scenario.plan
    if plan.virtual_stages > 1:
        rule = "a hybrid model has one stage a rank in Megatron-LM"
        found.append(Violation("plan.virtual_stages", plan.virtual_stages, rule, "1"))
    counts = tuple(s.count for s in split_layers(model.num_layers, model_stages(plan), plan))
    if len(set(steps_per_stage(model, counts))) > 1:
        rule = f"Megatron-LM cuts a pattern of {len(steps)} letters into equal stages"
        found.append(Violation("plan.pp", plan.pp, rule, "a degree that divides the layers"))
    return found


def _branch_rules(steps: tuple[BranchSpec, ...]) -> Iterator[tuple[str, str, str]]:
    """(what, rule, what would be right) of each kind of branch."""
    known = tuple(_LETTERS)
    for kind in dict.fromkeys(step.kind for step in steps):
        if kind not in known:
            yield kind, "Megatron-LM's hybrid stack has no letter for it", f"one of {', '.join(known)}"
        elif len({step for step in steps if step.kind == kind}) > 1:
            yield kind, "differs from layer to layer, where flags say one of a kind", "one size for all"
    for step in dict.fromkeys(steps):
        if step.extra:
            yield step.kind, "has weights that no flag names", "none beside its own"
    for step in _of(steps, Mamba2Spec):
        if (step.conv_kernel, step.conv_bias, step.bias, step.out_norm) != (4, True, False, True):
            rule = "Megatron-LM's mixer convolves 4 tokens with a bias, has no other and a norm"
            yield "mamba2", rule, "conv_kernel = 4, conv_bias = true, bias = false, out_norm = true"
    for step in _of(steps, AttentionSpec):
        plain = AttentionSpec(
            num_heads=step.num_heads, num_key_value_heads=step.num_key_value_heads, head_dim=step.head_dim, q_bias=step.q_bias,
            k_bias=step.q_bias, v_bias=step.q_bias, qk_norm=step.qk_norm if step.qk_norm == "head" else "none",
            position=step.position if step.position in ("rope", "none") else "none",
        )  # fmt: skip
        if step != plain:
            yield "attention", "is more than queries, keys and values of a causal attention", "no window, gate, sinks or softcap"
    inner = [(s.gated, _plain(s.activation), s.bias) for s in steps if isinstance(s, (FeedForwardSpec, ExpertsSpec))]
    if len(set(inner)) > 1 or any(one not in ((True, "silu", False), (False, "relu2", False)) for one in inner):
        yield "mlp", "no flags of a hybrid model say this activation", "gated silu or squared_relu without gate, without biases"
    for step in _of(steps, ExpertsSpec):
        if step.zero_experts or step.input_size or step.router != "linear":
            yield "experts", "has parts that no flag names", "routed and shared experts"


def _of(steps: tuple[BranchSpec, ...], kind: type[Any]) -> list[Any]:
    """The different branches of one kind."""
    return [step for step in dict.fromkeys(steps) if isinstance(step, kind)]


def _plain(activation: str) -> str:
    return "relu2" if activation in _SQUARED else activation


def hybrid_flags(model: ArchitectureSpec, sequence_length: int = 1) -> list[str]:
    """Flags of a hybrid model without violations: sizes, pattern and layer spec; the vocabulary is written elsewhere."""
    steps = steps_of(model) or ()
    pattern = "".join(_LETTERS[step.kind] for step in steps)
    attention, mamba, experts = (next(iter(_of(steps, kind)), None) for kind in (AttentionSpec, Mamba2Spec, ExpertsSpec))
    feeds = [s for s in steps if isinstance(s, (FeedForwardSpec, ExpertsSpec))]
    width = next((s.width for s in feeds if isinstance(s, FeedForwardSpec)), 4 * model.stacks[0].hidden_size)
    flags = [
        f"--num-layers {len(steps)}",
        f"--hidden-size {model.stacks[0].hidden_size}",
        f"--ffn-hidden-size {width}",
        f"--num-attention-heads {attention.num_heads if attention else 1}",
        f"--max-position-embeddings {max(model.max_position_embeddings, sequence_length)}",
    ]
    if attention is not None:
        flags += ["--group-query-attention", f"--num-query-groups {attention.num_key_value_heads}"]
        flags += [f"--kv-channels {attention.head_dim}"]
        flags += ["--add-qkv-bias"] if attention.q_bias else []
        flags += ["--qk-layernorm"] if attention.qk_norm == "head" else []
    flags.append(f"--position-embedding-type {attention.position if attention else 'none'}")
    flags.append(f"--normalization {_NORMS[model.stacks[0].norm]}")
    flags += [] if model.tie_word_embeddings else ["--untie-embeddings-and-output-weights"]
    flags.append("--disable-bias-linear")
    flags.append("--swiglu" if not feeds or feeds[0].gated else "--squared-relu")
    if experts is not None:
        flags += expert_flags(_grouped(experts))
    if mamba is not None:
        flags += [
            f"--mamba-num-heads {mamba.num_heads}", f"--mamba-head-dim {mamba.head_dim}",
            f"--mamba-state-dim {mamba.state_size}", f"--mamba-num-groups {mamba.num_groups}",
        ]  # fmt: skip
    return [*flags, "--is-hybrid-model", f'--hybrid-override-pattern "{pattern}"', f"--spec {SPEC}"]


def _grouped(experts: ExpertsSpec) -> ExpertsSpec:
    """One group of experts is none."""
    return experts if experts.num_groups > 1 else experts.model_copy(update={"num_groups": 0, "top_groups": 0})


def expert_flags(experts: ExpertsSpec) -> list[str]:
    """Flags of routed experts, of whatever model."""
    flags = [
        f"--num-experts {experts.num_experts}", f"--moe-router-topk {experts.num_experts_per_tok}",
        f"--moe-ffn-hidden-size {experts.width}", "--moe-grouped-gemm",
    ]  # fmt: skip
    if experts.shared_width:
        flags.append(f"--moe-shared-expert-intermediate-size {experts.shared_width}")
    flags += ["--moe-shared-expert-gate"] if experts.shared_gate else []
    if experts.router_bias:
        flags += ["--moe-router-enable-expert-bias", "--moe-router-score-function sigmoid"]
    for name, count in (("num-groups", experts.num_groups), ("group-topk", experts.top_groups)):
        flags += [f"--moe-router-{name} {count}"] if count else []
    return flags


def chunk_differs(model: ArchitectureSpec) -> bool:
    """Whether a scan goes over its tokens in other pieces than Megatron-LM's, which no flag says."""
    return any(step.chunk != _CHUNK for step in _of(steps_of(model) or (), Mamba2Spec))


def read_hybrid(f: Flags, vocabulary: int) -> dict[str, Any] | None:
    """The model table of a hybrid's flags; None where there is no pattern. What cannot be read is refused."""
    if not f.has("hybrid-override-pattern"):
        return None
    pattern, hidden = f.text("hybrid-override-pattern").strip("'\""), f.number("hidden-size", 0)
    f.use("num-layers", "is-hybrid-model", "spec", "hybrid-attention-ratio", "hybrid-mlp-ratio")
    f.use("is-hybrid-model", "moe-grouped-gemm", "disable-bias-linear", "normalization", "moe-router-score-function")
    unknown = sorted({*pattern} - {*_NAMES})
    if unknown or not pattern or not hidden:
        rule = f"holds {' '.join(unknown)}" if unknown else "needs letters and --hidden-size"
        told = len(f.wrong)
        f.refuse("hybrid-override-pattern", pattern, rule, "letters M (Mamba 2), * (attention), - (feed-forward), E (experts)")
        if len(f.wrong) == told:
            f.warnings.append(f"--hybrid-override-pattern {pattern}: left out, as accepted; layers are plain")
        return None
    if f.number("num-layers", len(pattern)) != len(pattern):
        rule = f"has {len(pattern)} letters for {f.number('num-layers', 0)} layers"
        f.refuse("hybrid-override-pattern", pattern, rule, "one letter for each layer")
    parts = {"M": _read_mamba, "*": _read_attention, "-": _read_mlp, "E": _read_experts}
    layers = {_NAMES[c]: {"sublayers": [{"branches": [parts[c](f, hidden)]}]} for c in dict.fromkeys(pattern)}
    norm = "rmsnorm" if f.text("normalization", "LayerNorm") == "RMSNorm" else "layernorm"
    stack = {"hidden_size": hidden, "layers": layers, "pattern": [_NAMES[c] for c in pattern], "norm": norm}
    f.use("swiglu", "squared-relu", "num-attention-heads", "ffn-hidden-size", "position-embedding-type", "kv-channels")
    f.use("group-query-attention", "num-query-groups", "num-experts", "moe-router-topk", "moe-ffn-hidden-size")
    return {
        "kind": "layers", "vocab_size": vocabulary, "stacks": [stack], "even_routing": f.on("moe-router-enable-expert-bias"),
        "tie_word_embeddings": not f.on("untie-embeddings-and-output-weights"),
        "max_position_embeddings": f.number("max-position-embeddings", f.number("seq-length", 8192)),
    }  # fmt: skip


def _read_mamba(f: Flags, hidden: int) -> dict[str, Any]:
    dim = f.number("mamba-head-dim", 64)
    return {
        "kind": "mamba2", "num_heads": f.number("mamba-num-heads", 2 * hidden // dim), "head_dim": dim,
        "state_size": f.number("mamba-state-dim", 128), "num_groups": f.number("mamba-num-groups", 8), "chunk": _CHUNK,
    }  # fmt: skip


def _read_attention(f: Flags, hidden: int) -> dict[str, Any]:
    heads, bias = f.number("num-attention-heads", 1), f.on("add-qkv-bias")
    position = f.text("position-embedding-type", "learned_absolute")
    if position not in ("rope", "none"):
        f.refuse("position-embedding-type", position, "is not known of a hybrid model", "rope or none")
    return {
        "kind": "attention", "num_heads": heads, "head_dim": f.number("kv-channels", hidden // heads),
        "num_key_value_heads": f.number("num-query-groups", 1) if f.on("group-query-attention") else heads,
        "q_bias": bias, "k_bias": bias, "v_bias": bias, "qk_norm": "head" if f.on("qk-layernorm") else "none",
        "position": "rope" if position == "rope" else "none",
    }  # fmt: skip


def _inner(f: Flags) -> dict[str, Any]:
    gated = f.on("swiglu")
    if not gated and not f.on("squared-relu"):
        f.refuse("activation", "gelu", "is not known of a hybrid model", "--swiglu or --squared-relu")
    return {"gated": gated, "activation": "silu" if gated else "relu2"}


def _read_mlp(f: Flags, hidden: int) -> dict[str, Any]:
    return {"kind": "mlp", "width": f.number("ffn-hidden-size", 4 * hidden), **_inner(f)}


def _read_experts(f: Flags, hidden: int) -> dict[str, Any]:
    return {
        "kind": "experts", "num_experts": f.number("num-experts", 1), "num_experts_per_tok": f.number("moe-router-topk", 2),
        "width": f.number("moe-ffn-hidden-size", f.number("ffn-hidden-size", 4 * hidden)),
        "shared_width": f.number("moe-shared-expert-intermediate-size", 0), "shared_gate": f.on("moe-shared-expert-gate"),
        "router_bias": f.on("moe-router-enable-expert-bias"), "num_groups": f.number("moe-router-num-groups", 0),
        "top_groups": f.number("moe-router-group-topk", 0), **_inner(f),
    }  # fmt: skip


def same_steps(model: ArchitectureSpec) -> Any:
    """A model's steps in one form, whatever its layers are called and however many steps each of them has; None where they are
    more than a list of branches."""
    steps = steps_of(model)
    if steps is None:
        return None
    found = []
    for step in steps:
        table = (_grouped(step) if isinstance(step, ExpertsSpec) else step).model_dump()
        if isinstance(step, (FeedForwardSpec, ExpertsSpec)):
            table["activation"] = _plain(step.activation)
        found.append(table)
    stack = model.stacks[0]
    return [stack.hidden_size, stack.norm, stack.final_norm, found]
