"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.errors import error_object
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import decode
from enginehouse.api.openai.logprobs import TokenBytes, chat_content
from enginehouse.api.openai.parameters import (
    OpenAIFields,
    PositiveInt,
    check_choices,
    check_stream_options,
    encode_json,
    finish_reason,
    openai_call,
    refuse_unsupported,
    sampling_params,
)
from enginehouse.api.openai.usage import usage_object
from enginehouse.api.sse import DONE_FRAME, data_frame
from enginehouse.api.token_texts import TokenText
from enginehouse.engine.events import UNTIL_CONTEXT_END, ChatPrompt
from enginehouse.errors import EnginehouseError, InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

_REFUSED = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "store",
)


class ContentPart(Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class Message(Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatBody(OpenAIFields, kw_only=True):
    """The body of a chat completion request."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: Any = None


_decoder = msgspec.json.Decoder(ChatBody)


class ChatCompletions:
    """The route's protocol: bodies to calls, deltas to answers."""

    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        refuse_unsupported(fields, _REFUSED)
        include_usage = check_stream_options(fields)
        n = fields.n or 1
        check_choices(n, limits.max_n)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if fields.max_tokens == 0:
            raise InvalidRequestError("max_tokens: must be at least 1.", param="max_tokens")
        num_top = (fields.top_logprobs or 0) if fields.logprobs else None
        params = sampling_params(
            fields,
            max_tokens=fields.max_completion_tokens or fields.max_tokens or UNTIL_CONTEXT_END,
            logprobs=num_top,
        )
        prompt = ChatPrompt(
            messages=[template_message(message, index) for index, message in enumerate(fields.messages)]
        )
        call = openai_call(fields, [prompt], params, n=n, wants_tokens=num_top is not None)
        return call, partial(_make_writer, num_top=num_top, include_usage=include_usage)


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates expect it: text as one string, `developer` as `system`.

    Raises `InvalidRequestError` naming the part that is not supported.
    """
    at = f"messages[{index}]"
    if message.role in ("tool", "function"):
        raise InvalidRequestError(
            f"{at}.role: {message.role} messages are not supported.", param=f"{at}.role"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise InvalidRequestError(f"{at}.{name} is not supported by this server.", param=f"{at}.{name}")
    if message.content is None:
        raise InvalidRequestError(f"{at}.content is missing.", param=f"{at}.content")
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _joined_text(message.content, at),
    }
    if message.name is not None:
        shown["name"] = message.name
    return shown


def _joined_text(content: str | list[ContentPart], at: str) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        where = f"{at}.content[{number}]"
        if part.type != "text":
            shown = part.type[:40]
            raise InvalidRequestError(
                f"{where}.type: '{shown}' is not supported; only 'text' is.", param=f"{where}.type"
            )
        if part.text is None:
            raise InvalidRequestError(f"{where}.text is missing.", param=f"{where}.text")
    return "".join(part.text or "" for part in content)


def _make_writer(
    head: AnswerHead,
    _generation: Generation,
    engine: LLMEngine,
    *,
    num_top: int | None,
    include_usage: bool,
) -> ChatWriter:
    return ChatWriter(head, engine.tokenizer, num_top, include_usage=include_usage)


class ChatWriter:
    """Writes chat answers. `num_top` None leaves log-probabilities out.

    What all chunks of a stream share is encoded once; a token costs one string's encoding.
    """

    def __init__(
        self, head: AnswerHead, tokenizer: TokenBytes, num_top: int | None, *, include_usage: bool
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._include_usage = include_usage
        shared = encode_json(self._shared("chat.completion.chunk"))
        self._open = b"data: %b," % shared[:-1]
        self._close = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """Role chunk, content chunks, and a chunk with the finish reason and an empty delta."""
        if delta.started:
            yield self._chunk(delta.index, b'{"role":"assistant","content":"","refusal":null}')
        if delta.text or delta.tokens:
            content = b'{"content":%b}' % encode_json(delta.text)
            yield self._chunk(delta.index, content, self._logprobs(delta.tokens))
        if delta.finished is not None:
            yield self._chunk(
                delta.index, b"{}", finish_reason=encode_json(finish_reason(delta.finished.reason))
            )

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """The usage chunk, if it was asked for, and the end."""
        if self._include_usage:
            yield b'%b"choices":[],"usage":%b}\n\n' % (self._open, encode_json(usage_object(usage)))
        yield DONE_FRAME

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """The error, and the end."""
        return data_frame(error_object(error)), DONE_FRAME

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """A `chat.completion` object."""
        answer = self._shared("chat.completion")
        answer["choices"] = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs_object(choice.tokens),
                "finish_reason": finish_reason(choice.finish_reason),
            }
            for choice in choices
        ]
        answer["usage"] = usage_object(usage)
        return encode_json(answer)

    def _shared(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created_unix_s,
            "model": head.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null"
    ) -> bytes:
        return b'%b"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._open,
            index,
            delta,
            logprobs,
            finish_reason,
            self._close,
        )

    def _logprobs(self, tokens: list[TokenText]) -> bytes:
        return b"null" if self._num_top is None else encode_json(self._logprobs_object(tokens))

    def _logprobs_object(self, tokens: list[TokenText]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return {"content": chat_content(tokens, self._num_top, self._tokenizer), "refusal": None}
