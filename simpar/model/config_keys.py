"""The keys of a config.json: read under any of their names, with the class's default, and accounted for.

A key that changes the structure and is not read is an error. Free are keys that change neither weights nor shapes (`FREE`),
and keys whose value is the default of the family's class, which its reader was checked with.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from simpar.errors import Violation
from simpar.model.foreign import NAMES, SETTLED, USUAL

FREE: Final = re.compile(
    "|".join(
        (
            r"dropout|dropout_rate|drop_path|_pdrop|layerdrop|initializer|_init$|init_(std|range|method|scale|size|cutoff)|xavier",
            r"token_?(id|index)|_token$|token_ids?$|tokens?_ids?|_eps$|epsilon|^eps$|^rope_|_rope_|_theta|rope_(parameters|scaling)",
            r"_coef(ficient)?$|_alpha$|^loss|_loss|^use_cache$|cache_(position|type|implementation)|^output_|^return_|^torch_?dtype$|dtype",
            r"softcap|_multiplier$|_scal(e|ing|ar)(_factor|s)?$|scaling_factor|^scal|temperature|mscale|_beta$|_act$|activation(_fn|_func|_function)?$",
            r"^hidden_activation$|limit$|clamp|quantiz|^_|transformers_version|auto_map|^architectures$|version$|id2label|label2id|num_labels",
            r"problem_type|task_specific|finetuning|pruned|torchscript|prefix|bad_words|beam|^(min|max)_(length|new)|no_repeat|diversity|penalty",
            r"^top_[kp]$|typical_p|do_sample|early_stopping|suppress|forced_|exponential_decay|num_return|remove_invalid|^seed$|pad_to",
            r"router_(aux|z|jitter|dtype)|jitter|norm_topk|topk_(method|norm)|scoring_func|score_func|gating_func|normalize_router|route_(norm|scale)",
            r"^pretraining_tp$|ep_size|_kernels?$(?<!conv_kernel)(?<!patch_kernel)|use_flash|flash_attn|attn_implementation|fused?_|^fuse|_fused",
            r"gradient|checkpoint|parallel(ism)?_(size|mode|strategy)|(?<!visual_)tokenizer|vision_(start|end)|image_(token|start|end|seq)|video_token|audio_token",
            r"language|is_(decoder|composition)$|name_or_path|residual_in_fp32|_fp32|rescale|prenorm_residual|time_step|dt_(min|max|init|scale|limit)",
            r"num_logits_to_keep|ignore_index|mask_(time|feature)|apply_spec|label_smooth|position_biased|classifier|pooler_(act|dropout)|summary_",
            r"vlm|template|pixels|image_(mean|std|grid)|crop|tile_tag|max_(dynamic|image|tiles|pixels)|min_(tiles|image|dynamic)|_patch$|use_thumbnail|do_",
            r"interleav|mrope|rotary_(base|pct|emb|interleaved|percent)|partial_rotary|rotary_dim|max_position|original_max|max_seq|seq_?len|n_ctx|max_target",
            r"max_source|model_max|sample_rate|sampling_rate|hop_length|n_fft|window_size_audio|use_bidirectional_attention|logit_scale|attn_logit|deterministic",
            r"chunk_size_feed|embd_pdrop|separate|reorder|num_buckets_|gumbel|codebook_loss|contrastive|noise|diffusion_|norm_before_gate|scale_attn",
            r"^projection_dim$|layer_scale_init|^num_image_tokens$|expert_overlap$|^use_mtp$|^mtp_|projector_type$|^text_hidden_size$|^mm_hidden_size$|^video_|^use_unified|rout(er|ing)_bias$|gemma_norm|merge_type|rope_mode$|pinpoints$|^process_image|reward_heads$|max_frames$|^vision_feature|^image_|_multimodal|interpolation|norm_type$|^mlp_type$|_lower_bound$|^moe_renormalize$|func$|attn_mode|^fuse_|tile_size|pixel_values|max_tiles|thumbnail|pos_emb_type|norm_min$|l2_clip|unsafe|chat|license|_name$|class_|model_type$|freq_dim|sliding_window_size|^(context_window|prefill_chunk|attention_sink)_size$|attention_chunk_size$(?<!^attention_chunk_size)|swa_rope",
            r"^normalization_function$|^position_embedding_type$|^post_?norm$|shared_moe_mode|^pool_type$|logn_attn|dynamic_ntk|use_rmsnorm|^rmsnorm$"
            r"|router_enable_expert_bias|^moe_(train|eval|min|token)_|capacity|token_dropping|expert_tensor_parallel|^enc_index$|_fp32_|drop_tokens"
            r"|random_routing|classification_head|^class_num$|_class$|^onnx|^(bf16|fp16|fp32)$|softmax_in|^pooler_|share_conv_kernel|sinkhorn|spatial_patch_size|enable_audio_output|encoder_stride|per_seconds?$|seconds_per|full_attn_mod|dim_model_base|clip_qkv|skip_bias_add"
            r"|use_parallel_block|layer_switch|layer_scaling$|residual_multiplier|_multipliers$|^init_|^mup_|^mla_scale|aux_free|^norm_head$"
            r"|_zero_infinity$|use_mambapy|use_mem_eff_path|(alpha|beta)_factor$|median_filter|(start|end)_n_top|allow_neg_eigval|^apply_layernorm$"
            r"|residual_connection_post|batch_prioritized|add_router_probs|inference_chunksize|reduction_force|sparse_prediction|weighted_layer_sum"
            r"|grouped_mm|^org_vocab|associative_scan|slow_but_exact|safe_gate$|max_attn_value|extrapolation_factor|^attn_factor$|(dynamic|force)_image|perceiver_config"
            r"|js_config$|^size$|^num_positions$|_by_sqrt_dim$|norm_expert_weight|only_types$|limits(_shared)?$|^zero_centered$|^rotary_type$|^router_type$",
        )
    )
)  # fmt: skip
"""Keys that leave weights, shapes and masks alone, by parts of their names."""

STRUCTURAL: Final = re.compile(
    r"layer|head|dim|size|rank|expert|^num_|^n_|window|pattern|freq|interval|group|types?$|attn|attention|mlp|moe|ffn|conv|ssm|mamba"
    r"|index|sparse|share|bias|norm|kernel|expand|stride|patch|depth|block|state|kv|qk|gate|width|stream|hyper|mtp|merge|proj|tie"
    r"|loop|ngram|nope|router|sharing|repeat|memory|bottleneck|mixer|glu|residual|lora|recur|cycle|adapter|rows"
)
"""What the name of a structural key looks like; a file's key that neither the class nor this knows is the author's own note."""

UNDERSTOOD = (
    "sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size", "intermediate_size",
    "dense_intermediate_size", "intermediate_size_mlp",
    "moe_intermediate_size",
    "head_dim", "qk_head_dim", "num_key_value_heads", "attention_head_dim", "n_group", "topk_group", "num_expert_group",
    "max_position_embeddings",
    "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "num_experts_per_tok",
    "num_nextn_predict_layers",
    "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "index_share_for_mtp_iteration", "qk_rope_head_dim",
    "qk_nope_head_dim",
    "interleave_moe_layer_step", "no_rope_layers", "no_rope_layer_interval", "num_mtp_modules", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "num_hash_layers", "shared_expert_intermediate_size", "layer_types", "moe_layers",
    "sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval", "cache_implementation", "type_vocab_size",
    "num_shared_experts", "n_shared_experts", "num_limited_groups", "num_expert_groups", "layer_group_size",
)  # fmt: skip
"""Keys that the general reader understands: where it did not ask for one, the model has nothing for it to say."""
TIED = ("tie_word_embeddings", "tie_embedding", "share_embedding", "weight_tying")
EXPERT_CLASSES: Final = {
    "llama4_text": "every",
    **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "jetmoe", "dbrx"), "tensors"),
}  # fmt: skip
"""Family -> how transformers 4.51 to 4.57 have its experts where these are no modules (until version 5 Mixtral's and Qwen's were).

