"""Fitted kernel constants as TOML text."""

from __future__ import annotations

from typing import Any

from simpar.specs.kernel_constants import KernelConstants

HEADER = """# Written by `python -m simpar.evidence.fit kernels --data DIR`; do not edit by hand.
# Forms and sources: docs/formulas_kernels.md. `fit` holds the error reached, |predicted / measured - 1|;
# `held_out_*` on shapes that the fit did not see. `bands` are 80 % intervals of measured / predicted.
"""


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.5g}"
        return text if any(c in text for c in ".en") else f"{text}.0"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_scalar(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_scalar(v)}" for k, v in value.items()) + " }"
    raise TypeError(f"no TOML for {value!r}")


def dump(constants: KernelConstants) -> str:
    """The file of `constants`; fields at their defaults are left out."""
    table = constants.model_dump(exclude_defaults=True)
    lines = [HEADER]
    lines += [f"{k} = {_scalar(v)}" for k, v in table.items() if not isinstance(v, dict | tuple | list)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(f"\n[{key}]")
            lines += [f"{k} = {_scalar(v)}" for k, v in value.items()]
    for key, value in table.items():
        if isinstance(value, tuple | list):
            for item in value:
                lines.append(f"\n[[{key}]]")
                lines += [f"{k} = {_scalar(v)}" for k, v in item.items()]
    return "\n".join(lines) + "\n"
