"""Arrays and values as a page's script reads them."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np

_DTYPES = {"float64": "f8", "float32": "f4", "int32": "i4", "int16": "i2", "int8": "i1"}


def packed(values: Any, dtype: str = "float32") -> dict[str, str]:
    """A flat array as plotly.js takes it: little-endian bytes in base64, several times smaller and faster than text."""
    array = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    return {"dtype": _DTYPES[dtype], "bdata": base64.b64encode(array.tobytes()).decode("ascii")}


def compressed(value: object) -> str:
    """JSON, compressed and in base64, so that it may stand inside a script element whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=4, mtime=0)).decode("ascii")


def time_unit(makespan_s: float) -> tuple[str, float]:
    """(unit, units per second) in which times of a step read well."""
    return ("s", 1.0) if makespan_s >= 1.0 else ("ms", 1e3) if makespan_s >= 1e-3 else ("us", 1e6)
