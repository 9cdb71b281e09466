"""Measurements: `simpar validate ...` compares predictions with them, `simpar calibrate` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.options import HtmlOption, JsonOption, OfflineOption, SetOption, SiteOption, print_json

validate_app = typer.Typer(
    no_args_is_help=False, invoke_without_command=True,
    help="Compare predictions with measurements; without a subcommand, all published cases.",
)  # fmt: skip


@validate_app.callback()
def validate(
    ctx: typer.Context,
    as_json: JsonOption = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="A group of cases, or one: group/name. Repeatable.")] = None,
) -> None:
    """Every published case, predicted and measured; in a checkout a full run writes validation/RESULTS.md."""
    if ctx.invoked_subcommand is None:
        from simpar.evidence.results_md import validate_cases

        raise typer.Exit(validate_cases(as_json, only or ()))


DataOption = Annotated[Path | None, typer.Option("--data", help="Measured data; without it, those that come with simpar.")]


@validate_app.command("kernels")
def validate_kernels(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Measured kernels against their prices."""
    from simpar.evidence.kernels import run

    raise typer.Exit(run(data, as_json))


@validate_app.command("collectives")
def validate_collectives(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Measured collectives against their prices."""
    from simpar.evidence.collectives import run

    raise typer.Exit(run(data, as_json))


@validate_app.command("cluster")
def validate_cluster(
    nproc: Annotated[int, typer.Option(help="Processes of this host.")] = 2,
    layouts: Annotated[str, typer.Option(help="dp2tp2,pp2-zbv,fsdp4,cp2-ring,ep2dp2,mlp-tp2,...; empty = a default set.")] = "",
    scenario: Annotated[Path | None, typer.Option(help="Its model and batch instead of the small default.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Calibrated profile; without it a short calibration runs first.")] = None,
    tolerance: Annotated[float, typer.Option(help="On the mean error of step times: 0.15 is 15 %.")] = 0.15,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
    store: Annotated[Path | None, typer.Option(help="Keep measurements beside this name; continued if there.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or cuda (NCCL).")] = "auto",
    precision: Annotated[str, typer.Option(help="auto (fp32 on CPUs, bf16 on GPUs), fp32, bf16 or fp8.")] = "auto",
    threads: Annotated[int, typer.Option(help="Of each process on a CPU.")] = 1,
    budget: Annotated[str, typer.Option(help="Time of the calibration, for each number of ranks.")] = "60s",
    steps: Annotated[int, typer.Option(help="Measured steps of a layout in a round.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    rounds: Annotated[int, typer.Option(help="Times that all layouts are gone over.")] = 2,
    timeout: Annotated[str, typer.Option(help="Longest wait of a rank for the others.")] = "60s",
    write_config: Annotated[Path | None, typer.Option(help="Write what the ranks need and stop.")] = None,
    runs: Annotated[Path | None, typer.Option("--from", help="Compare this file of runs; run nothing.")] = None,
    master: Annotated[str, typer.Option(help="HOST:PORT of node 0, where several hosts take part.")] = "",
    nnodes: Annotated[int, typer.Option(help="Hosts.")] = 1,
    node_rank: Annotated[int, typer.Option(help="This host among them.")] = 0,
) -> None:
    """Real torch.distributed steps on this machine against their prediction."""
    from simpar.live.cluster import ClusterOptions, run, seconds
    from simpar.live.cluster_launch import Rendezvous

    report = run(
        ClusterOptions(
            nproc=nproc, layouts=layouts, scenario=scenario, profile=profile, tolerance=tolerance, quiet=as_json,
            store=store, device=device, precision=precision,
            threads=threads, budget_s=seconds("--budget", budget), steps=steps, warmup=warmup,
            rounds=rounds, timeout_s=seconds("--timeout", timeout), write_config=write_config, runs=runs,
            meet=Rendezvous(nnodes, node_rank, master),
        )
    )  # fmt: skip
    if report is None:
        return
    from simpar.output import write_page
    from simpar.report.cluster_view import cluster_page, print_report

    if html is not None:
        write_page(html, cluster_page(report))
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report)
    raise typer.Exit(0 if report.passed else 1)


@validate_app.command("runs")
def validate_runs(
    data: DataOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    offline: OfflineOption = False,
    where: Annotated[list[str] | None, typer.Option("--where", help="Only rows with key=value. Repeatable.")] = None,
    site: SiteOption = None,
) -> None:
    """Measured training runs against their simulation."""
    from simpar.evidence.predicted import AtSite, predict
    from simpar.evidence.report_runs import print_report
    from simpar.evidence.runs import validate_runs as validated
    from simpar.output import check_writable, write_page
    from simpar.specs.base import stored_runs
    from simpar.specs.site import read_site

    if html is not None:
        check_writable(html, "--html")  # now, not after minutes of simulation
    predictor = predict if site is None else AtSite(read_site(site))
    report = validated(data or stored_runs(), where or (), predictor=predictor, progress=True)
    if html is not None:
        from simpar.report.runs_view import runs_page

        write_page(html, runs_page(report))
    print_report(report, as_json)


@validate_app.command("rank")
def validate_rank(
    scenario: Annotated[Path | None, typer.Option(help="A scenario, TOML.")] = None,
    scenarios: Annotated[list[Path] | None, typer.Option("--scenarios", help="Several: one rank of each. Repeatable.")] = None,
    rank: Annotated[int, typer.Option(help="Global rank to run.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Transformer layers per pipeline stage instead of the model's.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches per step instead of the scenario's.")] = None,
    overrides: SetOption = None,
    layouts: Annotated[bool, typer.Option("--layouts", help="Run the shipped list, validation/rank_layouts.toml.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="One layout of the list. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda (real tensors) or fake (memory, FLOPs, bytes on the wire).")] = "auto",
    measured: Annotated[Path | None, typer.Option(help="Compare what rank_worker wrote: a file or a folder.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Predict with this profile: of the machine that measured.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Only write plans and worker for another machine into this folder.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of that machine, such as 79GiB: leave out plans that need more.")] = None,
    predict_only: Annotated[Path | None, typer.Option(help="Only write the predictions, with a hash, before measuring.")] = None,
    predictions: Annotated[Path | None, typer.Option(help="With --measured: compare with these frozen predictions.")] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    offline: OfflineOption = False,
) -> None:
    """One rank of a large layout, run by torch alone, against its prediction."""
    from simpar.interop.kineto_step import kernel_kind
    from simpar.live.rank import to_json
    from simpar.live.rank_command import RankOptions, run

    found = run(
        RankOptions(
            scenario=scenario, scenarios=tuple(scenarios or ()), rank=rank, layers=layers, microbatches=microbatches,
            overrides=tuple(overrides or ()), layouts=layouts, only=tuple(only or ()), device=device, measured=measured,
            hardware=hardware, bundle=bundle, gpu_memory=gpu_memory, predict_only=predict_only, predictions=predictions,
        ),
        kernel_kind,
    )  # fmt: skip
    if isinstance(found, str):
        typer.echo(found)
        return
    from simpar.output import write_page
    from simpar.report.rank_view import rank_page, rank_report
    from simpar.report.step_table import show

    if html is not None:
        write_page(html, rank_page(found))
    if as_json:
        print_json({**to_json(found.rows, found.notes), "devices": found.devices})
    else:
        show(rank_report(found))
    raise typer.Exit(found.exit_code)


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
    from simpar.errors import InputError
    from simpar.host import leave
    from simpar.live.calibrate import Options, checked, run, seconds
    from simpar.live.store import CalibrationError

    try:
        asked = Options(
            out, seconds(budget), base=base, device=device, threads=threads, timeout_s=seconds(timeout), tiny=tiny, shapes=shapes
        )
        options = checked(asked, resume)
    except CalibrationError as error:
        raise InputError(str(error)) from None
    leave(run(options))
