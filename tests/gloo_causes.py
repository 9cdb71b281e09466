"""A small data-parallel job under gloo that can be slow for a known cause; writes a log as Megatron-LM's and a trace of each rank.

    torchrun --nproc-per-node 3 tests/gloo_causes.py FOLDER CAUSE

CAUSE: none, slow-rank (rank 1 computes three times as much), data (every batch is waited for), checkpoint (every fourth step
writes one before its clock stops).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

HIDDEN, ROWS, LAYERS = 768, 512, 4
BEFORE, STEPS = 3, 12
"""Steps without a trace, and with one."""
WAIT_S = 0.3
EVERY = 4
"""Steps between checkpoints."""


def main(folder: Path, cause: str) -> None:
    """Train, print and trace."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    job = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(job.parameters(), lr=1e-3)
    repeats = 3 if cause == "slow-rank" and rank == 1 else 1
    log = (folder / "train.log").open("w") if rank == 0 else None
    traced = schedule(wait=BEFORE, warmup=1, active=STEPS - 1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=traced) as profiler:
        for step in range(1, BEFORE + STEPS + 1):
            dist.barrier()
            start = time.perf_counter()
            if cause == "data":
                time.sleep(WAIT_S)
            loaded = time.perf_counter() - start
            batch = torch.randn(ROWS, HIDDEN)
            with job.no_sync():
                for _ in range(repeats - 1):
                    job(batch).square().mean().backward()
            job(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            saves = cause == "checkpoint" and step % EVERY == 0
            if saves:
                time.sleep(4 * WAIT_S)  # a slow disk
                dist.barrier()
            seconds = time.perf_counter() - start
            profiler.step()
            if log is not None:
                if saves:
                    print(f"saving checkpoint at iteration {step:8d} to {folder}", file=log)
                print(
                    f" iteration {step:8d}/{BEFORE + STEPS:8d} | consumed samples: {step * ROWS * ranks:12d} | "
                    f"elapsed time per iteration (ms): {1e3 * seconds:.1f} | number of skipped iterations:   0 |\n"
                    f"(min, max) time across ranks (ms):\n    batch-generator ....: ({1e3 * loaded:.2f}, {1e3 * loaded:.2f})",
                    file=log,
                )
    profiler.export_chrome_trace(str(folder / f"rank{rank}_trace.json"))
    if log is not None:
        log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
