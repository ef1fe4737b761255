"""The engine without a server: stream one answer, then ask several questions at once.

Run it with `python examples/library.py`, or with another model: `python examples/library.py path/to/model.gguf`.
The first run fetches and packs the weights.
"""

from __future__ import annotations

import asyncio
import sys

from enginehouse.engine import ChatPrompt, EngineConfig, LLMEngine, SamplingParams, TokenEvent


def question(text: str) -> ChatPrompt:
    """A conversation of one message, for the model's own chat template."""
    return ChatPrompt(messages=[{"role": "user", "content": text}])


async def answer(engine: LLMEngine, text: str, params: SamplingParams) -> str:
    """The whole answer to one question."""
    events = engine.generate(question(text), params)
    return "".join([event.text async for event in events if isinstance(event, TokenEvent)])


async def main(config: EngineConfig) -> None:
    """One streamed answer, then several questions that share their steps."""
    engine = await LLMEngine.start(config)
    try:
        # Text arrives as it is produced. Leaving the loop, or cancelling the task, ends the work at once.
        greedy = SamplingParams(max_tokens=48, temperature=0.0)
        async for event in engine.generate(question("What is a steam engine?"), greedy):
            if isinstance(event, TokenEvent):
                print(event.text, end="", flush=True)
        print("\n")

        # Requests that run at the same time share every step, and each gets what it would get alone.
        seeded = SamplingParams(max_tokens=32, temperature=0.3, top_p=0.95, seed=7)
        places = ["Italy", "Japan", "Peru", "Kenya"]
        answers = await asyncio.gather(
            *(answer(engine, f"What is the capital of {place}?", seeded) for place in places)
        )
        for place, text in zip(places, answers, strict=True):
            print(f"{place}: {text}")

        stats = engine.stats()
        print(f"\n{stats.steps_total} steps computed {stats.computed_tokens_total} tokens.")
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(EngineConfig(source=sys.argv[1]) if len(sys.argv) > 1 else EngineConfig()))
