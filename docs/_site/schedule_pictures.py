"""A page with one picture for each pipeline schedule, drawn from the order that simpar runs."""

from __future__ import annotations

from html import escape
from typing import Final

RANKS: Final = 4
MICROBATCHES: Final = 8
WIDTH: Final = 880
"""Of the picture, in its own units; it scales to the page."""
ROW: Final = 24
LABEL: Final = 48
COLOURS: Final = {"F": "#4c78a8", "B": "#f58518", "I": "#eeca3b", "W": "#54a24b"}
WORDS: Final = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def schedules_page() -> str:
    """Markdown with every schedule: what it does, its source, its requirements seen in a picture, bubble and activations."""
    from simpar.schedules import SCHEDULES

    keys = " ".join(f'<span style="color:{COLOURS[p]}">■</span> {p} {word}' for p, word in WORDS.items())
    parts = [
        "# Schedules in pictures\n",
        f"Each schedule with {RANKS} ranks and {MICROBATCHES} micro-batches, as simpar replays it with equal stages: a forward takes 1,",
        "an input gradient 1, a weight gradient 1, a whole backward 2, and sending nothing. Numbers are micro-batches; a paler cell",
        "belongs to a rank's later virtual stage. [Pipeline schedules](../schedules.md) has the formulas and the details.\n",
        f"{keys}\n",
    ]
    seen = set()
    for name, family in SCHEDULES.items():
        if family.name in seen:
            continue
        seen.add(family.name)
        virtual = family.virtual_stages or (2 if "interleaved" in name else 1)
        schedule = family.build(RANKS, MICROBATCHES, virtual)
        replay = schedule.replay()
        bubble = schedule.unit_bubble() / replay.makespan
        held = max(schedule.peak_in_flight()) / virtual
        parts += [
            f"## `{name}`\n\n{family.summary[:1].upper()}{family.summary[1:].rstrip('.')}. Source: {family.source}.\n",
            f"Idle on the worst rank: {bubble:.0%} of the step. Activations held on the worst rank: {held:g} micro-batches of its layers.\n",
            picture(name, schedule, replay) + "\n",
        ]
    return "\n".join(parts)


def picture(name: str, schedule: object, replay: object) -> str:
    """An SVG with one row for each rank."""
    order = schedule.as_arrays()  # type: ignore[attr-defined]
    scale = (WIDTH - LABEL) / replay.makespan  # type: ignore[attr-defined]
    height = ROW * RANKS + 4
    found = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="Timeline of schedule {escape(name)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="10">'
    ]
    for rank in range(RANKS):
        found.append(f'<text x="0" y="{rank * ROW + 16}" fill="currentColor">rank {rank}</text>')
        begin, end = order.rank_start[rank], order.rank_start[rank + 1]
        actions = [leaf for action in schedule.rows[rank] for leaf in action.leaves]  # type: ignore[attr-defined]
        first = min(action.stage for action in actions)
        for index, action in zip(range(begin, end), actions, strict=True):
            start, finish = replay.start[index], replay.finish[index]  # type: ignore[attr-defined]
            x, wide = LABEL + start * scale, (finish - start) * scale
            colour, shade = COLOURS[str(action.phase)], 1.0 if action.stage == first else 0.6
            found.append(
                f'<rect x="{x:.1f}" y="{rank * ROW + 2}" width="{max(wide - 0.6, 0.5):.1f}" height="{ROW - 4}" fill="{colour}" '
                f'fill-opacity="{shade}"><title>{escape(str(action))}: {start:g} to {finish:g}</title></rect>'
            )
            if wide >= 9:
                found.append(
                    f'<text x="{x + wide / 2:.1f}" y="{rank * ROW + 15}" text-anchor="middle" fill="#111">{action.microbatch}</text>'
                )
    return "".join(found) + "</svg>"
