"""Conversations with calls and results in them, as a model's template can take them.

Messages are in the shape of chat completions, as chat templates know it. Nothing here changes its input.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from enginehouse.api.tools.definitions import Function
from enginehouse.api.tools.formats import ToolFormat

Message = dict[str, Any]

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")

_EXPLANATION = """\
You can call functions. These are there, each described in JSON:
{descriptions}

To call a function, write its name and its arguments as JSON, like this:
{example}
The result is given to you between <tool_response> and </tool_response>. Call a function only when it helps to \
answer; otherwise answer yourself."""


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Functions in the shape in which templates, and `tools` of chat completions, have them."""
    tools = []
    for function in functions:
        described: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            described["description"] = function.description
        described["parameters"] = function.parameters or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": described})
    return tools


def adapt_messages(
    messages: Sequence[Message], fmt: ToolFormat, functions: Sequence[Function] = ()
) -> list[Message]:
    """`messages` as a template of this format takes them. `functions` are explained in a system message where the
    template does not show tools."""
    named = _with_names_of_results(messages)
    if fmt.in_template:
        return _ADAPTERS.get(fmt.name, list)(named)
    plain = [_as_plain_text(message, fmt) for message in named]
    return _explained(plain, fmt, functions) if functions else plain


def _with_names_of_results(messages: Sequence[Message]) -> list[Message]:
    """Results with the name of the function they are of, which some templates show."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message["tool_call_id"] in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    return named


# Templates that know no tools --------------------------------------------------------------------------------------


def _as_plain_text(message: Message, fmt: ToolFormat) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = fmt.separator.join(_written(call["function"], fmt) for call in calls)
    content = message.get("content")
    return {"role": message["role"], "content": f"{content}\n{written}" if content else written}


def _written(function: dict[str, Any], fmt: ToolFormat) -> str:
    name, arguments = function["name"], function["arguments"]
    return f"{fmt.before_name}{name}{fmt.before_arguments}{arguments}{fmt.after_arguments}"


def _explained(messages: list[Message], fmt: ToolFormat, functions: Sequence[Function]) -> list[Message]:
    descriptions = [json.dumps(tool["function"], ensure_ascii=False) for tool in template_tools(functions)]
    example = _written({"name": "function name", "arguments": '{"argument name": value}'}, fmt)
    text = _EXPLANATION.format(descriptions="\n".join(descriptions), example=example)
    if messages and messages[0]["role"] == "system":
        own = messages[0]
        return [{**own, "content": f"{own['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# Templates with wishes ---------------------------------------------------------------------------------------------


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Mistral's templates take ids of nine letters and digits only; others get one made of them."""
    adapted = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if message.get("tool_calls"):
            calls = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        adapted.append(message)
    return adapted


def _short_id(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _one_call_a_message(messages: list[Message]) -> list[Message]:
    """Llama's templates take one call a message: several become several, each followed by its result."""
    adapted: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            adapted.append(message)
            continue
        results: dict[str, Message] = {}
        while position < len(messages) and messages[position]["role"] == "tool":
            results[messages[position]["tool_call_id"]] = messages[position]
            position += 1
        for call in calls:
            adapted.append({**message, "tool_calls": [call]})
            if call["id"] in results:
                adapted.append(results.pop(call["id"]))
        adapted += results.values()
    return adapted


_ADAPTERS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "mistral": _with_short_ids,
    "llama3": _one_call_a_message,
}
