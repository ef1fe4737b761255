"""What a prompt may cost before it is refused, and how many are encoded at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from enginehouse.engine.events import ChatPrompt
from enginehouse.engine.prompt_encoder import MAX_LONG_ENCODES, THREAD_ABOVE_CHARS, PromptEncoder
from enginehouse.errors import ContextLengthExceededError, InvalidRequestError

MAX_CONTEXT = 50
LONG_TEXT = "x" * (THREAD_ABOVE_CHARS + 1)


class CountingTokenizer:
    """One token for a text, at least one for each 100 characters; counts encodings that run at the same time."""

    meta = SimpleNamespace(chat_templates={})
    vocab_size = 300

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_encoded = 0
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()

    def min_num_tokens(self, text: str) -> int:
        return len(text) // 100

    def encode(self, _text: str, **_options: Any) -> list[int]:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        self.gate.wait()
        with self._lock:
            self.num_running -= 1
            self.num_encoded += 1
        return [7]


class CountedIds(list[int]):
    """Token ids that count how often they are looked at."""

    num_looks = 0

    def __iter__(self) -> Any:
        for token in super().__iter__():
            self.num_looks += 1
            yield token


class Template:
    """Stands for a chat template; counts renderings."""

    def __init__(self) -> None:
        self.num_rendered = 0

    def encode(self, tokenizer: CountingTokenizer, messages: list[Any], **_options: Any) -> list[int]:
        self.num_rendered += 1
        return tokenizer.encode(str(messages))


def encoder_of(tokenizer: CountingTokenizer) -> tuple[PromptEncoder, Template]:
    encoder, template = PromptEncoder(tokenizer, MAX_CONTEXT), Template()  # type: ignore[arg-type]
    encoder._chat_template = template  # type: ignore[assignment]
    return encoder, template


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not happen")


@pytest.mark.parametrize("length", [MAX_CONTEXT, 10 * MAX_CONTEXT])
async def test_too_many_ids_are_refused_without_a_look_at_them(length: int) -> None:
    encoder, _ = encoder_of(CountingTokenizer())
    ids = CountedIds([5] * length)
    with pytest.raises(ContextLengthExceededError, match=f"{length} tokens") as caught:
        await encoder.encode(ids)
    assert caught.value.param == "prompt"
    assert ids.num_looks == 0
    with pytest.raises(InvalidRequestError, match="300 is not a token id"):
        await encoder.encode([5, 300])
    assert await encoder.encode([5] * (MAX_CONTEXT - 1)) == [5] * (MAX_CONTEXT - 1)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * (MAX_CONTEXT + 1),
        [{"role": "user", "content": None}] * (MAX_CONTEXT + 1),
        [{}] * (MAX_CONTEXT + 1),
        [{"role": "user", "content": "x" * 100 * MAX_CONTEXT}],
        [{"role": "x" * 100 * MAX_CONTEXT, "content": ""}],
        [{"role": "user", "name": "x" * 100 * MAX_CONTEXT, "content": ""}],
        [{"role": "x" * 100, "name": "x" * 100, "content": "x" * 100}] * (MAX_CONTEXT // 3 + 1),
    ],
)
async def test_a_conversation_that_cannot_fit_is_never_rendered(messages: list[dict[str, Any]]) -> None:
    encoder, template = encoder_of(CountingTokenizer())
    with pytest.raises(ContextLengthExceededError, match="at least") as caught:
        await encoder.encode(ChatPrompt(messages=messages))
    assert caught.value.param == "messages"
    assert template.num_rendered == 0
    assert await encoder.encode(ChatPrompt(messages=[{"role": "user", "content": "hello"}])) == [7]
    assert template.num_rendered == 1


@pytest.mark.parametrize(
    "prompt",
    [
        LONG_TEXT,
        ChatPrompt(messages=[{"role": "user", "content": LONG_TEXT}]),
        ChatPrompt(messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}]),
        ChatPrompt(messages=[{"role": "assistant", "content": "", "tool_calls": []}]),
    ],
    ids=["text", "chat", "tools", "calls"],
)
async def test_few_long_prompts_are_encoded_at_a_time_and_short_ones_pass(prompt: str | ChatPrompt) -> None:
    tokenizer = CountingTokenizer()
    encoder, _ = encoder_of(tokenizer)
    tokenizer.gate.clear()
    crowd = [asyncio.create_task(encoder.encode(prompt)) for _ in range(5 * MAX_LONG_ENCODES)]
    await until(lambda: tokenizer.num_running == MAX_LONG_ENCODES)
    for task in crowd[:MAX_LONG_ENCODES]:  # whoever gives up does not make room for more threads
        task.cancel()
    await asyncio.sleep(0)
    short = asyncio.create_task(encoder.encode(ChatPrompt(messages=[{"role": "user", "content": "x"}])))
    await until(lambda: tokenizer.num_running == MAX_LONG_ENCODES + 1)
    tokenizer.gate.set()
    assert await short == [7]
    assert await asyncio.gather(*crowd[MAX_LONG_ENCODES:]) == [[7]] * (4 * MAX_LONG_ENCODES)
    assert tokenizer.most_running == MAX_LONG_ENCODES + 1
