"""Runs each toy of tests/toys before and after it is entered, in a process of its own; prints what came of it."""

import importlib
import json

from simpar.costs.collectives import CollectiveModel
from simpar.errors import InputError
from simpar.graph.masks import Mask
from simpar.model.huggingface import read
from simpar.model.ledger import totals
from simpar.specs.framework import POLICIES, framework
from simpar.specs.hardware import load_hardware
from simpar.specs.scenario import make_scenario
from simpar.step import simulate
from simpar.topology.placement import GroupPlacement


def run(model=None, plan=None, framework="megatron-core", **training):
    stack = {
        "hidden_size": 1024,
        "pattern": ["a*4"],
        "layers": {
            "a": {
                "sublayers": [
                    {"branches": [{"kind": "attention", "num_heads": 16, "num_key_value_heads": 4, "head_dim": 64}]},
                    {"branches": [model or {"kind": "mlp", "width": 4096}]},
                ]
            }
        },
    }
    table = {
        "framework": framework,
        "cluster": {"hardware": "dgx-h100", "num_nodes": 1},
        "model": {"kind": "layers", "vocab_size": 32000, "stacks": [stack]},
        "plan": {"pp": 2, "tp": 2, "zero_stage": 1, **(plan or {})},
        "training": {"sequence_length": 1024, "global_batch_size": 32, "micro_batch_size": 1, **training},
    }
    found = simulate(make_scenario(table, file="s.toml"))
    return {"step_time_s": found.step_time_s, "peak": max(rank.allocated_bytes for rank in found.memory), "mfu": found.mfu}


def composed():
    """Whose policies the toy's are."""
    spec = framework("toy", "2025-06")
    return {part: getattr(spec, part).policy for part in POLICIES} | run(framework="toy")


def reduced():
    """Seconds of an all-reduce of 1 MB over four nodes, a rank on each."""
    model = CollectiveModel(load_hardware("dgx-h100"))
    return {"seconds": model.time("all_reduce", 1e6, GroupPlacement(4, (1,) * 4, (1,) * 4, "leaf")).seconds}


def tried(make):
    try:
        return make()
    except (InputError, KeyError) as error:
        return {"refused": str(error)}


file = {
    "model_type": "toy",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "intermediate_size": 128,
}
cases = {
    "architecture": lambda: {"parameters": totals(read(file), 64).parameters},
    "mixer": lambda: run({"kind": "toy", "width": 512}),
    "optimizer": lambda: run(optimizer="toy"),
    "mask": lambda: {"attended": Mask("toy").attended(100)},
    "schedule": lambda: run(plan={"schedule": "toy"}),
    "collective": reduced,
    "framework": composed,
    "recomputation": lambda: run(plan={"recompute": {"modules": ["toy"]}}),
}
before = {name: tried(case) for name, case in cases.items()}
usual = run()
found = {}
for name, case in cases.items():
    importlib.import_module(f"toys.{name}")
    found[name] = tried(case)
print(json.dumps({"before": before, "usual": usual, "found": found}))
