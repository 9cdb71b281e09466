"""`simpar calibrate`: measure this machine and write its hardware profile. Needs torch and the standard library only.

Also `python -m simpar.live.calibrate` and `torchrun --nproc-per-node N -m simpar.live.calibrate`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpar.host import join_slurm, leave, pin
from simpar.live import bench_collectives, bench_gemm, bench_host, bench_ops, bench_shapes, profile_out
from simpar.live.bench_collectives import Group
from simpar.live.device import Device, Telemetry, telemetry, torch_module
from simpar.live.measure import HEAT_S, Case, Clock, heat, machine, measure, measure_sustained, record_of, timing_of
from simpar.live.store import CalibrationError, Record, Store

COLLECTIVE_SHARE = 0.5
"""Of the budget, where several processes run."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure and where to write.

    Attributes:
        out: the profile; None = measure only.
        budget_s: time for all measurements.
        store: the JSONL file. resume: it must be there and is continued.
        base: shipped profile to start from; empty = the nearest.
        device: cpu, cuda or auto; fake tries `shapes` at small sizes on a CPU in place of a GPU. threads: of a process on a CPU.
        timeout_s: longest wait for another rank.
        tiny: small sizes, to try the command.
        shapes: measure what this JSON file lists instead of the usual cases (docs/calibration.md).
    """

    out: Path | None
    budget_s: float = 120.0
    store: Path = Path("calibration.jsonl")
    resume: bool = False
    base: str = ""
    device: str = "auto"
    threads: int = 1
    timeout_s: float = 60.0
    tiny: bool = False
    shapes: Path | None = None


def seconds(text: str) -> float:
    """ "120s", "5min", "1h" or a plain number of seconds.

    Raises:
        CalibrationError: anything else.
    """
    for unit, factor in (("min", 60.0), ("ms", 1e-3), ("s", 1.0), ("h", 3600.0), ("m", 60.0), ("", 1.0)):
        if text.strip().endswith(unit):
            try:
                value = float(text.strip().removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 <= value < float("inf"):
                return value
            break
    raise CalibrationError(f"{text!r} is not a time; write 120s, 5min or 1h")


def checked(options: Options, resume: Path | None) -> Options:
    """`options` with the store that they go on with or begin.

    Raises:
        CalibrationError: one of them is wrong.
    """
    if options.device not in ("auto", "cpu", "cuda", "fake"):
        raise CalibrationError(f"--device = {options.device!r}: no such device; choose auto, cpu, cuda or fake")
    if options.device == "fake" and options.shapes is None:
        raise CalibrationError("--device = 'fake': it tries a list of shapes; give one with --shapes, or choose cpu with --tiny")
    if options.threads < 1:
        raise CalibrationError(f"--threads = {options.threads}: at least 1")
    if options.out is None and resume is None:
        raise CalibrationError("--out is missing: the profile to write, such as my_cluster.toml")
    if options.out is not None and options.out.suffix != ".toml":
        raise CalibrationError(f"--out = {str(options.out)!r}: a profile's name ends in .toml; write {options.out.stem}.toml")
    if resume is not None and not resume.is_file() and int(os.environ.get("RANK", "0")) == 0:
        raise CalibrationError(f"--resume = {str(resume)!r}: no such file; give the .jsonl of an earlier run")
    if options.shapes is not None and not options.shapes.is_file():
        right = "`simpar validate cluster --write-config` writes one"
        raise CalibrationError(f"--shapes = {str(options.shapes)!r}: no such file; {right}")
    store = resume or (options.out or Path("calibration")).with_suffix(".jsonl")
    return replace(options, store=store, resume=resume is not None)


def _device(torch: object, asked: str) -> str:
    if asked == "fake":
        return asked
    has = bool(torch.cuda.is_available())  # type: ignore[attr-defined]
    if asked == "cuda" and not has:
        raise CalibrationError("--device = 'cuda': torch sees no GPU; choose cpu, or install a torch with CUDA and a driver")
    return "cuda" if has and asked != "cpu" else "cpu"


def _open(options: Options, device: str, rank: int) -> Store:
    """Rank 0's store with the machine noted in it."""
    if rank:
        return Store(Path(os.devnull) / "none")
    if options.store.exists() and not options.resume:
        raise CalibrationError(f"{options.store}: is there already; continue it with --resume {options.store}, or move it away")
    store, facts = Store(options.store), machine(device)
    old = store.records.get("machine")
    if old is not None and (old["name"], old["threads"]) != (facts["name"], facts["threads"]):
        rule = f"measured on {old['name']!r} with {old['threads']} threads, this is {facts['name']!r} with {facts['threads']}"
        raise CalibrationError(f"{options.store}: {rule}; start a new store")
    store.append(facts)
    return store


