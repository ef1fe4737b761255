"""Text to content and calls: each format's own form, near misses, and every way to cut the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.api.tools.formats import FORMATS
from enginehouse.api.tools.json_scan import JsonScan
from enginehouse.api.tools.parsing import (
    CallArguments,
    CallStart,
    ContentPiece,
    ForcedCallParser,
    new_call_id,
    parse_output,
)
from tests.unit.tools.reading import (
    all_events,
    calls_of,
    check_order,
    counted_ids,
    free_parser,
    joined,
    pieces_of,
)

WEATHER = ("get_weather", '{"city": "Paris"}')
EMPTY = ("f", "{}")

HERMES_1 = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_2 = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
LLAMA_1 = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA_2 = '{"name": "f", "parameters": {}}'
MISTRAL_1 = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
MISTRAL_2 = '{"name": "f", "arguments": {}}'

GOOD: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", HERMES_1, "", [WEATHER]),
    ("hermes", f"{HERMES_1}\n{HERMES_2}", "", [WEATHER, EMPTY]),
    ("hermes", f"Let me see.\n\n{HERMES_1}\n", "Let me see.", [WEATHER]),
    ("hermes", f"a <b\n{HERMES_1} and\n{HERMES_2} end ", "a <b and end ", [WEATHER, EMPTY]),
    ("hermes", HERMES_1.replace("\n", ""), "", [WEATHER]),
    ("hermes", HERMES_1.removesuffix("\n</tool_call>"), "", [WEATHER]),
    ("hermes", HERMES_1.removesuffix("call>"), "\n</tool_", [WEATHER]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]</tool_call>', "", [EMPTY] * 2),
    ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>\\"}"}, "name": "f"}</tool_call>', "", [("f", '{"a": "</tool_call>\\"}"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\n "a":1 }}</tool_call>', "", [("f", '{\n "a":1 }')]),
    ("hermes", f"<tool_call> no <tool_call>{{ <tool_call>\n{HERMES_2}", "<tool_call> no <tool_call>{ <tool_call>", [EMPTY]),
    ("generic", HERMES_1, "", [WEATHER]),
    ("llama3", LLAMA_1, "", [WEATHER]),
    ("llama3", f"\n\n{LLAMA_1}", "", [WEATHER]),
    ("llama3", f"<|python_tag|>{LLAMA_1}", "", [WEATHER]),
    ("llama3", f"{LLAMA_1}; {LLAMA_2}", "", [WEATHER, EMPTY]),
    ("llama3", f"{LLAMA_1}\n{LLAMA_2}\n", "", [WEATHER, EMPTY]),
    ("llama3", f"{LLAMA_1}; done", "; done", [WEATHER]),
    ("llama3", f"Well: <|python_tag|>{LLAMA_2}", "Well:", [EMPTY]),
    ("llama3", '{"name": "f", "arguments": {}}', "", [EMPTY]),
    ("mistral", f"[TOOL_CALLS][{MISTRAL_1}, {MISTRAL_2}]", "", [WEATHER, EMPTY]),
    ("mistral", f"[TOOL_CALLS] [{MISTRAL_1}]", "", [WEATHER]),
    ("mistral", f"Sure. [TOOL_CALLS]{MISTRAL_1}", "Sure.", [WEATHER]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "", [EMPTY]),
]  # fmt: skip

NO_CALLS: list[tuple[str, str]] = [
    (name, text)
    for name in FORMATS
    for text in (
        "", " ", "hello", " hello\n\n ", "a < b", "<tool_call>", "<tool_cal", "<tool_call>\n", "x\n<tool_call> ",
        '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', '<tool_call>[]</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}', "<tool_call>{{}}</tool_call>", "<tool_call>f()</tool_call>",
        '<tool_call>[{"name": "f", "arguments": {}}, 5]</tool_call>', "</tool_call>", "; {", "{", '{"a": 1}',
        '{"name": "Bob", "parameters": {}}', 'I say {"name": "f", "parameters": {}}', "<|python_tag|>print(1)",
        "[TOOL_CALLS]", "[TOOL_CALLS]f", '[TOOL_CALLS][{"name": "f"}]', "[TOOL", '{"name": "f", "parameters": {', "]}",
        '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', "[" * 3000, "<tool_call>" + "[" * 3000 + "]" * 3000,
    )
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    parsed = parse_output(free_parser(name), text)
    assert (parsed.content, calls_of(parsed)) == (content, calls)
    assert [call.id for call in parsed.calls] == [f"call_{index}" for index in range(len(calls))]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(name: str, text: str) -> None:
    parser = free_parser(name)
    assert parse_output(parser, text).content == text
    assert (parser.num_calls, parser.num_decided) == (0, len(text))


@pytest.mark.parametrize(("name", "text"), [*((name, text) for name, text, _, _ in GOOD), *NO_CALLS])
def test_single_characters_give_what_the_whole_gives(name: str, text: str) -> None:
    parser = free_parser(name)
    events = all_events(parser, text)
    check_order(events, text)
    assert joined(events) == parse_output(free_parser(name), text)
    assert parser.num_decided == len(text)


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "\n", " ", ";", ", ", "[", "]", "{", "}", '"',
     "\\", '\\"', "{}", '"name": ', '"f"', '"get_weather"', '"arguments": ', '"parameters": ', "hello", "é", "1", ":",
     HERMES_1, HERMES_2, LLAMA_1, LLAMA_2, f"[{MISTRAL_1}]", MISTRAL_2, "<tool", "[TOOL", "<", '"</tool_call>"', "👋"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)


@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.lists(st.integers(0, 400), max_size=30), st.booleans())
def test_pieces_never_change_what_comes_out(name: str, text: str, cuts: list[int], parallel: bool) -> None:
    whole = parse_output(free_parser(name, parallel=parallel), text)
    parser = free_parser(name, parallel=parallel)
    events = all_events(parser, pieces_of(text, cuts))
    check_order(events, text)
    assert joined(events) == whole
    assert (parser.num_calls, parser.num_decided) == (len(whole.calls), len(text))
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not parallel:
        assert len(whole.calls) <= 1


@given(st.sampled_from(sorted(FORMATS)), TEXTS)
def test_nothing_but_white_space_and_calls_is_taken_from_content(name: str, text: str) -> None:
    """Content, in order, is part of the text, and with no function to call it is all of it."""
    remaining = iter(text)
    content = parse_output(free_parser(name), text).content
    assert all(char in remaining for char in content)
    assert parse_output(free_parser(name, names=()), text).content == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["</tool_call>", '}"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)


@given(
    st.sampled_from(sorted(FORMATS)), st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans(), st.data()
)
def test_what_a_format_writes_is_read_back(
    name: str, arguments: list[dict[str, Any]], ascii_only: bool, data: st.DataObject
) -> None:
    fmt = FORMATS[name]
    texts = [json.dumps(value, ensure_ascii=ascii_only) for value in arguments]
    calls = [f"{fmt.before_name}f{fmt.before_arguments}{text}{fmt.after_arguments}" for text in texts]
    marker = fmt.marker if fmt.opening_is_marker else ""
    whole = marker + fmt.opening + fmt.separator.join(calls) + fmt.closing
    expected = [("f", text) for text in texts]
    assert calls_of(parse_output(free_parser(name), whole)) == expected
    forced = ForcedCallParser(fmt, new_id=counted_ids())
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=20))
    events = all_events(forced, pieces_of(whole, cuts))
    check_order(events, whole)
    assert calls_of(joined(events)) == expected
    cut = data.draw(st.integers(0, len(whole)))
    part = parse_output(ForcedCallParser(fmt, new_id=counted_ids()), whole[:cut])
    assert part.content == ""
    for (_, got), full in zip(calls_of(part), texts, strict=False):
        assert full.startswith(got)
    assert all(got == full for (_, got), full in zip(calls_of(part)[:-1], texts, strict=False))


def test_content_before_a_call_is_not_held_back() -> None:
    parser = free_parser("hermes")
    assert parser.feed("Let me ") == [ContentPiece("Let me", 0)]
    assert parser.feed("see <") == [ContentPiece(" see", 6)]
    assert parser.feed("b") == [ContentPiece(" <b", 10)]
    assert parser.feed("\n\n<tool_") == []
    assert parser.feed(HERMES_1.removeprefix("<tool_")) == [
        CallStart(0, "call_0", "get_weather"),
        CallArguments(0, '{"city": "Paris"}'),
    ]
    assert parser.feed("\n") == []
    assert parser.finish() == []


def test_forced_arguments_are_passed_on_as_they_come() -> None:
    parser = ForcedCallParser(FORMATS["hermes"], new_id=counted_ids())
    assert parser.feed('<tool_call>\n{"name": "f') == []
    assert parser.feed('", "arguments": ') == [CallStart(0, "call_0", "f")]
    assert parser.feed('{"a": "') == [CallArguments(0, '{"a": "')]
    assert parser.feed('}"}}\n</to') == [CallArguments(0, '}"}')]


def test_ids() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(call_id.startswith("call_") and call_id.removeprefix("call_").isalnum() for call_id in ids)


@given(
    VALUES.filter(lambda value: isinstance(value, dict | list)),
    st.text(max_size=5),
    st.lists(st.integers(0, 99)),
)
def test_scan_finds_the_end_of_any_value(value: Any, rest: str, cuts: list[int]) -> None:
    text = json.dumps(value)
    scan, seen = JsonScan(), 0
    for piece in pieces_of(text + rest, cuts):
        end = scan.push(piece)
        if end is not None:
            assert seen + end == len(text)
            return
        seen += len(piece)
    raise AssertionError("the end was not found")
