"""Where the host waits for the device among a rank's requests to the allocator."""

from __future__ import annotations

from typing import Final

from simpar.parallel.layout import Layout
from simpar.result.allocator import HOST_AHEAD, HOST_WAITS, Event


class Host:
    """Where the host of a pipeline rank waits for its device, and where the device waits for a neighbour while the host runs on.

    Only where receiving needs the host (`receives_block_host`): without receives it runs ahead throughout. A rank's device is held
    from its third forward in a row on, as the stage behind takes the second output only when it is through with the first.
    """

    FREE_FORWARDS: Final = 2

    def __init__(self, layout: Layout, events: list[Event]) -> None:
        self.layout, self.events, self.last = layout, events, layout.num_stages - 1
        self.active = layout.plan.pp > 1 and layout.framework.pipeline.receives_block_host
        self.forwards = 0
        if self.active:
            events.append(HOST_WAITS)

    def before(self, phase: str, stage: int, first: int, last: int) -> None:
        """Blocks [first, last) of a stage begin."""
        begins = first == 0 if phase == "F" else last >= len(self.layout.stage_blocks[stage])
        if not self.active or phase == "W" or not begins:
            return
        self.forwards += phase == "F"
        if stage != (0 if phase == "F" else self.last):
            self.events.append(HOST_WAITS)
            self.forwards = int(phase == "F")
        elif self.forwards > self.FREE_FORWARDS:
            self.events.append(HOST_AHEAD)
