"""Asking an engine questions and writing down everything it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from enginehouse.engine import Finished, LLMEngine, Prompt, RequestStream, SamplingParams, Started, TokenEvent
from enginehouse.engine.messages import TokenLogprob

SLOW = {"kernels": "numpy"}
"""For `start_engine`: steps of milliseconds, for tests that must do something while a sequence runs."""


@dataclass
class Answer:
    """One choice of a request, as its events told it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: Finished | None = None

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return self.finished.reason

    def output(self) -> tuple[Any, ...]:
        """What must not depend on how the work was organised."""
        assert self.finished is not None
        return (
            self.token_ids,
            self.text,
            self.finished.reason,
            self.finished.stop_reason,
            self.finished.num_output_tokens,
            self.logprobs,
            self.prompt_logprobs,
        )


async def read(stream: RequestStream) -> list[Answer]:
    """All answers of a stream, by index; checks the order of events."""
    answers = [Answer() for _ in stream.sequence_ids]
    started: set[int] = set()
    async for event in stream:
        answer = answers[event.index]
        assert event.sequence_id == stream.sequence_ids[event.index]
        assert answer.finished is None, "an event after the end"
        if isinstance(event, Started):
            assert event.index not in started
            started.add(event.index)
            answer.prompt_tokens, answer.cached_tokens = event.prompt_tokens, event.cached_tokens
            continue
        assert event.index in started
        if isinstance(event, TokenEvent):
            answer.token_ids += event.token_ids
            answer.text += event.text
            answer.logprobs += event.logprobs or []
            if event.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None
                answer.prompt_logprobs = event.prompt_logprobs
        else:
            answer.finished = event
            assert event.num_output_tokens == len(answer.token_ids)
    assert all(answer.finished is not None for answer in answers)
    return answers


async def ask(engine: LLMEngine, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Answer]:
    """Submit and read to the end."""
    return await read(await engine.submit(prompt, params, **options))


async def ask_one(engine: LLMEngine, prompt: Prompt, params: SamplingParams, **options: Any) -> Answer:
    """The only answer of a request with n = 1."""
    (answer,) = await ask(engine, prompt, params, **options)
    return answer


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds; fail with `what` when it does not."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"did not happen within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


async def idle(engine: LLMEngine) -> None:
    """Wait for the worker to have nothing to do and every block back."""
    await eventually(
        lambda: (
            engine.health().num_unfinished == 0
            and engine.stats().num_running == engine.stats().num_waiting == engine.stats().blocks_used == 0
        ),
        f"idle with all blocks free ({engine.stats()})",
    )


def own_workers() -> list[psutil.Process]:
    """Workers that this process started and that still live; servers of other tests have theirs below them."""
    return [child for child in psutil.Process().children() if "enginehouse.engine.worker" in child.cmdline()]
