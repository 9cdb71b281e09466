"""Fitted collective constants of a machine, as `python -m simpar.calibration.fit collectives` writes them."""

from __future__ import annotations

from simpar.specs.base import Spec


class CollectiveConstants(Spec):
    """Constants of the collective price models; see docs/formulas.md."""
