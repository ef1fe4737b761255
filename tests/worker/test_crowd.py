"""Two hundred clients at once, each with its own wishes and its own patience."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from enginehouse.engine import LLMEngine, SamplingParams, TokenEvent
from tests.worker.conftest import StartEngine
from tests.worker.driving import Answer, idle, read

NUM_CLIENTS = 200


@dataclass
class Wish:
    prompt: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    n: int
    leaves_after: int | None
    """Tokens after which the client goes away; None stays to the end."""


def wish(source: random.Random, starts: list[list[int]]) -> Wish:
    """Prompts share beginnings now and then; stops are short enough to be met."""
    length = source.choice([1, 5, 20, 31, 32, 33, 64, 90, 150])
    start = source.choice(starts) if source.random() < 0.5 else []
    prompt = (start + [source.randrange(4, 320) for _ in range(length)])[: max(length, 40)]
    params = SamplingParams(
        max_tokens=source.randrange(1, 50),
        temperature=source.choice([0.0, 0.7, 1.0]),
        top_p=source.choice([1.0, 0.9]),
        seed=source.randrange(2**32),
        ignore_eos=source.random() < 0.5,
        logprobs=source.choice([None, None, 2]),
    )
    stop = tuple(source.sample([" the", "is", "at", "e", "no such thing", "\n"], source.randrange(3)))
    leaves_after = source.randrange(20) if source.random() < 0.25 else None
    return Wish(prompt, params, stop, source.choice([1, 1, 1, 2, 4]), leaves_after)


async def fulfil(engine: LLMEngine, wanted: Wish, delay_s: float) -> list[Answer] | list[int]:
    """The answers, or for those who leave, what choice 0 had said by then."""
    await asyncio.sleep(delay_s)
    stream = await engine.submit(wanted.prompt, wanted.params, stop=wanted.stop, n=wanted.n)
    if wanted.leaves_after is None:
        return await read(stream)
    seen: list[int] = []
    count = 0
    async with stream:
        async for event in stream:
            if isinstance(event, TokenEvent):
                count += 1
                seen += event.token_ids if event.index == 0 else []
            if count >= wanted.leaves_after:
                break
    return seen


async def test_each_of_two_hundred_clients_gets_what_a_lone_run_gives(start_engine: StartEngine) -> None:
    source = random.Random(7)
    starts = [[source.randrange(4, 320) for _ in range(70)] for _ in range(4)]
    wishes = [wish(source, starts) for _ in range(NUM_CLIENTS)]
    block_bytes = 32 * 2 * 2 * 2 * 16 * 2
    engine = await start_engine(
        max_waiting=1000, token_budget=96, max_sequences=24, kv_cache_bytes=60 * block_bytes
    )
    crowd = asyncio.gather(*(fulfil(engine, w, source.random() * 0.5) for w in wishes))
    while not crowd.done():
        await asyncio.sleep(0.03)
        engine.preempt()
    together = await crowd
    await idle(engine)
    stats = engine.stats()
    assert stats.prefix_hit_tokens_total > 0
    assert stats.forks_total > 0
    assert stats.preemptions_total > 0
    lone = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    num_compared = num_left = 0
    for wanted, found in zip(wishes, together, strict=True):
        alone = await read(await lone.submit(wanted.prompt, wanted.params, stop=wanted.stop, n=wanted.n))
        if wanted.leaves_after is None:
            assert [a.output() for a in found if isinstance(a, Answer)] == [a.output() for a in alone]
            num_compared += 1
        else:
            assert found == alone[0].token_ids[: len(found)]
            num_left += 1
    assert num_compared > 100
    assert num_left > 20
