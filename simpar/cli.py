"""The command line: files in, tables or JSON out. Exit codes: 0 done, 1 out of tolerance or nothing feasible,
2 bad input, 3 a simpar bug. Only parsing and printing happen here; everything heavy is imported inside the command
that needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from simpar.cli_options import HtmlOption, JsonOption, ScenarioFile, SetOption, print_json
from simpar.cli_search import improve, search
from simpar.cli_validate import validate_app
from simpar.interop.commands import import_app

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Predict memory, bubbles and throughput of training large models in parallel.",
)  # fmt: skip
app.add_typer(validate_app, name="validate")
app.add_typer(import_app, name="import")
app.command()(search)
app.command()(improve)


@app.command()
def simulate(
    scenario: ScenarioFile,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Perfetto trace (.json.gz).")] = None,
    detail: Annotated[str, typer.Option(help="stage, layer or op.")] = "layer",
    contention: Annotated[bool, typer.Option(help="Transfers share links; same as --set effects.contention=true.")] = False,
    placement: Annotated[bool, typer.Option("--placement", help="Find the best order of the dimensions over the ranks.")] = False,
) -> None:
    """Predict one training step of a scenario."""
    from simpar.errors import InputError, Violation
    from simpar.simulate import simulate as run
    from simpar.specs.scenario import read_scenario

    if detail not in ("stage", "layer", "op"):
        raise InputError([Violation("--detail", detail, "no such detail", "choose stage, layer or op")])
    changes = [*(overrides or []), *(["effects.contention=true"] if contention else [])]
    chosen = read_scenario(scenario, changes)
    if placement:
        from simpar.search.placement import best_placement

        chosen = best_placement(chosen)
    result = run(chosen, detail=detail)  # type: ignore[arg-type]
    if html is not None:
        from simpar.report.step_html import write_html

        write_html(result, html)
    if trace is not None:
        from simpar.report.perfetto import write_trace

        write_trace(result, trace)
    if as_json:
        print_json({**result.to_json(), "tensors_at_peak": result.tensors_at_peak()})
    else:
        from simpar.report.step_table import show, step_report

        show(step_report(result))
    raise typer.Exit(0 if result.fits else 1)


@app.command()
def compare(first: ScenarioFile, second: ScenarioFile, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Two scenarios side by side; --set applies to the second."""
    from simpar.simulate import simulate as run
    from simpar.specs.scenario import read_scenario

    a, b = run(read_scenario(first)), run(read_scenario(second, overrides))
    if as_json:
        print_json({"first": a.to_json(), "second": b.to_json()})
        return
    from simpar.report.step_table import comparison, show

    show(comparison(a, b))


