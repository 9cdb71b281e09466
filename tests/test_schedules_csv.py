"""CSV files in both of torch's forms, and what simpar says about bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpar.errors import InputError, InternalError
from simpar.schedules import Phase, build_schedule
from simpar.schedules.communication import with_communication
from simpar.schedules.csv import read_csv, write_csv


def message_of(path: Path, text: str, **options: int) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_csv(path, **options)
    assert all(violation.file == str(path) for violation in caught.value.violations)
    return str(caught.value)


def test_compute_only_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_csv(build_schedule("1f1b", 2, 3), path)
    assert path.read_bytes() == b"0F0,0F1,0B0,0F2,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n"
    schedule = read_csv(path)
    assert schedule.name == "mine"
    assert (schedule.num_ranks, schedule.num_microbatches, schedule.stage_to_rank) == (2, 3, (0, 1))
    assert schedule.rows == build_schedule("1f1b", 2, 3).rows


def test_file_with_communication(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_csv(build_schedule("gpipe", 2, 1), path, communication=True)
    assert path.read_text().split() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD",
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD",
    ]
    assert read_csv(path).rows == build_schedule("gpipe", 2, 1).rows


def test_idle_slots_spaces_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "padded.csv"
    path.write_bytes("\ufeff0F0,,0F1, 0B0 ,,0B1\n,1F0,1B0,1F1,1B1\n".encode())
    assert [len(row) for row in read_csv(path).rows] == [4, 4]


def test_overlapped_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    write_csv(build_schedule("dualpipe-v", 2, 4), path)
    assert "(0F3;3B1)OVERLAP_F_B" in path.read_text()
    assert read_csv(path).rows == build_schedule("dualpipe-v", 2, 4).rows


def test_two_copies_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "dualpipe.csv"
    write_csv(build_schedule("dualpipe", 2, 4), path)
    assert read_csv(path, replicas=2) == build_schedule("dualpipe", 2, 4)
    # Read as one model, the second direction's microbatches never pass the first half of the stages.
    assert "stage 0 = 'no B of microbatch 2, 3'" in message_of(path, path.read_text())


def test_only_neighbours_on_different_ranks_communicate() -> None:
    rows = with_communication(build_schedule("zb-v", 2, 3))
    sends = {(a.stage, a.phase) for row in rows for a in row if a.phase in (Phase.SEND_F, Phase.SEND_B)}
    # Stages 1 and 2, the bottom of the V, share rank 1.
    assert sends == {(0, Phase.SEND_F), (2, Phase.SEND_F), (3, Phase.SEND_B), (1, Phase.SEND_B)}
    alone = with_communication(build_schedule("interleaved", 1, 4, 3))
    assert not [a for row in alone for a in row if "SEND" in a.phase or "RECV" in a.phase]


def test_unshard_keeps_a_few_stages_gathered() -> None:
    gathered: set[int] = set()
    most = 0
    (row,) = with_communication(build_schedule("interleaved", 1, 2, 4))
    for action in row:
        if action.phase is Phase.UNSHARD:
            gathered.add(action.stage)
        elif action.phase is Phase.RESHARD:
            gathered.remove(action.stage)
        elif action.computes:
            assert action.stage in gathered
        most = max(most, len(gathered))
    assert most == 3
    assert not gathered


def test_lowering_an_unchecked_deadlock_is_a_bug(tmp_path: Path) -> None:
    schedule = build_schedule("1f1b", 2, 1)
    backwards = type(schedule)("bad", 2, 1, (0, 1), (schedule.rows[0][::-1], schedule.rows[1]))
    with pytest.raises(InternalError):
        with_communication(backwards)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n1F0,1Q0\n", "row 2, column 2 = '1Q0': is not an action"),
        ("0F0,,0B\n", "row 1, column 3 = '0B': is not an action: B needs a microbatch"),
        ("0F0,0B0,0UNSHARD1\n", "row 1, column 3 = '0UNSHARD1': is not an action: UNSHARD takes no microbatch"),
        ("", "uses no stage"),
        ("0UNSHARD\n", "uses no stage"),
        ("0F0,0B0\n2F0,2B0\n", "last stage = 2: must number them from 0 without a gap, but there is no stage 1"),
        ("0F0,0B0,0F9,0B9\n", "last microbatch = 9"),
        ("0F0,0B0,999999999F0\n", "last stage = 999999999"),
        ("0F0,0B0\n1B0,1F0\n", "rank 1, step 0 = '1B0': waits for ever for 1F0"),
        ("0F0\n1F0,1B0\n", "no B of microbatch 0"),
        ("0F0,0B0,1F0\n1B0\n", "stage 1 is not on this rank; it is on rank 0"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, expected: str) -> None:
    message = message_of(tmp_path / "bad.csv", text)
    assert expected in message
    assert "bad.csv" in message


def test_every_bad_cell_is_listed(tmp_path: Path) -> None:
    message = message_of(tmp_path / "bad.csv", "0F0,x,0B0,y\nz\n")
    assert [line.split(" = ")[0].split(": ")[1] for line in message.splitlines()] == [
        "row 1, column 2", "row 1, column 4", "row 2, column 1",
    ]  # fmt: skip


def test_the_grid_of_a_deadlock_is_shown(tmp_path: Path) -> None:
    message = message_of(tmp_path / "bad.csv", "0F0,0B0\n1B0,1F0\n")
    assert message.splitlines()[-1] == "rank 1  >1B0<  1F0"


@pytest.mark.parametrize("replicas", [0, 3])
def test_copies_that_do_not_divide(tmp_path: Path, replicas: int) -> None:
    message = message_of(tmp_path / "bad.csv", "0F0,0B0\n1F0,1B0\n", replicas=replicas)
    assert f"number of stages = 2: cannot be divided among {replicas} copies" in message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.csv: no such file"):
        read_csv(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.csv: not a text file"):
        read_csv(tmp_path / "binary.csv")


GOOD = ["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"]


def test_communication_without_fsdp_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "good.csv"
    path.write_text("\n".join(GOOD))
    assert [str(action) for action in read_csv(path).rows[0]] == ["0F0", "0B0"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0SEND_F0,", "", "rank 0, step 0 = '0F0': 0SEND_F0 is missing; put it after 0F0"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "rank 0, step 2 = '0B0': 0RECV_B0 stands on the wrong side of it"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0, step 1 = '0F0': 0SEND_F0 stands on the wrong side of it"),
        ("1SEND_B0", "1SEND_B0,1SEND_B0", "rank 1, step 4 = '1SEND_B0': stands at rank 1, step 3 already"),
        ("1SEND_B0", "1SEND_B0,1SEND_F0", "rank 1, step 4 = '1SEND_F0': nothing crosses ranks here; leave it out"),
        ("1RECV_F0,1F0", "1F0,0UNSHARD", "rank 1, step 1 = '0UNSHARD': concerns a stage of another rank"),
        ("1B0", "5UNSHARD,1B0", "rank 1, step 2 = '5UNSHARD': concerns a stage of another rank; there is no stage 5"),
        ("0F0,0SEND_F0", "0F0,0SEND_F0,1RECV_F0", "1RECV_F0 stands on rank 0; move it to rank 1"),
    ],
)  # fmt: skip
def test_bad_communication(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in message_of(tmp_path / "bad.csv", "\n".join(GOOD).replace(old, new))
