"""A drawing of a cluster: one node in detail, then its leaves, spines and core, with counts and bandwidths.

What is alike everywhere is drawn once: the first node, its leaf group's leaves, a few spines of its pod, a few
core planes; counts beside each layer say how many there are. A torus is drawn as its first chips.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from simpar.report.fleet_plot import fleet_figure
from simpar.report.page import Cards
from simpar.report.tables import Table
from simpar.specs.hardware import HardwareProfile
from simpar.topology.cluster import Cluster
from simpar.topology.describe import summary
from simpar.topology.graph import nvswitches
from simpar.topology.scaleup import Torus

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHOWN = 8
"""Switches of a layer that are drawn; more are counted."""
WIDTH = 100.0
COLORS = {
    "gpu": "#3b7a57", "nvswitch": "#7fb069", "pcie": "#9a8c98", "nic": "#c9ada7", "leaf": "#4a6fa5", "spine": "#2f4b7c",
    "core": "#1d2f52", "chip": "#3b7a57", "domain": "#7fb069",
}  # fmt: skip
"""Colours of pipeline ranks, in turn."""


@dataclass
class _Drawing:
    """What is collected before plotly sees it: vertices by kind, edges by pair of kinds, text beside the layers."""

    at: dict[str, tuple[float, float]] = field(default_factory=dict)
    kind: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[float, float, str, str]] = field(default_factory=list)
    """x, y, text, anchor."""

    def row(self, names: Iterable[str], y: float, kind: str, left: float = 0.0, right: float = WIDTH) -> None:
        """Vertices of one kind spread evenly over a row."""
        listed = list(names)
        step = (right - left) / max(1, len(listed))
        for i, name in enumerate(listed):
            self.at[name], self.kind[name], self.text[name] = (left + step * (i + 0.5), y), kind, name


def _rate(bytes_per_s: float) -> str:
    """Bytes per second with the precision a drawing needs."""
    for unit, size in (("PB/s", 1e15), ("TB/s", 1e12)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _node_rows(drawing: _Drawing, cluster: Cluster) -> None:
    """The first node: GPUs, what joins them, PCIe switches, NICs."""
    hw, slots = cluster.hardware, cluster.net.slots
    gpus = [f"gpu:{g}" for g in range(hw.gpus_per_node)]
    drawing.row(gpus, 1.0, "gpu")
    scale = f"{_rate(hw.scale_up.bandwidth.value)} per GPU"
    per_domain = f"{hw.scale_up.kind}, {min(hw.domain_size, cluster.num_gpus)} GPUs: {scale}"
    drawing.notes.append((WIDTH + 2, 1.0, f"{hw.gpus_per_node} x {hw.gpu.name} in a node", "left"))
    switch = hw.scale_up.kind == "nvswitch"
    if switch:
        drawing.row([f"nvswitch:0.{i}" for i in range(min(SHOWN, nvswitches(hw)))], 0.0, "nvswitch", 15, WIDTH - 15)
        drawing.edges += [(g, s) for g in gpus for s in drawing.at if s.startswith("nvswitch")]
        per_domain = f"{nvswitches(hw)} NVSwitch, " + per_domain.partition(", ")[2]
    elif hw.scale_up.kind in ("xgmi", "nvlink-mesh"):
        drawing.edges += [(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :]]
        for i, gpu in enumerate(gpus):  # bent into an arc, so that the links of the mesh do not lie on one line
            across = (2 * i + 1) / len(gpus) - 1
            drawing.at[gpu] = (drawing.at[gpu][0], 1.0 - 0.8 * (1 - across * across))
    drawing.notes.append((WIDTH + 2, 0.0 if switch else 0.55, per_domain, "left"))
    pcie = list(dict.fromkeys(cluster.pcie_vertex(g) for g in range(hw.gpus_per_node)))
    drawing.row(pcie, 2.0, "pcie")
    drawing.edges += [(f"gpu:{g}", cluster.pcie_vertex(g)) for g in range(hw.gpus_per_node)]
    host = f"{_rate(hw.node.pcie_bandwidth.value)} per GPU"
    drawing.notes.append((WIDTH + 2, 2.0, f"{len(pcie)} PCIe: {host}", "left"))
    if slots and cluster.num_nodes > 1:
        drawing.row([f"nic:0.{s}" for s in range(slots)], 3.0, "nic")
        for slot in range(slots):
            path = cluster.path_of(cluster.offsets[3] + slot)
            drawing.edges += [(path[0], path[1]), (path[1], path[2])]
        label = f"{hw.nic.count} NICs ({hw.nic.kind}): {_rate(hw.nic.bandwidth.value)} each"
        drawing.notes.append((WIDTH + 2, 3.0, label, "left"))


def _switch_rows(drawing: _Drawing, cluster: Cluster) -> None:
    """The leaves of the first leaf group, some spines of the first pod, some core planes."""
    net, fabric = cluster.net, cluster.hardware.fabric
    leaves = [f"leaf:{i}" for i in range(net.leaves_per_group)]
    drawing.row(leaves, 4.2, "leaf")
    group = min(net.nodes_per_group, net.num_nodes)
    label = f"{net.num_leaves} leaves: {len(leaves)} for {group} nodes"
    drawing.notes.append((WIDTH + 2, 4.2, label, "left"))
    if not net.spines:
        return
    spines = [f"spine:0.{i}" for i in range(min(SHOWN, net.spines))]
    drawing.row(spines, 5.6, "spine")
    drawing.edges += [(a, b) for a in leaves for b in spines]
    uplink = _rate(net.leaf_uplink_bytes_per_s * net.spines)
    drawing.notes.append((WIDTH + 2, 4.9, f"{uplink} up from a leaf, {fabric.oversubscription:g}:1", "left"))
    pods = f"{net.spines} a pod, {net.num_pods} pods" if net.has_core else "one pod"
    drawing.notes.append((WIDTH + 2, 5.6, f"{net.num_pods * net.spines} spines: {pods}", "left"))
    if net.has_core:
        cores = [f"core:{i}" for i in range(min(SHOWN, net.spines))]
        drawing.row(cores, 7.0, "core")
        drawing.edges += list(zip(spines, cores, strict=True))
        up = f"{_rate(net.spine_uplink_bytes_per_s)} up from a spine, {fabric.pod_oversubscription:g}:1"
        drawing.notes.append((WIDTH + 2, 6.3, up, "left"))
        drawing.notes.append((WIDTH + 2, 7.0, f"{net.spines} core planes", "left"))


def _torus_rows(drawing: _Drawing, torus: Torus) -> None:
    """The first chips of a torus, at most 4 along each dimension, in parallel projection."""
    sizes = (*torus.shape, 1, 1)[:3]
    shown = tuple(min(4, s) for s in sizes)
    names = {}
    for z in range(shown[2]):
        for y in range(shown[1]):
            for x in range(shown[0]):
                chip = x + torus.shape[0] * (y + (sizes[1] * z))
                name = names[x, y, z] = f"gpu:{chip}"
                drawing.at[name] = (8 + 24 * x + 7 * z, 0.5 + 1.6 * y + 0.42 * z)
                drawing.kind[name], drawing.text[name] = "chip", name
    for (x, y, z), name in names.items():
        near = ((x + 1, y, z), (x, y + 1, z), (x, y, z + 1))
        drawing.edges += [(name, names[n]) for n in near if n in names]
    shape = " x ".join(str(s) for s in torus.shape)
    part = "" if shown == sizes else f"{' x '.join(str(s) for s in shown)} of a "
    label = f"{part}torus of {shape} chips: {_rate(torus.link_bytes_per_s)} a link and direction"
    drawing.notes.append((WIDTH / 2, -0.4, label, "center"))


def topology_figure(hardware: HardwareProfile | Cluster, num_nodes: int | None = None) -> go.Figure:
    """A drawing of `num_nodes` nodes of `hardware` (or of a `Cluster`).

    Raises:
        InputError: a machine without a network on several nodes.
    """
    import plotly.graph_objects as go

    cluster = hardware if isinstance(hardware, Cluster) else Cluster(hardware, num_nodes or 1)
    drawing = _Drawing()
    torus = cluster.domains if isinstance(cluster.domains, Torus) else None
    if torus is not None:
        _torus_rows(drawing, torus)
    else:
        _node_rows(drawing, cluster)
        if cluster.net.slots and cluster.num_nodes > 1:
            _switch_rows(drawing, cluster)
    title, about = _title(cluster), cluster.hardware.description
    figure = go.Figure([_edge_trace(drawing), *_vertex_traces(drawing)])
    for x, y, text, anchor in drawing.notes:
        figure.add_annotation(x=x, y=y, text=escape(text), showarrow=False, xanchor=anchor, font={"size": 13})
    figure.update_layout(
        title={"text": f"{escape(title)}<br><sup>{escape(about)}</sup>", "x": 0.02},
        margin={"l": 20, "r": 20, "t": 90, "b": 20},
        height=640,
        template="plotly_white",
        legend={"orientation": "h", "y": -0.02},
        hovermode="closest",
    )
    figure.update_xaxes(visible=False, range=[-3, WIDTH + (3 if torus else 62)])
    figure.update_yaxes(visible=False)
    return figure


def _title(cluster: Cluster) -> str:
    """What is drawn."""
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes:,} nodes"
    return f"{cluster.hardware.name}: {nodes}, {cluster.num_gpus:,} GPUs"


def _edge_trace(drawing: _Drawing) -> go.Scatter:
    import plotly.graph_objects as go

    xs: list[float | None] = []
    ys: list[float | None] = []
    for a, b in drawing.edges:
        (x0, y0), (x1, y1) = drawing.at[a], drawing.at[b]
        xs += [x0, x1, None]
        ys += [y0, y1, None]
    line = {"color": "#bcbcbc", "width": 1}
    return go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip", showlegend=False)


def _vertex_traces(drawing: _Drawing) -> list[go.Scatter]:
    """One trace for each kind, so that the legend names them."""
    import plotly.graph_objects as go

    traces = []
    for kind in dict.fromkeys(drawing.kind.values()):
        names = [n for n, k in drawing.kind.items() if k == kind]
        marker: dict[str, Any] = {
            "size": 18,
            "color": COLORS[kind],
            "symbol": "square",
            "line": {"width": 1, "color": "#333"},
        }
        traces.append(
            go.Scatter(
                x=[drawing.at[n][0] for n in names],
                y=[drawing.at[n][1] for n in names],
                mode="markers",
                marker=marker,
                name=kind,
                hovertext=[drawing.text[n] for n in names],
                hoverinfo="text",
            )
        )
    return traces


def topology_page(hardware: HardwareProfile | Cluster, num_nodes: int | None) -> str:
    """The drawing and a table of counts as one self-contained page.

    Raises:
        InputError: as `topology_figure`.
    """
    cluster = hardware if isinstance(hardware, Cluster) else Cluster(hardware, num_nodes or 1)
    drawn = topology_figure(cluster).to_plotly_json()
    layout = {k: v for k, v in drawn["layout"].items() if k not in ("title", "template")} | {"margin": dict.fromkeys("lrtb", 20)}
    cards = Cards(f"<h1>{escape(_title(cluster))}</h1><p>{escape(cluster.hardware.description)}</p>")
    figure = {"id": "topology", "variants": [{"label": "", "data": drawn["data"], "layout": layout}], "height": layout["height"]}
    cards.draw("One node and its way through the fabric", {**figure, "zoom": True})
    fleet = fleet_figure(cluster, lambda node: node // max(cluster.net.nodes_per_group, 1), "leaf group")
    if fleet is not None:
        cards.draw("Every node, pod by pod", fleet)
    cards.add("The whole cluster", Table(("", ""), table_rows(cluster)).html())
    return cards.html(cluster.hardware.name)


def table_rows(hardware: HardwareProfile | Cluster, num_nodes: int | None = None) -> list[tuple[str, str]]:
    """`summary` as label and text, for the page and for the terminal."""
    found = summary(hardware, num_nodes)
    switches, links = found["switches"], found["links"]
    return [
        ("GPUs", f"{found['num_gpus']:,} x {found['gpu']} in {found['num_nodes']:,} nodes"),
        ("Scale-up domains", f"{found['scale_up_domains']:,} of {found['gpus_per_domain']:,} GPUs"),
        ("Scale-up bandwidth", f"{_rate(found['scale_up_bytes_per_s_per_gpu'])} per GPU and direction"),
        ("NVSwitches", f"{found['nvswitches']:,}"),
        ("NICs", f"{found['nics']:,}; {_rate(found['nic_bytes_per_s_per_gpu'])} per GPU and direction"),
        ("Fabric", f"{found['fabric']}; widest tier crossed: {found['widest_tier']}"),
        ("Leaf groups, pods", f"{found['leaf_groups']:,}, {found['pods']:,}"),
        ("Switches", f"{switches['leaf']:,} leaf, {switches['spine']:,} spine, {switches['core']:,} core"),
        ("One-way links", ", ".join(f"{n:,} {k.replace('_', ' ')}" for k, n in links.items())),
        ("Bisection", f"{_rate(found['bisection_bytes_per_s'])} one way"),
        ("Oversubscription", f"{found['oversubscription']:g}:1 across the widest tier"),
        ("Switches on the longest route", str(found["switches_on_longest_route"])),
    ]


def topology_report(hardware: HardwareProfile | Cluster, num_nodes: int | None = None) -> RenderableType:
    """What `simpar topology` prints."""
    table = RichTable(box=None, show_header=False, pad_edge=False)
    for label, text in table_rows(hardware, num_nodes):
        table.add_row(label, text)
    name = (hardware.hardware if isinstance(hardware, Cluster) else hardware).name
    return Group(Text(name, style="bold underline"), table)
