"""Where the ranks of a mesh sit: what prices of blocks depend on, as short keys of memos."""

from __future__ import annotations

from simpar.searching.choice import Group, Variant
from simpar.searching.memo import kept
from simpar.searching.space import Space


class Sites:
    """The sites of the meshes of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._places: dict[object, int] = {}

    @kept
    def of(self, group: Group) -> tuple[int, ...]:
        """Where the groups that communicate inside a block sit: all of a mesh that block prices depend on.

        tp, cp, ep, etp, and a number for each of their placements (and that of a hop between the neighbours of a ring).
        """
        mesh, hardware, nodes = self.space.mesh(group), self.space.template.hardware, self.space.template.cluster.num_nodes
        places = [mesh.placement(d, hardware, nodes) for d in ("tp", "cp", "ep", "etp")]
        if group.cp > 1:
            places.append(mesh.hops("cp", hardware, nodes)[0][0])
        # Placements are slow to tell apart, and memos ask for them all the time.
        numbers = (self._places.setdefault(place, len(self._places)) for place in places)
        return (group.tp, group.cp, group.ep, group.etp, *numbers)

    @staticmethod
    def dense(site: tuple[int, ...], batch: int, variant: Variant) -> tuple[object, ...]:
        """What work without experts depends on: of a site all but expert parallelism."""
        v = variant
        return (*site[:2], *site[4:6], *site[8:], batch, v.sequence_parallel, v.cp_style, v.overlap_tp, v.precision)

    @kept
    def with_host(self, group: Group) -> tuple[int, ...]:
        """`of` and what else blocks depend on: whether there is a pipeline, and whether it leaves the node."""
        mesh, hardware, nodes = self.space.mesh(group), self.space.template.hardware, self.space.template.cluster.num_nodes
        far = group.pp > 1 and mesh.hops("pp", hardware, nodes)[0][0].num_nodes > 1
        return (*self.of(group), (group.pp > 1) + far)

    @kept
    def neighbours(self, group: Group) -> frozenset[int]:
        """Where pairs of neighbouring pipeline ranks sit, a number for each placement."""
        pairs = self.space.mesh(group).pairs("pp", self.space.template.hardware, self.space.template.cluster.num_nodes)
        return frozenset(self._places.setdefault(place, len(self._places)) for place in dict.fromkeys(pairs))

    def with_batch(self, group: Group, batch: int, variant: Variant) -> tuple[int, ...]:
        """`with_host`, and whether expert exchanges could be hidden but for the other micro-batch that a step lacks."""
        single = variant.overlap_ep and self.space.template.training.global_batch_size == batch * group.dp
        return (*self.with_host(group), single)


__all__ = ["Sites"]
