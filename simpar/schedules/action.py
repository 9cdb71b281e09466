"""One step of a pipeline schedule, written as torch.distributed.pipelining writes it.

``2F0`` is stage 2, forward, microbatch 0. A stage is a *virtual* stage. Phases are torch's: F forward, B full
backward, I input gradient, W weight gradient, with B = I + W. (The zero-bubble papers call the input gradient
"B" and the full backward "BW"; simpar never does.)
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

from simpar.errors import InputError


class Phase(StrEnum):
    """What an action does. The values are torch's, so that text and CSV files are exchangeable."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter
    W = "W"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    __hash__ = str.__hash__
    """As fast as that of a name: programs look actions up by the hundred thousand."""


COMPUTE_PHASES: Final = (Phase.F, Phase.B, Phase.I, Phase.W)
"""The phases that compute; the position in this tuple is the phase code of `Schedule.as_arrays`."""

COMMUNICATION_PHASES: Final = (Phase.SEND_F, Phase.RECV_F, Phase.SEND_B, Phase.RECV_B)
"""Point-to-point phases: ``2RECV_F0`` is stage 2 receiving the forward activation of microbatch 0."""

FSDP_PHASES: Final = (Phase.UNSHARD, Phase.RESHARD, Phase.REDUCE_GRAD)
"""Phases that concern a stage's parameters and carry no microbatch."""

NO_INDEX: Final = -1
"""The stage or microbatch of an action that has none; torch's own placeholder."""

_WITHOUT_MICROBATCH: Final = frozenset(FSDP_PHASES)
_NAMES: Final = "|".join(phase for phase in Phase if phase is not Phase.OVERLAP_F_B)
_SIMPLE: Final = re.compile(rf"([0-9]{{1,9}})({_NAMES})([0-9]{{0,9}})")
_GRAMMAR: Final = 'write "2F0" (stage, phase, microbatch), "2UNSHARD" or "(0F4;7B1)OVERLAP_F_B"'


class Action(NamedTuple):
    """One action of a schedule.

    `parts` is empty except for an overlapped pair (`OVERLAP_F_B`), which runs its parts at the same time as
    one op. A pair has no stage or microbatch of its own, an FSDP phase no microbatch: those fields hold
    `NO_INDEX`.
    """

    stage: int
    phase: Phase
    microbatch: int = NO_INDEX
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.phase}"
        microbatch = "" if self.microbatch == NO_INDEX else self.microbatch
        return f"{self.stage}{self.phase}{microbatch}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlapped pair, or the action itself."""
        return self.parts or (self,)

    @property
    def computes(self) -> bool:
        """Whether the action is F, B, I, W or an overlapped pair of them."""
        return self.phase in COMPUTE_PHASES or self.phase is Phase.OVERLAP_F_B


def overlapped(forward: Action, backward: Action) -> Action:
    """A forward and a backward that run at the same time: ``(0F4;7B1)OVERLAP_F_B``."""
    return Action(NO_INDEX, Phase.OVERLAP_F_B, NO_INDEX, (forward, backward))


def parse_action(text: str) -> Action:
    """The action that `text` names; the exact inverse of ``str(action)``.

    >>> parse_action("(0F4;7B1)OVERLAP_F_B").leaves[1]
    Action(stage=7, phase=<Phase.B: 'B'>, microbatch=1, parts=())

    Raises:
        InputError: `text` is not an action.
    """
    stripped = text.strip()
    if stripped.startswith("("):
        return _parse_pair(stripped)
    match = _SIMPLE.fullmatch(stripped)
    if match is None:
        raise InputError(f"{text!r} is not an action; {_GRAMMAR}")
    phase = Phase(match.group(2))
    if (match.group(3) == "") != (phase in _WITHOUT_MICROBATCH):
        rule = "takes no microbatch" if phase in _WITHOUT_MICROBATCH else "needs a microbatch"
        raise InputError(f"{text!r} is not an action: {phase} {rule}; {_GRAMMAR}")
    return Action(int(match.group(1)), phase, int(match.group(3) or NO_INDEX))


def _parse_pair(text: str) -> Action:
    inside, bracket, phase = text[1:].partition(")")
    if not bracket or phase != Phase.OVERLAP_F_B:
        raise InputError(f"{text!r} is not an action; {_GRAMMAR}")
    parts = tuple(parse_action(part) for part in inside.split(";"))
    if [part.phase for part in parts] not in ([Phase.F, Phase.B], [Phase.F, Phase.I]):
        raise InputError(f"{text!r} is not an action: a pair holds a forward, then a backward; {_GRAMMAR}")
    return Action(NO_INDEX, Phase.OVERLAP_F_B, NO_INDEX, parts)
