"""Names of keys that are not transformers' usual ones, and what files of other classes write that changes nothing."""

from __future__ import annotations

from typing import Any, Final

NAMES: Final[dict[str, dict[str, str]]] = {
    # OLMo's first trainer, in LLaDA's files
    "llada": {
        "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size", "vocab_size": "embedding_size", "qkv_bias": "include_qkv_bias",
        "mlp_bias": "include_bias", "max_position_embeddings": "max_sequence_length",
    },
    # sizes that transformers' own classes have under one name alone
    "gpt_neo": {"sliding_window": "window_size"}, "distilbert": {"intermediate_size": "hidden_dim"},
    "xlnet": {"intermediate_size": "d_inner"}, "cpmant": {"intermediate_size": "dim_ff", "head_dim": "dim_head"},
    "trocr": {"intermediate_size": "decoder_ffn_dim"},
    "pangu_ultra_moe": {
        "q_lora_rank": "attention_q_lora_dim", "kv_lora_rank": "attention_kv_lora_dim", "qk_nope_head_dim": "attention_qk_dim",
        "qk_rope_head_dim": "attention_qk_rope_dim", "v_head_dim": "attention_v_dim", "num_nextn_predict_layers": "num_mtp_layers",
    },
}  # fmt: skip
"""model_type -> transformers' usual name of a key -> the file's."""

USUAL: Final[dict[str, tuple[Any, ...]]] = {
    "attention_method": ("MLA",), "zero_expert_type": ("identity",), "moe_gate": ("topk", "top2_fused"), "mamba_use_mlp": (True,),
    "use_shared_block": (True,), "use_shared_mlp_adapter": (True,), "use_mem_rope": (True,), "global_attn_every_n": (1,),
    "is_causal": (True,), "ps_version": ("v2",), "moe_enable_early_router": (True,), "select_layer": (-1,),
    "use_embedding_sharing": (True,), "use_gated_activation": (True,), "use_moe": (True,), "moe_every_n_layer": (1,),
    "use_head_wise_attn_gate": (True,), "use_moe_router_bias": (True,), "att_impl_type": ("GQA",), "sandwich_norm": (True,),
    "activation_type": ("silu",), "alibi_bias_max": (8.0,), "block_group_size": (1,), "block_type": ("llama",),
    "attention_layer_norm_with_affine": (True,), "layer_norm_with_affine": (True,), "mlp_ratio": (4,), "rope": (True,),
    "lm_head": (True,), "rm_head": (False,), "normalize_embedding": (True,),
}  # fmt: skip
"""Values that say what the classes which write the key always build."""

_PRETRAINED: Final = (
    "tdnn_dim tdnn_dilation xvector_output_dim codevector_dim num_codevector_groups num_codevectors_per_group num_negatives "
    "proj_codevector_dim"
)
"""What only pretraining and classifiers of speech read."""
_WAVES: Final = f"""{_PRETRAINED} conv_stride num_feat_extract_layers feat_extract_norm adapter_kernel_size adapter_stride
num_adapter_layers adapter_attn_dim num_ctc_classes max_bucket_distance"""
_T5: Final = "relative_attention_max_distance n_positions dense_act_fn"
_KIMI: Final = "mla_use_nope attn_res_block_size use_grouped_topk"
_HUNYUAN: Final = "num_shared_expert moe_layer_num_skipped use_mixed_mlp_moe"
_INKLING: Final = """number_of_conv_states log_scaling_n_floor chain_hidden_post_norm unpadded_vocab_size shared_expert_sink
rms_norm_eps_moe_gate"""
_ZAMBA: Final = "num_query_groups kv_channels ffn_hidden_size lora_rank"

