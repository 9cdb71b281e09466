"""The colours of every figure, in one place.

Blue, orange, green and grey are those of Okabe and Ito (jfly.uni-koeln.de/color, 2008). The shades of the Gantt were searched for
near them so that whatever shares a lane stays apart for readers without red, green or blue cones; the tests simulate that.
"""

from __future__ import annotations

from typing import Final

BLUE: Final = "#0072b2"
ORANGE: Final = "#e69f00"
VERMILION: Final = "#d55e00"
GREEN: Final = "#009e73"
GREY: Final = "#606060"
IDLE: Final = "#eceef1"
"""Nothing runs."""

Shades = tuple[str, str]
"""Of even micro-batches, of odd ones."""

PHASES: Final[dict[str, Shades]] = {
    "forward": ("#19537d", "#799bb3"),
    "backward": ("#f1b214", "#f7d277"),
    "input_gradient": ("#ff3000", "#ff876b"),
    "weight_gradient": ("#3ebe85", "#8fd9b8"),
    "overlapped": ("#7714d1", "#b077e4"),
    "optimizer": ("#000000", "#000000"),
}
"""What the compute stream runs."""

TRANSFERS: Final[dict[str, str]] = {
    "send_forward": "#87b2e5", "send_backward": "#84724a", "gather": "#d4c36f", "reduce": "#7a3b0c",
    "collective": "#813e9b", "offload": "#8b8c8a", "other": "#555555",
}  # fmt: skip
"""What the other streams run."""

WAITS: Final[dict[str, str]] = {"bubble": VERMILION, "pp": BLUE, "dp": GREEN, "skew": "#cc79a7", "other": GREY}
"""Causes of waits, in a strip of their own under what the compute stream runs."""

FOLDED: Final = "#a9b4c0"
"""Micro-batches that are not drawn one by one."""
