"""`POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.anthropic.conversation import ConversationFields, conversation
from enginehouse.api.anthropic.tools import tool_use_block, tools_of
from enginehouse.api.errors import anthropic_error_object
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import decode
from enginehouse.api.openai.parameters import PositiveInt, encode_json, sampling_params
from enginehouse.api.sse import event_frame
from enginehouse.api.tools.calling import ToolCalling
from enginehouse.api.tools.parsing import CallStart, ContentPiece, OutputEvent, OutputParser
from enginehouse.engine.events import ChatPrompt
from enginehouse.engine.messages import FinishReason
from enginehouse.engine.structured_output import Grammar
from enginehouse.errors import EnginehouseError, InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

MAX_STOP_SEQUENCES = 128


class Metadata(Struct):
    """Who asks; accepted, not used."""

    user_id: str | None = None


class MessagesBody(ConversationFields, kw_only=True):
    """The body of a request. Beside Anthropic's fields it takes the sampling fields of the other routes."""

    max_tokens: PositiveInt
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    """Accepted: there is one tier."""


_decoder = msgspec.json.Decoder(MessagesBody)


class Messages:
    """Anthropic's route for conversations."""

    route = "/v1/messages"
    id_prefix = "msg_"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        if fields.stop is not None:
            raise InvalidRequestError("stop is called stop_sequences in this protocol.", param="stop")
        messages = conversation(fields)
        calling = ToolCalling(messages, tools_of(fields.tools, fields.tool_choice))
        params = sampling_params(fields, max_tokens=fields.max_tokens)
        call = GenerationCall(
            prompts=[ChatPrompt(messages=messages)],
            params=msgspec.structs.replace(params, grammar=_output_grammar(fields)),
            stop=_stop_sequences(fields.stop_sequences),
            model=fields.model,
            stream=bool(fields.stream),
            priority=fields.priority or 0,
            timeout_s=fields.timeout,
        )
        return calling.attach(call), partial(_make_writer, calling=calling)


def _stop_sequences(stops: list[str] | None) -> tuple[str, ...]:
    stops = stops or []
    if len(stops) > MAX_STOP_SEQUENCES:
        raise InvalidRequestError(
            f"stop_sequences: at most {MAX_STOP_SEQUENCES} are allowed, not {len(stops)}.",
            param="stop_sequences",
        )
    if not all(stops):
        raise InvalidRequestError(
            "stop_sequences: a stop sequence must not be empty.", param="stop_sequences"
        )
    return tuple(stops)


def _output_grammar(fields: MessagesBody) -> Grammar | None:
    config = fields.output_config
    if config is not None and config.effort is not None:
        raise InvalidRequestError(
            "output_config.effort is not supported by this server.", param="output_config.effort"
        )
    if config is None or config.format is None:
        return None
    schema = msgspec.json.encode(config.format.schema).decode()
    return Grammar(kind="json_schema", text=schema, param="output_config.format.schema")


def _make_writer(
    head: AnswerHead, generation: Generation, _engine: LLMEngine, *, calling: ToolCalling
) -> MessageWriter:
    return MessageWriter(head, generation.usage, calling.new_parser())


class MessageWriter:
    """Writes an answer as one message, or as the events that build the same message.

    A content block begins with its first text, or with a call, so an empty answer has no blocks. `usage` is the
    request's running totals; `parser` None means that the text is content as it is.
    """

    def __init__(self, head: AnswerHead, usage: Usage, parser: OutputParser | None) -> None:
        self._head = head
        self._usage = usage
        self._parser = parser
        self._num_blocks = 0
        self._open_block_type = ""
        """Empty while no block is open."""
        self._ending: dict[str, Any] = {}

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """`message_start`, the content's events; the last block's end when the choice has finished."""
        if delta.started:
            message = self._message([], {"stop_reason": None, "stop_sequence": None}, self._usage)
            yield _frame({"type": "message_start", "message": message})
        for event in self._parsed(delta.text, is_last=delta.finished is not None):
            yield from self._event_frames(event)
        if delta.finished is not None:
            yield from self._close_block()
            self._ending = self._ending_of(delta.finished.reason, delta.finished.stop_reason)

    def _event_frames(self, event: OutputEvent) -> Iterable[bytes]:
        if isinstance(event, ContentPiece):
            if self._open_block_type != "text":
                yield from self._open_block({"type": "text", "text": ""})
            yield self._block_delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, CallStart):
            yield from self._open_block(tool_use_block(event))
        else:
            yield self._block_delta({"type": "input_json_delta", "partial_json": event.text})

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """Why it ended and what it cost, and the end."""
        yield _frame({"type": "message_delta", "delta": self._ending, "usage": usage_object(usage)})
        yield _frame({"type": "message_stop"})

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """One `error` event, which ends the stream."""
        return (_frame(anthropic_error_object(error)),)

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """A `message` object."""
        (choice,) = choices
        content = _blocks(self._parsed(choice.text, is_last=True))
        return encode_json(
            self._message(content, self._ending_of(choice.finish_reason, choice.stop_reason), usage)
        )

    def _parsed(self, text: str, *, is_last: bool) -> list[OutputEvent]:
        if self._parser is None:
            return [ContentPiece(text, 0)] if text else []
        return [*self._parser.feed(text), *(self._parser.finish() if is_last else ())]

    def _ending_of(self, reason: FinishReason, stop_reason: int | str | None) -> dict[str, Any]:
        said, sequence = "end_turn", None
        if reason == "length":
            said = "max_tokens"
        elif self._parser is not None and self._parser.num_calls:
            said = "tool_use"
        elif isinstance(stop_reason, str):
            said, sequence = "stop_sequence", stop_reason
        return {"stop_reason": said, "stop_sequence": sequence}

    def _message(self, content: list[dict[str, Any]], ending: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **ending,
            "usage": usage_object(usage),
        }

    def _open_block(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close_block()
        self._open_block_type = block["type"]
        yield _frame({"type": "content_block_start", "index": self._num_blocks, "content_block": block})
        if self._num_blocks == 0:
            yield _frame({"type": "ping"})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _frame({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _close_block(self) -> Iterable[bytes]:
        if self._open_block_type:
            yield _frame({"type": "content_block_stop", "index": self._num_blocks})
            self._num_blocks += 1
            self._open_block_type = ""


def usage_object(usage: Usage) -> dict[str, Any]:
    """Tokens in Anthropic's shape: `input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(events: Iterable[OutputEvent]) -> list[dict[str, Any]]:
    """The content that the same events of a stream would build."""
    blocks: list[dict[str, Any]] = []
    call: CallStart | None = None
    arguments = ""
    for event in events:
        if isinstance(event, CallStart):
            call, arguments = event, ""
            blocks.append(tool_use_block(call))
        elif isinstance(event, ContentPiece):
            if not blocks or blocks[-1]["type"] != "text":
                blocks.append({"type": "text", "text": ""})
            blocks[-1]["text"] += event.text
        else:
            assert call is not None
            arguments += event.text
            blocks[-1] = tool_use_block(call, arguments)
    return blocks


def _frame(event: dict[str, Any]) -> bytes:
    return event_frame(event["type"], event)
