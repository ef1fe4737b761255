"""A response object, and the events through which a client sees it grow."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from enginehouse.api.generation import Usage
from enginehouse.api.tools.parsing import CallStart, ContentPiece, OutputEvent
from enginehouse.engine.messages import FinishReason
from enginehouse.errors import EnginehouseError

Event = dict[str, Any]


class ResponseBuilder:
    """Builds one response. Streamed or not, the object is built here, by the same steps; a stream also sends the
    events that each step gives.

    `shown` are the fields that stay the same from the first event to the last.
    """

    def __init__(self, shown: dict[str, Any]) -> None:
        self._shown = shown
        self._num_events = 0
        self.output: list[dict[str, Any]] = []
        """The finished items."""
        self._item: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def begin(self) -> Iterator[Event]:
        """The first two events."""
        yield self._event("response.created", response=self.response("in_progress"))
        yield self._event("response.in_progress", response=self.response("in_progress"))

    def take(self, news: OutputEvent) -> Iterator[Event]:
        """Events for more text, a new call, or more arguments of the latest call."""
        if isinstance(news, ContentPiece):
            if self._item is None or self._item["type"] != "message":
                yield from self._close("completed")
                yield from self._open_message()
            self._pieces.append(news.text)
            place = self._place(content_index=0)
            yield self._event("response.output_text.delta", **place, delta=news.text, logprobs=[])
        elif isinstance(news, CallStart):
            yield from self._close("completed")
            call = {"type": "function_call", "call_id": news.id, "name": news.name, "arguments": ""}
            yield from self._open({"id": _new_id("fc"), **call, "status": "in_progress"})
        else:
            self._pieces.append(news.text)
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=news.text)

    def end(self, reason: FinishReason, usage: Usage) -> Iterator[Event]:
        """The last events. An answer without text and calls has one message without text."""
        if self._item is None and not self.output:
            yield from self._open_message()
        is_cut = reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        response = self.response(
            status,
            usage=usage_object(usage),
            incomplete_details=details,
            completed_at=None if is_cut else int(time.time()),
        )
        yield self._event(f"response.{status}", response=response)

    def fail(self, error: EnginehouseError) -> Event:
        """The last event of a response that failed; its output is what had been sent."""
        if self._item is not None:
            self.output.append(self._finished_item("incomplete"))
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self.response("failed", error={"code": code, "message": str(error)})
        return self._event("response.failed", response=response)

    def response(self, status: str, **changed: Any) -> dict[str, Any]:
        """The whole object."""
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._shown, **nothing, "status": status, "output": list(self.output), **changed}

    def _open_message(self) -> Iterator[Event]:
        message = {"id": _new_id("msg"), "type": "message", "status": "in_progress"}
        yield from self._open({**message, "role": "assistant", "content": []})
        yield self._event("response.content_part.added", **self._place(content_index=0), part=_text_part(""))

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self._item, self._pieces = item, []
        yield self._event("response.output_item.added", output_index=len(self.output), item=item)

    def _close(self, status: str) -> Iterator[Event]:
        """The events that end the open item, if there is one."""
        if self._item is None:
            return
        item = self._finished_item(status)
        if item["type"] == "message":
            place, part = self._place(content_index=0), item["content"][0]
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
        else:
            fields = {name: item[name] for name in ("name", "arguments")}
            yield self._event("response.function_call_arguments.done", **self._place(), **fields)
        yield self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._item = None

    def _finished_item(self, status: str) -> dict[str, Any]:
        assert self._item is not None
        text = "".join(self._pieces)
        if self._item["type"] == "message":
            return {**self._item, "status": status, "content": [_text_part(text)]}
        # A call is whole when its arguments are, also when the answer ended right behind it.
        return {
            **self._item,
            "status": "completed" if _is_json(text) else "incomplete",
            "arguments": text,
        }

    def _place(self, **more: int) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.output), **more}

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Tokens in the shape of this protocol."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(14)}"


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True
