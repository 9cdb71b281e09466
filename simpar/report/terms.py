"""The words that reports, pages, JSON and documentation share: each has one meaning, and where frameworks differ, the choice is
stated."""

from __future__ import annotations

from typing import Final

TERMS: Final = {
    "F, B, I, W": "forward; full backward; input gradient; weight gradient (B = I + W, torch's letters)",
    "tp": "tensor parallel: ranks that split every matrix of a layer",
    "cp": "context parallel: ranks that split the sequence",
    "pp": "pipeline parallel: ranks that hold different layers",
    "v": "virtual stages: model chunks per pipeline rank",
    "stage": "a virtual pipeline stage; pp ranks hold pp x virtual_stages of them",
    "micro-batch": "micro_batch_size sequences that one data-parallel rank passes through the pipeline at once",
    "global batch": "sequences per optimizer step over all ranks",
    "dp": "ranks with the same place in tp, cp and pp; dense weights are replicated or sharded over dp x cp",
    "edp": "data-parallel ranks of an expert: world / (etp ep pp)",
    "ep, etp": "ranks that hold different experts; ranks that split one expert",
    "scale-up domain": "GPUs that reach each other over NVLink, xGMI or ICI",
    "rail": "the NICs of the same index in all nodes and the leaf switches that join them",
    "zero_stage": "0 plain, 1 sharded optimizer states, 2 and gradients, 3 and parameters (FSDP)",
    "shard_size": "HSDP: ranks over which one copy of the states is sharded; copies are all-reduced",
    "role": "what one timeline of the simulation stands for: a pipeline rank (folded) or a rank (expanded)",
    "stream": "a serial resource of a role: compute, or one for each kind of communication",
    "price": "seconds of one op, with interval and provenance",
    "80 %": "the interval that should hold 80 of 100 real runs",
    "ideal": "the model's FLOPs at the peak of the data sheet: no step can be faster",
    "peak-scaled": "a price that rests on the data sheet and on kernels measured on other GPUs",
    "exposed, exposed communication": "time in which compute waits for a collective",
    "bubble": "time in which a pipeline rank waits for another stage, over the pipeline phase",
    "interference": "compute slowed by a collective that holds SMs of the same GPU",
    "contention": "transfers slowed by others on the same links",
    "allocated, reserved": "what tensors take; what the caching allocator holds for them",
    "algbw, busbw": "bytes over time; the same times the collective's traffic factor (nccl-tests)",
    "context, NCCL": "memory that the CUDA runtime and the communicators take outside the allocator",
    "mfu, hfu": "model FLOPs over peak; the same with recomputed FLOPs. Attention is counted causal unless the name says otherwise",
    "load factor": "tokens of the fullest expert rank over the mean",
    "goodput": "productive share of the wall-clock time of a run",
}
"""Word -> meaning."""


def terms_in(text: str) -> dict[str, str]:
    """The terms that stand in `text`, whole words only."""
    import re

    found = {}
    for word, meaning in TERMS.items():
        names = [re.escape(name.strip()) for name in word.replace(";", ",").split(",")]
        if re.search(rf"(?<![\w-])(?:{'|'.join(names)})(?![\w-])", text, re.IGNORECASE if len(word) > 3 else 0):
            found[word] = meaning
    return found
