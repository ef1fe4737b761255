"""`enginehouse generate`: one prompt, one continuation, on standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from enginehouse.cli.options import (
    ConfigOption,
    MaxContextOption,
    ModelOption,
    PrecisionOption,
    SetOption,
    ThreadsOption,
    load_settings,
)

if TYPE_CHECKING:
    from enginehouse.engine import Finished, SamplingParams
    from enginehouse.settings import Settings


def generate(
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads it from standard input.')],
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the smallest set with this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text (may be repeated).")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    max_context: MaxContextOption = None,
    config: ConfigOption = None,
    extra: SetOption = None,
) -> None:
    """Continue a text once, without a server.

    Example: enginehouse generate "The capital of France is" -n 8
    """
    from enginehouse.engine import SamplingParams

    settings = load_settings(
        config,
        extra,
        model__source=model,
        model__precision=precision,
        engine__num_threads=threads,
        engine__max_context=max_context,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    params.check(vocab_size=0)  # none of these options names a token
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    asyncio.run(_generate(settings, text, params, tuple(stop or ()), chat=chat, as_json=as_json))


async def _generate(
    settings: Settings,
    prompt: str,
    params: SamplingParams,
    stop: tuple[str, ...],
    *,
    chat: bool,
    as_json: bool,
) -> None:
    from enginehouse.cli.progress import start_engine
    from enginehouse.engine import ChatPrompt, Finished, TokenEvent

    engine = await start_engine(settings)
    try:
        wanted = ChatPrompt(messages=[{"role": "user", "content": prompt}]) if chat else prompt
        pieces: list[str] = []
        async for event in engine.generate(wanted, params, stop=stop):
            if isinstance(event, TokenEvent):
                pieces.append(event.text)
                if not as_json:
                    print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                _print_end(event, "".join(pieces), as_json=as_json)
    finally:
        await engine.close()


def _print_end(finished: Finished, text: str, *, as_json: bool) -> None:
    if as_json:
        timing = finished.timing
        result = {
            "text": text,
            "finish_reason": finished.reason,
            "output_tokens": finished.num_output_tokens,
            "prefill_s": round(timing.prefill_s, 4),
            "decode_s": round(timing.decode_s, 4),
        }
        print(json.dumps(result, ensure_ascii=False))
    else:
        print()
