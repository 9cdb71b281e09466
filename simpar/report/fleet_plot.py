"""Every node of a cluster as one cell, pod below pod: what a drawing of one node, or of one replica, leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from simpar.topology.cluster import Cluster

COLUMNS: Final = 128
"""Nodes in a row at most."""
MAX_NODES: Final = 32_768


def fleet_figure(cluster: Cluster, value: Callable[[int], int], what: str) -> dict[str, Any] | None:
    """A map of all nodes in rows by pod; None for a single node.

    Args:
        value: node -> the number that colours it.
        what: that number's name.
    """
    count = min(cluster.num_nodes, MAX_NODES)
    if count < 2:
        return None
    net = cluster.net
    group = net.nodes_per_group if net.slots else count
    pod = min(group * net.groups_per_pod if net.slots else count, count)
    width = min(max(COLUMNS // group * group, group) if group <= COLUMNS else COLUMNS, pod)
    cells: list[list[int | None]] = []
    nodes: list[list[str]] = []
    starts: dict[int, str] = {}
    for first in range(0, count, pod):
        starts[len(cells)] = f"pod {first // pod}"
        for begin in range(first, min(first + pod, count), width):
            row = range(begin, min(begin + width, first + pod, count))
            short = [None] * (width - len(row))
            cells.append([*(value(node) for node in row), *short])
            nodes.append([f"node {n}, leaf group {n // group}, pod {n // pod}: {what} {value(n)}" for n in row] + [""] * len(short))
    trace = {
        "type": "heatmap", "z": cells, "customdata": nodes, "hovertemplate": "%{customdata}<extra></extra>", "xgap": 1, "ygap": 1,
        "colorscale": "Cividis", "hoverongaps": False, "colorbar": {"title": {"text": what}, "thickness": 12},
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"nodes, {width} to a row"}, "showgrid": False, "zeroline": False},
        "yaxis": {
            "tickvals": list(starts), "ticktext": list(starts.values()), "autorange": "reversed", "showgrid": False,
            "zeroline": False, "automargin": True,
        },
    }  # fmt: skip
    whole = count == cluster.num_nodes
    notes = [f"All {count:,} nodes." if whole else f"The first {count:,} of {cluster.num_nodes:,} nodes."]
    height = 140 + min(max(len(cells) * 14, 40), 900)
    return {"id": "fleet", "variants": [{"label": "", "data": [trace], "layout": layout}], "height": height, "notes": notes}
