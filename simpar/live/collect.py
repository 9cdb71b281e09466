"""The collector of a bundle: measure what the bundle lists on a machine that may be taken away at any moment.

    python3 -m simpar.live.collect smoke|calibrate|plans|blocks|physics|repeat --limit 540 --out "$OUT" --device cuda

Run in the bundle's folder, with torch and numpy and nothing else. Everything measured lies under results/ as soon as it is
measured and is packed into OUT/results.tgz after every piece; a command that is started again, here or on another machine that
was given results/, goes on where the last one stopped. No piece begins that cannot end within the limit. On the fake device the
limit counts processor seconds, so that a trial does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simpar.live.device import now_s

STEPS: Final = ("smoke", "calibrate", "plans", "blocks", "physics", "repeat")
START_S: Final = 40.0
"""From a process's start to its first step: imports, the CUDA context, weights."""
PASSES: Final = 14
"""Steps that a plan runs: warm-up, measured ones, profiled ones, and as long again for the trace."""
MARGIN_S: Final = 20.0
"""Left at the end of the limit for packing and the way back."""
REPEATED: Final = 2
CONTEXT_BYTES: Final = 1.0e9
"""Of a GPU's memory, what a process's context takes besides its allocator."""


@dataclass
class Call:
    """One command of the collector.

    Attributes:
        folder: of the bundle. out: where results are packed to; none = nowhere.
        end: of the device's clock (`now_s`).
    """

    folder: Path
    out: Path | None
    device: str
    end: float

    @property
    def results(self) -> Path:
        """Where measurements lie."""
        return self.folder / "results"

    @property
    def left_s(self) -> float:
        """Until nothing may run any more."""
        return self.end - MARGIN_S - now_s(self.device)

    def python(self, name: str, *words: object) -> int:
        """Run a module in a process of its own for as long as there is; its exit code, 124 where it had to be ended."""
        command = [sys.executable, "-m", f"simpar.live.{name}", *map(str, words)]
        paths = [str(self.folder.resolve()), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        begin, seconds = time.monotonic(), max(self.left_s, 1.0)
        try:
            if self.device == "fake":
                code = _limited(command, self.folder, env, seconds)
            else:
                code = subprocess.run(command, cwd=self.folder, env=env, check=False, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = 124
        self.note({"ran": name, "words": list(map(str, words)), "exit": code, "wall_s": time.monotonic() - begin})
        self.pack()
        return code

    def note(self, record: dict[str, Any]) -> None:
        """A line of the log, with the time of day."""
        with (self.results / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **record}) + "\n")
        tell(" ".join(f"{key}={value}" for key, value in record.items()))

    def pack(self) -> None:
        """results/ as one file in `out`, whole or not at all."""
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        part = self.out / "results.part"
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.results, arcname="results", filter=lambda t: None if t.name.endswith(".part") else t)
        part.replace(self.out / "results.tgz")