def _slice(now: float, deadline: float, left: int) -> float:
    """When the next of `left` cases should end, for all to get a share of the time."""
    return now + max(0.0, deadline - now) / max(left, 1)


def _collectives(group: Group, clock: Clock, store: Store, options: Options, deadline: float, say: Report) -> None:
    cases = bench_collectives.cases(group, options.tiny)
    todo = bench_collectives.open_cases(group, cases, {c.key: store.finished(c.key) for c in cases})
    for i, case in enumerate(todo):
        if group.from_first(time.monotonic() >= deadline):
            return
        end = _slice(time.monotonic(), deadline, len(todo) + 1 - i)
        samples = bench_collectives.measure_collective(case.build(), group, clock, end)
        if group.rank == 0:
            _keep(store, record_of(case, samples), say)
    key = f"overlap/{group.size}"
    if group.from_first(store.finished(key) or time.monotonic() >= deadline):
        return
    alone, beside = bench_collectives.measure_overlap(group, clock, deadline, options.tiny)
    if group.rank == 0:
        slowdown = timing_of(beside).median_s / timing_of(alone).median_s
        fields: Record = {"op": "gemm_beside_all_reduce", "ranks": group.size, "slowdown": slowdown, "alone_samples_s": alone}
        _keep(store, record_of(Case(key, "overlap", fields, lambda: lambda: None), beside), say)


def _keep(store: Store, record: Record, say: Report) -> None:
    store.append(record)
    say(f"{record['key']:58s} {record['seconds'] * 1e6:12.1f} us  +- {100 * record['spread']:.1f} %")


def _local(store: Store, clock: Clock, device: str, options: Options, deadline: float, say: Report) -> int:
    """Measure what one device does alone; returns how many cases had no time left."""
    cases = [*bench_gemm.cases(device, options.tiny), *bench_ops.cases(device, options.tiny)]
    # What was never measured comes before what only wants to be narrower.
    todo = sorted((c for c in cases if not store.finished(c.key)), key=lambda c: c.key in store.records)
    if todo and device != "cpu":
        heat(clock.on, min(HEAT_S, 0.05 * max(deadline - clock.on.now_s(), 0.0)))
    with telemetry(clock.on) as beside:
        for i, case in enumerate(todo):
            if (now := clock.on.now_s()) >= deadline:
                return sum(c.key not in store.records for c in todo[i:])
            _one(store, case, clock, _slice(now, deadline, len(todo) - i), beside, say)
    return 0


def _one(store: Store, case: Case, clock: Clock, deadline: float, beside: Telemetry, say: Report) -> None:
    """Measure a case and keep it; what this device cannot do is said and left out."""
    begin, known = time.monotonic(), store.records.get(case.key, {}).get("samples_s", ())
    left = max(deadline - clock.on.now_s(), 0.0)
    more: Record = {}
    call: Callable[[], object] | None = None
    try:
        call = case.build()
        if clock.device == "cpu":
            samples = measure(call, clock, deadline, known)
        else:
            samples, more = measure_sustained(call, clock, left)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        say(f"{case.key}: left out: {reason}")
        return
    finally:
        call = None  # its operands, before the next case's are made
        clock.on.reset_peaks()
    _keep(store, {**record_of(case, samples, beside, begin), **more}, say)


