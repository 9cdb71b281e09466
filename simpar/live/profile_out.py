"""Measurements as a hardware profile: the nearest shipped one with every measured number in its place.

Constants follow by simple rules: rates are medians of what was measured, the GEMM and attention models of the base are
scaled by one number, and every measured shape is a point that overrides the model. What a profile has no field for (launch
time, overlap slowdown, versions, topology) stands in its comment.
"""

from __future__ import annotations

import math
import os
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simpar.live import profile_cpu
from simpar.live.store import CalibrationError, Record, Store, plain
from simpar.toml import toml

Table = dict[str, Any]
GLOO_BASE_S = 120e-6
"""Hand-over to gloo's thread, as the price of a gloo collective counts it before its hops."""
SMALL_BYTES, LARGE_BYTES = 64 * 2**10, 2**20
NEAREST = (
    ("GB300", "gb300-nvl72"), ("GB200", "gb200-nvl72"), ("B300", "dgx-b300"), ("B200", "dgx-b200"), ("GH200", "gh200"),
    ("H200 NVL", "h200-nvl"), ("H200", "dgx-h200"), ("H800", "hgx-h800"), ("H100 PCIe", "h100-pcie"), ("H20", "hgx-h20"),
    ("H100", "dgx-h100"), ("A800", "hgx-a800"), ("A100-PCIE", "a100-pcie"), ("A100 80GB PCIe", "a100-pcie"),
    ("A100-SXM4-40GB", "dgx-a100-40gb"), ("A100", "dgx-a100-80gb"), ("L40S", "l40s"), ("4090", "rtx-4090"), ("MI300X", "mi300x"),
)  # fmt: skip
"""Part of the device's name -> shipped profile; the first that is found."""
BY_CAPABILITY = {8: "dgx-a100-80gb", 9: "dgx-h100", 10: "dgx-b200", 12: "dgx-b200"}
FITTED = {"ampere": "a100", "ada": "a100", "hopper": "h100", "blackwell": "b200"}
"""Generation -> kernel constants to scale; others take those of the A100."""
FITTED_ON = {"a100": "dgx-a100-80gb", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200", "gb200": "gb200-nvl72"}


def profiles_dir() -> Path:
    """The shipped hardware profiles.

    Raises:
        CalibrationError: they are not beside the package.
    """
    package = Path(__file__).resolve().parent.parent
    named = os.environ.get("SIMPAR_PROFILES")
    for folder in [Path(named)] if named else [package.parent / "hardware_profiles", package / "_data" / "hardware_profiles"]:
        if folder.is_dir():
            return folder
    raise CalibrationError(
        "no hardware_profiles folder beside the package to start the profile from: copy it too, name it in SIMPAR_PROFILES, or "
        "measure with --resume FILE.jsonl and no --out (an empty file will do), and write the profile where simpar is installed"
    )


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}") from None


def nearest(facts: Record) -> str:
    """The shipped profile of the measured device, or of its generation."""
    if facts["device"] in ("cpu", "fake"):
        return {"cpu": "cpu-gloo", "fake": "dgx-h100"}[facts["device"]]
    found = next((profile for part, profile in NEAREST if part.lower() in facts["name"].lower()), None)
    return found or BY_CAPABILITY.get(facts["capability"][0], "dgx-a100-80gb")


