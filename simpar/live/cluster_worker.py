"""One rank of real training runs: `torchrun ... -m simpar.live.cluster_worker --config C.json --out runs.jsonl`.

Needs torch and the standard library only. Every layout of the configuration is built, warmed up and measured in turn; rank 0
appends one JSON object a layout and round, so that what was measured is kept whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from simpar.host import join_slurm, leave

EXIT_RANK = 17
"""Exit code of a rank that gave its reason in the report file."""


def reason_of(error: BaseException) -> dict[str, str]:
    """What went wrong, as a kind that the launcher can explain and the first line of the message."""
    text = str(error).strip()
    first = text.splitlines()[0][:300] if text else type(error).__name__
    lower = text.lower()
    kind = "error"
    if "out of memory" in lower or "can't allocate memory" in lower or isinstance(error, MemoryError):
        kind = "oom"
    elif "timed out" in lower or "timeout" in lower:
        kind = "timeout"
    elif "connection closed by peer" in lower or "connection reset" in lower or "connection refused" in lower:
        kind = "peer"
    return {"kind": kind, "error": type(error).__name__, "message": first}


class Report:
    """Where this rank says what it is at and why it stops: one small file a rank beside the measurements."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank{rank}.json"
        self.at = "start"

    def write(self, **fields: Any) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"at": self.at, "time": time.time(), **fields}), encoding="utf-8")
        part.replace(self.path)


def die_with_parent() -> None:
    """Linux: this process ends when the one that started it does, so that no rank outlives a killed launcher."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def append(path: Path, record: dict[str, Any]) -> None:
    """One line, on the disk before going on."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def finished(path: Path) -> set[tuple[str, int]]:
    """(layout, round) of the records that are there already."""
    if not path.exists():
        return set()
    found = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            if record["kind"] in ("run", "reference"):
                found.add((record["layout"]["name"], record["round"]))
        except (ValueError, KeyError, TypeError):
            # The last line of a killed run may be a part of one.
            continue
    return found


def run(config: dict[str, Any], out: Path, report: Report) -> None:
    """All layouts of `config` that `out` does not have, in rounds; needs the environment of torchrun."""
    import torch

    from simpar.host import pin
    from simpar.live.cluster_layouts import RunLayout
    from simpar.live.cluster_world import World

    if config["device"] == "cpu":
        torch.set_num_threads(config["threads"])
        pin()
    report.at = "joining"
    report.write()
    world = World(config)
    layouts = [RunLayout(**fields) for fields in config["layouts"]]
    if world.rank == 0 and (not out.exists() or not out.stat().st_size):
        append(out, {**config, "kind": "config"})
    done = world.from_first(sorted(finished(out)))
    try:
        for turn in range(config["rounds"]):
            for layout in layouts:
                if (layout.name, turn) in {tuple(d) for d in done} or layout.world_size not in (1, world.size):
                    continue
                report.at = f"layout {layout.name}"
                report.write()
                wanted = partial(fault, config, layout.name, world.rank)
                wanted("build")
                once = turn == 0 and config.get("instrument", True)
                record = world.measure(layout, wanted, instrument=once)
                if world.rank == 0:
                    append(out, {**record, "round": turn})
    finally:
        report.write()
    world.close()


def fault(config: dict[str, Any], layout: str, rank: int, at: str) -> None:
    """What the tests ask to go wrong: {"rank", "at", "how": raise | exit | hang | oom}."""
    wanted = config.get("fault") or {}
    if wanted.get("rank") != rank or wanted.get("at") != at or wanted.get("layout", layout) != layout:
        return
    if wanted["how"] == "raise":
        raise RuntimeError("a fault that a test asked for")
    if wanted["how"] == "exit":
        os._exit(3)
    if wanted["how"] == "hang":
        time.sleep(3600)
    if wanted["how"] == "oom":
        import torch

        torch.empty(2**62, dtype=torch.uint8)


def main(arguments: list[str] | None = None) -> int:
    """The command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.cluster_worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="written by `simpar validate cluster --write-config`")
    parser.add_argument("--out", type=Path, required=True, help="measurements are appended here, JSONL")
    parser.add_argument("--reports", type=Path, default=None, help="folder for what each rank is at")
    given = parser.parse_args(arguments)
    join_slurm()
    die_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    report = Report(given.reports or given.out.with_suffix(".ranks"), rank)
    try:
        run(json.loads(given.config.read_text(encoding="utf-8")), given.out, report)
    except BaseException as error:
        report.write(**reason_of(error))
        traceback.print_exc()
        return EXIT_RANK
    return 0


if __name__ == "__main__":
    leave(main())
