"""Blocks of every preset are what the golden net recorded (`python tests/golden/net.py` compares the plans as well)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "golden"))
from net import differences, read, records


def test_blocks_of_presets_are_as_recorded() -> None:
    """What changes them on purpose writes the net anew and says why."""
    recorded, found = read(), []
    for name, record in records(steps=False):
        found += [f"{name}{line}" for line in differences(recorded[name], json.loads(json.dumps(record)))]
    assert not found, "\n".join(found[:10])


def test_a_difference_is_named_by_its_place() -> None:
    old = {"blocks": [{"saved": {"a": 1.0, "b": 2.0}}], "x": [1, 2]}
    new = {"blocks": [{"saved": {"a": 1.0, "b": 2.5}}], "x": [1, 2, 3]}
    assert list(differences(old, new)) == [".blocks[0].saved.b: 2 -> 2.5", ".x: 2 -> 3 entries"]
    assert list(differences(old, {**old, "x": [1, 2 * (1 + 1e-12)]})) == []
