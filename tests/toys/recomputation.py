"""A recomputation policy: attention with its norms."""

from simpar.specs.plan import MODULES, Module

MODULES["toy"] = Module(frozenset({"attention", "core_attn", "layernorm"}))
