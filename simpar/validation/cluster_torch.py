"""Which of simpar's pipeline schedules torch has a class for; the others run from the CSV that simpar writes."""

from __future__ import annotations

from typing import Final

HAS_CLASS: Final = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zb-v": "ScheduleZBVZeroBubble",
    "interleaved_bfs": "ScheduleLoopedBFS", "interleaved_zb": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
"""simpar's name -> class of torch.distributed.pipelining.schedules."""
