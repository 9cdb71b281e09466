"""Collective prices against measured tables, how the fit extrapolates, and how tables are read."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

from simpar.boundary import read_records
from simpar.costs.collective_defaults import shipped
from simpar.errors import InputError
from simpar.evidence.collective_rows import MACHINES, Cell, errors, machine, parse, predict, read_rows
from simpar.evidence.collectives import CollectiveReport, run, validate_collectives
from simpar.evidence.expert_kernels import expert_rows
from simpar.specs.base import data_dir
from simpar.specs.hardware import profile_names
from validation.tools.collective_cells import cells_of
from validation.tools.collective_stages import fit_network, fit_pipelines
from validation.tools.fit_collectives import exchanges, pipeline
from validation.tools.minimise import Parameter, minimise

SHARED = Path(os.environ.get("SIMPAR_SHARED_DATA", Path(__file__).parent / "data" / "measured"))
TABLES = SHARED / "collectives"
SLACK = 1.0 if "SIMPAR_SHARED_DATA" in os.environ else 1.4
"""What the mean of a few sampled points of a series may be off from that of all, which the bounds are for."""
COLUMNS = ("set", "hardware", "nodes", "gpus", "fabric", "collective", "algo", "bytes", "time_us", "note")


@pytest.fixture(scope="module")
def report() -> CollectiveReport:
    return validate_collectives(TABLES / "collectives_fit.csv")


def write(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    return path


ROW: dict[str, object] = {"set": "s", "hardware": "H100 SXM", "nodes": 2, "gpus": 16, "fabric": "8x400G IB NDR", "note": "",
                          "collective": "all_reduce", "algo": "default", "bytes": 2**30, "time_us": 4200}  # fmt: skip


def test_mean_over_series_is_within_the_targets(report: CollectiveReport) -> None:
    large, small = report.mean_over_series(">=1MiB"), report.mean_over_series("<1MiB")
    assert large is not None
    assert small is not None
    assert large <= 0.08
    assert small <= 0.20
    assert report.within_tolerance


def test_no_multi_node_h100_series_is_far_off(report: CollectiveReport) -> None:
    series = [g for g in report.groups if g.by["group"] == "series" and g.by["size"] == ">=1MiB" and g.summary.rows]
    multi = [g for g in series if str(g.by["hardware"]).startswith("H100") and g.by["nodes"] > 1]
    assert len(multi) >= 12
    assert all(g.summary.mape is not None and g.summary.mape <= SLACK * 0.15 for g in multi if g.summary.rows > 2)


def test_intervals_cover_what_they_claim(report: CollectiveReport) -> None:
    everything = next(g for g in report.groups if g.by == {"group": "all"})
    assert everything.summary.coverage is not None
    assert 0.75 <= everything.summary.coverage <= 0.85


def test_few_rows_are_skipped_and_each_says_why(report: CollectiveReport) -> None:
    skipped = [row for row in report.rows if row.predicted is None]
    assert all(row.skipped for row in skipped)
    assert len(skipped) < 0.03 * len(report.rows)


@pytest.mark.slow
def test_the_laws_extrapolate_over_node_counts() -> None:
    """Each node count of the H100 InfiniBand series, predicted by constants that never saw it."""
    cells = cells_of(read_rows(TABLES / "collectives_fit.csv"))
    key = ("hopper", "nvswitch", "infiniband")
    mine = [c for c in cells if c.key == key and c.geometry.domains > 1]
    up, harnesses = shipped()[key].scale_up, {}
    assert up is not None

    def refit(rest: list[Cell]) -> list[tuple[float, float]]:
        net = fit_network(rest, {key[:2]: up}, harnesses)
        return list(errors(left_out or rest, lambda c: predict(c, up, net, harnesses))[2].values())

    left_out: list[Cell] = []
    fitted = np.mean([large for large, _ in refit(mine)])
    found = []
    for nodes in sorted({c.series[1] for c in mine}):
        left_out = [c for c in mine if c.series[1] == nodes]
        found += [large for large, _ in refit([c for c in mine if c.series[1] != nodes])]
    assert len(found) >= 9
    assert np.mean(found) <= SLACK * 1.5 * fitted


def test_the_shipped_fits_record_that_they_extrapolate() -> None:
    """Sizes of racks and of a PCIe box, node counts of H100 over InfiniBand: left out at most 1.5 times the error fitted."""
    rack, pod = shipped()["blackwell", "nvrack", "infiniband"].scale_up, shipped()["hopper", "nvswitch", "infiniband"].network
    staged = shipped()["ada", "pcie", "roce"].scale_up
    for constants in (rack, pod, staged):
        assert constants is not None
        assert 0 < constants.fit.held_out_mape_large <= 1.5 * constants.fit.mape_large


def test_a_pcie_box_with_peer_access_extrapolates() -> None:
    """RTX PRO 6000: a group size that was left out is predicted nearly as well as others are fitted."""
    found = shipped()["blackwell", "pcie", "roce"].scale_up
    assert found is not None
    assert 0 < found.fit.held_out_mape_large <= 0.10
    assert found.fit.mape_large <= 0.06


def test_what_a_remote_rank_costs_is_fitted_as_shipped() -> None:
    """By NIC kind, on the all-to-alls of several node counts, with everything else as shipped."""
    several, rest = exchanges(cells_of(read_rows(data_dir("validation") / "collectives" / "collectives_fit.csv")))
    assert {(c.key[2], c.geometry.domains) for c in several} == {("efa", 2**i) for i in range(1, 6)} | {
        ("roce", 2**i) for i in range(1, 5)
    }
    assert any(c.collective == "all_to_all" and c.geometry.domains == 2 for c in rest)  # MI355X: one node count
    ups = {key[:2]: c.scale_up for key, c in shipped().items() if c.scale_up}
    nets = {key: c.network for key, c in shipped().items() if c.network}
    measured = fit_pipelines(several, ups, nets, {})
    for key, net in nets.items():
        assert net.peer_pipeline_s == pytest.approx(pipeline(key, measured), rel=1e-4)
    large, _, _ = errors(several, lambda c: predict(c, ups[c.key[:2]], nets[c.key], {}))
    assert large <= 0.06


def test_kinds_of_nics_lend_what_a_remote_rank_costs() -> None:
    """InfiniBand and RoCE lend to each other, EFA does not lend; RCCL has none of NCCL's."""
    keys = [("hopper", "nvswitch", kind) for kind in ("roce", "infiniband", "efa", "tcpx")] + [("cdna3", "xgmi", "roce")]
    assert [pipeline(key, {"roce": 1.0, "efa": 2.0}) for key in keys] == [1.0, 1.0, 2.0, 0.0, 0.0]
    assert pipeline(("hopper", "nvswitch", "infiniband"), {"roce": 1.0, "infiniband": 3.0}) == 3.0


