"""Activation recomputation: which saved tensors go, which ops run again. One row per module that frameworks name.

Sources: Megatron-LM recompute modules (core/transformer), Korthikanti et al. 2022, torchtitan's per-op selective
checkpointing (every second matmul is saved).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simpar.workload.ops import Block


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a plan recomputes in each block.

    Attributes:
        full: the whole layer from its input.
        modules: selected modules (see RULES).
    """

    full: bool = False
    modules: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class Rule:
    """`drops`: prefixes of saved tensor names that are freed; `repeats`: prefixes of op names that run again."""

    drops: tuple[str, ...]
    repeats: tuple[str, ...]


RULES: dict[str, Rule] = {
    "core_attn": Rule(("attention/lse", "attention/softmax"), ("attention/core",)),
    "layernorm": Rule(("input_norm_out", "mlp_norm_out"), ("input_norm", "mlp_norm")),
    "mlp": Rule(("mlp/",), ("mlp/fc1", "mlp/activation")),
    "moe": Rule(("moe/",), ("moe/router", "moe/topk", "moe/permute", "moe/fc1", "moe/activation")),
    "moe_act": Rule(("moe/fc2_in",), ("moe/activation",)),
    "mla_up_proj": Rule(("attention/q", "attention/k", "attention/v"), ("attention/q_up", "attention/kv_up", "attention/rope")),
    "shared_experts": Rule(("shared_experts/",), ("shared_experts/fc1", "shared_experts/activation")),
    "attention": Rule(
        ("attention/",),
        ("attention/qkv", "attention/qk_norm", "attention/rope", "attention/core", "attention/q_up", "attention/kv_up"),
    ),
    # Per-op selective checkpointing keeps wq, wv, the attention output, w1 and w2 outputs and repeats the rest.
    "op": Rule(
        ("input_norm_out", "mlp_norm_out", "input_norm_fp32", "mlp_norm_fp32", "mlp/activation_gate", "mlp/fc2_in"),
        ("input_norm", "mlp_norm", "attention/rope", "attention/proj", "mlp/activation"),
    ),
    # Beside "op" in a compiled graph: nothing in the backward reads the output of w2, so the partitioner does not keep it
    # (torch 2.13, backend aot_eager_decomp_partition: x, wq, wv, attention output, row statistics and w1 are what is saved).
    "op_compiled": Rule(("mlp_norm_in",), ()),
}

# mla_up_proj must not free the latents that share a prefix with q, k, v.
_KEPT = frozenset({"attention/q_latent", "attention/kv_latent", "attention/q_norm_in", "attention/q_norm_stats",
                   "attention/kv_norm_in", "attention/kv_norm_stats", "attention/qkv_out"})  # fmt: skip


def dropped(recompute: Recompute, tensor: str) -> bool:
    """Whether a saved tensor is freed after the forward (block inputs are kept by the caller under full)."""
    for module in recompute.modules:
        for prefix in RULES[module].drops:
            if tensor.startswith(prefix) and not (module == "mla_up_proj" and tensor in _KEPT):
                return True
    return False


def repeated(recompute: Recompute, block: Block) -> tuple[str, ...]:
    """Names of the ops that run again before the block's backward."""
    if recompute.full:
        return tuple(op.name for op in block.ops)
    prefixes = tuple(p for m in recompute.modules for p in RULES[m].repeats)
    return tuple(op.name for op in block.ops if prefixes and op.name.startswith(prefixes))


def repeated_parts(recompute: Recompute, block: Block) -> dict[str, float]:
    """Op -> share of it that runs again, of matmuls that stand for several of a framework's.

    Per-op selective checkpointing repeats every second matmul: of q, k, v the second, of a gated pair the second.
    """
    if recompute.full or "op" not in recompute.modules:
        return {}
    size, names = block.size, {op.name for op in block.ops}
    parts = {}
    if "attention/qkv" in names and {"k", "h", "p"} <= size.keys():
        parts["attention/qkv"] = size["k"] * size["h"] / size["p"]
    if "mlp/fc1" in names and size["u"] > size["f"]:
        parts["mlp/fc1"] = 1.0 - size["f"] / size["u"]
    return parts
