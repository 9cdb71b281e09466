"""Searches on disk: nothing finished is lost, a resumed search gives the same answer, what is no store is refused."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from search_layouts import every_layout, small_space

from simpar.cli import main
from simpar.errors import InputError
from simpar.searching.find import Found, Watch, find, find_over
from simpar.searching.parts import Wish
from simpar.searching.store import Store, checksum, request_key

REQUEST = {"what": "a test"}
WISH = Wish(keep=4)
QUICK = Wish(keep=20, fold=True, reach=1.3, tolerance=0.01)
ASKED = ("--model", "llama3.1-8b", "--hardware", "dgx-h100", "--sequence-length", "8192", "--global-batch", "8")
SMALL_SEARCH = (*ASKED, "--num-nodes", "1", "--framework", "megatron-core", "--fix", "tp=2,pp=2,cp=1", "--fix",
                "recompute=none,micro_batch_size=1", "--quiet")  # fmt: skip
LONG_SEARCH = (*ASKED, "--num-nodes", "4", "--global-batch", "32", "--framework", "megatron-core", "--top", "40", "--fix", "cp=1",
               "--workers", "1", "--quiet", "--json")  # fmt: skip
"""Takes seconds, and works through its parts one after the other."""


@pytest.fixture(scope="module")
def whole() -> Found:
    """The small search, from its beginning to its end."""
    return find(small_space(), WISH)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the small search, finished."""
    path = tmp_path_factory.mktemp("finished") / "s.db"
    store = Store(path, REQUEST)
    find(small_space(), WISH, store=store)
    store._run("pragma wal_checkpoint(truncate)")
    store.close()
    return path


def answers(found: Found) -> list[tuple[float, float, str]]:
    return [(s.value, s.device_bytes, str(s.choice)) for s in found.best]


def account(found: Found) -> int:
    return found.account.kept + sum(found.account.rejected.values())


# -- in process ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, whole: Found) -> None:
    space = small_space()
    store = Store(tmp_path / "s.db", REQUEST)
    seen: list[int] = []

    def stop(watch: Watch) -> None:
        seen.append(watch.done)
        if watch.done == 3:
            raise KeyboardInterrupt

    first = find(space, WISH, store=store, listener=stop)
    assert not first.finished
    assert store.progress[0] == 3
    assert first.gap is None or first.gap >= 0.0
    kept = store.progress[2]
    again: list[int] = []
    second = find(space, WISH, store=store, resume=True, listener=lambda w: again.append(w.done))
    assert again[0] == 3, "finished parts are not searched again"
    assert second.finished
    assert answers(second) == answers(whole)
    assert account(second) == account(whole) == space.size
    assert store.progress[2] >= kept
    # Without --resume it starts anew.
    fresh: list[int] = []
    third = find(space, WISH, store=store, listener=lambda w: fresh.append(w.done))
    assert fresh[0] == 0
    assert answers(third) == answers(whole)


class _KilledError(BaseException):
    """In place of kill -9: nothing is written after it."""


