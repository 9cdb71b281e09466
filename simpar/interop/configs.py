"""The one table of configurations that are read back: whatever a framework wrote or takes, told by its content."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from simpar.boundary import MOST_CONFIG_BYTES, parse_json, parse_yaml, read_text
from simpar.errors import InputError
from simpar.interop import megatron_import, nanotron_import, torchtitan_import
from simpar.interop.carried import Imported, Outside
from simpar.interop.deepspeed_import import load as load_deepspeed
from simpar.interop.finetune_import import dialect_of
from simpar.interop.finetune_import import load as load_finetune
from simpar.interop.gpt_neox import load as load_neox
from simpar.interop.megatron_bridge import load as load_bridge
from simpar.interop.megatron_bridge import printed_in
from simpar.interop.megatron_table import arguments_in, arguments_of_checkpoint, flags_of
from simpar.interop.primus import load as load_primus
from simpar.interop.torchtune_import import load as load_torchtune
from simpar.interop.verl import load as load_verl

Loader = Callable[..., Imported]
_LOG_BYTES: Final = 2**28
_NEOX: Final = {"pipe_parallel_size", "model_parallel_size", "hidden_size"}

YAML: Final[tuple[tuple[str, Callable[[dict[str, Any]], bool], Loader], ...]] = (
    ("nanotron", lambda t: {"parallelism", "model", "tokens"} <= set(t), nanotron_import.load),
    ("verl", lambda t: "actor_rollout_ref" in t, load_verl),
    ("primus", lambda t: isinstance(t.get("modules"), dict), load_primus),
    ("megatron-bridge", lambda t: {"model", "train"} <= set(t) and isinstance(t["model"], dict), load_bridge),
    ("torchtune", lambda t: "_component_" in (t["model"] if isinstance(t.get("model"), dict) else ()), load_torchtune),
    ("axolotl, LLaMA-Factory or TRL", lambda t: dialect_of(t) is not None, load_finetune),
    ("gpt-neox", lambda t: bool(_NEOX & {str(k).replace("-", "_") for k in t}), load_neox),
)  # fmt: skip
"""Format, what tells its file, and its reader; the first that fits."""


def load_config(
    path: Path, *, hardware: str | None = None, num_nodes: int | None = None, accept: Collection[str] = (), **more: Any
) -> Imported:
    """The scenario of the configuration, log or checkpoint at `path`.

    Raises:
        InputError: none that is known, or the reader's own reasons.
    """
    outside: Outside = {"hardware": hardware, "num_nodes": num_nodes}
    if path.is_dir() or path.suffix in (".pt", ".pth"):
        return load_megatron(path, accept=accept, **outside)
    text = read_text(path, _LOG_BYTES)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(text, path, accept, more, outside)
    if path.suffix == ".toml":
        return torchtitan_import.load(text, file=str(path), **outside)
    if path.suffix == ".json":
        return _json(text, path, more, outside)
    if arguments_in(text) or path.suffix in (".sh", ".sbatch"):
        return megatron_import.load(text, file=str(path), accept=accept, **outside)
    if printed_in(text):
        return load_bridge(text, file=str(path), accept=accept, **outside)
    names = ", ".join(name for name, _, _ in YAML)
    right = f"a configuration of torchtitan, DeepSpeed, {names}, a log with Megatron's arguments, or a checkpoint of it"
    raise InputError(f"{path}: is no configuration that is read; expected {right}")


def load_megatron(path: Path, **settings: Any) -> Imported:
    """The scenario of a log, a checkpoint or a command line of Megatron-LM.

    Raises:
        InputError: as `megatron_import.load`.
    """
    if path.is_dir() or path.suffix in (".pt", ".pth"):
        return megatron_import.of_flags(flags_of(arguments_of_checkpoint(path)), file=str(path), resolved=True, **settings)
    text = read_text(path, _LOG_BYTES)
    read = load_bridge if printed_in(text) and not arguments_in(text) else megatron_import.load
    return read(text, file=str(path), **settings)


def _yaml(text: str, path: Path, accept: Collection[str], more: dict[str, Any], outside: Outside) -> Imported:
    if len(text) > MOST_CONFIG_BYTES:
        raise InputError(f"{path}: is too large for a configuration")
    table = parse_yaml(text, path)
    if isinstance(table, dict):
        for _, fits, load in YAML:
            if fits(table):
                more = more if load in (load_finetune, load_torchtune) else {}
                return load(text, file=str(path), accept=accept, **more, **outside)
        if "distributed_type" in table:
            right = "the run's own file, and this one by --accelerate"
            raise InputError(f"{path}: is accelerate's, which says how GPUs share a model and not which; expected {right}")
    known = ", ".join(name for name, _, _ in YAML)
    raise InputError(f"{path}: is no configuration that is read; expected one of {known}")


def _json(text: str, path: Path, more: dict[str, Any], outside: Outside) -> Imported:
    table = parse_json(text, path, "a configuration of DeepSpeed or torchtitan")
    if isinstance(table, dict) and "parallelism" in table and "training" in table:
        return torchtitan_import.load_dumped(table, text, file=str(path), **outside)
    return load_deepspeed(text, file=str(path), **more, **outside)
