"""Whatever somebody sends as a grammar: a verdict, never another exception, and the process lives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_check import GrammarChecker
from enginehouse.errors import InvalidRequestError

KEYWORDS = (
    "type", "properties", "required", "items", "anyOf", "allOf", "oneOf", "$ref", "$defs", "enum", "const", "pattern",
    "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf", "additionalProperties",
    "patternProperties", "prefixItems", "format", "not", "if", "x-guidance", "$id", "$anchor", "minProperties",
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["object", "array", "string", "integer", "number", "null", "#", "#/$defs/a", "#/properties/a"])
    | st.sampled_from(["[a-z]{3", "(a|b)*", "^a$", "\\", "date", "email", "uuid", "a", ""])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(KEYWORDS) | st.sampled_from(["a", "b"]), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip
LARK = st.lists(
    st.sampled_from([
        "start", ":", "a", "B", '"x"', "/y+/", "|", "(", ")", "*", "+", "?", "~3", "{2,5}", "\n", " ", "%json", "{}",
        "%regex", "%llguidance", "%ignore", "%import common.INT", "[", "]", "<|x|>", "<[1]>", "&", "~", "->", "[capture]",
        "@a", "start: a", 'a: "b"', "B: /c/", "\u0000", "é",
    ]),
    max_size=30,
).map("".join)  # fmt: skip


def test_anything_gets_a_verdict() -> None:
    checker = GrammarChecker()

    async def judge(grammar: Grammar) -> None:
        try:
            await checker.check(grammar)
        except InvalidRequestError as error:
            assert len(str(error)) < 500  # noqa: PT017

    with asyncio.Runner() as runner:

        @given(schema=VALUES)
        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        def schemas(schema: Any) -> None:
            runner.run(judge(Grammar(kind="json_schema", text=json.dumps(schema))))

        @given(text=LARK)
        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        def larks(text: str) -> None:
            runner.run(judge(Grammar(kind="lark", text=text)))

        @given(
            text=st.text(
                st.sampled_from("ab()[]{}|*+?^$.\\-,123dwspLN:=!<>& \n\u0000é"), min_size=1, max_size=25
            )
        )
        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        def regexes(text: str) -> None:
            runner.run(judge(Grammar(kind="regex", text=text)))

        schemas()
        larks()
        regexes()
