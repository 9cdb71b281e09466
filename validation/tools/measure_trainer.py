"""Measure steps of Hugging Face's Trainer on one GPU: `python3 validation/tools/measure_trainer.py --out FOLDER --limit 300`.

Needs torch, transformers, accelerate and peft. Every run is a process of its own, forked after the imports; its record is written
before its profiler starts. Models have random weights of their published configuration, data are random tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

LLAMA = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "llama3.2-1b": {"model_type": "llama", **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "llama3.2-3b": {"model_type": "llama", **LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                    "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "llama3.1-8b": {"model_type": "llama", **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3-8b": {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "gpt2-large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024},
    "bert-large": {"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                   "num_attention_heads": 16, "vocab_size": 30522},
    "olmoe-1b-7b": {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
                    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
                    "vocab_size": 50304},
    "gemma3-1b": {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                  "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
                  "sliding_window": 512},
}  # fmt: skip
"""Published configurations (config.json), what differs from transformers' defaults."""

RUNS: dict[str, dict[str, Any]] = {
    "llama3.2-1b-fp32": {"model": "llama3.2-1b", "seq": 2048, "micro": 4, "dtype": "float32"},
    "llama3.1-8b-lora": {"model": "llama3.1-8b", "seq": 2048, "micro": 4, "lora": 16, "checkpoint": True},
    "qwen2.5-0.5b": {"model": "qwen2.5-0.5b", "seq": 2048, "micro": 8, "accumulate": 2},
    "llama3.2-3b-checkpoint": {"model": "llama3.2-3b", "seq": 4096, "micro": 4, "checkpoint": True},
    "gpt2-large-dropout": {"model": "gpt2-large", "seq": 1024, "micro": 8, "dtype": "float32"},
    "llama3.2-1b-small": {"model": "llama3.2-1b", "seq": 512, "micro": 1, "accumulate": 4},
    "qwen3-8b-lora": {"model": "qwen3-8b", "seq": 4096, "micro": 2, "lora": 32, "checkpoint": True},
    "bert-large-mlm": {"model": "bert-large", "seq": 512, "micro": 32, "dtype": "float32"},
    "olmoe-1b-7b": {"model": "olmoe-1b-7b", "seq": 2048, "micro": 4, "checkpoint": True},
    "llama3.2-1b-long": {"model": "llama3.2-1b", "seq": 16384, "micro": 1, "checkpoint": True},
    "llama3.1-8b-lora-small": {"model": "llama3.1-8b", "seq": 512, "micro": 2, "lora": 8, "accumulate": 2},
    "gemma3-1b": {"model": "gemma3-1b", "seq": 2048, "micro": 4, "checkpoint": True},
    "llama3.2-1b-compile": {"model": "llama3.2-1b", "seq": 2048, "micro": 4, "compile": True},
}
"""By worth. dtype: of the loaded weights; always bf16=True. lora: its rank, on all linear layers of the blocks."""
WARM, STEPS, TRACED = 3, 6, 2


def build(run: dict[str, Any], tiny: bool) -> tuple[Any, Any]:
    """The model on the device and its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    fields = dict(MODELS[run["model"]])
    if tiny:
        fields |= ({"num_hidden_layers": 2} if "n_layer" not in fields else {"n_layer": 2}) | {"vocab_size": 512}
        fields |= {"hidden_size": 256, "intermediate_size": 256} if "hidden_size" in fields else {}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    maker = AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM
    dtype = getattr(torch, run.get("dtype", "bfloat16"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = maker.from_config(config, dtype=dtype)
    if run.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=run["lora"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model, config


def measure(name: str, run: dict[str, Any], out: Path, tiny: bool) -> None:
    """One run; its record goes to `out`."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    begin = time.time()
    model, config = build(run, tiny)
    attention = getattr(config, "_attn_implementation", None)
    seq, micro, accumulate = run["seq"], run["micro"], run.get("accumulate", 1)
    if tiny:
        seq, micro = 16, 1
    steps, cuda = WARM + STEPS + TRACED, torch.cuda.is_available()

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return steps * micro * accumulate

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(0, config.vocab_size, (seq,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    marks: list[float] = []
    host: list[float] = []
    about: dict[str, Any] = {"name": name, "run": run, "attention": attention}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA])

    def record() -> None:
        import accelerate
        import peft
        import transformers

        times = [b - a for a, b in pairwise(marks)][WARM - 1 : WARM - 1 + STEPS]
        about.update(
            step_s=times, median_s=statistics.median(times), host_s=host[WARM : WARM + STEPS],
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            torch=torch.__version__, transformers=transformers.__version__,
            accelerate=accelerate.__version__, peft=peft.__version__,
            wall_s=time.time() - begin,
        )  # fmt: skip
        if cuda:
            stats = torch.cuda.memory_stats()
            about.update(
                device=torch.cuda.get_device_name(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
                allocated_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved(),
                retries=stats["num_alloc_retries"],
            )  # fmt: skip
        out.write_text(json.dumps(about, indent=1), encoding="utf-8")

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == WARM + STEPS:
                record()
                profiler.start()
            host.append(-time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            host[-1] += time.perf_counter()
            if cuda:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(out.parent / "trainer"), per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate,
        max_steps=steps, bf16=True, gradient_checkpointing=bool(run.get("checkpoint")), save_strategy="no", report_to=[],
        torch_compile=bool(run.get("compile")), logging_steps=500, disable_tqdm=True, use_cpu=not cuda,
    )  # fmt: skip
    about["optimizer"], about["checkpoint_kwargs"] = str(arguments.optim), str(arguments.gradient_checkpointing_kwargs)
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Watch()])
    trainer.train()
    profiler.stop()
    if cuda:
        about["kernels"] = kernels(profiler)
        out.write_text(json.dumps(about, indent=1), encoding="utf-8")


def kernels(profiler: Any) -> list[list[Any]]:
    """[name, calls, seconds] of the device's kernels in a traced step, the longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            row = found[event.name[:160]]
            row[0] += 1
            row[1] += event.time_range.elapsed_us() * 1e-6
    rows = [[name, calls / TRACED, seconds / TRACED] for name, (calls, seconds) in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def main() -> int:
    """Run what is not measured yet while there is time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--tiny", action="store_true", help="two layers and short sequences: a trial of the script")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from transformers import Trainer  # noqa: F401

    end = time.monotonic() + given.limit
    for name, run in RUNS.items():
        target = given.out / f"{name}.json"
        if target.is_file() or (given.only and name not in given.only) or time.monotonic() > end - 25:
            continue
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                measure(name, run, target, given.tiny)
                code = 0
            except BaseException:
                traceback.print_exc()
                (given.out / f"{name}.failed").write_text(traceback.format_exc(), encoding="utf-8")
            finally:
                sys.stdout.flush()
                os._exit(code)
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.2)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            status = 9
        row = json.loads(target.read_text()) if target.is_file() else {}
        print(
            name, "exit", status, f"{time.monotonic() - begin:.1f} s", row.get("median_s"), row.get("allocated_bytes"), flush=True
        )
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
