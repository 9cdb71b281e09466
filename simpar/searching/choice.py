"""One layout of the space: a value for every axis, and the scenario it stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from simpar.specs.plan import PlanSpec, RecomputeSpec
from simpar.specs.scenario import Scenario

Split = tuple[int, int, bool]
"""Layers taken off the first and the last stage, and whether embedding and head have stages of their own."""

EVEN: Split = (0, 0, False)


def recompute_spec(text: str) -> str | RecomputeSpec:
    """The plan's recompute field: "none", "full", "full:3" (first 3 layers of each stage), "selective:core_attn+mlp"."""
    kind, _, detail = text.partition(":")
    if kind == "full" and detail:
        return RecomputeSpec(granularity="full", method="block", num_layers=int(detail))
    if kind == "selective":
        return RecomputeSpec(granularity="selective", modules=tuple(detail.split("+")) if detail else ())
    return kind


def recompute_text(value: str | RecomputeSpec) -> str:
    """The short text of a plan's recompute field; "full/2" (every second layer) and "full*2" (chunks of two) are no values of the
    search's axis."""
    if isinstance(value, str):
        return value
    if value.granularity == "full" and value.num_layers is not None:
        return f"full:{value.num_layers}"
    if value.every > 1:
        return f"full/{value.every}"
    if value.uniform_layers > 1:
        return f"full*{value.uniform_layers}"
    if value.granularity == "selective" and value.modules:
        return "selective:" + "+".join(value.modules)
    return value.granularity


def split_text(split: Split) -> str:
    """even, alone, or first-last layers less."""
    if split[2]:
        return "alone"
    return "even" if split == EVEN else f"{split[0]}-{split[1]}"


def parse_split(text: str) -> Split:
    """The inverse of `split_text`."""
    if text == "alone":
        return (0, 0, True)
    if text == "even":
        return EVEN
    first, _, last = text.partition("-")
    return int(first), int(last or 0), False


@dataclass(frozen=True, slots=True)
class Group:
    """The mesh: degrees and the order of the dimensions over ranks."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    placement: str
    stage_tp: tuple[int, ...] = ()
    """Tensor parallelism of each pipeline rank, where they differ; `tp` is then the first's."""


MeshKey = tuple[int, ...]
"""What layouts of one design share: the degrees of the mesh, whatever its order over ranks, and the micro-batch."""


def mesh_key(group: Group, micro_batch_size: int) -> MeshKey:
    """The design of a mesh and micro-batch."""
    return (group.tp, group.cp, group.pp, group.dp, group.ep, group.etp, micro_batch_size, *group.stage_tp)


def tp_text(group: Group) -> str:
    """Tensor parallelism in words: "8", or "8/4" where pipeline ranks have degrees of their own."""
    return "/".join(map(str, dict.fromkeys(group.stage_tp or (group.tp,))))


