"""How llguidance understands a `Grammar`, with bounds on what a hostile one can cost.

llguidance is imported when the first grammar arrives, not before. Its compiler recurses over the grammar: it must
only be called in a thread of `large_stack_thread`, where a chain of ten thousand rules is an error and no crash.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_finite import can_end

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK_BYTES: Final = 256 << 20
"""Address space, touched only as far as a grammar needs it."""
_MAX_MESSAGE_CHARS: Final = 300
_JSON_OPTIONS: Final[dict[str, Any]] = {
    # At most one space between two tokens of JSON: enough for the forms that models have seen most, and no room
    # to go on with white space for ever.
    "whitespace_pattern": "[ ]?",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
_BOOLEAN_SCHEMAS: Final = {"true": "{}", "false": '{"enum":[]}'}
_LARK_LITERAL: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
_LARK_TOKEN: Final = re.compile(r"<\[([^\]]*)")
_SCHEMA_IN_LARK: Final = "failed to compile JSON schema: "
_ECHO: Final = re.compile(r"\n\s*\d+ \| ")
_STAND_IN: Final = "special_token_stand_in"
_REGEX_SYNTAX: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


class GrammarError(Exception):
    """A grammar that is malformed, too costly, or that nothing can satisfy; the text says what is wrong."""


def large_stack_thread(name: str) -> ThreadPoolExecutor:
    """An executor of one thread with `STACK_BYTES` of stack."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    usual_bytes = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()  # the thread is made for the first job
    finally:
        threading.stack_size(usual_bytes)
    return executor


def bounded_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` as it must stand behind `%json` in a Lark grammar of ours, so that white space is bounded."""
    return {**schema, "x-guidance": _JSON_OPTIONS}


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher in its initial state, which allows at least one token.

    Takes milliseconds for real schemas, and at most a few seconds. Raises `GrammarError`.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=_limits())
    can_begin = not matcher.is_error() and _can_begin(matcher, tokenizer.eos_token)
    if matcher.is_error():
        raise GrammarError(_first_lines(matcher.get_error()))
    if not can_begin:
        raise GrammarError("no text satisfies it")
    return matcher


def _can_begin(matcher: LLMatcher, eos_token: int) -> bool:
    """Whether any token but the end may come first."""
    mask = bytearray(matcher.compute_bitmask())
    mask[eos_token // 8] &= ~(1 << eos_token % 8)
    return any(mask) and not matcher.is_stopped()


def _definition(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind in ("json_schema", "json_object"):
        text = _BOOLEAN_SCHEMAS.get(grammar.text, grammar.text)
        text = text if grammar.kind == "json_schema" else '{"type":"object"}'
        try:
            if not can_end(msgspec.json.decode(text)):
                raise GrammarError("the schema must contain itself for ever")
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise GrammarError(_first_lines(str(error))) from None
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_regex(_alternatives(grammar.text))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(_checked_lark(grammar))


def _checked_lark(grammar: Grammar) -> str:
    named = set(_LARK_TOKEN.findall(_LARK_LITERAL.sub("", grammar.text)))
    if not named <= {str(token) for token in grammar.special_tokens}:
        raise GrammarError("token ids are not supported")
    return grammar.text


def without_special_tokens(grammar: Grammar) -> Grammar:
    """The same grammar for a vocabulary without special tokens: each is replaced by a rule of one letter."""
    if not grammar.special_tokens:
        return grammar
    text = grammar.text
    for token in grammar.special_tokens:
        text = text.replace(f"<[{token}]>", _STAND_IN)
    return msgspec.structs.replace(grammar, text=f'{text}\n{_STAND_IN}: "x"\n', special_tokens=())


def _alternatives(choices_json: str) -> str:
    try:
        choices = msgspec.json.decode(choices_json, type=list[str])
    except msgspec.MsgspecError as error:
        raise GrammarError(f"choices are no JSON list of strings: {error}") from None
    return "|".join(_REGEX_SYNTAX.sub(r"\\\g<0>", text) for text in choices)


def _limits() -> LLParserLimits:
    """Tighter than llguidance's own where a shared machine needs it."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _first_lines(message: str) -> str:
    """What a caller can use of an error: no parser state, no long echo of the grammar."""
    text = message.split("\n<", 1)[0].strip()
    if _SCHEMA_IN_LARK in text:
        # The place and the lines are those of a grammar that its reader has not written.
        text = _ECHO.split(text.split(_SCHEMA_IN_LARK, 1)[1], maxsplit=1)[0].strip()
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + " …"
