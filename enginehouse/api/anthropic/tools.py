"""Tools in Anthropic's shape: what a request offers, and what an answer calls."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from enginehouse.api.tools.definitions import Function, ToolRequest, tool_request
from enginehouse.api.tools.parsing import CallStart
from enginehouse.errors import InvalidRequestError


class AnthropicTool(Struct, kw_only=True):
    """A tool the model may call. Those that Anthropic runs itself (`type` other than custom) are not supported."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether the answer may (auto), must (any), must by this name (tool) or must not (none) call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def tools_of(tools: list[AnthropicTool] | None, choice: AnthropicToolChoice | None) -> ToolRequest | None:
    """The checked tools of a request. Raises `InvalidRequestError` naming the field."""
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequestError("tool_choice is only allowed with tools.", param="tool_choice")
        return None
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    path = "tools[{index}]"
    if choice is None:
        return tool_request(functions, path=path)
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name is missing.", param="tool_choice.name")
        return tool_request(functions, mode="required", only=[choice.name], parallel=False, path=path)
    mode = "required" if choice.type == "any" else choice.type
    return tool_request(functions, mode=mode, parallel=not choice.disable_parallel_tool_use, path=path)


def _function(tool: AnthropicTool, at: str) -> Function:
    if tool.type not in (None, "custom"):
        raise InvalidRequestError(
            f"{at}.type: '{tool.type[:40]}' is not supported; only 'custom' is.", param=f"{at}.type"
        )
    if tool.input_schema is None:
        raise InvalidRequestError(f"{at}.input_schema is missing.", param=f"{at}.input_schema")
    return Function(name=tool.name, description=tool.description, parameters=tool.input_schema)


def tool_use_block(call: CallStart, arguments: str = "") -> dict[str, Any]:
    """A call as a content block. Arguments that were cut short are no JSON, and are left out."""
    return {
        "type": "tool_use",
        "id": f"toolu_{call.id.removeprefix('call_')}",
        "name": call.name,
        "input": msgspec.Raw(arguments.encode()) if _is_object(arguments) else {},
    }


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
