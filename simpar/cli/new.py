"""The command `simpar new`: a first scenario from a few answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from simpar.cli.options import (
    BatchOption,
    FrameworkOption,
    GpusOption,
    HardwareOption,
    ModelOption,
    NodesOption,
    SequenceOption,
    plan_text,
)

if TYPE_CHECKING:
    from simpar.specs.options import RunOptions

T = TypeVar("T")

_TEMPLATE = """\
# Written by `simpar new`. Predict it: simpar simulate {file}    Find a better layout: simpar search {file}
name = {name}
model = {model} # a name of `simpar models`, the path of a Hugging Face config.json, or a [model] table
framework = {framework} # whose semantics: megatron-core, torchtitan, deepspeed, nanotron, plain, ...

[cluster]
hardware = {hardware} # a name of `simpar profiles`, or a file (`simpar profiles new`)
num_nodes = {num_nodes} # of {gpus_per_node} GPUs{part}

[plan] # {verdict}
{plan}
# dp follows from the cluster: {dp} here. More fields: cp, virtual_stages, schedule, shard_size, overlap_grad_reduce, ...

[training]
sequence_length = {sequence_length} # tokens per sequence
global_batch_size = {global_batch} # sequences per step, over all data-parallel ranks
micro_batch_size = {micro_batch} # sequences per micro-batch
precision = {precision} # bf16, fp16, fp8, mxfp8, ...
optimizer = "adamw"
"""
_COMMENTS = {
    "tp": "tensor parallel ranks",
    "sequence_parallel": "activations outside the tensor-parallel region are split along the sequence",
    "pp": "pipeline parallel ranks",
    "ep": "expert parallel ranks",
    "zero_stage": "0 plain, 1 optimizer states sharded, 2 and gradients, 3 and parameters (FSDP)",
    "recompute": "activations: none, selective or full",
}


def new(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("scenario.toml"),
    model: ModelOption = None,
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    num_gpus: GpusOption = None,
    global_batch: BatchOption = None,
    sequence_length: SequenceOption = None,
    framework: FrameworkOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a first scenario; on a terminal it asks for what the options leave out."""
    from simpar.specs.options import RunOptions

    _check_free(out, force)
    options = RunOptions(model, hardware, num_nodes, sequence_length, global_batch, framework, num_gpus)
    if sys.stdin.isatty():
        options = _asked(options)
    write_new(out, scenario_file(options, out), force)
    print(f"then: simpar simulate {out}")


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a file of the user's; one that is there only with `force`.

    Raises:
        InputError: it is there, or cannot be written.
    """
    from simpar.output import write_file

    _check_free(path, force)
    write_file(path, text.encode(), "--out")
    print(f"wrote {path}")


def _check_free(path: Path, force: bool) -> None:
    from simpar.errors import InputError, Violation

    if path.exists() and not force:
        raise InputError([Violation("--out", str(path), "is there already", "another name, or --force to replace it")])


def _asked(given: RunOptions) -> RunOptions:
    """`given` with an answer for everything that it leaves open; a wrong answer is asked again."""
    from simpar.specs.framework import framework as framework_of
    from simpar.specs.hardware import read_profile
    from simpar.specs.model import TransformerSpec
    from simpar.specs.models_io import load_model
    from simpar.specs.options import RunOptions

    def read_by(reader: Callable[[str], object]) -> Callable[[str], str]:
        return lambda text: (reader(text), text)[1]

    model = given.model or _answer("Model (a preset, or the path of a config.json)", "llama3.1-8b", read_by(load_model))
    machine = read_by(lambda text: read_profile(text, constants=False))
    hardware = given.hardware or _answer("Machine (`simpar profiles` lists them)", "dgx-h100", machine)
    nodes = given.num_nodes
    if nodes is None and given.num_gpus is None:
        nodes = _answer("Number of machines", "1", _count)
    sequence = given.sequence_length
    spec = load_model(model)
    if sequence is None and isinstance(spec, TransformerSpec):
        sequence = _answer("Sequence length, tokens", str(min(spec.max_position_embeddings or 4096, 8192)), _count)
    batch = given.global_batch or _answer("Global batch, sequences per step", str(16 * (nodes or 1)), _count)
    framework = given.framework or _answer("Framework", "megatron-core", read_by(framework_of))
    return RunOptions(model, hardware, nodes, sequence, batch, framework, given.num_gpus)


def _answer(question: str, default: str, check: Callable[[str], T]) -> T:
    from simpar.errors import InputError

    while True:
        text = typer.prompt(question, default=default)
        try:
            return check(str(text).strip())
        except InputError as error:
            print(f"  {error}", file=sys.stderr)


def _count(text: str) -> int:
    from simpar.errors import InputError

    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{text}: a whole number of at least 1")
    return int(text)


def scenario_file(options: RunOptions, out: Path) -> str:
    """The text of a commented scenario file with a layout to start from.

    Args:
        out: where it will lie: paths of a model or a profile are written as seen from there.

    Raises:
        InputError: options are missing or wrong.
    """
    from simpar.api.first_plan import first_layout
    from simpar.specs.scenario import make_scenario
    from simpar.toml import toml_value
    from simpar.topology.mesh import Mesh

    table, _ = options.table(None)
    table.setdefault("framework", "megatron-core")
    table["training"]["precision"] = _precision(table["cluster"]["hardware"])
    table, fits = first_layout(table)
    plan, scenario = table["plan"], make_scenario(table)
    training = scenario.training
    lines = [f"{key} = {toml_value(value)} # {_COMMENTS[key]}" for key, value in plan.items()]
    title = f"{scenario.model.name or table['model']} on {scenario.world_size} {scenario.hardware.gpu.name}"
    return _TEMPLATE.format(
        file=out.name, name=toml_value(title),
        model=toml_value(_from(out, table["model"])), framework=toml_value(table["framework"]),
        hardware=toml_value(_from(out, table["cluster"]["hardware"])), num_nodes=scenario.cluster.num_nodes,
        part=f"\nnum_gpus = {scenario.world_size} # used of them" if scenario.cluster.num_gpus else "",
        gpus_per_node=scenario.hardware.gpus_per_node,
        verdict=f"{'the first layout that fits' if fits else 'DOES NOT FIT: the closest layout'} ({plan_text(plan)}), not the best",
        plan="\n".join(lines), dp=Mesh.of(scenario.plan, scenario.world_size).dp, sequence_length=training.sequence_length,
        global_batch=training.global_batch_size, micro_batch=training.micro_batch_size, precision=toml_value(training.precision),
    )  # fmt: skip


def _from(out: Path, name: Any) -> str:
    """A name as it is, a path as seen from the folder of `out`."""
    path = Path(str(name))
    return os.path.relpath(path, out.parent) if path.exists() and not path.is_absolute() else str(name)


def _precision(hardware: str) -> str:
    """bf16 where the GPU has it, else fp16 or fp32."""
    from simpar.specs.hardware import read_profile

    peaks = read_profile(hardware, constants=False).gpu.peak_flops
    return next((name for name in ("bf16", "fp16") if name in peaks), "fp32")
