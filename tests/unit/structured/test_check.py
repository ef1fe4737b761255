"""The checker: verdicts, their cache, and threads that survive deep grammars."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from enginehouse.engine import structured_output_check
from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_check import GrammarChecker
from enginehouse.engine.structured_output_compile import (
    STACK_BYTES,
    GrammarError,
    bounded_json_schema,
    compile_grammar,
    large_stack_thread,
    without_special_tokens,
)
from enginehouse.errors import InvalidRequestError


async def verdict(checker: GrammarChecker, grammar: Grammar) -> str | None:
    try:
        await checker.check(grammar)
    except InvalidRequestError as error:
        return str(error) if error.param == grammar.param else f"names {error.param}"
    return None


async def test_each_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counting(grammar: Grammar, tokenizer: object) -> object:
        compiled.append(grammar.text)
        return compile_grammar(grammar, tokenizer)  # type: ignore[arg-type]

    monkeypatch.setattr(structured_output_check, "compile_grammar", counting)
    checker = GrammarChecker()
    good, bad = Grammar(kind="regex", text="a+"), Grammar(kind="regex", text="(a", param="guided_regex")
    first = await asyncio.gather(*(verdict(checker, grammar) for grammar in (good, bad) * 5))
    again = [await verdict(checker, good), await verdict(checker, bad)]
    assert sorted(compiled) == ["(a", "a+"]
    assert first[:2] == again
    assert again[0] is None
    assert (again[1] or "").startswith("guided_regex: ")


async def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output_check, "MAX_VERDICTS", 3)
    checker = GrammarChecker()
    for number in range(10):
        assert await verdict(checker, Grammar(kind="regex", text=f"a{number}")) is None
    assert len(checker._verdicts) == 3


async def test_kind_and_special_tokens_are_part_of_the_key() -> None:
    checker = GrammarChecker()
    assert await verdict(checker, Grammar(kind="regex", text='{"type":"string"}')) is not None
    assert await verdict(checker, Grammar(kind="json_schema", text='{"type":"string"}')) is None
    named = Grammar(kind="lark", text='start: <[300]> "a"', special_tokens=(300,))
    assert await verdict(checker, named) is None
    assert await verdict(checker, Grammar(kind="lark", text=named.text)) is not None


async def test_the_event_loop_goes_on() -> None:
    checker = GrammarChecker()
    slow = Grammar(kind="regex", text="((a{50}){50}){50}")
    ticks = 0
    check = asyncio.create_task(checker.check(slow))
    while not check.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 10


def test_only_the_thread_has_the_large_stack() -> None:
    usual = threading.stack_size()
    executor = large_stack_thread("deep")
    assert threading.stack_size() == usual
    assert STACK_BYTES > 2**20
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + '\nr6000: "a"'
    tokenizer = structured_output_check._byte_tokenizer()
    grammar = Grammar(kind="lark", text=chain)
    matcher = executor.submit(compile_grammar, grammar, tokenizer).result()
    assert matcher.consume_token(ord("a"))
    executor.shutdown()


@pytest.mark.parametrize(
    ("text", "fits"), [('{"a":1}', True), ('{ "a" : 1 }', True), ('{  "a":1}', False), ('{\n"a":1}', False)]
)
def test_white_space_in_json_is_bounded(text: str, fits: bool) -> None:
    tokenizer = structured_output_check._byte_tokenizer()
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}

    for grammar in (
        Grammar(kind="json_schema", text=json.dumps(schema)),
        Grammar(
            kind="json_schema", text=json.dumps({**schema, "x-guidance": {"whitespace_pattern": "\\s*"}})
        ),
        Grammar(kind="lark", text=f"start: %json {json.dumps(bounded_json_schema(schema))}"),
    ):
        matcher = compile_grammar(grammar, tokenizer)
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text)) == fits


@pytest.mark.parametrize("character", list("\\.+*?()|[]{}^$#&-~/\"'\n\t é🎉@:=!<>,"))
def test_choices_are_literal(character: str) -> None:

    tokenizer = structured_output_check._byte_tokenizer()
    choice = f"a{character}b"
    matcher = compile_grammar(Grammar(kind="choice", text=json.dumps([choice, "x"])), tokenizer)
    assert matcher.try_consume_tokens(list(choice.encode())) == len(choice.encode())
    assert matcher.is_stopped()
    other = compile_grammar(Grammar(kind="choice", text=json.dumps([choice, "x"])), tokenizer)
    assert other.try_consume_tokens(list(b"aab")) < 3


def test_errors_are_short() -> None:
    tokenizer = structured_output_check._byte_tokenizer()
    with pytest.raises(GrammarError) as error:
        compile_grammar(Grammar(kind="regex", text="[" * 5000), tokenizer)
    assert len(str(error.value)) < 400


def test_special_tokens_get_a_stand_in() -> None:
    plain = Grammar(kind="lark", text='start: "a"')
    assert without_special_tokens(plain) is plain
    named = without_special_tokens(Grammar(kind="lark", text='start: <[7]> "a"', special_tokens=(7,)))
    assert "<[" not in named.text
    assert named.special_tokens == ()
