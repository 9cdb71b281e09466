"""Mixers and feed-forwards as graph nodes: one function per kind of branch.

Shapes are those of transformers 5.23's classes; FLOPs of scans stand with their kinds in graph/ledger.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from simpar.graph.masks import CAUSAL, Mask
from simpar.graph.types import GELUS, Attention, Elementwise, Scan
from simpar.model.writer import NORMS, TOKENS, Writer, attention_mask
from simpar.specs.mixers import (
    AttentionSpec,
    BranchSpec,
    CustomSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LinearAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
)


def write_branch(w: Writer, branch: BranchSpec, x: str) -> list[str]:
    """The nodes of one branch on `x`; what it adds to the stream."""
    build: Callable[[Writer, Any, str], list[str]] | None = BUILDERS.get(branch.kind)
    outs = build(w, branch, x) if build else branch.write(w, x)
    if branch.extra:
        outs[0] = w.weights(f"{branch.kind}/extra", outs[0], branch.extra, branch.kind)
    return outs


# -- attention -----------------------------------------------------------------------------------------------------------


def _attention(w: Writer, a: AttentionSpec, x: str) -> list[str]:
    path = w.path("cross" if a.cross else "attention")
    heads, kv = w.axis("heads", a.num_heads, "tensor"), w.axis("kv_heads", a.num_key_value_heads, "groups")
    d, v = w.axis("head_dim", a.head_dim), w.axis("value_dim", a.v_head_dim or a.head_dim)
    one_bias = a.q_bias == a.k_bias == a.v_bias
    packed = a.key_value == "own" and one_bias and a.kv_hidden_size is None and a.qk_norm != "full" and not a.query_rank
    inputs = _packed(w, a, x, path, (heads, kv, d, v)) if packed else _apart(w, a, x, path, (heads, kv, d, v))
    if a.indexer is not None:
        inputs += _indexer(w, a.indexer, x, x, f"{path}/index", plain=True)
    out = w.graph.tensor(f"{path}/out", f"batch sequence {heads} {v}")
    held = (w.graph.parameter(f"{path}/sinks", (heads,)),) if a.sinks else ()
    keys = w.axis("other_keys", a.keys) if a.keys else "sequence"
    mask = attention_mask(a)
    w.graph.add(Attention(f"{path}/core", tuple(inputs), (out,), "core_attn", held, mask, heads, kv, d, v, keys=keys))
    if a.gate != "none":
        shape = f"{heads} {v}" if a.gate == "element" else heads
        gate = w.linear(f"{path}/gate", x, shape, "attention", a.gate_bias)
        out = w.graph.elementwise(f"{path}/gated", [out, gate], "gate", module="attention")
    return [w.linear(f"{path}/proj", out, TOKENS, "attention", a.o_bias)]


def _rotation(a: AttentionSpec) -> str:
    return "scaled_rope" if a.rope_factor else "rope"


def _packed(w: Writer, a: AttentionSpec, x: str, path: str, axes: tuple[str, str, str, str]) -> list[str]:
    """Queries, keys and values as one product."""
    heads, kv, d, v = axes
    qkv = w.axis("qkv", parts=(f"{heads} {d}", f"{kv} {d}", f"{kv} {v}"))
    parts = (f"batch sequence {heads} {d}", f"batch sequence {kv} {d}")
    normed, rotated = a.qk_norm == "head", a.position == "rope" and not a.cross
    last = f"{path}/qkv_out"  # what attention reads has one name, whichever node makes it
    to = "" if normed or rotated else last
    y = w.graph.linear(f"{path}/qkv", x, f"batch sequence {qkv}", module="attention", to=to, bias=a.q_bias)
    w.graph.of_linears(y, 1 if a.packed else 3)
    if normed:
        kept = tuple(zip(parts, (f"{path}/qk_norm_in", f"{path}/k_norm_in"), strict=True))
        to = "" if rotated else last
        y = w.graph.norm(f"{path}/qk_norm", y, kind=NORMS[a.qk_norm_kind], module="attention", to=to, parts=kept)
    if rotated:
        y = w.graph.elementwise(f"{path}/rope", [y], _rotation(a), module="attention", to=last, over=parts)
    return [y]


def _apart(w: Writer, a: AttentionSpec, x: str, path: str, axes: tuple[str, str, str, str]) -> list[str]:
    """Queries, keys and values by matrices of their own; keys and values of another layer are not read again."""
    heads, kv, d, v = axes
    shapes = {"q": (w.axis("query", parts=(f"{heads} {d}",)), a.q_bias)}
    if a.key_value in ("own", "key_only"):
        shapes["k"] = (w.axis("key", parts=(f"{kv} {d}",)), a.k_bias)
    if a.key_value == "own":
        shapes["v"] = (w.axis("value", parts=(f"{kv} {v}",)), a.v_bias)
    found = []
    for name, (axis, bias) in shapes.items():
        source = x if name == "q" or a.kv_hidden_size is None else _other_stream(w, a.kv_hidden_size, path)
        if name == "q" and a.query_rank:  # Multi-matrix factorisation attention, arXiv 2412.19255.
            down = w.linear(f"{path}/q_down", x, w.axis("q_latent", a.query_rank), "attention")
            source = w.graph.norm(f"{path}/q_down_norm", down, kind=NORMS["rmsnorm"], module="attention")
        y = w.linear(f"{path}/{name}", source, axis, "attention", bias)
        rows = f"batch sequence {heads if name == 'q' else kv} {d}"
        if a.qk_norm == "full" and name != "v":
            y = w.graph.norm(f"{path}/{name}_norm", y, kind=NORMS[a.qk_norm_kind], module="attention")
        elif a.qk_norm == "head" and name != "v":
            kept, kind = ((rows, f"{path}/{name}_norm_in"),), NORMS[a.qk_norm_kind]
            y = w.graph.norm(f"{path}/{name}_norm", y, kind=kind, module="attention", parts=kept)
        if a.position == "rope" and name != "v" and not a.cross:
            y = w.graph.elementwise(f"{path}/{name}_rope", [y], _rotation(a), module="attention", over=(rows,))
        found.append(y)
    return found


def _other_stream(w: Writer, width: int, path: str) -> str:
    """Tokens of a stream of another width, given from outside."""
    name = f"{path}/stream"
    if name in w.graph.tensors:
        return name
    return w.graph.input(name, f"batch sequence {w.axis('other_hidden', width)}", data=True)


def _indexer(w: Writer, i: IndexerSpec, x: str, queries: str, path: str, *, plain: bool = False) -> list[str]:
    """Queries of every head, one key, a weight per head (or norms: `plain`); scores over all causal keys; the best chosen."""
    if not i.owned:
        return []
    heads, dim = w.axis("index_heads", i.num_heads), w.axis("index_dim", i.head_dim)
    kind = NORMS["rmsnorm" if plain else "layernorm"]
    q = w.linear(f"{path}_q", queries, f"{heads} {dim}", "attention")
    k = w.graph.norm(f"{path}_k_norm", w.linear(f"{path}_k", x, dim, "attention"), kind=kind, module="attention")
    inputs = [q, k]
    if plain:
        inputs[0] = w.graph.norm(f"{path}_q_norm", q, kind=kind, module="attention")
    else:
        inputs.append(w.linear(f"{path}_weights", x, heads, "attention"))
    pairs = CAUSAL.attended(w.batch.sequence) * w.batch.size / i.compress
    chosen = w.axis("chosen", max(1, i.top_k // i.block))
    moved = 2.0 * w.tokens * (i.num_heads + 1) * i.head_dim + 4.0 * w.tokens * i.top_k / i.block
    flops = 2.0 * i.num_heads * i.head_dim * pairs
    return [w.kernel(f"{path}_scores", tuple(inputs), f"batch sequence {chosen}", "core_attn", flops=flops, moved=moved)]


def _latent_attention(w: Writer, a: LatentAttentionSpec, x: str) -> list[str]:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: queries, and keys with values, from narrow latents."""
    path, g = w.path("attention"), w.graph
    heads = w.axis("heads", a.num_heads, "tensor")
    d, v = w.axis("head_dim", a.qk_nope_head_dim + a.qk_rope_head_dim), w.axis("value_dim", a.v_head_dim)
    latent, rope = w.axis("kv_latent", a.kv_lora_rank), w.axis("rope_dim", a.qk_rope_head_dim or 1)
    both = w.axis("kv_latent_rope", parts=(latent, rope) if a.qk_rope_head_dim else (latent,))
    query = w.axis("query", parts=(f"{heads} {d}",))
    values = (f"{heads} {v}",)
    nope = (f"{heads} {w.axis('nope_dim', a.qk_nope_head_dim)}", *values) if a.qk_nope_head_dim else values
    key_value = w.axis("key_value", parts=nope)
    source = x
    if a.q_lora_rank:
        down = w.linear(f"{path}/q_down", x, w.axis("q_latent", a.q_lora_rank), "attention", a.a_bias)
        source = g.norm(f"{path}/q_norm", down, module="attention")
    down = w.linear(f"{path}/kv_down", x, both, "attention", a.a_bias)
    kv_in, key_rope = g.view(
        [down], (f"{path}/kv_norm_in", f"batch sequence {latent}"), (f"{path}/key_rope", f"batch sequence {rope}")
    )
    kv = g.norm(f"{path}/kv_norm", kv_in, module="attention")
    q = w.linear(f"{path}/q_up", source, query, "mla_up_proj")
    kv = w.linear(f"{path}/kv_up", kv, key_value, "mla_up_proj")
    made = tuple(g.tensor(f"{path}/{name}", f"batch sequence {heads} {width}") for name, width in (("q", d), ("k", d), ("v", v)))
    g.add(Elementwise(f"{path}/rope", (q, kv, key_rope), made, "mla_up_proj", op="latent_rope"))
    inputs = [*made]
    mask = Mask("window", a.window) if a.window else CAUSAL
    if a.indexer is not None:
        inputs += _indexer(w, a.indexer, x, source, f"{path}/index")
        mask = Mask("top_k", a.indexer.top_k, a.indexer.block)
    axes = {"heads": heads, "kv_heads": heads, "head_dim": d, "value_dim": v}
    out = g.attention(f"{path}/core", inputs, f"batch sequence {heads} {v}", mask=mask, to=f"{path}/out", **axes)
    if a.gate != "none":
        gate = w.linear(f"{path}/gate", x, f"{heads} {v}" if a.gate == "element" else heads, "attention")
        out = g.elementwise(f"{path}/gated", [out, gate], "gate", module="attention")
    return [w.linear(f"{path}/proj", out, TOKENS, "attention", a.a_bias)]


