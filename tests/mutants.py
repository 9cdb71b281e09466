"""Do the tests bite? One-line changes of meaning, each made on a copy of the tree, against the tests named beside it.

    python tests/mutants.py            all of them, one after another (minutes)
    python tests/mutants.py ring perm  those whose name contains one of the words
    python tests/mutants.py --list     the table alone

Prints what was killed, what survived and what no longer applies (its line has changed: adapt the row), and ends with 1 if any
survived or does not apply. Not collected by pytest and not part of CI. A change that should be noticed is one more row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 3000.0
"""On the clock: others may be using the machine."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        name: what it gets wrong.
        file: below the root.
        old, new: text that stands there exactly once, and what takes its place.
        tests: what should notice, as pytest takes it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


WIRE, STEP, SURFACE = "tests/test_wire_bytes.py", "tests/test_step_values.py", "tests/test_surface_values.py"
PASSES, BYTES = "tests/test_graph_passes.py", "tests/test_graph_bytes.py"
OPTIMIZERS, LIVE = "tests/test_optimizer_kinds.py", "tests/test_inputs_live.py"

MUTANTS = (
    # -- work of a layer
    Mutant("ring attention backward with half the bytes", "simpar/parallel/context.py",
           "key_value_bytes(whole, degrees) * (2 if whole.backward else 1)", "key_value_bytes(whole, degrees) * 1", (WIRE,)),
    Mutant("expert rows not divided by tp", "simpar/graph/shard.py",
           "size / (place.context * place.tensor / place.expert_tensor)", "size / (place.context / place.expert_tensor)", (WIRE,)),
    Mutant("key and value heads not replicated", "simpar/graph/shard.py",
           "return max(size / place.tensor, 1.0)", "return size / place.tensor", (BYTES,)),
    Mutant("no wait for the gather of a saved input", "simpar/parallel/op_lists.py",
           "            ops.wait(regathered)", "            pass", (STEP, BYTES)),
    Mutant("LayerNorm keeps one statistic", "simpar/graph/kernels.py",
           '8.0 if node.kind == "layernorm" else 4.0', "4.0", (STEP,)),
    Mutant("permute moves half the bytes", "simpar/graph/kernels.py",
           "(((rows, 4.0),), ((rows, 4.0),))", "(((rows, 2.0),), ((rows, 4.0),))", (BYTES,)),
    Mutant("residual backward halved", "simpar/graph/kernels.py", "11.0 if plan.dropout else 6.0",
           "5.0 if plan.dropout else 3.0", (BYTES,)),
    Mutant("a sum alone is two kernels", "simpar/graph/kernels.py", "apart = plan.dropout > 0 and not", "apart = not", (BYTES,)),
    Mutant("a compiler fuses complex numbers", "simpar/graph/kernels.py", "turned = library.complex_rope and", "turned = False and",
           (BYTES,)),
    Mutant("every gradient is a sum", "simpar/parallel/plain_modules.py", "sum(n.linears for n in readers) - 1",
           "sum(n.linears for n in readers)", (BYTES,)),
    Mutant("copies of keys alone", "simpar/parallel/plain_modules.py", "(node.head_dim, node.value_dim)", "(node.head_dim,)",
           (BYTES,)),
    Mutant("attention FLOPs twice", "simpar/graph/ledger.py", "mean_document(queries) / 2.0", "mean_document(queries)",
           ("tests/test_golden_scenarios.py",)),
    Mutant("partial sums are not reduced", "simpar/graph/shard.py",
           'return out.name if summed and', 'return "" if summed and', (WIRE,)),
    Mutant("a recomputed product reads what nobody gathered", "simpar/parallel/op_lists.py",
           "return any(self._read(name, only) for name in stretch.gathered)", "return False", (WIRE, PASSES)),
    Mutant("the rest of a chunked collective is left out", "simpar/parallel/work.py",
           "late, self._beside = tuple(self.start(*rest, kernels=0) for rest in self._beside), []", "late, self._beside = (), []",
           (WIRE, PASSES)),
    Mutant("a frozen weight has a gradient", "simpar/graph/differentiate.py",
           "return any(layer.tensor[name].trained for name in node.parameters)", "return True", (PASSES,)),
    Mutant("a window ends at the first step of a ring", "simpar/parallel/context.py",
           "rest = max(pairs(whole) / cp - pairs(first), 0.0)", "rest = 0.0", (PASSES,)),
    Mutant("a checkpoint keeps what is inside it", "simpar/graph/rematerialise.py",
           "if module.discards or not leaves:", "if edge:",
           ("tests/test_validate_rank_grid.py::test_a_rank[fsdp, selective]",)),
    Mutant("sequence parallelism sends whole activations", "simpar/parallel/pipeline.py",
           "split = plan.cp * (plan.tp if plan.sequence_parallel else 1)", "split = plan.cp", (WIRE,)),
    Mutant("replicas reduce the whole gradient", "simpar/parallel/traffic.py",
           'amount / layout.placement(shard).size, replica', "amount, replica", (WIRE,)),
    # -- a step
    Mutant("no all-reduce of the gradient norm", "simpar/costs/pricer.py",
           'return self._timed("all_reduce", 4.0, layout.placement("world")).seconds + check_s', "return check_s", (STEP,)),
    Mutant("wait for data parallelism swallows a bubble", "simpar/result/accounting.py",
           "begin, end = np.maximum(self.start[causes], free[gaps]),", "begin, end = free[gaps],", (STEP,)),
    Mutant("a bubble outside the pipeline phase counts in it", "simpar/result/accounting.py",
           "np.maximum(np.minimum(end, last) - np.maximum(begin, first), 0.0)", "(end - begin)", (STEP,)),
    Mutant("exchanges beside other compute are waited for", "simpar/parallel/beside.py",
           "return _overlaps(layout, block) and not _dualpipe(layout)", "return False and not _dualpipe(layout)", (STEP,)),
    Mutant("op detail waits for what lies beside", "simpar/program/lower.py",
           'if hides and op.stream == "ep":', "if False:", (STEP,)),
    Mutant("DualPipe waits for its exchanges", "simpar/parallel/beside.py",
           "d for d in op.deps if d not in exchanges", "d for d in op.deps", (STEP,)),
    Mutant("any step repeats itself", "simpar/result/shorter_steps.py",
           "if not extends(first, self._step(more, how), interference=slowed, tolerance=tolerance, further=further):", "if False:",
           ("tests/test_size.py::test_so_is_a_step_of_any_layout",)),
    Mutant("a step without a round keeps the waits of the longer one", "simpar/program/shorter.py",
           "np.where(late[head[other]], -microbatches, microbatches)", "np.where(late[head[other]], 0, microbatches)",
           ("tests/test_shorter_steps.py",)),
    Mutant("a wait that a stream's order implies is one", "simpar/program/program.py",
           "told = (stream[heads] != stream[self.dep_ops]) | (other >= own)", "told = np.ones(len(heads), dtype=bool)",
           ("tests/test_engine_equal.py",)),
    Mutant("a whole segment a micro-batch is reserved", "simpar/result/folded.py",
           "return allocated * max(self.second.reserved_bytes / self.second.allocated_bytes, 1.0)", "return 1.1 * allocated",
           ("tests/test_size.py",)),
    Mutant("hidden exchanges hold no SMs", "simpar/costs/pricer.py",
           "return by_exchanges(block.forward, sms,", "return 0.0 * by_exchanges(block.forward, sms,", (STEP,)),
    Mutant("memory-bound kernels need the SMs that an exchange holds", "simpar/costs/block_price.py",
           "return _beside_exchanges(best, slowed * both.bound_by_sms)", "return _beside_exchanges(best, slowed)", (STEP,)),
    Mutant("a related GPU's kernels at the base's share", "simpar/costs/kernel_choice.py", "getattr(shares, tier) * ratio",
           "getattr(shares, tier)", ("tests/test_kernels_amd.py",)),
    Mutant("a tile's begin and end grow with fp32", "simpar/costs/kernels.py", "base.k_overhead * (known or ratio)",
           "base.k_overhead", ("tests/test_kernels_choice.py",)),
    Mutant("the math backend multiplies in 16 bits", "simpar/parallel/local_layer.py", 'return "fp32" if own == "bf16" and kernel',
           'return "bf16" if own == "bf16" and kernel', ("tests/test_kernels_choice.py",)),
    Mutant("DualPipe's ties go to the forward", "simpar/costs/block_price.py",
           "merges(segments(backward, 0), segments(forward, len(backward)))",
           "merges(segments(forward, len(backward)), segments(backward, 0))", ("tests/test_monotone.py::test_a_pair_by_hand",)),
    Mutant("reload not one layer ahead", "simpar/program/lower.py",
           "pieces[position - 1 - ahead][0])))", "pieces[position - 1][0])))", (STEP,)),
    Mutant("reload without bound", "simpar/program/lower.py",
           "                if position > ahead:\n                    deps.append(self.local((\"part\"",
           "                if False:\n                    deps.append(self.local((\"part\"", (STEP,)),
    Mutant("1F1B warms up one micro-batch more", "simpar/schedules/interleaved.py",
           "backwards, num_ranks - rank - 1)", "backwards, num_ranks - rank)",
           ("tests/test_schedules.py", "tests/test_golden_scenarios.py")),
    # -- optimizers
    Mutant("every optimizer moves Adam's bytes", "simpar/specs/optimizers.py",
           "return (width + 2.0 * self.moments + self.passes_bytes * weight_bytes / 4.0) / ADAM_BYTES", "return 1.0",
           (OPTIMIZERS,)),
    Mutant("Newton-Schulz without its square", "simpar/parallel/optimizers.py",
           "(4.0 * a * a * b + 2.0 * a**3)", "(4.0 * a * a * b)", (OPTIMIZERS,)),
    Mutant("the iteration runs on the wider side", "simpar/costs/update_price.py",
           "for n, k in ((a, b), (a, a), (b, a))", "for n, k in ((a, b), (b, b), (b, a))", (OPTIMIZERS,)),
    Mutant("buckets are filled and not read back", "simpar/costs/key_price.py", "DDP_COPIES: Final = 2", "DDP_COPIES: Final = 1",
           ("tests/test_deepspeed_states.py::test_whole_gradients_are_moved_around_their_reduction",)),
    Mutant("the first micro-batch's gradients come up as well", "simpar/costs/key_price.py",
           "(2 * count - 1) * each", "2 * count * each",
           ("tests/test_deepspeed_states.py::test_gradients_that_rest_on_the_host_go_there_with_their_reduction",)),
    Mutant("momenta are not gathered", "simpar/costs/update_price.py",
           "if layout.plan.zero_stage < 3 or not amount", "if layout.plan.zero_stage < 9 or not amount", (OPTIMIZERS,)),
    Mutant("Muon keeps one moment of its tables", "simpar/specs/optimizers.py",
           '"muon": OptimizerKind(4.0, 8.0,', '"muon": OptimizerKind(4.0, 4.0,', (OPTIMIZERS,)),
    # -- inputs
    Mutant("V-shaped schedules have one chunk", "simpar/specs/counts.py",
           '("zb-v", "v-half", "v-min", "dualpipe-v")', '("zb-v", "dualpipe-v")', ("tests/test_checks_scenario.py", LIVE)),
    Mutant("notes do not reach the result", "simpar/result/interpret.py",
           "notes=(*scenario_notes(layout.scenario), ", "notes=(", (f"{LIVE}::test_every_field_of_a_scenario_lives",)),
    Mutant("a number of experts' groups that counts nowhere", "simpar/costs/pricer.py",
           "return moe.topk_group * max(math.ceil(placement.num_nodes / max(moe.n_group, 1)), 1)", "return moe.topk_group",
           (f"{LIVE}::test_every_field_of_a_scenario_lives",)),
    # -- fits and statistics
    Mutant("a left-out source stays in its fold", "validation/tools/fit_constants.py",
           "if getattr(s, group) != name]) for name in names]", "if s]) for name in names]", ("tests/test_constants.py",)),
    Mutant("a source weighs by its rows", "validation/tools/pooled.py",
           "data.rows_of_source * TAU**2 + SIGMA**2", "TAU**2 + SIGMA**2", ("tests/test_constants.py",)),
    Mutant("no pull towards neutral", "validation/tools/pooled.py",
           '"compute": 0.1, "memory": 0.3', '"compute": 9.0, "memory": 9.0', ("tests/test_constants.py",)),
    Mutant("the gate lets everything in", "validation/tools/pooled.py",
           "min(gain - doubt, gain - LEAST_GAIN)", "1.0 + gain", ("tests/test_constants.py",)),
    Mutant("a family that is harmed is charged", "validation/tools/pooled.py",
           "round(_positive(gain, doubt), 2)", "1.0", ("tests/test_constants.py",)),
    Mutant("intervals of half the runs", "validation/tools/intervals.py",
           "LEVEL: Final = 0.8", "LEVEL: Final = 0.4", ("tests/test_constants.py",)),
    Mutant("an engine of one stage holds no logits", "simpar/result/stage_ends.py",
           "(layout.plan.pp == 1 and not policy.engine_of_one_stage)", "layout.plan.pp == 1", ("tests/test_runs_dense_a100.py",)),
    Mutant("one sequence is turned in copies", "simpar/parallel/job.py",
           "training.micro_batch_size > 1 and self.attention_kernel", "self.attention_kernel", ("tests/test_runs_dense_a100.py",)),
    Mutant("a guess counts as a run that says everything", "validation/tools/intervals.py",
           "[not s.open for s in data.samples]", "[True for s in data.samples]", ("tests/test_constants.py",)),
    Mutant("a rare family is as sure as all runs", "simpar/specs/calibration.py",
           "if entry.family in (UNFAMILIAR, family))", "if entry.family in (UNFAMILIAR,))", ("tests/test_constants.py",)),
    Mutant("an unknown fact is the usual one", "validation/tools/store_runs.py",
           'found[section][key] = {"unknown": True}\n    return found, usual', "pass\n    return found, usual",
           ("tests/test_run_files.py",)),
    Mutant("a rate is compared without its batch", "simpar/evidence/spread.py",
           "usual.training.global_batch_size / scenario.training.global_batch_size", "1.0", ("tests/test_runs_rows.py",)),
    Mutant("memory beyond all readings says nothing", "simpar/evidence/spread.py",
           "beyond = max(_held_beyond(run, found), 0.0)", "beyond = 0.0", ("tests/test_runs_rows.py",)),
    Mutant("a family is sure of chips it never saw", "simpar/specs/calibration.py",
           "max((narrowest.value, *strange, *elsewhere))", "narrowest.value", ("tests/test_constants.py",)),
    Mutant("p90 is p95", "simpar/statistics.py", "np.quantile(size, 0.9)", "np.quantile(size, 0.95)", (SURFACE,)),
    # -- search
    Mutant("undercut the wrong way round", "simpar/searching/swept.py",
           "(self.rows <= prices[row]).all(axis=1)", "(self.rows >= prices[row]).all(axis=1)", (SURFACE,)),
    Mutant("ranks of a mixed cluster hold fewer layers than they have time for", "simpar/searching/mixed_branch.py",
           "np.where(few <= even, few,", "0.7 * np.where(few <= even, few,", ("tests/test_search_mixed.py",)),
    Mutant("schedules in a V are bounded without waits", "simpar/searching/design_bounds.py", "ways=ways,", "ways=0.0 * ways,",
           ("tests/test_search_bounds.py::test_waits_and_pairs_of_schedules_in_a_v_are_in_the_bounds",)),
    Mutant("what may fit is asked of layouts that offload nothing", "simpar/searching/design_bounds.py",
           "[offloads[k] for k in each.tolist()]", "[offloads[0] for k in each.tolist()]",
           ("tests/test_search_objectives.py::test_the_front_counts_offloading",)),
    Mutant("what one queue holds up is in no bound", "simpar/searching/state_sharding.py",
           "(gathers + reduces) @", "0.0 * (gathers + reduces) @",
           ("tests/test_search_bounds.py::test_gathers_and_reductions_of_one_queue_hide_behind_nothing",)),
    Mutant("layouts of a part that is not done are forgotten", "simpar/searching/find.py", "store.add(found)", "pass",
           ("tests/test_search_store.py::test_a_search_killed_between_parts_and_inside_them_arrives",)),
    Mutant("a store killed at its birth is a stranger's", "simpar/searching/store.py", " or self._unborn()", "",
           ("tests/test_search_store.py::test_a_store_whose_search_was_killed_at_once_is_empty",)),
    Mutant("ties within three per cent", "simpar/searching/answer.py", "TIE: Final = 0.01", "TIE: Final = 0.03", (SURFACE,)),
    # -- planning
    Mutant("spares are rented when they should not be", "simpar/planning/economics.py",
           "gpu_s if self.rent_includes_spares else outcome.gpu_s", "outcome.gpu_s if self.rent_includes_spares else gpu_s",
           (SURFACE,)),
    Mutant("every slow node slows anew", "simpar/planning/run_simulation.py",
           "self.model.slow_nodes.slowdown if self.slow and", "self.model.slow_nodes.slowdown**self.slow if self.slow and",
           (SURFACE,)),
    # -- reports
    Mutant("cells of tables unescaped", "simpar/report/tables.py", "{escape(c)}</{tag}>", "{c}</{tag}>", (SURFACE,)),
    Mutant("a gap is shared by width", "simpar/report/explain.py",
           "widths.get(name, 0.0) ** 2 +", "widths.get(name, 0.0) +", (SURFACE,)),
    Mutant("a gap of memory is shared by width", "simpar/report/explain.py",
           "(MEMORY_SPREAD.get(name, OTHER_SPREAD) * amount) ** 2", "(MEMORY_SPREAD.get(name, OTHER_SPREAD) * amount)", (SURFACE,)),
    Mutant("all remote ranks share one pipeline", "simpar/costs/point_to_point.py",
           "fill(net.peer_pipeline_s, out, remote if g.over_network else 0)", "fill(net.peer_pipeline_s, out)",
           ("tests/test_collectives_laws.py",)),
    Mutant("late collectives ten times as late", "simpar/live/trace_align.py", "6.0 * spread", "60.0 * spread", (SURFACE,)),
    Mutant("moments in the first step", "simpar/evidence/predicted.py",
           "states.master / states.optimizer if", "1.0 if", ("tests/test_runtime_memory.py",)),
    Mutant("products on empty rows", "simpar/parallel/local_layer.py",
           "(self.options.spare_rows if group else 1.0)", "1.0", ("tests/test_collectives_expert.py",)),
    Mutant("a grouped kernel where XLA has none", "simpar/parallel/job.py",
           "self.hardware.gpu.vendor in own.dense_experts", "False", ("tests/test_collectives_expert.py",)),
    Mutant("one-hot dispatch without a capacity", "simpar/parallel/job.py",
           "capacity is not None and own.static_routing", "own.static_routing", ("tests/test_collectives_expert.py",)),
    # -- launch files
    Mutant("a flag misspelt on both sides", "simpar/interop/megatron.py", "--use-tp-pp-dp-mapping", "--use-tp-pp-dp-maping",
           (SURFACE,)),
    Mutant("CUDA_DEVICE_MAX_CONNECTIONS dropped", "simpar/interop/megatron.py",
           'environment = "export CUDA_DEVICE_MAX_CONNECTIONS=1\\n"', 'environment = ""', (SURFACE,)),
    Mutant("YAML's no is a text", "simpar/boundary.py",
           'getattr(yaml, "CSafeLoader", yaml.SafeLoader)', "yaml.BaseLoader", (SURFACE,)),
)  # fmt: skip
SPELT_TWICE = {
    "a flag misspelt on both sides": ("simpar/interop/megatron_import.py", "use-tp-pp-dp-mapping", "use-tp-pp-dp-maping")
}
"""Changes that belong to two files."""


