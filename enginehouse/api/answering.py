"""From a POST to its answer: read, parse, admit, write, record. One way through for every generating route."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginehouse.api.disconnect import until_disconnect
from enginehouse.api.engine_host import EngineHost
from enginehouse.api.errors import CLIENT_GONE_STATUS, ClientGoneError, internal_error
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import read_body
from enginehouse.api.middleware import RequestContext, request_context, tenant_of
from enginehouse.errors import EnginehouseError
from enginehouse.observability.metrics import Metrics
from enginehouse.observability.records import RequestRecord
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

THREAD_ABOVE_TOKENS = 500
"""Log-probabilities of more tokens are written in a thread: the event loop has other answers to carry."""

_log = structlog.stdlib.get_logger("enginehouse.http")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    id: str
    created_unix_s: int
    model: str


class AnswerWriter(Protocol):
    """One protocol's way to write an answer: as frames while it comes, or as one body. Made for one request."""

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """SSE frames for one delta; none when it has nothing to say."""

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """Frames after the last delta."""

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """Frames that end a stream which failed after its first byte."""

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """The answer that is not streamed."""


class GenerationProtocol(Protocol):
    """A generating route: how its bodies are read and how its answers are written."""

    route: str
    id_prefix: str

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`; never blocks."""


WriterFactory = Callable[[AnswerHead, Generation, "LLMEngine"], AnswerWriter]


@dataclass(frozen=True, slots=True)
class ApiState:
    """What the routes work with; `app.state.api`."""

    host: EngineHost
    metrics: Metrics
    limits: ServerSettings


class GenerationResponse(Response):
    """Answers one generating request. Everything happens in `__call__`, so that a client that leaves, at any
    moment, ends the work at once, and one `finally` writes the record."""

    def __init__(self, request: Request, protocol: GenerationProtocol) -> None:
        super().__init__()
        self._request = request
        self._protocol = protocol
        self._api: ApiState = request.app.state.api
        self._context: RequestContext = request_context(request.scope)
        self._record = RequestRecord(
            request_id=self._context.request_id,
            route=protocol.route,
            model=self._api.host.model_id,
            arrival_unix_s=self._context.arrival_unix_s,
            arrival_s=self._context.arrival_s,
        )
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        try:
            call, make_writer = self._protocol.parse(await read_body(self._request), self._api.limits)
            await until_disconnect(receive, self._answer(call, make_writer, send))
        except EnginehouseError as error:
            self._note_error(error)
            raise
        except (ClientGoneError, asyncio.CancelledError):
            record.status, record.outcome, record.error_type = CLIENT_GONE_STATUS, "cancelled", "client_gone"
            raise
        except BaseException:
            record.status, record.outcome, record.error_type = 500, "failed", "internal_error"
            raise
        finally:
            record.finish_s = time.monotonic()
            self._api.metrics.record(record)
            record.write()

    async def _answer(self, call: GenerationCall, make_writer: WriterFactory, send: Send) -> None:
        record = self._record
        record.stream, record.num_choices = call.stream, call.n * len(call.prompts)
        engine = self._api.host.engine_for(call.model)
        if call.bind is not None:
            call = call.bind(call, engine, self._api.host.model_settings)
        generation = Generation(engine, call, record, tenant=tenant_of(self._request.scope))
        await generation.submit()
        head = AnswerHead(
            id=f"{self._protocol.id_prefix}{secrets.token_hex(14)}",
            created_unix_s=int(self._context.arrival_unix_s),
            model=self._api.host.model_id,
        )
        writer = make_writer(head, generation, engine)
        deltas = generation.deltas(self._api.metrics.inter_token(record.model))
        async with aclosing(deltas):
            if call.stream:
                await self._stream(writer, generation, deltas, send)
            else:
                await self._collect(writer, generation, deltas, send)

    async def _collect(
        self, writer: AnswerWriter, generation: Generation, deltas: AsyncIterator[Delta], send: Send
    ) -> None:
        choices = [ChoiceAnswer(index) for index in range(generation.num_choices)]
        async for delta in deltas:
            choices[delta.index].add(delta)
        if generation.num_described_tokens > THREAD_ABOVE_TOKENS:
            body = await asyncio.to_thread(writer.body, choices, generation.usage)
        else:
            body = writer.body(choices, generation.usage)
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self, writer: AnswerWriter, generation: Generation, deltas: AsyncIterator[Delta], send: Send
    ) -> None:
        """The headers wait for the first delta, so that every refusal before it has its own status."""
        try:
            async for delta in deltas:
                if not self._started:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    self._started = True
                for frame in await _frames(writer, delta):
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            frames = writer.last_frames(generation.usage)
        except EnginehouseError as error:
            if not self._started:
                raise
            self._note_error(error)
            frames = writer.error_frames(error)
        except Exception:
            if not self._started:
                raise
            _log.exception("stream failed", request_id=self._context.request_id)
            internal = internal_error(self._context.request_id)
            self._note_error(internal)
            frames = writer.error_frames(internal)
        for frame in frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _note_error(self, error: EnginehouseError) -> None:
        record = self._record
        record.status = error.status
        refused = record.queue_start_s is None or error.status in (429, 503)
        record.outcome = "refused" if refused else "failed"
        record.error_type = error.code or error.type


async def _frames(writer: AnswerWriter, delta: Delta) -> Iterable[bytes]:
    """The frames of one delta. One that brings a long prompt's log-probabilities is written in a thread."""
    if len(delta.prompt_logprobs or ()) <= THREAD_ABOVE_TOKENS:
        return writer.frames(delta)
    return await asyncio.to_thread(lambda: list(writer.frames(delta)))
