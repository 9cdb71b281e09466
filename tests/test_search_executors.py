"""The same answer from one process, from several, and from a Dask cluster; workers that die; schedulers that are not there."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from search_layouts import small_space

from simpar.cli import main
from simpar.errors import InputError
from simpar.searching import cluster as on_cluster
from simpar.searching import executors
from simpar.searching.executors import SharedLimits
from simpar.searching.find import Found, Watch, find
from simpar.searching.incumbents import Incumbents, Limits
from simpar.searching.parts import Wish
from simpar.searching.space import Space

WISH = Wish(keep=5)
NEEDS_DASK = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="the cluster extra (Dask) is not installed")
ROOT = Path(__file__).parent.parent


def answers(found: Found) -> list[tuple[float, float, str]]:
    return [(s.value, s.device_bytes, str(s.choice)) for s in found.best]


@pytest.fixture(scope="module")
def space() -> Space:
    """Searched in seconds by one process: long enough to kill a worker in."""
    free = ("tp=1,2,4", "pp=1,2,4", "schedule=1f1b,interleaved", "zero_stage=0,1", "overlap_tp=false", "sequence_parallel=true",
            "recompute=none,full", "micro_batch_size=1", "placement=tp-cp-ep-dp-pp")  # fmt: skip
    return small_space(2, free)


@pytest.fixture(scope="module")
def alone(space: Space) -> Found:
    return find(space, WISH)


def same(found: Found, alone: Found) -> None:
    assert answers(found) == answers(alone)
    assert found.finished
    assert found.account.kept + sum(found.account.rejected.values()) == found.size == alone.size


# -- processes -------------------------------------------------------------------------------------------------------------


def test_two_processes_give_the_same_answer(space: Space, alone: Found) -> None:
    watched: list[Watch] = []
    same(find(space, WISH, workers=2, listener=watched.append), alone)
    assert watched[-1].done == watched[-1].parts > 1
    assert watched[-1].simulated > 0, "workers report what they simulate"


def test_a_search_that_takes_long_is_dealt_to_all_cores(space: Space, alone: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "ALONE_S", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(executors, "EVERY_S", 0.0)
    watched: list[Watch] = []
    same(find(space, WISH, workers=None, listener=watched.append), alone)
    assert watched[0].parts == 1
    assert watched[-1].done == watched[-1].parts == 2


def test_a_search_that_is_short_stays_in_one_process(space: Space, alone: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "processes", None)
    monkeypatch.setattr(executors, "ALONE_S", 1e9)
    same(find(space, WISH, workers=None), alone)


def test_a_worker_that_is_killed_is_replaced(space: Space, alone: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    hear = executors._Pool._hear

    def hear_and_kill(pool: Any, worker: Any) -> Any:
        found = hear(pool, worker)
        if found is None and not killed:
            # It has said something but is not done: it is in the middle of its part.
            killed.append(worker.process.pid)
            os.kill(worker.process.pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(executors._Pool, "_hear", hear_and_kill)
    hired: list[int] = []
    monkeypatch.setattr(executors._Pool, "_replace", lambda pool, w, old=executors._Pool._replace: (hired.append(1), old(pool, w)))
    same(find(space, WISH, workers=2), alone)
    assert hired == [1]


def test_workers_that_keep_dying_are_one_clear_message(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    hire = executors._Pool._hire

    def hire_and_kill(pool: Any) -> Any:
        worker = hire(pool)
        os.kill(worker.process.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(executors._Pool, "_hire", hire_and_kill)
    with pytest.raises(InputError, match=r"--executor = 'local': 4 workers have died"):
        find(space, WISH, workers=2)


def test_what_must_be_beaten_is_read_whole_or_not_at_all() -> None:
    board = SharedLimits(multiprocessing)
    assert board.read() == Limits(), "anything will do"
    board.write(Limits(2.0, ((2.0, 5e9), (3.0, 4e9))))
    assert board.read() == Limits(2.0, ((2.0, 5e9), (3.0, 4e9)))
    board._front[0] += 1.0
    board._front[2] = 1.0
    assert board.read() == Limits(2.0, ((2.0, 5e9), (3.0, 4e9))), "half written"
    board.write(Limits(1.0))
    assert board.read() == Limits(1.0)


def test_an_error_in_a_worker_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with a wish that no worker can read."""
    task = executors.Task(small_space(), WISH, {0: [], 1: ["no node"]}, Incumbents(), lambda _: None, lambda _, __: None)  # type: ignore[list-item]
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        list(executors.processes(task, 2))
    assert "solve_part" in "".join(caught.value.__notes__)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_workers_follow_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-m", "simpar.cli", "search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "8",
               "--sequence-length", "8192", "--global-batch", "64", "--workers", "2", "--quiet"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    until = time.monotonic() + 60
    # Two workers, and the resource tracker of multiprocessing.
    while len(children(process.pid)) < 3:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = children(process.pid)
    time.sleep(1.5)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < until + 20, "workers outlive their parent"
        time.sleep(0.1)