_SETTLED: Final[dict[str, str]] = {
    "nemotron_h": "num_query_groups", "zamba2": _ZAMBA,
    "zamba": f"{_ZAMBA} attn_layer_period attn_layer_offset n_mamba_heads attention_hidden_size",
    "lfm2 lfm2_moe lfm3": """conv_L_cache conv_bias block_dim block_use_swiglu conv_dim conv_dim_out num_heads block_multiple_of
        block_ff_dim full_attn_idxs""",
    "falcon_h1": "mlp_expansion_factor mamba_expand",  # its class takes intermediate_size and mamba_d_ssm
    "recurrent_gemma": "lru_width conv1d_width", "kimi_linear bailing_hybrid": _KIMI, "bailing_moe_linear": "group_norm_size",
    "glm5_next_text": f"{_KIMI} index_kpool_always_select_tail", "gemma3n_text": "activation_sparsity_pattern altup_active_idx",
    "deepseek_v4": "mlp_layer_types", "inkling_text": _INKLING, "inkling2_text": f"{_INKLING} n_layers_per_attn_res_block",
    "qwen4_exp_text": """hc_count hc_lowrank ngram_size heads_per_ngram ngram_vocab_size_base ple_embed_dim ple_conv_kernel_size
        make_ngram_vocab_size_divisible_by ple_layer_ids split_ngram_parts number_of_conv_states indexer_kv_heads""",
    "step3p7 step3p5 step3_text": "num_sliding_attention_heads", "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan": f"{_HUNYUAN} cla_share_factor", "molmo2_text": "norm_after", "chatglm": "post_layer_norm", "qwen": "no_bias",
    "arctic": "parallel_attn_mlp_res moe_vocab_size", "esm": "is_folding_model",
    "openelm": "model_dim num_transformer_layers num_kv_heads num_gqa_groups ffn_with_glu",
    "xmod": "adapter_reuse_layer_norm ln_before_adapter", "nystromformer": "inv_coeff_init_option",
    "xlm flaubert": "sinusoidal_embeddings is_encoder lang_id unk_index mask_index pre_norm",
    "xlnet": "d_head attn_type mem_len use_mems_eval use_mems_train bi_data same_length",
    "cpmant": "position_bias_max_distance", "hrm_text": "L_bp_cycles", "dory": "n_recurrent_layers recurrent_kv_cache_mode",
    "samba": "expand", "rwkv6 rwkv7": "norm_first norm_bias value_dim", "mla": "qk_head_dim window_size",
    "linear_attn": "norm_q norm_k norm_feature_map", "gsa abc": "use_norm gate_low_rank_dim num_kv_heads", "delta_net": "qk_norm",
    "t5 mt5 umt5": _T5, "longt5": f"{_T5} global_block_size", "t5gemma t5_gemma_module": "vocab_size cross_attention_hidden_size",
    "switch_transformers": f"{_T5} num_sparse_encoder_layers num_sparse_decoder_layers",
    "nllb-moe": "num_hidden_layers", "speech_to_text": "num_conv_layers",
    "beit": "use_mean_pooling auxiliary_channels auxiliary_num_convs auxiliary_concat_input", "videomae": "num_frames",
    "wav2vec2 hubert unispeech unispeech-sat wavlm data2vec-audio": _WAVES,
    "wav2vec2-conformer": f"{_WAVES} use_intermediate_ffn_before_adapter",
    "wav2vec2-bert": f"{_PRETRAINED} use_intermediate_ffn_before_adapter",
    "phi4_multimodal_audio": "feature_layer left_chunk chunk_size conv_glu_type ext_pw_kernel_size",
    "gemma4_audio": """attention_chunk_size attention_context_right attention_invalid_logits_value attention_logit_cap
        residual_weight use_clipped_linears""",
    "gemma3n_audio": """conf_attention_context_right conf_attention_logit_cap conf_reduction_factor conf_residual_weight
        sscp_conv_stride_size sscp_conv_kernel_size conf_positional_bias_size vocab_offset""",
    "dots3_note_audio_encoder": "adapter_input_size feature_size",
    "dots3_note_vision_encoder": "adapter_in_dim adapter_merge_size adapter_out_dim",
    "gemma3n_vision": "label_names num_classes vocab_offset", "dinov3_vit": "layerscale_value",
    "mllama_vision_model": "intermediate_layers_indices vision_output_dim supported_aspect_ratios",
    "gemma4_vision": "pooling_kernel_size standardize use_clipped_linears global_head_dim layer_types",
    "llama4_vision_model": "pixel_shuffle_ratio", "phi4_multimodal_vision": "feature_layer", "ovis2_vision": "tokenize_function",
    "minicpmv4_6_vision minicpmv4_7_vision": "insert_layer_id window_kernel_size",
    "muse_glimmer_vision muse_spark_vision": "layer_types window_size merge_size",
    "minimax_m3_vl_vision": "vocab_size",
}  # fmt: skip
SETTLED: Final = {name: tuple(keys.split()) for names, keys in _SETTLED.items() for name in names.split()}
"""Model type -> keys that its files have and that say nothing which its reader does not know."""