@pytest.mark.parametrize(
    ("wish", "workers"), [(Wish(keep=20), 1), (QUICK, 1), (QUICK, 2)], ids=["proven", "quick", "quick on two processes"]
)
def test_a_search_killed_between_parts_and_inside_them_arrives(
    wish: Wish, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again and again, with a layout or a part more at most, it still arrives, and at the same answer."""
    space, whole, kept = small_space(), find(small_space(), wish), []
    for attempt in range(100):
        store = Store(tmp_path / "s.db", REQUEST)
        with monkeypatch.context() as patch:
            # In turn after a layout that is stored for the first time, and after a part.
            name = "add" if attempt % 2 == 0 and attempt < 6 else "part_done"
            written, writes = getattr(Store, name), count(1)

            def killed(self: Store, *row: Any, written: Any = written, writes: Any = writes) -> None:
                written(self, *row)
                if next(writes) % 3 == 0:
                    raise _KilledError

            patch.setattr(Store, name, killed)
            try:
                found = find(space, wish, store=store, resume=attempt > 0, workers=workers)
                break
            except _KilledError:
                kept.append(store.progress)
        store.close()
    assert len(kept) > 1
    assert all(a[0] <= b[0] and a[2] <= b[2] and a != b for a, b in pairwise(kept)), "each attempt leaves more than it found"
    # A quick search stops where the rest cannot matter, which what was known before may move: what holds is its best. Of two
    # processes the one that is first moves that too, within what it is asked for.
    few = 1 if wish is QUICK else None
    assert found.best[0].value == pytest.approx(whole.best[0].value, rel=wish.tolerance)
    assert workers > 1 or answers(found)[:few] == answers(whole)[:few]
    assert account(found) == space.size


def test_a_store_whose_search_was_killed_at_once_is_empty(tmp_path: Path) -> None:
    """Between the file and its tables: it was refused as a database of another program."""
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("pragma journal_mode = wal")
    db.close()
    assert (tmp_path / "s.db").stat().st_size > 0
    assert Store(tmp_path / "s.db", REQUEST).progress == (0, 0, 0)


def test_other_workers_go_on_with_the_parts_that_were_begun(tmp_path: Path, whole: Found) -> None:
    """Parts are numbers: resumed with another number of processes, the same number must mean the same part."""
    space = small_space()

    def stop(watch: Watch) -> None:
        if watch.done == 2:
            raise KeyboardInterrupt

    store = Store(tmp_path / "s.db", REQUEST)
    find(space, WISH, store=store, listener=stop)
    parts = store.progress[1]
    found = find(space, WISH, store=store, resume=True, workers=2)
    assert store.progress[:2] == (parts, parts)
    assert account(found) == space.size
    assert answers(found) == answers(whole)


def test_everything_simulated_is_on_disk_at_once(tmp_path: Path) -> None:
    store, reader = Store(tmp_path / "s.db", REQUEST), Store(tmp_path / "s.db", REQUEST)
    counts: list[tuple[int, int]] = []
    find(small_space(), WISH, store=store, listener=lambda w: counts.append((w.simulated, reader.progress[2])))
    assert counts[-1][0] >= 4
    assert all(written >= min(simulated, 1) and written <= simulated for simulated, written in counts)
    assert counts[-1][1] == len(list(reader.layouts()))
    best = next(iter(reader.layouts()))
    assert best.step_time_s == pytest.approx(min(k.seconds for k in every_layout()), rel=1e-9)


def test_cluster_sizes_do_not_mix_in_one_store(tmp_path: Path) -> None:
    allow = ("tp=1,2", "pp=1", "cp=1", "recompute=none", "micro_batch_size=1", "zero_stage=1", "shard_size=none")
    spaces = [small_space(n, allow) for n in (1, 2)]
    wish = Wish("tokens_per_s_per_gpu", keep=3)
    plain = find_over(spaces, wish)
    store = Store(tmp_path / "s.db", REQUEST)
    for resume in (False, True):
        kept = find_over(spaces, wish, store=store, resume=resume)
        assert [answers(f) for f in kept] == [answers(f) for f in plain]
        assert [account(f) for f in kept] == [s.size for s in spaces]


def test_other_models_or_requests_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    key = request_key(REQUEST)
    assert key == request_key(dict(REQUEST))
    assert key != request_key({"what": "another"})
    monkeypatch.setattr("simpar.searching.store.models_fingerprint", lambda: "changed")
    assert key != request_key(REQUEST)


# -- what is no store ------------------------------------------------------------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("create table parts (name text, price real)")
        db.execute("insert into parts values ('bolt', 1.0)")
    db.close()


def damaged(path: Path) -> None:
    store = Store(path, REQUEST)
    find(small_space(allow=("tp=2", "pp=2", "cp=1", "recompute=none", "micro_batch_size=1")), WISH, store=store)
    store._run("pragma wal_checkpoint(truncate)")
    store.close()
    content = bytearray(path.read_bytes())
    assert len(content) > 3 * 4096
    for page in range(1, len(content) // 4096):
        content[page * 4096 : page * 4096 + 600] = b"\xa5" * 600
    path.write_bytes(content)


def text(path: Path) -> None:
    path.write_text("these are not the bytes you are looking for\n" * 100)


def folder(path: Path) -> None:
    path.mkdir()


def old(path: Path) -> None:
    store = Store(path, REQUEST)
    store._run("pragma user_version = 99")
    store.close()


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "foreign": (foreign, "another program"), "damaged": (damaged, "cannot be used"), "text": (text, "not a database"),
    "folder": (folder, "cannot be used"), "old": (old, "another version"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_store_is_one_clear_message(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, hint = WRONG[kind]
    path = tmp_path / "s.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(SystemExit) as ended:
        main(["search", *SMALL_SEARCH, "--store", str(path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("simpar: --store")
    assert hint in said
    assert "Traceback" not in said
    if kind in ("foreign", "text", "damaged"):
        assert path.read_bytes() == before, "nothing is written into a file that is not ours"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--store"):
        Store(tmp_path / "no" / "s.db", REQUEST)


# -- the command -----------------------------------------------------------------------------------------------------------


def printed(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["search", *arguments, "--json"])
    assert (ended.value.code or 0) == code
    return dict(json.loads(capsys.readouterr().out))


def test_the_same_search_twice_is_answered_from_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*SMALL_SEARCH, "--store", str(tmp_path / "s.db"))
    first = printed(arguments, capsys)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr("simpar.searching.command.find_over", never)
    second = printed(arguments, capsys)
    assert second.pop("from_store") is True
    assert first.pop("from_store") is False
    assert second == first
    # Another wish is another search.
    with pytest.raises(SystemExit):
        main(["search", *arguments, "--objective", "memory_headroom", "--json"])
    assert "searched again" in capsys.readouterr().err


def comparable(document: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on how the search went: everything but its account and duration."""
    dropped = ("seconds", "evaluated", "rejected", "kept", "from_store", "cpu_s")
    assert document["kept"] + sum(document["rejected"].values()) == document["space_size"]
    return {name: value for name, value in document.items() if name not in dropped}


def test_kill_9_and_resume_give_the_same_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed early: with the first layouts, before a tenth of its parts is done."""
    path, asked = tmp_path / "s.db", (*LONG_SEARCH[:-1], "--fix", "micro_batch_size=1,schedule=1f1b,recompute=none", "--prove")
    command = [sys.executable, "-m", "simpar.cli", "search", *asked, "--json", "--store", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    until = time.monotonic() + 600
    while True:
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < until
        if path.exists() and rows(path, "parts") >= 1 and rows(path, "layouts") >= 5:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    assert process.wait(20) == -signal.SIGKILL
    assert process.stderr is not None
    process.stderr.close()
    done, kept = rows(path, "parts"), rows(path, "layouts")
    # A quick search stops where the rest cannot matter, which parts done before may move: what holds is the proof.
    resumed = printed((*asked, "--store", str(path), "--resume"), capsys)
    whole = printed(asked, capsys)
    assert comparable(resumed) == comparable(whole)
    assert done < rows(path, "parts"), "it was killed in the middle"
    assert kept <= rows(path, "layouts")
    assert whole["optimality_gap"] == 0.0


def rows(path: Path, table: str) -> int:
    """Without a lock, and before there is a table."""
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
        try:
            return int(db.execute(f"select count(*) from {table}").fetchone()[0])
        finally:
            db.close()
    except sqlite3.OperationalError:
        return 0


def heeds_interrupts() -> None:
    """For a child process: a shell lets what it starts in the background ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_shows_what_was_found_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    longer = (*LONG_SEARCH, "--num-nodes", "32", "--global-batch", "512", "--pareto", "step_time,memory")
    command = [sys.executable, "-m", "simpar.cli", "search", *longer, "--store", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, preexec_fn=heeds_interrupts
    )
    until = time.monotonic() + 600
    while rows(path, "layouts") < 5:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    found = json.loads(out)
    assert found["finished"] is False
    assert found["best"]
    assert found["optimality_gap"] is None or 0.0 <= found["optimality_gap"] <= 1.0
    assert "Traceback" not in err
    assert rows(path, "layouts") >= 5


# -- rows that are not what was written ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, finished: Path) -> Store:
    """A small search, finished in a store of the test's own."""
    return Store(Path(copy(finished, tmp_path / "s.db")), REQUEST)


@pytest.mark.parametrize(
    "change",
    [
        "layouts set step_time_s = step_time_s * 0.5",
        "layouts set value = value * 0.5",
        "layouts set device_bytes = device_bytes - 1",
        "layouts set choice = replace(choice, '\"tp\": 2', '\"tp\": 1')",
        "layouts set checksum = ''",
        "parts set account = replace(account, '\"kept\": ', '\"kept\": 1')",
        "parts set part = part + 100",
        "parts set account = x'00'",
    ],
)
def test_an_altered_row_is_refused(change: str, tmp_path: Path, store: Store) -> None:
    with sqlite3.connect(tmp_path / "s.db") as db:
        assert db.execute(f"update {change}").rowcount > 0
    with pytest.raises(InputError, match="an entry is damaged: its checksum is wrong"):
        find(small_space(), WISH, store=store, resume=True)


def test_a_winner_from_the_store_is_simulated_again(store: Store) -> None:
    """A row that is whole but says what is not so: its layout is not printed as the best."""
    last = list(store.layouts())[-1]
    store.add(replace(last, step_time_s=last.step_time_s / 10, value=last.value / 10))
    with pytest.raises(InputError, match=r"an entry is wrong: .* s when simulated again, .* s as stored"):
        find(small_space(), WISH, store=store, resume=True)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"step_time_s": 0.001}, "s when simulated again, 0.001 s as stored"),
        ({"choice": {"tp": 1}}, "its best layout is none of this search"),
        ({"world_size": 7}, "its best layout is none of this search"),
    ],
)
def test_a_stored_answer_is_simulated_again(
    change: dict[str, Any], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.db"
    with pytest.raises(SystemExit):
        main(["search", *SMALL_SEARCH, "--store", str(path)])
    with sqlite3.connect(path) as db:
        key, text = db.execute("select key, answer from searches where answer is not null").fetchone()
        table = json.loads(text)
        table["best"][0] |= change
        text = json.dumps(table)
        db.execute("update searches set answer = ?, checksum = ? where key = ?", (text, checksum(key, text), key))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["search", *SMALL_SEARCH, "--store", str(path)])
    assert stop.value.code == 2
    assert rule in capsys.readouterr().err


def test_parts_with_a_store_are_small(tmp_path: Path) -> None:
    """What is lost with a kill is one part: there are many, and each is written when it is done."""
    store, done = Store(tmp_path / "s.db", REQUEST), list[int]()
    find(small_space(), WISH, store=store, listener=lambda watch: done.append(watch.done))
    assert store.progress[0] == store.progress[1] >= 10
    assert sorted(set(done)) == list(range(store.progress[1] + 1))
