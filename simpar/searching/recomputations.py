"""What the stages of a pipeline may recompute, all choices of it at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simpar.program.program import IntArray
from simpar.searching.stages import Stages

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Recomputations:
    """What the stages of a cut may recompute.

    Attributes:
        texts: of each recomputation.
        names: block tables that they need; table: int array [R], which of them each needs.
        stages: the cut under all of them.
    """

    texts: tuple[str, ...]
    names: tuple[str, ...]
    table: IntArray
    stages: Stages

    def only(self, names: BoolArray) -> Recomputations:
        """Those of some block tables, bool array [names]."""
        kept = tuple(n for n, known in zip(self.names, names.tolist(), strict=True) if known)
        found = self.take(np.flatnonzero(names[self.table]))
        return replace(found, names=kept, table=(np.cumsum(names) - 1)[found.table])

    def take(self, rows: IntArray) -> Recomputations:
        """Some of them, with all block tables."""
        texts = tuple(self.texts[row] for row in rows.tolist())
        return Recomputations(texts, self.names, self.table[rows], self.stages.take(rows))
