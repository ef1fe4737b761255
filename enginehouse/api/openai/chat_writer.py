"""Chat completions on the wire: chunks of a stream, or one object, built from the same events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from enginehouse.api.answering import AnswerHead
from enginehouse.api.errors import error_object
from enginehouse.api.generation import ChoiceAnswer, Delta, Usage
from enginehouse.api.openai.logprobs import TokenBytes, chat_content
from enginehouse.api.openai.parameters import encode_json, finish_reason
from enginehouse.api.openai.usage import usage_object
from enginehouse.api.sse import DONE_FRAME, data_frame
from enginehouse.api.token_texts import TokenText
from enginehouse.api.tools.logprobs import ContentTokens
from enginehouse.api.tools.parsing import (
    Call,
    CallArguments,
    CallStart,
    ContentPiece,
    OutputEvent,
    OutputParser,
    ParsedOutput,
)
from enginehouse.errors import EnginehouseError

ParserFactory = Callable[[], OutputParser | None]


class _ChoiceReader:
    """One choice's text, read for calls."""

    def __init__(self, parser: OutputParser) -> None:
        self.parser = parser
        self.tokens = ContentTokens()
        self.has_content = False

    def read(
        self, text: str, tokens: list[TokenText], *, is_last: bool
    ) -> tuple[list[OutputEvent], list[TokenText]]:
        """Events of more text, and the tokens now known to have written content."""
        events = self.parser.feed(text)
        if is_last:
            events += self.parser.finish()
        shown = self.tokens.take(tokens, events, self.parser.num_decided)
        if is_last:
            shown += self.tokens.finish()
        self.has_content = self.has_content or any(isinstance(event, ContentPiece) for event in events)
        return events, shown


class ChatWriter:
    """Writes chat answers. `num_top` None leaves log-probabilities out. `new_parser` makes the parser of a
    choice, None when its text is its content.

    What all chunks of a stream share is encoded once; a token costs one string's encoding.
    """

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: TokenBytes,
        num_top: int | None,
        *,
        include_usage: bool,
        new_parser: ParserFactory = lambda: None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._include_usage = include_usage
        self._new_parser = new_parser
        self._readers: dict[int, _ChoiceReader] = {}
        shared = encode_json(self._shared("chat.completion.chunk"))
        self._open = b"data: %b," % shared[:-1]
        self._close = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """Role chunk, content and call chunks, and a chunk with the finish reason and an empty delta."""
        if delta.started:
            parser = self._new_parser()
            if parser is not None:
                self._readers[delta.index] = _ChoiceReader(parser)
            # An answer with calls may have no content at all, which is null, not "".
            content = b'""' if parser is None else b"null"
            yield self._chunk(delta.index, b'{"role":"assistant","content":%b,"refusal":null}' % content)
        reader = self._readers.get(delta.index)
        if reader is not None:
            yield from self._read_frames(reader, delta)
        elif delta.text or delta.tokens:
            yield self._content_chunk(delta.index, delta.text, delta.tokens)
        if delta.finished is not None:
            num_calls = 0 if reader is None else reader.parser.num_calls
            reason = encode_json(_finish_reason(delta.finished.reason, num_calls))
            yield self._chunk(delta.index, b"{}", finish_reason=reason)

    def _read_frames(self, reader: _ChoiceReader, delta: Delta) -> Iterable[bytes]:
        is_last = delta.finished is not None
        events, tokens = reader.read(delta.text, delta.tokens, is_last=is_last)
        for event in events:
            if isinstance(event, ContentPiece):
                yield self._content_chunk(delta.index, event.text, tokens)
                tokens = []
            else:
                yield self._chunk(delta.index, b'{"tool_calls":[%b]}' % encode_json(_call_delta(event)))
        if tokens or (is_last and not reader.has_content and _has_text(reader.parser)):
            yield self._content_chunk(delta.index, "", tokens)

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
        answer["choices"] = [self._choice_object(choice) for choice in choices]
        answer["usage"] = usage_object(usage)
        return encode_json(answer)

    def _choice_object(self, choice: ChoiceAnswer) -> dict[str, Any]:
        parser = self._new_parser()
        content: str | None = choice.text
        tokens, calls = choice.tokens, []
        if parser is not None:
            parsed = ParsedOutput()
            events, tokens = _ChoiceReader(parser).read(choice.text, choice.tokens, is_last=True)
            parsed.add(events)
            calls = parsed.calls
            content = parsed.content if parsed.content or _has_text(parser) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [_call_object(call) for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_object(tokens),
            "finish_reason": _finish_reason(choice.finish_reason, len(calls)),
        }

    def _shared(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created_unix_s,
            "model": head.model,
            "system_fingerprint": None,
        }

    def _content_chunk(self, index: int, text: str, tokens: list[TokenText]) -> bytes:
        return self._chunk(index, b'{"content":%b}' % encode_json(text), self._logprobs(tokens))

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


def _has_text(parser: OutputParser) -> bool:
    """Whether an answer without any content has an empty one, rather than none: it was free to write some."""
    return parser.is_free and not parser.num_calls


def _finish_reason(reason: str, num_calls: int) -> str:
    said = finish_reason(reason)
    return "tool_calls" if num_calls and said == "stop" else said


def _call_object(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_delta(event: CallStart | CallArguments) -> dict[str, Any]:
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.text}}