@dataclass(frozen=True, slots=True)
class Variant:
    """How the mesh is used inside a block."""

    sequence_parallel: bool
    cp_style: str
    overlap_tp: bool
    overlap_ep: bool
    ep_dispatcher: str
    precision: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages are cut and ordered."""

    virtual_stages: int
    schedule: str
    split: Split
    overlap_p2p: bool | None
    layers: tuple[int, ...] = ()
    """Layers of each stage, where they were dealt out by cost."""


@dataclass(frozen=True, slots=True)
class State:
    """How states are spread over data-parallel ranks, and what of that is hidden."""

    zero_stage: int
    shard_size: int | None
    reshard_after_forward: bool
    overlap_grad_reduce: bool | None
    overlap_param_gather: bool | None
    offload_parameters: bool = False
    """Shards rest in host memory, from where each layer's are gathered."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What lives in host memory."""

    activations: float
    optimizer: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout."""

    group: Group
    micro_batch_size: int
    variant: Variant
    pipeline: Pipeline
    recompute: str
    state: State
    offload: Offload

    @property
    def requested(self) -> Choice:
        """The layout without what moves no request of the allocator: where ranks sit, what hides traffic (passes are cut elsewhere,
        their blocks follow as before), how much of what is kept goes to the host."""
        return replace(
            self, group=replace(self.group, placement=""), variant=replace(self.variant, overlap_tp=False),
            state=replace(self.state, overlap_grad_reduce=None, overlap_param_gather=None),
            offload=replace(self.offload, activations=0.0),
        )  # fmt: skip

    def plan(self, template: PlanSpec) -> PlanSpec:
        """The plan, with what the space does not decide taken from `template`."""
        g, v, p, s = self.group, self.variant, self.pipeline, self.state
        return template.model_copy(
            update={
                "tp": 1 if g.stage_tp else g.tp, "stage_tp": g.stage_tp or None, "cp": g.cp, "pp": g.pp, "dp": g.dp, "ep": g.ep,
                # Without expert parallelism experts are sharded like the dense layers, and a dense model has none.
                "etp": g.etp if g.ep > 1 else None, "placement": g.placement,
                "sequence_parallel": v.sequence_parallel, "cp_style": v.cp_style, "overlap_tp": v.overlap_tp,
                "overlap_ep": v.overlap_ep, "ep_dispatcher": v.ep_dispatcher,
                "virtual_stages": p.virtual_stages, "schedule": p.schedule, "overlap_p2p": p.overlap_p2p,
                "first_stage_less_layers": p.split[0], "last_stage_less_layers": p.split[1],
                "embedding_alone": p.split[2], "layers_per_stage": p.layers or None,
                "recompute": recompute_spec(self.recompute), "zero_stage": s.zero_stage, "shard_size": s.shard_size,
                "reshard_after_forward": s.reshard_after_forward, "overlap_grad_reduce": s.overlap_grad_reduce,
                "overlap_param_gather": s.overlap_param_gather,
                "offload": template.offload.model_copy(
                    update={
                        "activations": self.offload.activations, "optimizer": self.offload.optimizer,
                        "parameters": s.offload_parameters,
                    }
                ),
            }
        )  # fmt: skip

    def scenario(self, template: Scenario) -> Scenario:
        """The scenario of this layout, of which nothing is published; valid by the space's construction, so not checked again."""
        training = template.training.model_copy(
            update={"micro_batch_size": self.micro_batch_size, "precision": self.variant.precision}
        )
        return template.model_copy(update={"plan": self.plan(template.plan), "training": training, "published": ()})

    def flat(self) -> dict[str, Any]:
        """Axis -> value, in the words of a plan."""
        g, v, p, s, o = self.group, self.variant, self.pipeline, self.state, self.offload
        mesh = {name: value for name, value in asdict(g).items() if value != ()}
        return {
            **mesh, "micro_batch_size": self.micro_batch_size, **asdict(v),
            "virtual_stages": p.virtual_stages, "schedule": p.schedule,
            "split": "+".join(map(str, p.layers)) or split_text(p.split),
            "overlap_p2p": p.overlap_p2p, "recompute": self.recompute, **asdict(s),
            "offload_activations": o.activations, "offload_optimizer": o.optimizer,
        }  # fmt: skip

    @classmethod
    def from_flat(cls, flat: dict[str, Any]) -> Choice:
        """The inverse of `flat`."""

        def part(kind: type[Any]) -> Any:
            return kind(**{f.name: flat[f.name] for f in fields(kind) if f.name != "stage_tp"})

        text = flat["split"]
        split, layers = (EVEN, tuple(map(int, text.split("+")))) if "+" in text else (parse_split(text), ())
        pipeline = Pipeline(flat["virtual_stages"], flat["schedule"], split, flat["overlap_p2p"], layers)
        group = replace(part(Group), stage_tp=tuple(flat.get("stage_tp", ())))
        return cls(
            group, flat["micro_batch_size"], part(Variant), pipeline, flat["recompute"], part(State),
            Offload(flat["offload_activations"], flat["offload_optimizer"]),
        )  # fmt: skip

    @property
    def mesh_key(self) -> MeshKey:
        """The design that it is of."""
        return mesh_key(self.group, self.micro_batch_size)

    @property
    def complexity(self) -> float:
        """How much machinery a layout uses, for ordering ties: dimensions in use, then what is switched on beside them."""
        g, v, p, s, o = self.group, self.variant, self.pipeline, self.state, self.offload
        dimensions = sum(d > 1 for d in (g.tp, g.cp, g.pp, g.ep, g.etp if g.ep > 1 else 1))
        simple = p.schedule in ("1f1b", "gpipe", "naive")
        extras = (p.virtual_stages > 1) + (not simple) + (p.split != EVEN) + (s.shard_size is not None)
        extras += (self.recompute != "none") + ("selective:" in self.recompute and "+" in self.recompute)
        extras += (
            2 * (o.activations > 0) + 2 * (o.optimizer + s.offload_parameters) + v.overlap_tp + v.overlap_ep + (s.zero_stage > 1)
        )
        extras += g.placement != "tp-cp-ep-dp-pp"
        return 10.0 * dimensions + extras + 0.01 * p.virtual_stages

    def __str__(self) -> str:
        g, v, p, s, o = self.group, self.variant, self.pipeline, self.state, self.offload
        words = [f"tp{tp_text(g)}"]
        if g.tp > 1 and v.sequence_parallel:
            words.append("sp")
        if g.cp > 1:
            words.append(f"cp{g.cp} {v.cp_style}")
        words.append(f"pp{g.pp}")
        if g.pp > 1:
            words.append(p.schedule + (f" v{p.virtual_stages}" if p.virtual_stages > 1 else ""))
        if g.ep > 1:
            words.append(f"ep{g.ep}" + (f" etp{g.etp}" if g.etp > 1 else ""))
        words += [f"dp{g.dp}", f"mbs{self.micro_batch_size}", f"zero{s.zero_stage}"]
        if s.shard_size:
            words.append(f"shard{s.shard_size}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if p.layers:
            words.append(f"layers {'+'.join(map(str, p.layers))}")
        if p.split != EVEN:
            words.append(f"split {split_text(p.split)}")
        words += [name for name, on in (("overlap_tp", v.overlap_tp), ("overlap_ep", v.overlap_ep)) if on]
        if g.ep > 1 and v.ep_dispatcher != "alltoall":
            words.append(v.ep_dispatcher)
        if s.overlap_grad_reduce is False:
            words.append("no grad overlap")
        if s.overlap_param_gather is False:
            words.append("no gather overlap")
        if p.overlap_p2p is False:
            words.append("blocking p2p")
        if o.activations:
            words.append(f"offload {o.activations:g}")
        if o.optimizer:
            words.append("offload optimizer")
        if s.offload_parameters:
            words.append("offload parameters")
        if g.placement != "tp-cp-ep-dp-pp":
            words.append(g.placement)
        return " ".join(words)
