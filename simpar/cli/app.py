"""The command line: files in, tables or JSON out. Exit codes: 0 done, 1 out of tolerance or nothing feasible,
2 bad input, 3 a simpar bug. Only parsing and printing happen here; everything heavy is imported inside the command
that needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from simpar.cli import terminal
from simpar.cli.files import export, import_app
from simpar.cli.new import new
from simpar.cli.options import FILES, MEASURE, PREDICT, SEARCH, SHIPPED
from simpar.cli.runs import run_app
from simpar.cli.search import improve, plan, search
from simpar.cli.shipped import constants, models_app, profiles_app, scenarios_app
from simpar.cli.site import adapt, tune
from simpar.cli.step import compare, explain, serve, simulate, topology, trace_diff
from simpar.cli.validate import calibrate, validate_app

EXIT_CODES = (
    "Exit codes: 0 done; 1 a prediction outside its tolerance, a layout that does not fit, or nothing feasible; 2 bad input; "
    "3 a bug in simpar; 130 interrupted."
)

app = typer.Typer(
    add_completion=True, invoke_without_command=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES,
)  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from simpar import __version__

        print(f"simpar {__version__}")
        raise typer.Exit


START = """simpar predicts steps, memory and whole runs of large-model training. Three things to do first:

  simpar simulate llama3.1-70b_h100x64_tp4cp2pp4     one training step: how long, where the time goes, what memory it needs
  simpar new                                         a first scenario of your own: model, machines, batch
  simpar search --model llama3.1-8b --hardware dgx-h100 --num-nodes 1 --global-batch 32 --sequence-length 8192
                                                     the best layouts for a model on your GPUs

simpar -h lists all commands; simpar models, profiles and scenarios what is shipped."""


@app.callback()
def _simpar(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Predict memory, bubbles and throughput of training large models in parallel."""
    if ctx.invoked_subcommand is None:
        print(START)


for _panel, _commands in {
    PREDICT: (
        (simulate, "simulate", "simpar simulate llama3.1-70b_h100x64_tp4cp2pp4 --set plan.pp=8 --html step.html"),
        (compare, "compare", "simpar compare zero-7.5b_a100x64_zero1 zero-7.5b_a100x64_zero3"),
        (explain, "explain", "simpar explain llama3.1-70b_h100x64_tp4cp2pp4 --measured step_time=12.3s"),
        (topology, "topology", "simpar topology dgx-h100 --num-nodes 64 --html net.html"),
        (serve, "serve", "simpar serve --port 0"),
    ),
    SEARCH: (
        (search, "search", "simpar search --model llama3.1-8b --hardware dgx-h100 --num-nodes 1 --global-batch 32"
                           " --sequence-length 8192 --framework megatron-core"),
        (improve, "improve", "simpar improve llama3.1-70b_h100x64_tp4cp2pp4"),
        (tune, "tune", "simpar tune llama3.1-70b_h100x64_tp4cp2pp4 --framework megatron-core --budget 6"),
        (plan, "plan", "simpar plan llama3.1-405b_h100x16384 --set cluster.num_nodes=1024"),
    ),
    MEASURE: (
        (adapt, "adapt", "simpar adapt runs.jsonl --out site.toml"),
        (calibrate, "calibrate", "simpar calibrate --out my-machine.toml"),
        (trace_diff, "diff", "simpar diff scenario.toml trace.json.gz --html diff.html"),
        (constants, "constants", "simpar constants --json"),
    ),
    FILES: ((export, "export", "simpar export megatron llama3.1-70b_h100x64_tp4cp2pp4 --out launch"),),
    SHIPPED: ((new, "new", "simpar new --model llama3.1-8b --hardware dgx-h100 --num-nodes 2 --global-batch 64"
                           " --sequence-length 8192"),),
}.items():  # fmt: skip
    for _function, _name, _example in _commands:
        app.command(_name, rich_help_panel=_panel, epilog=f"Example: {_example}")(_function)
for _app, _name, _panel, _example in (
    (validate_app, "validate", MEASURE, "simpar validate --only 'BLOOM 176B'"),
    (run_app, "run", MEASURE, "simpar run read scenario.toml --log train.log --out runs.jsonl"),
    (import_app, "import", FILES, "simpar import megatron train.sh --out scenario.toml"),
    (scenarios_app, "scenarios", SHIPPED, "simpar scenarios copy llama3.1-70b_h100x64_tp4cp2pp4 --out mine.toml"),
    (models_app, "models", SHIPPED, "simpar models show llama3.1-8b"),
    (profiles_app, "profiles", SHIPPED, "simpar profiles new --from dgx-h100 --out mine.toml --set 'gpu.memory=192 GB'"),
):
    app.add_typer(_app, name=_name, rich_help_panel=_panel, epilog=f"Example: {_example}")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: user errors become one message on stderr and exit code 2, a bug exit code 3 with its traceback.

    Args:
        arguments: none = those of this process, which then ends here.
    """
    from simpar.host import end, rarely_collected

    with rarely_collected():
        try:
            _main(arguments)
        except SystemExit as stop:
            if arguments is None:
                end(stop.code if isinstance(stop.code, int) else 0)
            raise


def _main(arguments: list[str] | None) -> None:
    from simpar.errors import SimparError

    terminal.prepare()
    try:
        try:
            app(arguments)
        finally:
            terminal.flush()
    except SimparError as error:
        print(f"simpar: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        terminal.silence()
        sys.exit(0)
    except OSError as error:
        terminal.silence()
        print(f"simpar: {terminal.described(error)}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("simpar: not enough memory on this machine; a smaller input, or fewer --workers", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:
        # typer turns Ctrl-C into exit code 130 without a word.
        if isinstance(getattr(stop.__context__, "__cause__", None), KeyboardInterrupt):
            print("simpar: interrupted", file=sys.stderr)
        raise
    except Exception:
        import traceback

        traceback.print_exc()
        print("simpar: this is a bug in simpar; please report the lines above", file=sys.stderr)
        sys.exit(3)
