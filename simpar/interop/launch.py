"""How a layout is started: the torchrun and sbatch lines, and which rank has which place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from simpar.errors import Violation
from simpar.specs.scenario import Scenario
from simpar.topology.mesh import Mesh


def gpu_violations(scenario: Scenario, framework: str) -> list[Violation]:
    """A violation where the machine is none that `framework` runs on."""
    architecture = scenario.hardware.gpu.architecture
    if architecture in ("tpu", "cpu"):
        rule = f"{framework} runs on GPUs, and these are of kind {architecture}"
        return [Violation("cluster.hardware", scenario.cluster.hardware, rule, "a profile of a GPU machine")]
    return []


WORK: Final = {
    "plan.encoder_stages": "stages of encoders alone", "training.images": "images for an encoder",
    "training.audio": "sound for an encoder", "training.reference_model": "a reference model beside the trained one",
    "training.document_lengths": "lengths of packed documents", "training.launch_blocking": "CUDA_LAUNCH_BLOCKING, for debugging",
    "training.collective_checks": "TORCH_DISTRIBUTED_DEBUG, for debugging",
}  # fmt: skip
"""Fields of a step's work that come from data and script rather than from a layout's settings, in words."""


def work_violations(scenario: Scenario, framework: str, *, documents: bool = False) -> Iterator[Violation]:
    """Violations of what the step works on and the launch files do not say.

    Args:
        documents: the files say that documents are packed.
    """
    plan, training = scenario.plan, scenario.training
    found = {
        "plan.encoder_stages": (plan.encoder_stages, "0"),
        "training.images": (training.images.per_sample, "per_sample = 0"),
        "training.audio": (training.audio.per_sample, "per_sample = 0"),
        "training.reference_model": (getattr(training.reference_model, "name", training.reference_model), "false"),
        "training.launch_blocking": (training.launch_blocking, "false"),
        "training.collective_checks": (training.collective_checks, "false"),
        "training.document_lengths": (() if documents else training.document_lengths, "leave it out"),
    }
    for path, (value, right) in found.items():
        if value:
            yield Violation(path, value, f"launch files for {framework} do not say this ({WORK[path]})", right)
    if not plan.shard_experts:
        yield Violation("plan.shard_experts", False, f"{framework} shards experts as it does the rest", "true")


def documents_text(scenario: Scenario) -> str:
    """Packed documents, for a comment; empty where a sequence is one document."""
    lengths = scenario.training.document_lengths
    mean = sum(lengths) / max(len(lengths), 1)
    return f"documents of {mean:.0f} tokens on average, packed, attention inside each" if lengths else ""


def nodes_and_gpus(scenario: Scenario) -> tuple[int, int]:
    """Nodes that are started, and processes on each."""
    per_node = min(scenario.hardware.gpus_per_node, scenario.world_size)
    return -(-scenario.world_size // per_node), per_node


def torchrun(scenario: Scenario, script: str, arguments: str = "") -> str:
    """The torchrun line of one node; the rendezvous comes from the environment."""
    nodes, per_node = nodes_and_gpus(scenario)
    line = (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        f'--rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}" {script}'
    )
    return f"{line} {arguments}".rstrip()


def sbatch(scenario: Scenario, command: str, name: str) -> str:
    """A Slurm batch script that runs `command` once per node."""
    nodes, per_node = nodes_and_gpus(scenario)
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
srun {command}
"""


def beside(scenario: Scenario, name: str) -> dict[str, str]:
    """File name -> text of what stands beside a launch script `name`.sh: the Slurm script and the rank map."""
    return {f"{name}.sbatch": sbatch(scenario, f"bash {name}.sh", name), "rank_map.csv": rank_map(scenario)}


def rank_map(scenario: Scenario) -> str:
    """CSV: node, local rank and coordinates of every rank.

    Ranks are numbered node by node; the order of the dimensions is the plan's placement.
    """
    mesh = Mesh.of(scenario.plan, scenario.world_size)
    ranks, per_node = np.arange(scenario.world_size), nodes_and_gpus(scenario)[1]
    columns = {"rank": ranks, "node": ranks // per_node, "local_rank": ranks % per_node}
    for name in ("pp", "dp", "cp", "tp", *(("edp", "ep", "etp") if scenario.plan.ep > 1 else ())):
        place, below = np.zeros_like(ranks), 1
        for axis in mesh.axes(name):
            place += ranks // axis.stride % axis.size * below
            below *= axis.size
        columns[name] = place
    rows = np.stack(list(columns.values()), axis=1).tolist()
    return "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n"
