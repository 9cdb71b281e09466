"""Fitted kernel constants of a GPU, as `python -m simpar.calibration.fit kernels` writes them."""

from __future__ import annotations

from simpar.specs.base import Spec


class KernelConstants(Spec):
    """Constants of the kernel price models; see docs/formulas.md."""
