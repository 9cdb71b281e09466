"""Transformer blocks as ops over named axes: embedding, dense and MoE layers, head with loss.

Bytes of memory-bound ops count each activation read and written once at 2 bytes unless said otherwise. Saved tensors
follow what TransformerEngine (fused) and torch eager (unfused) keep; docs/formulas.md sums them and names the sources.
"""

from __future__ import annotations

from simpar.specs.model import TransformerSpec
from simpar.workload.ops import Axes, Block, Op, OpType, Region, Seam, Tensor
from simpar.workload.style import BlockStyle

Items = list[Op | Seam]


def axis_sizes(model: TransformerSpec, micro_batch: int, sequence: int, vocab: int | None = None) -> Axes:
    """Every axis letter of the legend in ops.py with its unsharded size."""
    n, k = model.num_attention_heads, model.num_key_value_heads
    h = j = model.head_dim
    extra: dict[str, int] = {}
    if model.mla:
        a = model.mla
        h, j, k = a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim, n
        extra = {
            "q": a.q_lora_rank,
            "l": a.kv_lora_rank + a.qk_rope_head_dim,
            "c": a.kv_lora_rank,
            "z": n * h,
            "w": n * (a.qk_nope_head_dim + a.v_head_dim),
        }
    f = model.intermediate_size
    sizes = {
        "b": micro_batch, "s": sequence, "t": sequence, "d": model.hidden_size, "n": n, "k": k, "h": h, "j": j,
        "p": n * h + k * (h + j), "f": f, "u": f * (2 if model.gated_mlp else 1), "v": vocab or model.vocab_size,
        "o": 2 * model.hidden_size, **extra,
    }  # fmt: skip
    if model.moe:
        moe = model.moe
        sizes |= {"e": moe.num_experts, "y": micro_batch * sequence * moe.num_experts_per_tok}
    return tuple(sorted(sizes.items()))


def _replace(sizes: Axes, **changes: int) -> Axes:
    return tuple(sorted({**dict(sizes), **changes}.items()))


def _norm(name: str, model: TransformerSpec, style: BlockStyle, axes: str = "bsd", region: Region = "residual") -> Op:
    statistics = 4.0 if model.norm == "rmsnorm" else 8.0
    saves = [Tensor(f"{name}_in", axes, 2, region), Tensor(f"{name}_stats", axes[:-1], statistics, region)]
    if not style.fused_norm:
        saves.append(Tensor(f"{name}_fp32", axes, 8, region))
    weights = (axes[-1],) if model.norm == "rmsnorm" else (axes[-1], axes[-1])
    # Composite: what torch's dispatcher sees read and written, RMSNorm in fp32 and back (8 kernels, 17 backward).
    kernel, traffic, gradient = ("norm", 4.0, 8.0) if style.fused_norm else ("composite", 36.0, 95.0)
    return Op(
        name, OpType.MEMORY, "layernorm", region, kernel=kernel, forward_bytes=((axes, traffic),),
        backward_bytes=((axes, gradient),), saves=tuple(saves), parameters=weights,
        kernels=1 if style.fused_norm else 8,
    )  # fmt: skip


def _linear(
    name: str, equation: str, module: str, region: Region, source: Tensor, *, bias: bool = False
) -> Op:
    return Op(name, OpType.MATMUL, module, region, equation=equation, saves=(source,), bias=bias)


def _residual(name: str, style: BlockStyle) -> Op:
    saves = (Tensor(f"{name}_mask", "bsd", 1, "residual"),) if style.dropout else ()
    forward = 6.0 + (1.0 if style.dropout else 0.0)
    if not style.fused_residual:
        forward += 4.0
    return Op(
        name, OpType.MEMORY, "residual", "residual", kernel="residual", forward_bytes=(("bsd", forward),),
        backward_bytes=(("bsd", 4.0 + (1.0 if style.dropout else 0.0)),), saves=saves,
        kernels=1 if style.fused_residual else 2,
    )  # fmt: skip


