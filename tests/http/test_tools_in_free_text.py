"""Calls that a model wrote of its own accord, on the wire: an engine that says what the test wants said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.engine.events import ChatPrompt, Event, TokenEvent
from enginehouse.engine.messages import TokenLogprob
from tests.http.scripted_engine import ScriptedEngine, finished, started
from tests.http.serving import sse_frames
from tests.http.test_states_and_failures import app_of, running, settle
from tests.http.test_tools import joined, plain
from tests.unit.tools.reading import pieces_of
from tests.unit.tools.templates import BY_FORMAT
from tests.unit.tools.test_parsing import GOOD, HERMES_1, HERMES_2, NO_CALLS, TEXTS, WEATHER

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "f")]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}


class RecordingEngine(ScriptedEngine):
    """Remembers what it was asked."""

    async def submit(self, prompt: Any, params: Any, **options: Any) -> Any:
        self.prompt, self.params, self.options = prompt, params, options
        return await super().submit(prompt, params, **options)


def engine_saying(
    text: str, cuts: Iterable[int] = (), *, reason: str = "stop", fmt: str = "hermes"
) -> RecordingEngine:
    events: list[Event] = [started()]
    for piece in pieces_of(text, cuts) if text else []:
        ids = [ord(char) for char in piece]
        logprobs = [TokenLogprob(token=token, logprob=-1.0, top=[]) for token in ids]
        events.append(
            TokenEvent(
                index=0, sequence_id=started().sequence_id, token_ids=ids, text=piece, logprobs=logprobs
            )
        )
    end = finished(len(text))
    engine = RecordingEngine(*events, msgspec.structs.replace(end, reason=reason))
    engine.tokenizer.chat_template = BY_FORMAT[fmt]
    return engine


async def ask(engine: RecordingEngine, **fields: Any) -> dict[str, Any]:
    """The choice, after checking that the stream says the same."""
    async with running(app_of(engine)) as client:
        await settle()
        whole = await client.post(CHAT, json={**BODY, **fields})
        assert whole.status_code == 200, whole.text
        streamed = await client.post(CHAT, json={**BODY, **fields, "stream": True})
    (choice,) = whole.json()["choices"]
    (got,) = joined(sse_frames(streamed.text))
    assert {**got, "calls": [call["function"] for call in got["calls"]]} == plain(choice)
    return plain(choice)


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), GOOD)
async def test_calls(fmt: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    got = await ask(engine_saying(text, range(1, len(text), 3), fmt=fmt))
    assert got["content"] == (content or None)
    assert [(call["name"], call["arguments"]) for call in got["calls"]] == calls
    assert got["reason"] == "tool_calls"


@pytest.mark.parametrize(
    "text", ["", " ", "hello", *(text for name, text in NO_CALLS[:20] if name == "hermes")]
)
async def test_no_calls(text: str) -> None:
    got = await ask(engine_saying(text, [1, 2, 5]))
    assert (got["content"], got["calls"], got["reason"]) == (text, [], "stop")


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 300), max_size=20), st.sampled_from(sorted(BY_FORMAT)))
async def test_stream_equals_unstreamed(text: str, cuts: list[int], fmt: str) -> None:
    got = await ask(engine_saying(text, cuts, fmt=fmt), logprobs=True)
    assert "".join(entry["token"] for entry in got["logprobs"]) == (got["content"] or "")


async def test_length_wins() -> None:
    got = await ask(engine_saying(f"{HERMES_1}\n{HERMES_2[:-30]}", reason="length"))
    assert got["reason"] == "length"
    assert [call["name"] for call in got["calls"]] == ["get_weather"]
    assert got["content"] == "\n" + HERMES_2[:-30]


async def test_one_call_when_they_must_not_be_parallel() -> None:
    got = await ask(engine_saying(f"a\n{HERMES_1}\n{HERMES_2}\n"), parallel_tool_calls=False)
    assert [(call["name"], call["arguments"]) for call in got["calls"]] == [WEATHER]
    assert got["content"] == "a"


async def test_only_what_is_allowed_is_called() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    engine = engine_saying(f"{HERMES_1}\n{HERMES_2}")
    got = await ask(engine, tool_choice=choice)
    assert [call["name"] for call in got["calls"]] == ["f"]
    assert got["content"] == HERMES_1
    assert isinstance(engine.prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in engine.prompt.tools or []] == ["get_weather", "f"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
async def test_without_tools_calls_are_text(fields: dict[str, Any]) -> None:
    engine = engine_saying(HERMES_1)
    async with running(app_of(engine)) as client:
        await settle()
        choice = (await client.post(CHAT, json={**BODY, **fields})).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": HERMES_1, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert engine.prompt.tools is None
    assert engine.params.grammar is None


async def test_free_text_has_no_grammar_and_keeps_its_stop_strings() -> None:
    engine = engine_saying("hello")
    await ask(engine, stop=["x"])
    assert engine.params.grammar is None
    assert engine.options["stop"] == ("x",)


async def test_what_the_client_sends_back_reaches_the_template() -> None:
    engine = engine_saying("done")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    await ask(engine, messages=messages)
    assert engine.prompt.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]
