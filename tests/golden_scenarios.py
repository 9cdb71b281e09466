"""What simpar says of every shipped scenario, rounded, as one file: `python tests/golden_scenarios.py` writes it anew.

A change of meaning then shows in the diff of tests/golden/scenarios.json, where a person can judge it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from simpar.specs.base import data_dir
from simpar.specs.scenario import read_scenario
from simpar.step import simulate

FILE: Final = Path(__file__).parent / "golden" / "scenarios.json"
DIGITS: Final = 4
"""Significant digits: less than a price may change by without a reason, more than the engines' rounding."""


def scenario_files() -> list[Path]:
    """Every shipped scenario."""
    return sorted(Path(str(data_dir("scenarios"))).glob("*.toml"))


def rounded(value: Any) -> Any:
    """`value` with every number to so many digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def said_of(path: Path) -> dict[str, Any]:
    """Waterfall and memory ledger of one scenario."""
    result = simulate(read_scenario(path), detail="stage")
    fullest = max(result.memory, key=lambda rank: rank.allocated_bytes)
    found = {
        "step_time_s": result.step_time_s,
        "interval_s": [result.step_interval.low, result.step_interval.high],
        "model_flops": float(result.layout.model_flops),
        "hardware_flops": float(result.hardware_flops),
        "bubble_fraction": result.bubble_fraction,
        "waterfall_s": dict(result.waterfall()),
        "communication_s": dict(sorted(result.communication_s.items())),
        "fullest_rank": fullest.rank,
        "memory_gb": {name: amount / 1e9 for name, amount in sorted(fullest.at_peak.items())},
        "allocated_gb": [rank.allocated_bytes / 1e9 for rank in (result.memory[0], result.memory[-1])],
        "notes": list(result.notes),
    }
    cleaned = rounded(found)
    assert isinstance(cleaned, dict)
    return cleaned


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(exist_ok=True)
    found = {path.stem: said_of(path) for path in scenario_files()}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{FILE}: {len(found)} scenarios")


if __name__ == "__main__":
    main()
