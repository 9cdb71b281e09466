"""Programs of the last few layouts: a slider that only changes prices (bandwidths, oversubscription) keeps what waits for what."""

from __future__ import annotations

import threading
from collections import OrderedDict

from simpar.parallel.layout import Layout
from simpar.program.lower import Detail, lower
from simpar.program.program import Program
from simpar.schedules import SCHEDULES, Schedule

PRICES_ONLY = {
    "nic_bandwidth_scale", "scale_up_bandwidth_scale", "oversubscription", "pod_oversubscription", "nics_per_node",
}  # fmt: skip
"""Fields of a cluster that change prices and nothing else."""
_KEPT = 8


class Programs:
    """`lower`, remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], Program] = OrderedDict()

    def __call__(self, layout: Layout, schedule: Schedule, detail: Detail = "layer", *, expand: bool = False) -> Program:
        """As `lower`."""
        scenario = layout.scenario
        name = scenario.plan.schedule
        if name != "auto" and (name not in SCHEDULES or SCHEDULES[name].wants_times):  # a file; its order depends on prices
            return lower(layout, schedule, detail, expand=expand)
        named = scenario.model_dump_json(exclude={"cluster": PRICES_ONLY, "description": True, "published": True})
        key = (named, layout.num_microbatches, detail, expand)
        found = self._kept.get(key)
        if found is None:
            found = lower(layout, schedule, detail, expand=expand)
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found