def _core_attention(model: TransformerSpec, style: BlockStyle) -> Op:
    qkv = (
        (Tensor("attention/qkv_out", "bsp", 2, "tensor"),)
        if model.mla is None
        else (
            Tensor("attention/q", "bsnh", 2, "tensor"),
            Tensor("attention/k", "bsnh", 2, "tensor"),
            Tensor("attention/v", "bsw" if style.value_views else "bsnj", 2, "tensor"),
        )
    )
    out = Tensor("attention/out", "bsnj", 2, "tensor")
    if style.flash_attention:
        inner: tuple[Tensor, ...] = (Tensor("attention/lse", "bsn", 4, "tensor"),)
    else:
        # softmax output, and under dropout its mask and its output (Korthikanti et al. 2022: 5 a s per token)
        inner = (Tensor("attention/softmax", "bnst", 5 if style.dropout else 2, "tensor"),)
    if style.qkv_copies and model.mla is None:
        inner = (*inner, Tensor("attention/qkv_copies", "bsp", 2 * style.qkv_copies, "tensor"))
    if style.output_copies:
        inner = (*inner, Tensor("attention/out_copies", "bsnj", 2 * style.output_copies, "tensor"))
    return Op(
        "attention/core", OpType.ATTENTION, "core_attn", "tensor", saves=(*qkv, out, *inner), causal=True,
        kernels=1 if style.flash_attention else 4,
    )  # fmt: skip


def _mha(model: TransformerSpec, style: BlockStyle) -> Items:
    ln = Tensor("input_norm_out", "bsd", style.linear_input_bytes, "residual")
    if style.saves_gathered_input:
        ln = Tensor("input_norm_out", "bsd", style.linear_input_bytes, "tensor")
    items: Items = [
        Seam("attention_in", ("bsd",), "attention"),
        _linear("attention/qkv", "bsd,dp->bsp", "attention", "tensor", ln, bias=model.attention_bias),
    ]
    if model.qk_norm:
        items.append(
            Op("attention/qk_norm", OpType.MEMORY, "attention", "tensor", kernel="norm", parameters=("h", "h"),
               forward_bytes=(("bsnh", 4.0), ("bskh", 4.0)), backward_bytes=(("bsnh", 8.0), ("bskh", 8.0)),
               saves=(Tensor("attention/qk_norm_in", "bsnh", 2, "tensor"), Tensor("attention/k_norm_in", "bskh", 2, "tensor")),
               kernels=2)
        )  # fmt: skip
    if model.position == "rope":
        # The same of a rotary embedding in elementary kernels, by complex numbers or by halves; runs of torchtitan and of
        # transformers under DeepSpeed are met by less, so only where norms are such chains too.
        kernel, traffic, gradient = ("rope", 4.0, 4.0) if style.fused_rope else ("rope", 10.0, 10.0)
        if not style.fused_rope and not style.fused_norm:
            kernel, traffic, gradient = "composite", 21.0, 27.0
        items.append(
            Op("attention/rope", OpType.MEMORY, "attention", "tensor", kernel=kernel,
               forward_bytes=(("bsnh", traffic), ("bskh", traffic)), backward_bytes=(("bsnh", gradient), ("bskh", gradient)),
               kernels=2 if style.fused_rope else 8)
        )  # fmt: skip
    items += [
        _core_attention(model, style),
        _linear("attention/proj", "bsnj,njd->bsd", "attention", "tensor",
                Tensor("attention/out", "bsnj", 2, "tensor"), bias=model.attention_out_bias),
        Seam("attention_out", ("bsd",), "attention"),
    ]  # fmt: skip
    return items


def _mla(model: TransformerSpec, style: BlockStyle) -> Items:
    assert model.mla is not None
    ln = Tensor("input_norm_out", "bsd", style.linear_input_bytes, "residual")
    in_bytes = style.linear_input_bytes
    items: Items = []
    if model.mla.q_lora_rank:
        items += [
            _linear("attention/q_down", "bsd,dq->bsq", "attention", "residual", ln),
            _norm("attention/q_norm", model, style, "bsq"),
        ]
    items += [
        _linear("attention/kv_down", "bsd,dl->bsl", "attention", "residual", ln),
        _norm("attention/kv_norm", model, style, "bsc"),
        Seam("attention_in", ("bsq", "bsl") if model.mla.q_lora_rank else ("bsd", "bsl"), "attention"),
    ]
    q_in = Tensor("attention/q_latent", "bsq", in_bytes, "residual") if model.mla.q_lora_rank else ln
    q_equation = "bsq,qz->bsz" if model.mla.q_lora_rank else "bsd,dz->bsz"
    items += [
        _linear("attention/q_up", q_equation, "mla_up_proj", "tensor", q_in),
        _linear("attention/kv_up", "bsc,cw->bsw", "mla_up_proj", "tensor",
                Tensor("attention/kv_latent", "bsc", in_bytes, "residual")),
        Op("attention/rope", OpType.MEMORY, "mla_up_proj", "tensor", kernel="rope", forward_bytes=(("bsnh", 8.0),),
           backward_bytes=(("bsnh", 8.0),), kernels=2),
        _core_attention(model, style),
        _linear("attention/proj", "bsnj,njd->bsd", "attention", "tensor", Tensor("attention/out", "bsnj", 2, "tensor")),
        Seam("attention_out", ("bsd",), "attention"),
    ]  # fmt: skip
    return items


