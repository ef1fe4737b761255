"""Items of the Responses protocol as messages in the shape of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from msgspec import Struct

from enginehouse.errors import InvalidRequestError

Message = dict[str, Any]
_T = TypeVar("_T")

_TEXT_PARTS = ("input_text", "output_text", "text")


class Part(Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class Item(Struct, kw_only=True):
    """An entry of `input`: a message (with or without `type`), a call that was made, or a call's result. Items of an
    earlier `output` can be sent back as they are."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


def messages_of(items: Sequence[Item], at: str = "input") -> list[Message]:
    """The conversation. Calls join the assistant's message before them, as one turn.

    Raises `InvalidRequestError` naming the item that is malformed or not supported.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        where = f"{at}[{index}]"
        if item.type == "message":
            role = _given(item.role, f"{where}.role")
            text = _text(item.content, f"{where}.content")
            messages.append({"role": "system" if role == "developer" else role, "content": text})
        elif item.type == "function_call":
            _append_call(messages, item, where)
        elif item.type == "function_call_output":
            call_id = _given(item.call_id, f"{where}.call_id")
            text = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise InvalidRequestError(
                f"{where}.type: '{item.type[:40]}' items are not supported; message, function_call and "
                "function_call_output are.",
                param=f"{where}.type",
            )
    return messages


def _append_call(messages: list[Message], item: Item, where: str) -> None:
    arguments = _given(item.arguments, f"{where}.arguments")
    call = {
        "id": _given(item.call_id, f"{where}.call_id"),
        "type": "function",
        "function": {
            "name": _given(item.name, f"{where}.name"),
            # Some clients send back "" where there were no arguments; templates want an object.
            "arguments": arguments if arguments.strip() else "{}",
        },
    }
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _text(content: str | list[Part] | None, at: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Part] = _given(content, at)
    for number, part in enumerate(parts):
        where = f"{at}[{number}]"
        if part.type not in _TEXT_PARTS:
            raise InvalidRequestError(
                f"{where}.type: '{part.type[:40]}' is not supported; only text is.", param=f"{where}.type"
            )
        _given(part.text, f"{where}.text")
    return "".join(part.text or "" for part in parts)


def _given(value: _T | None, at: str) -> _T:
    if value is None:
        raise InvalidRequestError(f"{at} is missing.", param=at)
    return value
