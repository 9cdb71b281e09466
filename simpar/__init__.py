"""simpar: a discrete-event cluster simulator and planner for training large models in parallel.

The public API is the names below; everything else is internal. Each is loaded when it is first used, so that `import simpar` and
the command line start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__: str

if TYPE_CHECKING:
    from simpar.api.plans import PlanResult, plan
    from simpar.api.result import Comparison, Result
    from simpar.api.scenarios import load
    from simpar.api.searches import SearchResult, search
    from simpar.api.sites import OwnRun, SiteResult, adapt, own_run
    from simpar.api.steps import Explanation, Sweep, compare, explain, simulate, sweep
    from simpar.api.table import Table
    from simpar.api.tuning import Tuning, tune
    from simpar.errors import DeadlockError, InputError, InternalError, SimparError, UnknownNameError, Violation
    from simpar.specs.catalog import plan_names, scenario_names
    from simpar.specs.cluster import ClusterSpec as Cluster
    from simpar.specs.effects import EffectsSpec as Effects
    from simpar.specs.hardware import HardwareProfile, load_hardware, profile_names
    from simpar.specs.model import TransformerSpec as TransformerModel
    from simpar.specs.models_io import load_model, model_names
    from simpar.specs.plan import PlanSpec as Plan
    from simpar.specs.scenario import Scenario
    from simpar.specs.training import TrainingSpec as Training

_HOME = {
    "Cluster": "simpar.specs.cluster:ClusterSpec",
    "Comparison": "simpar.api.result",
    "DeadlockError": "simpar.errors",
    "Effects": "simpar.specs.effects:EffectsSpec",
    "Explanation": "simpar.api.steps",
    "HardwareProfile": "simpar.specs.hardware",
    "InputError": "simpar.errors",
    "InternalError": "simpar.errors",
    "OwnRun": "simpar.api.sites",
    "Plan": "simpar.specs.plan:PlanSpec",
    "PlanResult": "simpar.api.plans",
    "Result": "simpar.api.result",
    "Scenario": "simpar.specs.scenario",
    "SearchResult": "simpar.api.searches",
    "SimparError": "simpar.errors",
    "SiteResult": "simpar.api.sites",
    "Sweep": "simpar.api.steps",
    "Table": "simpar.api.table",
    "Training": "simpar.specs.training:TrainingSpec",
    "TransformerModel": "simpar.specs.model:TransformerSpec",
    "Tuning": "simpar.api.tuning",
    "UnknownNameError": "simpar.errors",
    "Violation": "simpar.errors",
    "adapt": "simpar.api.sites",
    "compare": "simpar.api.steps",
    "explain": "simpar.api.steps",
    "load": "simpar.api.scenarios",
    "load_hardware": "simpar.specs.hardware",
    "load_model": "simpar.specs.models_io",
    "model_names": "simpar.specs.models_io",
    "own_run": "simpar.api.sites",
    "plan": "simpar.api.plans",
    "plan_names": "simpar.specs.catalog",
    "profile_names": "simpar.specs.hardware",
    "scenario_names": "simpar.specs.catalog",
    "search": "simpar.api.searches",
    "simulate": "simpar.api.steps",
    "sweep": "simpar.api.steps",
    "tune": "simpar.api.tuning",
}
"""Public name -> the module that holds it, ":" and its name there where that differs."""

__all__ = [
    "Cluster", "Comparison", "DeadlockError", "Effects", "Explanation", "HardwareProfile", "InputError", "InternalError",
    "OwnRun", "Plan", "PlanResult", "Result", "Scenario", "SearchResult", "SimparError", "SiteResult", "Sweep", "Table",
    "Training", "TransformerModel", "Tuning", "UnknownNameError", "Violation", "__version__", "adapt", "compare", "explain",
    "load", "load_hardware", "load_model", "model_names", "own_run", "plan", "plan_names", "profile_names", "scenario_names",
    "search", "simulate", "sweep", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found = globals()[name] = _version()
        return found
    if name not in _HOME:
        raise AttributeError(f"module 'simpar' has no attribute {name!r}")
    module, _, own = _HOME[name].partition(":")
    found = globals()[name] = getattr(import_module(module), own or name)
    return found


def _version() -> str:
    """The version that was installed: its git tag, and the commits since then; "0+unknown" for a source tree that never was."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("simpar")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