def copied(target: Path) -> Path:
    """A copy of what the tests need; what no mutant changes is a link."""
    for name in ("simpar", "tests", "validation"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in ("simpar", "tests", "validation", ".git") and not (target / path.name).exists():
            (target / path.name).symlink_to(path)
    return target


def tested(root: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status of pytest, and its last lines."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 1, "timed out"
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return done.returncode, ", ".join(failed) or done.stdout.strip().splitlines()[-1]


def changed(root: Path, file: str, old: str, new: str) -> str | None:
    """The file's text before; None where `old` does not stand there exactly once."""
    path = root / file
    before = path.read_text(encoding="utf-8")
    if before.count(old) != 1:
        return None
    path.write_text(before.replace(old, new), encoding="utf-8")
    return before


def outcome(root: Path, mutant: Mutant) -> tuple[str, str]:
    """killed, survived or does not apply; and by what."""
    edits = [(mutant.file, mutant.old, mutant.new), *([SPELT_TWICE[mutant.name]] if mutant.name in SPELT_TWICE else [])]
    undo: list[tuple[Path, str]] = []
    try:
        for file, old, new in edits:
            before = changed(root, file, old, new)
            if before is None:
                return "does not apply", f"{file}: {old[:60]!r}"
            undo.append((root / file, before))
        status, text = tested(root, mutant.tests)
        return ("survived", text) if status == 0 else ("killed", text)
    finally:
        for path, before in undo:
            path.write_text(before, encoding="utf-8")


def main(words: list[str]) -> int:
    """Run the chosen mutants."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    if words == ["--list"]:
        print("\n".join(f"{m.name}: {m.file}" for m in MUTANTS))
        return 0
    with tempfile.TemporaryDirectory(prefix="simpar-mutants-") as folder:
        root = copied(Path(folder))
        for tests in sorted({t for m in chosen for t in m.tests}):
            status, text = tested(root, (tests,))
            if status:
                print(f"{tests} fails without any change: {text}")
                return 2
        counts: dict[str, int] = {}
        for mutant in chosen:
            begin = time.monotonic()
            what, text = outcome(root, mutant)
            counts[what] = counts.get(what, 0) + 1
            print(f"{what:14} {mutant.name}  ({text[:110]}; {time.monotonic() - begin:.0f} s)", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(set(counts) != {"killed"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
