"""`enginehouse chat`: a conversation in the terminal, with an engine started here or with a running server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from enginehouse.cli.options import (
    ConfigOption,
    MaxContextOption,
    ModelArgument,
    PrecisionOption,
    SetOption,
    ThreadsOption,
    load_settings,
)
from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from enginehouse.cli.chat_backends import ChatBackend
    from enginehouse.settings import Settings

HELP = "/clear forgets the conversation, /system TEXT sets the system message, /exit (or Ctrl-D) leaves."

Message = dict[str, str]


def chat(
    model: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Talk to a running server instead, for example http://127.0.0.1:8000."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ENGINEHOUSE_API_KEY", help="Key for --url.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Most tokens in an answer.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    max_context: MaxContextOption = None,
    config: ConfigOption = None,
    extra: SetOption = None,
) -> None:
    """Talk to a model in this terminal. Ctrl-C ends an answer, Ctrl-D the program."""
    settings = load_settings(
        config,
        extra,
        model__source=model,
        model__precision=precision,
        engine__num_threads=threads,
        engine__max_context=max_context,
    )
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    _run(settings, url, api_key, system, options)


def _run(
    settings: Settings,
    url: str | None,
    api_key: str | None,
    system: str | None,
    options: dict[str, float | None],
) -> None:
    with contextlib.suppress(ImportError):  # Python may be built without it
        import readline  # noqa: F401 - gives `input` line editing and a history

    # The event loop has a thread of its own, so that it goes on hearing from the worker while `input` waits.
    from anyio.from_thread import start_blocking_portal

    from enginehouse.cli.chat_backends import open_local, open_server

    with start_blocking_portal() as portal:
        if url:
            backend = portal.call(open_server, url, api_key, options)
        else:
            backend = portal.call(open_local, settings, options)
        try:
            print(f"Talking to {backend.name}. {HELP}", file=sys.stderr)
            _converse(portal, backend, system)
        finally:
            portal.call(backend.close)


def _converse(portal: BlockingPortal, backend: ChatBackend, system: str | None) -> None:
    messages = _opening(system)
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = _opening(system)
        elif line.startswith("/system"):
            system = line.removeprefix("/system").strip() or None
            messages = _opening(system)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            messages = _answered(portal, backend, messages)


def _opening(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def _answered(portal: BlockingPortal, backend: ChatBackend, messages: list[Message]) -> list[Message]:
    """The conversation with the answer, printed as it comes. Ctrl-C ends it and keeps what is there; a question
    that fails is forgotten, so that the next one is not refused for it."""
    pieces: list[str] = []
    answer = portal.start_task_soon(_print_stream, backend.stream(messages), pieces)
    try:
        answer.result()
    except KeyboardInterrupt:
        answer.cancel()
        print("\n[stopped]", file=sys.stderr)
    except EnginehouseError as error:
        print(f"\n{error}", file=sys.stderr)
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


async def _print_stream(stream: AsyncIterator[str], pieces: list[str]) -> None:
    start_s = first_s = time.perf_counter()
    async for piece in stream:
        if not pieces:
            first_s = time.perf_counter()
        pieces.append(piece)
        print(piece, end="", flush=True)
    rest_s = time.perf_counter() - first_s
    rate = f", {(len(pieces) - 1) / rest_s:.0f} tokens/s" if len(pieces) > 1 and rest_s > 0 else ""
    print(flush=True)
    print(f"[{len(pieces)} tokens, first after {(first_s - start_s) * 1000:.0f} ms{rate}]", file=sys.stderr)
