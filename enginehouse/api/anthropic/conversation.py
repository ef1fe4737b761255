"""The part of Anthropic's request bodies that becomes the prompt, and what of it is not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from enginehouse.api.anthropic.tools import AnthropicTool, AnthropicToolChoice
from enginehouse.api.openai.parameters import SamplingFields
from enginehouse.errors import InvalidRequestError

Message = dict[str, Any]


class ResultPart(Struct, kw_only=True):
    """A part of a tool's result; only text is supported."""

    type: str
    text: str | None = None


class Block(Struct, kw_only=True):
    """A part of a message's content: `text`, in the assistant's messages `tool_use`, in the user's `tool_result`.
    `cache_control` and `citations` are among the fields that are ignored: prompts that begin alike share their
    computation anyway."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None


class InputMessage(Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class OutputFormat(Struct, kw_only=True):
    """The form of an answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """What the answer must be like; how much effort goes into it cannot be chosen."""

    format: OutputFormat | None = None
    effort: str | None = None


class ConversationFields(SamplingFields, kw_only=True):
    """What both routes take: counting ignores the sampling fields, so that a body can be counted as it is."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[ResultPart] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None

    # Known to the protocol and not supported.
    thinking: Any = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_format: Any = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
}
"""Values of unsupported fields that ask for nothing."""
_REFUSED = ("thinking", "container", "context_management", "mcp_servers", "output_format")


def conversation(fields: ConversationFields) -> list[Message]:
    """The messages in the shape of chat completions. Raises `InvalidRequestError` naming what is not supported."""
    for name in _REFUSED:
        value = getattr(fields, name)
        if value is not None and value not in _HARMLESS.get(name, ()):
            raise InvalidRequestError(f"{name} is not supported by this server with this value.", param=name)
    messages: list[Message] = []
    system = _joined_text(fields.system or "", "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(fields.messages):
        messages += _messages_of(message, f"messages[{index}].content")
    if fields.messages[-1].role == "assistant":
        raise InvalidRequestError(
            "messages: the last message must be the user's; continuing an assistant message (prefill) is not supported.",
            param="messages",
        )
    return messages


def _messages_of(message: InputMessage, at: str) -> list[Message]:
    """A turn in the shape of chat completions, where each result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant_message(message.content, at)]
    messages: list[Message] = []
    for number, block in enumerate(message.content):
        where = f"{at}[{number}]"
        if block.type == "tool_result":
            call_id = _given(block.tool_use_id, f"{where}.tool_use_id")
            text = _joined_text(block.content or "", f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text_of(block, where)
        else:
            messages.append({"role": "user", "content": _text_of(block, where)})
    return messages or [{"role": "user", "content": ""}]


def _assistant_message(blocks: list[Block], at: str) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{at}[{number}]"
        if block.type != "tool_use":
            texts.append(_text_of(block, where))
            continue
        arguments = msgspec.json.encode(_given(block.input, f"{where}.input")).decode()
        function = {"name": _given(block.name, f"{where}.name"), "arguments": arguments}
        calls.append({"id": _given(block.id, f"{where}.id"), "type": "function", "function": function})
    message: Message = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined_text(content: str | list[ResultPart], at: str) -> str:
    """Content as one string; parts are joined as they are. Raises `InvalidRequestError` for other than text."""
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{at}[{number}]") for number, part in enumerate(content))


def _text_of(block: Block | ResultPart, at: str) -> str:
    if block.type != "text":
        raise InvalidRequestError(
            f"{at}.type: '{block.type[:40]}' blocks are not supported here.", param=f"{at}.type"
        )
    text: str = _given(block.text, f"{at}.text")
    return text


def _given(value: Any, at: str) -> Any:
    if value is None:
        raise InvalidRequestError(f"{at} is missing.", param=at)
    return value
