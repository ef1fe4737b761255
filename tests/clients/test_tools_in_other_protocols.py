"""Tools and answers of a given form through Anthropic's client, and through OpenAI's on the Responses protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.http.conftest import TINY
from tests.http.serving import Server
from tests.http.test_tools_in_other_protocols import ANTHROPIC, OPENAI, PARAMETERS, check_arguments, server

__all__ = ["server"]

HI: Any = [{"role": "user", "content": "hi"}]
FORCED: Any = {
    "model": TINY,
    "tools": ANTHROPIC["tools"],
    "tool_choice": {"type": "tool", "name": "get_weather"},
}
ASK: Any = {"model": TINY, "max_tokens": 200, "messages": HI, "extra_body": {"seed": 4}, **FORCED}
RESPOND: Any = {
    "model": TINY,
    "input": "hi",
    "max_output_tokens": 200,
    "tools": OPENAI["tools"],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "extra_body": {"seed": 4},
}


class Weather(BaseModel):
    city: str = Field(max_length=12)
    unit: Literal["c", "f"]


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as shared:
        yield shared


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as shared:
        yield shared


def strict(model: Any) -> None:
    """The answer has every field its type asks for, with the right types."""
    type(model).model_validate(model.model_dump())


def test_anthropic_tool_loop(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ASK)
    strict(answer)
    (call,) = answer.content
    assert call.type == "tool_use"
    check_arguments(call.name, call.input)
    assert answer.stop_reason == "tool_use"
    turns = [
        *HI,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    again: Any = {**ASK, "messages": turns, "max_tokens": 5, "tool_choice": {"type": "none"}}
    assert claude.messages.create(**again).usage.output_tokens <= 5


def test_anthropic_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,), (streamed,) = whole.content, final.content
    assert call.type == streamed.type == "tool_use"
    assert json.loads("".join(pieces)) == call.input == streamed.input
    assert final.stop_reason == "tool_use"


def test_anthropic_form(claude: anthropic.Anthropic) -> None:
    schema = {**PARAMETERS, "additionalProperties": False}
    answer = claude.messages.create(
        model=TINY,
        max_tokens=200,
        messages=HI,
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"seed": 1},
    )
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "end_turn"
    Weather.model_validate_json(answer.content[0].text)


def test_responses_tool_loop(client: openai.OpenAI) -> None:
    first = client.responses.create(**RESPOND)
    strict(first)
    (call,) = first.output
    assert call.type == "function_call"
    check_arguments(call.name, json.loads(call.arguments))
    second = client.responses.create(
        model=TINY,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        previous_response_id=first.id,
        max_output_tokens=5,
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > 10


def test_responses_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(**RESPOND) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    for event in client.responses.create(stream=True, **RESPOND):
        strict(event)
    (call,) = final.output
    assert call.type == "function_call"
    assert "".join(pieces) == call.arguments
    (whole,) = client.responses.create(**RESPOND).output
    assert whole.type == "function_call"
    assert whole.arguments == call.arguments


def test_responses_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=TINY, input="hi", text_format=Weather, max_output_tokens=200, extra_body={"seed": 1}
    )
    assert answer.status == "completed"
    assert answer.output_parsed is not None
    assert answer.output_parsed.unit in ("c", "f")