def test_splits_and_precisions_stand_in_their_columns() -> None:
    rows = list(read_records(data_dir("validation") / "collectives" / "collectives_fit.csv"))
    splits = {"fit", "test", "exclude"}
    assert {row["suggested_split"] for row in rows} == splits
    assert not {row["precision"] for row in rows} & splits


def test_expert_tables_are_understood() -> None:
    report = validate_collectives(TABLES / "ep_deepep_normal.csv")
    everything = next(g.summary for g in report.groups if g.by == {"group": "all"})
    assert everything.mape is not None
    assert everything.mape < 0.20


def test_another_mode_of_deepep_is_not_read_as_the_normal_one() -> None:
    row = next(iter(read_records(TABLES / "ep_deepep_normal.csv")))
    assert not any(found.skipped for found in expert_rows(row, "t:1"))
    assert all("low_latency" in found.skipped for found in expert_rows({**row, "mode": "low_latency"}, "t:1"))


def test_every_rule_names_a_profile_that_exists() -> None:
    assert {rule.profile for rule in MACHINES} <= set(profile_names())


def test_a_grace_hopper_is_no_h200() -> None:
    found, _ = machine("GH200 NVL2 144GB", "NVLink-C2C")
    assert found is not None
    assert found.name == "gh200"


@pytest.mark.parametrize(
    ("hardware", "fabric", "profile", "nics", "gbits", "kind"),
    [
        ("H100 SXM p5", "32x100G EFAv2", "aws-p5-h100", 32, 100, "efa"),
        ("A100 SXM p4de", "4x100G EFAv1", "dgx-a100-80gb", 4, 100, "efa"),
        ("H200 SXM Dell", "8x400G RoCE", "dgx-h200", 8, 400, "roce"),
        ("H100 SXM A3-Mega", "8x200G GPUDirect-TCPXO Ethernet", "gcp-a3-mega-h100", 8, 200, "tcpx"),
        ("GB200 NVL72", "NVLink5 MNNVL", "gb200-nvl72", 4, 400, "infiniband"),
    ],
)
def test_machines_are_recognised(hardware: str, fabric: str, profile: str, nics: int, gbits: int, kind: str) -> None:
    found, _ = machine(hardware, fabric)
    assert found is not None
    assert (found.name, found.nic.count, found.nic.kind) == (profile, nics, kind)
    assert found.nic.bandwidth.value == gbits * 1e9 / 8


