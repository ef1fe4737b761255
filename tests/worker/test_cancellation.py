"""Leaving a request at any moment frees its blocks, and others do not notice. Nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random

import psutil
import pytest

from enginehouse.engine import LLMEngine, SamplingParams, TokenEvent
from enginehouse.engine.request_stream import MAX_PENDING_EVENTS
from tests.worker.conftest import StartEngine
from tests.worker.driving import SLOW, ask_one, eventually, idle, read

LONG = SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
PROMPT = list(range(10, 50))


async def test_abort_of_a_queued_request(start_engine: StartEngine) -> None:
    engine = await start_engine(max_sequences=1, **SLOW)
    running = asyncio.create_task(read(await engine.submit(PROMPT, LONG)))
    queued = await engine.submit([7, 8, 9], SHORT)
    await eventually(lambda: engine.stats().num_waiting == 1, "the second request waits")
    computed_before = engine.stats().computed_tokens_total
    queued.abort()
    await eventually(lambda: engine.stats().num_waiting == 0, "the queue is empty again")
    assert [event async for event in queued] == []
    assert len((await running)[0].token_ids) == 450
    await idle(engine)
    assert computed_before < engine.stats().computed_tokens_total == len(PROMPT) + 449


async def test_abort_between_prefill_chunks(start_engine: StartEngine) -> None:
    engine = await start_engine(token_budget=1, max_sequences=1, prefix_cache=False, **SLOW)
    stream = await engine.submit([5] * 450, SHORT)
    await eventually(lambda: engine.stats().computed_tokens_total > 20, "prefill has begun")
    assert engine.stats().blocks_used > 0
    stream.abort()
    await idle(engine)
    assert engine.stats().computed_tokens_total < 450, "the prompt was computed to its end"


async def test_abort_while_decoding_leaves_the_others_alone(start_engine: StartEngine) -> None:
    engine = await start_engine(prefix_cache=False, **SLOW)
    other = asyncio.create_task(ask_one(engine, [5], LONG))
    stream = await engine.submit(PROMPT, LONG)
    async for event in stream:
        if isinstance(event, TokenEvent):
            break
    await eventually(lambda: engine.stats().num_running == 2, "both run")
    stream.abort()
    await eventually(lambda: engine.stats().num_running == 1, "one sequence left")
    assert engine.stats().blocks_used < 15
    assert (await other).output() == (await ask_one(engine, [5], LONG)).output()


async def test_cancelling_the_task_aborts(start_engine: StartEngine) -> None:
    engine = await start_engine()

    async def reader() -> None:
        async for _ in engine.generate(PROMPT, LONG):
            pass

    task = asyncio.create_task(reader())
    await eventually(lambda: engine.stats().num_running == 1, "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.health().num_unfinished == 0
    await idle(engine)


async def test_cancelling_while_waiting_on_a_bare_stream_aborts(start_engine: StartEngine) -> None:
    engine = await start_engine(max_sequences=1, **SLOW)
    blocker = asyncio.create_task(read(await engine.submit(PROMPT, LONG)))
    stream = await engine.submit([7], SHORT)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [event async for event in stream] == []
    await blocker


async def test_leaving_the_iteration_aborts_all_choices(start_engine: StartEngine) -> None:
    engine = await start_engine()
    async with await engine.submit(PROMPT, LONG, n=5) as stream:
        async for _ in stream:
            break
    assert engine.health().num_unfinished == 0
    await idle(engine)
    assert engine.stats().computed_tokens_total < 5 * 450


async def test_abort_after_the_end_and_twice_does_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine()
    stream = await engine.submit(PROMPT, SHORT)
    assert len((await read(stream))[0].token_ids) == 30
    stream.abort()
    stream.abort()
    assert engine.health().num_unfinished == 0


async def test_a_cancelled_submit_leaves_no_place_taken(start_engine: StartEngine) -> None:
    engine = await start_engine()
    task = asyncio.create_task(engine.submit("slow to tokenise " * 150, SHORT))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await task).abort()
    assert engine.health().num_unfinished == 0


async def test_a_slow_reader_costs_bounded_memory_and_loses_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine()
    stream = await engine.submit(PROMPT, LONG)
    await eventually(lambda: engine.health().num_unfinished == 0, "it finished unread")
    events = [event async for event in stream]
    assert len(events) <= MAX_PENDING_EVENTS + 2
    tokens = [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]
    text = "".join(event.text for event in events if isinstance(event, TokenEvent))
    prompt = await ask_one(engine, PROMPT, LONG)
    assert tokens == prompt.token_ids
    assert text == prompt.text


async def one_visit(engine: LLMEngine, random_source: random.Random) -> None:
    """A request that is read for a while and left, or read to its end."""
    prompt = [random_source.randrange(4, 320) for _ in range(random_source.randrange(1, 120))]
    params = SamplingParams(max_tokens=random_source.randrange(1, 60), ignore_eos=True)
    stream = await engine.submit(prompt, params, n=random_source.choice([1, 1, 2, 3]))
    patience = random_source.choice([0, 1, 5, 10_000])
    async with stream:
        if patience == 0:
            await asyncio.sleep(random_source.random() * 0.02)
            return
        number = 0
        async for _ in stream:
            number += 1
            if number >= patience:
                return


async def test_nothing_leaks(start_engine: StartEngine) -> None:
    engine = await start_engine(max_waiting=1000, max_sequences=16)
    source = random.Random(1)
    this, worker = psutil.Process(), psutil.Process(engine.health().worker_pid)

    async def round_of_visits() -> None:
        await asyncio.gather(*(one_visit(engine, source) for _ in range(150)))
        await idle(engine)
        gc.collect()

    await round_of_visits()
    tasks, descriptors = len(asyncio.all_tasks()), (this.num_fds(), worker.num_fds())
    threads, memory = worker.num_threads(), (this.memory_info().rss, worker.memory_info().rss)
    for _ in range(3):
        await round_of_visits()
    assert len(asyncio.all_tasks()) == tasks
    assert (this.num_fds(), worker.num_fds()) == descriptors
    assert worker.num_threads() == threads
    assert this.memory_info().rss - memory[0] < 16 * 2**20
    assert worker.memory_info().rss - memory[1] < 16 * 2**20
    stats = engine.stats()
    assert stats.blocks_used == 0
    assert stats.blocks_cached <= stats.blocks_total


async def test_breaking_out_of_generate_aborts(start_engine: StartEngine) -> None:
    engine = await start_engine(**SLOW)
    async for _ in engine.generate(PROMPT, LONG):
        break
    await eventually(lambda: engine.health().num_unfinished == 0, "the request was aborted", timeout_s=2)
    await idle(engine)
    assert engine.stats().computed_tokens_total < 400
