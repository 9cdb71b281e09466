"""No input is silently dead: every field of every spec changes an output, is refused, or is said not to be modelled.

The fields come from the pydantic models, so that a new one is covered by being there; it fails until some base scenario below
shows what it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, Final, Literal

import pytest
from pydantic import BaseModel
from spec_fields import Path as FieldPath
from spec_fields import SpecField, changed, fields_of, other_values, value_at, words

from simpar.errors import InputError
from simpar.model.kind import group_of, kind_of
from simpar.planning.answer import Simulation, answer
from simpar.planning.compare import compare_hardware
from simpar.planning.published import compare_published
from simpar.planning.questions import PlanReport
from simpar.planning.simulated_steps import SimulatedSteps
from simpar.planning.solve import Solver
from simpar.planning.to_json import report_json
from simpar.schedules import SCHEDULES
from simpar.specs.optimizers import KINDS
from simpar.specs.plan import MODULES
from simpar.specs.planfile import PlanFile, make_plan
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate

Table = dict[str, Any]

# -- scenarios ---------------------------------------------------------------------------------------------------------

DENSE: Final[Table] = {
    "kind": "transformer", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip
EXPERTS: Final[Table] = {
    **DENSE, "moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "n_group": 4, "topk_group": 2,
                     "shared_expert_intermediate_size": 1024, "first_k_dense_replace": 2},
}  # fmt: skip
TINY_EXPERTS: Final[Table] = {
    **EXPERTS, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024,
    "moe": {**EXPERTS["moe"], "first_k_dense_replace": 0},
}  # fmt: skip
"""Kernels so small that the host launches them more slowly than the device runs them."""
LATENT: Final[Table] = {
    **DENSE, "num_key_value_heads": 16, "num_nextn_predict_layers": 1,
    "mla": {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}  # fmt: skip
ENCODER: Final[Table] = {
    **DENSE, "num_key_value_heads": 16, "num_decoder_layers": 4, "num_hidden_layers": 4, "position": "relative",
    "relative_position_buckets": 32,
}  # fmt: skip
MLP: Final[Table] = {"kind": "mlp", "width": 1024, "depth": 8, "input_size": 512, "output_size": 256}
CNN: Final[Table] = {
    "kind": "cnn", "image_size": 64,
    "layers": [{"kind": "conv", "out_channels": 64, "kernel_size": 5, "stride": 2, "padding": 2, "groups": 1},
               {"kind": "pool", "kernel_size": 2, "stride": 2}, {"kind": "linear", "out_channels": 128}],
}  # fmt: skip
PROJECTION: Final[Table] = {
    "name": "more",
    "kind": "linear",
    "inputs": 512,
    "outputs": 1024,
    "bias": True,
    "copies": 2,
    "uses": 1.0,
}
STEPS_OF_A_LAYER: Final[list[Table]] = [
    {"branches": [{"kind": "attention", "num_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "window": 512}]},
    {"branches": [{"kind": "mlp", "width": 4096}]},
]
LAYERS: Final[Table] = {
    "kind": "layers", "vocab_size": 32000, "embedding_rows": 32256, "embedding_size": 512, "extra": [PROJECTION],
    "stacks": [{
        "name": "decoder", "hidden_size": 1024, "pattern": ["a*4", "b*4"], "norm": "rmsnorm", "final_norm": True,
        "residual_streams": 2,
        "layers": {"a": {"sublayers": STEPS_OF_A_LAYER}, "b": {"sublayers": STEPS_OF_A_LAYER[1:]}}, "extra": [PROJECTION],
    }],
}  # fmt: skip
BESIDE: Final[Table] = {
    "kind": "layers", "vocab_size": 32000,
    "stacks": [
        {"name": name, "hidden_size": 512, "pattern": ["a*2"], "tower": True, "input_tokens": 256, "merge": 4,
         "extra": [PROJECTION], "layers": {"a": {"sublayers": [{"branches": [{"kind": "mlp", "width": 2048}]}]}}}
        for name in ("vision", "audio")
    ] + LAYERS["stacks"],
}  # fmt: skip
ROUTED: Final[Table] = {
    "kind": "layers", "vocab_size": 32000,
    "stacks": [{"name": "decoder", "hidden_size": 1024, "pattern": ["a*8"], "layers": {"a": {"sublayers": [
        STEPS_OF_A_LAYER[0], {"branches": [{"kind": "experts", "num_experts": 16, "num_experts_per_tok": 4, "width": 1024}]}]}}}],
}  # fmt: skip
STEP: Final[Table] = {"sequence_length": 4096, "global_batch_size": 32, "micro_batch_size": 1}


def _scenario(model: Table, plan: Table, training: Table | None = None, *, nodes: int = 2, **more: Any) -> Table:
    cluster = {"hardware": "dgx-h100", "num_nodes": nodes, **more.pop("cluster", {})}
    return {"name": "base", "model": model, "cluster": cluster, "plan": plan, "training": {**STEP, **(training or {})}, **more}


def _parts(nodes: int, plan: Table, **cluster: Any) -> Table:
    parts = [{"hardware": "dgx-a100-80gb", "num_nodes": nodes}, {"hardware": "dgx-h100", "num_nodes": nodes}]
    training = {**STEP, "global_batch_size": 64 * nodes}
    return {"name": "base", "model": DENSE, "cluster": {"parts": parts, **cluster}, "plan": plan, "training": training}


BASES: Final[Mapping[str, Table]] = {
    "pipeline": _scenario(DENSE, {"tp": 2, "pp": 4, "dp": 2}),
    "context": _scenario(DENSE, {"tp": 2, "cp": 4, "dp": 2}),
    "experts": _scenario(EXPERTS, {"tp": 2, "ep": 4, "etp": 2}, {"routing": {"kind": "zipf", "alpha": 0.5}},
                         effects={"seed": 1, "repetitions": 4}),
    "experts even": _scenario(EXPERTS, {"ep": 8}),
    "experts as modules": _scenario(EXPERTS, {"zero_stage": 3}, framework="deepspeed", framework_version="2024-06"),
    "counts": _scenario(EXPERTS, {"ep": 4}, {"routing": {"kind": "counts", "counts": [2.0, *[1.0] * 15]}}),
    "virtual": _scenario(DENSE, {"pp": 4, "virtual_stages": 2}),
    "virtual experts": _scenario(EXPERTS, {"pp": 2, "ep": 4, "virtual_stages": 2}),
    "wave": _scenario(DENSE, {"pp": 2, "schedule": "zb-v"}),
    "split": _scenario(DENSE, {"pp": 4, "schedule": "zb-h1"}),
    "site": {**_scenario(DENSE, {"tp": 2}), "site": {
        "name": "ours", "compute": 1.1, "memory": 1.1, "communication": 1.1, "residual": 0.02, "peak_memory_bytes": 1e9,
        "peak_memory_spread": 0.05, "runs": [{"id": "a", "measured_s": 1.0, "before_s": 0.9, "after_s": 0.99}],
        "group": group_of(make_scenario(_scenario(DENSE, {"tp": 2}))),
        "kinds": [{**kind_of(make_scenario(_scenario(DENSE, {"tp": 2}))).model_dump(), "gpus": 2, "tp": 1, "factor": 1.05}],
        "reach": 4.0, "layout_reach": 4.0, "host": 1.1,
        "covariance": [[v * (i == j) for j in range(5)] for i, v in enumerate((1e-3, 2e-3, 3e-3, 2e-3, 1e-3))],
    }},
    "site of other jobs": {**_scenario(DENSE, {"tp": 2}), "site": {"compute": 1.1, "other_kind": 0.05}},
    "given layers": _scenario(DENSE, {"pp": 4, "layers_per_stage": [3, 2, 2, 1]}),
    "full": _scenario(DENSE, {"tp": 2, "recompute": {"granularity": "full"}}),
    "block": _scenario(DENSE, {"tp": 2, "recompute": {"granularity": "full", "method": "block", "num_layers": 4}}),
    "modules": _scenario(EXPERTS, {"tp": 2, "ep": 2, "recompute": {"granularity": "selective", "modules": ["core_attn"]}},
                         {"attention_kernel": "unfused"}),
    "modules latent": _scenario(LATENT, {"recompute": {"granularity": "selective", "modules": ["core_attn"]}}),
    "torch": _scenario(DENSE, {"zero_stage": 3}, framework="torchtitan"),
    "torch pipeline": _scenario(DENSE, {"zero_stage": 3, "pp": 2, "dp": 8}, framework="torchtitan"),
    "torch compiled": _scenario(DENSE, {"recompute": {"granularity": "selective", "modules": ["op"]}}, {"compile": True},
                                framework="torchtitan"),
    "experts apart": _scenario(EXPERTS, {"zero_stage": 3, "ep": 2, "shard_experts": False}, framework="torchtitan"),
    "sharded groups": _scenario(DENSE, {"zero_stage": 3, "shard_size": 8}, framework="torchtitan"),
    "offload": _scenario(DENSE, {"offload": {"activations": 0.5}, "zero_stage": 1}),
    "sharded": _scenario(DENSE, {"zero_stage": 2, "dp": 16}),
    "plain": _scenario(DENSE, {"zero_stage": 0}),
    "host": _scenario(TINY_EXPERTS, {"ep": 8}, {"cuda_graphs": True, "sequence_length": 16}),
    "natural": _scenario(EXPERTS, {"ep": 4}, {"routing": {"kind": "lognormal"}}),
    "routed": _scenario(ROUTED, {"ep": 4}),
    "trainer": _scenario(DENSE, {"zero_stage": 3}, framework="transformers"),
    "adapters": _scenario({**DENSE, "gated_mlp": False, "activation": "gelu"}, {"zero_stage": 0},
                          {"trainable": "lora", "lora_modules": "all"}, framework="transformers"),
    "trained layers": _scenario(LAYERS, {"zero_stage": 0}, framework="transformers"),
    "lora": _scenario(DENSE, {}, {"trainable": "lora", "lora_rank": 16}),
    "latent": _scenario(LATENT, {"pp": 2}),
    "one norm": _scenario({**DENSE, "block_norms": 1, "parallel_block": True}, {}),
    "experts far": _scenario(EXPERTS, {"ep": 16, "ep_dispatcher": "deepep"}, nodes=8, cluster={"gpus_per_node": 2}),
    "learned positions": _scenario({**DENSE, "position": "learned"}, {}),
    "encoder": _scenario(ENCODER, {"tp": 2}),
    "layers": _scenario(LAYERS, {"tp": 2, "pp": 2}),
    "beside": _scenario(BESIDE, {"tp": 2, "pp": 4, "encoder_stages": 1},
                        {"images": {"per_sample": 4}, "audio": {"per_sample": 2, "tokens": 512}}),
    "mlp": _scenario(MLP, {"tp": 2}, {"sequence_length": 1}),
    "cnn": _scenario(CNN, {}, {"sequence_length": 1}),
    "wide": _scenario(DENSE, {"tp": 2, "pp": 2}, {"global_batch_size": 1024}, nodes=64),
    "pods": _scenario(DENSE, {"zero_stage": 1}, {"global_batch_size": 2048}, nodes=256),
    "rack": _scenario(DENSE, {"ep": 1}, cluster={"num_gpus": 8}),
    "shared links": _scenario(DENSE, {"pp": 2, "dp": 16}, nodes=4, effects={"contention": True}),
    "real": _scenario(DENSE, {"pp": 2, "dp": 8}, effects={
        "contention": True, "expand": True, "repetitions": 2, "compute_sigma": 0.02, "dead_rails": [1],
        "link_faults": [{"link": "pcie:0.4>nic:0.4>leaf:4", "factor": 0.25, "period": "5 ms", "down": "2.5 ms"}],
    }),
    "parts": _parts(1, {"tp": 4, "pp": 2}, parts_network={"bandwidth": "20 GB/s"}),
    "stages of their own": _scenario(DENSE, {"stage_tp": [8, 4, 4], "pp": 3, "dp": 1}),
    "parts of replicas": _parts(160, {"tp": 1}, parts_hold="replicas"),
}  # fmt: skip
"""Small layouts that between them use every part."""

# -- plan files --------------------------------------------------------------------------------------------------------

STEPS: Final = SimulatedSteps()
SMALL: Final = str(Path(__file__).parent.parent / "scenarios" / "megatron-1.7b_a100x32_tp1pp1.toml")


def _plan(phase: Table, **tables: Any) -> Table:
    cluster = {"num_nodes": 64, "gpus_per_node": 8, "spares": 2, "cold_spares": 1, **tables.pop("cluster", {})}
    checkpoints = {"parameters": "70B", "write_bandwidth": "20 GB/s", **tables.pop("checkpoints", {})}
    return {"name": "base", "file": "base.toml", "phases": [{"tokens": "20B", **phase}], "cluster": cluster,
            "checkpoints": checkpoints, **tables}  # fmt: skip


GIVEN: Final[Table] = {"tokens_per_s_per_gpu": 300.0, "sequence_length": 4096, "global_batch_size": 1024}
RATE: Final[Table] = {"component": "gpu", "rate_per_node_day": 0.05, "detection": "3 min", "repair": "5 h"}
PLAN_BASES: Final[Mapping[str, Table]] = {
    "given": _plan(GIVEN, reliability={"failures": [RATE], "silent_fraction": 0.2, "rate_uncertainty": 1.5, "repair": "2 h"}),
    "per gpu": _plan(GIVEN, reliability={"failures": [{"component": "gpu", "rate_per_gpu_day": 0.01}], "repair": "1 h"}),
    "total": _plan({"tokens_per_s": 1e5, "rated_gpus": 256, "relative_uncertainty": 0.1, "starts_at_tokens": 0,
                    "sequence_length": 4096, "global_batch_size": 1024,
                    "batch_ramp": [{"tokens": "5B", "global_batch_size": 256, "relative_throughput": 0.8}]}),
    "step": _plan({"step_time": "10 s", "rated_gpus": 512, "sequence_length": 4096, "global_batch_size": 1024}),
    "flops": _plan({"sequence_length": 4096, "flops": {"flops_per_s_per_gpu": "400 TFLOP/s", "active_parameters": "70B",
                                                       "num_layers": 80, "attention_width": 8192}}),
    "hours": _plan({"gpu_hours": 5e4}),
    "two phases": {**_plan(GIVEN), "phases": [{"tokens": "20B", **GIVEN}, {"tokens": "10B", **GIVEN, "starts_at_tokens": 20e9}]},
    "simulated": _plan({"scenario": SMALL}, cluster={"num_nodes": 4, "gpus_per_node": 8, "hardware": "dgx-h100"},
                       checkpoints={"parameters": "1.7B"}),
    "simulated ramp": _plan({"scenario": SMALL, "set": ["training.micro_batch_size=1"],
                             "batch_ramp": [{"tokens": "5B", "global_batch_size": 256}]},
                            cluster={"num_nodes": 4, "hardware": "dgx-h100"}),
    "simulated wide": _plan({"scenario": SMALL, "set": ["training.micro_batch_size=1"], "global_batch_size": 4096},
                            cluster={"num_nodes": 256, "hardware": "dgx-h100"}),
    "correlated": _plan(GIVEN, reliability={
        "correlated": [{"name": "leaf", "nodes_per_group": 8, "rate_per_group_day": 0.5, "repair": "2 h"}],
        "slow_nodes": {"rate_per_node_day": 0.05, "initial_fraction": 0.01, "slowdown": 1.2, "detection": "2 h"},
    }),
    "growing": _plan(GIVEN, cluster={"expansions": [{"day": 0.5, "add_nodes": 16}]}),
    "growing by tokens": _plan(GIVEN, cluster={"expansions": [{"at_tokens": "5B", "add_nodes": 16}]}),
    "rented": _plan(GIVEN, prices={"rent": {"usd_per_gpu_hour": 2.0}}, power={"gpu_busy": "700 W", "gpu_idle": "100 W",
                    "node_other": "3 kW", "utilisation": 0.8}, deadline="10 days"),
    "priced by machine": _plan({"scenario": SMALL}, cluster={"num_nodes": 4, "hardware": "dgx-h100"},
                               prices={"rent": {"usd_per_gpu_hour": 2.0, "by_hardware": {"dgx-h200": 3.0}}}),
    "owned by machine": _plan({"scenario": SMALL}, cluster={"num_nodes": 4, "hardware": "dgx-h100"},
                              prices={"own": {"usd_per_gpu": 3e4, "by_hardware": {"dgx-h200": 4e4}}}),
    "owned": _plan(GIVEN, prices={"own": {"usd_per_gpu": 3e4, "staff_usd_per_year": 1e6}}),
    "stops": _plan(GIVEN, maintenance=[{"first_day": 0.2, "every_days": 0.5, "duration": "1 h"}]),
    "blocking": _plan(GIVEN, checkpoints={"mode": "blocking", "interval": "10 min", "read_bandwidth": "10 GB/s",
                                          "storage_capacity": "3 TB"}),
    "times": _plan(GIVEN, checkpoints={"bytes": "1 TB", "save_time": "60 s", "load_time": "90 s", "stall": "5 s"}),
}  # fmt: skip
"""Runs of hours to days, and between them every way of giving a figure."""

CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "training.document_lengths": ((512, 1024), (256,)),
    "framework": ("torchtitan", "megatron-deepspeed", "no such"),
    "framework_version": ("2021", "2023-07"),
    "cluster.hardware": ("dgx-a100-80g", "no such"),
    "plan.dp": (3, 64),  # refused: only the one that the cluster leaves is right
    "plan.schedule": tuple(SCHEDULES),
    "cluster.parts[0].hardware": ("dgx-a100-40gb", "no such"),
    "cluster.parts_network.bandwidth": ("10 GB/s",),
    "cluster.parts_network.latency": ("1 ms",),
    "plan.stage_tp": ((4, 8, 4), (8, 8)),
    "plan.replica_microbatches": ((2, 6), (1, 1)),
    "plan.layers_per_stage": ("auto", (2, 2, 2, 2), (1, 3, 3, 1), (4, 4), (1,) * 8),
    "plan.placement": tuple("-".join(order) for order in permutations(("tp", "cp", "ep", "dp", "pp")) if order[0] != "tp")[::17],
    "plan.recompute.modules": tuple((name,) for name in (*MODULES, "op")),
    "training.optimizer": tuple(KINDS),
    "training.reference_model": (True, {**DENSE, "num_hidden_layers": 12}),
    "model.stacks[0].layers": ({"a": {"sublayers": STEPS_OF_A_LAYER[1:]}, "b": {"sublayers": STEPS_OF_A_LAYER}},),
    "model.stacks[0].pattern": (("a*8",),),
    "training.routing.counts": ((5.0, *[1.0] * 15), (1.0,) * 16),
    "effects.slow_ranks": ({0: 1.5},),
    "effects.dead_rails": ((0, 1), ()),
    "effects.link_faults[0].link": ("gpu:0>nvswitch:0", "no such"),
    "effects.link_faults[0].period": ("3 ms",),
    "effects.link_faults[0].down": ("0.1 ms",),
    "site": ("no such.toml",),
    "site.covariance": (tuple(tuple(v * (i == j) for j in range(5)) for i, v in enumerate((4e-3, 2e-3, 3e-3, 2e-3, 1e-3))),),
    "site.kinds[0].precision": ("fp8",),
    "site.group": ("plain on another GPU",),
    "phases[0].scenario": (str(Path(SMALL).with_name("megatron-3.6b_a100x64_tp2pp1.toml")), "no such"),
    "phases[0].set": (("plan.tp=2",),),
    "reliability.failures[0].component": ("cpu",),
    "reliability.correlated[0].name": ("switch",),
    "prices.rent.by_hardware": ({"dgx-h200": 6.0},),
    "prices.own.by_hardware": ({"dgx-h200": 6e4},),
    "checkpoints.interval": ("young", "daly", "1 h"),
}  # fmt: skip
"""Other values of fields whose type is only text, or a list or table."""

EACH: Final[frozenset[str]] = frozenset({"plan.schedule", "plan.recompute.modules", "training.reference_model"})
"""Of these, every value must count by itself."""

LABELS: Final[Mapping[str, str]] = {
    "name": "what the scenario is called",
    "description": "says what the scenario is",
    "file": "where it was read from, for messages",
    "published": "never an input: compared with the result",
    "model.name": "what the model is called",
    "model.source": "where the sizes stand",
    "model.notes": "what reading the model's file had to say",
    "model.stacks[0].name": "what the stack is called",
    "model.extra[0].name": "what the weight is called",
    "model.stacks[0].extra[0].name": "what the weight is called",
    "phases[0].name": "what the phase is called",
    "maintenance[0].name": "what the stop is called",
    "phases[0].source": "where given figures stand",
    "reliability.failures[0].source": "where the rate stands",
    "reliability.correlated[0].source": "where the rate stands",
    "reliability.slow_nodes.source": "where the figures stand",
    "site.name": "what the site is called",
    "site.runs": "what the site was learned from, for people",
    "site.facts": "of scenarios with open facts alone: tests/test_site.py",
    "model.published": "the published count, which `models` and the tests compare",
}
"""Fields (and all that begin so) that no output need show, with the reason."""

SAME: Final[Mapping[tuple[str, Any], str]] = {
    ("training.optimizer", "adam"): "adamw by another name: weight decay is in the same kernel",
    ("model.activation", "gelu"): "silu by its bytes: one tensor read and one written, and elementwise FLOPs are not counted",
    ("model.activation", "silu"): "gelu by its bytes",
    ("model.stacks[0].norm", "layernorm_no_bias"): "rmsnorm by its weights, and priced as it",
    ("model.stacks[0].norm", "rmsnorm"): "layernorm_no_bias by its weights",
    ("model.extra[0].kind", "conv"): "linear by its weights and products",
    ("model.stacks[0].extra[0].kind", "conv"): "linear by its weights and products",
    ("plan.schedule", "interleaved_1f1b"): "interleaved by another name",
}
"""Values that mean what another value of the field means."""


def at_once(table: Table) -> str:
    """What is said of a scenario's time and allocated memory, which takes a third of the time of everything."""
    found = simulate(make_scenario(table))
    memory = [(rank.static, rank.allocated_bytes) for rank in found.memory]
    return repr((found.step_time_s, found.waterfall(), found.mfu, memory, found.notes))


