"""The table of Hugging Face families: `model_type` -> what its class builds without asking its file.

A family that differs from Llama by nothing is one word in the line of `LLAMA`; one whose file says everything needs none: an
unknown `model_type` is read as Llama-like by its keys, with a note. Each line is checked in tests against transformers' own class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from simpar.model import alone, bert, encoders, fla, gemma, hybrids, linear, older, patterns, recent, sparse, speech, uncommon
from simpar.model.decoder import Decoder
from simpar.model.family import Family, Weights
from simpar.model.gemma import per_layer_embeddings, per_layer_inputs
from simpar.model.pieces import linear as biased
from simpar.model.pieces import lookup, matrix, norm_extra, vector
from simpar.model.sparse import hyper_connections, hyper_head
from simpar.specs.mixers import WeightSpec

LLAMA: Final = Family()
GENERAL: Final = Family(
    qkv_bias="attention_bias|qkv_bias|use_qkv_bias|add_qkv_bias|bias", o_bias="attention_bias|attention_out_bias|bias",
    mlp_bias="mlp_bias|add_bias_linear", qk_norm="use_qk_norm|qk_layernorm|normalize_qk_projections",
)  # fmt: skip
"""A family without a line: Llama, with what its file switches on."""
PLAIN: Final = Family(qkv_bias=False, o_bias=False, mlp_bias=False)
GPT: Final = Family(norm="layernorm", qkv_bias=True, o_bias=True, mlp_bias=True, gated=False)
PACKED: Final = replace(GPT, packed=True)
BERT: Final = replace(GPT, layout="post", final_norm=False, square=True, tied=True, causal=False, position="absolute")
ROTARY_BERT: Final = replace(BERT, position="rope")
MODERN_BERT: Final = Family(norm="layernorm_no_bias", embedding_norm=True, head_bias="decoder_bias", tied=True)
QWEN3: Final = Family(qk_norm="head", mlp_bias=False)
POST: Final = Family(layout="post", qk_norm="full", mlp_bias=False)
GEMMA: Final = Family(layout="sandwich", mlp_bias=False)
COHERE: Final = Family(norm="layernorm_no_bias", layout="parallel", mlp_bias=False)
GATED_QWEN: Final = Family(qk_norm="head", mlp_bias=False, gate="element", shared_gate=True)

INKLING: Final = (*("hybrid_sliding",) * 5, "hybrid")

FLA_TRANSFORMERS = ("transformer", "forgetting_transformer", "stickbreaking_attn")


def where(d: Decoder, switch: str, weight: WeightSpec) -> Weights:
    """`weight` unless the file switches it off."""
    return (weight,) if d.k.get(switch, default=True) else ()


def all_shared(d: Decoder, key: str, width: int) -> int:
    """Of experts whose width has a key of its own."""
    return int(d.k.get(key, default=width) * d.k.get("n_shared_experts", default=1))


def of_layers(d: Decoder, i: int) -> dict[str, Any]:
    """Laguna: heads by layer, a gate per head or element."""
    heads = d.k.listed("num_attention_heads_per_layer")
    gate = "head" if d.k.get("gating", default=True) in (True, "per-head") else "element"
    return {"gate": gate, **({"num_heads": heads[i]} if heads else {})}


def of_every_head(d: Decoder, i: int) -> dict[str, Any]:
    """A norm of every head on its own, where switched on."""
    normed = d.k.get("use_qk_norm", "qk_layernorm", default=False)
    return {"qk_norm": "full", "qk_norm_kind": "layernorm_no_bias"} if normed else {}


def of_languages(d: Decoder) -> Weights:
    """XLM's embeddings of languages."""
    languages = d.k.get("n_langs", default=1)
    named = languages > 1 and d.k.get("use_lang_emb", default=True)
    return (lookup("languages", languages, d.hidden),) if named else ()


