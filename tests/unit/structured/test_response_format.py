"""Request fields to grammars: what the HTTP tests do not look at closely."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from enginehouse.api.openai.response_format import grammar_from
from enginehouse.engine.structured_output import MAX_GRAMMAR_BYTES, Grammar
from enginehouse.errors import InvalidRequestError

NAMES = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


def read(**fields: Any) -> Grammar | None:
    return grammar_from(SimpleNamespace(**{**dict.fromkeys(NAMES), **fields}))


def test_nothing_asked_for() -> None:
    assert read() is None
    assert read(response_format={"type": "text"}) is None


def test_text_beside_another_field_leaves_it_the_say() -> None:
    grammar = read(response_format={"type": "text"}, guided_regex="a+")
    assert grammar == Grammar(kind="regex", text="a+", param="guided_regex")


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}}
    for fields in (
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema, "choice": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
    ):
        grammar = read(**fields)
        assert grammar is not None
        assert grammar.kind == "json_schema"
        assert list(json.loads(grammar.text)["properties"]) == ["z", "a", "m"]


def test_the_param_is_where_the_text_came_from() -> None:
    formats: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"grammar": "start: \"a\""}}, "structured_outputs.grammar"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ]  # fmt: skip
    for fields, param in formats:
        grammar = read(**fields)
        assert grammar is not None
        assert grammar.param == param


def test_two_fields_contradict() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(response_format={"type": "json_object"}, guided_choice=["a"])
    assert refusal.value.param == "guided_choice"


@pytest.mark.parametrize(
    "text", ["a" * (MAX_GRAMMAR_BYTES + 1), "é" * (MAX_GRAMMAR_BYTES // 2 + 1), "\ud800"]
)
def test_a_grammar_too_large_or_no_text(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Grammar(kind="regex", text=text, param="guided_regex").check()
    assert refusal.value.param == "guided_regex"


def test_a_grammar_as_large_as_allowed() -> None:
    Grammar(kind="regex", text="a" * MAX_GRAMMAR_BYTES).check()
