"""The table of Hugging Face families: `model_type` -> what its class builds without asking its file.

A family that differs from Llama by nothing is one word in the line of `LLAMA`; one whose file says everything needs none: an
unknown `model_type` is read as Llama-like by its keys, with a note. Each line is checked in tests against transformers' own class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from simpar.model import alone, bert, encoders, fla, gemma, hybrids, linear, older, patterns, recent, sparse, speech, uncommon
from simpar.model.family import Family

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
FLA = (*(name for name in fla.MIXERS if name != "rwkv6"), "mla", "samba")

TABLE: Final[dict[str, Family]] = {
    **dict.fromkeys(bert.BERT_LIKE, BERT),
    **dict.fromkeys(FLA_TRANSFORMERS, PLAIN),
    **dict.fromkeys(FLA, LLAMA),
    **dict.fromkeys(
        ("llama", "cwm", "granite", "iquestcoder", "smollm3", "internlm3", "granitemoe", "granitemoeshared",
         "mllama_text_model", "nemotron-nas", "kimi_k2", "bamba", "falcon_h1", "zamba", "zamba2", "diffllama",
         "vaultgemma", "mamba", "mamba2", "falcon_mamba", "samba", "mla", "llama4_text", "deepseek_v4", "exaone", "yi",
         "baichuan", "hunyuan_vl_text", "granite_docling_text", "internlm2", "deepseek", "minicpm", "deci", "arctic"),
        LLAMA),
    **dict.fromkeys(
        ("mistral", "voxtral_realtime_text", "ministral", "ministral3", "mixtral", "phi3", "jetmoe",
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
    "mistral_large4_text": Family(mlp_bias=False, turns=("indexed_attention",)),
    "glm5_next_text": Family(mlp_bias=False, first_dense=3),
    **dict.fromkeys(("glm4_moe_lite", "axk1", "axk2", "hy_v4", "hy_v4_vl_text"), Family(mlp_bias=False, first_dense=1)),
    "hy_v3": replace(QWEN3, first_dense=1),
    "qwen3_moe": replace(QWEN3, dense_up_to=0),
    "dots1": replace(QWEN3, dense_up_to=-1),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), GATED_QWEN),
    "qwen3_next": replace(GATED_QWEN, dense_up_to=0),
    "qwen4_exp_text": replace(GATED_QWEN, final_norm=False),
    **dict.fromkeys(("olmo2", "olmo3", "flex_olmo"), POST),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text"), COHERE),
    "jamba": Family(position="none", dense_up_to=1),
    "granitemoehybrid": Family(position="none", dense_up_to=0),
    "chatglm": Family(qkv_bias="add_qkv_bias", o_bias="add_bias_linear", mlp_bias="add_bias_linear"),
    **dict.fromkeys(("qwen2", "mimo", "jet_nemotron"), Family(qkv_bias=True, o_bias=False, mlp_bias=False)),
    "qwen": Family(qkv_bias=True, o_bias=False, mlp_bias=False, halves=True),
    "internlm": Family(qkv_bias="bias", o_bias="bias", mlp_bias=False),
    "openelm": Family(qk_norm="normalize_qk_projections", tied=True),
    **dict.fromkeys(
        ("bailing_moe", "bailing_moe_linear"),
        Family(qkv_bias="use_qkv_bias", o_bias="use_bias", mlp_bias="use_bias", qk_norm="use_qk_norm",
        router_bias="moe_router_enable_expert_bias")),
    "hunyuan": Family(qk_norm="use_qk_norm", tied=True),
    "bitnet": Family(square=True),
    **dict.fromkeys(("grok-1", "ouro", "hyperclovax"), Family(layout="sandwich")),
    **dict.fromkeys(("orion", "rwkv", "rwkv6", "rwkv7"), Family(norm="layernorm")),
    "phi4flash": Family(norm="layernorm", mlp_bias=False, qkv_bias=True, o_bias=True, head_bias="lm_head_bias", tied=True),
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
    **dict.fromkeys(("minimax_m3_vl_text", "minimax_m3", "exaone_moe", "lfm2", "lfm2_moe"), replace(PLAIN, qk_norm="head")),
    "exaone4": Family(layout="post", qk_norm="head", qkv_bias=False, o_bias=False, mlp_bias=False, full_every=4),
    "afmoe": Family(layout="sandwich", qk_norm="head", gate="element", router_bias=True, mlp_bias=False, full_every=4),
    "laguna": Family(qk_norm="head", router_bias=True, mlp_bias=False, gate="head", first_dense=1),
    "flint": Family(qk_norm="head", sinks=True, mlp_bias=False, dense_up_to=0),
    "bailing_hybrid": Family(gate="head", first_dense=1, tied=None),
    "dots3_note_text": Family(gate="head", mlp_bias=False, first_dense=1),
    "ernie4_5": Family(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    "ernie4_5_moe": replace(PLAIN, router_bias=True),
    "molmo2_text": replace(QWEN3, o_bias=False),
    "ernie4_5_vl_moe_text": replace(PLAIN, router_bias=True, first_dense=1),
    "inkling_text": Family(qk_norm="head", embedding_norm=True, mlp_bias=False, qkv_bias=False, o_bias=False, turns=INKLING),
    "inkling2_text": Family(embedding_norm=True, gate="element", mlp_bias=False, qkv_bias=False, o_bias=False, turns=INKLING),
    "muse_glimmer_text": Family(layout="sandwich", gate="element", mlp_bias=False, full_every=4),
    "muse_spark_text": Family(gate="element", mlp_bias=False, full_every=4),
    "kimi_linear": Family(mlp_bias=False, first_dense=1, tied=None),
    "xlstm": replace(PLAIN, tied=None),
    "zaya": Family(mlp_bias=False, head_bias="lm_head_bias", turns=("hybrid",)),
    **dict.fromkeys(("kolibri1", "gemma4_text", "gemma4_unified_text"), replace(GEMMA, qk_norm="head")),
    "gemma3n_text": replace(GEMMA, qk_norm="head", full_every=5),
    "beam": Family(layout="sandwich", qk_norm="head", gate="element", mlp_bias=False, first_dense=3),
    **dict.fromkeys(("step3p7", "step3p5"), Family(qk_norm="head", gate="head", mlp_bias=False)),
    "step3_text": Family(mlp_bias=False),
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
        mlp_bias=False
    ),
    "starcoder2": replace(GPT, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias"),
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode"), replace(PACKED, positions="n_positions", tied=True)),
    "openai-gpt": replace(PACKED, layout="post", positions="n_positions", final_norm=False, tied=True),
    "ctrl": replace(GPT, head_bias=True, tied=True),
    "gpt_neo": replace(GPT, qkv_bias=False, positions="max_position_embeddings", tied=True),
    "gptj": replace(GPT, layout="parallel", qkv_bias=False, o_bias=False, head_bias=True),
    "codegen": replace(PACKED, layout="parallel", qkv_bias=False, o_bias=False, head_bias=True),
    "gpt_neox": replace(
        PACKED, layout=("use_parallel_residual", True, "parallel_norms", "pre"), qkv_bias="attention_bias", o_bias="attention_bias"
    ),
    "gpt_neox_japanese": replace(PACKED, qkv_bias=False, o_bias=False, mlp_bias=False),
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
    "recurrent_gemma": replace(PLAIN, mlp_bias=True, halves=True),
    "doge": Family(qk_norm="head"),
    **dict.fromkeys(("roformer", "jina_embeddings_v3"), ROTARY_BERT),
    "git": replace(BERT, causal=True),
    **dict.fromkeys(
        ("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm", "esm"),
        replace(BERT, layout="pre", final_norm=True)),
    "gte": replace(ROTARY_BERT, gated=True),
    "nomic_bert": replace(ROTARY_BERT, square=False, gated=True, qkv_bias=False, o_bias=False, mlp_bias=False),
    "esmc": Family(
        norm="layernorm_no_bias", qk_norm="full", qk_norm_kind="layernorm_no_bias", head_bias=True, square=True,
        tied=None, causal=False
    ),
    "eurobert": Family(head_bias="mlp_bias", causal=False),
    "ultrabert": Family(tied=True, causal=False, full_every=3),
    "modernbert": replace(MODERN_BERT, causal=False),
    "modernbert-decoder": MODERN_BERT,
    **dict.fromkeys(("rembert", "roc_bert"), BERT), "xmod": replace(BERT, layout=("pre_norm", False, "pre", "post")),
    **dict.fromkeys(
        ("xlm", "flaubert"),
        replace(BERT, positions="max_position_embeddings", embedding_norm=True, head_bias=True, causal="causal")),
    "xlnet": replace(BERT, qkv_bias=False, o_bias=False, head_bias=True, position="relative"),
    "cpmant": replace(PLAIN, tied=None, causal=False, position="relative"),
    "trocr": replace(BERT, positions="max_position_embeddings", position_offset=2, embedding_norm=True, causal=True),
    "hrm_text": Family(norm="unweighted", gate="element"),
    "dory": Family(
        norm="unweighted", layout="sandwich", qk_norm="head", qk_norm_kind="unweighted", gate="element", full_every=4
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
    **dict.fromkeys(fla.MIXERS, fla.Fla), "retnet": fla.RetNet, "hgrn2": fla.Hgrn, "hgrn": fla.Hgrn, "rwkv6": fla.Rwkv6,
    "rwkv7": fla.Rwkv7, "mla": fla.FlaLatent, "samba": fla.Samba,
    **dict.fromkeys(("transformer", "forgetting_transformer", "stickbreaking_attn"), fla.FlaTransformer),
    "gemma3n_text": gemma.Gemma3n, "gemma4_text": gemma.Gemma4, "gemma4_unified_text": gemma.Gemma4,
    "minimax_m3_vl_text": sparse.MiniMaxM3, "minimax_m3": sparse.MiniMaxM3, "deepseek_v4": sparse.DeepseekV4,
    "hy_v4": sparse.HyV4, "hy_v4_vl_text": sparse.HyV4, "longcat_flash": sparse.Longcat, "axk1": sparse.AxK1, "axk2": sparse.AxK2,
    "dots3_note_text": sparse.Dots3Note,
    "glm5_next_text": recent.Glm5Next, "muse_spark_text": recent.MuseSpark,
    "mistral_large4_text": recent.MistralLarge4, "zaya": recent.Zaya, "phi4mm": recent.Phi4Adapters,
    "inkling_text": recent.Inkling, "inkling2_text": recent.Inkling2, "qwen4_exp_text": recent.Qwen4,
    "llama4_text": patterns.Llama4, "mimo_v2_flash": patterns.MimoV2, "step3p7": patterns.Step, "step3p5": patterns.Step,
    "step3_text": patterns.Step3,
    "laguna": patterns.Laguna, "nemotron-nas": patterns.NemotronNas, "mllama_text_model": patterns.MllamaText,
    "jetmoe": patterns.JetMoe, "bitnet": patterns.BitNet, "diffllama": patterns.DiffLlama, "doge": patterns.Doge,
    "hunyuan_v1_dense": patterns.HunyuanDense, "hunyuan_v1_moe": patterns.HunyuanMoe, "beam": patterns.Beam,
    "hunyuan": patterns.Hunyuan, "ernie4_5_vl_moe_text": patterns.ErnieVl, "molmo2_text": patterns.Molmo2, "hy_v3": patterns.HyV3,
    "chatglm": older.ChatGlm, "openelm": older.OpenElm, "deci": older.DeciLm, "arctic": older.Arctic,
    "grok-1": older.Grok, "gpt_neo": older.GptNeo, "gpt_bigcode": older.GptBigCode, "falcon": older.Falcon, "mpt": older.Mpt,
    "dbrx": older.Dbrx, "opt": older.Opt, "gpt_neox_japanese": older.GptNeoxJapanese,
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "stablelm"), older.Cohere),
    **dict.fromkeys(bert.BERT_LIKE, bert.Bert), "roberta-prelayernorm": bert.Bert, "albert": bert.Albert, "gte": bert.Gte,
    "esm": bert.Esm, "fnet": bert.FNet, "ultrabert": bert.UltraBert, "modernbert": bert.ModernBert,
    "modernbert-decoder": bert.ModernBertDecoder, "esmc": bert.EsmC,
    **dict.fromkeys(encoders.SIDES_OF, encoders.EncoderDecoder), **dict.fromkeys(("t5", "mt5", "umt5"), encoders.T5),
    "switch_transformers": encoders.Switch, "whisper": encoders.Whisper, "bigbird_pegasus": encoders.BigBirdPegasus,
    "led": encoders.Led, "longt5": encoders.LongT5, "nllb-moe": encoders.NllbMoe, "speech_to_text": encoders.SpeechToText,
    "t5gemma": encoders.T5Gemma,
    **dict.fromkeys(alone.ALONE, alone.Vit), **alone.PAIRS,
    **dict.fromkeys(("clip_text_model", "siglip_text_model", "siglip2_text_model"), alone.TextEncoder),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat"), speech.Wav2Vec2), "wavlm": speech.WavLM,
    "data2vec-audio": speech.Data2VecAudio, "parakeet_ctc": speech.Conformer, "wav2vec2-conformer": speech.Wav2Vec2Conformer,
    "wav2vec2-bert": speech.Wav2Vec2Bert,
    "rembert": uncommon.RemBert, "roc_bert": uncommon.RocBert, "xmod": uncommon.Xmod, "xlm": uncommon.Xlm,
    "flaubert": uncommon.Xlm, "xlnet": uncommon.XlNet, "cpmant": uncommon.CpmAnt, "trocr": uncommon.TrOcr,
    "hrm_text": uncommon.HrmText, "dory": uncommon.Dory, "ouro": uncommon.Ouro, "voxtral_realtime_text": uncommon.VoxtralRealtime,
}  # fmt: skip
"""Families with mixers or layers of their own."""

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