def of_scenario(table: Table) -> str:
    """All that is said of a scenario but what merely repeats its fields; raises InputError where it is refused."""
    said = simulate(make_scenario(table)).to_json()
    for echoed in ("name", "layout", "framework", "hardware"):
        said.pop(echoed)
    return json.dumps(said, sort_keys=True, default=str)


def of_plan(table: Table) -> str:
    """The same of a plan file, with a comparison of machines where it has prices for them."""
    simulation = Simulation(repetitions=6)
    found = answer(make_plan(table), STEPS, simulation)
    compared = any("by_hardware" in price for price in table.get("prices", {}).values())
    studies = (compare_hardware(Solver(table, STEPS, simulation), ["dgx-h200"]),) if compared else ()
    said = report_json(PlanReport(found, compare_published(found), studies, None))
    said.pop("name")
    return json.dumps(said, sort_keys=True, default=str)


@dataclass(frozen=True)
class Inputs:
    """A spec with base tables and the way to what is said of one."""

    bases: Mapping[str, Table]
    said: Callable[[Table], str]
    make: Callable[[Table], BaseModel]
    at_once: Callable[[Table], str] | None = None
    """A part of what is said, looked at first."""

    def changes(self, name: str, path: FieldPath, value: object) -> bool:
        """Whether another value changes what is said of a base."""
        table = changed(self.bases[name], path, value)
        if self.at_once is not None and self.at_once(table) != self.base_at_once(name):
            return True
        return self.said(table) != self.base(name)

    @cache  # noqa: B019
    def base_at_once(self, name: str) -> str:
        assert self.at_once is not None
        return self.at_once(self.bases[name])

    @cache  # noqa: B019
    def base(self, name: str) -> str:
        return self.said(self.bases[name])

    @cache  # noqa: B019
    def dump(self, name: str) -> Table:
        return self.make(self.bases[name]).model_dump()

    def __hash__(self) -> int:
        return id(self)


