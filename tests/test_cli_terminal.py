"""Outputs that cannot take what is written to them: other characters or one line, and never "a bug in simpar"."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "simpar"]


SMALL = ["simulate", "zero-7.5b_a100x64_zero3"]


def ran(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, env={**os.environ, **environment}, timeout=120)


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=str,
)
def test_output_that_is_not_utf_8(environment: dict[str, str]) -> None:
    found = ran(SMALL, **environment)
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    assert b"tok" in found.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=str)
def test_a_full_disk_is_one_line(more: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        found = subprocess.run([*COMMAND, *SMALL, *more], stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert found.stderr.decode().splitlines() == ["simpar: the output cannot be written: No space left on device"]
    assert found.returncode == 2


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen([*COMMAND, *SMALL, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 1)


def test_closed_outputs() -> None:
    arguments = " ".join([*COMMAND, *SMALL])
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        found = subprocess.run(["bash", "-c", f"{arguments} {closed}"], capture_output=True, timeout=120)
        assert found.returncode == 0
        assert b"bug" not in found.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["models", "show", "nothing"], 2)], ids=str)
def test_a_command_ends_without_freeing_what_it_holds(arguments: list[str], code: int) -> None:
    """After a search that takes a tenth of its time. What was to be done at the end is done, what was printed is out."""
    program = (
        "import atexit\nfrom simpar.cli import main\n"
        "class Held:\n    def __del__(self):\n        print('freed', flush=True)\n"
        "held = Held()\natexit.register(print, 'end')\nmain()"
    )
    found = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert found.returncode == code
    assert found.stdout.splitlines()[-1] == "end"
    assert "freed" not in found.stdout
    assert bool(found.stderr) == bool(code)


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    found = ran(SMALL, HOME="/proc/nothing", XDG_CACHE_HOME="/proc/nothing", TMPDIR="/proc/nothing")
    assert found.returncode == 0, found.stderr


def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from simpar.cli import main
    from simpar.specs import models_io

    for error, text in (
        (PermissionError(13, "Permission denied", "/there"), "simpar: /there: Permission denied\n"),
        (OSError(28, "No space left on device"), "simpar: the output cannot be written: No space left on device\n"),
        (MemoryError(), "simpar: not enough memory on this machine; a smaller input, or fewer --workers\n"),
    ):

        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(models_io, "model_names", fails)
        with pytest.raises(SystemExit) as stop:
            main(["models"])
        assert stop.value.code == 2
        assert capsys.readouterr().err == text


def _workers(parent: int) -> int:
    """Processes that a search has started to work for it."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "ppid=,args="], capture_output=True, text=True, timeout=60, check=True)
    return sum(line.split()[0] == str(parent) and "spawn_main" in line for line in listed.stdout.splitlines())


def _kept(store: Path) -> int:
    """Bytes of a search's store and what stands beside it."""
    return sum(path.stat().st_size for path in store.parent.glob(f"{store.name}*"))


@pytest.mark.parametrize("moment", ["the first worker starts", pytest.param("workers answer", marks=pytest.mark.slow)])
def test_ctrl_c_prints_no_workers_traceback(moment: str, tmp_path: Path) -> None:
    """Of a search that lasts minutes on any machine."""
    store = tmp_path / "search.sqlite"
    arguments = [
        "search", "--model", "llama3.1-70b", "--hardware", "dgx-h100", "--num-nodes", "8", "--sequence-length", "8192",
        "--global-batch", "512", "--framework", "any", "--prove", "--workers", "2", "--quiet", "--store", str(store),
    ]  # fmt: skip
    # A shell that runs the tests in its background has them ignore Ctrl-C, and so would what they start.
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        end, least = time.monotonic() + 120, 1 if moment == "the first worker starts" else 2
        while process.poll() is None and _workers(process.pid) < least and time.monotonic() < end:
            time.sleep(0.02)
        before = _kept(store)
        while process.poll() is None and least == 2 and _kept(store) == before and time.monotonic() < end:
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be interrupted"
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "Fatal" not in said


def test_a_worker_that_is_interrupted_while_it_starts_goes_on() -> None:
    """Ctrl-C reaches the whole group of processes; before its first line a worker cannot have said that it does not listen."""
    code = (
        "import multiprocessing, os, signal, time\n"
        "from simpar.host import interrupts_held\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(1.0,))\n"
        "    with interrupts_held():\n"
        "        worker.start()\n"
        "    for _ in range(40):\n"
        "        worker.is_alive() and os.kill(worker.pid, signal.SIGINT)\n"
        "        time.sleep(0.02)\n"
        "    worker.join()\n"
        "    raise SystemExit(worker.exitcode)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
