"""What spans several parts of a scenario: every broken rule, listed together, each with the right values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Final

from simpar.errors import InputError, Violation
from simpar.registry import closest
from simpar.specs.architecture import TokenModel
from simpar.specs.counts import ONE_CHUNK_SCHEDULES, divisors, layer_count, model_stages, resolved_dp, resolved_etp
from simpar.specs.encoders import encoder_rules
from simpar.specs.framework import framework, framework_names
from simpar.specs.framework_options import missing_options, option_conflicts
from simpar.specs.framework_releases import Ability
from simpar.specs.hardware import HardwareProfile, load_hardware
from simpar.specs.losses import losses_of
from simpar.specs.model import CnnSpec, MlpSpec, MoeSpec, TransformerSpec
from simpar.specs.optimizers import KINDS
from simpar.specs.plan import MODULES, PlanSpec, RecomputeSpec
from simpar.specs.reference import NO_EXPERTS, expert_model, rules_of_all
from simpar.specs.scenario_spec import Scenario
from simpar.specs.size import too_large
from simpar.specs.stage_plan import hosts, part_rules
from simpar.specs.training import RoutingSpec

DIMENSIONS: Final = ("tp", "cp", "ep", "dp", "pp")

_PRECISION_NEEDS: Final = {
    "bf16": ("bf16",), "fp16": ("fp16",), "fp32": (), "tf32": ("tf32",), "fp8": ("fp8",), "fp8-rowwise": ("fp8",),
    "fp8-block": ("fp8",), "mxfp8": ("fp8",), "nvfp4": ("fp4",),
}  # fmt: skip
"""Peaks of the data sheet that a precision needs; fp32 runs everywhere."""


def check_scenario(scenario: Scenario) -> list[Violation]:
    """Every violation of the rules that span several parts, in the order of the file; empty if there is none.

    The schedule's name and its own demands are left to the lowering.
    """
    if large := too_large(scenario):
        return large
    found = [*_framework(scenario), *_loss(scenario), *_plan(scenario), *rules_of_all(scenario, _model)]
    try:
        scenario.learned  # noqa: B018  its file is read and checked
    except InputError as error:
        found += error.violations or (Violation("site", scenario.site, str(error)),)
    try:
        found += _machines(scenario)
    except InputError as error:
        where = "cluster.parts" if scenario.cluster.parts else "cluster.hardware"
        found.insert(0, Violation(where, scenario.cluster.hardware, str(error)))
    return [Violation(v.field, v.value, v.rule, v.right, v.file or scenario.file) for v in found]


def _machines(scenario: Scenario) -> list[Violation]:
    """What the cluster and the plan demand of each other, part by part where there are parts."""
    found = list(part_rules(scenario))
    if found:
        return found
    alone = [(host.scenario, host.hardware) for host in hosts(scenario)] or [(scenario, scenario.hardware)]
    for one, hardware in alone:
        own = rules_of_all(one, _model) if scenario.plan.stage_tp else []
        more = [*_cluster(one, hardware), *_precision(one, hardware), *own]
        found += [v for v in more if v not in found]
    # Replicas of several kinds share the batch out as they like (specs/stage_plan.py).
    return found if scenario.cluster.parts_hold == "replicas" else [*found, *_batch(alone[0][0])]


def _divides(field: str, value: int, whole: int, what: str) -> Iterator[Violation]:
    """A violation unless `value` divides `whole`."""
    if whole % value:
        yield Violation(field, value, f"must divide {what} ({whole})", f"one of {_listed(divisors(whole))}")


def _listed(values: Sequence[int], most: int = 16) -> str:
    text = ", ".join(map(str, values[:most]))
    return f"{text}, ..." if len(values) > most else text


def _framework(scenario: Scenario) -> Iterator[Violation]:
    names = framework_names()
    if scenario.framework not in names:
        hint = f"did you mean {close!r}? " if (close := closest(scenario.framework, names)) else ""
        yield Violation("framework", scenario.framework, "unknown framework", f"{hint}known: {', '.join(names)}")
        return
    spec = framework(scenario.framework, scenario.framework_version)
    yield from missing_options(scenario, spec, _having)
    yield from option_conflicts(scenario, spec)
    name, largest = spec.name, spec.pipeline.zero_stage_with_pp
    if scenario.plan.pp > 1 and scenario.plan.zero_stage > largest:
        rule = f"{name} combines pipeline parallelism with zero_stage up to {largest} only"
        yield Violation("plan.zero_stage", scenario.plan.zero_stage, rule, f"at most {largest}, or plan.pp = 1")


def _having(ability: Ability) -> list[str]:
    found = {name: framework(name) for name in framework_names()}
    return [name for name, spec in found.items() if spec.name == name and ability in spec.conventions.abilities]


def _cluster(scenario: Scenario, hardware: HardwareProfile) -> Iterator[Violation]:
    cluster, plan = scenario.cluster, scenario.plan
    available = cluster.num_nodes * hardware.gpus_per_node
    if cluster.domain_size:
        node, whole = hardware.gpus_per_node, load_hardware(cluster.hardware).domain_size
        if cluster.domain_size > whole or max(cluster.domain_size, node) % min(cluster.domain_size, node):
            rule = f"a piece of the {whole} GPUs that the scale-up links of {cluster.hardware} join"
            yield Violation("cluster.domain_size", cluster.domain_size, rule, f"whole nodes of {node}, or an equal part of one")
    if cluster.num_gpus and cluster.num_gpus > available:
        rule = f"more than {cluster.num_nodes} nodes of {hardware.gpus_per_node} GPUs have"
        yield Violation("cluster.num_gpus", cluster.num_gpus, rule, f"at most {available}")
    world, group = scenario.world_size, plan.tp * plan.cp * plan.pp
    if plan.dp is None:
        if world % group:
            yield _not_dividing(scenario, group)
    elif plan.dp * group != world:
        product = f"tp {plan.tp} x cp {plan.cp} x pp {plan.pp} x dp {plan.dp} = {plan.dp * group}"
        right = f"tp x cp x pp must divide {world} first"
        if world % group == 0:
            right = f"{world // group}, or leave it out"
        yield Violation("plan.dp", plan.dp, f"{product} ranks must be the {world} GPUs of the cluster", right)
    shards = resolved_dp(scenario) * plan.cp
    if not plan.shard_experts and not (plan.zero_stage == 3 and expert_model(scenario)):
        yield Violation("plan.shard_experts", False, "full sharding alone can leave experts out", "zero_stage = 3, or leave it out")
    if plan.shard_size:
        yield from _divides("plan.shard_size", plan.shard_size, shards, "the dp x cp ranks")
    if expert_model(scenario):
        experts = resolved_etp(plan) * plan.ep * plan.pp
        if world % group == 0 and world % experts:
            rule = f"etp {resolved_etp(plan)} x ep {plan.ep} x pp {plan.pp} = {experts} must divide the {world} GPUs"
            right = f"etp x ep must divide {world // plan.pp}: {_listed(divisors(world // plan.pp))}"
            yield Violation("plan.ep", plan.ep, rule, right)


def _not_dividing(scenario: Scenario, group: int) -> Violation:
    plan, world = scenario.plan, scenario.world_size
    product = f"tp {plan.tp} x cp {plan.cp} x pp {plan.pp} = {group}"
    if group > world:
        return Violation("plan", product, f"needs more ranks than the {world} GPUs of the cluster", f"at most {world}")
    near = f"{world - world % group} or {world - world % group + group} GPUs"
    right = f"a product of {_listed(divisors(world))}; or {near}"
    return Violation("plan", product, f"must divide the {world} GPUs of the cluster", right)


def _batch(scenario: Scenario) -> Iterator[Violation]:
    training, dp = scenario.training, _sound_dp(scenario)
    per_step = training.micro_batch_size * dp
    if training.global_batch_size % per_step:
        below = training.global_batch_size // per_step * per_step
        rule = f"must be a multiple of micro_batch_size {training.micro_batch_size} x dp {dp} = {per_step}"
        near = [str(n) for n in (below, below + per_step) if n]
        yield Violation("training.global_batch_size", training.global_batch_size, rule, f"such as {' or '.join(near)}")


def _sound_dp(scenario: Scenario) -> int:
    """The data-parallel degree to hold the batch against: the cluster's where the plan's contradicts it."""
    group = scenario.plan.tp * scenario.plan.cp * scenario.plan.pp
    return resolved_dp(scenario) if scenario.world_size % group else scenario.world_size // group


def _loss(scenario: Scenario) -> Iterator[Violation]:
    wanted, known = scenario.training.cross_entropy, framework_names()
    if wanted == "auto" or scenario.framework not in known:
        return
    has = losses_of(framework(scenario.framework, scenario.framework_version))
    if wanted not in has:
        yield Violation("training.cross_entropy", wanted, f"{scenario.framework} does not have it", f"auto, {', '.join(has)}")


def _precision(scenario: Scenario, hardware: HardwareProfile) -> Iterator[Violation]:
    precision = scenario.training.precision
    peaks = hardware.gpu.peak_flops
    if any(dtype not in peaks for dtype in _PRECISION_NEEDS[precision]):
        able = [name for name, needs in _PRECISION_NEEDS.items() if all(dtype in peaks for dtype in needs)]
        rule = f"{hardware.gpu.name} has no {' and no '.join(_PRECISION_NEEDS[precision])} arithmetic"
        yield Violation("training.precision", precision, rule, f"one of {', '.join(able)}")


def _plan(scenario: Scenario) -> Iterator[Violation]:
    plan = scenario.plan
    if sorted(plan.placement.split("-")) != sorted(DIMENSIONS):
        rule = "must name each of tp, cp, ep, dp, pp once, joined by '-', fastest first"
        yield Violation("plan.placement", plan.placement, rule, 'such as "tp-cp-ep-dp-pp"')
    if KINDS[scenario.training.optimizer].whole and plan.offload.optimizer:
        rule = f"{scenario.training.optimizer} multiplies whole matrices, which stay on the device"
        yield Violation("plan.offload.optimizer", True, rule, 'false, or training.optimizer = "adamw"')
    yield from _schedule(plan)
    yield from _recompute(plan)
    yield from _stages(plan, layer_count(scenario.model))
    yield from encoder_rules(scenario, model_stages(plan))


def _schedule(plan: PlanSpec) -> Iterator[Violation]:
    if plan.virtual_stages > 1:
        if plan.schedule in ONE_CHUNK_SCHEDULES:
            rule = f"schedule {plan.schedule!r} has one model chunk per pipeline rank"
            right = 'virtual_stages = 1, or schedule = "interleaved"'
            yield Violation("plan.virtual_stages", plan.virtual_stages, rule, right)
        elif plan.pp == 1:
            rule = "virtual stages need a pipeline"
            yield Violation("plan.virtual_stages", plan.virtual_stages, rule, "1, or plan.pp of at least 2")


def _recompute(plan: PlanSpec) -> Iterator[Violation]:
    if not isinstance(plan.recompute, RecomputeSpec):
        return
    for module in plan.recompute.modules:
        if module not in MODULES and module != "op":
            right = f"one of {', '.join((*MODULES, 'op'))}"
            yield Violation("plan.recompute.modules", module, "unknown module", right)
    yield from _full_recompute(plan.recompute)


def _full_recompute(recompute: RecomputeSpec) -> Iterator[Violation]:
    """What belongs to one granularity or method and says nothing under another."""
    full, block = recompute.granularity == "full", recompute.method == "block"
    if recompute.modules and recompute.granularity != "selective":
        rule = f"granularity {recompute.granularity!r} has no modules"
        yield Violation("plan.recompute.modules", recompute.modules, rule, 'leave them out, or granularity = "selective"')
    for field, given, fits, right in (
        ("method", block, full, 'granularity = "full"'),
        ("num_layers", recompute.num_layers is not None, full and block, 'granularity = "full" and method = "block"'),
        ("uniform_layers", recompute.uniform_layers > 1, full and not block, 'granularity = "full" and method = "uniform"'),
        ("every", recompute.every > 1, full and not block, 'granularity = "full" and method = "uniform"'),
    ):
        if given and not fits:
            yield Violation(f"plan.recompute.{field}", getattr(recompute, field), f"belongs to {right}", "leave it out")
    if recompute.every > 1 and recompute.uniform_layers > 1:
        rule = "either every k-th layer alone or chunks of layers are recomputed"
        yield Violation("plan.recompute.every", recompute.every, rule, "1, or uniform_layers = 1")
    if full and block and recompute.num_layers is None:
        right = 'how many layers of each stage, or method = "uniform"'
        yield Violation("plan.recompute.num_layers", None, 'method = "block" recomputes the first layers of each stage', right)


def _stages(plan: PlanSpec, layers: int) -> Iterator[Violation]:
    stages = model_stages(plan)
    given, less = plan.layers_per_stage, plan.first_stage_less_layers + plan.last_stage_less_layers
    if given is not None:
        if given != "auto" and (len(given) != stages or sum(given) != layers):
            rule = f"has {len(given)} stages with {sum(given)} layers in all"
            right = f"{stages} numbers (pp x virtual_stages) that add up to {layers}"
            yield Violation("plan.layers_per_stage", given, rule, right)
        if less or plan.embedding_alone:
            rule = "says how layers are split, and so do first/last_stage_less_layers and embedding_alone"
            yield Violation("plan.layers_per_stage", given, rule, "give one of them")
        if given != "auto":
            return
    stages -= plan.encoder_stages
    if (less or plan.embedding_alone) and stages < (3 if plan.embedding_alone else 2):
        yield Violation("plan.pp", plan.pp, "uneven first and last stages need a pipeline", "at least 2 (3) stages")
        return
    if plan.embedding_alone:
        stages -= 2
    if layers < stages:
        rule = f"{stages} stages are more than the model's {layers} layers"
        right = f"pp x virtual_stages at most {layers}, or layers_per_stage with zeros"
        yield Violation("plan.pp", plan.pp, rule, right)
    elif less:
        yield from _shortened_ends(plan, layers, stages)


def _shortened_ends(plan: PlanSpec, layers: int, stages: int) -> Iterator[Violation]:
    first, last = plan.first_stage_less_layers, plan.last_stage_less_layers
    if (layers + first + last) % stages:
        need = -layers % stages
        rule = f"{layers} + {first} + {last} layers must divide over {stages} stages"
        right = f"first_stage_less_layers + last_stage_less_layers = {need}, or layers_per_stage"
        yield Violation("plan.first_stage_less_layers", first, rule, right)
    elif max(first, last) > (layers + first + last) // stages:
        rule = f"a stage holds {(layers + first + last) // stages} layers"
        yield Violation("plan.first_stage_less_layers", first, rule, "take fewer off the first and last stage")


def _model(scenario: Scenario) -> Iterator[Violation]:
    if isinstance(scenario.model, TokenModel):
        if isinstance(scenario.model, TransformerSpec):
            yield from _norms(scenario.model)
        yield from _tensor(scenario.model, scenario.plan)
        yield from _sequence(scenario.model, scenario)
        yield from _experts(scenario.model, scenario)
    else:
        yield from _no_experts(scenario)
        if scenario.training.document_lengths:
            rule = "belongs to a model with attention"
            yield Violation("training.document_lengths", scenario.training.document_lengths, rule, "leave it out")
        yield from _simple(scenario.model, scenario.plan)


def _norms(model: TransformerSpec) -> Iterator[Violation]:
    if model.block_norms == 1 and not model.parallel_block:
        rule = "one norm serves attention and feed-forward only where they stand side by side"
        yield Violation("model.block_norms", 1, rule, "2, or model.parallel_block = true")


def _tensor(model: TokenModel, plan: PlanSpec) -> Iterator[Violation]:
    """Every width that tensor parallelism splits; the vocabulary is padded and no rule."""
    tp = plan.tp
    right = f"one of {_listed(_fitting_tp(model))}"
    split = model.tensor_widths()
    for what, width in split:
        if width % tp:
            yield Violation("plan.tp", tp, f"must divide {what} ({width})", right)
    for what, groups in model.tensor_groups():
        if all(width % tp == 0 for _, width in split) and groups % tp and tp % groups:
            rule = f"must divide {what} ({groups}) or be a multiple of it (heads are then replicated)"
            yield Violation("plan.tp", tp, rule, right)


def _fitting_tp(model: TokenModel) -> list[int]:
    """Tensor-parallel degrees that satisfy every rule of the model."""
    common = gcd(*(width for _, width in model.tensor_widths()))
    groups = [count for _, count in model.tensor_groups()]
    return [d for d in divisors(common) if all(count % d == 0 or d % count == 0 for count in groups)]


def _sequence(model: TokenModel, scenario: Scenario) -> Iterator[Violation]:
    plan, length = scenario.plan, scenario.training.sequence_length
    if "sequence_length" not in scenario.training.model_fields_set:
        limit = f"at most {model.max_position_embeddings} for this model"
        yield Violation("training.sequence_length", None, "is required for a transformer", limit)
        return
    counts = [width for what, width in model.tensor_widths() if "heads" in what]
    if plan.cp_style == "ulysses" and counts and all(count % plan.tp == 0 for count in counts):
        heads = gcd(*counts) // plan.tp
        yield from _divides("plan.cp", plan.cp, heads, "the attention heads of one tensor-parallel rank for ulysses")
    halves = 1 if plan.cp_style == "ulysses" or plan.cp == 1 else 2
    if length % (halves * plan.cp):
        fitting = [d for d in divisors(length) if d == 1 or length % (halves * d) == 0]
        rule = f"{f'{halves} x cp' if halves > 1 else 'cp'} must divide training.sequence_length ({length})"
        yield Violation("plan.cp", plan.cp, rule, f"one of {_listed(fitting)}")
    elif plan.sequence_parallel and (length // plan.cp) % plan.tp:
        rule = f"sequence_parallel splits the {length // plan.cp} tokens of a context-parallel rank over tp"
        fitting = [d for d in _fitting_tp(model) if (length // plan.cp) % d == 0]
        right = f"plan.tp one of {_listed(fitting)}, or sequence_parallel = false"
        yield Violation("plan.tp", plan.tp, rule, right)


def _experts(model: TokenModel, scenario: Scenario) -> Iterator[Violation]:
    plan = scenario.plan
    if model.moe is None:
        if plan.ep > 1:
            yield Violation("plan.ep", plan.ep, NO_EXPERTS, "1")
        if plan.etp and plan.etp > 1:
            yield Violation("plan.etp", plan.etp, NO_EXPERTS, "leave it out")
        yield from _no_experts(scenario)
        return
    yield from _divides("plan.ep", plan.ep, model.moe.num_experts, "num_experts")
    yield from _divides("plan.etp", resolved_etp(plan), model.moe.moe_intermediate_size, "moe_intermediate_size")
    yield from _routing(model.moe, scenario)


def _no_experts(scenario: Scenario) -> Iterator[Violation]:
    routing = scenario.training.routing
    if routing != RoutingSpec() and (routing.kind != "balanced" or routing.capacity_factor is not None):
        yield Violation("training.routing", routing.kind, NO_EXPERTS, "leave it out")


def _routing(moe: MoeSpec, scenario: Scenario) -> Iterator[Violation]:
    routing = scenario.training.routing
    if routing.counts and routing.kind != "counts":
        rule = f"kind {routing.kind!r} has no counts"
        yield Violation("training.routing.counts", f"{len(routing.counts)} numbers", rule, 'kind = "counts", or leave them out')
    if routing.alpha and routing.kind != "zipf":
        yield Violation("training.routing.alpha", routing.alpha, f"kind {routing.kind!r} has no exponent", 'kind = "zipf"')
    if routing.in_turn is not None and routing.kind != "balanced":
        yield Violation("training.routing.in_turn", routing.in_turn, f"kind {routing.kind!r} is not dealt", 'kind = "balanced"')
    if bool(moe.n_group) != bool(moe.topk_group):
        rule = "n_group groups of experts, topk_group of which a token reaches: one without the other limits nothing"
        yield Violation("model.moe.topk_group", moe.topk_group, rule, f"from 1 to n_group ({moe.n_group}), or both 0")
    elif moe.topk_group > moe.n_group:
        yield Violation("model.moe.topk_group", moe.topk_group, "more than there are groups", f"at most n_group ({moe.n_group})")
    if routing.kind == "counts" and len(routing.counts) != moe.num_experts:
        yield Violation("training.routing.counts", f"{len(routing.counts)} numbers", f"needs one per expert, {moe.num_experts}")
    if routing.counts and min(routing.counts) < 0:
        yield Violation("training.routing.counts", min(routing.counts), "must not be negative")
    if routing.kind == "counts" and sum(routing.counts) <= 0:
        yield Violation("training.routing.counts", sum(routing.counts), "must not all be zero")


def _simple(model: MlpSpec | CnnSpec, plan: PlanSpec) -> Iterator[Violation]:
    """An MLP or a convolutional net: only dp, tp and pp."""
    for name in ("cp", "ep", "etp"):
        value = getattr(plan, name)
        if value and value > 1:
            yield Violation(f"plan.{name}", value, f"does not apply to a model of kind {model.kind!r}", "1")
    if isinstance(model, MlpSpec):
        yield from _divides("plan.tp", plan.tp, model.width, "the width")
        return
    if model.layers and model.layers[0].kind == "pool":
        yield Violation("model.layers", "pool", "the first layer must hold weights", "a conv or linear layer before it")
    channels = gcd(*(layer.out_channels or 0 for layer in model.layers))
    yield from _divides("plan.tp", plan.tp, channels or 1, "the output channels of every layer, whose common divisor")