# -- state spaces and linear attention -----------------------------------------------------------------------------------


def _mamba1(w: Writer, m: Mamba1Spec, x: str) -> list[str]:
    """Gu and Dao 2023: channels with a state each; step size, input and output maps from the convolved channels."""
    path, g = w.path("mamba"), w.graph
    inner, state = w.axis("channels", m.inner_size, "tensor"), w.axis("state", m.state_size)
    rank = w.axis("step_rank", m.time_step_rank)
    both = w.axis("channels_in", parts=(inner, inner))
    y = w.linear(f"{path}/in", x, both, path, m.bias)
    u, z = g.view([y], (f"{path}/u", f"batch sequence {inner}"), (f"{path}/z", f"batch sequence {inner}"))
    u = w.convolution(f"{path}/conv", u, (f"{path}/conv_out", inner), m.conv_kernel, m.conv_bias, path)
    maps = w.axis("step_maps", parts=(rank, state, state))
    y = w.linear(f"{path}/x", u, maps, path)
    if m.inner_norms:
        y = g.norm(f"{path}/inner_norms", y, module=path)
    step, pair = w.axis("step_in", parts=(rank,)), w.axis("state_pair", parts=(state, state))
    dt, bc = g.view([y], (f"{path}/step", f"batch sequence {step}"), (f"{path}/bc", f"batch sequence {pair}"))
    dt = w.linear(f"{path}/dt", dt, inner, path, bias=True)
    held = (g.parameter(f"{path}/a_log", (inner, state)), g.parameter(f"{path}/skip", (inner,)))
    unit = w.axis("unit", 1)
    out = g.tensor(f"{path}/scan.out", f"batch sequence {inner}")
    scan = Scan(f"{path}/scan", (u, dt, bc, z), (out,), path, held, "diagonal", inner, state, unit, chunk=1, saved=(u, dt, bc, z))
    return [w.linear(f"{path}/out", g.add(scan), TOKENS, path, m.bias)]