TABLE: Final[dict[str, Family]] = {
    **dict.fromkeys(bert.BERT_LIKE, BERT),
    **dict.fromkeys(FLA_TRANSFORMERS, PLAIN),
    **dict.fromkeys((*fla.MIXERS, "mla", "samba"), LLAMA),
    **dict.fromkeys(("hgrn", "hgrn2"), Family(  # lower bounds of the forget gates, one row per layer
        stack_extra=lambda d: where(d, "use_lower_bound", vector("lower_bounds", d.num_layers * d.hidden)))),
    **dict.fromkeys(
        ("llama", "cwm", "granite", "iquestcoder", "smollm3", "internlm3", "granitemoe", "granitemoeshared",
         "nemotron-nas", "kimi_k2", "bamba", "falcon_h1", "zamba", "zamba2", "vaultgemma", "mamba", "mamba2", "falcon_mamba",
         "exaone", "yi", "baichuan", "hunyuan_vl_text", "granite_docling_text", "internlm2", "deepseek", "minicpm",
         "arctic"),
        LLAMA),
    # image tokens attended at some layers, whose gates are learned; rows of its own for image tokens
    "mllama_text_model": Family(
        rows=lambda d: d.vocabulary() + 8,
        layer_extra=lambda d, i: (vector("gates", 2),) if d.types[i] == "cross_attention" else ()),
    # two score maps subtracted, by four vectors per layer
    "diffllama": Family(attention_extra=lambda d, i: (vector("lambda", 4 * d.head_dim),)),
    "llama4_text": Family(shared=lambda d, width: width),
    "deepseek_v4": Family(  # one shared expert, whatever `n_shared_experts` says
        layer_extra=lambda d, i: hyper_connections(d), stack_extra=hyper_head, shared=lambda d, width: width),
    "deci": Family(attention=lambda d, i: (
        {"num_key_value_heads": groups[i]} if (groups := d.k.listed("num_key_value_heads_per_layer")) else {})),
    # every layer's second norm is scaled by two narrow layers of the delay, once for a sequence
    "voxtral_realtime_text": replace(PLAIN, layer_extra=lambda d, i: (
        matrix("delay_down", d.hidden, 32, uses=0.0), matrix("delay_up", 32, d.hidden, uses=0.0))),
    **dict.fromkeys(
        ("mistral", "ministral", "ministral3", "mixtral", "phi3", "jetmoe",
         "olmo_hybrid", "phi4_multimodal", "phi4mm"),
        PLAIN),
    "minimax": replace(PLAIN, turns=("full_attention", "linear_attention")),
    **dict.fromkeys(
        ("qwen3", "qwen3_vl_text", "qwen3_vl_moe_text", "mellum", "hunyuan_v1_dense", "hunyuan_v1_moe", "lara_mini"),
        QWEN3),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mistral4", "longcat_flash", "minicpm3", "youtu",
         "aria_text", "sarvam_mla", "gemma"),
        Family(mlp_bias=False)),
    "mistral_large4_text": Family(  # a learned scale of each frequency of RoPE
        mlp_bias=False, turns=("indexed_attention",),
        stack_extra=lambda d: (vector("rope_scales", d.k.number("qk_rope_head_dim") // 2),)),
    "glm5_next_text": Family(mlp_bias=False, first_dense=3, layer_extra=lambda d, i: hyper_connections(d)),
    **dict.fromkeys(("glm4_moe_lite", "axk1", "axk2"), Family(mlp_bias=False, first_dense=1)),
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), Family(
        mlp_bias=False, first_dense=1, layer_extra=lambda d, i: hyper_connections(d, mixes=False), stack_extra=hyper_head)),
    "hy_v3": replace(  # without shared experts one as wide as a dense layer's feed-forward
        QWEN3, first_dense=1, shared=lambda d, width: int(d.k.get("num_shared_experts", default=1)) * width or d.intermediate(0)),
    "qwen3_moe": replace(QWEN3, dense_up_to=0),
    "dots1": replace(QWEN3, dense_up_to=-1),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), GATED_QWEN),
    "qwen3_next": replace(GATED_QWEN, dense_up_to=0),
    "qwen4_exp_text": replace(GATED_QWEN, final_norm=False, stack_extra=lambda d: d.mix("head")),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), POST),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text"), replace(COHERE, attention=of_every_head)),
    "jamba": Family(position="none", dense_up_to=1),
    "granitemoehybrid": Family(position="none", dense_up_to=0),
    "chatglm": Family(qkv_bias="add_qkv_bias", o_bias="add_bias_linear", mlp_bias="add_bias_linear"),
    **dict.fromkeys(("qwen2", "mimo", "jet_nemotron"), Family(qkv_bias=True, o_bias=False, mlp_bias=False)),
    "qwen": Family(qkv_bias=True, o_bias=False, mlp_bias=False, width=lambda d, i: d.k.number("intermediate_size") // 2),
    "internlm": Family(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "openelm": Family(qk_norm="normalize_qk_projections", tied=True),
    **dict.fromkeys(
        ("bailing_moe", "bailing_moe_linear"),
        Family(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", qk_norm="use_qk_norm",
        router_bias="moe_router_enable_expert_bias")),
    "hunyuan": Family(  # Large: keys and values of every second layer serve the next as well (cross-layer attention)
        qk_norm="use_qk_norm", tied=True, attention=lambda d, i: (
            {"key_value": "shared"} if d.k.get("use_cla", default=False) and i % d.k.get("cla_share_factor", default=2) else {})),
    "bitnet": Family(square=True, attention_extra=lambda d, i: (vector("sub_norm", d.heads * d.head_dim),)),
    **dict.fromkeys(("grok-1", "hyperclovax"), Family(layout="sandwich")),
    "ouro": Family(layout="sandwich", further=lambda d: (biased("exit_gate", d.hidden, 1),)),
    "orion": Family(norm="layernorm"),
    "rwkv": Family(norm="layernorm", stack_extra=lambda d: (vector("pre_norm", 2 * d.hidden),)),
    **dict.fromkeys(("rwkv6", "rwkv7"), Family(
        norm="layernorm", stack_extra=lambda d: where(d, "norm_first", vector("pre_norm", 2 * d.hidden)))),
    "phi4flash": Family(
        norm="layernorm", mlp_bias=False, qkv_bias=True, o_bias=True, head_bias="lm_head_bias", tied=True,
        attention_extra=lambda d, i: (vector("lambda", 4 * d.head_dim), vector("sub_norm", 2 * d.head_dim))),
    "smallthinker": replace(PLAIN, activation="relu"),
    "llada": Family(qkv_bias="qkv_bias", o_bias="mlp_bias"),
    "pangu_ultra_moe": Family(layout="sandwich", mlp_bias=False, router_bias="router_enable_expert_bias"),
    "helium": Family(o_bias=False, square=True),
    **dict.fromkeys(("glm", "solar_open"), Family(o_bias=False, mlp_bias=False)),
    "mimo_v2_flash": Family(o_bias=False, mlp_bias=False, first_dense=1),
    "qwen2_moe": Family(qkv_bias="qkv_bias", o_bias=False, mlp_bias=False, shared_gate=True, dense_up_to=0),
    **dict.fromkeys(("glm_ocr_text", "glm4"), Family(layout="sandwich", o_bias=False, mlp_bias=False)),
    "glm4v_text": Family(layout="sandwich", qkv_bias=True, o_bias=False, mlp_bias=False),
    **dict.fromkeys(("glm4_moe", "sarvam_moe"), Family(qk_norm="use_qk_norm", o_bias=False, mlp_bias=False)),
    "seed_oss": Family(o_bias="attention_out_bias"),
    "minimax_m2": Family(qk_norm="full", qkv_bias=False, o_bias=False, mlp_bias=False),
    **dict.fromkeys(("exaone_moe", "lfm2", "lfm2_moe"), replace(PLAIN, qk_norm="head")),
    **dict.fromkeys(("minimax_m3_vl_text", "minimax_m3"), replace(
        PLAIN, qk_norm="head", shared=lambda d, width: all_shared(d, "shared_intermediate_size", width))),
    "exaone4": Family(layout="post", qk_norm="head", qkv_bias=False, o_bias=False, mlp_bias=False, full_every=4),
    "afmoe": Family(layout="sandwich", qk_norm="head", gate="element", router_bias=True, mlp_bias=False, full_every=4),
    "laguna": Family(qk_norm="head", router_bias=True, mlp_bias=False, gate="head", first_dense=1, attention=of_layers),
    "flint": Family(qk_norm="head", sinks=True, mlp_bias=False, dense_up_to=0),
    "bailing_hybrid": Family(gate="head", first_dense=1, tied=None),
    "dots3_note_text": Family(
        gate="head", mlp_bias=False, first_dense=1,
        shared=lambda d, width: all_shared(d, "shared_experts_intermediate_size", width)),
    "ernie4_5": Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    "ernie4_5_moe": replace(PLAIN, router_bias=True),
    "molmo2_text": replace(  # further rows of the embedding for image tokens
        QWEN3, o_bias=False, rows=lambda d: d.vocabulary() + int(d.k.get("additional_vocab_size", default=128))),
    "ernie4_5_vl_moe_text": replace(PLAIN, router_bias=True, first_dense=1),
    "inkling_text": Family(qk_norm="head", embedding_norm=True, mlp_bias=False, qkv_bias=False, o_bias=False, turns=INKLING),
    "inkling2_text": Family(
        embedding_norm=True, gate="element", mlp_bias=False, qkv_bias=False, o_bias=False, turns=INKLING,
        rows=lambda d: d.k.size("vocab_size"), stack_extra=lambda d: (vector("final_block_query", d.hidden),)),
    "muse_glimmer_text": Family(layout="sandwich", gate="element", mlp_bias=False, full_every=4),
    "muse_spark_text": Family(  # a gate vector on both residuals
        gate="element", mlp_bias=False, full_every=4, layer_extra=lambda d, i: (vector("residual_gates", 2 * d.hidden),)),
    "kimi_linear": Family(mlp_bias=False, first_dense=1, tied=None),
    "xlstm": replace(PLAIN, tied=None),
    "zaya": Family(
        mlp_bias=False, head_bias="lm_head_bias", turns=("hybrid",),
        layer_extra=lambda d, i: (vector("residual_scales", 8 * d.hidden),),
        stack_extra=lambda d: (vector("input_scales", 2 * d.hidden),)),
    "kolibri1": replace(GEMMA, qk_norm="head"),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), replace(
        GEMMA, qk_norm="head", layer_extra=lambda d, i: per_layer_inputs(d), stack_extra=per_layer_embeddings)),
    "gemma3n_text": replace(GEMMA, qk_norm="head", full_every=5),
    "beam": Family(  # a bias per head in the output gate
        layout="sandwich", qk_norm="head", gate="element", mlp_bias=False, first_dense=3,
        attention_extra=lambda d, i: (vector("gate_bias", d.heads),)),
    **dict.fromkeys(("step3p7", "step3p5"), Family(qk_norm="head", gate="head", mlp_bias=False)),
    "step3_text": Family(  # queries from a narrow latent that all heads share
        mlp_bias=False, attention=lambda d, i: {"query_rank": d.k.number("share_q_dim")}),
    **dict.fromkeys(("apertus", "apertus1p5_text"), Family(qk_norm="head", mlp_bias=False, gated=False, mlp_scalars=2)),
    "arcee": Family(gated=False),
    "nanochat": Family(norm="unweighted", mlp_bias=False, gated=False),
    **dict.fromkeys(
        ("jais2", "nemotron"),
        replace(GPT, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")),
    "nemotron_h": Family(position="none", qkv_bias=False, o_bias=False, gated=False, tied=None),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), Family(sinks=True)),
    "gpt_oss": Family(sinks=True, expert_bias=True, router_bias=True, qkv_bias="attention_bias", full_every=2),
    "olmo": Family(norm="unweighted", mlp_bias=False),
    "olmoe": Family(qk_norm="full", mlp_bias=False),
    **dict.fromkeys(("gemma2", "t5gemma"), replace(GEMMA, full_every=2)),
    "gemma3_text": replace(GEMMA, qk_norm="head", full_every=6),
    "lfm3": replace(PLAIN, layout="sandwich", qk_norm="head", gate="head"),
    "phi": replace(GPT, layout="parallel", head_bias=True, qk_norm="qk_layernorm", qk_norm_kind="layernorm"),
    "phimoe": Family(norm="layernorm", head_bias="lm_head_bias"),
    "stablelm": Family(
        norm="layernorm", layout=("use_parallel_residual", False, "parallel", "pre"), qkv_bias="use_qkv_bias", o_bias=False,
        mlp_bias=False, attention=of_every_head
    ),
    "starcoder2": replace(GPT, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    **dict.fromkeys(("gpt2", "gpt-sw3"), replace(PACKED, positions="n_positions", tied=True)),
    "gpt_bigcode": replace(
        PACKED, positions="n_positions", tied=True,
        attention=lambda d, i: {"num_key_value_heads": 1 if d.k.get("multi_query", default=True) else d.heads}),
    "openai-gpt": replace(PACKED, layout="post", positions="n_positions", final_norm=False, tied=True),
    "ctrl": replace(GPT, head_bias=True, tied=True),
    "gpt_neo": replace(GPT, qkv_bias=False, positions="max_position_embeddings", tied=True),
    "gptj": replace(GPT, layout="parallel", qkv_bias=False, o_bias=False, head_bias=True),
    "codegen": replace(PACKED, layout="parallel", qkv_bias=False, o_bias=False, head_bias=True),
    "gpt_neox": replace(
        PACKED, layout=("use_parallel_residual", True, "parallel_norms", "pre"), qkv_bias="attention_bias", o_bias="attention_bias"
    ),
    "gpt_neox_japanese": replace(  # no biases but one, of the last layer's output projection
        PACKED, qkv_bias=False, o_bias=False, mlp_bias=False, stack_extra=lambda d: (vector("dense_bias", d.hidden),),
        width=lambda d, i: int(d.k.get("intermediate_multiple_size", default=4) * d.hidden)),
    "opt": replace(
        GPT, layout=("do_layer_norm_before", True, "pre", "post"), qkv_bias="enable_bias", o_bias="enable_bias",
        mlp_bias="enable_bias", positions="max_position_embeddings", position_offset=2, tied=True
    ),
    "biogpt": replace(GPT, positions="max_position_embeddings", position_offset=2, tied=True),
    "bloom": replace(PACKED, embedding_norm=True, tied=True, position="alibi", activation="gelu"),
    "xglm": replace(GPT, tied=True),
    "mpt": replace(
        PACKED, position="alibi", activation="gelu", norm="layernorm_no_bias", qkv_bias=False, o_bias=False,
        mlp_bias=False, tied=True
    ),
    "falcon": replace(PACKED, layout="parallel", qkv_bias="bias", o_bias="bias", mlp_bias="bias", tied=True),
    "dbrx": Family(norm="layernorm_no_bias", qkv_bias=False, o_bias=False, mlp_bias=False),
    "persimmon": replace(PACKED, qk_norm="qk_layernorm", qk_norm_kind="layernorm"),
    "recurrent_gemma": replace(PLAIN, mlp_bias=True, width=lambda d, i: d.k.number("intermediate_size") // 2),
    "doge": Family(qk_norm="head", layer_extra=lambda d, i: (vector("residuals", 2 * d.hidden),)),
    **dict.fromkeys(("roformer", "jina_embeddings_v3"), ROTARY_BERT),
    "git": replace(BERT, causal=True),
    **dict.fromkeys(
        ("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm", "esm"),
        replace(BERT, layout="pre", final_norm=True)),
    "gte": replace(ROTARY_BERT, gated=True),
    "nomic_bert": replace(ROTARY_BERT, square=False, gated=True, qkv_bias=False, o_bias=False, mlp_bias=False),
    "esmc": Family(
        norm="layernorm_no_bias", qk_norm="full", qk_norm_kind="layernorm_no_bias", head_bias=True, square=True,
        tied=None, causal=False, layer_extra=lambda d, i: (vector("norm_biases", 2 * d.hidden),),
        further=lambda d: (biased("head_dense", d.hidden, d.hidden), norm_extra("head_norm", "layernorm", d.hidden))
    ),
    "eurobert": Family(head_bias="mlp_bias", causal=False),
    "ultrabert": Family(  # two dense layers before the head
        tied=True, causal=False, full_every=3, further=lambda d: (
            matrix("head_1", d.hidden, width := d.k.number("prediction_head_size", default=768)),
            matrix("head_2", width, d.hidden))),
    "modernbert": replace(MODERN_BERT, causal=False),
    "modernbert-decoder": MODERN_BERT,
    **dict.fromkeys(("rembert", "roc_bert"), BERT), "xmod": replace(BERT, layout=("pre_norm", False, "pre", "post")),
    **dict.fromkeys(
        ("xlm", "flaubert"),
        replace(BERT, positions="max_position_embeddings", embedding_norm=True, head_bias=True, causal="causal",
        width=lambda d, i: 4 * d.hidden, further=of_languages)),
    # Yang et al. 2019, arXiv 1906.08237: relative positions have a projection of their own
    "xlnet": replace(
        BERT, qkv_bias=False, o_bias=False, head_bias=True, position="relative", further=lambda d: (vector("masked", d.hidden),),
        attention_extra=lambda d, i: (
            matrix("positions", d.hidden, d.heads * d.head_dim, uses=0.0),
            vector("biases_and_segments", 5 * d.heads * d.head_dim))),
    # buckets of relative positions shared by all layers, embeddings of segments, rows for prompts
    "cpmant": replace(
        PLAIN, tied=None, causal=False, position="relative",
        rows=lambda d: d.vocabulary() + d.k.number("prompt_types", default=32) * d.k.number("prompt_length", default=32),
        further=lambda d: (
            lookup("segments", segments := d.k.number("segment_types", default=32), d.hidden),
            lookup("position_bias", segments**2 + d.k.number("position_bias_num_buckets", default=512), d.heads))),
    "trocr": replace(BERT, positions="max_position_embeddings", position_offset=2, embedding_norm=True, causal=True),
    "hrm_text": Family(
        norm="unweighted", gate="element", attention=lambda d, i: {"gate_bias": d.flag(d.f.qkv_bias)},
        further=lambda d: (vector("low_start", d.hidden),)),
    "dory": Family(
        norm="unweighted", layout="sandwich", qk_norm="head", qk_norm_kind="unweighted", gate="element", full_every=4,
        attention_extra=lambda d, i: (vector("query_and_gate_scales", 2 * d.heads * d.head_dim),),
        further=lambda d: (vector("logit_scale", d.vocabulary()),)
    ),
}  # fmt: skip
"""Model types by what their classes build, where that is not said by every file alike."""

READERS: Final[dict[str, Any]] = {
    "mamba": hybrids.PureMamba, "falcon_mamba": hybrids.PureMamba, "mamba2": hybrids.PureMamba2, "jamba": hybrids.Jamba,
    "bamba": hybrids.Mamba2Hybrid, "granitemoehybrid": hybrids.GraniteHybrid, "falcon_h1": hybrids.FalconH1,
    "nemotron_h": hybrids.NemotronH, "zamba": hybrids.Zamba, "zamba2": hybrids.Zamba2, "phi4flash": hybrids.Phi4Flash,
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), hybrids.Lfm), "recurrent_gemma": hybrids.RecurrentGemma,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), linear.QwenNext), "lara_mini": linear.LaraMini,
    "jet_nemotron": linear.JetNemotron, "olmo_hybrid": linear.OlmoHybrid, "kimi_linear": linear.KimiLinear,
    "bailing_hybrid": linear.BailingHybrid, "bailing_moe_linear": linear.BailingLinear, "minimax": linear.MiniMaxHybrid,
    "rwkv": linear.Rwkv, "xlstm": linear.Xlstm,
    **dict.fromkeys(fla.MIXERS, fla.Fla), "retnet": fla.RetNet, "rwkv6": fla.Rwkv6,
    "rwkv7": fla.Rwkv7, "mla": fla.FlaLatent, "samba": fla.Samba,
    **dict.fromkeys(FLA_TRANSFORMERS, fla.FlaTransformer),
    "gemma3n_text": gemma.Gemma3n, "gemma4_text": gemma.Gemma4, "gemma4_unified_text": gemma.Gemma4,
    "minimax_m3_vl_text": sparse.MiniMaxM3, "minimax_m3": sparse.MiniMaxM3, "deepseek_v4": sparse.DeepseekV4,
    "hy_v4": sparse.HyV4, "hy_v4_vl_text": sparse.HyV4, "longcat_flash": sparse.Longcat, "axk1": sparse.AxK1, "axk2": sparse.AxK2,
    "dots3_note_text": sparse.Dots3Note,
    "glm5_next_text": recent.Glm5Next, "muse_spark_text": recent.MuseSpark,
    "mistral_large4_text": recent.MistralLarge4, "zaya": recent.Zaya, "phi4mm": recent.Phi4Adapters,
    "inkling_text": recent.Inkling, "inkling2_text": recent.Inkling2, "qwen4_exp_text": recent.Qwen4,
    "llama4_text": patterns.Llama4, "mimo_v2_flash": patterns.MimoV2,
    **dict.fromkeys(("step3p7", "step3p5", "step3_text"), patterns.Step),
    "nemotron-nas": patterns.NemotronNas, "mllama_text_model": patterns.MllamaText,
    "jetmoe": patterns.JetMoe, "bitnet": patterns.BitNet, "doge": patterns.Doge,
    "hunyuan_v1_dense": patterns.HunyuanDense, "hunyuan_v1_moe": patterns.HunyuanMoe,
    "hunyuan": patterns.HunyuanMoe, "ernie4_5_vl_moe_text": patterns.ErnieVl,
    "chatglm": older.ChatGlm, "openelm": older.OpenElm, "arctic": older.Arctic,
    "grok-1": older.Grok, "gpt_neo": older.GptNeo, "falcon": older.Falcon, "mpt": older.Mpt,
    "dbrx": older.Dbrx, "opt": older.Opt,
    **dict.fromkeys(bert.BERT_LIKE, bert.Bert), "roberta-prelayernorm": bert.Bert, "albert": bert.Albert, "gte": bert.Gte,
    "esm": bert.Esm, "fnet": bert.FNet, "modernbert": bert.ModernBert,
    "modernbert-decoder": bert.ModernBertDecoder,
    **dict.fromkeys(encoders.SIDES_OF, encoders.EncoderDecoder), **dict.fromkeys(("t5", "mt5", "umt5"), encoders.T5),
    "switch_transformers": encoders.Switch, "whisper": encoders.Whisper, "bigbird_pegasus": encoders.BigBirdPegasus,
    "led": encoders.Led, "longt5": encoders.LongT5, "nllb-moe": encoders.NllbMoe, "speech_to_text": encoders.SpeechToText,
    "t5gemma": encoders.t5gemma,
    **dict.fromkeys(alone.ALONE, alone.vit), **dict.fromkeys(alone.PAIRS, alone.pair),
    **dict.fromkeys(("clip_text_model", "siglip_text_model", "siglip2_text_model"), alone.text_encoder),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat"), speech.Wav2Vec2), "wavlm": speech.WavLM,
    "data2vec-audio": speech.Data2VecAudio, "parakeet_ctc": speech.Conformer, "wav2vec2-conformer": speech.Wav2Vec2Conformer,
    "wav2vec2-bert": speech.Wav2Vec2Bert,
    "rembert": uncommon.RemBert, "roc_bert": uncommon.RocBert, "xmod": uncommon.Xmod,
    "trocr": uncommon.TrOcr,
    "hrm_text": uncommon.HrmText, "dory": uncommon.Dory, "ouro": uncommon.Ouro,
}  # fmt: skip
"""Families with mixers or layers of their own: what reads them, or the model at once."""

ALIASES: Final[dict[str, str]] = {
    "kimi_k2": "deepseek_v3", "deepseek_ref": "deepseek_v4", "deepseek_v3.2": "deepseek_v32",
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text", "mimo", "mimo_vl"), "qwen2"
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_omni_text"), "qwen3"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_omni_moe_text"), "qwen3_moe"),
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "llama4": "llama4_text", "minimax_m3": "minimax_m3_vl_text", "mllama": "mllama_text_model",
    "minimax_text_01": "minimax", "minimax_m1": "minimax", "phi4": "phi3", "phi3small": "phi3", "yi": "llama",
    "qwen2_5_omni_thinker": "qwen2", "qwen3_omni_moe_text": "qwen3_moe",
    "paddleocr_vl_text": "ernie4_5", "glmga": "glm4", "glm4v_moe_text": "glm4_moe", "glm46v": "glm4",
    "nemotron_h_puzzle": "nemotron_h",
    "step3p7_text": "step3p5", "Dream": "qwen2", "sdar": "qwen3", "sdar_moe": "qwen3_moe",
    "bailing_moe_v2": "bailing_moe", "nemotron_nas": "nemotron-nas",
}  # fmt: skip
"""Names under which a family of the table goes too."""
