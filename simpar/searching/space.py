"""The space of layouts of one scenario: which values every axis takes, counted and listed without missing or doubling any.

A layout is a mesh (group), a micro-batch, a variant of the block, a pipeline, a recomputation, a spread of the states and an
offload. Values without effect (context-parallel styles at cp = 1, ...) are one layout, not several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from simpar.errors import InputError
from simpar.model.kind import of_jobs
from simpar.schedules import SCHEDULES as FAMILIES
from simpar.searching import axes
from simpar.searching.abilities import Ability, ability
from simpar.searching.axes import selections, whole_layers
from simpar.searching.choice import EVEN, Choice, Group, Offload, Pipeline, Split, State, Variant, parse_split
from simpar.searching.memo import kept
from simpar.specs.architecture import TokenModel
from simpar.specs.checks import check_scenario
from simpar.specs.counts import divisors, layer_count
from simpar.specs.framework import FrameworkSpec, framework
from simpar.specs.hardware import HardwareProfile
from simpar.specs.model import MoeSpec
from simpar.specs.optimizers import KINDS
from simpar.specs.scenario import Scenario
from simpar.topology.mesh import Mesh


@dataclass(frozen=True)
class Space:
    """What may be chosen around a scenario.

    Attributes:
        scenario: model, cluster, training, and what no axis covers.
        restrictions: axis -> allowed values (fixed, allowed, the scenario's ranges).
        framework: limit to what this framework can run; none = no limit.
        recipe: what was chosen of the training table, in words (see `tasks`).
    """

    scenario: Scenario
    restrictions: dict[str, tuple[Any, ...]]
    framework: str | None = None
    recipe: str = ""

    @cached_property
    def template(self) -> Scenario:
        """The scenario at a site that says the same of all layouts."""
        return of_jobs(self.scenario)

    @property
    def machines(self) -> tuple[HardwareProfile, ...]:
        """The kinds of machines of the cluster."""
        return (self.template.hardware,)

    @property
    def hardware(self) -> HardwareProfile:
        """All machines together."""
        return self.machines[0]

    # -- values ------------------------------------------------------------------------------------------------------

    @cached_property
    def _able(self) -> dict[str, tuple[Any, ...]]:
        own, template = self._ability, self.template
        compiled = self._semantics.kernels.compile if template.training.compile is None else template.training.compile
        hybrid = self.template.model.kind != "transformer"
        more = ((self._moe, own.with_experts), (hybrid, own.with_hybrids), (not compiled, own.uncompiled))
        return {**own.values, **{axis: values for holds, found in more if holds for axis, values in found.items()}}

    @cached_property
    def _semantics(self) -> FrameworkSpec:
        return framework(self.template.framework, self.template.framework_version)

    @cached_property
    def _ability(self) -> Ability:
        return ability(self.framework or "plain")

    def values(self, axis: str, default: list[Any] | tuple[Any, ...]) -> list[Any]:
        """Allowed values of `axis`: of the user's list (or the default range), those that the framework can run."""
        found = list(self.restrictions.get(axis, default))
        return list(dict.fromkeys(v for v in found if self.can(axis, v)))

    def can(self, axis: str, value: Any) -> bool:
        """Whether the framework can run `value`; left open it is what the framework does."""
        left_open = value is None and axis in axes.LEFT_OPEN
        if axis == "schedule" and value not in (self._semantics.pipeline.schedules or (value,)):
            return False
        return left_open or axis not in self._able or axes.matches(axis, value, self._able[axis])

    @property
    def _transformer(self) -> TokenModel | None:
        model = self.template.model
        return model if isinstance(model, TokenModel) else None

    @property
    def _moe(self) -> MoeSpec | None:
        return self._transformer.moe if self._transformer else None

    @cached_property
    def layers(self) -> int:
        """Layers that stages share out."""
        return layer_count(self.template.model)

    # -- groups ------------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Every mesh of the world whose degrees divide what they split."""
        return tuple(self._usable())

    @cached_property
    def first_group(self) -> Group:
        """Any mesh, for what all layouts share; found without the others."""
        return next(self._usable())

    def _usable(self) -> Iterator[Group]:
        return (g for g in self._groups() if self._ability.can_shard is None or self.states(g))

    def _groups(self) -> Iterator[Group]:
        world, batch = self.template.world_size, self.template.training.global_batch_size
        domain = min(machine.domain_size for machine in self.machines)
        parts = divisors(world)
        tps = self.values("tp", [d for d in parts if d <= domain])
        pps = self.values("pp", [d for d in parts if d <= self.layers + 2])
        dps = self.restrictions.get("dp")
        for tp, cp in product(tps, self.values("cp", self._default_cp(parts))):
            styles = list(self._all_variants(tp, cp, 1))
            if not any(self._block_fits(tp, cp, v) for v in styles):
                continue
            for pp in pps:
                if world % (tp * cp * pp) or pp > self.layers + 2:
                    continue
                dp = world // (tp * cp * pp)
                if batch % dp or (dps and dp not in dps):
                    continue
                for ep, etp in self._expert_degrees(tp, cp * dp * tp):
                    yield from self._placed(tp, cp, pp, dp, ep, etp)

    def _default_cp(self, parts: list[int]) -> list[int]:
        most = self.template.training.sequence_length // axes.LARGEST["tokens"] if self._transformer else 1
        return [d for d in parts if d <= max(most, 1)]

    def _expert_degrees(self, tp: int, inside: int) -> Iterator[tuple[int, int]]:
        moe = self._moe
        if moe is None:
            yield 1, tp
            return
        for ep in self.values("ep", divisors(moe.num_experts)):
            if moe.num_experts % ep:
                continue
            if ep == 1:
                # Without expert parallelism experts are sharded exactly like the dense layers.
                yield 1, tp
                continue
            for etp in self.values("etp", list(divisors(tp))):
                if moe.moe_intermediate_size % etp or inside % (ep * etp):
                    continue
                yield ep, etp

    def _placed(self, tp: int, cp: int, pp: int, dp: int, ep: int, etp: int) -> Iterator[Group]:
        """The orders over ranks that put at least one group on other evaluation than the orders before."""
        seen = set()
        for order in self.values("placement", axes.PLACEMENTS):
            group = Group(tp, cp, pp, dp, ep, etp, order)
            try:
                key = self.signature(group)
            except InputError:
                continue
            if key not in seen:
                seen.add(key)
                yield group

    @kept
    def mesh(self, group: Group) -> Mesh:
        """The mesh of a group."""
        return Mesh(group.tp, group.cp, group.dp, group.pp, group.ep, group.etp, group.placement)

    def signature(self, group: Group) -> tuple[object, ...]:
        """Where the groups of a mesh sit; two orders with the same answer are one layout."""
        mesh, hardware, nodes = self.mesh(group), self.hardware, self.template.cluster.num_nodes
        return tuple(mesh.placement(d, hardware, nodes) for d in ("tp", "cp", "dp_cp", "pp", "ep", "etp", "edp"))

    # -- inside a block ------------------------------------------------------------------------------------------------

    def _all_variants(self, tp: int, cp: int, ep: int) -> list[Variant]:
        flags, plan = (True, False), self.template.plan
        transformer = self._transformer is not None
        sequence = self.values("sequence_parallel", flags) if tp > 1 and transformer else [plan.sequence_parallel]
        if tp > 1 and self._moe and self._ability.experts_need_sequence_parallel:
            sequence = [s for s in sequence if s]
        styles = self.values("cp_style", ("ring", "all_gather", "ulysses")) if cp > 1 else ["ring"]
        overlap_tp = self.values("overlap_tp", flags) if tp > 1 and transformer else [False]
        overlap_ep = self.values("overlap_ep", flags) if ep > 1 else [False]
        dispatchers = self.values("ep_dispatcher", ("alltoall", "deepep", plan.ep_dispatcher)) if ep > 1 else ["alltoall"]
        precisions = self.values("precision", (self.template.training.precision,))
        found = product(sequence, styles, overlap_tp, overlap_ep, dispatchers, precisions)
        # Chunked overlap pipelines the all-gather and reduce-scatter of sequence parallelism; all-reduces are not chunked.
        return [Variant(*v) for v in found if v[0] or not v[2]]

    def variants(self, group: Group) -> tuple[Variant, ...]:
        """Ways to use a mesh inside a block."""
        return self._variants(group.tp, group.cp, group.ep > 1)

    @kept
    def _variants(self, tp: int, cp: int, experts: bool) -> tuple[Variant, ...]:
        return tuple(v for v in self._all_variants(tp, cp, 1 + experts) if self._block_fits(tp, cp, v))

    @kept
    def _block_fits(self, tp: int, cp: int, variant: Variant) -> bool:
        """The rules of the model for tensor and context parallelism, asked of the checks themselves."""
        # One pipeline rank, no experts to place: what is left to complain about is the block, and dp by rounding.
        group = Group(tp, cp, 1, max(self.template.world_size // (tp * cp), 1), 1, tp, axes.PLACEMENTS[0])
        state = State(1 if self.template.plan.zero_stage else 0, None, True, None, None)
        choice = Choice(group, 1, variant, Pipeline(1, "1f1b", EVEN, None), "none", state, Offload(0.0, False))
        fields = ("plan.tp", "plan.cp", "plan.cp_style", "training.precision", "plan.sequence_parallel")
        return not any(v.field in fields for v in check_scenario(choice.scenario(self.template)))

    def micro_batches(self, group: Group) -> list[tuple[int, int]]:
        """(sequences per micro-batch, micro-batches per step)."""
        each = self.template.training.global_batch_size // group.dp
        default = [d for d in divisors(each) if d <= axes.LARGEST["micro_batch_size"]]
        found = [(b, each // b) for b in self.values("micro_batch_size", default) if each % b == 0]
        if self.template.training.optimizer_in_backward:
            return [(b, m) for b, m in found if m == 1 and group.pp == 1]
        return found

    def nodes(self) -> list[tuple[Group, int, int]]:
        """Every mesh with every micro-batch."""
        return [(group, *both) for group in self.groups for both in self.micro_batches(group)]

    # -- pipelines -----------------------------------------------------------------------------------------------------

    @kept
    def pipelines(self, pp: int, m: int) -> tuple[Pipeline, ...]:
        """Schedules, chunks and cuts of `pp` ranks with m micro-batches."""
        return tuple(self._pipelines(pp, m))

    def _pipelines(self, pp: int, m: int) -> Iterator[Pipeline]:
        names = self.values("schedule", axes.SCHEDULES)
        chunks = self.values("virtual_stages", range(1, axes.LARGEST["virtual_stages"] + 1))  # type: ignore[arg-type]
        if pp == 1:
            if any(n in ("1f1b", "gpipe") for n in names) and 1 in chunks and self.layers >= 1:
                own = self._semantics.pipeline.schedules  # of pipelines alone
                name = "1f1b" if "1f1b" in names or own else "gpipe"
                yield from (Pipeline(1, name, s, None) for s in self._splits(1))
            return
        # What the framework does; only where its limits name it that has a value.
        waits = self.values("overlap_p2p", self._able.get("overlap_p2p", (None,)))
        for name in names:
            family = FAMILIES[name]
            fixed = 2 if name in axes.V_SHAPED else family.virtual_stages
            least = 1 if fixed is not None else 2
            for v in chunks:
                if (v != fixed if fixed is not None else v < least) or pp * v > self.layers + 2:
                    continue
                if family.requirements(pp, m, v):
                    continue
                for split, wait in product(self._splits(pp * v), waits):
                    yield Pipeline(v, name, split, wait)

    def _splits(self, stages: int) -> Iterator[Split]:
        """Cuts of the layers into `stages` that the checks allow."""
        for text in self.values("split", axes.SPLITS):
            first, last, alone = split = parse_split(text)
            padded = self.layers + first + last
            if self._semantics.pipeline.layer_rounding == "equal":
                fits = split == EVEN and self.layers % stages == 0
            elif alone:
                fits = stages >= 3 and self.layers >= stages - 2
            elif split == EVEN:
                fits = stages <= self.layers
            else:
                fits = 2 <= stages <= self.layers and padded % stages == 0 and max(first, last) <= padded // stages
            if fits:
                yield split

    def deepest(self, pipeline: Pipeline, pp: int) -> int:
        """Most layers on one virtual stage."""
        first, last, alone = pipeline.split
        stages = pp * pipeline.virtual_stages
        if alone:
            return -(-self.layers // (stages - 2))
        return (
            -(-(self.layers + first + last) // stages)
            if stages > 2 or not (first or last)
            else max((self.layers + first + last) // stages - x for x in (first, last))
        )

    # -- memory against time -------------------------------------------------------------------------------------------

    @cached_property
    def selections(self) -> tuple[str, ...]:
        """Recomputations other than of whole layers: none, and the sets of up to two modules."""
        if self._transformer is None:
            return tuple(self.values("recompute", ("none",)))
        return selections(self._transformer, self._able.get("recompute"), self.restrictions.get("recompute"))

    @cached_property
    def _full(self) -> tuple[bool, bool, frozenset[int]]:
        if self._transformer is None:
            return False, False, frozenset()
        return whole_layers(self._able.get("recompute"), self.restrictions.get("recompute"))

    def depths(self, deepest: int) -> list[int]:
        """How many first layers of a stage may be recomputed whole; `deepest` stands for all of them."""
        every, any_number, numbers = self._full
        found = [n for n in range(1, deepest) if any_number or n in numbers]
        return [*found, deepest] if every and deepest else found

    def merges(self, variant: Variant) -> bool:
        """Whether this variant hides expert exchanges the way that merges model chunks, see `Ability`."""
        return variant.overlap_ep and self._ability.merges_chunks

    def runs(self, variant: Variant, pipeline: Pipeline, pp: int) -> bool:
        """Whether a pipeline can have this variant of the blocks."""
        return pp == 1 or pipeline.virtual_stages > 1 or not self.merges(variant)

    def recomputes(self, deepest: int, *, merges: bool = False) -> list[str]:
        """All recomputations of a pipeline whose fullest stage has `deepest` layers."""
        whole = [] if merges else self.depths(deepest)
        return [*self.selections, *("full" if n == deepest else f"full:{n}" for n in whole)]

    @kept
    def states(self, group: Group) -> tuple[State, ...]:
        """Shardings of the states over the data-parallel ranks."""
        can = self._ability.can_shard or (lambda *_: True)
        return tuple(s for s in dict.fromkeys(self._states(group)) if can(group, s))

    @kept
    def shardings(self, group: Group) -> tuple[State, ...]:
        """The first of the shardings that differ in where states lie: prices and bytes do not depend on what is hidden."""
        found: dict[object, State] = {}
        for state in self.states(group):
            found.setdefault((state.zero_stage, state.shard_size, state.offload_parameters), state)
        return tuple(found.values())

    def _states(self, group: Group) -> Iterator[State]:
        ranks, flags = group.dp * group.cp, (True, False)
        stages = [z for z in self.values("zero_stage", (0, 1, 2, 3)) if self._zero_fits(z, group.pp > 1)]
        if ranks == 1 or self.template.training.optimizer == "none":
            yield from (State(z, None, True, True, True) for z in stages[:1] if False in self._parameters_on_host(0))
            if 3 in stages and group.pp == 1 and True in self._parameters_on_host(3):
                yield State(3, None, True, True, True, offload_parameters=True)
            return
        kept_gathered = group.pp > 1
        for zero in stages:
            reshard = self.values("reshard_after_forward", flags) if zero == 3 and not kept_gathered else [True]
            always = (zero == 3 and not kept_gathered) or (zero == 2 and group.pp == 1)
            reduce = [True] if always and zero == 3 else self.values("overlap_grad_reduce", flags[:1] if always else flags)
            gather = self.values("overlap_param_gather", flags) if zero in (1, 2) else [True]
            away = self._parameters_on_host(0 if kept_gathered else zero)
            for shard, again, r, g, host in product(self._shards(group, zero), reshard, reduce, gather, away):
                if r or not g or zero not in (1, 2) or not self._ability.gathers_beside_reductions:
                    yield State(zero, shard, again, r, g, host)

    def _parameters_on_host(self, zero: int) -> list[bool]:
        """Where shards may rest: by default in host memory too within the limits of a framework that says so."""
        able = "host_parameters" in self._semantics.conventions.abilities
        able = able and not (self._whole and self._semantics.optimizer.states_follow_parameters)
        found = self.values("offload_parameters", self._able.get("offload_parameters", (False,)))
        return [host for host in found if not host or (able and zero == 3)]

    def _shards(self, group: Group, zero: int) -> list[int | None]:
        default: list[int | None] = [None, *axes.shard_sizes(divisors(group.dp * group.cp))]
        return [s for s in self.values("shard_size", default) if s is None or self._shard_fits(group, s)] if zero else [None]

    def _shard_fits(self, group: Group, size: int) -> bool:
        if (group.dp * group.cp) % size:
            return False
        mesh = self.mesh(group)
        try:
            for part in ("shard", "replica", *(("expert_shard", "expert_replica") if self._moe else ())):
                mesh.axes(part, size)
        except InputError:
            return False
        return True

    @kept
    def _zero_fits(self, zero: int, piped: bool) -> bool:
        plan = self.template.plan.model_copy(update={"zero_stage": zero, "pp": 1 + piped})
        return not any(v.field == "plan.zero_stage" for v in check_scenario(self.template.model_copy(update={"plan": plan})))

    @property
    def _whole(self) -> bool:
        """Whether the optimizer works on whole matrices, which stay on the device (specs/checks.py)."""
        return KINDS[self.template.training.optimizer].whole

    @cached_property
    def offloads(self) -> tuple[Offload, ...]:
        """What may live in host memory."""
        training = self.template.training.optimizer != "none" and not self.template.training.optimizer_in_backward
        training = training and not self._whole
        fractions = self.values("offload_activations", (0.0, 0.5, 1.0) if self._transformer else (0.0,))
        optimizers = self.values("offload_optimizer", (False, True) if training else (False,))
        return tuple(Offload(f, o) for f, o in product(sorted(fractions), sorted(optimizers)))

    # -- counting ------------------------------------------------------------------------------------------------------

    def recompute_counts(self, pp: int, m: int, variant: Variant) -> tuple[int, ...]:
        """Recomputations of every pipeline."""
        return self._recompute_counts(pp, m, self.merges(variant))

    @kept
    def _recompute_counts(self, pp: int, m: int, merges: bool) -> tuple[int, ...]:
        if merges:
            return tuple(len(self.selections) * (pp == 1 or p.virtual_stages > 1) for p in self.pipelines(pp, m))
        return tuple(len(self.selections) + len(self.depths(self.deepest(p, pp))) for p in self.pipelines(pp, m))

    def variant_count(self, group: Group, m: int, variant: Variant) -> int:
        """Layouts of one mesh, number of micro-batches and variant."""
        return sum(self.recompute_counts(group.pp, m, variant)) * len(self.states(group)) * len(self.offloads)

    def count(self, group: Group, m: int) -> int:
        """Layouts of one mesh and number of micro-batches."""
        return self._settings(group.tp, group.cp, group.ep > 1, group.pp, m) * len(self.states(group)) * len(self.offloads)

    @kept
    def _settings(self, tp: int, cp: int, experts: bool, pp: int, m: int) -> int:
        return sum(sum(self.recompute_counts(pp, m, v)) for v in self._variants(tp, cp, experts))

    @cached_property
    def size(self) -> int:
        """Layouts in the space, counted as products along the independent axes."""
        return sum(self.count(group, m) for group, _, m in self.nodes())

    def choices(self) -> Iterator[Choice]:
        """Every layout; for small spaces and tests."""
        for group, batch, m in self.nodes():
            for variant, pipeline in product(self.variants(group), self.pipelines(group.pp, m)):
                if self.runs(variant, pipeline, group.pp):
                    again = self.recomputes(self.deepest(pipeline, group.pp), merges=self.merges(variant))
                    for recompute, state, offload in product(again, self.states(group), self.offloads):
                        yield Choice(group, batch, variant, pipeline, recompute, state, offload)