def number(text: object) -> float:
    """The number of a quantity with a unit, as shipped profiles write them ("4.8 TB/s"); SI and binary prefixes."""
    if isinstance(text, int | float):
        return float(text)
    value, _, unit = str(text).strip().partition(" ")
    prefixes = {"K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    factor = prefixes.get(unit[:1], 1.0) if len(unit) > 1 and unit[1:2] in "BbF" else 1.0
    return float(value) * factor


class Facts:
    """A store's records, with what the profile needs of them."""

    def __init__(self, store: Store) -> None:
        if "machine" not in store.records:
            raise CalibrationError(f"{store.path}: holds no measurements; run without --resume first")
        self.store, self.machine = store, store.records["machine"]
        self.source = f"simpar calibrate, {self.machine['date']}: {{}}; torch {self.machine['torch']}"

    def sourced(self, value: str | int, what: str) -> Table:
        """A measured number as a profile writes it."""
        return {"value": value, "kind": "measured", "source": self.source.format(what)}

    def products(self) -> list[Record]:
        """Matrix products, of the usual cases and of a run's shapes."""
        return [*self.store.of_kind("gemm"), *(r for r in self.store.of_kind("shape") if r["point"] == "gemm")]

    def rate(self, dtype: str) -> tuple[float, str]:
        """Best forward FLOP/s of a dtype and the product that reached it; 0 where none was measured."""
        found = [
            (2.0 * math.prod(r["shape"]) / r["seconds"], f"{dtype} product {'x'.join(map(str, r['shape']))}")
            for r in self.products() if r["dtype"] == dtype and r["direction"] == "forward"
        ]  # fmt: skip
        return max(found, default=(0.0, ""))

    def bandwidth(self, op: str) -> float:
        """Bytes per second of a memory-bound op; 0 where it was not measured."""
        return max((r["bytes"] / r["seconds"] for r in self.store.of_kind("memory") if r["op"] == op), default=0.0)


def _gpu(facts: Facts, base: Table) -> Table:
    m = facts.machine
    if m["device"] == "fake":
        return {}  # a command was tried: the GPU is the base's
    gpu: Table = {"name": m["name"], "memory": facts.sourced(f"{m['memory_bytes']} B", "total memory of the device")}
    if m["device"] == "cuda":
        gpu["sm_count"] = facts.sourced(m["sm_count"], "multiprocessors of the device")
        return gpu
    cores = m["cores"] // m["threads"] or 1
    gpu["name"] = "CPU core" if m["threads"] == 1 else f"{m['threads']} CPU cores"
    gpu["memory"] = facts.sourced(f"{m['memory_bytes'] // cores} B", f"memory of {m['name']}, an even share of {cores} processes")
    # A core has no data sheet: what it reaches is its peak.
    best = max(((facts.bandwidth(r["op"]), r["op"]) for r in facts.store.of_kind("memory")), default=(0.0, ""))
    if best[0]:
        gpu["memory_bandwidth"] = facts.sourced(f"{best[0]!r} B/s", f"{best[1]}, bytes read and written")
    rates = {d: facts.rate(d) for d in ("fp32", "bf16")}
    peaks = {d: facts.sourced(f"{rate!r} FLOP/s", what) for d, (rate, what) in rates.items() if rate}
    return {**gpu, "peak_flops": {**base["gpu"]["peak_flops"], **peaks}}


def _points(facts: Facts) -> list[Table]:
    return [
        {
            "op": kind, "shape": r["shape"], "dtype": r["dtype"], "direction": r["direction"], "causal": r.get("causal", True),
            "seconds": r["seconds"], "spread": r["spread"],
        }
        for kind in ("gemm", "attention") for r in facts.store.of_kind(kind)
    ] + _shape_points(facts)  # fmt: skip


def _shape_points(facts: Facts) -> list[Table]:
    """The shapes of a run. A memory-bound class of equal bytes forward and backward takes the mean: both are run as often."""
    found: list[Table] = []
    memory: dict[tuple[str, float], list[Record]] = {}
    for r in facts.store.of_kind("shape"):
        if r["point"] == "memory":
            memory.setdefault((r["kernel"], r["shape"][0]), []).append(r)
            continue
        found.append(
            {
                "op": r["point"], "shape": r["shape"], "dtype": r["dtype"], "direction": r["direction"],
                "causal": r.get("causal", True), "seconds": r["seconds"], "spread": r["spread"],
            }
        )  # fmt: skip
    for (kernel, size), records in memory.items():
        mean = statistics.fmean(r["seconds"] for r in records)
        spread = max(r["spread"] for r in records)
        found.append({"op": "memory", "kernel": kernel, "shape": [round(size)], "seconds": mean, "spread": spread})
    return found


def _host(facts: Facts, profile: Table) -> None:
    """Collectives as a run makes them, and the cores that all processes share."""
    records = facts.store.of_kind("host_collective")
    for r in facts.store.of_kind("host")[-1:]:
        profile["node"]["host_linear"] = facts.sourced(f"{r['seconds']!r} s", "a linear layer's forward in eager torch")
    if facts.machine["device"] == "cpu":
        profile["node"]["cores"] = facts.sourced(facts.machine["cores"], "cores that the processes may use")
    for r in facts.store.of_kind("scheduler")[-1:]:
        what = f"{r['ranks']} processes that compute, the stretch between pauses"
        profile["node"]["time_slice"] = facts.sourced(f"{r['slice_s']!r} s", what)
        profile["node"]["wake_delay"] = facts.sourced(f"{r['wake_s']!r} s", "a process that wakes, all cores taken")
    if records:
        fields = ("collective", "ranks", "bytes", "seconds", "spread", "cores")
        profile["collectives"] = {"points": [{f: r[f] for f in fields} for r in records]}
        most = max(r["ranks"] for r in records)
        processes = max(most, profile["node"]["gpus_per_node"])
        profile["node"]["gpus_per_node"] = profile["scale_up"]["domain_size"] = processes


def _fitted_name(base: Table, kernels: object, architecture: str) -> str:
    if isinstance(kernels, str):
        return Path(kernels).name.split(".")[0]
    return str(base.get("kernels", {}).get("base", "") or FITTED.get(architecture, "a100"))


def _reference(name: str) -> tuple[Table, Table]:
    """The first bf16 GEMM set of fitted constants (sustained before burst), and the profile they were fitted on."""
    folder = profiles_dir()
    sets = [g for g in _read(folder / "fitted" / f"{name}.kernels.toml")["gemm"] if g["dtype"] == "bf16"]
    return next((g for g in sets if g["mode"] == "sustained"), sets[0]), _read(folder / f"{FITTED_ON[name]}.toml")


def _compute_scale(facts: Facts, reference: Table) -> float:
    """Median over the large forward products of measured / reference rate, prologue and epilogue taken into account."""
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        for r in facts.products():
            m, n, k = r["shape"]
            if r["dtype"] == dtype and r["direction"] == "forward":
                rate = 2.0 * m * n * (k + reference.get("k_overhead", 100.0)) / r["seconds"]
                found.append((m * n * k, rate / reference["rate_flops_per_s"]))
        if found:
            break
    most = max((size for size, _ in found), default=0)
    return statistics.median([ratio for size, ratio in found if size >= most / 8]) if found else 0.0


def _kernels(facts: Facts, base: Table, gpu: Table) -> Table:
    architecture, own = base["gpu"]["architecture"], base.get("kernels")
    name = _fitted_name(base, own, architecture)
    reference, on = _reference(name)
    peak = number(gpu.get("memory_bandwidth", base["gpu"]["memory_bandwidth"])["value"])
    copied = facts.bandwidth("copy")
    old = own if isinstance(own, Mapping) else {}
    ratio = peak / number(on["gpu"]["memory_bandwidth"]["value"])
    kernels: Table = {
        "base": name, "compute_scale": _compute_scale(facts, reference) or old.get("compute_scale", 1.0),
        "bandwidth_scale": old.get("bandwidth_scale", ratio),
        "source": facts.source.format("rate of the largest products and of the memory over the base's"),
    }  # fmt: skip
    if "fp32_over_bf16" in old:
        kernels["fp32_over_bf16"] = old["fp32_over_bf16"]
    if copied:
        kernels["memory_bandwidth_share"] = min(copied / peak, 1.5)
    shares = {r["op"]: min(r["bytes"] / r["seconds"] / peak, 1.5) for r in facts.store.of_kind("memory")}
    what = facts.source.format("eager op of torch, bytes of the ideal kernel")
    # What a framework runs here is what was measured; a better kernel would have to be measured itself.
    kernels["memory"] = {
        op: {"tuned": share, "framework": share, "eager": share, "rows": 1, "source": what} for op, share in shares.items()
    }
    if architecture == "cpu":
        _own_constants(facts, kernels, peak)
    kernels["points"] = _points(facts)
    return kernels


def _own_constants(facts: Facts, kernels: Table, peak: float) -> None:
    """Products and attention of a CPU, whose kernels are none of the base's."""
    if found := profile_cpu.attention(facts.store.of_kind("attention"), facts.source.format("SDPA on a CPU")):
        kernels["attention"] = found
    sets, factors = profile_cpu.gemms(facts.store.of_kind("gemm"), peak, facts.source.format("products on a CPU"))
    if sets:
        kernels["gemm"], kernels["directions"] = sets, factors


def traffic(collective: str, n: int) -> float:
    """Bytes each rank sends per byte of the message (nccl-tests' bus bandwidth factor)."""
    if collective == "all_reduce":
        return 2.0 * (n - 1) / n
    return 1.0 if collective in ("broadcast", "reduce", "send_recv") else (n - 1) / n


def gloo_fit(records: Sequence[Record]) -> tuple[float, float]:
    """(hop_s, bytes_per_s) of t = 120 us + steps hop + traffic bytes / rate, medians over small and large messages."""

    def steps(collective: str, n: int) -> int:
        levels = math.ceil(math.log2(n))
        return {"all_reduce": 2 * levels, "broadcast": levels, "reduce": levels, "send_recv": 1}.get(collective, n - 1)

    small = [r for r in records if r["bytes"] <= SMALL_BYTES]
    hops = [(r["seconds"] - GLOO_BASE_S) / steps(r["collective"], r["ranks"]) for r in small]
    hop = max(statistics.median(hops), 1e-6) if hops else 60e-6
    largest = max(r["bytes"] for r in records)
    large = [r for r in records if r["bytes"] >= min(LARGE_BYTES, largest)]
    rates = [
        traffic(r["collective"], r["ranks"]) * r["bytes"]
        / max(r["seconds"] - GLOO_BASE_S - steps(r["collective"], r["ranks"]) * hop, 0.1 * r["seconds"])
        for r in large
    ]  # fmt: skip
    return hop, statistics.median(rates)


def _network(facts: Facts, profile: Table) -> None:
    """Gloo's rates into the scale-up tier (one node only)."""
    records = [r for r in facts.store.of_kind("collective") if r["backend"] == "gloo" and r["nodes"] == 1 and _alone(r)]
    if not records:
        return
    hop, rate = gloo_fit(records)
    ranks = max(r["ranks"] for r in records)
    what = f"{len(records)} gloo collectives of {ranks} processes"
    profile["scale_up"]["latency"] = facts.sourced(f"{hop!r} s", what)
    profile["scale_up"]["bandwidth"] = facts.sourced(f"{rate!r} B/s", what)
    processes = max(ranks, facts.machine["cores"] // facts.machine["threads"])
    profile["node"]["gpus_per_node"] = profile["scale_up"]["domain_size"] = processes


def profile_of(store: Store, name: str, base_name: str = "") -> tuple[Table, str]:
    """The profile as a table, and its comment.

    Raises:
        CalibrationError: nothing measured, or no such base.
    """
    facts = Facts(store)
    chosen = base_name or nearest(facts.machine)
    path = Path(chosen) if chosen.endswith(".toml") else profiles_dir() / f"{chosen}.toml"
    base = _read(path)
    profile: Table = {**base, "name": name, "node": dict(base["node"]), "scale_up": dict(base["scale_up"])}
    profile["calibrated"] = f"simpar calibrate, {facts.machine['name']}, {facts.machine['date']}"
    profile["description"] = f"{facts.machine['name']}, measured on {facts.machine['date']}; the rest from {chosen}."
    over = _gpu(facts, base)
    profile["gpu"] = {**base["gpu"], **over}
    profile["kernels"] = _kernels(facts, base, over)
    copies = [r for r in store.of_kind("copy") if r["op"] == "host_to_device"]
    if copies:
        rate = copies[0]["bytes"] / copies[0]["seconds"]
        profile["node"]["host_device_bandwidth"] = facts.sourced(f"{rate!r} B/s", "pinned copy to the device")
    _network(facts, profile)
    _host(facts, profile)
    return profile, _comment(facts, chosen)


def _comment(facts: Facts, chosen: str) -> str:
    m = facts.machine
    lines = [f"Written by `simpar calibrate` from {facts.store.path.name}; started from {chosen}."]
    known = ("date", "name", "cores", "threads", "torch", "cuda", "nccl", "driver", "clocks")
    lines += [f"{key}: {m[key]}" for key in known if m.get(key)]
    lines += [f"launch of one op: {r['seconds'] * 1e6:.2f} us" for r in facts.store.of_kind("launch")]
    for r in facts.store.of_kind("overlap"):
        lines.append(f"product beside an all-reduce of {r['ranks']} ranks: {r['slowdown']:.3f} times its time alone")
    collectives = facts.store.of_kind("collective")
    together = {tuple(r[name] for name in _SAME): r for r in collectives if not _alone(r)}
    for r in collectives:
        beside = together.get(tuple(r[name] for name in _SAME))
        if beside is not None and _alone(r) and r["collective"] == "all_reduce":
            times = f"{beside['seconds'] / r['seconds']:.2f} times its time alone"
            lines.append(f"all-reduce of {r['bytes']} bytes over {r['ranks']}, {beside['concurrent']} groups at once: {times}")
    widths = [r["spread"] for r in facts.store.records.values() if "spread" in r]
    if widths:
        half = 100 * statistics.median(widths)
        lines.append(f"{len(widths)} measurements; 80 % interval of the median: +- {half:.1f} % (median of all)")
    return "\n".join([*lines, *str(m.get("topology", "")).splitlines()])


def toml_of(table: Mapping[str, Any]) -> str:
    """`table` as TOML; a sourced number, a tuned kernel and a measured attention stay on their lines."""
    return toml(table, inline=lambda _, value: not value.keys().isdisjoint(("value", "tuned", "head_dim")))


_SAME = ("collective", "ranks", "nodes", "bytes")
"""Fields of a collective that is measured alone and beside others of its kind."""


def _alone(record: Record) -> bool:
    """Whether no other group talked beside it."""
    return int(record.get("concurrent", 1)) == 1


def nccl_part(store: Store) -> Table:
    """Measured NCCL collectives as a part that `simpar import merge` fits to a profile; empty where there are none."""
    groups: dict[tuple[str, int, int], list[Record]] = {}
    for r in store.of_kind("collective"):
        if r["backend"] == "nccl" and _alone(r):
            groups.setdefault((r["collective"], r["ranks"], r["nodes"]), []).append(r)
    if not groups:
        return {}
    source = f"simpar calibrate, {store.records['machine']['date']}"
    rows = [
        {
            "collective": name, "ranks": ranks, "nodes": nodes, "buffers": "in-place", "source": source,
            "bytes": [float(r["bytes"]) for r in found], "seconds": [r["seconds"] for r in found],
        }
        for (name, ranks, nodes), found in groups.items()
    ]  # fmt: skip
    return {"part": {"kind": "calibrate", "source": source, "notes": []}, "collective": rows}


def write(store: Store, out: Path, base: str = "") -> None:
    """The profile at `out`, and beside it, where NCCL was measured, the part `<out>.collectives.toml`.

    Raises:
        CalibrationError: nothing measured, no such base, or the file cannot be written.
    """
    table, comment = profile_of(store, out.stem, base)
    texts = [(out, "".join(f"# {line}".rstrip() + "\n" for line in plain(comment).splitlines()) + toml_of(table))]
    texts += [(out.with_suffix(".collectives.toml"), toml_of(part))] if (part := nccl_part(store)) else []
    for path, text in texts:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be written: {error.strerror}") from None
