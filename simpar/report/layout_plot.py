"""The layout on the machine: nodes x GPUs coloured by what each GPU is in the mesh, and where each group sits."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from simpar.program.program import IntArray
from simpar.report.fleet_plot import fleet_figure
from simpar.result.result import Result
from simpar.topology.cluster import Cluster

MAX_RANKS = 1024
"""More GPUs than this are shown as one pipeline replica."""
MAX_NODES = 160
FEW_RANKS = 64
"""A replica of fewer GPUs says little: the first GPUs of the job are shown."""
_DIMENSIONS = {
    "pp": "pipeline rank", "tp": "tensor rank", "cp": "context rank", "dp": "data rank", "ep": "expert rank",
}  # fmt: skip


def shown_gpus(result: Result) -> tuple[IntArray, str]:
    """Global ranks drawn, ascending, and what of the job they are: all, or the nodes that hold one pipeline replica."""
    mesh, per_node = result.layout.mesh, result.layout.hardware.gpus_per_node
    if mesh.world_size <= MAX_RANKS:
        return np.arange(mesh.world_size), f"All {mesh.world_size:,} GPUs."
    contexts = mesh.cp if mesh.tp * mesh.cp * mesh.pp <= MAX_RANKS else 1
    wanted = ((t, c, p) for p in range(mesh.pp) for c in range(contexts) for t in range(mesh.tp))
    replica = np.unique([mesh.rank(tp=t, cp=c, pp=p) for t, c, p in islice(wanted, MAX_RANKS)])
    part = "one pipeline replica (dp 0" + (")" if contexts == mesh.cp else ", cp 0)")
    nodes = np.unique(replica // per_node)
    whole = (nodes[:, None] * per_node + np.arange(per_node)).ravel()
    whole = whole[whole < mesh.world_size]
    if len(replica) < len(whole) <= MAX_RANKS:
        replica, part = whole, f"the nodes of {part}"
    if len(replica) < FEW_RANKS:
        return np.arange(4 * FEW_RANKS), f"The first {4 * FEW_RANKS} of {mesh.world_size:,} GPUs."
    return replica, f"{len(replica):,} of {mesh.world_size:,} GPUs: {part}."


def layout_figure(result: Result) -> dict[str, Any]:
    """A heat map of nodes x GPUs; one view per dimension with more than one rank."""
    mesh, per_node = result.layout.mesh, result.layout.hardware.gpus_per_node
    ranks, text = shown_gpus(result)
    nodes, column = np.unique(ranks // per_node, return_inverse=True)
    note = text
    if len(nodes) > MAX_NODES:
        keep = column < MAX_NODES
        ranks, column, nodes = ranks[keep], column[keep], nodes[:MAX_NODES]
        note += f" The first {MAX_NODES} nodes are drawn."
    at = [mesh.coordinates(int(rank)) for rank in ranks]
    views = [d for d in _DIMENSIONS if getattr(mesh, d) > 1] or ["pp"]
    height = min(per_node, mesh.world_size)
    hover = np.full((height, len(nodes)), "", dtype=object)
    for rank, node, where in zip(ranks.tolist(), column.tolist(), at, strict=True):
        places = ", ".join(f"{d} {where[d]}" for d in _DIMENSIONS if getattr(mesh, d) > 1)
        hover[rank % per_node % height, node] = f"GPU {rank}: {places}" if places else f"GPU {rank}"
    variants = [_view(d, ranks, column, nodes, at, hover, per_node) for d in views]
    return {
        "id": "layout", "variants": variants, "choose": "colour by", "height": 150 + 24 * height, "notes": [note],
    }  # fmt: skip


def is_regular(result: Result) -> bool:
    """Whether ranks lie on nodes as one mesh says: not where nodes, or pipeline ranks, have unequal numbers of GPUs."""
    layout = result.layout
    sizes = {host.hardware.gpus_per_node for host in layout.hosts}
    return len(sizes) < 2 and layout.plan.stage_tp is None and not layout.replicas_differ


def fleet(result: Result) -> dict[str, Any] | None:
    """Every node of a job too large for `layout_figure`, by the dimension that changes most slowly; None for a smaller job."""
    mesh, layout = result.layout.mesh, result.layout
    if mesh.world_size <= MAX_RANKS or not is_regular(result):
        return None
    cluster, per_node = Cluster(layout.hardware, layout.scenario.cluster.num_nodes), layout.hardware.gpus_per_node
    slowest = "pp" if mesh.pp > 1 else "dp"
    return fleet_figure(cluster, lambda node: int(mesh.coordinates(node * per_node)[slowest]), _DIMENSIONS[slowest])


def _view(dimension: str, ranks: IntArray, column: IntArray, nodes: IntArray, at: list[dict[str, int]],
          hover: np.ndarray[Any, np.dtype[Any]], per_node: int) -> dict[str, Any]:  # fmt: skip
    height = hover.shape[0]
    value: list[list[int | None]] = [[None] * len(nodes) for _ in range(height)]
    label = [[""] * len(nodes) for _ in range(height)]
    for rank, node, where in zip(ranks.tolist(), column.tolist(), at, strict=True):
        row = rank % per_node % height
        value[row][node] = where[dimension]
        label[row][node] = str(where[dimension])
    most = max(where[dimension] for where in at)
    bar = {"title": {"text": dimension}, "thickness": 12, "tick0": 0, "dtick": -(-(most + 1) // 8)}
    trace: dict[str, Any] = {
        "type": "heatmap", "z": value, "customdata": hover.tolist(), "hovertemplate": "%{customdata}<extra></extra>", "xgap": 1,
        "ygap": 1, "colorscale": "Cividis", "hoverongaps": False, "colorbar": bar,
    }  # fmt: skip
    if len(nodes) <= 40:
        trace |= {"text": label, "texttemplate": "%{text}"}
    step = max(len(nodes) // 16, 1)
    layout = {
        "xaxis": {
            "title": {"text": "node"}, "tickvals": list(range(0, len(nodes), step)), "showgrid": False, "zeroline": False,
            "ticktext": [str(n) for n in nodes[::step].tolist()],
        },
        "yaxis": {"title": {"text": "GPU of the node"}, "dtick": 1, "autorange": "reversed", "showgrid": False, "zeroline": False},
    }  # fmt: skip
    return {"label": _DIMENSIONS[dimension], "data": [trace], "layout": layout}


def placements(result: Result) -> list[tuple[str, ...]]:
    """Rows of a table: dimension, ranks in a group, nodes touched, widest tier crossed."""
    layout = result.layout
    found: list[tuple[str, ...]] = []
    for name, text in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline"), ("dp", "data x context")):
        place = layout.placement(name)
        if place.size > 1:
            found.append((f"{text} ({name})", f"{place.size:,}", f"{place.num_nodes:,}", place.tier))
    return found
