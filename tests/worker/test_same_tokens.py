"""Invariant 1: what a sequence is given does not depend on how its work was organised.

The expected answers come from an engine that runs one sequence after the other, whole prompts at once, without
prefix cache. Every variant must repeat them bit for bit, log-probabilities included, and must show by a counter
that it did what it is about.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.engine import LLMEngine, SamplingParams
from enginehouse.engine.engine_config import BLOCK_SIZE, DEFAULT_SOURCE
from tests.worker.conftest import StartEngine, engine_config
from tests.worker.driving import Answer, ask, ask_one, idle, read

Question = tuple[list[int], SamplingParams]
PROMPT_LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100, 200, 300)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": -3, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "presence_penalty": 0.5, "seed": 2**62},
)


def questions(vocab_size: int = 320, max_tokens: int = 60) -> list[Question]:
    """Prompts of all kinds of lengths (some share beginnings) with all kinds of sampling."""
    rng = np.random.default_rng(42)
    shared = rng.integers(4, vocab_size, 400).tolist()
    result = []
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = shared[:length] if number % 2 else rng.integers(4, vocab_size, length).tolist()
        sampling = SAMPLING[number % len(SAMPLING)]
        count = max_tokens // 2 + number * max_tokens // 20
        result.append((prompt, SamplingParams(max_tokens=count, ignore_eos=number % 3 == 0, **sampling)))
    return result


async def answer_all(engine: LLMEngine, work: list[Question]) -> list[Answer]:
    return await asyncio.gather(*(ask_one(engine, prompt, params) for prompt, params in work))


def outputs(answers: list[Answer]) -> list[tuple[Any, ...]]:
    return [answer.output() for answer in answers]


def answers_of_lone_runs(source: Path | str, work: list[Question]) -> list[tuple[Any, ...]]:
    async def run() -> list[tuple[Any, ...]]:
        engine = await LLMEngine.start(engine_config(source, strategy="one-at-a-time", prefix_cache=False))
        try:
            answers = [await ask_one(engine, prompt, params) for prompt, params in work]
            assert engine.stats().prefix_hit_tokens_total == engine.stats().preemptions_total == 0
        finally:
            await engine.close()
        return outputs(answers)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(tiny_int8: Path) -> list[tuple[Any, ...]]:
    answers = answers_of_lone_runs(tiny_int8, questions())
    assert len({tuple(answer[0]) for answer in answers}) == len(answers), "the model answers always the same"
    return answers


@pytest.mark.parametrize(
    "batching",
    [
        {"strategy": "continuous"},
        {"strategy": "continuous", "max_sequences": 3},
        {"strategy": "continuous", "prefill_budget_while_decoding": 1},
        {"strategy": "static", "static_size": 4},
        {"strategy": "one-at-a-time"},
    ],
    ids=str,
)
async def test_batched_with_others(
    start_engine: StartEngine, expected: list[tuple[Any, ...]], batching: dict[str, Any]
) -> None:
    engine = await start_engine(prefix_cache=False, **batching)
    assert outputs(await answer_all(engine, questions())) == expected
    stats = engine.stats()
    tokens_per_step = stats.computed_tokens_total / stats.steps_total
    if batching["strategy"] == "one-at-a-time":
        assert stats.steps_total >= sum(answer[4] for answer in expected)
    else:
        # One at a time takes the whole sum. Prompts that get one token a step take steps of their own beside it.
        share = 0.9 if batching.get("prefill_budget_while_decoding") == 1 else 0.6
        assert stats.steps_total < share * sum(answer[4] for answer in expected), "nothing shared a step"
        assert tokens_per_step > 2


@pytest.mark.parametrize("token_budget", [1, 7, 32, 33, 512])
async def test_every_chunk_size(
    start_engine: StartEngine, expected: list[tuple[Any, ...]], token_budget: int
) -> None:
    engine = await start_engine(
        prefix_cache=False, token_budget=token_budget, max_sequences=min(token_budget, 8)
    )
    assert outputs(await answer_all(engine, questions())) == expected
    stats = engine.stats()
    assert stats.steps_total >= stats.computed_tokens_total / token_budget
    longest_chunked = max(PROMPT_LENGTHS) / token_budget
    assert stats.steps_total > longest_chunked


async def test_cold_and_warm_prefix_cache(start_engine: StartEngine, expected: list[tuple[Any, ...]]) -> None:
    engine = await start_engine()
    assert outputs(await answer_all(engine, questions())) == expected
    await idle(engine)
    hits_before = engine.stats().prefix_hit_tokens_total
    warm = await answer_all(engine, questions())
    assert outputs(warm) == expected
    # Every full block but the one with the last prompt token comes from the cache.
    cached = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in PROMPT_LENGTHS]
    assert [answer.cached_tokens for answer in warm] == cached
    await idle(engine)
    assert engine.stats().prefix_hit_tokens_total - hits_before == sum(cached) > 0


async def test_tenants_do_not_share_a_prefix(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompt, params = questions()[-1]
    first = await ask_one(engine, prompt, params, tenant="a")
    other = await ask_one(engine, prompt, params, tenant="b")
    again = await ask_one(engine, prompt, params, tenant="a")
    assert first.output() == other.output() == again.output()
    assert [first.cached_tokens, other.cached_tokens] == [0, 0]
    assert again.cached_tokens > 0


async def test_preemption_by_order(start_engine: StartEngine, expected: list[tuple[Any, ...]]) -> None:
    engine = await start_engine(prefix_cache=False)
    work = asyncio.create_task(answer_all(engine, questions()))
    while not work.done():
        engine.preempt()
        await asyncio.sleep(0.004)
    assert outputs(await work) == expected
    assert engine.stats().preemptions_total > len(PROMPT_LENGTHS)


def growing(count: int = 8) -> list[Question]:
    """Sequences that begin in one block and come to need four each."""
    return [
        (
            list(range(10 + i, 30 + i)),
            SamplingParams(max_tokens=90, seed=i, temperature=i % 3, ignore_eos=True),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_preemption_for_want_of_memory(
    start_engine: StartEngine, expected: list[tuple[Any, ...]], prefix_cache: bool
) -> None:
    lone = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    wanted = expected + outputs([await ask_one(lone, prompt, params) for prompt, params in growing()])
    block_bytes = BLOCK_SIZE * 2 * 2 * 2 * 16 * 2  # tokens, k and v, layers, heads, head_dim, fp16
    num_blocks = 13  # the longest sequence needs 12
    engine = await start_engine(kv_cache_bytes=num_blocks * block_bytes, prefix_cache=prefix_cache)
    assert engine.info.num_blocks == num_blocks
    assert outputs(await answer_all(engine, questions() + growing())) == wanted
    assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_thread_count(
    start_engine: StartEngine, expected: list[tuple[Any, ...]], num_threads: int
) -> None:
    engine = await start_engine(num_threads=num_threads)
    assert engine.info.num_threads == num_threads
    assert outputs(await answer_all(engine, questions())) == expected


async def test_fp32_weights_and_cache(start_engine: StartEngine, tiny_fp32: Path) -> None:
    lone = await start_engine(
        tiny_fp32, precision="fp32", kv_dtype="fp32", strategy="one-at-a-time", prefix_cache=False
    )
    wanted = outputs([await ask_one(lone, prompt, params) for prompt, params in questions()])
    engine = await start_engine(
        tiny_fp32, precision="fp32", kv_dtype="fp32", token_budget=33, max_sequences=16, num_threads=2
    )
    assert outputs(await answer_all(engine, questions())) == wanted
    assert outputs(await answer_all(engine, questions())) == wanted
    assert engine.stats().prefix_hit_tokens_total > 0


async def test_numpy_kernels_are_invariant_too(start_engine: StartEngine) -> None:
    work = questions()[2:7]
    lone = await start_engine(kernels="numpy", strategy="one-at-a-time", prefix_cache=False)
    wanted = outputs([await ask_one(lone, prompt, params) for prompt, params in work])
    engine = await start_engine(kernels="numpy", token_budget=33, max_sequences=16)
    assert engine.info.kernels == "numpy"
    assert outputs(await answer_all(engine, work)) == wanted


async def test_choices_share_the_prompt_and_equal_lone_runs(start_engine: StartEngine) -> None:
    engine = await start_engine()
    lone = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    prompt = questions()[7][0]  # 100 tokens: the fork has to copy a block that is partly filled
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=77, logprobs=2, ignore_eos=True)
    stream = await engine.submit(prompt, params, n=4)
    choices = await read(stream)
    await idle(engine)
    stats = engine.stats()
    assert stats.forks_total == 3
    assert stats.copied_blocks_total == 3
    assert stats.computed_tokens_total == len(prompt) + 4 * 29, "the prompt was computed more than once"
    assert len({tuple(choice.token_ids) for choice in choices}) == 4
    # Choice 0 has the request's seed, choice i the i-th after it.
    for index, choice in enumerate(choices):
        seeded = SamplingParams(max_tokens=30, temperature=1.0, seed=77 + index, logprobs=2, ignore_eos=True)
        assert choice.output() == (await ask_one(lone, prompt, seeded)).output()


async def test_choices_under_pressure(start_engine: StartEngine, expected: list[tuple[Any, ...]]) -> None:
    """More choices than places, with other requests around and preemptions in between."""
    engine = await start_engine(max_sequences=3, prefix_cache=False)
    lone = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    prompt = questions()[5][0]
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=9, ignore_eos=True)
    family = asyncio.create_task(ask(engine, prompt, params, n=7))
    others = asyncio.create_task(answer_all(engine, questions()))
    while not family.done():
        engine.preempt()
        await asyncio.sleep(0.005)
    assert outputs(await others) == expected
    assert engine.stats().forks_total == 6
    assert engine.stats().preemptions_total > 0
    wanted = [
        await ask_one(lone, prompt, SamplingParams(max_tokens=25, seed=9 + i, ignore_eos=True))
        for i in range(7)
    ]
    assert outputs(await family) == outputs(wanted)


async def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(start_engine: StartEngine) -> None:
    prompt = questions()[8][0]
    params = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=3, logprobs=3)
    lone = await start_engine(strategy="one-at-a-time", prefix_cache=False)
    wanted = await ask_one(lone, prompt, params)
    assert wanted.prompt_logprobs is not None
    assert len(wanted.prompt_logprobs) == len(prompt)
    assert wanted.prompt_logprobs[0] is None
    assert [entry.token for entry in wanted.prompt_logprobs[1:] if entry] == prompt[1:]
    engine = await start_engine(token_budget=33, max_sequences=8)
    work = [(prompt, params), *questions()[:6]]
    for _ in range(2):
        answers = await answer_all(engine, work)
        assert answers[0].output() == wanted.output()
    assert engine.stats().prefix_hit_tokens_total > 0


async def test_a_fresh_seed_is_drawn_when_none_is_given(start_engine: StartEngine) -> None:
    engine = await start_engine()
    params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    first, second = await asyncio.gather(ask_one(engine, [5, 6], params), ask_one(engine, [5, 6], params))
    assert first.token_ids != second.token_ids


@pytest.mark.model
async def test_default_model(start_engine: StartEngine) -> None:
    work = [(p, q) for p, q in questions(vocab_size=49152, max_tokens=16) if len(p) < 250]
    lone = await start_engine(DEFAULT_SOURCE, strategy="one-at-a-time", prefix_cache=False, num_threads=2)
    wanted = outputs([await ask_one(lone, prompt, params) for prompt, params in work])
    engine = await start_engine(DEFAULT_SOURCE, token_budget=33, max_sequences=6, num_threads=1)
    cold = asyncio.create_task(answer_all(engine, work))
    while not cold.done():
        await asyncio.sleep(0.15)
        engine.preempt()
    assert outputs(await cold) == wanted
    assert engine.stats().preemptions_total > 0
    await idle(engine)
    hits = engine.stats().prefix_hit_tokens_total
    assert outputs(await answer_all(engine, work)) == wanted
    assert engine.stats().prefix_hit_tokens_total > hits
