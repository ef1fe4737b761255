"""The part of Anthropic's request bodies that becomes the prompt, and what of it is not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from enginehouse.api.openai.parameters import SamplingFields
from enginehouse.engine.events import ChatPrompt
from enginehouse.errors import InvalidRequestError


class Block(Struct, kw_only=True):
    """A part of a message's content. `cache_control` and `citations` are among the fields that are ignored: prompts
    that begin alike share their computation anyway."""

    type: str
    text: str | None = None


class InputMessage(Struct):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ConversationFields(SamplingFields, kw_only=True):
    """What both routes take: counting ignores the sampling fields, so that a body can be counted as it is."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None

    # Known to the protocol and not supported.
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_config: Any = None
    output_format: Any = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "output_config": ({},),
}
"""Values of unsupported fields that ask for nothing."""
_REFUSED = (
    "tools",
    "tool_choice",
    "thinking",
    "container",
    "context_management",
    "mcp_servers",
    "output_config",
    "output_format",
)


def chat_prompt(fields: ConversationFields) -> ChatPrompt:
    """The conversation for the model's chat template. Raises `InvalidRequestError` naming what is not supported."""
    for name in _REFUSED:
        value = getattr(fields, name)
        if value is not None and value not in _HARMLESS.get(name, ()):
            raise InvalidRequestError(f"{name} is not supported by this server with this value.", param=name)
    messages: list[dict[str, Any]] = []
    system = "" if fields.system is None else joined_text(fields.system, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(fields.messages):
        text = joined_text(message.content, f"messages[{index}].content")
        messages.append({"role": message.role, "content": text})
    if fields.messages[-1].role == "assistant":
        raise InvalidRequestError(
            "messages: the last message must be the user's; continuing an assistant message (prefill) is not supported.",
            param="messages",
        )
    return ChatPrompt(messages=messages)


def joined_text(content: str | list[Block], at: str) -> str:
    """Content as one string; blocks are joined as they are. Raises `InvalidRequestError` for other than text."""
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        check_text(block, f"{at}[{number}]")
    return "".join(block.text or "" for block in content)


def check_text(block: Block, at: str) -> None:
    """Raise `InvalidRequestError` unless `block` is a text block."""
    if block.type != "text":
        raise InvalidRequestError(
            f"{at}.type: '{block.type[:40]}' blocks are not supported here.", param=f"{at}.type"
        )
    if block.text is None:
        raise InvalidRequestError(f"{at}.text is missing.", param=f"{at}.text")
