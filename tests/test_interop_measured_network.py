"""Importers of nccl-tests, topology matrices, NCCL XML and Slurm files: known answers, merged profiles, clear errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.cli import main
from simpar.costs.collective_law import packed
from simpar.costs.collectives import CollectiveModel
from simpar.errors import InputError
from simpar.interop import nccl_tests, nccl_xml, nvidia_topo, slurm
from simpar.interop.profile_parts import merge, read_part, write_part, write_profile
from simpar.interop.tune_collectives import fit, law_of
from simpar.specs.hardware import load_hardware

DATA = Path(__file__).parent / "data" / "interop"
SIZES = [2.0**e for e in range(10, 31)]
MEASURED = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).parent / "data" / "measured"))


def as_json(path: Path, name: str, ranks: int, hosts: int, points: list[tuple[float, float]]) -> Path:
    """A file in the layout of `nccl-tests -J`; times in seconds."""
    devices = [{"rank": r, "group": 0, "pid": r, "hostname": f"h{r * hosts // ranks}", "device": r} for r in range(ranks)]
    bodies = [{"time": t * 1e6, "alg_bw": s / t / 1e9, "bus_bw": s / t / 1e9, "nwrong": 0.0} for s, t in points]
    rows = [{"size": int(s), "count": int(s) // 4, "type": "float", "redop": "sum", "root": "-1",
             "out_of_place": body, "in_place": None}
            for (s, _), body in zip(points, bodies, strict=True)]  # fmt: skip
    config = {"ngpus": 1, "devices": devices}
    table = {"version": 1, "args": [f"/opt/build/{name}_perf", "-b", "1K"], "config": config, "results": rows}
    path.write_text(json.dumps(table))
    return path


def test_text_gives_the_law_it_was_made_with() -> None:
    part = nccl_tests.read(DATA / "all_reduce_8gpu.txt")
    out, inside = part.collectives
    assert (out.collective, out.ranks, out.nodes, len(out.bytes)) == ("all_reduce", 8, 1, 21)
    assert (out.buffers, inside.buffers) == ("out-of-place", "in-place")
    assert out.alpha_s == pytest.approx(20e-6, rel=1e-3)
    assert out.beta_s_per_byte == pytest.approx(1 / 200e9, rel=1e-3)
    assert out.gamma_s_per_sqrt_byte == pytest.approx(6e-9, rel=1e-2)
    assert inside.seconds[-1] == pytest.approx(1.01 * out.seconds[-1], rel=1e-4)


def test_launcher_prefixes_change_nothing(tmp_path: Path) -> None:
    text = (DATA / "all_reduce_8gpu.txt").read_text()
    plain = nccl_tests.read(DATA / "all_reduce_8gpu.txt").collectives[0]
    for prefix in ("[1,0]<stdout>:", "0: "):
        path = tmp_path / "out.txt"
        path.write_text("\n".join(prefix + line for line in text.splitlines()))
        assert nccl_tests.read(path).collectives[0].seconds == plain.seconds


def test_two_tables_in_one_file_stay_apart(tmp_path: Path) -> None:
    text = (DATA / "all_reduce_8gpu.txt").read_text()
    path = tmp_path / "both.txt"
    path.write_text(text + text.replace("all_reduce_perf", "all_gather_perf"))
    assert [s.collective for s in nccl_tests.read(path).collectives] == ["all_reduce"] * 2 + ["all_gather"] * 2


def test_old_output_without_a_name(tmp_path: Path) -> None:
    lines = [line for line in (DATA / "all_reduce_8gpu.txt").read_text().splitlines() if "_perf" not in line]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    assert nccl_tests.read(path).collectives[0].collective == "all_reduce"  # its bus bandwidth factor is 14/8
    assert nccl_tests.read(path, collective="broadcast").collectives[0].collective == "broadcast"


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e-13, 1e-9), st.floats(0, 1e-7))
def test_fit_finds_any_law(alpha: float, beta: float, gamma: float) -> None:
    seconds = [alpha + beta * s + gamma * s**0.5 for s in SIZES]
    found = law_of(SIZES, seconds)
    for s, t in zip(SIZES, seconds, strict=True):
        assert found[0] + found[1] * s + found[2] * s**0.5 == pytest.approx(t, rel=1e-5)
    assert min(found) >= 0


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=6))
def test_fit_is_never_negative(seconds: list[float]) -> None:
    assert min(law_of(SIZES[: len(seconds)], seconds)) >= 0


@pytest.mark.parametrize(
    ("name", "nodes", "rate"),
    [
        ("all_reduce", 1, 150e9),
        ("all_gather", 1, 250e9),
        ("all_gather", 4, 200e9),
        ("all_to_all", 2, 40e9),
        ("all_reduce", 4, 120e9),
    ],
)
def test_merged_profile_prices_what_was_measured(tmp_path: Path, name: str, nodes: int, rate: float) -> None:
    points = [(s, 30e-6 * nodes + s / rate) for s in SIZES]
    part = nccl_tests.read(as_json(tmp_path / "x.json", {"all_to_all": "alltoall"}.get(name, name), 8 * nodes, nodes, points))
    merged = merge("dgx-h100", [part])
    assert not merged.notes
    placement = packed(merged.profile, 8 * nodes, nodes)
    before, after = CollectiveModel(load_hardware("dgx-h100")), CollectiveModel(merged.profile)
    large = [p for p in points if p[0] >= 16 * 2**20]

    def ratios(model: CollectiveModel) -> list[float]:
        return [model.time(name, size, placement).seconds / seconds for size, seconds in large]

    assert abs(median(ratios(before)) - 1) > 0.1
    assert median(ratios(after)) == pytest.approx(1.0, abs=0.01)
    assert all(0.7 < ratio < 1.4 for ratio in ratios(after))  # the base's pipeline fill keeps its shape
    assert "x.json" in repr(merged.profile.collectives)


def test_faster_than_the_links_is_not_taken(tmp_path: Path) -> None:
    part = nccl_tests.read(as_json(tmp_path / "x.json", "all_gather", 8, 1, [(s, s / 5e12) for s in SIZES]))
    merged = merge("dgx-h100", [part])
    assert "faster than the links" in merged.notes[0]
    assert merged.profile.collectives == load_hardware("dgx-h100").collectives


def test_published_series_sets_the_price(tmp_path: Path) -> None:
    """Real all-gathers of 8 A100: the merged price is at least as near as the base's on the large half."""
    import csv

    path = MEASURED / "collectives" / "collectives_fit.csv"
    with path.open() as lines:
        rows = [r for r in csv.DictReader(lines) if r["nodes"] == "1" and r["gpus"] == "8" and r["hardware"].startswith("H100 SXM")
                and r["collective"] == "all_reduce" and r["algo"] == "default"]  # fmt: skip
    first = [r for r in rows if r["set"] == rows[0]["set"]]
    points = sorted({float(r["bytes"]): float(r["time_us"]) * 1e-6 for r in first}.items())
    profile = merge("dgx-h100", [nccl_tests.read(as_json(tmp_path / "x.json", "all_reduce", 8, 1, points))]).profile
    placement = packed(profile, 8, 1)

    def error(model: CollectiveModel) -> float:
        large = [p for p in points if p[0] >= 16 * 2**20]
        return sum(abs(model.time("all_reduce", b, placement).seconds / t - 1) for b, t in large) / len(large)

    assert error(CollectiveModel(profile)) <= error(CollectiveModel(load_hardware("dgx-h100"))) + 1e-9
    assert error(CollectiveModel(profile)) < 0.1


