"""Flat rows of measured runs, read once, as the stored runs of `validation/runs`.

    python validation/tools/store_runs.py --fit runs.jsonl --test runs_2026.jsonl failed_2026.jsonl [--out validation/runs]

Flat rows have a column for each fact in the words of its source (docs/leaderboard.md). What one source's other documents say of
its rows is added here, with the document; the product's reader knows nothing of single sources. `--fit` and `--test` mark the runs:
errors of those of `--test` are always those of fits that left their source out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from simpar.evidence.row_values import read_values
from simpar.evidence.run_files import Use, as_stored, stored_runs
from simpar.evidence.run_rows import read_rows, run_of

Row = dict[str, Any]

SC21: Final[dict[tuple[int, int, int], tuple[int, int]]] = {
    (24, 2304, 1): (16, 1), (30, 3072, 1): (16, 1), (36, 4096, 1): (16, 1), (40, 6144, 1): (8, 1), (48, 8192, 2): (4, 1),
    (60, 10240, 4): (2, 3), (80, 12288, 8): (2, 2), (96, 16384, 16): (1, 2), (105, 20480, 35): (1, 3), (128, 25600, 64): (1, 1),
    (96, 12288, 12): (1, 4),
}  # fmt: skip
"""(Layers, hidden size, pp) -> micro batch and virtual stages of run_table_1.sh and run_figure_12.sh in Megatron-LM's
examples/academic_paper_scripts/sc21, which the tables of Narayanan et al. 2021 do not print."""
NEMO_MICRO_BATCH: Final[dict[tuple[int, int], int]] = {(32, 6144): 2, (96, 18432): 1}
"""(Layers, hidden size) -> micro batch of recipes/nemotron4_15b.py and nemotron4_340b.py in NeMo."""


def narayanan(row: Row) -> Row:
    """Micro batch and virtual stages of the scripts of 2021."""
    micro, virtual = SC21.get((row.get("layers", 0), row.get("hidden", 0), row.get("pp", 0)), (None, None))
    added = {"micro_batch": micro, "vpp": virtual if row.get("pp", 1) > 1 else None}
    return {key: value for key, value in added.items() if value and not row.get(key)}


def nemotron(row: Row) -> Row:
    """Micro batch of NeMo's recipe."""
    micro = NEMO_MICRO_BATCH.get((row.get("layers", 0), row.get("hidden", 0)))
    return {"micro_batch": micro} if micro and not row.get("micro_batch") else {}


def hagemann(row: Row) -> Row:
    """The builds that the spreadsheets' columns tell apart: fused norm kernel; torch's own softmax."""
    text = " ".join((str(row.get("notes") or ""), *map(str, row.get("assumed") or ())))
    builds = ((r"rms kernel", "aa-scaling-fused-norm"), (r"kernel: torch\b", "aa-scaling-torch-softmax"))
    return next(({"framework": name} for pattern, name in builds if re.search(pattern, text, re.IGNORECASE)), {})


def vtrain(row: Row) -> Row:
    """The single-node table is put together from the kernel trace of one layer: a straight line in the number of micro-batches to
    the nanosecond, each send as `_compute_p2p_latency` of its source says."""
    text = " ".join((str(row.get("notes") or ""), *map(str, row.get("assumed") or ())))
    return {"exclude": "another simulator's output, not a measured step"} if "config/validation/single" in text else {}


def zero_bubble(row: Row) -> Row:
    """Its launch script names a SentencePiece tokenizer and untied embeddings; the printed sizes of its largest models (14.6 and
    28.3 billion) are 12 L h^2 + V h only for V of 26,000 to 34,000."""
    return {key: value for key, value in {"vocab": 32000, "tied_embeddings": False}.items() if row.get(key) is None}


def mlperf(row: Row) -> Row:
    """Fine-tuning since v5.0 runs from CUDA graphs (NVIDIA's blog on v5.0, June 2025) on the machines that NVIDIA's code serves."""
    graphs = row.get("task") == "lora" and row.get("cuda_graphs") is None and not re.match(r"MI\d", str(row.get("gpu")))
    return {"cuda_graphs": "on (layer)"} if graphs else {}


def bridge(row: Row) -> Row:
    """Performance runs without a preset have graphs as those of the releases around (scripts/performance, 25.11 to 26.08)."""
    unknown = any("cuda graph settings unknown" in str(text) for text in row.get("assumed") or ())
    return {"cuda_graphs": "on (layer)"} if unknown and row.get("cuda_graphs") is None else {}


GRAPHED: Final = (("nemotron", "GB200", ""), ("grok", "GB200", ""), ("llama-?4", "H100", "fp8"))
"""(Model, GPU, precision) that launch.sh of dgxc-benchmarking v25.05 runs with --cuda_graphs true (nemotron/, grok1/, llama4/)."""


