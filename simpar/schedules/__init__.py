"""Pipeline schedules: order as data, one file per kind of order, all of them in `SCHEDULES`.

>>> print(*build_schedule("1f1b", num_ranks=2, num_microbatches=2).rows[0])
0F0 0F1 0B0 0B1
"""

from __future__ import annotations

from typing import Final

from simpar.registry import Registry
from simpar.schedules.action import COMPUTE_PHASES, NO_INDEX, Action, Phase, overlapped, parse_action
from simpar.schedules.automatic import ZB_1P, ZB_2P
from simpar.schedules.building_block import V_HALF, V_MIN
from simpar.schedules.dualpipe import DUALPIPE
from simpar.schedules.dualpipe_v import DUALPIPE_V
from simpar.schedules.family import ScheduleFamily
from simpar.schedules.gpipe import GPIPE, INTERLEAVED_BFS, NAIVE
from simpar.schedules.interleaved import INTERLEAVED, ONE_F_ONE_B
from simpar.schedules.interleaved_zb import INTERLEAVED_ZB, ZB_H1, ZB_H2
from simpar.schedules.order import PREREQUISITES, Chain, OrderArrays, Replay, Rows
from simpar.schedules.schedule import Schedule
from simpar.schedules.zb_v import ZB_V

SCHEDULES: Final[Registry[ScheduleFamily]] = Registry(
    "schedule",
    {
        "naive": NAIVE,
        "gpipe": GPIPE,
        "1f1b": ONE_F_ONE_B,
        "interleaved": INTERLEAVED,
        "interleaved_1f1b": INTERLEAVED,
        "interleaved_bfs": INTERLEAVED_BFS,
        "interleaved_zb": INTERLEAVED_ZB,
        "zb-h1": ZB_H1,
        "zb-h2": ZB_H2,
        "zb-1p": ZB_1P,
        "zb-2p": ZB_2P,
        "zb-v": ZB_V,
        "v-half": V_HALF,
        "v-min": V_MIN,
        "dualpipe": DUALPIPE,
        "dualpipe-v": DUALPIPE_V,
    },
)
"""Name in a scenario file -> family. Several names may mean the same family."""


def build_schedule(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int | None = None, **options: object
) -> Schedule:
    """The schedule called `name` for p ranks, m microbatches and v virtual stages per rank.

    Raises:
        UnknownNameError: there is no such schedule.
        InputError: the schedule cannot have this shape; lists every requirement that it breaks.
    """
    return SCHEDULES[name].build(num_ranks, num_microbatches, virtual_stages, **options)


__all__ = [
    "COMPUTE_PHASES",
    "NO_INDEX",
    "PREREQUISITES",
    "SCHEDULES",
    "Action",
    "Chain",
    "OrderArrays",
    "Phase",
    "Replay",
    "Rows",
    "Schedule",
    "ScheduleFamily",
    "build_schedule",
    "overlapped",
    "parse_action",
]