def constant(field: SpecField) -> bool:
    """The word that tells kinds of models apart: it has one value."""
    return len(words(field)) == 1


def is_label(name: str) -> bool:
    return any(name == label or (label != "name" and name.startswith(label)) for label in LABELS)


def outcomes(inputs: Inputs, field: SpecField) -> dict[str, str]:
    """What is said of each value of a field ("lives", "refused", "dead" over all bases that have the field); "" = any value."""
    found: dict[str, str] = {}
    single = words(field)
    for name in sorted(inputs.bases, key=lambda b: not _written(inputs.bases[b], field.path)):
        if found and set(found.values()) == {"lives"}:
            break
        try:
            current = value_at(inputs.dump(name), field.path)
        except LookupError:
            continue
        if field.path[0] == "model" and not _of_kind(field, inputs.dump(name)["model"]["kind"]):
            continue
        said: dict[str, str] = {}
        for value in CHOICES.get(field.name) or other_values(field, current):
            each = not isinstance(value, list | tuple | dict) and value in single
            label = repr(value) if each or field.name in EACH else ""
            if found.get(label) == "lives" or said.get(label) == "lives" or value == current:
                continue
            try:
                said[label] = "lives" if inputs.changes(name, field.path, value) else "dead"
            except InputError:
                said.setdefault(label, "refused")
        if current is None and "lives" in said.values():
            # Where nothing is written, one of the words means the default.
            said = {label: "lives" if what == "dead" else what for label, what in said.items()}
        for label, what in said.items():
            if what != "refused" or label not in found:
                found[label] = what
    return found