def _mamba2(w: Writer, m: Mamba2Spec, x: str) -> list[str]:
    """Dao and Gu 2024: one projection to gate, input, B, C and steps; convolution; state space by heads; gated norm."""
    path, g = w.path("mamba"), w.graph
    heads, groups = w.axis("ssm_heads", m.num_heads, "tensor"), w.axis("ssm_groups", m.num_groups, "groups")
    p, n = w.axis("ssm_dim", m.head_dim), w.axis("state", m.state_size)
    inner = w.axis("ssm_inner", parts=(f"{heads} {p}",))
    mixed = w.axis("ssm_channels", parts=(f"{heads} {p}", f"{groups} {n}", f"{groups} {n}"))
    every = w.axis("ssm_in", parts=(f"{heads} {p}", f"{heads} {p}", f"{groups} {n}", f"{groups} {n}", heads))
    y = w.linear(f"{path}/in", x, every, path, m.bias)
    z, xbc, dt = g.view(
        [y],
        (f"{path}/z", f"batch sequence {inner}"),
        (f"{path}/xbc", f"batch sequence {mixed}"),
        (f"{path}/dt", f"batch sequence {heads}"),
    )
    xbc = w.convolution(f"{path}/conv", xbc, (f"{path}/conv_out", mixed), m.conv_kernel, m.conv_bias, path)
    held = tuple(g.parameter(f"{path}/{name}", (heads,)) for name in ("a_log", "dt_bias", "skip"))
    out = g.tensor(f"{path}/scan.out", f"batch sequence {inner}")
    y = g.add(Scan(f"{path}/scan", (xbc, dt), (out,), path, held, "ssd", heads, n, p, groups, m.chunk))
    y = (
        g.norm(f"{path}/out_norm", y, module=path, gate=z)
        if m.out_norm
        else g.elementwise(f"{path}/gated", [y, z], "gate", module=path)
    )
    return [w.linear(f"{path}/out", y, TOKENS, path, m.bias)]


