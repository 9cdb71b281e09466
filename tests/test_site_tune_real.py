"""`simpar tune` on real ranks of this machine: the best of a small space in fewer steps than trying all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
NEAR = 1.15
"""Layouts within it are as good as each other on a machine of two cores."""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("ranks", "budget"), [(2, 4)])
def test_the_best_of_a_small_space_on_gloo(ranks: int, budget: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_tune_real.py"), "--ranks", str(ranks), "--budget", str(budget)]
    done = subprocess.run([*command, "--folder", str(tmp_path), "--json"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trials"] < found["layouts"]
    if found["repeats_within"] > NEAR:
        pytest.skip(f"other work: the machine repeats its own steps within x {found['repeats_within']:.2f} alone")
    assert found["chosen_over_best"] < NEAR, found