def _written(table: Any, path: FieldPath) -> bool:
    try:
        value_at(table, path)
    except LookupError:
        return False
    return True


def _of_kind(field: SpecField, kind: str) -> bool:
    owners = {
        "MlpSpec": "mlp", "CnnSpec": "cnn", "ConvLayerSpec": "cnn", "ArchitectureSpec": "layers", "StackSpec": "layers",
        "WeightSpec": "layers",
    }  # fmt: skip
    return owners.get(field.owner, "transformer") == kind


def assert_lives(inputs: Inputs, field: SpecField) -> None:
    found = outcomes(inputs, field)
    assert found, f"no base above has {field.name}, or no other value of it is known: add one"
    same = {repr(value) for path, value in SAME if path == field.name}
    dead = {value for value, what in found.items() if what == "dead"} - same
    assert not dead, f"{field.name}: nothing that is said of any base changes with {sorted(dead)}"


SCENARIOS: Final = Inputs(BASES, of_scenario, make_scenario, at_once)
PLANS: Final = Inputs(PLAN_BASES, of_plan, make_plan)
SCENARIO_FIELDS: Final = {
    f"{f.name} ({f.owner})": f
    for f in fields_of(Scenario)
    # Another model's fields are those of [model], read by the same code.
    if not is_label(f.name) and not constant(f) and not f.name.startswith("training.reference_model.")
}
PLAN_FIELDS: Final = {f.name: f for f in fields_of(PlanFile) if not is_label(f.name)}


