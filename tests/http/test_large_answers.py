"""Answers of many tokens: a prompt is described once, whatever the number of choices, and outside the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from enginehouse.api.answering import THREAD_ABOVE_TOKENS, AnswerHead
from enginehouse.api.generation import ChoiceAnswer, Delta, Usage
from enginehouse.api.openai import completions
from enginehouse.api.openai.completions import CompletionWriter, Echo
from enginehouse.api.openai.logprobs import CompletionLogprobs
from enginehouse.api.token_texts import TokenText
from enginehouse.engine.events import Event, TokenEvent
from enginehouse.engine.messages import SequenceId, TokenLogprob
from tests.http.scripted_engine import ID, PlainTokenizer, ScriptedEngine, finished, started
from tests.http.serving import sse_frames
from tests.http.test_states_and_failures import app_of, running, settle

PROMPT = [97 + index % 26 for index in range(2000)]
NUM_CHOICES = 32


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=-0.5, top=[(token, -0.5), (98, -1.5)])


def own_tokens(text: str) -> list[TokenText]:
    return [TokenText(ord(char), char, char.encode(), logprob(ord(char)), 0) for char in text]


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces whose log-probabilities were put together."""
    sizes: list[int] = []
    take = CompletionLogprobs.take

    def counting(self: CompletionLogprobs, tokens: Iterable[TokenText]) -> dict[str, list[Any]]:
        tokens = list(tokens)
        sizes.append(len(tokens))
        return take(self, tokens)

    monkeypatch.setattr(CompletionLogprobs, "take", counting)
    return sizes


def writer() -> CompletionWriter:
    tokenizer: Any = PlainTokenizer()
    return CompletionWriter(
        AnswerHead("cmpl-1", 1, "m"),
        tokenizer,
        n=NUM_CHOICES,
        num_candidates=NUM_CHOICES,
        echoes=[Echo(PROMPT, PROMPT, tokenizer, with_logprobs=True)],
        num_top=2,
        include_usage=False,
    )


def prompt_logprobs() -> list[TokenLogprob | None]:
    return [None, *(logprob(token) for token in PROMPT[1:])]


def test_choices_share_the_description_of_their_prompt(described: list[int]) -> None:
    choices = [ChoiceAnswer(index, parts=["xy"], tokens=own_tokens("xy")) for index in range(NUM_CHOICES)]
    choices[0].prompt_logprobs = prompt_logprobs()
    answer = json.loads(writer().body(choices, Usage()))
    assert sum(described) == len(PROMPT) + NUM_CHOICES * 2
    for choice in answer["choices"]:
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"] == "".join(map(chr, PROMPT)) + "xy"
        assert lists["text_offset"] == list(range(len(PROMPT) + 2))
        assert lists["token_logprobs"] == [None, *[-0.5] * (len(PROMPT) + 1)]
        assert lists["top_logprobs"][0] is None
        assert lists["top_logprobs"][-1] == {"y": -0.5, "b": -1.5}


def test_streamed_choices_share_it_too(described: list[int]) -> None:
    written = writer()
    frames: list[bytes] = []
    for index in range(NUM_CHOICES):
        first = Delta(index, SequenceId(index), "x", own_tokens("x"))
        first.prompt_logprobs = prompt_logprobs() if index == 0 else None
        frames += written.frames(first)
    assert sum(described) == len(PROMPT) + NUM_CHOICES
    for frame in frames[1::2]:
        (choice,) = json.loads(frame.removeprefix(b"data: "))["choices"]
        assert choice["logprobs"]["text_offset"] == [len(PROMPT)]


def events(num_tokens: int, num_prompt: int = 0) -> list[Event]:
    brought: list[TokenLogprob | None] = [logprob(97)] * num_prompt
    event = TokenEvent(
        index=0,
        sequence_id=ID,
        token_ids=[97] * num_tokens,
        text="a" * num_tokens,
        logprobs=[logprob(97)] * num_tokens,
        prompt_logprobs=brought or None,
    )
    return [started(), event, finished(num_tokens)]


@pytest.mark.parametrize(("num_tokens", "leaves"), [(3, False), (THREAD_ABOVE_TOKENS + 1, True)])
async def test_a_large_answer_is_written_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, leaves: bool
) -> None:
    threads: list[threading.Thread] = []
    body = CompletionWriter.body

    def recording(self: CompletionWriter, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        threads.append(threading.current_thread())
        return body(self, choices, usage)

    monkeypatch.setattr(CompletionWriter, "body", recording)
    async with running(app_of(ScriptedEngine(*events(num_tokens)))) as client:
        await settle()
        answer = await client.post("/v1/completions", json={"prompt": "a", "logprobs": 1})
    assert answer.json()["choices"][0]["text"] == "a" * num_tokens
    assert [thread is not threading.current_thread() for thread in threads] == [leaves]


@pytest.mark.parametrize(("num_prompt", "leaves"), [(3, False), (THREAD_ABOVE_TOKENS + 1, True)])
async def test_a_long_echoed_prompt_is_written_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_prompt: int, leaves: bool
) -> None:
    threads: list[threading.Thread] = []

    class RecordingEcho(Echo):
        def __init__(self, token_ids: list[int], *args: Any, **options: Any) -> None:
            super().__init__([97] * num_prompt, *args, **options)

        def tokens(self) -> list[TokenText]:
            threads.append(threading.current_thread())
            return super().tokens()

    monkeypatch.setattr(completions, "Echo", RecordingEcho)
    body = {"prompt": "abc", "logprobs": 1, "echo": True, "stream": True}
    async with running(app_of(ScriptedEngine(*events(1, num_prompt)))) as client:
        await settle()
        frames = sse_frames((await client.post("/v1/completions", json=body)).text)
    assert frames[0]["choices"][0]["text"] == "a" * num_prompt
    assert [thread is not threading.current_thread() for thread in threads] == [leaves]
