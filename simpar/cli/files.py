"""Files of other programs: `simpar import ...` makes parts of a hardware profile or scenarios of them, `simpar export` writes
launch files.

A further importer is one function here.

Only parsing and printing; readers are imported inside the command that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from simpar.interop.carried import Imported
    from simpar.interop.profile_parts import Part


from simpar.cli.options import ScenarioFile, SetOption, SizeOption

import_app = typer.Typer(no_args_is_help=True, help="Take what other programs measured or know of a machine.")

File = Annotated[Path, typer.Argument(help="The file to read.", metavar="FILE")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write it as TOML.")]


def _finish(part: Part, out: Path | None, as_json: bool) -> None:
    """Write and print a part: notes to stderr, TOML (without --out) or JSON to stdout."""
    from simpar.interop.profile_parts import toml_of, write_part

    if out is not None:
        write_part(part, out)
    if as_json:
        print_json(part.to_json())
        return
    for note in part.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {out}" if out is not None else toml_of(part.to_json()).strip())


@import_app.command("nccl-tests")
def nccl_tests(
    file: File,
    out: OutOption = None,
    as_json: JsonOption = False,
    collective: Annotated[str, typer.Option(help="Where the output does not name it: all_reduce, ...")] = "",
    ranks: Annotated[int, typer.Option(help="Where the output lists no devices.", min=0)] = 0,
    nodes: Annotated[int, typer.Option(help="Where the output lists no devices.", min=0)] = 0,
) -> None:
    """Output of nccl-tests, text or -J: measured collectives and their fit."""
    from simpar.interop.nccl_tests import read

    _finish(read(file, collective=collective, ranks=ranks, nodes=nodes), out, as_json)


def _reads(module: str) -> Callable[[Path, Path | None, bool], None]:
    def command(file: File, out: OutOption = None, as_json: JsonOption = False) -> None:
        _finish(import_module(f"simpar.interop.{module}").read(file), out, as_json)

    return command


for _name, _text in {
    "nvidia-topo": "Output of `nvidia-smi topo -m`: GPUs, NVLinks, NICs of a node.",
    "nccl-xml": "NCCL's topology (NCCL_TOPO_DUMP_FILE): the same with rates.",
    "slurm": "Slurm's topology.conf or topology.yaml: the fabric.",
    "kineto": "A torch.profiler trace (.json, .json.gz): kernels by class, overlap, launch gaps, measured GEMMs.",
}.items():
    import_app.command(_name, help=_text)(_reads(_name.replace("-", "_")))


HardwareOption = Annotated[str | None, typer.Option(help="A shipped profile or a path, where the file does not say.")]
NodesOption = Annotated[int | None, typer.Option(help="Nodes, where the file does not say.", min=1)]
ScenarioOut = Annotated[Path | None, typer.Option("--out", help="Write the scenario here.")]


def _finish_scenario(found: Imported, out: Path | None, as_json: bool) -> None:
    """Write and print a scenario: warnings to stderr, TOML (without --out) or JSON to stdout."""
    from simpar.interop.export import write_files
    from simpar.interop.scenario_text import scenario_table, scenario_text

    text = scenario_text(found.scenario)
    if out is not None:
        write_files({out.name: text}, out if out.suffix else out / "scenario.toml")
    if as_json:
        print_json({"scenario": scenario_table(found.scenario), "warnings": list(found.warnings)})
        return
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"wrote {out}" if out is not None else text.rstrip())


AcceptOption = Annotated[
    list[str] | None,
    typer.Option("--accept", help="Go on without this flag, though it changes the model; all = every one. Repeatable."),
]
VarOption = Annotated[list[str] | None, typer.Option("--var", help="A variable that the script sees: PP=4. Repeatable.")]


@import_app.callback(invoke_without_command=True)
def import_script(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="RUN this launch script with stand-ins for launchers, python and all that writes; read what it would start.",
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Option("--arg", help="An argument of the script. Repeatable.")] = None,
    variables: VarOption = None,
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    accept: AcceptOption = None,
    out: ScenarioOut = None,
    as_json: JsonOption = False,
) -> None:
    """Take what other programs measured or know of a machine, or the run that a framework's files describe.

    --run executes the script on this machine, in an empty environment: launchers (torchrun, srun, python, ...) start nothing, other
    commands do nothing, tools that read (sed, date, seq) are real; redirections and commands named by a whole path are carried out.
    """
    if run is None:
        return
    if context.invoked_subcommand is not None:
        raise typer.BadParameter("--run takes no command beside it")
    from simpar.interop.launched import load

    pairs = _assignments(variables)
    found = load(run, arguments or [], pairs, hardware=hardware, num_nodes=num_nodes, accept=accept or ())
    typer.echo(f"note: {run} was run on this machine with stand-ins for its launchers", err=True)
    _finish_scenario(found, out, as_json)


def _assignments(variables: list[str] | None) -> dict[str, str]:
    from simpar.errors import InputError, Violation

    pairs = [text.partition("=") for text in variables or []]
    if wrong := [Violation("--var", "".join(p), "is no assignment", "NAME=VALUE") for p in pairs if not p[0] or not p[1]]:
        raise InputError(wrong)
    return {p[0]: p[2] for p in pairs}


@import_app.command("megatron")
def megatron(
    values: Annotated[
        list[str], typer.Argument(help="A log with its table of arguments, a checkpoint, or a plain command line.", metavar="FILE")
    ],
    argv: Annotated[bool, typer.Option("--argv", help="What follows -- is the launch line itself.")] = False,
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    accept: AcceptOption = None,
    out: ScenarioOut = None,
    as_json: JsonOption = False,
) -> None:
    """What Megatron-LM resolved (a log, a checkpoint), or its command line: --argv -- torchrun ... --num-layers 32 ..."""
    if argv:
        from simpar.interop.megatron_import import of_words

        found = of_words(values, hardware=hardware, num_nodes=num_nodes, accept=accept or ())
    else:
        from simpar.interop.configs import load_megatron

        found = load_megatron(_one(values), hardware=hardware, num_nodes=num_nodes, accept=accept or ())
    _finish_scenario(found, out, as_json)


def _one(values: list[str]) -> Path:
    if len(values) > 1:
        raise typer.BadParameter("give one file; a launch line follows --argv --")
    return Path(values[0])


def _config(
    file: Annotated[Path, typer.Argument(help="Its configuration, as it was resolved.", metavar="FILE")],
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    accept: AcceptOption = None,
    model: Annotated[
        str | None, typer.Option(help="A shipped model, or the path of its config.json (DeepSpeed, fine-tuning).")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence (DeepSpeed, fine-tuning).", min=1)] = None,
    accelerate: Annotated[Path | None, typer.Option(help="Fine-tuning: accelerate's configuration, beside FILE.")] = None,
    out: ScenarioOut = None,
    as_json: JsonOption = False,
) -> None:
    from simpar.interop.configs import load_config

    said = {"model": model, "sequence_length": sequence_length, "accelerate": accelerate}
    more: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    _finish_scenario(load_config(file, hardware=hardware, num_nodes=num_nodes, accept=accept or (), **more), out, as_json)


for _name, _text in {
    "config": "Any of the configurations below, told by its content: the scenario that it runs.",
    "torchtitan": "A configuration of torchtitan, TOML up to v0.2.2 or dumped JSON: the scenario that it runs.",
    "nanotron": "A configuration of nanotron's run_train.py, YAML: the scenario that it runs.",
    "deepspeed": "A JSON configuration of DeepSpeed, with --model and --sequence-length: the scenario that it runs.",
    "megatron-bridge": "A run_config.yaml of Megatron-Bridge or NeMo: the scenario that it runs.",
    "gpt-neox": "A merged YAML configuration of gpt-neox: the scenario that it runs.",
    "primus": "A YAML configuration of Primus with Megatron: the scenario that it runs.",
    "verl": "A resolved configuration of verl: the training phase of its actor.",
    "finetune": "YAML of axolotl, torchtune, LLaMA-Factory or TRL, with --accelerate: the scenario that it runs.",
}.items():
    import_app.command(_name, help=_text)(_config)


@import_app.command("merge")
def merge(
    base: Annotated[str, typer.Argument(help="A shipped hardware profile or a path.")],
    parts: Annotated[list[Path], typer.Argument(help="Parts that the other commands wrote, later ones on top.")],
    out: Annotated[Path, typer.Option("--out", help="The profile to write.")],
    as_json: JsonOption = False,
) -> None:
    """A hardware profile: a base with measured parts laid over it."""
    from simpar.interop import profile_parts

    merged = profile_parts.merge(base, parts)
    profile_parts.write_profile(merged.profile, out)
    if as_json:
        print_json({"profile": str(out), "name": merged.profile.name, "notes": list(merged.notes)})
        return
    for note in merged.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {out}")


def export(
    framework: Annotated[str, typer.Argument(help="The format, such as megatron or huggingface; docs/export.md lists them.")],
    scenario: ScenarioFile,
    overrides: SetOption = None,
    limit: SizeOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for all files, or a file for the main one.")] = None,
) -> None:
    """A scenario as the launch files of a framework; without --out the main one is printed."""
    from simpar.interop.export import FORMATS, export_files, write_files
    from simpar.registry import unknown
    from simpar.specs.scenario import read_scenario

    if framework not in (known := [*FORMATS, "chakra", "simai"]):
        raise unknown("export format", framework, known)
    made = read_scenario(scenario, overrides)
    if framework == "chakra":
        from simpar.interop.chakra import write

        if out is None:
            raise typer.BadParameter("chakra writes a file for every rank: --out FOLDER")
        paths = write(made, out)
        print(f"wrote {paths[0]} to {paths[-2].name} and {paths[-1].name} in {out}")
        return
    if framework == "simai":
        from simpar.interop.simai import export as workload

        files = workload(made)
    else:
        files = export_files(framework, made)
    if out is None:
        print(next(iter(files.values())), end="")
        return
    for path in write_files(files, out):
        print(f"wrote {path}")
