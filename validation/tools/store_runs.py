"""Flat rows of measured runs, read once, as the stored runs of `validation/runs`.

    python validation/tools/store_runs.py --fit runs.jsonl --test runs_2026.jsonl failed_2026.jsonl [--out validation/runs]

Flat rows have a column for each fact in the words of its source (docs/leaderboard.md). What one source's other documents say of
its rows is added here, with the document; the product's reader knows nothing of single sources. `--fit` and `--test` mark the runs:
errors of those of `--test` are always those of fits that left their source out.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal

from simpar.evidence.row_values import read_values
from simpar.evidence.run_rows import read_rows, run_of
from simpar.evidence.run_type import Run
from simpar.specs.base import stored_runs

Row = dict[str, Any]
Use = Literal["fit", "test"]

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
    """Fine-tuning since v5.0 runs from CUDA graphs (NVIDIA's blog on v5.0, June 2025) on the machines that NVIDIA's code serves.
    GPT-OSS has the words of Llama 3.1's tokenizer and one rotary kernel (v6.0 gpt_oss_20b/implementations/nemo/pretrain.py:
    vocab_size = 128256, fused_single_qkv_rope)."""
    if str(row.get("model_name")).startswith("gpt-oss"):
        return {"vocab": 128256}
    graphs = row.get("task") == "lora" and row.get("cuda_graphs") is None and not re.match(r"MI\d", str(row.get("gpu")))
    return {"cuda_graphs": "on (layer)"} if graphs else {}


_OVERLAPPED: Final[Row] = {"cuda_graphs": "none", "overlap_ep": True}
_RECOMPUTED: Final[Row] = {"cuda_graphs": "none", "recompute": "selective modules", "recompute_detail": "layernorm,moe_act"}
_CONTRADICTED: Final[Row] = {
    "exclude": "the page prints the base recipe's degrees (8 expert ranks, micro-batches of 4), the GPU's own recipe sets others"
}
_GRAPHS: Final = "transformer_engine/[{}'moe_router', 'moe_preprocess']"
_HYBRID: Final = "force-balanced, dropless; dispatcher hybridep"
RECIPES_25_11: Final[dict[tuple[str, str], Row]] = {
    ("GPT-OSS-120B", "GB200"): _RECOMPUTED,
    ("GPT-OSS-120B", "B200"): _CONTRADICTED,
    ("GPT-OSS-120B", "H100"): _CONTRADICTED,
    ("GPT-OSS-120B", "GB300"): {"cuda_graphs": _GRAPHS.format("'attn', ")},
    ("DeepSeek-V3", "GB200"): {"cuda_graphs": _GRAPHS.format(""), "moe_routing": _HYBRID},
    ("DeepSeek-V3", "GB300"): {"cuda_graphs": _GRAPHS.format("'attn', "), "moe_routing": _HYBRID},
    ("Qwen3-30B-A3B", "GB300"): {"cuda_graphs": _GRAPHS.format(""), "moe_routing": _HYBRID},
    ("Qwen3-30B-A3B", "H100"): _OVERLAPPED,
    ("Qwen3-235B-A22B", "B200"): _OVERLAPPED,
}
"""What scripts/performance/configs sets at v0.2.2 (container 25.11) where the page's layout is not the recipe's: graphs,
dispatcher, overlap. Pull request 1760 of Megatron-Bridge on Qwen3-235B on B200: 20.1 s with moe_a2a_overlap, which it turns off for
its CPU overhead."""


def bridge(row: Row) -> Row:
    """Performance runs without a preset have graphs as those of the releases around (scripts/performance, 25.11 to 26.08), recipes
    of dropless experts the settings of their own release; configurations of 25.09 ask for TransformerEngine's loss
    (cross_entropy_fusion_impl: te). GPT-OSS rotates by YaRN (models/gpt_oss/gpt_oss_bridge.py)."""
    about = str(row.get("model_name")), str(row.get("gpu"))
    found: dict[str, Any] = {"position": "yarn"} if about[0].startswith("GPT-OSS") else {}
    if "25.09" in str(row.get("id")):
        found["notes"] = f"{row.get('notes') or ''} cross entropy fusion on".strip()
    if "known performance regression" in str(row.get("notes")):
        found["exclude"] = (
            "published with a defect of one kernel, ten times as slow (cudnn-frontend issue 256, footnote of the page)"
        )
    if any("cuda graph settings unknown" in str(text) for text in row.get("assumed") or ()) and row.get("cuda_graphs") is None:
        own = RECIPES_25_11.get(about) if str(row.get("source_version")).endswith("25.11") else None
        found |= own or {"cuda_graphs": "on (layer)"}
    return found


GRAPHED: Final = (("nemotron", "GB200", ""), ("grok", "GB200", ""), ("llama-?4", "H100", "fp8"))
"""(Model, GPU, precision) that launch.sh of dgxc-benchmarking v25.05 runs with --cuda_graphs true (nemotron/, grok1/, llama4/)."""


def dgx_cloud(row: Row) -> Row:
    """CUDA graphs as the launch scripts of v25.05 set them; those of H100 do not but for Llama 4 in fp8."""
    about = [str(row.get(key) or "") for key in ("model_name", "gpu", "precision")]
    stated = row.get("cuda_graphs") is not None or "v25.05" not in str(row.get("source_version"))
    graphs = any(all(re.match(*pair, re.IGNORECASE) for pair in zip(named, about, strict=True)) for named in GRAPHED)
    return {} if stated else {"cuda_graphs": "on (layer)" if graphs else "none"}


def torchao(row: Row) -> Row:
    """The hosts that torchao is developed on: torchao/testing/training/roofline_utils.py gives "Meta's H100 variant" 2.4 TB/s, the
    board of 96 GB that torchtitan's tables name; its B200 hosts are limited to 750 W where a table does not say 1000 W
    (docs/source/workflows/training.md: "power limited B200"; pytorch/ao pull request 3566 on the kernel table beside the runs)."""
    gpu = str(row.get("gpu"))
    if gpu.startswith("H100"):
        return {"gpu_mem_gb": 96}
    return {"notes": f"{row.get('notes') or ''} power limited".strip()} if gpu.startswith("B200") else {}


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


def bloom(row: Row) -> Row:
    """Jean Zay's four Omni-Path adapters of 100 Gb/s: NCCL reached 135 Gb/s of a node's 400 in an all-reduce, in 2021 and in 2022
    (bigscience experiments/README.md; stas00/ml-engineering network/README.md), 40 on four A100 nodes in January 2022
    (experiments/bandwidth/all_reduce_bench-a100-n4.txt)."""
    return {"interconnect": "135 Gb/s per node"}


def swift(row: Row) -> Row:
    """Before version 5 transformers runs a layer's experts one after the other, in Python, and waits for the tokens of each. Its
    Megatron scripts pass --attention_backend flash (examples/megatron/fp8/benchmark.sh); that its H20 machine has FlashAttention 3
    is shown by examples/train/flash_attention_3."""
    if "no grouped GEMM" in str(row.get("framework")):
        return {"exclude": LOOPED}
    flash = row.get("gpu") == "H20" and not re.search(r"-fa\d$", str(row.get("id")))
    return {"flash_attention": "flash attention 3"} if flash else {}


LOOPED: Final = "experts run one after the other in Python (transformers before 5); a scenario has them in one grouped product"


def torchtune(row: Row) -> Row:
    """Its README's tables came in September 2024 (PR 1664: recipes) and November (PR 2003: optimization flags), of which "each
    technique is added on top of the previous one": losses by pieces and all below them."""
    flags = "optimization" in str(row.get("source_ref")) and row.get("model_name") == "Llama-3.2-3B"
    before = str(row.get("id")).rpartition("-")[2] in ("packed", "compile")
    return {"framework_version": "2024-11" if flags else "2024-09", **({"notes": "unfused cross entropy"} if before else {})}