# -- Dask ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler and two worker processes on this machine."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, env={"PYTHONPATH": str(ROOT)}
    ) as found:
        yield found


@NEEDS_DASK
def test_a_dask_cluster_gives_the_same_answer_and_reports_on_the_way(cluster: Any, space: Space, alone: Found) -> None:
    watched: list[Watch] = []
    found = find(space, WISH, scheduler=cluster.scheduler_address, listener=watched.append)
    same(found, alone)
    assert watched[-1].done == watched[-1].parts == 16
    assert watched[-1].simulated >= len(alone.best)


@NEEDS_DASK
def test_a_dask_worker_that_is_killed_in_the_middle_changes_nothing(cluster: Any, space: Space, alone: Found) -> None:
    killed: list[int] = []

    def kill(watch: Watch) -> None:
        # Parts are running, none or few are done.
        if watch.simulated >= 1 and not killed:
            worker = next(iter(cluster.workers.values()))
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    found = find(space, WISH, scheduler=cluster.scheduler_address, listener=kill)
    assert killed
    assert not alive(killed[0])
    same(found, alone)


@NEEDS_DASK
def test_a_scheduler_that_is_not_there_is_one_clear_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cluster, "_CONNECT_S", 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address in (f"tcp://127.0.0.1:{port}", "nonsense", "tcp://no.such.host.invalid:8786", "gopher://127.0.0.1:1"):
        with pytest.raises(SystemExit) as ended:
            main(["search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "8",
                  "--sequence-length", "4096",
                  "--fix", "tp=8", "--executor", "dask", "--scheduler", address, "--quiet"])  # fmt: skip
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith(f"simpar: --scheduler = '{address}': cannot be reached")
        assert "\n" not in said


@NEEDS_DASK
def test_a_cluster_without_workers_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, space: Space) -> None:
    from distributed import LocalCluster

    monkeypatch.setattr(on_cluster, "_WORKERS_S", 0.5)
    with (
        LocalCluster(n_workers=0, dashboard_address=None) as empty,
        pytest.raises(InputError, match="has had no worker for 0 s; start some"),
    ):
        find(space, WISH, scheduler=empty.scheduler_address)


@NEEDS_DASK
def test_a_scheduler_that_goes_away_is_one_clear_message(space: Space) -> None:
    from distributed import LocalCluster

    doomed = LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, env={"PYTHONPATH": str(ROOT)})
    ends: list[threading.Thread] = []

    def close(watch: Watch) -> None:
        if watch.simulated and not ends:
            ends.append(threading.Thread(target=doomed.close))
            ends[0].start()

    with pytest.raises(InputError, match="has gone away"):
        find(space, WISH, scheduler=doomed.scheduler_address, listener=close)
    ends[0].join()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["--executor", "dask"], "needs the scheduler's address"), (["--executor", "cloud"], "unknown executor 'cloud'"),
     (["--scheduler", "tcp://x:1"], "is for --executor dask"), (["--workers", "0"], "at least 1")],
)  # fmt: skip
def test_options_that_need_each_other(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["search", "--model", "llama3.1-8b", "--hardware", "dgx-h100", "--num-nodes", "1", "--global-batch", "8", *arguments])
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err