def _activation(name: str, module: str, style: BlockStyle, rows: str, region: Region, factor: int) -> Op:
    """The non-linearity (and gate); `factor` is the width of its input over f (2 when gated)."""
    wide, narrow = ("u", "f")
    saves = [Tensor(f"{name}_in", rows + wide, 2, region)]
    forward, backward = ((rows + wide, 2.0), (rows + narrow, 2.0)), ((rows + wide, 4.0), (rows + narrow, 2.0))
    kernels = 1
    if not style.fused_activation:
        forward = ((rows + wide, 2.0), (rows + narrow, 6.0))
        backward = ((rows + wide, 6.0), (rows + narrow, 8.0))
        kernels = factor
        if factor == 2:
            saves.append(Tensor(f"{name}_gate", rows + narrow, 2, region))
    return Op(name, OpType.MEMORY, module, region, kernel="activation", forward_bytes=forward, backward_bytes=backward,
              saves=tuple(saves), kernels=kernels)  # fmt: skip


def _mlp(model: TransformerSpec, style: BlockStyle, prefix: str = "mlp", *, seams: bool = True) -> Items:
    region: Region = "tensor"
    ln_region: Region = "tensor" if style.saves_gathered_input else "residual"
    ln = Tensor("mlp_norm_out", "bsd", style.linear_input_bytes, ln_region)
    module = "mlp" if prefix == "mlp" else "shared_experts"
    items: Items = [
        _linear(f"{prefix}/fc1", "bsd,du->bsu", module, region, ln, bias=model.mlp_bias),
        _activation(f"{prefix}/activation", module, style, "bs", region, 2 if model.gated_mlp else 1),
        _linear(f"{prefix}/fc2", "bsf,fd->bsd", module, region,
                Tensor(f"{prefix}/fc2_in", "bsf", style.linear_input_bytes, region), bias=model.mlp_bias),
    ]  # fmt: skip
    if seams:
        return [Seam("mlp_in", ("bsd",), module), *items, Seam("mlp_out", ("bsd",), module)]
    return items


def _moe(model: TransformerSpec, style: BlockStyle) -> Items:
    moe = model.moe
    assert moe is not None
    items: Items = [
        Op("moe/router", OpType.MATMUL, "moe", "residual", equation="bsd,de->bse", bias=moe.router_bias,
           saves=(Tensor("mlp_norm_out", "bsd", style.linear_input_bytes, "residual"), Tensor("moe/logits", "bse", 4, "residual"),
                  Tensor("moe/probs", "bse", 4, "residual"), Tensor("moe/mask", "bse", 1, "residual"))),
        Op("moe/topk", OpType.MEMORY, "moe", "residual", kernel="softmax", forward_bytes=(("bse", 16.0),),
           backward_bytes=(("bse", 16.0),), kernels=6),
        Op("moe/permute", OpType.MEMORY, "moe", "expert", kernel="permute", forward_bytes=(("yd", 4.0),),
           backward_bytes=(("yd", 4.0),), kernels=2),
        Seam("moe_dispatch", ("yd",), "moe"),
        Op("moe/fc1", OpType.GROUPED_MATMUL, "moe", "expert", equation="yd,edu->yu", bias=model.mlp_bias,
           saves=(Tensor("moe/fc1_in", "yd", style.linear_input_bytes, "expert"),)),
        *_expert_clamp(model, style),
        _activation("moe/activation", "moe_act", style, "y", "expert", 2 if model.gated_mlp else 1),
        Op("moe/fc2", OpType.GROUPED_MATMUL, "moe", "expert", equation="yf,efd->yd", bias=model.mlp_bias,
           saves=(Tensor("moe/fc2_in", "yf", style.linear_input_bytes, "expert"), Tensor("moe/row_probs", "y", 4, "expert"))),
        *_expert_bias(model, style),
        Seam("moe_combine", ("yd",), "moe"),
        Op("moe/unpermute", OpType.MEMORY, "moe", "expert", kernel="permute", forward_bytes=(("yd", 4.0),),
           backward_bytes=(("yd", 4.0),), kernels=2,
           saves=(Tensor("moe/weighed", "yd", 4, "expert"),) if style.expert_output_fp32 else ()),
    ]  # fmt: skip
    return items


