"""Megatron-LM's flags as read from a command line: typed values, and which flags nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from simpar.errors import Violation

_STEP_FREE: Final = re.compile(
    r"""(?x)^(
      (log|tensorboard|wandb|one-logger|eval|save|load|ckpt|dist-ckpt|no-load|no-save|non-persistent|lr|min-lr|decoupled|adam
       |muon|init-method|start-weight|end-weight|exit|profile|rerun|error-injection|tokenizer|tiktoken|vocab|merge
       |data|train|valid|test|distributed|master|rdzv|node|tee|log-dir|redirects|local|role|monitor|max-restarts|inference
       |straggler|app-tag|enable-ft|calc-ft|inprocess|config-logger|rotary|rope|yarn|mscale|original-max
       |moe-(router-(load|score|topk-scaling|bias|pre|dtype|force)|aux|z-loss|per-layer|token-drop|upcycling|input-jitter)
       |loss-scale|initial-loss|min-loss|mtp-loss|timing|async-save|use-dist-ckpt|auto-detect|hysteresis|check|no-check
       |object-storage|mid-level|num-dataset|eod-|split|mock|sample-rate|mask-prob|short-seq|finetune|pretrained
       |dump|memory-snapshot|record-memory|iterations-to-skip|hf-|dataset|kill-switch|disable-gloo|high-priority)[\w-]*
      |lr|seed|weight-decay|clip-grad|norm-epsilon|layernorm-epsilon|swiglu-clamp|num-workers|dataloader-type
      |use-mcore-models|use-legacy-models|calculate-per-token-loss|apply-layernorm-1p|onnx-safe
      |no-mmap-bin-files|no-create-attention-mask-in-dataloader|use-checkpoint-args|use-checkpoint-opt-param-scheduler
      |exit-on-missing-checkpoint|use-cpu-initialization|init-model-with-meta-device|ignored-embeddings|split
      |override-opt-param-scheduler|override-opt_param-scheduler|attention-softmax-in-fp32|apply-query-key-layer-scaling
      |no-async-tensor-model-parallel-allreduce|no-query-key-layer-scaling|ddp-average-in-collective|trust-remote-code
      |no-gradient-reduce-div-fusion|moe-router-enable-expert-bias|use-rope-scaling|legacy-tokenizer
      |ddp-pad-buckets-for-high-nccl-busbw|rotary-interleaved|dist-url|use-distributed-checkpointing|position-ids
      |use-pytorch-profiler|padded-vocab-size|fp8-margin|fp8-interval|fp8-amax-history-len
      |fp8-amax-compute-algo|overlap-cpu-optimizer-d2h-h2d|no-pin-cpu-grads|no-pin-cpu-params
      |te-rng-tracker|delay-offload-until-cuda-graph|allow-ambiguous-pad-tokens|patch-tokenizer-type|max-padding-length
      |extra-vocab-size|deterministic-mode|manual-gc|manual-gc-interval|manual-gc-eval|no-manual-gc-eval
      |result-rejected-tracker-filename|vocab-extra-ids|num-gpus|num-nodes|nnodes|nproc-per-node|hostfile|force-multi|job-name
      |ntasks|ntasks-per-node|nodes|gpus-per-node|container-image|container-mounts|container-workdir|export|output|mpi|kill-on-bad-exit|standalone
      |module|no-python|run-path|ft-param|account|partition|time|env|rm|network|ipc|device|privileged|no-container-mount-home
    )$"""
)
"""Flags that leave the step's time and memory alone (learning rates, data, logging, checkpoints, the launcher's own)."""

STRUCTURAL: Final = re.compile(
    r"""(?x)^(
      (spec|yaml-cfg|experimental-attention|linear-(attention|key|value|num|conv)|dsa-|gdn|hybrid-(?!context)|is-hybrid|mamba-
       |heterogeneous|enable-mhc|mhc-|engram|encoder-(num-layers|tensor|pipeline)|decoder-(num-layers|seq-length)|img-|patch-dim|vision
       |num-classes|num-channels|window-attn-skip|softmax-type|attention-output-gate|qk-l2|moe-latent|mtp-use-repeated
       |rampup-batch|perform-rl|reset-(position|attention)|variable-seq|sft$|rl-|retro|bert|mlp-type|expert-interval|ds-sequence
       |hierarchical-context|dynamic-context|hybrid-context|gtp-|outer-dp|standalone-embedding|multi-query|alibi|use-alibi
       |embed-layernorm|apply-residual-connection-post|parallel-attention|parallel-layers|no-rope-freq|no-rope-layers
       |add-position-embedding|no-position-embedding|quick-geglu|geglu|openai-gelu|relu|glu-activation|activation-func(?!-fp8)
       |relative-attention|mup|universal|memory-centric|random-ltd|curriculum|data-efficiency|compression
       |num-mem|topk|prmoe|lora|peft|cpu-offloading|fine-grained-activation-offloading|offload-modules
       |use-moe-token-dispatcher|sliding)[\w-]*
    )$"""
)
"""Flags that make another model, another layout or another batch: one that is not read is refused."""
_NEUTRAL: Final = frozenset({"none", "false", "0", "0.0", "", "vanilla", "[]", "standard", "auto", "1", "causal"})
"""Values by which a resolved argument says that it is off."""

_ACCOUNTED: Final = frozenset({
    "use-precision-aware-optimizer", "moe-grouped-gemm", "moe-enable-deepep", "moe-pad-expert-input-to-capacity",
    "ckpt-format", "cross-entropy-fusion-impl", "moe-deepep-num-sms", "distribute-saved-activations", "moe-router-padding-for-fp8",
    "cuda-graph-warmup-steps",
})  # fmt: skip
"""Flags whose effect the simulated framework has anyway, or that go with another one that is read."""


PERFORMANCE: Final = frozenset({
    "ddp-bucket-size", "ddp-num-buckets", "fp8-param-gather", "grad-reduce-in-bf16", "first-last-layers-bf16", "fp8-wgrad",
    "fp32-residual-connection", "empty-unused-memory-level", "moe-permute-fusion", "moe-shared-expert-overlap", "use-nccl-ub",
    "fsdp-double-buffer", "overlap-param-gather-with-optimizer-step", "defer-embedding-wgrad-compute", "align-grad-reduce",
    "no-gradient-accumulation-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-rope-fusion", "no-bias-gelu-fusion",
    "use-sharp", "batch-invariant-mode", "deterministic-mode", "log-params-norm", "log-num-zeros-in-grad",
})  # fmt: skip
"""Of flags that are not read those that are known to change the step's time or memory."""


