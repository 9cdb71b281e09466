"""How a layout is started: the torchrun and sbatch lines, and which rank has which place."""

from __future__ import annotations

from simpar.specs.scenario import Scenario
from simpar.topology.mesh import Mesh


def torchrun(scenario: Scenario, script: str, arguments: str = "") -> str:
    """The torchrun line of one node; nodes and rendezvous come from the environment."""
    per_node = min(scenario.hardware.gpus_per_node, scenario.world_size)
    nodes = -(-scenario.world_size // per_node)
    line = (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d "
        f'--rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}" {script}'
    )
    return f"{line} {arguments}".rstrip()


def sbatch(scenario: Scenario, command: str, name: str) -> str:
    """A Slurm batch script that runs `command` once per node."""
    per_node = min(scenario.hardware.gpus_per_node, scenario.world_size)
    nodes = -(-scenario.world_size // per_node)
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


def rank_map(scenario: Scenario, most: int = 65536) -> str:
    """CSV: node, local rank and coordinates of every rank.

    Ranks are numbered node by node; the order of the dimensions is the plan's placement. At most `most` ranks are listed.
    """
    plan = scenario.plan
    mesh = Mesh.of(plan, scenario.world_size)
    experts = plan.ep > 1
    heads = ["rank", "node", "local_rank", "pp", "dp", "cp", "tp", *(["edp", "ep", "etp"] if experts else [])]
    lines = [",".join(heads)]
    per_node = scenario.hardware.gpus_per_node
    for rank in range(min(scenario.world_size, most)):
        place = mesh.coordinates(rank)
        row = [rank, rank // per_node, rank % per_node, *(place[h] for h in heads[3:])]
        lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


__all__ = ["rank_map", "sbatch", "torchrun"]