def dgx_cloud(row: Row) -> Row:
    """CUDA graphs as the launch scripts of v25.05 set them; those of H100 do not but for Llama 4 in fp8."""
    about = [str(row.get(key) or "") for key in ("model_name", "gpu", "precision")]
    stated = row.get("cuda_graphs") is not None or "v25.05" not in str(row.get("source_version"))
    graphs = any(all(re.match(*pair, re.IGNORECASE) for pair in zip(named, about, strict=True)) for named in GRAPHED)
    return {"cuda_graphs": "on (layer)"} if graphs and not stated else {}


def torchao(row: Row) -> Row:
    """The hosts that torchao is developed on: torchao/testing/training/roofline_utils.py gives "Meta's H100 variant" 2.4 TB/s, the
    board of 96 GB that torchtitan's tables name; its B200 hosts are limited to 750 W where a table does not say 1000 W
    (docs/source/workflows/training.md: "power limited B200"; pytorch/ao pull request 3566 on the kernel table beside the runs)."""
    gpu, parts = str(row.get("gpu")), {"mxlin": "the linear layers", "mxgrp": "the grouped products"}
    if part := parts.get(str(row.get("id")).rpartition("-")[2]):
        return {"exclude": f"MXFP8 in {part} alone; a scenario has one precision for all products"}
    if gpu.startswith("H100"):
        return {"gpu_mem_gb": 96}
    return {"notes": f"{row.get('notes') or ''} power limited".strip()} if gpu.startswith("B200") else {}


def google_a4x(row: Row) -> Row:
    """Jobs over pieces of several racks. That NCCL leaves the links between nodes alone (MNNVL off) cuts no rack: hybridep's
    buffers are its own."""
    pieces = re.search(r"\bdomains of (\d+) GPUs each", str(row.get("interconnect") or ""), re.IGNORECASE)
    return {"domain_size": int(pieces[1])} if pieces else {}


def colossal(row: Row) -> Row:
    """Checkpointing: the benchmark's TFLOP/s count 24 layers hidden^2 (1 + s / 6h + V / 16Lh) a token three times, four with it
    (ColossalAI examples/language/performance_evaluator.py, flop_megatron), so that with the tokens of the same second they tell."""
    layers, hidden, sequence, words = (row.get(key) for key in ("layers", "hidden", "seq_len", "vocab"))
    rates = row.get("tflops_per_gpu"), row.get("tokens_per_s_per_gpu_best")
    if row.get("recompute") or not (layers and hidden and sequence and words and all(rates)):
        return {}
    once = 24.0 * layers * hidden**2 * (1.0 + sequence / (6.0 * hidden) + words / (16.0 * layers * hidden))
    passes = 1e12 * float(rates[0] or 0.0) / (float(rates[1] or 1.0) * once)
    found = next((word for count, word in ((3, "none"), (4, "full")) if abs(passes / count - 1.0) < 0.01), None)
    return {"recompute": found} if found else {}


AMENDED: Final[tuple[tuple[str, Callable[[Row], Row]], ...]] = (
    (r"Narayanan et al\. 2021|MT-NLG", narayanan),
    (r"Nemotron-4", nemotron),
    (r"Hagemann", hagemann),
    (r"vTrain", vtrain),
    (r"Zero Bubble", zero_bubble),
    (r"MLPerf Training v[56]", mlperf),
    (r"Megatron-Bridge", bridge),
    (r"dgxc-benchmarking", dgx_cloud),
    (r"^torchao", torchao),
    (r"^Google A4X", google_a4x),
    (r"^Colossal-AI", colossal),
)
"""Pattern in the source's name -> columns that its other documents state."""
BLOOM: Final = {"position": "alibi", "embedding_norm": True}
"""BLOOM, arXiv 2211.05100 Table 3."""


def amended(row: Row) -> Row:
    """`row` with what other documents of its source state."""
    source, read = str(row.get("source") or ""), read_values(row).row
    for pattern, rule in AMENDED:
        if re.search(pattern, source):
            return {**row, **rule(read)}
    return row


def stored(row: Row, name: str, use: Use) -> Row:
    """One flat row as a stored run."""
    found = as_stored(run_of(amended(row), name), use)
    if found["scenario"] and re.search(r"bigscience|bloom", str(row.get("source")), re.IGNORECASE):
        found["scenario"]["model"] |= BLOOM
    return found


def file_name(source: str) -> str:
    """The file of a source's runs."""
    return re.sub(r"[^a-z0-9]+", "_", source.lower()).strip("_")[:60] + ".jsonl"


def main() -> None:
    """Read the flat files and write one file per source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, nargs="*", default=[])
    parser.add_argument("--test", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    out = options.out or stored_runs()
    out.mkdir(parents=True, exist_ok=True)
    uses: tuple[tuple[Use, list[Path]], ...] = (("fit", options.fit), ("test", options.test))
    found: dict[str, list[Row]] = defaultdict(list)
    for use, files in uses:
        for path in files:
            for name, row in read_rows(path):
                run = stored(row, name, use)
                found[file_name(str(run["group"].get("source") or path.stem))].append(run)
    for name, runs in found.items():
        lines = (json.dumps(run, ensure_ascii=False, separators=(",", ":")) for run in runs)
        (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} runs of {len(found)} sources in {out}")


if __name__ == "__main__":
    main()
