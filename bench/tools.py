"""What a forced tool call costs against free text of the same length, and what looking for calls costs.

python bench/tools.py [--source …] [--rounds 15]

Both sides run alternately in one engine, with the same prompt and as many tokens. The first call of a worker's life
also prepares the vocabulary; a new function's grammar is compiled in the API process (checked) and in the worker
(followed).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import msgspec

from enginehouse.api.generation import GenerationCall
from enginehouse.api.tools.calling import ToolCalling
from enginehouse.api.tools.definitions import Function, tool_request
from enginehouse.api.tools.formats import HERMES
from enginehouse.api.tools.parsing import ParsedOutput, ToolCallParser, parse_output
from enginehouse.engine import EngineConfig, LLMEngine, SamplingParams, TokenEvent
from enginehouse.engine.events import Finished
from enginehouse.settings import DEFAULT_SOURCE, ModelSettings

MESSAGES = [{"role": "user", "content": "Book a table for four at Chez Paul in Paris tomorrow evening."}]
BOOK = Function(
    name="book_table",
    description="Book a table in a restaurant.",
    parameters={
        "type": "object",
        "properties": {
            "restaurant": {"type": "string", "maxLength": 40},
            "city": {"type": "string", "maxLength": 40},
            "people": {"type": "integer", "minimum": 1, "maximum": 20},
            "time": {"enum": ["lunch", "afternoon", "evening"]},
        },
        "required": ["restaurant", "city", "people", "time"],
    },
)

OTHER = msgspec.structs.replace(BOOK, name="reserve_seats")


@dataclass
class Run:
    """One answer and its time."""

    text: str
    num_tokens: int
    total_s: float
    decode_s: float


async def run(engine: LLMEngine, call: GenerationCall, params: SamplingParams) -> Run:
    """Generate once."""
    begin = time.perf_counter()
    pieces: list[str] = []
    async for event in engine.generate(call.prompts[0], params):
        if isinstance(event, TokenEvent):
            pieces.append(event.text)
        elif isinstance(event, Finished):
            total_s = time.perf_counter() - begin
            return Run("".join(pieces), event.num_output_tokens, total_s, event.timing.decode_s)
    raise RuntimeError("the request did not finish")


async def forced_against_free(source: str, rounds: int) -> dict[str, object]:
    """Medians over alternating rounds."""
    engine = await LLMEngine.start(EngineConfig(source=source))
    try:
        calling = ToolCalling(MESSAGES, tool_request([BOOK], mode="required", parallel=False))
        params = SamplingParams(temperature=0.0, max_tokens=200)
        asked = GenerationCall(prompts=[], params=params)
        call = calling.bind(asked, engine, ModelSettings(source=source))
        # Prefix cache and kernels are warm, no grammar has been seen.
        await run(engine, call, msgspec.structs.replace(params, max_tokens=32, ignore_eos=True))
        first = await run(engine, call, call.params)
        again = ToolCalling(MESSAGES, tool_request([OTHER], mode="required", parallel=False))
        other = again.bind(asked, engine, ModelSettings(source=source))
        await run(engine, other, msgspec.structs.replace(params, max_tokens=1))
        second = await run(engine, other, other.params)
        third = await run(engine, other, other.params)
        free_params = msgspec.structs.replace(
            params, max_tokens=first.num_tokens, min_tokens=first.num_tokens, ignore_eos=True
        )
        forced: list[Run] = []
        free: list[Run] = []
        for _ in range(rounds):
            forced.append(await run(engine, call, call.params))
            free.append(await run(engine, call, free_params))
        assert all(one.num_tokens == first.num_tokens for one in (*forced, *free))
        (written,) = calling.parse(first.text).calls
        ratios = [a.total_s / b.total_s for a, b in zip(forced, free, strict=True)]
        return {
            "call": json.loads(written.arguments),
            "tokens": first.num_tokens,
            "first call of a worker ms": round(first.total_s * 1e3, 1),
            "first call of another function, against its second": round(second.total_s / third.total_s, 3),
            "forced ms": round(statistics.median(one.total_s for one in forced) * 1e3, 1),
            "free ms": round(statistics.median(one.total_s for one in free) * 1e3, 1),
            "forced / free": round(statistics.median(ratios), 3),
            "forced ms a token": round(
                statistics.median(one.decode_s for one in forced) * 1e3 / first.num_tokens, 2
            ),
            "free ms a token": round(
                statistics.median(one.decode_s for one in free) * 1e3 / first.num_tokens, 2
            ),
        }
    finally:
        await engine.close()


def parsing_us(text: str, piece_chars: int = 4) -> float:
    """Microseconds that the parser of free text takes for a piece of one token's size."""
    pieces = [text[at : at + piece_chars] for at in range(0, len(text), piece_chars)]
    times = []
    for _ in range(20):
        parser, parsed = ToolCallParser(HERMES, (BOOK.name,)), ParsedOutput()
        begin = time.perf_counter()
        for piece in pieces:
            parsed.add(parser.feed(piece))
        parsed.add(parser.finish())
        times.append((time.perf_counter() - begin) / len(pieces))
        assert parsed.content == parse_output(ToolCallParser(HERMES, (BOOK.name,)), text).content
    return round(statistics.median(times) * 1e6, 2)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default=DEFAULT_SOURCE)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    result = asyncio.run(forced_against_free(args.source, args.rounds))
    prose = "The weather in Paris is mild in spring, with a few showers. " * 40
    arguments = json.dumps({"text": prose})
    long_call = f'<tool_call>\n{{"name": "{BOOK.name}", "arguments": {arguments}}}\n</tool_call>'
    result["parser us a token, prose"] = parsing_us(prose)
    result["parser us a token, inside a long call"] = parsing_us(long_call)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
