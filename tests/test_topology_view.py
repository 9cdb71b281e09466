"""The drawing of a cluster: it builds for every machine, says the right counts, and stands alone as a page."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from simpar.output import offline
from simpar.report.topology_view import table_rows, topology_figure, topology_page
from simpar.specs.hardware import load_hardware, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_every_machine_can_be_drawn(name: str) -> None:
    hw = load_hardware(name)
    figure = topology_figure(hw, 1 if hw.fabric.kind == "none" else 300)
    drawn = {trace.name: len(trace.x) for trace in figure.data if trace.name}
    assert drawn.get("gpu", drawn.get("chip", 0)) >= min(hw.gpus_per_node, 2)
    assert all(x is not None for trace in figure.data if trace.name for x in trace.x)


def test_counts_of_a_superpod_are_on_the_drawing() -> None:
    texts = " ".join(a.text for a in topology_figure(load_hardware("dgx-h100"), 127).layout.annotations)
    assert "32 leaves: 8 for 32 nodes" in texts
    assert "16 spines: one pod" in texts
    assert "450 GB/s per GPU" in texts
    assert "core" not in texts
    assert "32 core planes" in " ".join(a.text for a in topology_figure(load_hardware("dgx-h100"), 200).layout.annotations)


def test_drawn_edges_are_links_of_the_cluster() -> None:
    """Lines of a small cluster: GPU to 4 NVSwitches, to PCIe, to NIC, to leaf, leaves to spines."""
    figure = topology_figure(load_hardware("dgx-h100"), 64)
    lines = sum(x is None for x in figure.data[0].x)
    assert lines == 8 * 4 + 8 + 8 + 8 + 8 * 8


def test_page_stands_alone() -> None:
    with offline():
        page = topology_page(load_hardware("gb200-nvl72"), 36)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)\s*=\s*['\"]?(https?:)?//", page)
    assert "GB200" in page
    assert page.count("<tr>") == len(table_rows(load_hardware("gb200-nvl72"), 36))


def test_plotly_is_imported_only_when_drawing() -> None:
    code = "import sys, simpar.report.topology_view; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