def _delta(w: Writer, m: DeltaSpec, x: str) -> list[str]:
    """Yang et al. 2024, arXiv 2412.06464: queries, keys, values convolved, a decay and a step per head, a gated norm per head."""
    path, g = w.path("delta"), w.graph
    keys, heads = w.axis("key_heads", m.num_key_heads, "tensor"), w.axis("delta_heads", m.num_value_heads, "tensor")
    dk, dv = w.axis("delta_key", m.key_head_dim), w.axis("delta_value", m.value_head_dim)
    qkv = w.axis("delta_qkv", parts=(f"{keys} {dk}", f"{keys} {dk}", f"{heads} {dv}"))
    y = w.linear(f"{path}/qkv", x, qkv, path)
    beta = w.linear(f"{path}/beta", x, heads, path)
    inputs, held = [y, beta], []
    if m.decay == "head":
        inputs.append(w.linear(f"{path}/decay", x, heads, path))
        held = [g.parameter(f"{path}/{name}", (heads,)) for name in ("a_log", "dt_bias")]
    elif m.decay == "channel":
        inputs.append(_low_rank(w, f"{path}/decay", x, m.decay_rank, f"{heads} {dk}", path))
        held = [g.parameter(f"{path}/a_log", (heads,)), g.parameter(f"{path}/dt_bias", (heads, dk))]
    if m.conv_kernel:
        inputs[0] = w.convolution(f"{path}/conv", y, (f"{path}/conv_out", qkv), m.conv_kernel, m.conv_bias, path)
    shape = f"batch sequence {heads} {dv}"
    out = g.tensor(f"{path}/scan.out", shape)
    y = g.add(Scan(f"{path}/scan", tuple(inputs), (out,), path, tuple(held), "delta", heads, dk, dv, "", m.chunk))
    gate = _low_rank(w, f"{path}/gate", x, m.gate_rank, f"{heads} {dv}", path) if m.gate else ""
    y = g.norm(f"{path}/out_norm", y, module=path, gate=gate)
    return [w.linear(f"{path}/out", y, TOKENS, path)]


def _low_rank(w: Writer, name: str, x: str, rank: int, out: str, module: str) -> str:
    if rank:
        x = w.linear(f"{name}_down", x, w.axis(f"{name}_rank", rank), module)
    return w.linear(f"{name}_up" if rank else name, x, out, module)


