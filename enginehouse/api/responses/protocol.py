"""`POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.errors import PreviousResponseNotFoundError
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import decode
from enginehouse.api.openai.parameters import encode_json, sampling_params, stop_strings
from enginehouse.api.responses.building import Event, ResponseBuilder
from enginehouse.api.responses.items import Item, Message, messages_of
from enginehouse.api.responses.request import (
    ResponsesBody,
    check_metadata,
    format_grammar,
    refuse_unsupported,
    tools_of,
)
from enginehouse.api.responses.store import ResponseStore
from enginehouse.api.sse import event_frame
from enginehouse.api.tools.calling import ToolCalling
from enginehouse.api.tools.parsing import ContentPiece, OutputEvent
from enginehouse.engine.events import UNTIL_CONTEXT_END, ChatPrompt
from enginehouse.engine.messages import FinishReason
from enginehouse.errors import EnginehouseError, InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

_decoder = msgspec.json.Decoder(ResponsesBody)


class Responses:
    """One answer to items of input, in OpenAI's newer protocol. `store` keeps what may be continued."""

    route = "/v1/responses"
    id_prefix = "resp_"

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        refuse_unsupported(fields)
        check_metadata(fields.metadata or {})
        grammar, tools = format_grammar(fields), tools_of(fields)
        conversation = self._conversation(fields)
        system: list[Message] = []
        if fields.instructions:
            system.append({"role": "system", "content": fields.instructions})
        messages = [*system, *conversation]
        calling = ToolCalling(messages, tools)
        params = sampling_params(fields, max_tokens=fields.max_output_tokens or UNTIL_CONTEXT_END)
        call = GenerationCall(
            prompts=[ChatPrompt(messages=messages, param="input")],
            params=msgspec.structs.replace(params, grammar=grammar),
            stop=stop_strings(fields.stop),
            model=fields.model,
            stream=bool(fields.stream),
            priority=fields.priority or 0,
            timeout_s=fields.timeout,
        )
        store = None if fields.store is False else self._store
        return calling.attach(call), partial(
            _make_writer, fields=fields, calling=calling, conversation=conversation, store=store
        )

    def _conversation(self, fields: ResponsesBody) -> list[Message]:
        """What came before, and the input."""
        earlier: list[Message] = []
        if fields.previous_response_id is not None:
            stored = self._store.get(fields.previous_response_id)
            if stored is None:
                raise PreviousResponseNotFoundError(
                    f"previous_response_id: there is no response '{fields.previous_response_id[:100]}', or not any "
                    "more.",
                    param="previous_response_id",
                )
            earlier = stored.messages()
        if isinstance(fields.input, str):
            return [*earlier, {"role": "user", "content": fields.input}]
        given = messages_of(fields.input)
        if not earlier and not given:
            raise InvalidRequestError("input is empty.", param="input")
        return [*earlier, *given]


def _make_writer(
    head: AnswerHead,
    _generation: Generation,
    _engine: LLMEngine,
    *,
    fields: ResponsesBody,
    calling: ToolCalling,
    conversation: list[Message],
    store: ResponseStore | None,
) -> ResponseWriter:
    return ResponseWriter(ResponseBuilder(_shown(head, fields)), head.id, calling, conversation, store)


def _shown(head: AnswerHead, fields: ResponsesBody) -> dict[str, Any]:
    """The request's part of the response object, defaults filled in."""
    form = fields.text.format if fields.text is not None and fields.text.format is not None else None
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_unix_s,
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": head.model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {
            "format": {"type": "text"} if form is None else _given_fields(form),
            "verbosity": "medium",
        },
        "tool_choice": _shown_choice(fields),
        "tools": [{**msgspec.to_builtins(tool), "strict": bool(tool.strict)} for tool in fields.tools or ()],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }


def _shown_choice(fields: ResponsesBody) -> Any:
    choice = fields.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    return _given_fields(choice)


def _given_fields(value: msgspec.Struct) -> dict[str, Any]:
    return {name: field for name, field in msgspec.to_builtins(value).items() if field is not None}


class ResponseWriter:
    """Writes a response as one object, or as the events that build it, and stores it when it is finished.

    `conversation` is what the response answers, without instructions; `store` None keeps nothing.
    """

    def __init__(
        self,
        builder: ResponseBuilder,
        response_id: str,
        calling: ToolCalling,
        conversation: list[Message],
        store: ResponseStore | None,
    ) -> None:
        self._builder = builder
        self._id = response_id
        self._parser = calling.new_parser()
        self._conversation = conversation
        self._store = store
        self._reason: FinishReason = "stop"

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """The events of one delta."""
        if delta.started:
            yield from map(_frame, self._builder.begin())
        if delta.text:
            yield from map(_frame, self._take(self._parsed(delta.text)))
        if delta.finished is not None:
            self._reason = delta.finished.reason
            yield from map(_frame, self._take(self._rest()))

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """The events that end the last item, and the finished response."""
        for event in self._builder.end(self._reason, usage):
            if "response" in event:
                self._keep(event["response"])
            yield _frame(event)

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """`response.failed`; such a response is not stored."""
        return (_frame(self._builder.fail(error)),)

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """A `response` object: what the last event of a stream has."""
        (choice,) = choices
        for _ in self._builder.begin():
            pass
        for _ in self._take([*self._parsed(choice.text), *self._rest()]):
            pass
        *_, last = self._builder.end(choice.finish_reason, usage)
        return self._keep(last["response"])

    def _parsed(self, text: str) -> list[OutputEvent]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [ContentPiece(text, 0)] if text else []

    def _rest(self) -> list[OutputEvent]:
        return [] if self._parser is None else self._parser.finish()

    def _take(self, news: Iterable[OutputEvent]) -> Iterator[Event]:
        for event in news:
            yield from self._builder.take(event)

    def _keep(self, response: dict[str, Any]) -> bytes:
        body = encode_json(response)
        if self._store is not None:
            answer = messages_of(msgspec.convert(response["output"], list[Item]))
            self._store.put(self._id, body, [*self._conversation, *answer])
        return body


def _frame(event: Event) -> bytes:
    return event_frame(event["type"], event)