def test_matrix_of_an_nvswitch_node() -> None:
    part = nvidia_topo.read(DATA / "topo_8gpu_nvswitch.txt")
    assert part.profile["node"] == {"gpus_per_node": 8}
    assert part.profile["scale_up"] == {"kind": "nvswitch", "domain_size": 8, "links_per_gpu": 18}
    assert part.profile["nic"] == {"count": 8}  # the ninth is no neighbour of a GPU
    assert any("mlx5_4" in note for note in part.notes)


@pytest.mark.parametrize(
    ("cell", "kind", "domain", "links", "bandwidth"),
    [
        ("NV4", "nvlink-mesh", 4, 12, 300e9),
        ("NV6", "nvlink-mesh", 4, 18, 450e9),
        ("NV12", "nvswitch", 4, 12, 300e9),
        ("PHB", "pcie", 4, 0, 63e9),
    ],
)
def test_matrices_of_four_gpus(tmp_path: Path, cell: str, kind: str, domain: int, links: int, bandwidth: float) -> None:
    names = [f"GPU{i}" for i in range(4)]
    rows = [f"{a} " + " ".join("X" if a == b else cell for b in names) + " 0-31 0 N/A" for a in names]
    path = tmp_path / "topo.txt"
    path.write_text("  ".join(["", *names, "CPU Affinity", "NUMA Affinity"]) + "\n" + "\n".join(rows) + "\n")
    part = nvidia_topo.read(path)
    profile = merge("dgx-h100", [part]).profile
    up = profile.scale_up
    assert (up.kind, up.domain_size, up.links_per_gpu, profile.gpus_per_node) == (kind, domain, links, 4)
    assert up.bandwidth.value == pytest.approx(bandwidth)
    assert up.bandwidth.kind == ("published" if links == 18 else "derived")  # 18 links are the base's own


