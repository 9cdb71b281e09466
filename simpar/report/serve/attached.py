"""What a user brings along: a model's config.json, the figures of a GPU, what was learned from runs. It travels in the address.

None of it is taken as a path: a config.json is read as data, and a profile is written by the page itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from simpar.errors import InputError, Violation
from simpar.report.serve.fields import FIELDS, Value
from simpar.specs.base import read_toml, validate
from simpar.specs.hardware import HardwareProfile, included, profile_path
from simpar.toml import toml
from simpar.units import parse

MOST_PACKED: Final = 12_000
"""Characters of one attachment in an address."""
MOST_UNPACKED: Final = 2**20
GPU_FIELDS: Final = tuple(field for field in FIELDS if field.profile)


def pack(table: Mapping[str, Any]) -> str:
    """A table as text that an address can hold.

    Raises:
        InputError: it is too large for one.
    """
    found = base64.urlsafe_b64encode(zlib.compress(json.dumps(table, separators=(",", ":")).encode(), 9)).decode().rstrip("=")
    if len(found) > MOST_PACKED:
        raise InputError(f"the file is too large for this page: {len(found):,} characters packed, at most {MOST_PACKED:,}")
    return found


def unpack(text: str, what: str) -> dict[str, Any]:
    """The table again.

    Raises:
        InputError: nothing that `pack` wrote.
    """
    wrong = InputError([Violation(what, text[:40], "is not readable", "a whole address, as the page wrote it")])
    try:
        if len(text) > MOST_PACKED:
            raise wrong
        data = zlib.decompressobj().decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), MOST_UNPACKED)
        found = json.loads(data)
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    return found


@lru_cache(maxsize=16)
def _model(packed: str) -> dict[str, Any]:
    from simpar.model.huggingface import from_huggingface

    model = from_huggingface(unpack(packed, "config"), file="config.json")
    return model.model_dump(mode="json", exclude_defaults=True) | {"kind": model.kind}


def model_of(packed: str) -> dict[str, Any]:
    """The `[model]` table of a packed config.json.

    Raises:
        InputError: no such model.
    """
    return dict(_model(packed))


def hardware_of(base: str, values: Mapping[str, Value], folder: Path | None = None) -> str:
    """The profile `base`, or a file with the figures of the user's own GPU in it.

    Raises:
        InputError: a figure breaks a rule.
    """
    own = {field: value for field in GPU_FIELDS if (value := values.get(field.key)) not in (None, "")}
    if not own:
        return base
    wrong = [
        Violation(field.label, value, "must be a number above 0", field.hint)
        for field, value in own.items()
        if not isinstance(value, int | float) or not 0 < value < 1e9
    ]
    if wrong:
        raise InputError(wrong)
    path = profile_path(base)
    table = read_toml(path)
    for key in ("kernels", "collectives"):
        if isinstance(table.get(key), str) and (path.parent / table[key]).is_file():
            table[key] = str((path.parent / table[key]).resolve())
    for field, value in own.items():
        _put(table, field.profile, f"{value:g} {field.unit}")
    if any(field.key == "gpu_flops" for field in own):
        # Kernels that were measured on another GPU say nothing of one with another peak.
        table.pop("kernels", None)
    table["name"] = f"{base}, own GPU"
    validate(HardwareProfile, included(table, path.parent), file="own GPU")
    text = toml(table)
    # A file of this user's, named by its content: every worker finds the same.
    place = folder or Path(tempfile.gettempdir()) / f"simpar-page-{os.getuid() if hasattr(os, 'getuid') else 0}"
    place.mkdir(mode=0o700, exist_ok=True, parents=True)
    found = place / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"
    if not found.is_file():
        part = found.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(found)
    return str(found)


def _put(table: dict[str, Any], path: str, value: str) -> None:
    """Replace a figure; the peaks of all dtypes move with that of bf16."""
    *parents, last = path.split(".")
    for parent in parents:
        table = table[parent]
    if parents[-1] == "peak_flops":
        times = _flops(value) / _flops(table.get(last) or max(table.values(), key=_flops))
        for dtype in table:
            table[dtype] = f"{_flops(table[dtype]) * times:.6g} FLOP/s"
    table[last] = value


def _flops(entry: Any) -> float:
    """FLOP/s of an entry of a profile."""
    return parse(entry["value"] if isinstance(entry, Mapping) else entry, "flops_per_s")
