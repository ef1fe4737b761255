"""Formats chosen by templates, and conversations with calls in them through those templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginehouse.api.tools.definitions import Function
from enginehouse.api.tools.formats import FORMATS, choose_format
from enginehouse.api.tools.history import adapt_messages, template_tools
from enginehouse.api.tools.parsing import parse_output
from enginehouse.runtime.chat_template import ChatTemplate
from tests.unit.tools.reading import free_parser
from tests.unit.tools.templates import BY_FORMAT, HERMES, MISTRAL, PLAIN

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [
    Function(name="get_weather", description="Weather of a city", parameters=SCHEMA),
    Function(name="f"),
]
USER = {"role": "user", "content": "Weather in Zürich?"}


def call(call_id: str, name: str = "get_weather", arguments: str = '{"city": "Zürich"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str = '"rain"') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def render(
    name: str, messages: list[dict[str, Any]], functions: list[Function] | None = None, **more: Any
) -> str:
    fmt = FORMATS[name]
    shown = adapt_messages(messages, fmt, functions or ())
    tools = template_tools(functions) if functions and fmt.in_template else None
    return ChatTemplate(BY_FORMAT[name]).render(shown, tools=tools, **more)


@pytest.mark.parametrize(("name", "template"), BY_FORMAT.items())
def test_the_template_tells_the_format(name: str, template: str) -> None:
    assert choose_format(template).name == name
    assert choose_format(template, "llama3").name == "llama3"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "generic"),
        (HERMES.replace("tools", "others"), "generic"),
        (MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS]name[ARGS]"), "generic"),
        ("{% if tools %}{{ tools }}{% endif %}", "generic"),
    ],
)
def test_templates_of_no_known_format(template: str | None, name: str) -> None:
    assert choose_format(template).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_model_wrote_is_what_its_template_writes_again(name: str) -> None:
    """Answer → parsed → sent back by the client → rendered: the conversation goes on with the same text."""
    fmt = FORMATS[name]
    arguments = '{"city": "Zürich", "days": [1, 2.5, null]}'
    written = f"{fmt.before_name}get_weather{fmt.before_arguments}{arguments}{fmt.after_arguments}"
    prompt = render(name, [USER], FUNCTIONS)
    whole = (fmt.marker if fmt.opening_is_marker else "") + fmt.opening + written + fmt.closing
    parsed = parse_output(free_parser(name), whole)
    (got,) = parsed.calls
    answer = {"role": "assistant", "content": None, "tool_calls": [call("call_0", got.name, got.arguments)]}
    again = render(name, [USER, answer, result("call_0")], FUNCTIONS)
    if name in ("llama3", "mistral"):  # these show the tools beside the last message only
        assert written.removesuffix("}") in again
    else:
        assert again.startswith(prompt + whole + "<|im_end|>")
    assert "rain" in again.split(arguments)[1]


@pytest.mark.parametrize("name", ["hermes", "generic"])
def test_content_and_several_calls_round_trip(name: str) -> None:
    fmt = FORMATS[name]
    calls = [call("call_0"), call("call_1", "f", "{}")]
    texts = [
        f"{fmt.before_name}{c['function']['name']}{fmt.before_arguments}{c['function']['arguments']}{fmt.after_arguments}"
        for c in calls
    ]
    whole = "Let me see.\n" + fmt.separator.join(texts)
    parsed = parse_output(free_parser(name), whole)
    assert parsed.content == "Let me see."
    assert [(c.id, c.name, c.arguments) for c in parsed.calls] == [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    answer = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
    assert render(name, [USER, answer], add_generation_prompt=False).endswith(
        f"assistant\n{whole}<|im_end|>\n"
    )


def test_llama_takes_several_calls_one_by_one() -> None:
    calls = [call("a"), call("b", "f", "{}"), call("c", "f", '{"x": 1}')]
    answer = {"role": "assistant", "content": "x", "tool_calls": calls}
    messages = [USER, answer, result("b", "second"), result("a", "first"), result("other"), USER]
    shown = adapt_messages(messages, FORMATS["llama3"])
    roles = [message["role"] for message in shown]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "user"]
    assert [message["tool_calls"][0]["id"] for message in shown if "tool_calls" in message] == ["a", "b", "c"]
    assert [message["content"] for message in shown if message["role"] == "tool"] == [
        "first",
        "second",
        '"rain"',
    ]
    assert render("llama3", messages)


def test_mistral_gets_ids_of_nine_letters() -> None:
    answer = {"role": "assistant", "tool_calls": [call("call_0123"), call("abcdefgh9")]}
    shown = adapt_messages([USER, answer, result("call_0123"), result("abcdefgh9")], FORMATS["mistral"])
    ids = [c["id"] for c in shown[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in shown[2:]] == ids
    assert ids[1] == "abcdefgh9"
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert answer["tool_calls"][0]["id"] == "call_0123", "the input is not changed"


def test_results_get_the_name_of_their_function() -> None:
    answer = {"role": "assistant", "tool_calls": [call("a")]}
    shown = adapt_messages([USER, answer, result("a"), result("b")], FORMATS["hermes"])
    assert shown[2]["name"] == "get_weather"
    assert "name" not in shown[3]


def test_the_generic_format_explains_tools_in_a_system_message() -> None:
    text = render("generic", [USER], FUNCTIONS)
    system = text.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\n")
    for part in ("get_weather", "Weather of a city", json.dumps(SCHEMA), "<tool_call>", "<tool_response>"):
        assert part in system
    own = render("generic", [{"role": "system", "content": "Be brief."}, USER], FUNCTIONS)
    assert own.count("<|im_start|>system") == 1
    assert own.startswith("<|im_start|>system\nBe brief.\n\n")
    assert render("generic", [USER]) == ChatTemplate(PLAIN).render([USER])


def test_tools_in_the_shape_of_templates() -> None:
    assert template_tools(FUNCTIONS) == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    ]
