"""What one GPU can say about training besides its kernels: whole blocks, interference, power, launches, the allocator.

    python3 -m simpar.live.gpu_probes --what blocks|physics --store FILE.jsonl --limit 400 --device cuda

Every case is a record of the store as soon as it is measured; a run that is cut short goes on where it stopped. Block shapes are
none that any constant was fitted on. Needs torch and the standard library.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from simpar.live.bench_gemm import product
from simpar.live.block_sizes import BLOCKS, PARTS, STYLES, key_of_block
from simpar.live.device import Device, Telemetry, telemetry
from simpar.live.gpu_blocks import block_call
from simpar.live.measure import Clock, machine, measure_sustained, timing_of
from simpar.live.store import CalibrationError, Record, Store

Probe = Callable[[Device, bool], Record]
BLOCK_S: Final = 4.0
"""For each block and style."""
HEAT_S: Final = 180.0
SUSTAINED: Final = "physics/sustained products"
"""Takes HEAT_S, and does not begin with less."""
PAIRS: Final = 8
SIDE_SMS: Final = (8, 16, 32)
TRAINS: Final = (1, 10, 100, 1000, 10_000)


def _free(device: Device) -> None:
    gc.collect()
    device.reset_peaks()


def _blocks(device: Device, small: bool) -> Iterator[tuple[str, Callable[[], Record]]]:
    for style in STYLES:
        for name in BLOCKS:
            for part in PARTS:

                def one(n: str = name, s: str = style, b: bool = part == "step") -> Record:
                    call, fields = block_call(n, s, device, backward=b, small=small)
                    samples, more = measure_sustained(call, Clock(device.name), BLOCK_S if not small else 0.05)
                    t = timing_of(samples)
                    return {**fields, **more, "seconds": t.median_s, "low_s": t.low_s, "high_s": t.high_s, "samples": t.samples}

                yield key_of_block(name, style, part), one


def _square(small: bool) -> tuple[int, int, int]:
    return (64, 64, 64) if small else (8192, 8192, 8192)


def _beside(device: Device, small: bool, side: Callable[[], object]) -> Record:
    """A train of products alone, and while `side` runs on another stream; in turn, so that both have the same clock."""
    call, clock = product(_square(small), "bf16", "forward", device.tensors), Clock(device.name)
    count = 2 if small else 40
    call()
    side()
    alone, beside = [], []
    for _ in range(PAIRS):
        alone.append(clock.sample(call, count))
        device.wait()
        with device.side_stream():
            device.spin(2e-3)
            for _ in range(1 if small else 8):
                side()
        beside.append(clock.sample(call, count))
        device.wait()
    alone, beside = alone[1:], beside[1:]  # the first pair heats
    a, b = timing_of(alone), timing_of(beside)
    return {"alone_s": a.median_s, "beside_s": b.median_s, "slowdown": b.median_s / a.median_s}


def _copy_beside(device: Device, small: bool) -> Record:
    """Copies inside the device's memory, as gathered weights are copied beside a product."""
    size = 2**16 if small else 2**30
    source, target = (device.torch.zeros(size, dtype=device.torch.uint8, device=device.tensors) for _ in range(2))
    return {"bytes": size, **_beside(device, small, lambda: target.copy_(source))}


def _sms_beside(sms: int) -> Probe:
    def probe(device: Device, small: bool) -> Record:
        """Element-wise work on so few rows that it holds about `sms` multiprocessors, as a collective's kernel does."""
        rows = device.torch.zeros(sms, 2**10 if small else 2**16, device=device.tensors)

        def side() -> None:
            for _ in range(2 if small else 200):
                rows.softmax(dim=-1)

        return {"multiprocessors": sms, **_beside(device, small, side)}

    return probe


def _data(device: Device, small: bool) -> Record:
    """The same product on random and on constant operands: what the data alone does to power and clock."""
    torch, n, found = device.torch, 64 if small else 8192, {}
    for name, make in (("random", torch.randn), ("zeros", torch.zeros), ("ones", torch.ones)):
        a, b = (make(n, n, device=device.tensors).bfloat16() for _ in range(2))
        samples, _ = measure_sustained(lambda a=a, b=b: a @ b, Clock(device.name), 0.02 if small else 4.0)  # type: ignore[misc]
        found[f"{name}_s"] = timing_of(samples).median_s
    return {**found, "constant_over_random": found["zeros_s"] / found["random_s"]}


