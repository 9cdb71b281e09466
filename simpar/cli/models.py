"""The commands `simpar models ...`: what may be trained."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simpar.cli.listing import print_table
from simpar.cli.options import JsonOption, model_completion, print_json

models_app = typer.Typer(no_args_is_help=False, invoke_without_command=True)


@models_app.callback()
def models(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Models that a scenario may name, with their size; without a subcommand, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from simpar.model.show import facts
    from simpar.specs.models_io import model_names

    rows = [facts(name) for name in model_names()]
    if as_json:
        print_json(rows)
        return
    heads = ("model", "kind", "parameters", "active", "layers", "hidden", "heads", "experts")
    keys = ("name", "kind", "parameters", "active_parameters", "layers", "hidden_size", "heads", "experts")
    print_table(heads, [tuple(_cell(row[key]) for key in keys) for row in rows], texts=2)


@models_app.command("show")
def show(
    model: Annotated[
        str,
        typer.Argument(help="A preset, or a path to a Hugging Face config.json or a TOML table.", autocompletion=model_completion),
    ],
    as_json: JsonOption = False,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per document, for the FLOPs of attention.")] = 4096,
    approximate: Annotated[bool, typer.Option(help="Accept structural keys that are not read, with a note.")] = False,
) -> None:
    """Parameters, forward FLOPs per token and the pattern of layers of any model; with --json every field as well."""
    from simpar.model.show import describe_model

    found = describe_model(model, sequence_length, approximate=approximate)
    if as_json:
        print_json(found)
        return
    print(found["name"] or model)
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("parameters without embeddings", f"{found['parameters_without_embeddings']:,}"),
        ("active parameters", f"{found['active_parameters']:,}"),
        ("forward per token", f"{found['forward_flops_per_token'] / 1e9:,.2f} GFLOP (documents of {sequence_length:,} tokens)"),
    ]
    rows += [(f"{at['count']} x {at['stack']}/{at['layer']}", "; ".join(at["parts"])) for at in found["layers"]]
    print_table(("", ""), [*rows, *(("note", note) for note in found["notes"])], texts=2)


def _cell(value: Any) -> str:
    """A number for people: parameters as 70.6B."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000_000:
        # Three figures of 999.9M are a billion.
        size, unit = next((s, u) for s, u in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if value >= 0.9995 * s)
        return f"{value / size:.3g}{unit}"
    return str(value)
