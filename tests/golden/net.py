"""The golden net: op lists, memory and step times of many scenarios as they were, and what of it has changed.

    python tests/golden/net.py            what differs from the file
    python tests/golden/net.py --write    write the file anew

The file is a record, not a truth: a change that is meant is written anew, its reason stands in docs/graph_differences.md or
in the commit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from math import isclose
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from grid import GPUS_PER_NODE, HARDWARE, PLANS, SHAPES

from simpar.errors import InputError
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.layout import Layout, recomputed_flops
from simpar.parallel.lifetimes import lifetimes
from simpar.parallel.work import ExpertExchange
from simpar.result.memory import RankMemory
from simpar.specs.models_io import load_model, model_names
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import simulate

FILE = Path(__file__).with_name("net.json.gz")
_PHASES = ("forward", "backward", "input_gradient", "weight_gradient")


def scenario_of(case: dict[str, Any], hardware: str, name: str = "golden") -> Scenario:
    """The checked scenario of a case on one profile, on as many nodes as its degrees ask for."""
    plan, training = dict(case["plan"]), dict(case["training"])
    ranks = plan.get("tp", 1) * plan.get("cp", 1) * plan.get("pp", 1) * plan.get("dp", 1)
    node = GPUS_PER_NODE.get(hardware, 8)
    per = min(ranks, node)
    micro = training.setdefault("micro_batch_size", 1)
    training.setdefault("sequence_length", 4096)
    training.setdefault("global_batch_size", 8 * micro * plan.get("dp", 1))
    model = case["model"]
    if isinstance(model, dict):
        model = {**load_model(model["preset"]).model_dump(), **{k: v for k, v in model.items() if k != "preset"}}
    table = {
        "name": name, "model": model, "framework": case["framework"], "plan": plan, "training": training,
        "cluster": {"hardware": hardware, "num_nodes": ranks // per, "gpus_per_node": per},
    }  # fmt: skip
    if case["framework_version"]:
        table["framework_version"] = case["framework_version"]
    return make_scenario(table)


def _work(work: object) -> list[Any]:
    if isinstance(work, ExpertExchange):
        moe = work.moe
        return ["ExpertExchange", work.combine, work.tokens, work.hidden, moe.num_experts_per_tok, work.element_bytes,
                work.dispatcher, moe.topk_group]  # fmt: skip
    values = work if isinstance(work, tuple) else asdict(work).values()  # type: ignore[call-overload]
    return [type(work).__name__, *values]


def block_record(block: LocalBlock) -> dict[str, Any]:
    """One block on one rank: ops by phase, saved tensors, sums, and the order of its tensors."""
    lives = lifetimes(block)
    record: dict[str, Any] = {
        phase: [[op.name, op.stream, _work(op.work), list(op.deps), op.kernels] for op in getattr(block, phase)]
        for phase in _PHASES
    }
    names = ("working", "transient", "deferred", "dense_parameters", "expert_parameters", "lora_parameters", "model_flops",
             "attention_flops")  # fmt: skip
    record |= {name: getattr(block, name) for name in names}
    record["saved"] = dict(block.saved)
    record["lifetimes"] = [list(map(list, lives.forward)), list(map(list, lives.backward))]
    return record


def blocks_record(layout: Layout) -> dict[str, Any]:
    """Distinct blocks of a layout, where they lie, and its FLOPs."""
    found: list[dict[str, Any]] = []
    places: list[list[int]] = []
    for blocks in layout.stage_blocks:
        row = []
        for block in blocks:
            record = {"name": block.name, **block_record(block)}
            if record not in found:
                found.append(record)
            row.append(found.index(record))
        places.append(row)
    sums = [layout.model_flops, layout.attention_model_flops, recomputed_flops(layout)]
    return {"blocks": found, "places": places, "flops": sums, "boundaries": sorted(set(layout.boundary_bytes))}


def _memory(memory: RankMemory) -> dict[str, Any]:
    return {"at_peak": memory.at_peak, "reserved": memory.reserved_bytes, "outside": dict(memory.outside)}


def step_record(scenario: Scenario, *, blocks: bool) -> dict[str, Any]:
    """A simulated step: time, waterfall, communication, memory of the first, a middle and the last rank."""
    result = simulate(scenario)
    ranks = sorted({0, len(result.memory) // 2, len(result.memory) - 1})
    record: dict[str, Any] = {
        "step_time_s": result.step_time_s, "mfu": result.mfu, "waterfall": dict(result.waterfall()),
        "communication_s": result.communication_s, "exposed_s": result.exposed_communication_s,
        "memory": {str(r): _memory(result.memory[r]) for r in ranks},
    }  # fmt: skip
    return record | (blocks_record(result.layout) if blocks else {})


def preset_record(name: str, shape: str) -> dict[str, Any]:
    """Blocks of a preset in one of SHAPES."""
    model = load_model(name)
    case = {**SHAPES[shape], "model": name}
    if model.kind != "transformer":
        case |= {"training": {"sequence_length": 1}, "plan": {**case["plan"], "sequence_parallel": False}}
    try:
        scenario = scenario_of(case, "dgx-h100")
    except InputError as error:  # a model that no step runs, or a shape that is not its own
        return {"refused": str(error)}
    return blocks_record(Layout.of(scenario, 1))


def records(*, presets: bool = True, steps: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, record) of everything in the net."""
    if presets:
        for name in model_names():
            for shape in SHAPES:
                yield f"preset {name} {shape}", preset_record(name, shape)
    if steps:
        for index, (name, case) in enumerate(PLANS.items()):
            narrow = case["training"].get("precision", "").startswith("fp8")
            for turn, hardware in enumerate(h for h in HARDWARE if not (narrow and "a100" in h)):
                yield f"plan {name} {hardware}", step_record(scenario_of(case, hardware, name), blocks=turn == index % 3)


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Where two records differ by more than rounding."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            if key not in new or key not in old:
                yield f"{path}.{key}: {'gone' if key in old else 'new'} ({old.get(key, new.get(key))})"[:200]
            else:
                yield from differences(old[key], new[key], f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{path}: {len(old)} -> {len(new)} entries"
            return
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{path}[{index}]")
    elif isinstance(old, bool) or isinstance(new, bool) or not isinstance(old, int | float) or not isinstance(new, int | float):
        if old != new:
            yield f"{path}: {old} -> {new}"
    elif not isclose(old, new, rel_tol=1e-9, abs_tol=1e-12):
        yield f"{path}: {old:.9g} -> {new:.9g}"


def read() -> dict[str, Any]:
    """The recorded net."""
    with gzip.open(FILE, "rt", encoding="utf-8") as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def write(found: dict[str, Any]) -> None:
    """Record `found`; the same bytes for the same content."""
    with FILE.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as stream:
        stream.write(json.dumps(found, separators=(",", ":")).encode())


def main() -> int:
    """Compare, or write anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--only", default="", help="records whose name holds this")
    parser.add_argument("--most", type=int, default=8, help="differences shown per record")
    parser.add_argument("--blocks", action="store_true", help="presets alone: no simulation")
    arguments = parser.parse_args()
    if arguments.write:
        write(json.loads(json.dumps(dict(records()))))
        print(f"{FILE}: {FILE.stat().st_size / 1e6:.2f} MB")
        return 0
    old, wrong = read(), 0
    for name, record in records(steps=not arguments.blocks):
        if arguments.only not in name:
            continue
        found = list(differences(old.get(name, {}), json.loads(json.dumps(record))))
        wrong += bool(found)
        for line in found[: arguments.most]:
            print(f"{name}{line}")
        if len(found) > arguments.most:
            print(f"{name}: {len(found) - arguments.most} more")
    print(f"{wrong} records differ")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