def _heat(device: Device, small: bool) -> Record:
    """Products without a pause: their time every half second, from a cold chip to its steady clock."""
    call, clock, found = product(_square(small), "bf16", "forward", device.tensors), Clock(device.name), []
    call()
    begin, end = time.monotonic(), time.monotonic() + (0.2 if small else HEAT_S)
    while time.monotonic() < end:
        repeats = 2 if small else 250
        found.append([round(time.monotonic() - begin, 2), clock.sample(call, repeats)])
    return {"series": found, "first_s": found[0][1], "last_s": found[-1][1], "seconds": found[-1][1]}


def _launches(device: Device, small: bool) -> Record:
    """Trains of kernels that do next to nothing: seconds a launch of the host, and of the device."""
    x, found = device.torch.zeros(1, device=device.tensors), []
    for length in TRAINS[:3] if small else TRAINS:
        times = []
        for _ in range(5):
            device.wait()
            begin, first = time.perf_counter(), device.mark()
            for _ in range(length):
                x.add_(1.0)
            host, last = time.perf_counter() - begin, device.mark()
            times.append((host / length, device.between(first, last) / length))
        found.append([length, sorted(h for h, _ in times)[2], sorted(d for _, d in times)[2]])
    return {"trains": found, "seconds": found[-1][1]}


def _fragments(device: Device, small: bool) -> Record:
    """Tensors of a layer's sizes, half of the memory in all, made and freed out of order: what is reserved over what is alive."""
    torch, units = device.torch, [17 + 29 * (index * 7919 % 53) for index in range(200)]
    room = 2**28 if small else torch.cuda.get_device_properties(0).total_memory / 2
    unit = int(room / sum(units))
    _free(device)
    alive: list[Any] = []
    for index, size in enumerate(units):
        alive.append(torch.empty(size * unit, dtype=torch.uint8, device=device.tensors))
        if index % 3 == 2:
            alive.pop((index * 31) % len(alive))
    held = sum(t.numel() for t in alive)
    return {"alive_bytes": held, **device.memory()}


PHYSICS: Final[dict[str, Probe]] = {
    "random and constant data": _data, "copies beside products": _copy_beside,
    **{f"{n} multiprocessors beside products": _sms_beside(n) for n in SIDE_SMS},
    "launches": _launches, "allocator": _fragments, SUSTAINED.removeprefix("physics/"): _heat,
}  # fmt: skip


def _physics(device: Device, small: bool) -> Iterator[tuple[str, Callable[[], Record]]]:
    for name, probe in PHYSICS.items():
        yield f"physics/{name}", lambda p=probe: p(device, small)  # type: ignore[misc]


WHAT: Final = {"blocks": _blocks, "physics": _physics}


def run(what: str, store: Store, device: Device, limit_s: float, say: Callable[[str], None]) -> int:
    """Measure what the store does not have yet; how many cases had no time left."""
    end, small, missed = device.now_s() + limit_s, not device.cuda, 0
    with telemetry(device) as beside:
        for key, probe in WHAT[what](device, small):
            if key in store.records:
                continue
            if device.now_s() + (HEAT_S if key == SUSTAINED and not small else 0.0) >= end:
                missed += 1
                continue
            _keep(store, key, probe, beside, say)
            _free(device)
    return missed


def _keep(store: Store, key: str, probe: Callable[[], Record], beside: Telemetry, say: Callable[[str], None]) -> None:
    begin = time.monotonic()
    try:
        found = probe()
    except Exception as error:  # whatever a new torch or compiler raises costs its own case only
        text = str(error).strip().splitlines()
        found = {"failed": f"{type(error).__name__}: {text[0][:200] if text else ''}"}
    took = time.monotonic() - begin
    series = {"gpu_series": beside.series(begin)} if "series" in found else {}
    store.append({"key": key, "kind": "probe", **found, "gpu": beside.during(begin), **series, "wall_s": took})
    say(f"{key}: {found.get('failed') or f'{took:.1f} s'}")


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 all measured, 1 time was up, 2 no torch or no GPU."""
    parser = argparse.ArgumentParser(prog="python -m simpar.live.gpu_probes")
    parser.add_argument("--what", choices=tuple(WHAT), required=True)
    parser.add_argument("--store", type=Path, required=True, help="JSONL, continued if there")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which no case begins")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    given = parser.parse_args(arguments)
    try:
        device = Device(given.device)
        if device.cuda and not device.torch.cuda.is_available():
            raise CalibrationError("torch sees no GPU; try the command with --device fake")
        if not device.cuda:
            device.torch.set_num_threads(1)
        store = Store(given.store)
        store.append(machine(given.device))
    except CalibrationError as error:
        sys.stderr.write(f"gpu_probes: {error}\n")
        return 2
    missed = run(given.what, store, device, given.limit, lambda text: print(text, flush=True))
    if missed:
        print(f"time is up with {missed} cases not measured; the same command goes on", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
