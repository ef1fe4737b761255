"""The body of `POST /v1/responses`."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from enginehouse.api.openai.parameters import PositiveInt, SamplingFields
from enginehouse.api.responses.items import Item
from enginehouse.api.tools.definitions import Function, ToolRequest, tool_request
from enginehouse.engine.structured_output import Grammar
from enginehouse.errors import InvalidRequestError

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


class ResponseFormat(Struct, kw_only=True):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """Options of the answer's text."""

    format: ResponseFormat | None = None
    verbosity: str | None = None


class ResponseTool(Struct, kw_only=True):
    """A tool; only functions are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Struct, kw_only=True):
    """A tool that a choice names."""

    type: str
    name: str | None = None


class ResponseToolChoice(Struct, kw_only=True):
    """The object form of `tool_choice`: a function, or a choice among some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


class ReasoningOptions(Struct, kw_only=True):
    """How much to think; the models served here do not."""

    effort: str | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """The body of a request. Beside OpenAI's fields it takes the sampling fields of the other routes."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    user: str | None = None
    service_tier: str | None = None

    # Known to this protocol or to its neighbours, and not supported.
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    messages: Any = None
    n: Any = None
    response_format: Any = None
    max_completion_tokens: Any = None


_decoder = msgspec.json.Decoder(ResponsesBody)

_ELSEWHERE = {
    "max_tokens": "it is called max_output_tokens here",
    "max_completion_tokens": "it is called max_output_tokens here",
    "response_format": "it is called text.format here",
    "messages": "it is called input here",
    "n": "a response is one answer",
    "conversation": "previous_response_id continues a conversation",
    "prompt": "there are no stored prompts",
    "max_tool_calls": "there are no built-in tools",
    "background": "a response is computed while its request waits",
}


def refuse_unsupported(fields: ResponsesBody) -> None:
    """Raise `InvalidRequestError` naming the first field that asks for something this server cannot do."""
    for name, why in _ELSEWHERE.items():
        value = getattr(fields, name)
        if value is not None and value is not False and not (name == "n" and value == 1):
            raise InvalidRequestError(f"{name} is not supported by this route: {why}.", param=name)
    if fields.truncation == "auto":
        raise InvalidRequestError("truncation: 'auto' is not supported; 'disabled' is.", param="truncation")
    if fields.top_logprobs:
        raise InvalidRequestError("top_logprobs is not supported by this route.", param="top_logprobs")
    if "message.output_text.logprobs" in (fields.include or ()):
        raise InvalidRequestError(
            "include: message.output_text.logprobs is not supported by this route.", param="include"
        )
    if fields.reasoning is not None and fields.reasoning.effort not in (None, "none"):
        raise InvalidRequestError(
            "reasoning.effort is not supported: this model does not reason.", param="reasoning.effort"
        )
    if fields.text is not None and fields.text.verbosity not in (None, "medium"):
        raise InvalidRequestError("text.verbosity: only 'medium' is supported.", param="text.verbosity")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise `InvalidRequestError` for more than is kept: metadata is stored and sent back."""
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata: at most {MAX_METADATA} entries are allowed.", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"metadata: keys have up to {MAX_METADATA_KEY} characters, values up to {MAX_METADATA_VALUE}.",
                param="metadata",
            )


def format_grammar(fields: ResponsesBody) -> Grammar | None:
    """The grammar that `text.format` means; None for free text. Raises `InvalidRequestError`."""
    form = fields.text.format if fields.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json_object", param="text.format")
    if form.name is None or _NAME.fullmatch(form.name) is None:
        raise InvalidRequestError(
            "text.format.name must be 1 to 64 letters, digits, underscores and dashes.",
            param="text.format.name",
        )
    if form.schema is None:
        raise InvalidRequestError("text.format.schema is missing.", param="text.format.schema")
    schema = msgspec.json.encode(form.schema).decode()
    return Grammar(kind="json_schema", text=schema, param="text.format.schema")


def tools_of(fields: ResponsesBody) -> ToolRequest | None:
    """The checked tools of a request. Raises `InvalidRequestError`."""
    choice = fields.tool_choice
    if not fields.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice is only allowed with tools.", param="tool_choice")
        return None
    functions = [
        Function(
            name=_function_name(tool.type, tool.name, f"tools[{index}]"),
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for index, tool in enumerate(fields.tools)
    ]
    path, parallel = "tools[{index}]", fields.parallel_tool_calls
    if choice is None or isinstance(choice, str):
        return tool_request(functions, mode=choice or "auto", parallel=parallel, path=path)
    if choice.type == "function":
        only = [_function_name(choice.type, choice.name, "tool_choice")]
        return tool_request(functions, mode="required", only=only, parallel=False, path=path)
    if choice.type == "allowed_tools" and choice.tools:
        only = [
            _function_name(tool.type, tool.name, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(choice.tools)
        ]
        return tool_request(functions, mode=choice.mode or "auto", only=only, parallel=parallel, path=path)
    raise InvalidRequestError(
        f"tool_choice.type: '{choice.type[:40]}' is not supported; 'function' and 'allowed_tools' (with tools) are.",
        param="tool_choice.type",
    )


def _function_name(kind: str, name: str | None, at: str) -> str:
    if kind != "function":
        raise InvalidRequestError(
            f"{at}.type: '{kind[:40]}' is not supported; only 'function' is.", param=f"{at}.type"
        )
    if name is None:
        raise InvalidRequestError(f"{at}.name is missing.", param=f"{at}.name")
    return name
