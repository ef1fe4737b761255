"""OpenAI's own Python client on the Responses protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.http.conftest import TINY
from tests.http.serving import Server

ASK: Any = {
    "model": TINY,
    "input": "hello the",
    "temperature": 0,
    "max_output_tokens": 10,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as shared:
        yield shared


def strict(model: Any) -> None:
    type(model).model_validate(model.model_dump(), strict=False)


def test_create(client: openai.OpenAI) -> None:
    answer = client.responses.create(instructions="be good", metadata={"a": "b"}, **ASK)
    assert isinstance(answer, Response)
    strict(answer)
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.usage is not None
    assert answer.usage.output_tokens == 10
    assert answer.metadata == {"a": "b"}


def test_raw_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(stream=True, **ASK))
    for event in events:
        strict(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


def test_stream_helper(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    stop = whole.output_text[4:6]
    ask = {**ASK, "extra_body": {"ignore_eos": True, "stop": stop}}
    with client.responses.stream(**ask) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed"
    assert text == final.output_text == client.responses.create(**ask).output_text


def test_stored(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**{**ASK, "input": "so"}, previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": ASK["input"]}, *first.output, {"role": "user", "content": "so"}]
    assert client.responses.create(**{**ASK, "input": turns}).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


async def test_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        whole = await client.responses.create(**ASK)
        stream = await client.responses.create(stream=True, **ASK)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == whole.output_text