class Flags:
    """Values by name; every name asked for counts as read.

    Attributes:
        warnings, wrong: what to tell about the values.
    """

    def __init__(self, found: dict[str, list[str]], file: str = "", accept: Collection[str] = ()) -> None:
        self._found, self.file = found, file
        self._accepted = {name.lstrip("-").replace("_", "-") for name in accept}
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
        right = "a number" if value else "a number; a script's empty variable is set by --var NAME=VALUE"
        self.refuse(name, value, rule, right)

    def refuse(self, name: str, value: str, rule: str, right: str) -> None:
        """Tell that a value cannot be taken, unless the flag is accepted."""
        if not {name, "all"} & self._accepted:
            self.wrong.append(Violation(f"--{name}", value, rule, right, self.file))

    def missing(self, name: str) -> None:
        """Tell that a flag is missing."""
        self.wrong.append(Violation(f"--{name}", None, "is missing", "the flag, as Megatron-LM takes it", self.file))

    def finish(self, *, resolved: bool = False) -> None:
        """Refuse every structural flag that was not read; warn about others that may change the step.

        Args:
            resolved: defaults stand among them: one that is off says nothing, unknown ones are told in one line.
        """
        rest = [n for n in self._found if n not in self._read and n not in _ACCOUNTED]
        others = []
        for name in rest:
            values = self._found[name]
            text = " ".join([f"--{name}", *values])
            if STRUCTURAL.match(name):
                if resolved and len(values) == 1 and values[0].lower() in _NEUTRAL:
                    continue
                if {name, "all"} & self._accepted:
                    self.warnings.append(f"{text}: left out, as accepted; the model is another one without it")
                    continue
                rule = "changes the model or the layout and is not read"
                right = f"a scenario by hand, or --accept {name} to go on without it"
                self.wrong.append(Violation(f"--{name}", " ".join(values) or True, rule, right, self.file))
            elif not _STEP_FREE.match(name):
                others.append(text)
        if resolved:
            known = [t for t in others if t.split()[0].removeprefix("--") in PERFORMANCE and t.split()[-1].lower() not in _NEUTRAL]
            if known:
                self.warnings.append(f"{', '.join(known[:12])}: not in the scenario; the step may differ")
        else:
            self.warnings += [f"{text}: not in the scenario; the step may differ" for text in others]
