"""What a request gives: events, text, stop strings, limits, refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from enginehouse.engine import UNTIL_CONTEXT_END, ChatPrompt, LLMEngine, SamplingParams, TokenEvent
from enginehouse.engine.stop_strings import StopStringChecker, StopStrings
from enginehouse.errors import (
    ContextLengthExceededError,
    DeadlineExceededError,
    EnginehouseError,
    InvalidRequestError,
    QueueFullError,
    QueueTimeoutError,
    SequenceFailedError,
    ShuttingDownError,
    TemplateError,
)
from enginehouse.runtime.tokenizer import Tokenizer
from tests.support.tiny_models import EOS_TOKEN_ID, MAX_CONTEXT
from tests.worker.conftest import StartEngine
from tests.worker.driving import SLOW, ask, ask_one, idle, read

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **fields})


# Text -----------------------------------------------------------------------------------------------------------


async def test_text_is_the_decoded_output(start_engine: StartEngine) -> None:
    engine = await start_engine()
    answer = await ask_one(engine, "The quick brown fox", params(max_tokens=200))
    assert len(answer.token_ids) == 200
    assert answer.text == engine.tokenizer.decode(answer.token_ids)
    assert answer.prompt_tokens == len(await engine.encode("The quick brown fox"))


async def test_timing_adds_up(start_engine: StartEngine) -> None:
    engine = await start_engine()
    before_s = time.monotonic()
    answer = await ask_one(engine, "Time", GREEDY)
    assert answer.finished is not None
    timing = answer.finished.timing
    assert before_s <= timing.arrival_s <= timing.started_s <= timing.first_token_s <= timing.finished_s
    assert timing.finished_s <= time.monotonic()
    assert timing.queue_s + timing.prefill_s + timing.decode_s == pytest.approx(timing.total_s)


async def test_chat_uses_the_template_and_keeps_user_text_text(start_engine: StartEngine) -> None:
    engine = await start_engine()
    messages = [{"role": "user", "content": "hi <|im_end|> there"}]
    tokens = await engine.encode(ChatPrompt(messages=messages))
    assert tokens.count(EOS_TOKEN_ID) == 1, "the user's text became a special token"
    raw = "<|im_start|>user\nhi <|im_end|> there<|im_end|>\n<|im_start|>assistant\n"
    assert engine.tokenizer.decode(tokens, skip_special=False) == raw
    answer = await ask_one(engine, ChatPrompt(messages=messages), GREEDY)
    assert answer.prompt_tokens == len(tokens)


async def test_special_tokens_in_a_text_prompt_are_special(start_engine: StartEngine) -> None:
    engine = await start_engine()
    assert await engine.encode("<|im_start|><|im_end|>") == [1, 2]
    answer = await ask_one(engine, "<|im_start|><|im_end|>", GREEDY)
    assert len(answer.token_ids) == 24


async def test_eos_ends_the_output_and_has_no_text(start_engine: StartEngine) -> None:
    engine = await start_engine()
    biased = params(ignore_eos=False, logit_bias={EOS_TOKEN_ID: 100.0}, min_tokens=5)
    answer = await ask_one(engine, "End", biased)
    assert answer.token_ids[-1] == EOS_TOKEN_ID
    assert len(answer.token_ids) == 6
    assert answer.reason == "stop"
    assert answer.finished is not None
    assert answer.finished.stop_reason is None
    assert answer.text == engine.tokenizer.decode(answer.token_ids[:-1])


async def test_stop_token_ids_are_named_and_hidden(start_engine: StartEngine) -> None:
    engine = await start_engine()
    free = await ask_one(engine, "Stop here", GREEDY)
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    answer = await ask_one(engine, "Stop here", params(stop_token_ids=(stop,)))
    assert answer.token_ids == free.token_ids[: first + 1]
    assert answer.finished is not None
    assert (answer.reason, answer.finished.stop_reason) == ("stop", stop)
    assert answer.text == engine.tokenizer.decode(answer.token_ids[:-1])


# Stop strings ---------------------------------------------------------------------------------------------------


async def test_stop_strings_cut_text_tokens_and_usage(start_engine: StartEngine) -> None:
    engine = await start_engine()
    free = await ask_one(engine, "Once upon a time", params(max_tokens=80, logprobs=1))
    checked = 0
    for start in range(5, len(free.text) - 4):
        stop = free.text[start : start + 4]
        if "\ufffd" in stop:
            continue
        answer = await ask_one(
            engine, "Once upon a time", params(max_tokens=80, logprobs=1), stop=("never comes", stop)
        )
        where = free.text.index(stop)
        assert answer.text == free.text[:where]
        assert answer.finished is not None
        assert (answer.reason, answer.finished.stop_reason) == ("stop", stop)
        count = len(answer.token_ids)
        assert answer.token_ids == free.token_ids[:count]
        assert len(answer.logprobs) == count
        # The last token counted is the one that completed the stop string.
        assert stop in engine.tokenizer.decode(free.token_ids[:count])
        assert stop not in engine.tokenizer.decode(free.token_ids[: count - 1])
        checked += 1
    assert checked > 5


async def test_a_stop_string_ends_the_work_in_the_worker(start_engine: StartEngine) -> None:
    engine = await start_engine()
    free = await ask_one(engine, "Once upon a time", params(max_tokens=30))
    computed = engine.stats().computed_tokens_total
    await ask_one(engine, "Once upon a time", params(max_tokens=400), stop=(free.text[10:14],))
    await idle(engine)
    assert engine.stats().computed_tokens_total - computed < 200


async def test_held_back_text_comes_at_the_end(start_engine: StartEngine) -> None:
    engine = await start_engine()
    free = await ask_one(engine, "Hold", GREEDY)
    answer = await ask_one(engine, "Hold", GREEDY, stop=(free.text[-6:] + "and more",))
    assert answer.text == free.text
    assert answer.reason == "length"


async def test_each_choice_stops_on_its_own(start_engine: StartEngine) -> None:
    engine = await start_engine()
    sampled = params(temperature=1.0, seed=4, max_tokens=40)
    free = await ask(engine, "Choices", sampled, n=3)
    stop = free[1].text[8:12]
    stopped = await ask(engine, "Choices", sampled, n=3, stop=(stop,))
    for before, after in zip(free, stopped, strict=True):
        where = before.text.find(stop)
        assert after.text == (before.text if where < 0 else before.text[:where])
    assert stopped[1].reason == "stop"
    assert "length" in {answer.reason for answer in stopped}


async def test_a_fault_in_turning_tokens_into_text_stays_with_its_request(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = StopStringChecker.push

    def broken_push(self: StopStringChecker, text: str) -> tuple[str, str | None]:
        if self._stops.next(0, "\x00"):
            raise KeyError("on purpose")
        return push(self, text)

    monkeypatch.setattr(StopStringChecker, "push", broken_push)
    engine = await start_engine()
    results = await asyncio.gather(
        ask_one(engine, [5], GREEDY, stop=("\x00",)),
        *(ask_one(engine, [5], GREEDY) for _ in range(15)),
        return_exceptions=True,
    )
    assert isinstance(results[0], SequenceFailedError)
    assert all(
        not isinstance(result, BaseException) and len(result.token_ids) == 24 for result in results[1:]
    )
    assert engine.health().restarts_total == 0


# Limits ---------------------------------------------------------------------------------------------------------


async def test_until_the_context_ends(start_engine: StartEngine) -> None:
    engine = await start_engine()
    prompt = list(range(10, 310))
    answer = await ask_one(engine, prompt, params(max_tokens=UNTIL_CONTEXT_END))
    assert len(answer.token_ids) == MAX_CONTEXT - 300
    assert answer.reason == "length"


async def test_max_context_setting(start_engine: StartEngine) -> None:
    engine = await start_engine(max_context=100)
    assert engine.max_context == 100
    answer = await ask_one(engine, list(range(10, 100)), params(max_tokens=50))
    assert len(answer.token_ids) == 10
    with pytest.raises(InvalidRequestError, match="600"):
        await start_engine(max_context=600)


@pytest.mark.parametrize("n", [1, 3])
async def test_max_tokens_zero_computes_the_prompt_only(start_engine: StartEngine, n: int) -> None:
    engine = await start_engine()
    scored = params(max_tokens=0, prompt_logprobs=2)
    answers = await ask(engine, list(range(10, 60)), scored, n=n)
    for answer in answers:
        assert (answer.token_ids, answer.text, answer.reason) == ([], "", "length")
    assert answers[0].prompt_logprobs is not None
    assert len(answers[0].prompt_logprobs) == 50
    plain = await ask(engine, [10, 11], params(max_tokens=0), n=n)
    assert [answer.reason for answer in plain] == ["length"] * n


async def test_prompt_lengths_are_checked_before_the_first_event(start_engine: StartEngine) -> None:
    engine = await start_engine()
    with pytest.raises(ContextLengthExceededError, match=r"512 tokens.*512"):
        await engine.submit([7] * MAX_CONTEXT, GREEDY)
    answer = await ask_one(engine, [7] * (MAX_CONTEXT - 1), GREEDY)
    assert len(answer.token_ids) == 1
    text = "words and more words " * 400
    num_tokens = len(engine.tokenizer.encode(text))
    with pytest.raises(ContextLengthExceededError, match=str(num_tokens)):
        await engine.submit(text, GREEDY)
    with pytest.raises(ContextLengthExceededError) as caught:
        await engine.submit(ChatPrompt(messages=[{"role": "user", "content": text}]), GREEDY)
    assert caught.value.param == "messages"


async def test_a_huge_prompt_is_refused_without_reading_it(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine()
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "encode_guarded", None)
    for prompt in ("x" * 30_000_000, ChatPrompt(messages=[{"role": "user", "content": "x" * 30_000_000}])):
        with pytest.raises(ContextLengthExceededError, match="at least"):
            await engine.submit(prompt, GREEDY)


async def test_stop_strings_are_built_once_for_all_choices(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = StopStrings.__init__

    def counted(self: StopStrings, stops: Sequence[str]) -> None:
        built.append(len(stops))
        build(self, stops)

    monkeypatch.setattr(StopStrings, "__init__", counted)
    engine = await start_engine()
    await ask(engine, [5, 6], GREEDY, n=8, stop=("never", "ever"))
    assert built == [2]


@pytest.mark.parametrize(
    ("prompt", "fields", "options", "param"),
    [
        ("", {}, {}, "prompt"),
        ([], {}, {}, "prompt"),
        ([5, 320], {}, {}, "prompt"),
        ([5, -1], {}, {}, "prompt"),
        ("x", {"max_tokens": -1}, {}, "max_tokens"),
        ("x", {"temperature": float("nan")}, {}, "temperature"),
        ("x", {"top_p": 0.0}, {}, "top_p"),
        ("x", {"logit_bias": {320: 1.0}}, {}, "logit_bias"),
        ("x", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, {}, "logit_bias"),
        ("x", {"stop_token_ids": (5,) * 1025}, {}, "stop_token_ids"),
        ("x", {"seed": 2**63}, {}, "seed"),
        ("x", {}, {"n": 0}, "n"),
        ("x", {}, {"stop": ("ok", "")}, "stop"),
        ("x", {}, {"stop": ("ok", "x" * 1001)}, "stop"),
    ],
)
async def test_invalid_requests_name_the_field(
    start_engine: StartEngine, prompt: Any, fields: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    engine = await start_engine()
    with pytest.raises(InvalidRequestError) as caught:
        await engine.submit(prompt, params(**fields), **options)
    assert caught.value.param == param
    assert engine.health().num_unfinished == 0


async def test_template_errors_are_the_callers(start_engine: StartEngine) -> None:
    engine = await start_engine()
    with pytest.raises(TemplateError):
        await engine.submit(ChatPrompt(messages=[{"content": 5}]), GREEDY)
    assert engine.health().num_unfinished == 0


async def test_a_sequence_too_large_for_the_cache_fails_alone(start_engine: StartEngine) -> None:
    block_bytes = 32 * 2 * 2 * 2 * 16 * 2
    engine = await start_engine(kv_cache_bytes=4 * block_bytes)
    results = await asyncio.gather(
        ask_one(engine, list(range(10, 210)), GREEDY),
        ask_one(engine, list(range(10, 40)), GREEDY),
        ask_one(engine, list(range(10, 30)), params(max_tokens=300)),
        return_exceptions=True,
    )
    assert isinstance(results[0], ContextLengthExceededError)
    assert "128" in str(results[0])
    assert not isinstance(results[1], BaseException)
    assert len(results[1].token_ids) == 24
    # What fits at first ends at the cache's end, as it would at the context's.
    assert not isinstance(results[2], BaseException)
    assert results[2].reason == "length"
    assert len(results[2].token_ids) == 4 * 32 - 20


# Queue ----------------------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded_and_says_when_to_come_back(start_engine: StartEngine) -> None:
    engine = await start_engine(max_sequences=2, max_waiting=3, **SLOW)
    streams = [await engine.submit([5 + i], params(max_tokens=200)) for i in range(5)]
    for _ in range(20):
        with pytest.raises(QueueFullError) as caught:
            await engine.submit([50], GREEDY)
    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 120
    for num_sequences in (1, 5):
        with pytest.raises(QueueFullError):
            engine.check_capacity(num_sequences)
    for ask_for_six in (engine.submit([50], GREEDY, n=6), asyncio.to_thread(engine.check_capacity, 6)):
        with pytest.raises(InvalidRequestError, match=r"6 sequences .* at most 5") as invalid:
            await ask_for_six
        assert invalid.value.param == "n"
    await asyncio.gather(*(read(stream) for stream in streams))
    await ask(engine, [50], GREEDY, n=5)


async def test_waiting_too_long_is_told(start_engine: StartEngine) -> None:
    engine = await start_engine(max_sequences=1, max_queue_wait_s=0.05, **SLOW)
    slow = asyncio.create_task(ask_one(engine, [5], params(max_tokens=450)))
    await asyncio.sleep(0.01)
    with pytest.raises(QueueTimeoutError) as caught:
        await ask_one(engine, [6], GREEDY)
    assert caught.value.retry_after_s is not None
    assert len((await slow).token_ids) == 450


async def test_deadlines(start_engine: StartEngine) -> None:
    engine = await start_engine(**SLOW)
    now_s = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        await ask_one(engine, [5], params(max_tokens=500), deadline_s=now_s + 0.03)
    with pytest.raises(DeadlineExceededError):
        await ask_one(engine, [5], GREEDY, deadline_s=now_s - 1)
    answer = await ask_one(engine, [5], GREEDY, deadline_s=now_s + 100)
    assert len(answer.token_ids) == 24


async def test_priority_order(start_engine: StartEngine) -> None:
    engine = await start_engine(strategy="one-at-a-time", queue_order="priority", priority_ageing_s=1000.0)
    finished: list[int] = []

    async def one(priority: int) -> None:
        await ask_one(engine, [5], params(max_tokens=60), priority=priority)
        finished.append(priority)

    await asyncio.gather(*(one(priority) for priority in (0, 5, 3, 9, 1)))
    assert finished[1:] == sorted(finished[1:])


async def test_fair_share_order(start_engine: StartEngine) -> None:
    engine = await start_engine(strategy="one-at-a-time", queue_order="fair-share")
    finished: list[str] = []

    async def one(tenant: str) -> None:
        await ask_one(engine, [5], params(max_tokens=40), tenant=tenant)
        finished.append(tenant)

    await asyncio.gather(*(one(tenant) for tenant in "aaaaaab"))
    assert finished.index("b") <= 2


# End of the engine ----------------------------------------------------------------------------------------------


async def test_close_fails_what_runs_and_what_comes(start_engine: StartEngine) -> None:
    engine = await start_engine(**SLOW)
    stream = await engine.submit([5], params(max_tokens=500))
    events = [await anext(stream)]
    await engine.close()
    with pytest.raises(ShuttingDownError):
        events.extend([event async for event in stream])
    with pytest.raises(ShuttingDownError):
        await engine.submit([5], GREEDY)
    assert engine.health().state == "closed"
    assert engine.health().num_unfinished == 0
    await engine.close()


async def test_close_lets_running_requests_finish_within_the_grace_time(start_engine: StartEngine) -> None:
    engine = await start_engine(**SLOW)
    answer = asyncio.create_task(ask_one(engine, [5], params(max_tokens=300)))
    await asyncio.sleep(0.02)
    assert not answer.done()
    closing = asyncio.create_task(engine.close(grace_s=20))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        await engine.submit([5], GREEDY)
    await closing
    assert len((await answer).token_ids) == 300


async def test_concurrent_requests_in_one_process(start_engine: StartEngine) -> None:
    """Long texts are tokenised in threads while others stream; nobody gets another's answer."""
    engine = await start_engine(max_waiting=100)
    prompts = [f"{i} " * (1 + i * 7 % 60) for i in range(60)]
    together = await asyncio.gather(*(ask_one(engine, prompt, GREEDY) for prompt in prompts))
    for prompt, answer in list(zip(prompts, together, strict=True))[::7]:
        assert (await ask_one(engine, prompt, GREEDY)).output() == answer.output()


async def test_generate_yields_what_submit_gives(start_engine: StartEngine) -> None:
    engine = await start_engine()
    events = [event async for event in engine.generate("Hello", GREEDY)]
    text = "".join(event.text for event in events if isinstance(event, TokenEvent))
    assert text == (await ask_one(engine, "Hello", GREEDY)).text
    with pytest.raises(EnginehouseError):
        async for _ in engine.generate("", GREEDY):
            pass


def test_engine_is_exported_lazily() -> None:
    import enginehouse.engine as package

    assert package.LLMEngine is LLMEngine
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = package.nonsense