@app.command()
def explain(
    scenario: ScenarioFile,
    measured: Annotated[
        list[str] | None,
        typer.Option("--measured", help="step_time=12.3s, mem=71GiB (or allocated=, reserved=, device=). Repeatable."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a step takes what it takes; with a measurement, where the gap most probably lies."""
    from simpar.report.explain import explain as explanation
    from simpar.report.explain import parse_measured
    from simpar.report.explain_view import explain_report
    from simpar.simulate import simulate as run
    from simpar.specs.scenario import read_scenario

    values = parse_measured(measured or [])
    result = run(read_scenario(scenario, overrides))
    found = explanation(result, values)
    if as_json:
        print_json(found)
        return
    from simpar.report.step_table import show

    show(explain_report(result, found))


@app.command("diff")
def trace_diff(
    scenario: ScenarioFile,
    trace: Annotated[Path, typer.Argument(help="A torch.profiler trace of one rank, .json or .json.gz.")],
    rank: Annotated[int | None, typer.Option(help="Global rank of the trace; without it what the trace says.")] = None,
    overrides: SetOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """A measured step beside the predicted one: the difference by cause, op by op."""
    from functools import partial

    from simpar.interop.kineto_step import read_steps
    from simpar.specs.scenario import read_scenario
    from simpar.validation.trace_diff import diff

    found = diff(read_scenario(scenario, overrides), partial(read_steps, trace), rank)
    if html is not None:
        from simpar.report.diff_html import write_diff_html

        write_diff_html(found, html)
    if as_json:
        print_json(found.to_json())
        return
    from simpar.report.diff_view import diff_report
    from simpar.report.step_table import show

    show(diff_report(found))


@app.command()
def topology(
    scenario: Annotated[Path, typer.Argument(help="A scenario or a hardware profile, TOML.")],
    html: HtmlOption = None,
    num_nodes: Annotated[int | None, typer.Option(help="Nodes, where the file is a profile.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The cluster's network: switches, links, bisection; --html draws it."""
    from simpar.topology.describe import cluster_of, summary

    hardware, nodes = cluster_of(scenario, num_nodes)
    facts = summary(hardware, nodes)
    if html is not None:
        from simpar.report.topology_view import write_topology_html

        write_topology_html(hardware, nodes, html)
    if as_json:
        print_json(facts)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    Console().print(table)


@app.command()
def models() -> None:
    """Models that a scenario may name."""
    from simpar.specs.models_io import model_names

    for name in model_names():
        print(name)


@app.command()
def profiles() -> None:
    """Hardware profiles that a scenario may name."""
    from simpar.specs.hardware import profile_names

    for name in profile_names():
        print(name)


@app.command()
def plan(
    plan_file: Annotated[Path, typer.Argument(help="A plan, TOML (see scenarios/plans/).")],
    solve: Annotated[str | None, typer.Option(help="nodes, checkpoint-interval or spares.")] = None,
    deadline: Annotated[str | None, typer.Option(help='For --solve nodes: "60d".')] = None,
    compare: Annotated[str | None, typer.Option(help="Hardware profiles, comma-separated.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="field=1,2,4 or field=128..2048x2. Repeatable.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Which assumption moves the answer most.")] = False,
    marginal: Annotated[bool, typer.Option("--marginal", help="The value of one more NIC, HBM, links, nodes.")] = False,
    keep_layout: Annotated[bool, typer.Option("--keep-layout", help="Do not search layouts again at each point.")] = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    seed: Annotated[int, typer.Option(help="Of the failures drawn.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Independent runs.")] = 200,
    store: Annotated[Path | None, typer.Option(help="Keep finished repetitions here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from --store.")] = False,
) -> None:
    """Days, GPU-hours, cost, energy and goodput of a whole run with failures."""
    from simpar.planning.questions import PlanOptions
    from simpar.report.plan_view import run as run_plan

    options = PlanOptions(
        solve=solve, deadline=deadline, compare=compare, sweep=tuple(sweep or ()), sensitivity=sensitivity, marginal=marginal,
        keep_layout=keep_layout, overrides=tuple(overrides or ()), json=as_json, html=html, seed=seed, repetitions=repetitions,
        store=store, resume=resume,
    )  # fmt: skip
    raise typer.Exit(run_plan(plan_file, options))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; any but 127.0.0.1 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 8050,
    scenario: Annotated[Path | None, typer.Option(help="A scenario of your own to start from.")] = None,
) -> None:
    """A local page to change model, cluster and layout and see what follows."""
    from simpar.interop.megatron import launch_script
    from simpar.report.serve.app import serve as run_page

    run_page(host, port, scenario, launch_script)


@app.command()
def export(
    framework: Annotated[str, typer.Argument(help="megatron, torchtitan, deepspeed or nanotron.")],
    scenario: ScenarioFile,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for all files, or a file for the main one.")] = None,
) -> None:
    """A scenario as the launch files of a framework; without --out the main one is printed."""
    from simpar.interop.export import export_files, write_files
    from simpar.specs.scenario import read_scenario

    files = export_files(framework, read_scenario(scenario, overrides))
    if out is None:
        print(next(iter(files.values())), end="")
        return
    for path in write_files(files, out):
        print(f"wrote {path}")


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(help="The hardware profile to write, TOML.")] = None,
    budget: Annotated[str, typer.Option(help="Time for all measurements.")] = "120s",
    resume: Annotated[Path | None, typer.Option(help="Continue this .jsonl of an earlier run.")] = None,
    base: Annotated[str, typer.Option(help="Shipped profile to start from; empty = the nearest.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Of each process on a CPU.")] = 1,
    timeout: Annotated[str, typer.Option(help="Longest wait for another rank.")] = "60s",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the command.")] = False,
    shapes: Annotated[Path | None, typer.Option(help="Measure what this JSON lists (validate cluster writes it).")] = None,
) -> None:
    """Measure this machine and write its hardware profile; under torchrun also its collectives."""
    from simpar.calibration.__main__ import options_from, run
    from simpar.calibration.store import CalibrationError
    from simpar.errors import InputError

    try:
        options = options_from(out, budget, resume, base, device, threads, timeout, tiny, shapes)
    except CalibrationError as error:
        raise InputError(str(error)) from None
    raise typer.Exit(run(options))


def main(arguments: list[str] | None = None) -> None:
    """Entry point: user errors become one message on stderr and exit code 2, a bug exit code 3 with its traceback."""
    from simpar.errors import SimparError

    try:
        app(arguments)
    except SimparError as error:
        print(f"simpar: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
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


if __name__ == "__main__":
    main()