@pytest.mark.parametrize(("inputs", "name"), [(inputs, name) for inputs in (SCENARIOS, PLANS) for name in inputs.bases])
def test_every_base_runs(inputs: Inputs, name: str) -> None:
    assert inputs.base(name)


@pytest.mark.parametrize("name", SCENARIO_FIELDS)
def test_every_field_of_a_scenario_lives(name: str) -> None:
    assert_lives(SCENARIOS, SCENARIO_FIELDS[name])


@pytest.mark.parametrize("name", PLAN_FIELDS)
def test_every_field_of_a_plan_file_lives(name: str) -> None:
    assert_lives(PLANS, PLAN_FIELDS[name])


def test_a_dead_field_would_be_found() -> None:
    table = {"a": {"b": 1, "words": "x"}}

    class Inner(BaseModel):
        b: int = 1
        words: Literal["x", "y"] = "x"

    class Outer(BaseModel):
        a: Inner = Inner()

    alive = Inputs({"one": table}, json.dumps, Outer.model_validate)
    dead = Inputs({"one": table}, lambda _: "nothing", Outer.model_validate)
    half = Inputs({"one": table}, lambda t: str(t["a"]["b"]), Outer.model_validate)
    for field in fields_of(Outer):
        assert set(outcomes(alive, field).values()) == {"lives"}
        assert set(outcomes(dead, field).values()) == {"dead"}
    assert [set(outcomes(half, f).values()) for f in fields_of(Outer)] == [{"lives"}, {"dead"}]
