"""`simpar constants`: every number that was fitted on published runs, with what it gains on sources that its fit has not seen."""

from __future__ import annotations

from simpar.cli.listing import print_table
from simpar.cli.options import JsonOption, print_json


def constants(as_json: JsonOption = False) -> None:
    """Numbers fitted on published runs, with their groups, sources and gain on left-out sources."""
    from simpar.specs.calibration import constants as registry

    entries = registry()
    if as_json:
        print_json({"count": len(entries), "constants": [entry.as_json() for entry in entries]})
        return
    heads = ("constant", "group", "value", "neutral", "runs", "sources", "gain", "status")
    rows = [
        (
            entry.name, entry.group, f"{entry.value:.4g}", f"{entry.neutral:g}", f"{entry.rows:,}", str(len(entry.sources)),
            "" if entry.status in ("interval", "read off") else f"{entry.gain:.2%} ± {entry.gain_se:.2%}", entry.status,
        )
        for entry in entries
    ]  # fmt: skip
    print_table(heads, rows, texts=2)