def flagperf(row: Row) -> Row:
    """training/benchmarks/llama3_8B/megatron/pretrain_llama3.sh names no dropout: 0.1 by default (arguments.py)."""
    return {"dropout": 0.1} if "llama3_8B-megatron" in str(row.get("source_ref")) else {}


def megatron_readme(row: Row) -> Row:
    """Its configurations are those of NeMo's performance scripts (examples/llama/README.md), where tensor parallelism has
    userbuffers (scripts/performance/llm/pretrain_llama3_70b.py, pretrain_llama31_405b.py)."""
    return {"overlap_tp": True} if int(row.get("tp") or 1) > 1 else {}


AMENDED: Final[tuple[tuple[str, Callable[[Row], Row]], ...]] = (
    (r"Narayanan et al\. 2021|MT-NLG", narayanan),
    (r"Nemotron-4", nemotron),
    (r"bigscience", bloom),
    (r"Hagemann", hagemann),
    (r"vTrain", vtrain),
    (r"Zero Bubble", zero_bubble),
    (r"MLPerf Training v[56]", mlperf),
    (r"Megatron-Bridge", bridge),
    (r"dgxc-benchmarking", dgx_cloud),
    (r"^torchao", torchao),
    (r"^Colossal-AI", colossal),
    (r"^ms-swift", swift),
    (r"^torchtune", torchtune),
    (r"^FlagPerf", flagperf),
    (r"^Megatron-LM examples/llama", megatron_readme),
)
"""Pattern in the source's name -> columns that its other documents state."""
BLOOM: Final = {"position": "alibi", "embedding_norm": True}
"""BLOOM, arXiv 2211.05100 Table 3."""
BLOOM_BLOCKING: Final = 320
"""GPUs from which its trials hung unless CUDA_LAUNCH_BLOCKING=1 (chronicles-prequel.md, "dealing with JZ hanging on the large
model": 320 without it "always hangs"; on 160, where runs were made both ways, it costs nothing, on 80 6.8 %)."""