def _host(group: Group, store: Store, device: str, options: Options, deadline: float, say: Report) -> int:
    """Measure the shapes and collectives of a run, all ranks taking part; how many shapes had no time left."""
    assert options.shapes is not None
    try:
        wanted = json.loads(options.shapes.read_text(encoding="utf-8"))
        shapes, collectives = wanted["shapes"], wanted["collectives"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = 'must be JSON with the lists "shapes" and "collectives"'
        raise CalibrationError(f"{options.shapes}: {rule}: {type(error).__name__}: {error}") from None
    if group.size > 1:
        if not group.from_first(f"scheduler/{group.size}" in store.records) and (found := bench_host.measure_scheduler(group)):
            store.append(found)
            say(f"{found['key']:58s} slice {1e3 * found['slice_s']:.2f} ms, waking {1e3 * found['wake_s']:.2f} ms")
        share = COLLECTIVE_SHARE * (deadline - Device(device).now_s())
        for record in bench_host.measure_collectives(collectives, group, store.finished, share):
            _keep(store, record, say)
    every = bench_shapes.cases(shapes, Device(device).tensors, small=device == "fake")
    done = [case.key for case in every if store.finished(case.key)]
    known = set(group.from_first(done) if group.size > 1 else done)
    todo = [case for case in every if case.key not in known]
    if device != "cpu":
        return _gpu_shapes(todo, group, store, Clock(device), deadline, say)
    for i, case in enumerate(todo):
        budget = max(0.0, deadline - time.monotonic()) / (len(todo) - i)
        samples = bench_host.measure_shape(case.build, group, Clock(device, alone=True), budget)
        if group.rank == 0:
            _keep(store, {**record_of(case, samples), "ranks": group.size}, say)
    return 0


def _gpu_shapes(todo: Sequence[Case], group: Group, store: Store, clock: Clock, deadline: float, say: Report) -> int:
    """Shapes of a run on every GPU at once; rank 0's times count. What has no time left is named once, and counted."""
    tell: Report = say if group.rank == 0 else (lambda _: None)
    if todo:
        heat(clock.on, min(HEAT_S, 0.05 * max(deadline - clock.on.now_s(), 0.0)))
    with telemetry(clock.on) as beside:
        for i, case in enumerate(todo):
            over = clock.on.now_s() >= deadline
            if group.from_first(over) if group.size > 1 else over:
                tell(f"time is up with {len(todo) - i} shapes not measured; go on with --resume {store.path}")
                return len(todo) - i
            if group.size > 1:
                group.barrier()
            _one(store, case, clock, _slice(clock.on.now_s(), deadline, len(todo) - i), beside, tell)
    return 0


def calibrate(options: Options, say: Report = print) -> int:
    """Measure, and write the profile on rank 0; 0 = done, 1 = no profile is asked for and some of the shapes had no time left.

    Raises:
        CalibrationError: no torch, no NCCL, a rank that hangs, a wrong file; what was measured is kept.
    """
    if options.resume and options.out is not None and not options.budget_s:
        # The profile of a store, on whatever machine it was measured: torch is not needed.
        return _written(Store(options.store), options, options.out, say)
    torch = torch_module()
    device = _device(torch, options.device)
    if device == "cpu":
        torch.set_num_threads(options.threads)
    if options.out is not None:
        profile_out.profiles_dir()
    begin = Device(device).now_s()
    store, clock = _open(options, device, int(os.environ.get("RANK", "0"))), Clock(device)
    if options.shapes is not None and device == "cpu":
        pin()
    group = Group(device, options.timeout_s)
    if device != "cpu" and group.rank == 0 and not store.finished(bench_host.HOST_KEY):
        _keep(store, bench_host.measure_host(Device(device)), say)
    if options.shapes is not None:
        left = _host(group, store, device, options, begin + options.budget_s, say)
        group.close()
        if options.out is None:
            return 1 if left else 0
        return _written(store, options, options.out, say) if group.rank == 0 else 0
    if group.size > 1:
        _collectives(group, clock, store, options, begin + COLLECTIVE_SHARE * options.budget_s, say)
        group.close()
        if group.rank:
            return 0
    missed = _local(store, Clock(device, alone=True), device, options, begin + options.budget_s, say)
    if missed:
        say(f"time is up with {missed} cases not measured; go on with --resume {options.store}")
    return 0 if options.out is None else _written(store, options, options.out, say)


def _written(store: Store, options: Options, out: Path, say: Report) -> int:
    profile_out.write(store, out, options.base)
    say(f"wrote {out} (measurements: {options.store})")
    return 0


def run(options: Options) -> int:
    """`calibrate` with errors as one message on stderr; the exit code."""
    try:
        return calibrate(options)
    except CalibrationError as error:
        kept = f"; measurements so far are kept in {options.store}" if options.store.exists() else ""
        print(f"simpar calibrate: {error}{kept}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print(f"simpar calibrate: interrupted; go on with --resume {options.store}", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m simpar.live.calibrate`."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.calibrate", description="Measure this machine for simpar.")
    parser.add_argument("--out", type=Path, help="the hardware profile to write, TOML")
    parser.add_argument("--budget", default="120s", help="time for all measurements (default 120s)")
    parser.add_argument("--resume", type=Path, help="continue this .jsonl")
    parser.add_argument("--base", default="", help="shipped profile to start from (default: the nearest)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, or fake to try --shapes without a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of each process on a CPU (default 1)")
    parser.add_argument("--timeout", default="60s", help="longest wait for another rank")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    parser.add_argument("--shapes", type=Path, default=None, help="measure what this JSON file lists instead of the usual cases")
    a = parser.parse_args(arguments)
    join_slurm()
    try:
        asked = Options(
            a.out, seconds(a.budget), base=a.base, device=a.device, threads=a.threads, timeout_s=seconds(a.timeout), tiny=a.tiny,
            shapes=a.shapes,
        )  # fmt: skip
        options = checked(asked, a.resume)
    except CalibrationError as error:
        print(f"simpar calibrate: {error}", file=sys.stderr)
        return 2
    return run(options)


if __name__ == "__main__":
    leave(main())