def _expert_clamp(model: TransformerSpec, style: BlockStyle) -> Items:
    """Clamp of both halves and their concatenation; backward: the masked gradient and its two halves put together."""
    if model.swiglu_limit is None or style.fused_expert_bias:
        return []
    return [
        Op("moe/clamp", OpType.MEMORY, "moe_act", "expert", kernel="residual", forward_bytes=(("yu", 8.0),),
           backward_bytes=(("yu", 10.0),), saves=(Tensor("moe/fc1_out", "yu", 2, "expert"),), kernels=3)
    ]  # fmt: skip


def _expert_bias(model: TransformerSpec, style: BlockStyle) -> Items:
    """Output bias of each expert times the routing probability, in fp32, concatenated and cast back; backward: casts of the
    gradient, its sums over the rows (bias) and over the width (probability)."""
    if not model.mlp_bias or style.fused_expert_bias:
        return []
    return [
        Op("moe/fc2_bias", OpType.MEMORY, "moe", "expert", kernel="residual", forward_bytes=(("yd", 28.0),),
           backward_bytes=(("yd", 36.0),), kernels=4)
    ]  # fmt: skip


def layer_block(model: TransformerSpec, sizes: Axes, style: BlockStyle, *, moe: bool, cross_attention: bool = False) -> Block:
    """One transformer layer: attention, then a dense or expert feed-forward."""
    attention = _mla(model, style) if model.mla else _mha(model, style)
    head: Items = [_norm("input_norm", model, style), *attention]
    if model.block_norms == 4:
        head.append(_norm("attention_post_norm", model, style))
    if cross_attention:
        head += [_residual("self_residual", style), _norm("cross_norm", model, style), *_cross(model, style)]
    if model.parallel_block:
        norm = [] if model.block_norms == 1 else [_norm("mlp_norm", model, style)]
        items = [*head, *norm, *_mlp(model, style), _residual("residual", style)]
        return Block("layer", tuple(items), sizes)
    items = [*head, _residual("attention_residual", style), _norm("mlp_norm", model, style)]
    post = [_norm("mlp_post_norm", model, style)] if model.block_norms == 4 else []
    if not moe:
        return Block("layer", (*items, *_mlp(model, style), *post, _residual("mlp_residual", style)), sizes)
    spec = model.moe
    assert spec is not None
    width = spec.moe_intermediate_size
    items += _moe(model, style)
    expert_sizes = _replace(sizes, f=width, u=width * (2 if model.gated_mlp else 1))
    if spec.shared_expert_intermediate_size:
        shared = spec.shared_expert_intermediate_size
        expert_sizes = _replace(expert_sizes, x=shared, g=shared * (2 if model.gated_mlp else 1))
        shared_items = [_rename(i) for i in _mlp(model, style, "shared_experts")]
        items += shared_items
        if spec.shared_expert_gate:
            items.append(
                Op("shared_experts/gate", OpType.MATMUL, "shared_experts", "residual", equation="bsd,d->bs",
                   saves=(Tensor("mlp_norm_out", "bsd", style.linear_input_bytes, "residual"),))
            )  # fmt: skip
    items += [*post, _residual("mlp_residual", style)]
    return Block("moe_layer", tuple(items), expert_sizes)


def _rename(item: Op | Seam) -> Op | Seam:
    """A feed-forward item with its widths on the shared experts' own axes (f -> x, u -> g)."""
    if isinstance(item, Seam):
        return item

    def swap(text: str) -> str:
        return text.replace("f", "x").replace("u", "g")

    from dataclasses import replace

    return replace(
        item, equation=swap(item.equation),
        forward_bytes=tuple((swap(a), v) for a, v in item.forward_bytes),
        backward_bytes=tuple((swap(a), v) for a, v in item.backward_bytes),
        saves=tuple(replace(t, axes=swap(t.axes)) for t in item.saves),
    )  # fmt: skip


