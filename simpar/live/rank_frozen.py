"""Predictions written down before anything is measured: a file with a hash over all of them."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from simpar import __version__
from simpar.errors import InputError
from simpar.live.rank import Predicted, predict
from simpar.live.rank_plan import RankPlan

FROZEN_FORMAT: Final = 1
BLOCK_TIMES: Final = "single blocks"
"""Among the predictions by layout: those of single blocks."""


def digest(predictions: Mapping[str, Any]) -> str:
    """SHA-256 of the predictions as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(predictions, sort_keys=True).encode()).hexdigest()


def as_table(said: Predicted) -> dict[str, Any]:
    """A prediction as JSON can hold it."""
    return {**asdict(said), "wire": [[kind, ranks, amount] for (kind, ranks), amount in said.wire.items()]}


def freeze(plans: Sequence[RankPlan], path: Path, blocks: Mapping[str, float] | None = None) -> str:
    """Write what is predicted of `plans`; the hash.

    Args:
        blocks: predicted seconds of single blocks, by the key of their record.

    Raises:
        InputError: the file cannot be written, or holds other predictions already.
    """
    found = {plan.scenario.name: {"hardware": plan.scenario.cluster.hardware, **as_table(predict(plan))} for plan in plans}
    if blocks:
        found[BLOCK_TIMES] = dict(blocks)
    found = json.loads(json.dumps(found))
    sha256 = digest(found)
    if path.is_file() and read_frozen(path)[1] != sha256:
        raise InputError(f"{path}: holds other predictions; what was frozen is not written over, give another file")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"format": FROZEN_FORMAT, "simpar": __version__, "date": now, "sha256": sha256, "predictions": found}
    if not path.is_file():
        try:
            path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    return sha256


def read_frozen(path: Path) -> tuple[dict[str, Predicted], str]:
    """Predictions by layout, and their hash; raises as `read_frozen_blocks` does."""
    rows, sha256 = _read(path)
    try:
        return {name: _predicted(row) for name, row in rows.items() if name != BLOCK_TIMES}, sha256
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from None


def read_frozen_blocks(path: Path) -> tuple[dict[str, float], str]:
    """Predicted seconds of single blocks by the key of their record, and the hash of all predictions.

    Raises:
        InputError: no such file, another format, or predictions that do not have the hash they were frozen with.
    """
    rows, sha256 = _read(path)
    return {str(key): float(value) for key, value in rows.get(BLOCK_TIMES, {}).items()}, sha256


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows, sha256 = dict(table["predictions"]), str(table["sha256"])
        if table["format"] != FROZEN_FORMAT:
            raise ValueError(f"format {table['format']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None
    if digest(rows) != sha256:
        raise InputError(f"{path}: the predictions do not have their hash: they were changed after they were frozen")
    return rows, sha256


def _unreadable(path: Path, error: Exception) -> InputError:
    rule = "not predictions that `simpar validate rank --predict-only` wrote"
    return InputError(f"{path}: {rule}: {type(error).__name__}: {error}")


def _predicted(row: Mapping[str, Any]) -> Predicted:
    fields = {name: row[name] for name in Predicted.__dataclass_fields__ if name != "wire"}
    return Predicted(**fields, wire={(str(kind), int(ranks)): float(amount) for kind, ranks, amount in row["wire"]})