def test_names_of_nics() -> None:
    names = {("rocep13s0f0", "roceo12399"): "roce", ("ibp24s0",): "infiniband", ("rdmap0s6",): "efa", ("ens5", "eth0"): "ethernet"}
    assert {devices: nvidia_topo.nic_kind(devices) for devices in names} == names
    assert nvidia_topo.nic_kind(["mlx5_0"]) == nvidia_topo.nic_kind([]) == nvidia_topo.nic_kind(["eth0", "mlx5_0"]) == ""


def test_xml_agrees_with_the_data_sheet() -> None:
    part = nccl_xml.read(DATA / "nccl_topo_8gpu.xml")
    profile, base = merge("dgx-h100", [part]).profile, load_hardware("dgx-h100")
    assert part.architecture == "hopper"
    assert profile.scale_up.bandwidth.value == base.scale_up.bandwidth.value
    assert profile.nic.bandwidth.value == base.nic.bandwidth.value
    assert profile.nic.bandwidth.kind == "measured"
    assert "nccl_topo_8gpu.xml" in profile.nic.bandwidth.source
    assert profile.node.pcie_bandwidth.value == pytest.approx(base.node.pcie_bandwidth.value, rel=1e-3)
    same = nvidia_topo.read(DATA / "topo_8gpu_nvswitch.txt").profile
    assert {k: part.profile["scale_up"][k] for k in same["scale_up"]} == same["scale_up"]


def test_xml_of_another_generation_is_refused() -> None:
    with pytest.raises(InputError, match=r"hopper GPU.*dgx-a100-80gb.*ampere"):
        merge("dgx-a100-80gb", [nccl_xml.read(DATA / "nccl_topo_8gpu.xml")])


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [
        ("2.5 GT/s PCIe", "16", 4e9),
        ("8.0 GT/s PCIe", "16", 15.754e9),
        ("32.0 GT/s PCIe", "16", 63.015e9),
        ("", "16", None),
        ("16 GT/s", "", None),
    ],
)
def test_pcie_rates(speed: str, width: str, rate: float | None) -> None:
    found = nccl_xml.pcie_bytes_per_s(speed, width)
    assert found is None if rate is None else found == pytest.approx(rate, rel=1e-4)


def test_hostlists() -> None:
    assert slurm.hostlist("n[1-3,07],m") == ("n1", "n2", "n3", "n07", "m")
    assert slurm.hostlist("r[1-2]n[08-10]") == ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")
    for bad in ("n[1-", "n[3-1]", "n[a-b]", ",", "n]1["):
        with pytest.raises(InputError, match=r"expected|range"):
            slurm.hostlist(bad)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30))
def test_hostlist_of_numbers(numbers: list[int]) -> None:
    assert slurm.hostlist(f"x[{','.join(map(str, numbers))}]") == tuple(f"x{n}" for n in numbers)


def test_tree_of_three_tiers() -> None:
    part = slurm.read(DATA / "topology.conf")
    fabric = merge("dgx-h100", [part]).profile.fabric
    assert (fabric.nodes_per_leaf_group, fabric.leaf_groups_per_pod, fabric.kind) == (16, 4, "rail-optimized")
    assert fabric.oversubscription == 16 * 400 / 3200
    assert part.facts["switches_per_tier"] == [8, 2, 1]


def test_yaml_tree_and_block(tmp_path: Path) -> None:
    text = (DATA / "topology.yaml").read_text()
    assert slurm.read(DATA / "topology.yaml").profile["fabric"] == {"nodes_per_leaf_group": 4, "leaf_groups_per_pod": 3}
    path = tmp_path / "t.yaml"
    path.write_text(text.replace("cluster_default: true", "cluster_default: false"))
    assert slurm.read(path).profile["fabric"] == {"nodes_per_leaf_group": 18, "leaf_groups_per_pod": 4}