Llama4TextMoe, to 5.24: hidden states once for each expert, two torch.bmm, a sum over the experts; scores of those not chosen are
zeros. No other class does so where it trains: GptOssExperts takes that way for inference and loops over the experts that were hit,
as Mixtral's and Qwen's kin do; GraniteMoe and JetMoe sort their rows, Dbrx loops over slices of its tensors."""
EXPERTS = (
    "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts", "moe_num_primary_experts",
    "num_moe_experts",
)  # fmt: skip
PER_TOKEN = (
    "num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token",
    "moe_num_active_primary_experts",
    "num_active_experts", "num_selected_experts", "router_topk",
)  # fmt: skip


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, Any]:
    """Of transformers' configuration classes, by model_type: structural "defaults", "names" of keys, and "parts": the type of a
    nested object, whether it holds whatever the object itself says, and the defaults that the whole model's class gives it.
    """
    text = resources.files("simpar.model").joinpath("class_defaults.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


DROPOUTS: Final = (
    "resid_pdrop", "hidden_dropout_prob", "hidden_dropout", "resid_dropout", "residual_dropout", "dropout_rate", "dropout",
)  # fmt: skip
"""Names that files have for the dropout of residual branches."""

BALANCING: Final = (
    "moe_router_enable_expert_bias", "router_enable_expert_bias", "use_expert_bias", "use_routing_bias", "use_moe_router_bias",
    "moe_use_aux_free",
)  # fmt: skip
"""Names that files have for a bias per expert that balances loads."""


class Keys:
    """One object of a config.json; problems and notes are collected, not raised one by one."""

    def __init__(self, config: dict[str, Any], file: str = "", path: str = "", like: str = "") -> None:
        self.config, self.file, self.path = config, file, path
        self.used: set[str] = {"model_type"}
        self.retype(str(like or config.get("model_type") or ""))
        self.violations: list[Violation] = []
        self.notes: list[str] = []
        self.children: list[Keys] = []
        self.unknown: list[tuple[str, Any, str]] = []
        """What only --approximate accepts: (key, value, why)."""

    def retype(self, model_type: str) -> None:
        """Take the defaults and names of another class."""
        self.model_type, table = model_type, class_defaults()
        self.used.update(SETTLED.get(model_type, ()))
        self.defaults: dict[str, Any] = table["defaults"].get(model_type, {})
        self.names: dict[str, str] = {**NAMES.get(model_type, {}), **table["names"].get(model_type, {})}

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that the file has and is not null; else the class's default for one of them; else `default`."""
        aliases = [alias for name in names for alias in self._aliases(name)]
        self.used.update(aliases)
        for name in aliases:
            if self.config.get(name) is not None:
                return self.config[name]
        if any(name in self.config for name in aliases):
            return default
        for name in aliases:
            if self.defaults.get(name) is not None:
                return self.defaults[name]
        return default

    def given(self, name: str) -> Any:
        """What the file or its class says of `name`, as `get` finds it, where that tells nothing of the weights."""
        value = self.config.get(name)
        return self.defaults.get(name) if value is None else value

    def has(self, *names: str) -> bool:
        """Whether the file itself gives one of `names` a value."""
        self.used.update(names)
        return any(self.config.get(name) is not None for name in names)

    def number(self, *names: str, default: int | None = None) -> int:
        """A positive integer; 1 with a violation noted where there is none."""
        value = self.get(*names, default=default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and value == int(value):
            return int(value)
        rule = "is required" if value is None else "must be a positive integer"
        right = f"also read as {', '.join(names[1:])}" if len(names) > 1 else ""
        self.violate(names[0], value, rule, right)
        return 1

    def dropout(self) -> float:
        """Of the residual branches; 0 where the file does not say."""
        value = self.get(*DROPOUTS, default=0.0)
        return float(value) if isinstance(value, int | float) and 0 <= value < 1 else 0.0

    def balances_experts(self) -> bool:
        """Whether a bias per expert keeps their loads even: DeepSeek-V3's router, and those made after it (GLM 4.5, Nemotron 3).

        Files that do not name it have the factor by which that router scales what its sigmoids weigh.
        """
        method, factor = self.get("topk_method"), self.get("routed_scaling_factor", "moe_routed_scaling_factor", default=1.0)
        named = any(self.get(name) for name in BALANCING)
        return method == "noaux_tc" or named or (method is None and factor not in (None, 1.0))

    def size(self, *names: str) -> int:
        """A size without which no model is known: of the file itself at the top, from the class inside (text_config)."""
        aliases = [alias for name in names for alias in self._aliases(name)]
        if not self.path and not any(self.config.get(name) is not None for name in aliases):
            self.used.update(aliases)
            self.violate(names[0], None, "is required", f"also read as {', '.join(names[1:])}" if len(names) > 1 else "")
            return 1
        return self.number(*names)

    def listed(self, *names: str) -> list[Any] | None:
        """A list of the file, one entry per layer."""
        self.used.update(names)
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and value:
                found: list[Any] = value
                return found
            if value and name.endswith("types") and not isinstance(value, list):
                self.violate(name, value if isinstance(value, int | float | str) else "...", "must be a list, one entry per layer")
        return None

    def child(self, *names: str, like: str = "") -> Keys | None:
        """The object under the first of `names`, read on its own, as the class of the whole file takes it (`like` where that is not
        known).
        """
        self.used.update(names)
        parts = class_defaults()["parts"].get(self.model_type, {})
        for name in names:
            value = self.config.get(name)
            if isinstance(value, dict):
                usual, always, *defaults = parts.get(name, (like, False))
                own = "" if always else value.get("model_type")
                inside = Keys(value, self.file, f"{self.path}{name}.", own or usual)
                for given in defaults:
                    inside.defaults = {**inside.defaults, **given}
                self.children.append(inside)
                return inside
        return None

    def violate(self, name: str, value: Any, rule: str, right: str = "") -> None:
        self.violations.append(Violation(f"{self.path}{name}", value, rule, right, self.file))

    def meet(self, name: str, value: Any, size: Any, what: str) -> None:
        """Set down that `name` is not the only size with which its class runs."""
        if value != size:
            self.violate(name, value, f"is not {what} = {size}", "its class runs with no other")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def all_violations(self) -> list[Violation]:
        return self.violations + [v for child in self.children for v in child.all_violations()]

    def all_notes(self) -> list[str]:
        return self.notes + [note for child in self.children for note in child.all_notes()]

    def doubts(self) -> list[tuple[str, Any, str]]:
        """What is not known for sure, here and inside: structural keys that nothing asked for and that do not hold their class's
        default, and what a reader set down in `unknown`. (Key, value, why.)
        """
        unread = [(n, v, "a structural key that is not read") for n, v in self.config.items() if self._matters(n, v)]
        found = [(f"{self.path}{name}", value, why) for name, value, why in [*self.unknown, *unread]]
        seen = {name for name, _, _ in found}
        return found + [doubt for child in self.children for doubt in child.doubts() if doubt[0] not in seen]

    def _matters(self, name: str, value: Any) -> bool:
        if isinstance(value, dict) and name.endswith("_config") and name not in self.used:
            return not FREE.search(name)
        if name in self.used or value is None or FREE.search(name) or (self.path and name == "vocab_size"):
            return False
        if value in USUAL.get(name, ()):
            return False
        if name in self.defaults:
            return bool(value != self.defaults[name])
        return bool(STRUCTURAL.search(name)) and value not in (False, [], {}, "")

    def _aliases(self, name: str) -> list[str]:
        """`name` and what the class calls it."""
        return [name, *([self.names[name]] if name in self.names else [])]
