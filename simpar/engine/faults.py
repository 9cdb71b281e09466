"""Bad links by name: slow, down or flapping."""

from __future__ import annotations

from simpar.engine.contention import LinkSchedule
from simpar.errors import InputError, Violation
from simpar.topology.cluster import Cluster


def link_fault(
    cluster: Cluster, link: str, factor: float, period_s: float | None = None, down_s: float | None = None
) -> LinkSchedule:
    """The capacity of `link` (a name or an index) over time: at `factor` for good, or for `down_s` of every `period_s`.

    Raises:
        InputError: no such link, or a period without its bad part.
    """
    names = cluster.links.names
    if link.isdigit() and int(link) < cluster.num_links:
        index = int(link)
    else:
        found = next((i for i in range(cluster.num_links) if names[i] == link), None)
        if found is None:
            some = ", ".join(names[i] for i in range(0, cluster.num_links, max(cluster.num_links // 6, 1)))
            rule = f"the cluster has no such link, or index below {cluster.num_links}"
            raise InputError([Violation("effects.link_faults.link", link, rule, f"names look like {some}")])
        index = found
    if (period_s is None) != (down_s is None):
        raise InputError([Violation("effects.link_faults", link, "a flapping link needs both period and down")])
    if period_s is None or down_s is None:
        return LinkSchedule(index, (0.0,), (factor,))
    if not 0.0 < down_s < period_s:
        raise InputError([Violation("effects.link_faults.period", period_s, "must exceed down, the bad part of it", f"> {down_s}")])
    return LinkSchedule(index, (0.0, down_s), (factor, 1.0), period_s)
