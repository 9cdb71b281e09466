"""Pictures: those of the README, which `python docs/_site/pictures.py` draws anew into docs/images/, and those of the site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import simpar
from simpar.program.program import COMPUTE_KINDS, OpKind
from simpar.report.palette import BLUE, GREEN, GREY, IDLE, ORANGE, PHASES, VERMILION

OUT: Final = Path(__file__).parents[1] / "images"
SCENARIO: Final = "llama3.1-70b_h100x64_tp4cp2pp4"
COLOURS: Final = {OpKind.FORWARD: "forward", OpKind.BACKWARD: "backward", OpKind.OPTIMIZER: "optimizer"}


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """A filled rectangle."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" fill="{colour}">{tip}</rect>'


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """A whole picture on white, so that it reads on light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="{width}" height="{height}" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )


def step_picture() -> str:
    """A step's waterfall, and below it the timeline of its pipeline ranks."""
    step = simpar.simulate(SCENARIO, global_batch_size=32, virtual_stages=1, schedule="1f1b", detail="stage")
    found = step.details
    width, left = 900, 230
    parts = [text(12, 24, f"{step.name}, 32 sequences a step: where {step.step_time_s:.2f} s go", size=15)]
    rows = [(str(row["part"]), float(row["seconds"])) for row in step.waterfall if row["part"] != "step"]  # type: ignore[arg-type]
    rows = [(part, seconds) for part, seconds in rows if seconds >= 0.002 * step.step_time_s]
    scale, at = (width - left - 70) / step.step_time_s, 0.0
    for index, (part, seconds) in enumerate(rows):
        y = 40 + 22 * index
        parts += [
            text(left - 8, y + 13, part, "end"),
            box(left + at * scale, y, seconds * scale, 17, GREEN if index == 0 else BLUE, f"{part}: {seconds:.3f} s"),
            text(left + (at + seconds) * scale + 5, y + 13, f"{seconds:.2f} s", size=11, colour=GREY),
        ]
        at += seconds
    top = 40 + 22 * len(rows) + 34
    parts.append(text(12, top - 12, "its pipeline: 4 ranks, 1F1B"))
    parts += timeline(found, left, top, width - left - 70)
    return svg(width, top + 4 * 30 + 34, "Waterfall and pipeline timeline of one training step", parts)


def timeline(found: Any, left: float, top: float, width: float) -> Iterator[str]:
    """Compute ops of every pipeline rank."""
    program, times = found.program, found.timeline
    scale = width / times.makespan
    for index, stream in enumerate(program.streams):
        if stream.kind != "compute":
            continue
        y = top + stream.role * 30
        yield text(left - 8, y + 16, f"rank {stream.role}", "end")
        yield box(left, y, width, 24, IDLE)
        for op in program.stream_ops[program.stream_ptr[index] : program.stream_ptr[index + 1]].tolist():
            kind = OpKind(int(program.kind[op]))
            if kind in COMPUTE_KINDS:
                start, finish = float(times.start[op]), float(times.finish[op])
                colour = PHASES[COLOURS.get(kind, "optimizer")][int(program.microbatch[op]) % 2]
                yield box(left + start * scale, y, (finish - start) * scale - 0.5, 24, colour, program.label(op))
    y = top + 4 * 30 + 12
    for i, (name, shade) in enumerate(
        (("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"), ("bubble", ""))
    ):
        colour = PHASES[shade][0] if shade else IDLE
        yield box(left + i * 110, y, 12, 12, colour)
        yield text(left + i * 110 + 18, y + 11, name)


def search_picture() -> str:
    """Time against memory of many layouts, and the front of those that nothing beats in both."""
    grid = simpar.sweep(
        SCENARIO, tp=[1, 2, 4, 8], pp=[1, 2, 4, 8], cp=[1, 2], recompute=["none", "selective", "full"], micro_batch_size=[1, 2],
        virtual_stages=1, schedule="1f1b", detail="stage",
    )  # fmt: skip
    points = [
        (
            r["step_time_s"],
            r["peak_memory_bytes"] / 2**30,
            f"tp {r['tp']}, pp {r['pp']}, cp {r['cp']}, recompute {r['recompute']}, mbs {r['micro_batch_size']}",
        )  # type: ignore[operator]
        for r in grid
        if r["step_time_s"]
    ]
    device = simpar.simulate(SCENARIO, detail="stage").device_memory_bytes / 2**30
    width, height, left, base = 900, 380, 70, 330
    low, high, most = min(p[0] for p in points) * 0.97, min(p[0] for p in points) * 1.8, 160.0
    x = lambda seconds: left + (seconds - low) / (high - low) * (width - left - 30)  # noqa: E731
    y = lambda memory: base - memory / most * (base - 40)  # noqa: E731
    parts = [
        text(12, 24, "Llama 3 70B on 64 H100, 128 sequences: step time against memory of the fullest GPU", size=15),
        f'<line x1="{left}" y1="{base}" x2="{width - 30}" y2="{base}" stroke="#222"/><line x1="{left}" y1="40" x2="{left}" y2="{base}" stroke="#222"/>',
        f'<line x1="{left}" y1="{y(device):.1f}" x2="{width - 30}" y2="{y(device):.1f}" stroke="{VERMILION}" stroke-dasharray="5 4"/>',
        text(width - 34, y(device) - 6, f"what an H100 has: {device:.1f} GiB", "end", colour=VERMILION),
        text(width - 30, base + 32, "seconds a step", "end"), text(12, 44, "GiB"),
    ]  # fmt: skip
    parts += [text(x(t), base + 16, f"{t}", "middle", 11) for t in range(int(low) + 1, int(high) + 1, 2)]
    parts += [text(left - 6, y(m) + 4, f"{m}", "end", 11) for m in range(0, int(most) + 1, 40)]
    shown = sorted(p for p in points if p[0] <= high and p[1] <= most)
    for seconds, memory, name in shown:
        better = any(t <= seconds and m <= memory and (t, m) != (seconds, memory) for t, m, _ in shown)
        colour = "#c9ced6" if memory > device else ORANGE if better else BLUE
        parts.append(
            f'<circle cx="{x(seconds):.1f}" cy="{y(memory):.1f}" r="{4 if better else 6}" fill="{colour}"><title>{escape(name)}</title></circle>'
        )
    for i, (colour, words) in enumerate(((BLUE, "no layout is better in both"), (ORANGE, "fits"), ("#c9ced6", "does not fit"))):
        parts += [
            f'<circle cx="{left + 20 + 230 * i}" cy="{base + 36}" r="5" fill="{colour}"/>',
            text(left + 32 + 230 * i, base + 40, words),
        ]
    return svg(width, height, "Step time against memory of many layouts", parts)