def test_parts_and_profiles_survive_their_files(tmp_path: Path) -> None:
    files = [nccl_tests.read(DATA / "all_reduce_8gpu.txt"), nvidia_topo.read(DATA / "topo_8gpu_nvswitch.txt"),
             nccl_xml.read(DATA / "nccl_topo_8gpu.xml"), slurm.read(DATA / "topology.conf")]  # fmt: skip
    paths = [tmp_path / f"{i}.toml" for i in range(len(files))]
    for part, path in zip(files, paths, strict=True):
        write_part(part, path)
        assert read_part(path).profile == part.profile
        assert read_part(path).collectives == part.collectives
    profile = merge("dgx-h100", paths).profile
    assert profile == merge("dgx-h100", files).profile
    write_profile(profile, tmp_path / "mine.toml")
    assert load_hardware(str(tmp_path / "mine.toml")) == profile


@pytest.mark.parametrize("base", ["dgx-b200", "dgx-a100-80gb", "mi300x", "l40s", "gb200-nvl72", "cpu-gloo"])
def test_collectives_join_any_base(base: str) -> None:
    merged = merge(base, [nccl_tests.read(DATA / "all_reduce_8gpu.txt")])
    assert merged.profile.name == f"{base}+measured"
    assert merged.notes or merged.profile.collectives.scale_up is not None


BAD = {
    "nccl-tests": [("hello\n", "no nccl-tests table"), ("{\n 1", ":2: not JSON"), ('{"a": 1}', "results"),
                   ((DATA / "all_reduce_8gpu.txt").read_text().replace("   20.197 ", "   fast "), ":18: not a line"),
                   ("\n".join(x for x in (DATA / "all_reduce_8gpu.txt").read_text().splitlines() if "Rank" not in x), "--ranks")],
    "nvidia-topo": [("no gpus\n", ":1: no topology matrix"), ("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tWAT\tX\n", ":3: 'WAT'"),
                    ("\tGPU0\tGPU1\nGPU0\tX\nGPU1\tNV4\tX\n", ":2: GPU0 has 1 cells"),
                    ("\tGPU0\tGPU1\nGPU0\tX\tNV4\n", "no line of GPU1")],
    "nccl-xml": [("<system>\n<cpu>", ":2: not XML"), ("<a/>", "expected <system>"), ("<system><cpu/></system>", "no <gpu>"),
                 ('<system><cpu><pci><gpu sm="x"/></pci><nic><net speed="fast"/></nic></cpu></system>', "'fast'")],
    "slurm": [("SwitchName=a\n", ":1: "), ("SwitchName=a Nodes=n[1-\n", ":1: "), ("# only\n", "neither switches"),
              ("SwitchName=a Switches=b\n", "'b' below 'a' is not defined"),
              ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "circle")],
}  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "said"), [(r, t, s) for r, cases in BAD.items() for t, s in cases])
def test_bad_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], reader: str, text: str, said: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["import", reader, str(path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in err
    assert "bad.txt" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("reader", ["nccl-tests", "nvidia-topo", "nccl-xml", "slurm", "kineto"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x01", b"\x1f\x8b\x08bad", b"[]", b"{}", b"null", b"a: b\n"])
def test_rubbish_never_breaks_a_reader(tmp_path: Path, reader: str, content: bytes) -> None:
    path = tmp_path / "rubbish"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main(["import", reader, str(path)])
    assert stop.value.code == 2


def test_command_line_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nccl-xml", DATA / "nccl_topo_8gpu.xml", "--out", tmp_path / "a.toml", "--json"],
                      ["merge", "dgx-h100", tmp_path / "a.toml", "--out", tmp_path / "b.toml"]):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main(["import", *map(str, arguments)])
        assert not stop.value.code
        out = capsys.readouterr().out
        if "--json" in arguments:
            assert json.loads(out)["part"]["architecture"] == "hopper"
    assert load_hardware(str(tmp_path / "b.toml")).name == "dgx-h100+measured"


def test_a_wrong_series_is_named() -> None:
    with pytest.raises(InputError, match=r"all_shuffle.*\n.*ranks"):
        fit("all_shuffle", 1, 1, [(1.0, 1.0)], "out-of-place", "file")
