"""What a layout must have unless asked otherwise, for the command line too: nothing is imported for it."""

from __future__ import annotations

from typing import Final

FIT_PROBABILITY: Final = 0.9
"""Chance to fit the memory."""
