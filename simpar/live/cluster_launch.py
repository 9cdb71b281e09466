"""Ranks started through torchrun, watched, and never left behind: one message for whatever went wrong."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError

MARK: Final = "SIMPAR_CLUSTER_RUN"
"""Environment variable that every process of a launch carries, so that all are found again."""
_EXIT = re.compile(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)")
_CAUSES: Final = ("oom", "error", "timeout", "peer")
"""What to believe first: a rank that lost its peer or waited in vain suffers from another one."""


class ClusterError(InputError):
    """A real run that did not end well; what was measured is kept."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes meet: this host alone, or several hosts and the master's address."""

    nnodes: int = 1
    node_rank: int = 0
    master: str = ""
    begin_s: float = 120.0
    """Longest until a rank of this host has met the others, where they come from several hosts."""

    def arguments(self) -> list[str]:
        """For torchrun."""
        if not self.master:
            return ["--standalone"]
        address, _, port = self.master.rpartition(":")
        return ["--nnodes", str(self.nnodes), "--node-rank", str(self.node_rank), "--master-addr", address, "--master-port", port]


def marked(mark: str) -> list[int]:
    """Process ids that carry `mark` (Linux; elsewhere none)."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ") if Path("/proc/self/environ").exists() else ():
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def end(process: subprocess.Popen[bytes], mark: str, patience_s: float = 5.0) -> None:
    """Stop torchrun and every rank."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    deadline = time.monotonic() + patience_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.05)
    process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """A SIGTERM inside ends the block as an exception does, so that the ranks are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_us() -> None:
    """In torchrun, before it starts: a launcher that is killed outright takes it along (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def launch(
    module: str,
    arguments: Sequence[str],
    nproc: int,
    *,
    reports: Path,
    timeout_s: float,
    progress: Sequence[Path] = (),
    meet: Rendezvous | None = None,
) -> None:
    """Run `python -m module arguments` on `nproc` ranks of this host and wait.

    Args:
        reports: folder where ranks say what they are at (cluster_worker.Report).
        timeout_s: longest without any sign of life: no report, no new measurement.
        progress: files that grow while the run goes on.
        meet: with the processes of other hosts.

    Raises:
        ClusterError: the ranks did not end well; none is left running.
    """
    meet = meet or Rendezvous()
    mark = uuid.uuid4().hex
    reports.mkdir(parents=True, exist_ok=True)
    for old in reports.glob("rank*.json"):
        old.unlink()
    log = reports / "output.txt"
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (package, environment.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "torch.distributed.run", *meet.arguments(), "--nproc-per-node", str(nproc), "-m", module,
               *arguments]  # fmt: skip
    with log.open("wb") as output, _terminable():
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, preexec_fn=_end_with_us
        )
        try:
            alive = _watch(process, [*progress, log], reports, timeout_s, meet.begin_s if meet.master else timeout_s)
        finally:
            end(process, mark)
    if process.returncode == 0 and alive:
        return
    raise ClusterError(explain(reports, log, nproc, alive=alive, timeout_s=timeout_s, meet=meet))


def _watch(process: subprocess.Popen[bytes], progress: Sequence[Path], reports: Path, timeout_s: float, begin_s: float) -> bool:
    """Wait for the end; False where nothing moved for `timeout_s`, or no rank began within `begin_s`."""
    began = last = time.monotonic()
    seen: tuple[tuple[str, int], ...] = ()
    while process.poll() is None:
        ranks = [p for p in sorted(reports.glob("rank*.json")) if p.exists()]
        if not ranks and time.monotonic() - began > begin_s:
            return False
        state = tuple((str(p), p.stat().st_size) for p in progress if p.exists())
        state += tuple((p.name, int(p.stat().st_mtime_ns)) for p in ranks)
        if state != seen:
            last, seen = time.monotonic(), state
        if time.monotonic() - last > timeout_s:
            return False
        time.sleep(0.1)
    return True


def _reports(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in folder.glob("rank*.json"):
        try:
            found[int(path.stem.removeprefix("rank"))] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return dict(sorted(found.items()))


def explain(reports: Path, log: Path, nproc: int, *, alive: bool, timeout_s: float, meet: Rendezvous) -> str:
    """One message: which rank, in which layout, what, and what to do."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    ranks = _reports(reports)
    if not ranks:
        return _never_began(text, nproc, alive=alive, meet=meet)
    reasons = {rank: r for rank, r in ranks.items() if r.get("kind")}
    for cause in _CAUSES[:2]:
        for rank, r in reasons.items():
            if r["kind"] == cause:
                return _reason(rank, r)
    exits = {int(rank): int(code) for rank, code in _EXIT.findall(text)}
    for rank, code in exits.items():
        if rank not in reasons and code not in (0, -15):
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            more = "; the kernel does that when memory runs out" if code == -9 else ""
            return f"rank {rank} {how} at {ranks.get(rank, {}).get('at', 'start')}{more}; its last words are in {log}"
    silent = [rank for rank in ranks if rank not in reasons]
    if silent and (reasons or not alive):
        at = ranks[silent[0]]["at"]
        who = ", ".join(map(str, silent))
        waited = "the other ranks waited for it in vain" if reasons else f"nothing moved for {timeout_s:g} s"
        return f"rank {who} hangs at {at}: {waited}; see {log}, or give more time with --timeout"
    for rank, r in reasons.items():
        return _reason(rank, r)
    return f"the ranks ended with an error; their output is in {log}: {_last_line(text)}"


def _reason(rank: int, r: dict[str, Any]) -> str:
    where, what = r.get("at", "start"), f"{r['error']}: {r['message']}"
    if r["kind"] == "oom":
        return f"rank {rank} ran out of memory at {where}: {what}; use a smaller model, sequence or micro-batch"
    if "NCCL" in r["message"]:
        return f"rank {rank} at {where}: {what}; install a torch with NCCL, or run on CPUs with --device cpu"
    if r["kind"] == "timeout":
        return f"rank {rank} waited in vain at {where}: {what}; see that all ranks run, or give more time with --timeout"
    return f"rank {rank} failed at {where}: {what}"


def _never_began(text: str, nproc: int, *, alive: bool, meet: Rendezvous) -> str:
    if meet.master:
        waited = "" if alive else " in time"
        where = f"the master {meet.master} was not reached{waited} by node {meet.node_rank} of {meet.nnodes}"
        return f"no rank began: {where}; start node 0 there first, and see that its port is open ({_last_line(text)})"
    return f"none of the {nproc} ranks began: {_last_line(text)}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and set(line.strip()) - set("=-")]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:300]
