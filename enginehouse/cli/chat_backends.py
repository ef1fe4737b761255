"""Where `enginehouse chat` gets its answers from: an engine of its own, or a server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import httpx2

from enginehouse.engine import UNTIL_CONTEXT_END, ChatPrompt, SamplingParams, TokenEvent
from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse.engine import LLMEngine
    from enginehouse.settings import Settings

Options = Mapping[str, float | None]
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 120.0


class ChatBackend(Protocol):
    """Answers a conversation; `name` is for people."""

    name: str

    def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Pieces of the answer, one a token. Raises `EnginehouseError`."""
        ...

    async def close(self) -> None:
        """Release what was opened."""
        ...


class ServerError(EnginehouseError):
    """The server answered with an error, or did not answer."""


class LocalChat:
    """An engine started for this conversation."""

    def __init__(self, engine: LLMEngine, options: Options) -> None:
        self.name = f"{engine.model_id} ({engine.info.kernels}, {engine.info.num_threads} threads)"
        self._engine = engine
        given = {name: value for name, value in options.items() if value is not None}
        self._params = SamplingParams(**{"max_tokens": UNTIL_CONTEXT_END, **given})  # type: ignore[arg-type]

    async def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """See `ChatBackend.stream`."""
        prompt = ChatPrompt(messages=list(messages))
        async for event in self._engine.generate(prompt, self._params):
            if isinstance(event, TokenEvent):
                yield event.text

    async def close(self) -> None:
        """End the engine's worker."""
        await self._engine.close()


class ServerChat:
    """A conversation with `POST /v1/chat/completions`."""

    def __init__(self, client: httpx2.AsyncClient, model: str, options: Options) -> None:
        self.name = f"{model} at {client.base_url}"
        self._client, self._model = client, model
        self._options = {name: value for name, value in options.items() if value is not None}

    async def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """See `ChatBackend.stream`."""
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx2.codes.OK:
                    raise ServerError(_message_of(await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise ServerError(chunk["error"]["message"])
                        for choice in chunk["choices"]:
                            yield choice["delta"].get("content") or ""
        except httpx2.HTTPError as error:
            raise ServerError(f"The server did not answer: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def open_local(settings: Settings, options: Options) -> ChatBackend:
    """Start an engine, with progress on standard error."""
    from enginehouse.cli.progress import start_engine

    return LocalChat(await start_engine(settings), options)


async def open_server(url: str, api_key: str | None, options: Options) -> ChatBackend:
    """Ask the server for its first model. Raises `ServerError` when it cannot be reached."""
    url = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    client = httpx2.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout
    )
    try:
        response = await client.get("/v1/models")
        models: list[dict[str, Any]] = response.json()["data"] if response.is_success else []
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        await client.aclose()
        raise ServerError(
            f"No Enginehouse answers at {url}: {error}. Is `enginehouse serve` running?"
        ) from error
    if not models:
        await client.aclose()
        raise ServerError(f"{url}: {_message_of(response.content)}")
    return ServerChat(client, models[0]["id"], options)


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500] or "The server sent an empty answer."
