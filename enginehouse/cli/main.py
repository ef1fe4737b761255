"""The `enginehouse` command. Heavy imports stay inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from enginehouse import __version__
from enginehouse.cli.chat import chat
from enginehouse.cli.generate import generate
from enginehouse.cli.models import app as models_app
from enginehouse.cli.serve import serve
from enginehouse.errors import EnginehouseError

app = typer.Typer(
    name="enginehouse",
    help="Serve language models behind one HTTP API, or use one right here.\n\n"
    "Start with: enginehouse serve   (then follow what it prints)",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(chat)
app.command()(generate)
app.add_typer(models_app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"enginehouse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the command itself; `_print_version` does the work."""


def main() -> None:
    """Run the command line; errors we know end in their message and exit code, not in a traceback."""
    try:
        app()
    except EnginehouseError as error:
        typer.secho(f"enginehouse: {error}", fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
