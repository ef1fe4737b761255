"""Structured output through the API: every field that asks for a form, streamed and not, and every refusal."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx2
import pytest

from tests.http.serving import Server, sse_frames
from tests.http.test_errors import check_error
from tests.support.json_schemas import satisfies

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 99999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}


def body(route: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    return {**prompt, "max_tokens": 200, "seed": 3, **fields}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


JSON_FIELDS: list[dict[str, Any]] = [
    {"response_format": NAMED},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a-1_B", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_any_whitespace": False}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
]
TEXT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
    ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"structured_outputs": {"grammar": 'start: "x" Y\nY: /[yz]{2}/'}}, "x[yz]{2}"),
    ({"guided_grammar": 'start: "x" Y\nY: /[yz]{2}/'}, "x[yz]{2}"),
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", JSON_FIELDS)
def test_schemas(server: Server, route: str, fields: dict[str, Any]) -> None:
    answer = server.post(route, body(route, n=3, **fields)).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert satisfies(json.loads(text_of(choice)), SCHEMA)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "pattern"), TEXT_FIELDS)
def test_other_forms(server: Server, route: str, fields: dict[str, Any], pattern: str) -> None:
    choice = server.post(route, body(route, **fields)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, text_of(choice))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_object(server: Server, fields: dict[str, Any]) -> None:
    for seed in range(6):
        choice = server.post(CHAT, body(CHAT, **{**fields, "seed": seed, "max_tokens": 300})).json()[
            "choices"
        ][0]
        assert text_of(choice).startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(choice)), dict)


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_is_free(server: Server, value: Any) -> None:
    free = server.post(CHAT, body(CHAT, max_tokens=8)).json()["choices"]
    assert server.post(CHAT, body(CHAT, max_tokens=8, response_format=value)).json()["choices"] == free


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("max_tokens", [6, 200])
def test_streamed_equals_unstreamed(server: Server, route: str, max_tokens: int) -> None:
    asked = body(route, response_format=NAMED, n=2, max_tokens=max_tokens)
    whole = server.post(route, asked).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    frames = sse_frames(server.post(route, {**asked, **options}).text)
    texts, reasons = ["", ""], ["", ""]
    for choice in (choice for frame in frames for choice in frame["choices"]):
        piece = choice["delta"].get("content") if route == CHAT else choice["text"]
        texts[choice["index"]] += piece or ""
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [text_of(choice) for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert frames[-1]["usage"] == whole["usage"] or max_tokens == 200  # the second time the prompt is cached
    assert frames[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if max_tokens == 6:
        assert reasons == ["length", "length"]


async def test_a_crowd_of_different_grammars(server: Server) -> None:
    async with httpx2.AsyncClient(timeout=60) as client:

        async def ask(number: int) -> None:
            pattern = f"{number}:[a-z]{{{number + 1}}}"
            answer = await client.post(
                server.url + CHAT, json=body(CHAT, guided_regex=pattern, seed=number, temperature=number % 2)
            )
            assert re.fullmatch(pattern, text_of(answer.json()["choices"][0]))

        await asyncio.gather(*(ask(number) for number in range(24)))


def wrapped(**json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **json_schema}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    (wrapped(name=""), "response_format.json_schema.name"),
    (wrapped(name="a b"), "response_format.json_schema.name"),
    (wrapped(name="a" * 65), "response_format.json_schema.name"),
    (wrapped(strict="yes"), "response_format.json_schema.strict"),
    (wrapped(description=5), "response_format.json_schema.description"),
    (wrapped(schema=[]), "response_format.json_schema.schema"),
    (wrapped(schema={"type": "objet"}), "response_format.json_schema.schema"),
    (wrapped(schema={"type": "integer", "minimum": 2, "maximum": 1}), "response_format.json_schema.schema"),
    (wrapped(schema={"enum": []}), "response_format.json_schema.schema"),
    (wrapped(schema=False), "response_format.json_schema.schema"),
    (wrapped(schema={"$ref": "#"}), "response_format.json_schema.schema"),
    (wrapped(schema={"$ref": "#/$defs/no"}), "response_format.json_schema.schema"),
    (wrapped(schema={"not": {"type": "string"}}), "response_format.json_schema.schema"),
    (wrapped(schema={"description": "x" * 140_000}), "response_format.json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: other"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <|im_end|>"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <[2]>"}}, "structured_outputs.grammar"),
    ({"guided_json": {"type": "objet"}}, "guided_json"),
    ({"guided_regex": "a{2"}, "guided_regex"),
    ({"guided_choice": ["\ud800"]}, "guided_choice"),
    ({"guided_grammar": "?"}, "guided_grammar"),
    ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_by_name(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    content = json.dumps(body(CHAT, stream=stream, **fields))
    headers = {"content-type": "application/json"}
    answer = httpx2.post(server.url + CHAT, content=content, headers=headers, timeout=60)
    if "\\ud800" in content:
        check_error(answer, 400, answer.json()["error"]["param"])
        return
    assert param.rpartition(".")[2] in check_error(answer, 400, param)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_default_model_fills_a_schema(default_server: Server, temperature: float) -> None:
    messages = [
        {"role": "user", "content": "Which city is the capital of France, and how many people live there?"}
    ]
    asked = {"messages": messages, "response_format": NAMED, "temperature": temperature, "seed": 1}
    choice = default_server.post(CHAT, asked).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert satisfies(json.loads(text_of(choice)), SCHEMA)
