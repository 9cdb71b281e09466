"""What is predicted of the single blocks that one GPU runs (`gpu_blocks`): seconds, kernel shapes, products.

A block is a scenario of one layer without positions on one GPU, priced as torchtitan's of 2026-02: eager, compiled (elementwise
chains fused, kernels of a graph launched one after the other), and in fp8 with casts of their own, one scale a tensor or a row.
Experts are multiplied in bf16 whatever the style, as they run. Linear attention is one kernel here; torch runs it in products by
chunk, which no list of shapes holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from simpar.costs.pricer import LayoutPricer
from simpar.live.block_sizes import BLOCKS, CHUNK, PARTS, STYLES, key_of_block
from simpar.live.cluster_shapes import shape_of
from simpar.live.rank import Row
from simpar.live.rank_plan import FRAMEWORK, VERSION
from simpar.live.rank_shapes import executed, kernel_key
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import LaunchGap
from simpar.parallel.layout import Layout
from simpar.parallel.work import GroupedGemm, LocalOp
from simpar.specs.calibration import uncalibrated
from simpar.specs.scenario import Scenario, make_scenario
from simpar.step import cost_models

PRECISION: Final = {"eager": "bf16", "compiled": "bf16", "fp8": "fp8", "fp8_row": "fp8-rowwise"}
VOCABULARY: Final = 1024
"""Of an embedding and a head that nothing here asks about."""
Shape = dict[str, Any]


def scenario_of(name: str, style: str, hardware: str) -> Scenario:
    """A block as a model of one layer."""
    size = BLOCKS[name]
    d, heads = size["d"], size["heads"]
    own: dict[str, Any] = {"num_heads": heads, "key_head_dim": d // heads, "value_head_dim": d // heads}
    mixer = {"kind": "linear_attention", **own, "gate": False, "chunk": CHUNK}
    if "linear" not in size:
        mixer = {"kind": "attention", "num_heads": heads, "num_key_value_heads": size["kv"], "head_dim": d // heads,
                 "position": "none"}  # fmt: skip
    dense = {"kind": "mlp", "width": size["f"]}
    routed = {"kind": "experts", "num_experts": size.get("experts", 1), "num_experts_per_tok": size.get("chosen", 1),
              "width": size["f"]}  # fmt: skip
    sublayers = [{"branches": [mixer]}, {"branches": [routed if "experts" in size else dense]}]
    stack = {"hidden_size": d, "layers": {"one": {"sublayers": sublayers}}, "pattern": ["one"]}
    return make_scenario({
        "name": f"{name}, {style}", "framework": FRAMEWORK, "framework_version": VERSION,
        "model": {"kind": "layers", "vocab_size": VOCABULARY, "stacks": [stack]},
        "cluster": {"hardware": hardware, "num_nodes": 1, "num_gpus": 1}, "plan": {"zero_stage": 0, "recompute": "none"},
        "training": {"sequence_length": size["s"], "micro_batch_size": size["b"], "global_batch_size": size["b"],
                     "precision": PRECISION[style], "compile": style != "eager", "gradient_dtype": "bf16"},
    })  # fmt: skip


class PricedBlock:
    """One block in one style, priced without constants of published runs."""

    def __init__(self, name: str, style: str, hardware: str) -> None:
        with uncalibrated():
            scenario = scenario_of(name, style, hardware)
            self.layout = Layout.of(scenario, 1)
            self._pricer = LayoutPricer(self.layout, *cost_models(scenario, scenario.hardware))
            blocks = self.layout.stage_blocks[0]
            self._index = next(i for i, block in enumerate(blocks) if block.name not in ("embedding", "head"))
            self.block: LocalBlock = blocks[self._index]

    def works(self, part: str) -> Iterator[tuple[LocalOp, str]]:
        """Ops as they run, products that simpar packs one by one, with their phase."""
        for phase, ops in (("F", self.block.forward), ("B", self.block.backward))[: PARTS.index(part) + 1]:
            for op in ops:
                for work in executed(op, self.block) or (op.work,):
                    # Experts stay in 16 bits.
                    yield op._replace(work=work._replace(dtype="bf16") if isinstance(work, GroupedGemm) else work), phase

    def seconds(self, part: str) -> float:
        """Of the forward, or of the step; without an update."""
        phases: tuple[Literal["F", "B"], ...] = ("F", "B")
        keys = [LaunchGap(phase, 0, self._index) for phase in phases[: PARTS.index(part) + 1]]
        with uncalibrated():
            kernels = [self._pricer.op_price(op).seconds for op, _ in self.works(part)]
            return float(sum(kernels) + sum(self._pricer.price(key).seconds for key in keys))

    def products(self, part: str) -> dict[tuple[Any, ...], int]:
        """(kind, sizes) of every product and attention kernel -> calls, as `rank_meter.Meter` counts."""
        found: dict[tuple[Any, ...], int] = defaultdict(int)
        for op, _ in self.works(part):
            if executed(op, self.block):
                found[kernel_key(op.work)] += 1  # type: ignore[arg-type]
        return dict(found)

    def shapes(self) -> list[Shape]:
        """Kernel shapes for `simpar calibrate --shapes`; casts to fp8 have prices of their own."""
        found = []
        for op, _ in self.works("step"):
            for shape in shape_of(op, self.block, gated=2, dtype="bf16"):
                if shape["op"] == "attention":
                    shape["batch_first"] = 1
                if shape["op"] == "memory" and self.layout.compiled:
                    shape["dims"]["compiled"] = 1
                if not shape.get("kernel", "").startswith("cast"):
                    found.append(shape)
        return found


def predictions(hardware: str) -> dict[str, float]:
    """Key of a record -> predicted seconds, of every block, style and part."""
    priced = {(name, style): PricedBlock(name, style, hardware) for style in STYLES for name in BLOCKS}
    return {key_of_block(*which, part): one.seconds(part) for which, one in priced.items() for part in PARTS}


def block_shapes(hardware: str) -> list[Shape]:
    """Kernel shapes of all blocks, each once."""
    found: dict[str, Shape] = {}
    for style in STYLES:
        for name in BLOCKS:
            for shape in PricedBlock(name, style, hardware).shapes():
                found.setdefault(repr(shape), shape)
    return list(found.values())


def compare_blocks(records: Iterable[Mapping[str, Any]], predicted: Mapping[str, float]) -> list[Row]:
    """Measured blocks beside what is predicted of them.

    Args:
        records: of the collector's store; others than measured blocks are passed over.
    """
    times = {str(r["key"]): float(r["seconds"]) for r in records if str(r.get("key", "")).startswith("block/") and "seconds" in r}
    return [Row("blocks", "block_time_s", key.removeprefix("block/"), predicted.get(key), time_s) for key, time_s in times.items()]