def _linear_attention(w: Writer, m: LinearAttentionSpec, x: str) -> list[str]:
    path, g = w.path("linear_attention"), w.graph
    heads = w.axis("linear_heads", m.num_heads, "tensor")
    dk, dv = w.axis("linear_key", m.key_head_dim), w.axis("linear_value", m.value_head_dim)
    kv = w.axis("linear_kv_heads", m.num_key_value_heads, "groups") if m.num_key_value_heads else heads
    qkv = w.axis("linear_qkv", parts=(f"{heads} {dk}", f"{kv} {dk}", f"{kv} {dv}"))
    inner = w.axis("linear_inner", parts=(f"{heads} {dv}",))
    y = w.linear(f"{path}/qkv", x, qkv, path, m.bias)
    if m.conv_kernel:
        y = w.convolution(f"{path}/conv", y, (f"{path}/conv_out", qkv), m.conv_kernel, m.conv_bias, path)
    by_head = m.norm_size == m.value_head_dim  # one norm's weights for all heads
    out = g.tensor(f"{path}/scan.out", f"batch sequence {heads} {dv}" if by_head else f"batch sequence {inner}")
    y = g.add(Scan(f"{path}/scan", (y,), (out,), path, (), m.scan, heads, dk, dv, "", m.chunk))
    if m.norm_size:
        y = g.norm(f"{path}/out_norm", y, module=path)
    if m.gate:
        gate = w.linear(f"{path}/gate", x, f"{heads} {dv}" if by_head else inner, path, m.bias)
        y = g.elementwise(f"{path}/gated", [y, gate], "gate", module=path)
    return [w.linear(f"{path}/out", y, TOKENS, path, m.bias)]


def _short_conv(w: Writer, m: ShortConvSpec, x: str) -> list[str]:
    """LFM2: B and C gate the channels before and after the convolution."""
    path, g = w.path("short_conv"), w.graph
    width = w.axis("conv_width", m.width, "tensor")
    y = w.linear(f"{path}/in", x, w.axis("conv_in", parts=(width, width, width)), path, m.bias)
    b, c, u = g.view([y], *((f"{path}/{name}", f"batch sequence {width}") for name in ("b", "c", "u")))
    y = g.elementwise(f"{path}/before", [b, u], "gate", module=path)
    y = w.convolution(f"{path}/conv", y, (f"{path}/conv_out", width), m.kernel, m.bias, path)
    y = g.elementwise(f"{path}/after", [c, y], "gate", module=path)
    return [w.linear(f"{path}/out", y, TOKENS, path, m.bias)]


def _recurrent(w: Writer, m: RecurrentSpec, x: str) -> list[str]:
    """De et al. 2024, arXiv 2402.19427, section 2.4: two branches, convolution, gates by blocks, an elementwise recurrence."""
    path, g = w.path("recurrent"), w.graph
    width = w.axis("lru", m.width, "tensor")
    u, y = (w.linear(f"{path}/{name}", x, width, path, bias=True) for name in ("x", "y"))
    u = w.convolution(f"{path}/conv", u, (f"{path}/conv_out", width), m.conv_kernel, True, path)
    head = m.width // m.num_heads
    blocks = (w.axis("lru_gates", 2 * m.num_heads), w.axis("lru_block_in", head), w.axis("lru_block", head))
    held = tuple(g.parameter(f"{path}/gates.{n}", axes) for n, axes in (("weight", blocks), ("bias", (blocks[0], blocks[2]))))
    flops, moved = 4.0 * m.width * head * w.tokens, 6.0 * m.width * w.tokens
    gates = w.kernel(f"{path}/gates", (u,), f"batch sequence {width}", path, flops=flops, moved=moved)
    decay = (g.parameter(f"{path}/decay", (width,)),)
    y = g.tensor(f"{path}/scan.out", g.axes_of(u))
    scanned = g.add(Elementwise(f"{path}/scan", (u, gates), (y,), path, (*held, *decay), "recurrence"))
    return [w.linear(f"{path}/out", g.elementwise(f"{path}/gated", [scanned, y], "gate", module=path), TOKENS, path, bias=True)]


# -- feed-forwards -------------------------------------------------------------------------------------------------------


def _pair(w: Writer, role: str, size: int, split: str, gated: bool) -> tuple[str, str]:
    """Axes of a feed-forward: what the first product makes (gate and input side by side), what the second takes."""
    width = w.axis(role, size, split)
    return w.axis(f"{width}_in", parts=(width, width) if gated else (width,)), width


def _two_products(w: Writer, x: str, path: str, axes: tuple[str, str], m: FeedForwardSpec | ExpertsSpec) -> str:
    (wide, narrow), bias = axes, m.bias
    op = m.activation if m.activation in GELUS and not m.gated else "activation"
    module = path.split("_2")[0]
    both = w.graph.linear(f"{path}/fc1", x, f"batch sequence {wide}", module=module, to=f"{path}/activation_in", bias=bias)
    w.graph.of_linears(both, 1 + m.gated)
    out = w.graph.elementwise(f"{path}/activation", [both], op, module=module, to=f"{path}/fc2_in", out=f"batch sequence {narrow}")
    return w.graph.linear(f"{path}/fc2", out, TOKENS, module=module, bias=bias)


