"""What a GEMM costs more where rows of its operands do not start on 16 bytes.

Rows are n or k elements long in memory (x [m, k], W [n, k], y [m, n] and their gradients), whatever the direction. Kernels for
tensor cores load 16 bytes at once and asynchronously (PTX cp.async: 16, 8 or 4 bytes); rows of an odd number of 16-bit elements
leave 2, so that cuBLAS falls back to kernels of the generation before, named ..._75_..._align1 in traces on an A100.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from simpar.specs.calibration import constant

Array = NDArray[np.float64]
ASYNC_BYTES: Final = 4.0
"""Least that an asynchronous copy moves."""
ODD_ROWS: Final = "kernels.odd_rows"
"""Rows that start on 2 bytes; from the traced heads of vTrain (A100, rows of 50,257 words). At 2.5, GPT-2 124M in torch gains 22
% on an A100 from 50,304 words instead of 50,257; nanoGPT's
author measured about 25 % (A. Karpathy, 2023-02-03)."""
LEAST: Final = 64.0
"""Narrower products are not what tensor cores are used for (routers of few experts, gates)."""


def unaligned(n: Array, k: Array, element_bytes: float) -> Array:
    """Factor on the time of products with rows of n and of k elements [shapes]."""
    n, k = np.asarray(n, dtype=float), np.asarray(k, dtype=float)

    def off(step: float) -> Array:
        return np.asarray((np.mod(n * element_bytes, step) != 0.0) | (np.mod(k * element_bytes, step) != 0.0))

    factor = np.where(off(ASYNC_BYTES), constant(ODD_ROWS), 1.0)
    return np.asarray(np.where(np.minimum(n, k) < LEAST, 1.0, factor))
