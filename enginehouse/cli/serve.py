"""`enginehouse serve`: one model behind the HTTP API."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from enginehouse.cli.options import (
    ConfigOption,
    MaxContextOption,
    ModelArgument,
    ModelIdOption,
    PrecisionOption,
    SetOption,
    ThreadsOption,
    load_settings,
)

if TYPE_CHECKING:
    from enginehouse.engine import LLMEngine
    from enginehouse.settings import Settings

_SERVER, _ENGINE = "Server", "Engine"


def serve(
    model: ModelArgument = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on \\[default: 127.0.0.1].", rich_help_panel=_SERVER)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", "-p", help="Port \\[default: 8000]; 0 takes a free one.", rich_help_panel=_SERVER
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond this machine although no key is set.", rich_help_panel=_SERVER
        ),
    ] = False,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", rich_help_panel=_SERVER)
    ] = None,
    model_id: ModelIdOption = None,
    precision: PrecisionOption = None,
    batching: Annotated[
        str | None, typer.Option(help="continuous, static or one-at-a-time.", rich_help_panel=_ENGINE)
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Most sequences running at once (continuous).", rich_help_panel=_ENGINE)
    ] = None,
    threads: ThreadsOption = None,
    max_context: MaxContextOption = None,
    config: ConfigOption = None,
    extra: SetOption = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, streaming, many clients at a time.

    Without arguments: SmolLM2-135M-Instruct on http://127.0.0.1:8000. Every setting of docs/settings.md can be given
    with --set, in enginehouse.yaml, or in the environment.
    """
    settings = load_settings(
        config,
        extra,
        model__source=model,
        model__id=model_id or (_id_from(model) if model else None),
        model__precision=precision,
        server__host=host,
        server__port=port,
        server__insecure=insecure or None,
        log__level=log_level,
        engine__batching__strategy=batching,
        engine__batching__max_sequences=max_sequences,
        engine__num_threads=threads,
        engine__max_context=max_context,
    )
    _serve(settings)


def _id_from(source: str) -> str:
    """A model id for a source that was given without one: the last part of its name, as people would say it."""
    name = source.rstrip("/").split("#")[-1].split("@")[0].split(":")[-1].rsplit("/", 1)[-1]
    return name.removesuffix(".gguf") or source


def _serve(settings: Settings) -> None:
    from enginehouse import __version__
    from enginehouse.api.engine_host import engine_config
    from enginehouse.api.server import serve as run_server
    from enginehouse.cli.progress import stage_bars

    engine_config(settings).check()  # numbers that do not fit together, before anything is started
    with ExitStack() as bars:
        on_progress = bars.enter_context(stage_bars())
        url = ""

        def on_listening(at: str) -> None:
            nonlocal url
            url = at
            _say(f"Enginehouse {__version__} listens on {at}")

        def on_ready(engine: LLMEngine) -> None:
            bars.close()
            _print_welcome(engine, url)

        run_server(settings, on_listening=on_listening, on_ready=on_ready, on_progress=on_progress)


def _print_welcome(engine: LLMEngine, url: str) -> None:
    info, batching = engine.info, engine.config.batching
    kv_tokens = info.num_blocks * info.block_size
    _say(
        f"""
  model    {engine.model_id}  ({engine.config.source}, {engine.config.precision}, {info.weight_bytes / 1e6:.0f} MB)
  compute  {info.kernels} kernels, {info.num_threads} threads; loaded in {info.load_s:.2f} s
  batches  {batching.strategy}, up to {batching.build().max_sequences} sequences
  context  {engine.max_context} tokens; KV cache {kv_tokens} tokens ({info.kv_bytes / 1e6:.0f} MB, {engine.config.kv_dtype})

Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{engine.model_id}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
  enginehouse chat --url {url}

OpenAI clients: base_url {url}/v1, any api_key.  Ctrl-C stops.
"""
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
