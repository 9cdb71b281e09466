"""Commands about one training step: simulate, compare, explain, diff, topology, and serve, which shows it in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.options import (
    BatchOption,
    FrameworkOption,
    GpusOption,
    HardwareOption,
    HtmlOption,
    JsonOption,
    MaybeScenario,
    ModelOption,
    NodesOption,
    OfflineOption,
    ScenarioFile,
    SequenceOption,
    SetOption,
    SiteOption,
    SizeOption,
    at_site,
    chosen_scenario,
    chosen_table,
    print_json,
    say_written,
)

if TYPE_CHECKING:
    from simpar.specs.scenario import Scenario


from simpar.cli.options import scenario_completion


def simulate(
    scenario: MaybeScenario = None,
    overrides: SetOption = None,
    limit: SizeOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    num_gpus: GpusOption = None,
    sequence_length: SequenceOption = None,
    global_batch: BatchOption = None,
    framework: FrameworkOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a Perfetto trace (.json.gz).")] = None,
    detail: Annotated[str, typer.Option(help="stage, layer or op.")] = "layer",
    contention: Annotated[bool, typer.Option(help="Transfers share links; same as --set effects.contention=true.")] = False,
    explain_terms: Annotated[bool, typer.Option("--explain-terms", help="Say what the words of the report mean.")] = False,
    placement: Annotated[bool, typer.Option("--placement", help="Find the best order of the dimensions over the ranks.")] = False,
    site: SiteOption = None,
) -> None:
    """Predict one training step: time, throughput, where it goes, memory."""
    from simpar.api.steps import simulated
    from simpar.errors import InputError, Violation
    from simpar.specs.options import RunOptions

    if detail not in ("stage", "layer", "op"):
        raise InputError([Violation("--detail", detail, "no such detail", "choose stage, layer or op")])
    changes = [*at_site(overrides, site), *(["effects.contention=true"] if contention else [])]
    options = RunOptions(model, hardware, num_nodes, sequence_length, global_batch, framework, num_gpus)
    table, file = chosen_table(scenario, options, changes)
    result = simulated(table, file, detail=detail, arrange=_placed if placement else None)  # type: ignore[arg-type]
    written = []
    if html is not None:
        written.append(result.save_html(html))
    if trace is not None:
        written.append(result.save_trace(trace))
    if as_json:
        print_json(result.to_dict())
    else:
        from simpar.report.step_table import show, step_report

        if result.readings is not None:
            from simpar.report.readings_view import readings_report

            show(readings_report(result.readings))
        report = step_report(result.details)
        show(report)
        if explain_terms:
            from simpar.report.step_table import terms_report

            show(terms_report(report))
    for path in written:
        say_written(path)
    raise typer.Exit(0 if result.fits else 1)


def _placed(scenario: Scenario) -> Scenario:
    """The scenario with the best order of the dimensions over the ranks."""
    from simpar.searching.placement import best_placement

    return best_placement(scenario)


def compare(
    first: ScenarioFile,
    second: ScenarioFile,
    overrides: SetOption = None,
    limit: SizeOption = None,
    as_json: JsonOption = False,
    site: SiteOption = None,
) -> None:
    """Two scenarios side by side; --set applies to the second, --site to both."""
    from simpar.api.steps import compare as both
    from simpar.specs.scenario import read_scenario

    found = both(read_scenario(first, at_site(None, site)), read_scenario(second, at_site(overrides, site)))
    if as_json:
        print_json(found.to_dict())
        return
    from simpar.report.step_table import comparison, show

    show(comparison(found.first.details, found.second.details))


def explain(
    scenario: MaybeScenario = None,
    measured: Annotated[
        list[str] | None,
        typer.Option("--measured", help="step_time=12.3s, mem=71GiB (or allocated=, reserved=, device=). Repeatable."),
    ] = None,
    overrides: SetOption = None,
    limit: SizeOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    num_nodes: NodesOption = None,
    num_gpus: GpusOption = None,
    sequence_length: SequenceOption = None,
    global_batch: BatchOption = None,
    framework: FrameworkOption = None,
    as_json: JsonOption = False,
    site: SiteOption = None,
    runs: Annotated[
        list[Path] | None, typer.Option("--run", help="Runs of this scenario, as `simpar run read` writes them. Repeatable.")
    ] = None,
) -> None:
    """Why a step takes what it takes; with a measurement, where the gap most probably lies; with runs, what made them slow."""
    from simpar.api.steps import explain as explanation
    from simpar.report.explain import parse_measured
    from simpar.report.explain_view import explain_report
    from simpar.specs.options import RunOptions

    values = parse_measured(measured or [])
    options = RunOptions(model, hardware, num_nodes, sequence_length, global_batch, framework, num_gpus)
    found = explanation(chosen_scenario(scenario, options, at_site(overrides, site)), measured=values, runs=runs or ())
    if as_json:
        print_json(found.to_dict())
        return
    from simpar.report.step_table import show

    show(explain_report(found.result.details, found.to_dict()))


def trace_diff(
    scenario: ScenarioFile,
    trace: Annotated[Path, typer.Argument(help="A torch.profiler trace of one rank, .json or .json.gz.")],
    rank: Annotated[int | None, typer.Option(help="Global rank of the trace; without it what the trace says.")] = None,
    overrides: SetOption = None,
    limit: SizeOption = None,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
    site: SiteOption = None,
) -> None:
    """A measured step beside the predicted one: the difference by cause, op by op."""
    from functools import partial

    from simpar.interop.kineto_step import read_steps
    from simpar.live.trace_diff import diff
    from simpar.specs.scenario import read_scenario

    found = diff(read_scenario(scenario, at_site(overrides, site)), partial(read_steps, trace), rank)
    if html is not None:
        from simpar.output import write_page
        from simpar.report.diff_html import diff_page

        write_page(html, diff_page(found))
        say_written(html)
    if as_json:
        print_json(found.to_json())
        return
    from simpar.report.diff_view import diff_report
    from simpar.report.step_table import show

    show(diff_report(found))


def topology(
    scenario: Annotated[Path, typer.Argument(help="A scenario or a hardware profile: a TOML file or a name.")],
    html: HtmlOption = None,
    offline: OfflineOption = False,
    num_nodes: Annotated[int | None, typer.Option(help="Nodes, where the file is a profile.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The cluster's network: switches, links, bisection; --html draws it."""
    from simpar.errors import InputError, Violation
    from simpar.topology.describe import clusters_of, summary

    clusters = clusters_of(scenario, num_nodes)
    if html is not None:
        from simpar.output import write_page
        from simpar.report.topology_view import topology_page

        if len(clusters) > 1:
            rule = f"draws machines of one kind, and the scenario has {len(clusters)} parts"
            raise InputError([Violation("--html", str(html), rule, "name one of their profiles instead of the scenario")])
        write_page(html, topology_page(*clusters[0]))
        say_written(html)
    if as_json:
        facts = [summary(*cluster) for cluster in clusters]
        print_json(facts[0] if len(facts) == 1 else {"num_gpus": sum(f["num_gpus"] for f in facts), "parts": facts})
        return
    from simpar.report.step_table import show
    from simpar.report.topology_view import topology_report

    for cluster in clusters:
        show(topology_report(*cluster))


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; any but 127.0.0.1 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 8050,
    scenario: Annotated[
        Path | None,
        typer.Option(help="A scenario to start from: a file of your own, or a name.", autocompletion=scenario_completion),
    ] = None,
    site: SiteOption = None,
) -> None:
    """A local page to change model, cluster and layout and see what follows."""
    from simpar.api.sites import own_run
    from simpar.interop.megatron import launch_script
    from simpar.report.serve.app import serve as run_page
    from simpar.specs.catalog import scenario_path

    run_page(host, port, scenario and scenario_path(scenario), launch_script, site, own_run)
