"""How a layout is started: the torchrun and sbatch lines, and which rank has which place."""

from __future__ import annotations

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


def rank_map(scenario: Scenario) -> str:
    """CSV: node, local rank and coordinates of every rank.

    Ranks are numbered node by node; the order of the dimensions is the plan's placement.
    """
    plan = scenario.plan
    mesh = Mesh.of(plan, scenario.world_size)
    heads = ["pp", "dp", "cp", "tp", *(["edp", "ep", "etp"] if plan.ep > 1 else [])]
    lines = [",".join(["rank", "node", "local_rank", *heads])]
    per_node = nodes_and_gpus(scenario)[1]
    for rank in range(scenario.world_size):
        place = mesh.coordinates(rank)
        lines.append(",".join(map(str, (rank, rank // per_node, rank % per_node, *(place[h] for h in heads)))))
    return "\n".join(lines) + "\n"


__all__ = ["gpu_violations", "nodes_and_gpus", "rank_map", "sbatch", "torchrun"]
