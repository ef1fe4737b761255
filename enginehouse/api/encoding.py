"""From a POST to vectors or scores: read, check, load, tokenise, encode, write, record. One way for both routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginehouse.api.answering import ApiState
from enginehouse.api.disconnect import until_disconnect
from enginehouse.api.encoder_host import Encoders
from enginehouse.api.errors import CLIENT_GONE_STATUS, ClientGoneError
from enginehouse.api.json_body import read_body
from enginehouse.api.middleware import request_context, tenant_of
from enginehouse.api.openai.parameters import INT_MAX, encode_json
from enginehouse.engine.encoder_config import EncoderTask
from enginehouse.errors import ContextLengthExceededError, EnginehouseError, InvalidRequestError
from enginehouse.observability.records import RequestRecord

if TYPE_CHECKING:
    from enginehouse.engine.encoder_engine import Encoded, EncoderEngine
    from enginehouse.runtime.encoder_tokenizer import TokenizedInput

THREAD_ABOVE = 2000
"""More characters are tokenised, and more numbers written, in a thread; for less the hand-over would cost more than
the work."""
T = TypeVar("T")


class TruncationFields(Struct, kw_only=True):
    """How too long an input is cut; without any of these it is refused."""

    model: str | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT_MAX)] | None = None
    user: str | None = None


class Encoding(Protocol):
    """One checked request of an encoding route."""

    num_inputs: int
    model: str | None

    def check(self, engine: EncoderEngine) -> None:
        """What can only be checked once the model is known. Raises `InvalidRequestError`."""

    async def tokenize(self, engine: EncoderEngine) -> list[TokenizedInput]:
        """The model's inputs. Raises `InvalidRequestError` or `ContextLengthExceededError`."""

    def answer(self, engine: EncoderEngine, results: list[Encoded], num_tokens: int) -> dict[str, Any]:
        """The body of the answer, from the inputs' vectors in order."""


class EncodingProtocol(Protocol):
    """An encoding route: how its bodies are read."""

    task: EncoderTask

    def parse(self, body: bytes) -> Encoding:
        """Raises `InvalidRequestError`; never blocks."""


class EncodingResponse(Response):
    """Answers one request. Everything happens in `__call__`, so that a client that leaves takes back what was not
    computed yet, and one `finally` writes the record."""

    def __init__(self, request: Request, protocol: EncodingProtocol) -> None:
        super().__init__()
        self._request, self._protocol = request, protocol
        self._api: ApiState = request.app.state.api
        self._encoders: Encoders = request.app.state.encoders
        context = request_context(request.scope)
        host = self._encoders.hosts.get(protocol.task)
        self._record = RequestRecord(
            request_id=context.request_id,
            route=request.url.path,
            model=host.model_id if host is not None else "",
            arrival_unix_s=context.arrival_unix_s,
            arrival_s=context.arrival_s,
            tenant=tenant_of(request.scope),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        try:
            call = self._protocol.parse(await read_body(self._request))
            await until_disconnect(receive, self._answer(call, scope, receive, send))
        except EnginehouseError as error:
            record.status, record.error_type = error.status, error.code or error.type
            was_refused = record.queue_start_s is None or error.status in (429, 503)
            record.outcome = "refused" if was_refused else "failed"
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

    async def _answer(self, call: Encoding, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        record.num_choices = call.num_inputs
        engine = await self._encoders.host_for(self._protocol.task, call.model).engine()
        call.check(engine)
        inputs = await call.tokenize(engine)
        record.input_tokens = num_tokens = sum(len(item.tokens) for item in inputs)
        record.queue_start_s = time.monotonic()
        results = await engine.encode(inputs)
        record.inference_start_s = min(result.started_s for result in results)
        num_values = sum(len(result.vector) for result in results) // 4
        body = await in_thread_when_long(
            num_values, lambda: encode_json(call.answer(engine, results, num_tokens))
        )
        await Response(body, media_type="application/json")(scope, receive, send)


def limit_of(fields: TruncationFields, engine: EncoderEngine, *, pair: bool) -> int | None:
    """The number of tokens that inputs are cut to, or None when they are not to be cut.

    Raises `InvalidRequestError` for a number that leaves no room for text, or is more than the model takes.
    """
    asked = fields.truncate_prompt_tokens
    if asked is None:
        return engine.max_input if fields.truncate else None
    if asked == -1:
        return engine.max_input
    least = engine.tokenizer.num_special(pair=pair) + 1
    if not least <= asked <= engine.max_input:
        raise InvalidRequestError(
            f"truncate_prompt_tokens: must be -1 or from {least} to {engine.max_input} for this model, not {asked}.",
            param="truncate_prompt_tokens",
        )
    return asked


def check_lengths(inputs: list[TokenizedInput], engine: EncoderEngine, names: Callable[[int], str]) -> None:
    """Raise `ContextLengthExceededError` that names the first input longer than the model takes, and both sizes."""
    for index, item in enumerate(inputs):
        if len(item.tokens) > engine.max_input:
            name = names(index)
            raise ContextLengthExceededError(
                f"{name} has {len(item.tokens)} tokens, but this model takes at most {engine.max_input}. Shorten it, "
                "or send truncate: true to have it cut.",
                param=name.partition("[")[0],
            )


async def in_thread_when_long(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread when it has many characters or numbers to go through."""
    if size <= THREAD_ABOVE:
        return work()
    return await asyncio.to_thread(work)


def endpoint(protocol: EncodingProtocol) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The route's function."""

    async def answer(request: Request) -> Response:
        return EncodingResponse(request, protocol)

    return answer
