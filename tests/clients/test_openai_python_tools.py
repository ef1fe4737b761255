"""OpenAI's own Python client calling tools: plain, parsed into its types, and its stream helper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.http.conftest import TINY, tiny_overrides
from tests.http.serving import Server
from tests.support.tiny_models import write_tiny_llama

MESSAGES: Any = [{"role": "user", "content": "a table"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model with room for the descriptions that pydantic writes."""
    directory: Path = tmp_path_factory.mktemp("openai-tools")
    model = write_tiny_llama(directory / "roomy-model", max_context=4096)
    overrides = {**tiny_overrides(directory), "model.source": str(model)}
    server = Server(overrides, directory / "log").start()
    try:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as shared:
            yield shared
    finally:
        server.stop()


class Booking(pydantic.BaseModel):
    """Book a table."""

    model_config = pydantic.ConfigDict(extra="forbid")
    people: Annotated[int, pydantic.Field(ge=1, le=9)]
    place: Literal["inside", "outside"]


BOOKING: Any = openai.pydantic_function_tool(Booking, name="book")
FORCED: Any = {
    "messages": MESSAGES,
    "model": TINY,
    "tools": [BOOKING],
    "tool_choice": {"type": "function", "function": {"name": "book"}},
    "seed": 3,
}


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**FORCED)
    type(answer).model_validate(answer.model_dump())
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    (call,) = message.tool_calls or []
    assert call.type == "function"
    Booking.model_validate_json(call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    again = client.chat.completions.create(
        messages=[*MESSAGES, message, result], tools=[BOOKING], max_tokens=4, model=TINY
    )
    assert again.choices[0].finish_reason in ("length", "stop")


def test_tools_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**FORCED)
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Booking)


def test_tools_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**FORCED)
    with client.chat.completions.stream(**FORCED) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(deltas) > 1
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments
    (call,) = final.choices[0].message.tool_calls or []
    (expected,) = whole.choices[0].message.tool_calls or []
    assert expected.type == "function"
    assert call.function.arguments == done.arguments == expected.function.arguments
    assert isinstance(call.function.parsed_arguments, Booking)
    assert final.choices[0].finish_reason == "tool_calls"
