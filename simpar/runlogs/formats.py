"""The one table of formats, and which of them a file has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from simpar.errors import InputError
from simpar.registry import Registry
from simpar.runlogs.deepspeed import DeepSpeed
from simpar.runlogs.lines import lines_of
from simpar.runlogs.maxtext import MaxText
from simpar.runlogs.megatron import Megatron
from simpar.runlogs.nanotron import Nanotron
from simpar.runlogs.parser import Parser
from simpar.runlogs.records import LogReading
from simpar.runlogs.scalars import Store, read_csv_store, read_lines_store, read_state_store, reading_of
from simpar.runlogs.tensorboard import is_event_file, read_events
from simpar.runlogs.torchtitan import Torchtitan
from simpar.runlogs.trainer import Lightning, Trainer

PARSERS: Final[Registry[type[Parser]]] = Registry(
    "log format",
    {
        "megatron": Megatron,
        "torchtitan": Torchtitan,
        "nanotron": Nanotron,
        "deepspeed": DeepSpeed,
        "maxtext": MaxText,
        "lightning": Lightning,
        "transformers": Trainer,
    },
)
"""Name -> reader of lines; where a log fits several, the first with steps counts."""
WRITTEN_BY: Final[dict[str, tuple[str, ...]]] = {
    "megatron": (
        "megatron-core", "megatron-bridge", "megatron-bridge-tuning", "megatron-bridge-defaults", "nemo", "megatron-deepspeed",
        "zero-bubble", "aa-scaling", "internevo",
    ),
    "torchtitan": ("torchtitan", "torch-fsdp"),
    "nanotron": ("nanotron",),
    "deepspeed": ("deepspeed", "megatron-deepspeed", "transformers", "trl"),
    "maxtext": ("maxtext",),
    "lightning": ("nemo", "lit-gpt", "torch-fsdp", "deepspeed"),
    "transformers": ("transformers", "trl", "deepspeed", "torch-fsdp", "torchtune"),
}  # fmt: skip
"""Format -> frameworks of scenarios whose runs may have written it."""


_OUT_OF_MEMORY: Final = ("CUDA out of memory", "HIP out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")


def read_log(path: Path, chosen: str = "") -> LogReading:
    """What the log or store of metrics at `path` says.

    Args:
        chosen: name in `PARSERS`, where several would fit.

    Raises:
        InputError: no such file, or no step of any known framework in it.
    """
    if path.is_dir():
        return _folder(path)
    if is_event_file(path):
        return reading_of(read_events(path), "tensorboard")
    if chosen:
        PARSERS[chosen]
    elif (store := _store(path)) is not None:
        return reading_of(store(path), "metrics")
    return _text(path, chosen)


def _store(path: Path) -> Callable[[Path], Store] | None:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".wandb"):
        rule = "is W&B's own binary log, which is not read"
        raise InputError(f"{path}: {rule}; give files/output.log beside it, or an export of its history (CSV, JSON lines)")
    if name.endswith(".csv"):
        return read_csv_store
    if name.endswith(".jsonl"):
        return read_lines_store
    return read_state_store if name.endswith(".json") else None


def _folder(path: Path) -> LogReading:
    """A run's folder of event files, one per restart."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and is_event_file(p))
    if not files:
        raise InputError(
            f"{path}: is a folder without TensorBoard event files; expected a log, or a folder with events.out.tfevents.*"
        )
    whole = Store(str(path))
    for store in map(read_events, files):
        for note in store.notes:
            whole.note(f"{store.file} {note}")
        for tag, points in store.series.items():
            for point in points:
                whole.add(tag, point)
    return reading_of(whole, "tensorboard")


def _text(path: Path, chosen: str) -> LogReading:
    parsers = [kind(str(path)) for name, kind in PARSERS.items() if chosen in ("", name)]
    for parser in parsers:
        parser.chosen = bool(chosen)
    out_of_memory = False
    for line in lines_of(path):
        out_of_memory = out_of_memory or any(words in line.text for words in _OUT_OF_MEMORY)
        for parser in parsers:
            parser.feed(line)
    for parser in parsers:
        parser.finish()
    found = [p.reading for p in parsers if p.reading.intervals]
    if found:
        best = found[0]
        for other in (p.reading for p in parsers if p.reading is not best):
            best.memory += other.memory if not best.memory else []
            best.stated = {**other.stated, **best.stated}
        if out_of_memory:
            best.notes.append("ends out of memory, after steps that fit")
        return best
    if out_of_memory:
        return LogReading(str(path), "", stated={"out_of_memory": True})
    partly = [p.reading.format for p in parsers if p.reading.notes or p.reading.stated]
    cut = f" (lines of {', '.join(partly)} that are cut)" if partly else ""
    expected = next((p.hint for p in parsers if p.hint), f"expected a log of {', '.join(PARSERS)}, with their lines of progress on")
    raise InputError(f"{path}: no line says how long a step took{cut}; {expected}")
