"""What a request says about tools, checked: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from msgspec import Struct

from enginehouse.api.tools.schemas import schema_fault
from enginehouse.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

ChoiceMode = Literal["none", "auto", "required"]
_F = TypeVar("_F", "Function", "NamedFunction")


class Function(Struct, frozen=True, kw_only=True):
    """A function the model may call. Without `parameters` it takes no arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments, which are always an object."""
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """An entry of `tools`, as chat completions have it."""

    type: str
    function: Function | None = None


class NamedFunction(Struct, frozen=True, kw_only=True):
    """The function that a choice names."""

    name: str


class AllowedTool(Struct, frozen=True, kw_only=True):
    """One of the tools that a choice is restricted to."""

    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct, frozen=True, kw_only=True):
    """A choice among some of the tools, all of which the model is shown."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(Struct, frozen=True, kw_only=True):
    """The object form of `tool_choice`."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """The tools of one request. Make it with `tool_request`, which checks."""

    functions: tuple[Function, ...]
    """All that the model is told about, each name once."""
    mode: ChoiceMode = "auto"
    """`required`: the answer is one call or more, and nothing else."""
    callable_names: tuple[str, ...]
    """Those that may be called in this answer."""
    parallel: bool = True
    """Whether there may be more than one call."""
    where: str = "tools"
    path: str = "tools[{index}].function"
    """The request's field, and function `index` in it, for refusals."""

    @property
    def is_offered(self) -> bool:
        """Whether the model is told about the tools at all."""
        return self.mode != "none"

    @property
    def grammar_param(self) -> str:
        """The field to name when no grammar can be made of what may be called."""
        if len(self.callable_names) > 1:
            return self.where
        index = next(i for i, f in enumerate(self.functions) if f.name in self.callable_names)
        return f"{self.path.format(index=index)}.parameters"

    @property
    def callable_functions(self) -> list[Function]:
        """Those that may be called in this answer."""
        return [function for function in self.functions if function.name in self.callable_names]


def tool_request(
    functions: Sequence[Function],
    *,
    mode: ChoiceMode = "auto",
    only: Sequence[str] | None = None,
    parallel: bool | None = None,
    where: str = "tools",
    path: str = "tools[{index}].function",
) -> ToolRequest | None:
    """The checked tools of a request, None when there are none.

    `only` restricts what may be called (a named function: `mode="required", only=[name]`, and one call). `path`
    says where function `index` is in the request, for refusals. Raises `InvalidRequestError`.
    """
    if not functions:
        return None
    if len(functions) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{where}: at most {MAX_TOOLS} tools are allowed, not {len(functions)}.", param=where
        )
    seen: set[str] = set()
    for index, function in enumerate(functions):
        _check_function(function, path.format(index=index), seen)
        seen.add(function.name)
    for name in only or ():
        if name not in seen:
            raise InvalidRequestError(
                f"tool_choice: there is no function '{name[:64]}' in {where}.", param="tool_choice"
            )
    names = tuple(function.name for function in functions)
    return ToolRequest(
        functions=tuple(functions),
        mode=mode,
        callable_names=names if only is None else tuple(name for name in names if name in only),
        parallel=parallel is not False,
        where=where,
        path=path,
    )


def _check_function(function: Function, at: str, seen: set[str]) -> None:
    if _NAME.fullmatch(function.name) is None:
        raise InvalidRequestError(
            f"{at}.name: 1 to 64 letters, digits, '_' and '-' are allowed, not {function.name[:80]!r}.",
            param=f"{at}.name",
        )
    if function.name in seen:
        raise InvalidRequestError(
            f"{at}.name: '{function.name}' is there twice; names must be unique.", param=f"{at}.name"
        )
    if function.parameters is not None:
        fault = schema_fault(function.parameters)
        if fault is not None:
            raise InvalidRequestError(f"{at}.parameters{fault}.", param=f"{at}.parameters")


def chat_tool_request(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    parallel: bool | None,
) -> ToolRequest | None:
    """The tools of a chat completion request. Raises `InvalidRequestError` naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice is only allowed with tools.", param="tool_choice")
        if parallel is not None:
            raise InvalidRequestError(
                "parallel_tool_calls is only allowed with tools.", param="parallel_tool_calls"
            )
        return None
    functions = [
        _function_of(tool.type, tool.function, f"tools[{index}]") for index, tool in enumerate(tools)
    ]
    if choice is None or isinstance(choice, str):
        return tool_request(functions, mode=choice or "auto", parallel=parallel)
    if choice.type == "function":
        named = _function_of(choice.type, choice.function, "tool_choice")
        return tool_request(functions, mode="required", only=[named.name], parallel=False)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        at = "tool_choice.allowed_tools.tools"
        if not allowed.tools:
            raise InvalidRequestError(f"{at} must not be empty.", param=at)
        only = [
            _function_of(tool.type, tool.function, f"{at}[{index}]").name
            for index, tool in enumerate(allowed.tools)
        ]
        return tool_request(functions, mode=allowed.mode, only=only, parallel=parallel)
    raise InvalidRequestError(
        f"tool_choice.type: '{choice.type[:40]}' is not supported; 'function' and 'allowed_tools' (with a field of "
        "that name) are.",
        param="tool_choice",
    )


def _function_of(kind: str, function: _F | None, at: str) -> _F:
    if kind != "function":
        raise InvalidRequestError(
            f"{at}.type: '{kind[:40]}' is not supported; only 'function' is.", param=f"{at}.type"
        )
    if function is None:
        raise InvalidRequestError(f"{at}.function is missing.", param=f"{at}.function")
    return function