def _feed_forward(w: Writer, m: FeedForwardSpec, x: str) -> list[str]:
    return [_two_products(w, x, w.path("mlp"), _pair(w, "ffn", m.width, "tensor", m.gated), m)]


def _experts(w: Writer, m: ExpertsSpec, x: str) -> list[str]:
    """Router, rows to their experts, two products by expert, rows back; shared experts beside."""
    g = w.graph
    routed = m.num_experts + m.zero_experts
    experts, scores = w.axis("experts", m.num_experts, "experts"), w.axis("scores", routed)
    rows = w.axis("rows", round(w.tokens * m.num_experts_per_tok * m.num_experts / routed), "rows")
    wide, narrow = _pair(w, "expert_ffn", m.width, "expert_tensor", m.gated)
    inside = w.axis("expert_hidden", m.input_size) if m.input_size else "hidden"
    source, choice = x, ""
    if m.router == "linear":
        logits = g.linear("moe/router", x, f"batch sequence {scores}", module="moe", to="moe/logits", bias=m.router_bias, wide=True)
        choice = g.select("moe/topk", logits)
    if m.input_size:
        source = w.linear("moe/latent_down", x, inside, "moe")
    given = [source, choice] if choice else [source]
    y = g.permute("moe/permute", given, f"{rows} {inside}", to="moe/fc1_in")
    to = "moe/activation_in" if m.limit is None else "moe/fc1_out"
    y = g.grouped(experts, g.of_linears(g.linear("moe/fc1", y, f"{rows} {wide}", module="moe", to=to, bias=m.bias), 1 + m.gated))
    if m.limit is not None:
        y = g.elementwise("moe/clamp", [y], "clamp", module="moe_act", to="moe/activation_in")
    y = g.elementwise("moe/activation", [y], "activation", module="moe_act", to="moe/fc2_in", out=f"{rows} {narrow}")
    y = g.grouped(experts, g.linear("moe/fc2", y, f"{rows} {inside}", module="moe", bias=m.bias))
    if m.bias:
        y = g.elementwise("moe/fc2_bias", [y], "expert_bias", module="moe")
    back = g.permute("moe/unpermute", [y, choice] if choice else [y], f"batch sequence {inside}", back=True)
    outs = [w.linear("moe/latent_up", back, TOKENS, "moe") if m.input_size else back]
    if m.shared_width:
        outs.append(_two_products(w, x, "shared_experts", _pair(w, "shared_ffn", m.shared_width, "tensor", m.gated), m))
        if m.shared_gate:
            outs.append(g.linear("shared_experts/gate", x, "batch sequence", module="shared_experts"))
    return outs


def _custom(w: Writer, m: CustomSpec, x: str) -> list[str]:
    """Weights in `extra`; here its kernel: a scan of so many FLOPs, or attention over a mask with compressed keys."""
    path, length = w.path("custom"), w.batch.sequence
    y = x
    if m.kernel_flops:
        y = w.kernel(f"{path}/kernel", (y,), TOKENS, path, flops=m.kernel_flops * w.tokens, moved=8.0 * w.hidden * w.tokens)
    if m.index_columns:
        pairs = Mask("compressed", 0, m.compress).attended(length) * w.batch.size
        moved = 2.0 * m.index_columns * w.tokens + 4.0 * m.top_k * w.tokens
        y = w.kernel(f"{path}/index", (y,), TOKENS, "core_attn", flops=2.0 * m.index_columns * pairs, moved=moved)
    if m.attention_columns:
        mask = Mask("window", m.window) if m.window else CAUSAL
        if m.compress:
            mask = Mask("compressed", m.window or 0, m.compress, m.top_k)
        flops = 2.0 * m.attention_columns * mask.attended(length) * w.batch.size
        y = w.kernel(f"{path}/core", (y,), TOKENS, "core_attn", flops=flops, moved=2.0 * m.attention_columns * w.tokens)
    return [y if y != x else w.graph.view([x], (f"{path}/in", TOKENS))[0]]


BUILDERS: Final[dict[str, Callable[[Writer, Any, str], list[str]]]] = {
    "attention": _attention, "latent_attention": _latent_attention, "mamba1": _mamba1, "mamba2": _mamba2, "delta": _delta,
    "linear_attention": _linear_attention, "short_conv": _short_conv, "recurrent": _recurrent, "mlp": _feed_forward,
    "experts": _experts, "custom": _custom,
}  # fmt: skip
"""Kind of branch -> its nodes. A new mixer is one class in specs/mixers.py and one function here."""
