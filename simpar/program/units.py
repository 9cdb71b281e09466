"""Which ranks run in lockstep: the members of tensor, context and expert groups, per pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from simpar.parallel.layout import Layout
from simpar.topology.mesh import Mesh


@dataclass(frozen=True)
class Units:
    """The copies of a pipeline and the ranks that each joins.

    Attributes:
        expanded: every rank has streams of its own; False: one role per pipeline rank stands for all.
        members: [copy][pipeline rank] -> roles; copies are the pipelines lowered.
    """

    expanded: bool
    members: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def copies(self) -> int:
        """Pipelines lowered."""
        return len(self.members)

    @classmethod
    def of(cls, layout: Layout, *, expand: bool) -> Units:
        """Folded, or every rank of the mesh."""
        mesh = layout.mesh
        if not expand:
            return cls(False, (tuple((rank,) for rank in range(mesh.pp)),))
        joined = joined_replicas(mesh)
        members = tuple(
            tuple(
                tuple(
                    mesh.rank(tp=t, cp=c, dp=copy * joined + d, pp=p)
                    for d in range(joined) for c in range(mesh.cp) for t in range(mesh.tp)
                )
                for p in range(mesh.pp)
            )
            for copy in range(mesh.dp // joined)
        )  # fmt: skip
        return cls(True, members)


def joined_replicas(mesh: Mesh) -> int:
    """Replicas that advance together: their ranks share an expert group, or a tensor and context group."""
    inner = mesh.tp * mesh.cp
    return min(lcm(inner, mesh.expert_tp * mesh.ep) // inner if mesh.ep > 1 else 1, mesh.dp)
