"""OpenAI's own Python client: sync, async, streams, its types and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.http.conftest import TINY
from tests.http.serving import Server

MESSAGES: Any = [{"role": "user", "content": "hello the"}]
GREEDY: Any = {"model": TINY, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as shared:
        yield shared


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as shared:
        yield shared


def strict(model: Any) -> None:
    """The answer has every field its type asks for, with the right types, and no unknown ones that matter."""
    type(model).model_validate(model.model_dump(), strict=False)


def test_models(client: openai.OpenAI) -> None:
    model = next(iter(client.models.list()))
    assert isinstance(model, Model)
    assert client.models.retrieve(TINY).id == model.id == TINY


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **GREEDY)
    assert isinstance(answer, ChatCompletion)
    strict(answer)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer._request_id


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    for chunk in chunks:
        assert isinstance(chunk, ChatCompletionChunk)
        strict(chunk)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_stream_helper(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(messages=MESSAGES, max_tokens=60, **GREEDY)
    stop = (plain.choices[0].message.content or "")[20:23]
    options: Any = {"messages": MESSAGES, "max_tokens": 60, "logprobs": True, "stop": stop, **GREEDY}
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    whole = client.chat.completions.create(**options)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, **GREEDY
    )
    strict(answer)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 and entry.bytes is not None for entry in content)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt=["hello the", "other"], max_tokens=5, n=2, logprobs=1, echo=True, **GREEDY
    )
    assert isinstance(answer, Completion)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("hello the")
    streamed = client.completions.create(prompt="hello the", max_tokens=5, stream=True, **GREEDY)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert "hello the" + text == answer.choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(messages=MESSAGES, model="gpt-17")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(messages=MESSAGES, model=TINY, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(
            messages=[{"role": "user", "content": "x" * 5000}], model=TINY, stream=True
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as functions:
        client.chat.completions.create(messages=MESSAGES, model=TINY, functions=[{"name": "f"}])
    assert functions.value.param == "functions"


async def test_async(async_client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"hello {number}"}]
        answer = await async_client.chat.completions.create(messages=messages, max_tokens=6, **GREEDY)
        return answer.choices[0].message.content or ""

    async def ask_streaming(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"hello {number}"}]
        stream = await async_client.chat.completions.create(
            messages=messages, max_tokens=6, stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole = await asyncio.gather(*(ask(number) for number in range(10)))
    streamed = await asyncio.gather(*(ask_streaming(number) for number in range(10)))
    assert whole == streamed
    assert len(set(whole)) > 1


async def test_leaving_a_stream_early(server: Server, async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.completions.create(prompt="hello", max_tokens=480, stream=True, **GREEDY)
    async for _ in stream:
        break
    await stream.close()
    server.wait_idle()
