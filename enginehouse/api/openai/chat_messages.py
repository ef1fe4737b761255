"""Messages of a conversation as chat completions have them, and as chat templates expect them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from enginehouse.errors import InvalidRequestError


class ContentPart(Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class CalledFunction(Struct, kw_only=True):
    """The function of an earlier call, with its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(Struct, kw_only=True):
    """A call that the assistant made earlier."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    """May be missing or null beside `tool_calls`."""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    """Calls that an assistant's message made."""
    tool_call_id: str | None = None
    """The call that a tool's message is the result of."""
    function_call: Any = None
    audio: Any = None


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates expect it: text as one string, `developer` as `system`; calls of assistants as
    `tool_calls` (`id`, `type`, `function` with `name` and `arguments`, JSON text), results with `tool_call_id`.

    Raises `InvalidRequestError` naming the part that is missing or not supported.
    """
    at = f"messages[{index}]"
    _check_supported(message, at)
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role}
    if message.content is not None:
        shown["content"] = _joined_text(message.content, at)
    elif not message.tool_calls:
        raise InvalidRequestError(f"{at}.content is missing.", param=f"{at}.content")
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.role == "tool":
        if not message.tool_call_id:
            raise InvalidRequestError(f"{at}.tool_call_id is missing.", param=f"{at}.tool_call_id")
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _check_supported(message: Message, at: str) -> None:
    if message.role == "function":
        raise InvalidRequestError(
            f"{at}.role: function messages are not supported; send the role tool.", param=f"{at}.role"
        )
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise InvalidRequestError(f"{at}.{name} is not supported by this server.", param=f"{at}.{name}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError(
            f"{at}.tool_calls: only messages of the assistant have calls.", param=f"{at}.tool_calls"
        )


def _template_call(call: MessageToolCall) -> dict[str, Any]:
    # Some clients send back "" where there were no arguments; templates want an object.
    arguments = call.function.arguments if call.function.arguments.strip() else "{}"
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


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