@pytest.mark.parametrize(("note", "ranks"), [("8 pairs, first pair target: 1", 8), ("4 pairs, first pair target: 4", 8), ("", 2)])
def test_pairs_of_a_permute_share_a_communicator(note: str, ranks: int) -> None:
    row = parse({**ROW, "nodes": 1, "gpus": 2, "collective": "sendrecv", "note": note}, "t:1")
    assert row.placement is not None
    assert (row.placement.size, row.series[1]) == (ranks, 1)


def test_a_row_becomes_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {**ROW, "hardware": "Abacus 9000"}
    path = write(tmp_path / "t.csv", ROW, unknown, {**ROW, "algo": "MSCCL++"})
    report = validate_collectives(path)
    first, second, third = report.rows
    assert first.predicted == pytest.approx(4.2e-3, rel=0.15)
    assert first.low is not None
    assert first.high is not None
    assert first.low < first.predicted < first.high
    assert (first.group["hardware"], first.group["nodes"], first.group["gpus"], first.group["bytes"]) == ("H100 SXM", 2, 16, 2**30)
    assert "Abacus" in second.skipped
    assert "NCCL" in third.skipped
    assert run(path, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {"id", "metric", "measured", "predicted", "low", "high", "group", "skipped"} <= set(printed["rows"][0])
    assert {"rows", "mape", "median", "p90", "bias", "coverage"} <= set(printed["groups"][0])
    assert printed["rows"][1]["predicted"] is None


def test_past_the_tolerance_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "slow.csv", {**ROW, "time_us": 45000})) == 1
    assert "Mean over series" in capsys.readouterr().out


def test_what_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        validate_collectives(tmp_path / "missing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="no table of measured collectives"):
        validate_collectives(tmp_path / "other.csv")
    with pytest.raises(InputError, match="line 2"):
        validate_collectives(write(tmp_path / "bad.csv", {**ROW, "bytes": "many"}))


def test_the_fit_finds_constants_it_was_made_with() -> None:
    """A law of latency, rate and fill, 2 % noise, one row in ten spoilt: all three come back."""
    rng = np.random.default_rng(1)
    size = 2.0 ** np.arange(10, 34, 0.25)
    truth = np.array([12e-6, 300e9, 4e-9])

    def law(values: np.ndarray) -> np.ndarray:
        return values[0] + size / values[1] + values[2] * np.sqrt(size)

    measured = law(truth) * np.exp(0.02 * rng.standard_normal(len(size)))
    measured[::10] *= 3.0
    starts = (("latency", 30e-6), ("rate", 100e9), ("fill", 1e-9))
    parameters = [Parameter(name, start, start / 100, start * 100) for name, start in starts]
    weights = np.full(len(size), 1 / len(size))
    found = minimise(lambda v: np.log(law(v) / measured), parameters, weights)
    np.testing.assert_allclose(found, truth, rtol=0.06)