def family_of(framework: str) -> str:
    """The framework that another one is built on, all the way down."""
    from simpar.specs.framework_releases import ALIASES
    from simpar.specs.framework_rows import FRAMEWORKS

    name = ALIASES.get(framework, framework)
    while FRAMEWORKS[name][0]:
        name = FRAMEWORKS[name][0]
    return name


def unseen_by_family() -> dict[str, list[tuple[float, float, bool]]]:
    """Family -> (measured, predicted, inside the 80 % interval) of every run whose source no fit has seen."""
    import csv
    import json

    from simpar.specs.base import data_dir

    runs: dict[str, str] = {}
    for path in sorted((data_dir("validation") / "runs").glob("*.jsonl")):
        with path.open() as lines:
            for line in lines:
                run = json.loads(line)
                runs[run["id"]] = family_of((run.get("scenario") or {}).get("framework", "megatron-core"))
    found: dict[str, list[tuple[float, float, bool]]] = {}
    with (data_dir("validation") / "unseen.csv").open() as lines:
        for row in csv.DictReader(lines):
            measured, predicted, low, high = (float(row[key]) for key in ("measured_s", "unseen_s", "low_s", "high_s"))
            found.setdefault(runs[row["run"]], []).append((measured, predicted, low <= measured <= high))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def families_picture() -> str:
    """Predicted against measured step times of unseen sources, a panel for each family of frameworks with ten runs."""
    names = {"megatron-core": "Megatron-LM, NeMo", "llm-foundry": "PyTorch FSDP", "deepspeed": "DeepSpeed",
             "torchtitan": "torchtitan, torchtune", "nanotron": "nanotron"}  # fmt: skip
    found = {name: points for name, points in unseen_by_family().items() if len(points) >= 10}
    side, gap, left, top = 250, 46, 52, 66
    rows = -(-len(found) // 3)
    parts = [text(12, 24, "Step times of sources that no fit has seen: predicted (up) against measured (right), seconds", size=15)]
    for i, (shade, words) in enumerate(((BLUE, "inside the 80 % interval"), (VERMILION, "outside"))):
        parts += [f'<circle cx="{18 + 190 * i}" cy="40" r="5" fill="{shade}"/>', text(28 + 190 * i, 44, words)]
    ends = [value for points in found.values() for measured, predicted, _ in points for value in (measured, predicted)]
    low, high = math.log10(min(ends)) - 0.1, math.log10(max(ends)) + 0.1
    for index, (name, points) in enumerate(found.items()):
        x0, y0 = left + index % 3 * (side + gap), top + 18 + index // 3 * (side + gap + 18)
        at = lambda value: (math.log10(value) - low) / (high - low) * side  # noqa: E731
        errors = sorted(abs(predicted / measured - 1.0) for measured, predicted, _ in points)
        label = f"{names.get(name, name)}: {len(points)} runs, median error {errors[len(errors) // 2]:.0%}"
        parts += [text(x0, y0 - 6, label), f'<rect x="{x0}" y="{y0}" width="{side}" height="{side}" fill="none" stroke="#8b949e"/>',
                  f'<line x1="{x0}" y1="{y0 + side}" x2="{x0 + side}" y2="{y0}" stroke="{GREY}" stroke-dasharray="4 4"/>']  # fmt: skip
        for power in range(math.ceil(low), math.floor(high) + 1):
            place = at(10.0**power)
            parts += [text(x0 + place, y0 + side + 15, f"{10.0**power:g}", "middle", 11),
                      text(x0 - 5, y0 + side - place + 4, f"{10.0**power:g}", "end", 11)]  # fmt: skip
        parts += [
            f'<circle cx="{x0 + at(measured):.1f}" cy="{y0 + side - at(predicted):.1f}" r="2.6" fill="{BLUE if inside else VERMILION}" fill-opacity="0.55"/>'
            for measured, predicted, inside in points
        ]
    return svg(
        left + 3 * (side + gap), top + rows * (side + gap + 18) + 10, "Predicted against measured step times by family", parts
    )


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    (OUT / "step.svg").write_text(step_picture())
    (OUT / "search.svg").write_text(search_picture())
