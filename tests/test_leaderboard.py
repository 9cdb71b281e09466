"""The leaderboard: peers beside simpar's predictions of fits without the source, made by a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpar.errors import InputError
from simpar.specs.calibration import unseen
from validation.tools.leaderboard import Seen, page, read_peers, read_unseen, tables

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_that_of_the_shipped_tables() -> None:
    assert (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8") == page(), "python -m validation.tools.leaderboard"


def test_unseen_rows_are_those_of_the_registrys_table() -> None:
    rows = read_unseen()
    assert len(rows) == unseen()[0].rows
    off = [abs(row.unseen_s / row.measured_s - 1.0) for row in rows.values()]
    assert sum(off) / len(off) == pytest.approx(unseen()[0].mean, rel=1e-3)
    inside = [row.low_s <= row.measured_s <= row.high_s for row in rows.values()]
    assert sum(inside) / len(inside) == pytest.approx(unseen()[0].coverage, abs=0.01)


def test_a_line_compares_the_same_runs(tmp_path: Path) -> None:
    seen = {name: Seen("one source", 10.0, 8.0, 11.0, 9.0, 12.0) for name in ("a", "b")} | {
        "c": Seen("two", 1.0, 1.0, 3.0, 2.0, 4.0)
    }
    file = tmp_path / "mine.csv"
    file.write_text("run,predictor,setting,step_time_s\na,mine,x,9\nb,mine,x,12\nstrange,mine,x,5\n")
    text = tables(seen, read_peers([file]))
    assert "| mine | x | 2 | 15.0% | 15.0% | 5.0% | 10.0% | 10.0% |" in text
    assert "## one source" in text
    assert "## two" not in text
    assert "| simpar | sources left out | 3 |" in text
    assert "| mine | x | 2 |" in page([file]) or "| mine | x | 0 |" in page([file])


@pytest.mark.parametrize(("text", "said"), [
    ("run,predictor,setting\na,m,x\n", "no column step_time_s"),
    ("run,predictor,setting,step_time_s\na,m,x,fast\n", "expected seconds, more than 0"),
    ("run,predictor,setting,step_time_s\na,m,x,-1\n", "expected seconds, more than 0"),
])  # fmt: skip
def test_a_wrong_table_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        read_peers([file])
