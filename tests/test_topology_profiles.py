"""Shipped hardware profiles: complete, sourced, and equal to published link figures."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from simpar.errors import InputError
from simpar.specs.hardware import HardwareProfile, Sourced, load_hardware, profile_names

EXPECTED = {
    "dgx-h100", "dgx-h100-96gb-500w", "grand-teton-h100-roce", "dgx-h200", "hgx-h800", "dgx-b200", "dgx-b300",
    "gb200-nvl72", "gb300-nvl72", "dgx-a100-80gb", "dgx-a100-40gb", "hgx-a800", "a100-pcie", "l40s", "rtx-4090",
    "gh200", "mi300x", "gtx-580-pair", "tpu-v4", "tpu-v5p", "cpu-gloo", "gh200-quad", "hgx-a100-4gpu-40gb", "hgx-h100-4gpu-64gb",
    "hgx-a100-4gpu-64gb", "hgx-a100-4gpu-80gb",
    "dgx1-v100-16gb", "dgx1-v100-32gb", "dgx2-v100-32gb", "t4", "l4", "a10", "a10g", "rtx-3090", "rtx-a6000",
    "rtx-6000-ada", "h100-nvl", "mi250x", "mi325x", "mi350x", "mi355x", "tpu-v5e", "tpu-v6e", "rtx-5090",
    "rtx-pro-6000", "a40", "l40", "mi100", "mi210", "rtx-3090-ti", "rtx-pro-4000", "rtx-8000", "gb10",
    "rtx-4060-laptop", "aws-p6-b200", "aws-p6-b300",
}  # fmt: skip
GB = 1e9


def sourced(spec: Any, path: str = "") -> Iterator[tuple[str, Sourced[Any]]]:
    """Every sourced number below `spec`, with its path."""
    if isinstance(spec, Sourced):
        yield path, spec
    elif isinstance(spec, BaseModel):
        for name in type(spec).model_fields:
            yield from sourced(getattr(spec, name), f"{path}.{name}")
    elif isinstance(spec, dict):
        for name, value in spec.items():
            yield from sourced(value, f"{path}.{name}")


def test_every_named_machine_is_shipped() -> None:
    assert set(profile_names()) >= EXPECTED


@pytest.mark.parametrize("name", profile_names())
def test_every_number_has_a_source_and_makes_sense(name: str) -> None:
    hw = load_hardware(name)
    assert hw.name == name
    numbers = dict(sourced(hw.model_copy(update={"kernels": None, "collectives": None})))
    assert len(numbers) >= 10
    for path, number in numbers.items():
        assert len(number.source) > 8, path
    assert hw.gpu.peak_flops
    assert hw.peak_flops_per_s("bf16") >= hw.peak_flops_per_s("fp32") or hw.gpu.architecture in ("fermi", "cpu")
    if {"bf16", "fp8"} <= set(hw.gpu.peak_flops):
        assert hw.peak_flops_per_s("fp8") == pytest.approx(2 * hw.peak_flops_per_s("bf16"), rel=0.02)
    assert 0 < hw.gpu.memory.value < 400e9
    assert hw.nic.count == 0 or hw.nic.bandwidth.value > 0
    size, per_node = hw.domain_size, hw.gpus_per_node
    assert size % per_node == 0 or per_node % size == 0
    if size > per_node and hw.fabric.kind != "torus":
        assert hw.fabric.nodes_per_leaf_group * per_node % size == 0, "a rack lies under one leaf group"
    if hw.scale_up.torus:
        assert prod(hw.scale_up.torus) == size


@pytest.mark.parametrize(
    ("name", "scale_up", "node_network"),
    [
        ("dgx-h100", 450, 400), ("dgx-h200", 450, 400), ("hgx-h800", 200, 400), ("dgx-a100-80gb", 300, 200),
        ("dgx-b200", 900, 400), ("dgx-b300", 900, 800), ("gb200-nvl72", 900, 200), ("gb300-nvl72", 900, 400),
        ("aws-p5-h100", 450, 400), ("aws-p6-b200", 900, 400), ("aws-p6-b300", 900, 800),
        ("aws-p4d-a100", 300, 50), ("gcp-a3-mega-h100", 450, 200), ("mi300x", 448, 400),
        ("tpu-v4", 270, 25), ("tpu-v5p", 540, 25),
        ("tpu-v5e", 180, 25), ("tpu-v6e", 360, 25), ("mi325x", 448, 400), ("mi355x", 535.5, 400),
        ("dgx2-v100-32gb", 150, 100), ("gh200-quad", 450, 100), ("hgx-a100-4gpu-40gb", 300, 100), ("h100-nvl", 300, 100),
    ],
)  # fmt: skip
def test_links_in_gigabytes_a_second(name: str, scale_up: float, node_network: float) -> None:
    hw = load_hardware(name)
    assert hw.scale_up.bandwidth.value == pytest.approx(scale_up * GB)
    assert hw.nic.count * hw.nic.bandwidth.value == pytest.approx(node_network * GB)


def test_llama_pod_is_3072_gpus() -> None:
    fabric = load_hardware("grand-teton-h100-roce").fabric
    assert fabric.nodes_per_leaf_group * 8 == 16
    assert fabric.nodes_per_leaf_group * fabric.leaf_groups_per_pod * 8 == 3072
    assert fabric.pod_oversubscription == 7


def test_scale_up_equals_the_table_of_links() -> None:
    """links.csv: per device and direction, for the machines it names."""
    table = Path(__file__).parent / "data" / "measured" / "collectives" / "links.csv"
    with table.open() as file:
        rows = {(r["name"], r["hardware"]): r for r in csv.DictReader(file)}
    pairs = {
        ("NVLink3", "A100 SXM"): "dgx-a100-80gb", ("NVLink4", "H100/H200 SXM"): "dgx-h100",
        ("NVLink4 cut", "H800"): "hgx-h800", ("NVLink5", "B200/GB200/B300"): "gb200-nvl72",
        ("xGMI MI300X", "MI300X/MI325X"): "mi300x", ("ICI v4", "TPU v4p"): "tpu-v4", ("ICI v5p", "TPU v5p"): "tpu-v5p",
        ("xGMI MI355X", "MI350X/MI355X"): "mi355x", ("ICI v5e", "TPU v5e"): "tpu-v5e", ("ICI v6e", "TPU v6e"): "tpu-v6e",
    }  # fmt: skip
    for key, name in pairs.items():
        spec = load_hardware(name).scale_up
        assert spec.bandwidth.value == pytest.approx(float(rows[key]["GBps_per_device_per_dir"]) * GB), name
        assert spec.links_per_gpu == int(rows[key]["links_per_device"]), name


def test_unknown_profile_names_the_closest() -> None:
    with pytest.raises(InputError, match="did you mean 'dgx-h100'"):
        load_hardware("dgx-h10")


def test_broken_profile_lists_every_violation(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[1] / "hardware_profiles" / "dgx-h100.toml").read_text()
    broken = text.replace('"3.35 TB/s"', "3.35").replace("gpus_per_node = 8", "gpus_per_node = 0")
    broken = broken.replace("nodes_per_leaf_group", "nodes_per_leaf")
    (tmp_path / "mine.toml").write_text(broken)
    with pytest.raises(InputError) as caught:
        load_hardware(str(tmp_path / "mine.toml"))
    message = str(caught.value)
    for part in (
        "mine.toml",
        "gpu.memory_bandwidth.value",
        "with a unit is needed",
        "gpus_per_node",
        "nodes_per_leaf_group",
    ):
        assert part in message
    assert len(caught.value.violations) == 3
    assert isinstance(load_hardware("dgx-h100"), HardwareProfile)
