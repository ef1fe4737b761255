"""The grammar of forced calls: what it lets through is a call that its parser reads and its schema accepts."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest

from enginehouse.api.tools.definitions import Function
from enginehouse.api.tools.forcing import MAX_FORCED_CALLS, forcing_grammar
from enginehouse.api.tools.formats import FORMATS, ToolFormat
from enginehouse.api.tools.parsing import ForcedCallParser, parse_output
from tests.unit.tools.reading import calls_of, free_parser

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
FUNCTIONS = [Function(name="get_weather", parameters=CITY), Function(name="f")]
TOKENIZER = llguidance.LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(fmt: ToolFormat, *calls: tuple[str, str]) -> str:
    parts = [f"{fmt.before_name}{n}{fmt.before_arguments}{a}{fmt.after_arguments}" for n, a in calls]
    return (
        (fmt.marker if fmt.opening_is_marker else "") + fmt.opening + fmt.separator.join(parts) + fmt.closing
    )


PARIS, NONE = ("get_weather", '{"city": "Paris", "days": 3}'), ("f", "{}")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_one_call_and_nothing_else(fmt: ToolFormat) -> None:
    grammar = forcing_grammar(fmt, FUNCTIONS, parallel=False)
    assert accepts(grammar, written(fmt, PARIS))
    assert accepts(grammar, written(fmt, NONE))
    assert not accepts(grammar, written(fmt, PARIS, NONE))
    for wrong in (
        ("get_weather", "{}"), ("get_weather", '{"city": "Oslo"}'), ("f", '{"a": 1}'), ("g", "{}"),
        ("get_weather", '{"city":"Paris"}'), ("get_weather", '{"city": "Paris", "x": 1}'), ("f", "{ }"),
    ):  # fmt: skip
        assert not accepts(grammar, written(fmt, wrong)), wrong
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, written(fmt, PARIS) + " ")


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_several_calls_when_they_may_be_parallel(fmt: ToolFormat) -> None:
    grammar = forcing_grammar(fmt, FUNCTIONS, parallel=True)
    most = [PARIS, NONE] * (MAX_FORCED_CALLS // 2)
    assert accepts(grammar, written(fmt, NONE))
    assert accepts(grammar, written(fmt, *most))
    assert not accepts(grammar, written(fmt, *most, NONE))
    assert calls_of(parse_output(free_parser(fmt.name), written(fmt, *most))) == most
    assert calls_of(parse_output(ForcedCallParser(fmt), written(fmt, *most))) == most


def test_a_marker_that_is_a_special_token_is_one_in_the_grammar() -> None:
    grammar = forcing_grammar(FORMATS["mistral"], FUNCTIONS, parallel=False, special={"[TOOL_CALLS]": 7})
    assert 'calls: <[7]> "[" call "]"\n' in grammar
    assert "TOOL_CALLS" not in grammar
    marks = {"<tool_call>": 3, "</tool_call>": 4}
    grammar = forcing_grammar(FORMATS["hermes"], FUNCTIONS[1:], parallel=True, special=marks)
    assert 'call_0: <[3]> "\\n{' in grammar
    assert '"}\\n" <[4]>\n' in grammar


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_calls_or_an_answer_of_one_form(fmt: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = forcing_grammar(fmt, FUNCTIONS, parallel=False, answer_schema=schema)
    marked = (fmt.marker if fmt.is_bare else "") + written(fmt, PARIS)
    assert accepts(grammar, marked)
    assert calls_of(parse_output(free_parser(fmt.name), marked)) == [PARIS]
    assert accepts(grammar, '{"n": 5}')
    assert not accepts(grammar, '{"n": "5"}')
    assert not accepts(grammar, "text")


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/item"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3},
        'odd "name" \\ é': {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["a", 'odd "name" \\ é'],
    "additionalProperties": False,
    "$defs": {"item": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}},
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_random_bytes_under_the_grammar_give_valid_calls(fmt: ToolFormat, seed: int) -> None:
    grammar = forcing_grammar(fmt, [Function(name="n", parameters=NESTED), *FUNCTIONS], parallel=True)
    rng = random.Random(seed)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar)
    data = bytearray()
    while not matcher.is_stopped() and len(data) < 3000:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            break
        token = rng.choice([t for t in allowed if t in b'"}]0'] or allowed if rng.random() < 0.8 else allowed)
        assert matcher.consume_token(token)
        data.append(token)
    assert matcher.is_accepting(), bytes(data)
    text = data.decode("utf-8", "replace")
    calls = calls_of(parse_output(ForcedCallParser(fmt), text))
    assert calls
    assert calls_of(parse_output(free_parser(fmt.name, names=("n", "f", "get_weather")), text)) == calls
    for name, arguments in calls:
        value = json.loads(arguments)
        assert set(value) <= set({"n": NESTED, "get_weather": CITY}.get(name, {}).get("properties", {}))
        if name == "n":
            assert isinstance(value["a"]["n"], int | float)
        if name == "get_weather":
            assert value["city"] in ("Paris", "Rome")
