"""Anthropic's own Python client: sync, async, streams, its types and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.http.conftest import TINY
from tests.http.serving import Server

ASK: Any = {
    "model": TINY,
    "max_tokens": 10,
    "messages": [{"role": "user", "content": "hello the"}],
    "extra_body": {"ignore_eos": True, "temperature": 0},
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as shared:
        yield shared


def strict(model: Any) -> None:
    type(model).model_validate(model.model_dump(), strict=False)


def test_message(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(system="be good", **ASK)
    assert isinstance(answer, Message)
    strict(answer)
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 10
    assert answer._request_id


def test_stream_helper(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    strict(final)
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert [block.type for block in final.content] == ["text"]
    assert final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 10)


def test_raw_events(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(stream=True, **ASK))
    for event in events:
        strict(event)
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=TINY, messages=ASK["messages"])
    usage = client.messages.create(**ASK).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as not_found:
        client.messages.create(**{**ASK, "model": "claude"})
    assert not_found.value.request_id
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 5000}]})
    assert "context" in str(bad.value)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})


async def test_async(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            final = await stream.get_final_message()
    assert final.content[0].type == "text"
    assert whole.content[0].type == "text"
    assert final.content[0].text == whole.content[0].text
