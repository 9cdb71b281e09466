"""The commands `simpar search`, `improve` and `plan`: options in, tables, JSON, a page or launch files out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.options import (
    BatchOption,
    GpusOption,
    HardwareOption,
    JsonOption,
    MaybeScenario,
    ModelOption,
    OfflineOption,
    ScenarioFile,
    SequenceOption,
    SetOption,
    SiteOption,
    SizeOption,
    at_site,
    print_json,
)
from simpar.errors import InputError, Violation
from simpar.specs.wanted import FIT_PROBABILITY

if TYPE_CHECKING:
    from simpar.searching.answer import Answer
    from simpar.searching.command import Outputs
    from simpar.searching.why import Why


from simpar.cli.options import HtmlOption, plan_completion

LimitOption = Annotated[
    str | None,
    typer.Option(
        "--framework", help="Keep to what this framework can run, as it runs it; default the scenario's own, any = no limit."
    ),
]


def search(
    scenario: MaybeScenario = None,
    overrides: SetOption = None,
    limit: SizeOption = None,
    model: ModelOption = None,
    hardware: HardwareOption = None,
    num_nodes: Annotated[str, typer.Option(help="8, or several sizes: 8,16 or 8..64x2.")] = "",
    num_gpus: GpusOption = None,
    task: Annotated[str, typer.Option(help="Fine-tuning, lora or full: its memory options are axes too.")] = "",
    sequence_length: SequenceOption = None,
    global_batch: BatchOption = None,
    framework: LimitOption = None,
    fix: Annotated[list[str] | None, typer.Option(help="One value of an axis: pp=1. Repeatable.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="Values of an axis: schedule=1f1b,interleaved. Repeatable.")] = None,
    objective: Annotated[
        str, typer.Option(help="step_time, tokens_per_s_per_gpu, cost_per_token, energy_per_token, memory_headroom or num_gpus.")
    ] = "step_time",
    where: Annotated[list[str] | None, typer.Option(help='A limit on any output: "memory<70GiB". Repeatable.')] = None,
    deadline: Annotated[str, typer.Option(help="With --tokens: a limit on the pace, such as 60d.")] = "",
    tokens: Annotated[str, typer.Option(help="To train on before the deadline, such as 15.6T.")] = "",
    pareto: Annotated[str, typer.Option(help="The front over two or three metrics: step_time,memory.")] = "",
    robust: Annotated[str, typer.Option(help="p90: rank by the upper end of the interval.")] = "",
    fit_probability: Annotated[float, typer.Option(help="Chance to fit the memory that a layout must have.")] = FIT_PROBABILITY,
    prove: Annotated[
        bool, typer.Option("--prove/--quick", help="Until nothing is faster; or (default) not by more than can be told.")
    ] = False,
    top: Annotated[int, typer.Option(help="Designs to return.")] = 10,
    why: Annotated[list[str] | None, typer.Option(help="Why not tp=4,pp=8? Repeatable.")] = None,
    usd_per_gpu_hour: Annotated[float, typer.Option(help="Rent, for costs.")] = 2.0,
    pue: Annotated[float, typer.Option(help="Power of the building over that of the machines, for energy.")] = 1.25,
    store: Annotated[Path | None, typer.Option(help="SQLite file that keeps everything finished.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from --store.")] = False,
    executor: Annotated[str, typer.Option(help="local (processes) or dask.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Processes of the local executor; default one, then one per core.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page.")] = None,
    offline: OfflineOption = False,
    export: Annotated[str, typer.Option(help="Launch files of the winner: megatron, huggingface, ... (see simpar export).")] = "",
    out: Annotated[Path, typer.Option("--out", help="Folder for --export.")] = Path("launch"),
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    site: SiteOption = None,
) -> None:
    """The best layouts of a model on a cluster, with proof; the plan of the scenario may hold ranges."""
    from simpar.searching.command import SearchOptions, run

    options = SearchOptions(
        scenario=scenario, overrides=tuple(at_site(overrides, site)), model=model, hardware=hardware, num_nodes=num_nodes,
        sequence_length=sequence_length, global_batch=global_batch, framework=framework, fix=tuple(fix or ()),
        allow=tuple(allow or ()), objective=objective, where=tuple(where or ()), deadline=deadline, tokens=tokens, pareto=pareto,
        robust=robust, top=top, why=tuple(why or ()), usd_per_gpu_hour=usd_per_gpu_hour, pue=pue, store=store, resume=resume,
        executor=executor, workers=workers, scheduler=scheduler, as_json=as_json, prove=prove, fit_probability=fit_probability,
        task=task, num_gpus=num_gpus,
        outputs=_outputs(html, export, out, framework, quiet),
    )  # fmt: skip
    raise typer.Exit(run(options))


def _outputs(html: Path | None, export: str, out: Path, framework: str | None, quiet: bool) -> Outputs:
    from simpar.api.measured_runs import measured_nearby
    from simpar.interop.export import not_launched, run_files
    from simpar.report import search_view
    from simpar.searching.command import Outputs

    def shown(answer: Answer, reasons: list[Why]) -> None:
        search_view.show(search_view.search_report(answer, reasons))

    def stored(document: dict[str, Any]) -> None:
        search_view.show(search_view.stored_report(document))

    outputs = Outputs(show=shown, show_stored=stored, say=search_view.say)
    outputs.measured = measured_nearby
    if framework != "any":
        outputs.runs = not_launched
    if not quiet:
        outputs.listener = search_view.ProgressLine()
    if html is not None:

        def written(answer: Answer, reasons: list[Why], path: Path = html) -> None:
            from simpar.output import write_page
            from simpar.report.search_html import search_page

            write_page(path, search_page(answer, reasons, run_files))
            search_view.say(f"wrote {path}")

        outputs.write_html = written
    if export:
        from simpar.interop.export import FORMATS, check_model, write_files

        exporter = FORMATS[export]

        def exported(answer: Answer) -> None:
            if answer.best is not None:
                try:
                    files = exporter(answer.best.result.layout.scenario)
                except InputError as error:
                    raise InputError([*error.violations, *_limit_hint(export, framework)]) from None
                for path in write_files(files, out):
                    search_view.say(f"wrote {path}")

        outputs.check, outputs.export = partial(check_model, export), exported
    return outputs


def _limit_hint(export: str, framework: str | None) -> list[Violation]:
    """What to do where the winner is no layout of the framework that it is exported for."""
    from simpar.searching.abilities import ability

    wanted = "megatron-core" if export == "megatron" else export
    if framework is not None and ability(framework) is ability(wanted):
        return []
    right = f"--framework {wanted} searches what it can run"
    return [Violation("--export", export, "cannot launch the best layout of this space", right)]


def improve(
    scenario: ScenarioFile,
    overrides: SetOption = None,
    limit: SizeOption = None,
    framework: LimitOption = None,
    top: Annotated[int, typer.Option(help="Changes to show of each kind.")] = 10,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    site: SiteOption = None,
) -> None:
    """The best single and double changes to a layout that runs today."""
    from simpar.errors import InputError, Violation
    from simpar.interop.export import not_launched
    from simpar.report import search_view
    from simpar.searching.improve import improve as find_changes
    from simpar.specs.scenario import read_scenario

    if top < 1:
        raise InputError([Violation("--top", top, "must be at least 1", "such as 10")])
    with search_view.Steps("pairs of axes", quiet) as steps:
        found = find_changes(
            read_scenario(scenario, at_site(overrides, site)), framework=framework, keep=top, on_pair=steps,
            runs=not_launched if framework != "any" else lambda _: "",
        )  # fmt: skip
    if as_json:
        print_json(found.to_json())
    else:
        search_view.show(search_view.improve_report(found))
    raise typer.Exit(0 if found.singles or found.doubles or found.today.fits else 1)


def plan(
    plan_file: Annotated[
        Path, typer.Argument(help="A plan: a TOML file, or a name of `simpar scenarios`.", autocompletion=plan_completion)
    ],
    solve: Annotated[str | None, typer.Option(help="nodes, checkpoint-interval or spares.")] = None,
    deadline: Annotated[str | None, typer.Option(help='For --solve nodes: "60d".')] = None,
    compare: Annotated[str | None, typer.Option(help="Hardware profiles, comma-separated.")] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="field=1,2,4 or field=128..2048x2. Repeatable.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Which assumption moves the answer most.")] = False,
    marginal: Annotated[bool, typer.Option("--marginal", help="The value of one more NIC, HBM, links, nodes.")] = False,
    keep_layout: Annotated[bool, typer.Option("--keep-layout", help="Do not search layouts again at each point.")] = False,
    overrides: SetOption = None,
    limit: SizeOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    seed: Annotated[int, typer.Option(help="Of the failures drawn.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Independent runs.")] = 200,
    store: Annotated[Path | None, typer.Option(help="Keep finished repetitions here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from --store.")] = False,
    site: SiteOption = None,
) -> None:
    """Days, GPU-hours, cost, energy and goodput of a whole run with failures."""
    from simpar.api.plans import step_model
    from simpar.planning.questions import PlanOptions
    from simpar.report.plan_view import Progress
    from simpar.report.plan_view import run as run_plan

    options = PlanOptions(
        solve=solve, deadline=deadline, compare=compare, sweep=tuple(sweep or ()), sensitivity=sensitivity, marginal=marginal,
        keep_layout=keep_layout, overrides=tuple(overrides or ()), json=as_json, html=html, seed=seed, repetitions=repetitions,
        store=store, resume=resume, site=site,
    )  # fmt: skip
    raise typer.Exit(run_plan(plan_file, options, step_model(store, Progress())))
