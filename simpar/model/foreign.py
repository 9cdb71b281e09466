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
