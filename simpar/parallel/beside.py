"""Expert exchanges that run beside another micro-batch's compute: op lists as every level of detail sees them."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from simpar.hashed import HashedOnce
from simpar.parallel.blocks import LocalBlock
from simpar.parallel.keys import BlockOp
from simpar.parallel.layout import Layout
from simpar.parallel.work import ExpertExchange, LocalOp

_LISTS: Final = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


def list_of(block: LocalBlock, phase: str) -> tuple[LocalOp, ...]:
    """The op list of a block in one phase (F, B, I, W), beside nothing else."""
    found: tuple[LocalOp, ...] = getattr(block, _LISTS[phase])
    return found


def op_of(layout: Layout, key: BlockOp) -> LocalOp:
    """The op that a key of detail "op" stands for."""
    return list_of(layout.stage_blocks[key.stage][key.block], key.phase)[key.index]


def ops_of(layout: Layout, block: LocalBlock, phase: str) -> tuple[LocalOp, ...]:
    """The same as a layout's schedule has it."""
    ops = list_of(block, phase)
    return arranged(ops) if _overlaps(layout, block) and _dualpipe(layout) else ops


def hides_exchanges(layout: Layout, block: LocalBlock, phase: str) -> bool:
    """Whether a pass (F or B) of one micro-batch runs beside another's backward, or forward: 1F1B with expert overlap."""
    return _overlaps(layout, block) and not _dualpipe(layout) and phase in ("F", "B") and layout.num_microbatches > 1


@lru_cache(maxsize=4096)
def arranged(ops: tuple[LocalOp, ...]) -> tuple[LocalOp, ...]:
    """An op list under DualPipe: chunks of its two directions are cut and ordered by hand so that exchanges lie under the other's
    compute (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), in the warm-up as well; no op waits for one, but the list does."""
    exchanges = {index for index, op in enumerate(ops) if isinstance(op.work, ExpertExchange)}
    free = (tuple(d for d in op.deps if d not in exchanges) for op in ops)
    return HashedOnce(op if op.deps == deps else op._replace(deps=deps) for op, deps in zip(ops, free, strict=True))


def _overlaps(layout: Layout, block: LocalBlock) -> bool:
    return layout.degrees.overlap_ep and block.expert_parameters > 0


def _dualpipe(layout: Layout) -> bool:
    return layout.plan.schedule.startswith("dualpipe")