CHECKED: Final = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL in pipelines over several nodes (nanotron run_multinode.sh: not in the version of 2024-12-27, "
    "there in that of 2025-03-10; scripts/scaling_benchmarks.py of 2025-02-19 repeats pipelines alone, those of earlier jobs)"
)
"""What the sweep of the ultra-scale playbook was launched with; a job's number, and so its script, is not printed."""


def amended(row: Row) -> Row:
    """`row` with what other documents of its source state."""
    source, read = str(row.get("source") or ""), read_values(row).row
    for pattern, rule in AMENDED:
        if re.search(pattern, source):
            return {**row, **rule(read)}
    return row


def hidden(table: Mapping[str, Any], paths: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`table` with the fields at `paths` as `{ unknown = true }`, what stood there by path), as stored runs hold them."""
    found, usual = copy.deepcopy(dict(table)), {}
    for path in paths:
        section, _, key = path.partition(".")
        usual[path] = found[section].get(key)
        found[section][key] = {"unknown": True}
    return found, usual


def as_stored(run: Run, use: Use) -> dict[str, Any]:
    """`run`, read from a flat row, as the object that a file holds."""
    row = run.row
    found: dict[str, Any] = {"id": run.id, "where": row.get("source_ref"), "url": row.get("source_url"), "use": use}
    found |= {"version": row.get("source_version"), "exclude": run.excluded or None, "skipped": run.skipped or None}
    found |= {"group": run.group, "measured": _given(asdict(run.measured)), "scenario": None}
    found["measured"] |= {"kind": row.get("mem_kind")} if run.measured.peak_memory_bytes else {}
    if run.usual is not None:
        scenario, usual = hidden(run.usual, run.open_facts)
        found |= {"scenario": _given(scenario), "usual": usual or None}
        found |= {"assumed": list(run.assumptions) or None, "inferred": list(row.get("assumed") or ()) or None}
    return {key: value for key, value in found.items() if value is not None or key == "scenario"}


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """`table` without what says nothing."""
    return {key: value for key, value in table.items() if value not in (None, "")}


def stored(row: Row, name: str, use: Use) -> Row:
    """One flat row as a stored run."""
    found = as_stored(run_of(amended(row), name), use)
    if found["scenario"] and re.search(r"bigscience|bloom", str(row.get("source")), re.IGNORECASE):
        found["scenario"]["model"] |= BLOOM
        if int(row.get("n_gpus") or 0) >= BLOOM_BLOCKING:
            found["scenario"]["training"]["launch_blocking"] = True
    group = found["group"]
    sweep = group.get("source") == "HF ultra-scale playbook / nanotron benchmark sweep"
    if sweep and found["scenario"] and group["pp"] > 1:
        found["scenario"]["training"]["collective_checks"] = group["n_gpus"] > 8 or {"any_of": [False, True]}
        found["inferred"] = [*found.get("inferred", ()), CHECKED]
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
