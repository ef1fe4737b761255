"""What a request may say about tools, and how it is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from enginehouse.api.tools.definitions import (
    Function,
    Tool,
    ToolChoice,
    ToolRequest,
    chat_tool_request,
    tool_request,
)
from enginehouse.api.tools.schemas import closed_schema, schema_fault
from enginehouse.errors import InvalidRequestError


def tools(*names: str) -> list[Tool]:
    return [Tool(type="function", function=Function(name=name)) for name in names]


def ask(offered: list[Tool] | None, choice: Any = None, parallel: bool | None = None) -> ToolRequest | None:
    if isinstance(choice, dict):
        choice = msgspec.convert(choice, ToolChoice)
    return chat_tool_request(offered, choice, parallel)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


@pytest.mark.parametrize(
    ("choice", "parallel", "mode", "names", "is_parallel"),
    [
        (None, None, "auto", ("a", "b", "c"), True),
        ("auto", False, "auto", ("a", "b", "c"), False),
        ("none", None, "none", ("a", "b", "c"), True),
        ("required", True, "required", ("a", "b", "c"), True),
        (named("b"), None, "required", ("b",), False),
        (named("b"), True, "required", ("b",), False),
        (allowed("auto", "c", "a"), None, "auto", ("a", "c"), True),
        (allowed("required", "a"), False, "required", ("a",), False),
    ],
)
def test_choices(choice: Any, parallel: Any, mode: str, names: tuple[str, ...], is_parallel: bool) -> None:
    got = ask(tools("a", "b", "c"), choice, parallel)
    assert got is not None
    assert [function.name for function in got.functions] == ["a", "b", "c"]
    assert (got.mode, got.callable_names, got.parallel) == (mode, names, is_parallel)
    assert tuple(function.name for function in got.callable_functions) == names
    assert got.is_offered is (mode != "none")


@pytest.mark.parametrize("offered", [None, []])
def test_no_tools(offered: Any) -> None:
    assert ask(offered) is ask(offered, "none") is ask(offered, "auto") is None


@pytest.mark.parametrize(
    ("offered", "choice", "parallel", "param"),
    [
        (None, "required", None, "tool_choice"),
        ([], named("a"), None, "tool_choice"),
        (None, None, True, "parallel_tool_calls"),
        ([], "auto", False, "parallel_tool_calls"),
        (tools("a"), named("b"), None, "tool_choice"),
        (tools("a"), {"type": "function"}, None, "tool_choice.function"),
        (tools("a"), {"type": "custom"}, None, "tool_choice"),
        (tools("a"), {"type": "allowed_tools"}, None, "tool_choice"),
        (tools("a"), allowed("auto"), None, "tool_choice.allowed_tools.tools"),
        (tools("a"), allowed("auto", "z"), None, "tool_choice"),
        (tools("a", "b", "a"), None, None, "tools[2].function.name"),
        (tools("a", "b", "a"), "none", None, "tools[2].function.name"),
        (tools("a b"), None, None, "tools[0].function.name"),
        (tools(""), None, None, "tools[0].function.name"),
        (tools("é"), None, None, "tools[0].function.name"),
        (tools("a\n"), None, None, "tools[0].function.name"),
        (tools("a" * 65), None, None, "tools[0].function.name"),
        ([*tools("a"), Tool(type="custom")], None, None, "tools[1].type"),
        ([Tool(type="function")], None, None, "tools[0].function"),
        (tools(*(f"f{index}" for index in range(129))), None, None, "tools"),
    ],
)
def test_refusals(offered: Any, choice: Any, parallel: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ask(offered, choice, parallel)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_as_many_and_as_long_as_allowed() -> None:
    offered = ask(tools(*(f"f{index}" for index in range(127)), "-_" * 32))
    assert offered is not None
    assert len(offered.functions) == 128


def test_other_protocols_name_their_own_fields() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        tool_request([Function(name="a b")], path="tools[{index}]")
    assert refused.value.param == "tools[0].name"


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "array"}, ".type"),
        ({"type": ["object", "null"]}, ".type"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": 5}}, ".properties.a"),
        ({"properties": {"a": {"type": "text"}}}, ".properties.a.type"),
        ({"properties": {"a": {"type": ["string", 5]}}}, ".properties.a.type"),
        ({"properties": {"a": {"items": {"type": "int"}}}}, ".properties.a.items.type"),
        ({"properties": {"a": {"enum": []}}}, ".properties.a.enum"),
        ({"properties": {"a": {"anyOf": []}}}, ".properties.a.anyOf"),
        ({"properties": {"a": {"anyOf": [{}, {"type": "x"}]}}}, ".properties.a.anyOf[1].type"),
        ({"required": "a"}, ".required"),
        ({"required": [1]}, ".required"),
        ({"$defs": {"d": {"type": "x"}}}, ".$defs.d.type"),
        ({"additionalProperties": "no"}, ".additionalProperties"),
    ],
)
def test_malformed_schemas(schema: dict[str, Any], fault: str) -> None:
    said = schema_fault(schema)
    assert said is not None
    assert said.startswith(f"{fault}:")
    offered = Tool(type="function", function=Function(name="f", parameters=schema))
    with pytest.raises(InvalidRequestError) as refused:
        ask([offered], "none")
    assert refused.value.param == "tools[0].function.parameters"


def test_schema_that_is_nested_without_end() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"properties": {"a": schema}}
    assert "nested" in (schema_fault(schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": True, "b": {"type": ["string", "null"], "enum": ["x", None]}}},
        {"$defs": {"d": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/d"}}, "required": ["a"]},
        {"properties": {"a": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"const": 1}]}}},
        {"additionalProperties": {"type": "string"}, "description": "d", "x-novel": 5},
    ],
)
def test_sound_schemas(schema: dict[str, Any]) -> None:
    assert schema_fault(schema) is None


def test_forced_arguments_have_the_listed_properties_only() -> None:
    string = {"type": "string"}
    assert closed_schema(None) == {"type": "object", "properties": {}, "additionalProperties": False}
    inner = {"type": "object", "properties": {"b": string}}
    got = closed_schema({"properties": {"a": {"type": "array", "items": inner}}})
    assert got["type"] == "object"
    assert got["additionalProperties"] is False
    assert got["properties"]["a"]["items"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "open_schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "allOf": [{"required": ["b"]}]},
        {"type": "object", "patternProperties": {"^x": {}}, "properties": {}},
    ],
)
def test_objects_that_may_have_more_stay_open(open_schema: dict[str, Any]) -> None:
    assert closed_schema(open_schema) == open_schema