def _limited(command: list[str], folder: Path, env: dict[str, str], seconds: float) -> int:
    """Run a command on one core for at most so many processor seconds; 124 where it had to be ended."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))

    code = subprocess.run(command, cwd=folder, env={"OMP_NUM_THREADS": "1", **env}, check=False, preexec_fn=limit).returncode
    return 124 if code in (-signal.SIGXCPU, -signal.SIGKILL) else code


def tell(text: str) -> None:
    """To the log of the command."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def plans_of(folder: Path) -> list[dict[str, Any]]:
    """The bundle's plans: the most valuable first, of equal ones those that need the least memory."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "plans").glob("*.json"))]
    return sorted(found, key=lambda plan: (-plan["expected"]["value"], plan["expected"]["reserved_bytes"]))


def memory_of(device: str) -> float:
    """Bytes that a process of its own may reserve on the device; without a GPU no limit."""
    if device != "cuda":
        return float("inf")
    smi = ["nvidia-smi", "-i", "0", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(smi, capture_output=True, text=True, check=True, timeout=30).stdout
        return float(text.splitlines()[0]) * 2**20 - CONTEXT_BYTES
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return float("inf")


def _plan(call: Call, plan: dict[str, Any], target: Path, *words: object) -> int:
    source = call.folder / "plans" / f"{plan['name']}.json"
    part = target.with_suffix(".partial.json")
    code = call.python("rank_worker", "--plan", source.resolve(), "--out", part.resolve(), "--device", call.device, *words)
    # Of a worker that ended in its profiler the record of before counts.
    if part.is_file():
        part.replace(target)
    return code


def smoke(call: Call) -> int:
    """Does all of it work here? Versions, the driver's own report, and the smallest plan with its trace."""
    if smi := shutil.which("nvidia-smi"):
        text = subprocess.run([smi, "-q"], capture_output=True, text=True, check=False, timeout=60).stdout
        (call.results / "nvidia-smi.txt").write_text(text, encoding="utf-8")
    smallest = min(plans_of(call.folder), key=lambda plan: plan["expected"]["step_s"])
    trace = call.results / "smoke.trace.json.gz"
    return _plan(call, smallest, call.results / "smoke.json", "--steps", 3, "--trace", trace.resolve())


def calibrate(call: Call) -> int:
    """The shapes of all plans."""
    store = call.results / "calibration.jsonl"
    store.touch()
    words = ("--shapes", (call.folder / "shapes.json").resolve(), "--resume", store.resolve(), "--device", call.device)
    return call.python("calibrate", *words, "--budget", f"{max(call.left_s - START_S, 1.0):.0f}s")


def plans(call: Call, suffix: str = "", most: int | None = None) -> int:
    """Every plan that is not measured yet, fits the device and can end in time; 1 where some are left."""
    folder, left, limit = call.results / "ranks", 0, memory_of(call.device)
    folder.mkdir(exist_ok=True)
    for plan in plans_of(call.folder)[:most]:
        name, expected = plan["name"], plan["expected"]
        target = folder / f"{name}{suffix}.json"
        if target.is_file():
            continue
        needs = START_S + PASSES * expected["step_s"] if call.device == "cuda" else 0.0
        if expected["reserved_bytes"] > limit:
            call.note({"plan": name, "skipped": f"needs {expected['reserved_bytes'] / 2**30:.1f} GiB"})
            continue
        if needs > call.left_s:
            left += 1
            call.note({"plan": name, "left": f"needs {needs:.0f} s, {max(call.left_s, 0.0):.0f} s are left"})
            continue
        left += _plan(call, plan, target) != 0
    return 1 if left else 0


def probes(call: Call, what: str) -> int:
    """Blocks or physics (`gpu_probes`)."""
    store = (call.results / f"{what}.jsonl").resolve()
    return call.python("gpu_probes", "--what", what, "--store", store, "--limit", f"{max(call.left_s - START_S, 1.0):.0f}",
                       "--device", call.device)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 all of the step is measured, 1 some is left (start it again), 2 it cannot be done here."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.collect", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that this command may take")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    given = parser.parse_args(arguments)
    call = Call(Path.cwd(), given.out, given.device, now_s(given.device) + given.limit)
    if not (call.folder / "plans").is_dir():
        sys.stderr.write("collect: no plans/ here; run it in the folder that `simpar validate rank --bundle` wrote\n")
        return 2
    call.results.mkdir(exist_ok=True)
    run: dict[str, Callable[[Call], int]] = {
        "smoke": smoke, "calibrate": calibrate, "plans": plans, "blocks": lambda c: probes(c, "blocks"),
        "physics": lambda c: probes(c, "physics"), "repeat": lambda c: plans(c, ".again", REPEATED),
    }  # fmt: skip
    code = run[given.step](call)
    call.pack()
    return code if code in (0, 1, 2) else 1


if __name__ == "__main__":
    sys.exit(main())
