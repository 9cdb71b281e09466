"""A launch script, run with stand-ins: the scenario of what it would have started."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Unpack

from simpar.boundary import MOST_CONFIG_BYTES, read_text
from simpar.interop.argv import options
from simpar.interop.carried import Imported, Outside
from simpar.interop.configs import load_config
from simpar.interop.finetune_launch import load_words
from simpar.interop.megatron_import import of_words
from simpar.interop.stub_launch import flags_words, run_script

_FILES: Final = ("config-file", "job.config-file", "deepspeed-config", "deepspeed")
"""Flags that name a configuration of nanotron, torchtitan or DeepSpeed."""


def load(
    script: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    accept: Collection[str] = (),
    **outside: Unpack[Outside],
) -> Imported:
    """The scenario of the training command that `script` starts. The script is executed.

    Raises:
        InputError: it starts nothing that is read, or what it starts cannot be read.
    """
    text = read_text(script, MOST_CONFIG_BYTES)
    words = flags_words(run_script(script, arguments, variables), script)
    found = options(words)
    if "num-layers" not in found:
        tuned = load_words(words, found, script, accept=accept, **outside)
        if tuned is not None:
            return tuned
        named = next((found[name][0] for name in _FILES if found.get(name)), "")
        for place in (Path(named), script.parent / named) if named else ():
            if place.is_file():
                return load_config(place, accept=accept, **outside)
    return of_words(words, text=text, file=str(script), accept=accept, **outside)
