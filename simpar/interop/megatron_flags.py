"""Megatron-LM's flags as read from a command line: typed values, and which flags nobody asked for."""

from __future__ import annotations

import re
from typing import Final

from simpar.errors import Violation

_STEP_FREE: Final = re.compile(
    r"""(?x)^(
      (log|tensorboard|wandb|one-logger|eval|save|load|ckpt|dist-ckpt|no-load|no-save|non-persistent|lr|min-lr|decoupled|adam
       |muon|init-method|start-weight|end-weight|exit|profile|rerun|error-injection|rampup|tokenizer|tiktoken|vocab|merge
       |data|train|valid|test|distributed|master|rdzv|node|tee|log-dir|redirects|local|role|monitor|max-restarts|inference|rl
       |straggler|app-tag|enable-ft|calc-ft|inprocess|config-logger|retro|bert|rotary|rope|yarn|mscale|original-max
       |moe-(router-(load|score|topk-scaling|bias|pre|dtype|force)|aux|z-loss|per-layer|token-drop|upcycling|input-jitter)
       |loss-scale|initial-loss|min-loss|mtp-loss|timing|async-save|use-dist-ckpt|auto-detect|hysteresis|check|no-check
       |object-storage|mid-level|num-dataset|reset-|eod-|split|mock|sample-rate|mask-prob|short-seq|finetune|pretrained|sft
       |dump|memory-snapshot|record-memory|iterations-to-skip|hf-|dataset|kill-switch|disable-gloo|high-priority)[\w-]*
      |lr|seed|weight-decay|clip-grad|norm-epsilon|layernorm-epsilon|swiglu-clamp|num-workers|dataloader-type|spec|yaml-cfg
      |use-mcore-models|use-legacy-models|calculate-per-token-loss|apply-layernorm-1p|openai-gelu|onnx-safe
      |no-mmap-bin-files|no-create-attention-mask-in-dataloader|use-checkpoint-args|use-checkpoint-opt-param-scheduler
      |exit-on-missing-checkpoint|use-cpu-initialization|init-model-with-meta-device|ignored-embeddings|split
      |override-opt-param-scheduler|override-opt_param-scheduler|attention-softmax-in-fp32|apply-query-key-layer-scaling
      |no-async-tensor-model-parallel-allreduce|no-query-key-layer-scaling|ddp-average-in-collective|trust-remote-code
      |no-gradient-reduce-div-fusion|moe-router-enable-expert-bias|use-rope-scaling|no-position-embedding|legacy-tokenizer
      |ddp-pad-buckets-for-high-nccl-busbw|no-rope-freq|rotary-interleaved|dist-url|use-distributed-checkpointing|position-ids
      |use-pytorch-profiler|padded-vocab-size|fp8-margin|fp8-interval|fp8-amax-history-len
      |fp8-amax-compute-algo|overlap-cpu-optimizer-d2h-h2d|no-pin-cpu-grads|no-pin-cpu-params
      |te-rng-tracker|delay-offload-until-cuda-graph|allow-ambiguous-pad-tokens|patch-tokenizer-type|max-padding-length
      |extra-vocab-size|deterministic-mode|manual-gc|manual-gc-interval|manual-gc-eval|no-manual-gc-eval
      |result-rejected-tracker-filename|vocab-extra-ids|num-gpus|num-nodes|nnodes|nproc-per-node|hostfile|force-multi|job-name
      |ntasks|ntasks-per-node|nodes|gpus-per-node|container-image|container-mounts|export|output|mpi|kill-on-bad-exit|standalone
      |module|no-python|run-path|ft-param|account|partition|time|env|rm|network|ipc|device|privileged|no-container-mount-home
    )$"""
)
"""Flags that leave the step's time and memory alone (learning rates, data, logging, checkpoints, the launcher's own)."""

_ACCOUNTED: Final = frozenset({
    "use-precision-aware-optimizer", "moe-grouped-gemm", "moe-enable-deepep", "moe-pad-expert-input-to-capacity",
    "ckpt-format", "cross-entropy-fusion-impl", "moe-deepep-num-sms", "distribute-saved-activations", "moe-router-padding-for-fp8",
    "cuda-graph-warmup-steps",
})  # fmt: skip
"""Flags whose effect the simulated framework has anyway, or that go with another one that is read."""


class Flags:
    """Values by name; every name asked for counts as read.

    Attributes:
        warnings, wrong: what to tell about the values.
    """

    def __init__(self, found: dict[str, list[str]], file: str = "", unset: set[str] | None = None) -> None:
        self._found, self.file = found, file
        self._unset = sorted(unset or ())
        self._read: set[str] = set()
        self.warnings: list[str] = []
        self.wrong: list[Violation] = []

    def use(self, *names: str) -> None:
        """Count `names` as read."""
        self._read.update(names)

    def has(self, name: str) -> bool:
        """Whether the flag is there (a value that counts as none too)."""
        self.use(name)
        return name in self._found

    def on(self, name: str) -> bool:
        """Whether a switch is there."""
        return self.has(name)

    def values(self, name: str) -> list[str]:
        """All its values."""
        self.use(name)
        return self._found.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """Its first value."""
        values = self.values(name)
        return values[0] if values else default

    def number(self, name: str, default: int) -> int:
        """Its value as a whole number; anything else is told in `wrong`."""
        if not self.has(name):
            return default
        try:
            return int(self.text(name).replace("_", ""))
        except ValueError:
            self._cannot(name, "is no whole number")
            return default

    def fraction(self, name: str, default: float) -> float:
        """Its value as a number."""
        if not self.has(name):
            return default
        try:
            return float(self.text(name))
        except ValueError:
            self._cannot(name, "is no number")
            return default

    def _cannot(self, name: str, rule: str) -> None:
        value = self.text(name)
        right = "a number"
        if not value and self._unset:
            right = f"the script reads it from a variable nobody sets: --var NAME=VALUE for one of {', '.join(self._unset[:12])}"
        self.wrong.append(Violation(f"--{name}", value, rule, right, self.file))

    def missing(self, name: str) -> None:
        """Tell that a flag is missing."""
        self.wrong.append(Violation(f"--{name}", None, "is missing", "the flag, as Megatron-LM takes it", self.file))

    def finish(self) -> None:
        """Warn about every flag that may change the step and was not read."""
        rest = [n for n in self._found if n not in self._read and n not in _ACCOUNTED and not _STEP_FREE.match(n)]
        for name in rest:
            text = " ".join([f"--{name}", *self._found[name]])
            self.warnings.append(f"{text}: not in the scenario; the step may differ")


__all__ = ["Flags"]