def _cross(model: TransformerSpec, style: BlockStyle) -> Items:
    """Cross-attention: queries from the decoder, keys and values from the encoder output."""
    from dataclasses import replace

    items: Items = []
    for item in _mha(model, style):
        if isinstance(item, Op):
            item = replace(
                item, name=item.name.replace("attention/", "cross/"), causal=False,
                saves=tuple(replace(t, name="cross/" + t.name) for t in item.saves),
            )  # fmt: skip
            if item.kernel == "rope":
                continue
        items.append(item)
    return items


def embedding_block(model: TransformerSpec, sizes: Axes, style: BlockStyle) -> Block:
    """Token (and learned position) lookup, and BLOOM's norm after it."""
    parameters = ("vd",)
    items: Items = [
        Op("embedding/word", OpType.MEMORY, "embedding", "tensor", kernel="embedding", forward_bytes=(("bsd", 4.0),),
           backward_bytes=(("bsd", 8.0),), parameters=parameters, needs_input_gradient=False,
           saves=(Tensor("embedding/ids", "bs", 8, "residual"),)),
        Seam("embedding_out", ("bsd",), "embedding"),
    ]  # fmt: skip
    if model.position == "learned":
        items.append(
            Op("embedding/position", OpType.MEMORY, "embedding", "residual", kernel="residual", parameters=("md",),
               forward_bytes=(("bsd", 6.0),), backward_bytes=(("bsd", 4.0),))
        )  # fmt: skip
        sizes = _replace(sizes, m=model.max_position_embeddings)
    if style.dropout:
        items.append(_residual("embedding/dropout", style))
    if model.embedding_norm:
        items.append(_norm("embedding/norm", model, style))
    if model.num_decoder_layers and model.final_norm:
        # The encoder's own final norm; it has no block of its own.
        items.append(_norm("embedding/encoder_final_norm", model, style))
    if model.relative_position_buckets:
        stacks = 2 if model.num_decoder_layers else 1
        sizes = _replace(sizes, r=model.relative_position_buckets)
        items.append(
            Op("embedding/relative", OpType.MEMORY, "embedding", "residual", kernel="embedding", parameters=("rn",) * stacks)
        )
    return Block("embedding", tuple(items), sizes)


def head_block(model: TransformerSpec, sizes: Axes, style: BlockStyle, *, norm: bool = True) -> Block:
    """Final norm (a multi-token-prediction module brings its own), logits, cross-entropy."""
    ln_region: Region = "tensor" if style.saves_gathered_input else "residual"
    items: Items = []
    if model.final_norm and norm:
        items.append(_norm("final_norm", model, style))
    traffic = style.loss_bytes
    # Logits in bf16 plus the fp32 copies that live until the backward (semantics of each framework's loss).
    kept = (2.0 + 4.0 * style.logits_fp32_copies) * style.logits_gathered + (2.0 if style.logits_gathered > 1 else 0.0)
    items += [
        Seam("head_in", ("bsd",), "head"),
        _linear("head/logits", "bsd,dv->bsv", "head", "tensor", Tensor("head/in", "bsd", 2, ln_region), bias=model.head_bias),
        Op("head/loss", OpType.MEMORY, "loss", "tensor", kernel=style.loss_kernel, forward_bytes=(("bsv", traffic[0]),),
           backward_bytes=(("bsv", traffic[1]),), saves=(Tensor("head/logits", "bsv", kept / style.loss_chunks, "tensor"),),
           kernels={"fused": 3, "unfused": 8, "chunked": 3 * style.loss_chunks}[style.loss]),
        Seam("loss", ("bs",), "loss"),
    ]  # fmt: skip
    return Block("head", tuple(items), sizes)


def mtp_block(model: TransformerSpec, sizes: Axes, style: BlockStyle, *, moe: bool) -> Block:
    """A multi-token-prediction module: two norms, a projection of the pair, a layer, a norm; its head is separate."""
    layer = layer_block(model, sizes, style, moe=moe)
    items: Items = [
        _norm("mtp/hidden_norm", model, style),
        _norm("mtp/embedding_norm", model, style),
        _linear("mtp/proj", "bso,od->bsd", "mtp", "residual", Tensor("mtp/pair", "bso", 2, "residual")),
        *layer.items,
        _norm("mtp/final_norm", model, style),
    ]
    return Block("mtp_layer", tuple(items), layer.sizes)
