"""Tools and formats in Anthropic's messages and in OpenAI's responses: forced by grammar, found in free text, in
histories; streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.conftest import tiny_overrides
from tests.http.scripted_engine import ScriptedEngine, finished, started, token
from tests.http.serving import Server, sse_events
from tests.http.test_errors import check_error as check_openai_error
from tests.http.test_messages import check_error, comparable, rebuilt
from tests.http.test_responses import checked
from tests.http.test_responses import comparable as comparable_response
from tests.http.test_states_and_failures import app_of, running
from tests.support.tiny_models import write_tiny_llama

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
}
ANTHROPIC: dict[str, Any] = {
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [
        {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
    ],
    "seed": 3,
}
OPENAI: dict[str, Any] = {
    "max_output_tokens": 200,
    "input": "hi",
    "tools": [
        {"type": "function", "name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
        {"type": "function", "name": "now"},
    ],
    "seed": 3,
}
CALLED = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "c"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model with room for the explanation of tools."""
    directory = tmp_path_factory.mktemp("tools")
    model = write_tiny_llama(directory / "model", max_context=2048)
    options = {**tiny_overrides(directory), "model.source": str(model)}
    roomy = Server(options, directory / "log").start()
    try:
        yield roomy.wait_ready()
    finally:
        roomy.stop()


def check_arguments(name: str, arguments: Any) -> None:
    if name == "now":
        assert arguments == {}
    else:
        assert name == "get_weather"
        assert set(arguments) == {"city", "unit"}
        assert len(arguments["city"]) <= 12
        assert arguments["unit"] in ("c", "f")


# Anthropic ---------------------------------------------------------------------------------------------------------


def ask_both(server: Server, **fields: Any) -> dict[str, Any]:
    """The message, the same streamed and not."""
    body = {**ANTHROPIC, **fields}
    whole = server.post(MESSAGES, body)
    assert whole.status_code == 200, whole.text
    streamed = server.post(MESSAGES, {**body, "stream": True})
    shown: dict[str, Any] = whole.json()
    assert comparable(rebuilt(sse_events(streamed.text))) == comparable(shown)
    return shown


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"get_weather", "now"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "now"}),
        ({"type": "tool", "name": "get_weather"}, {"get_weather"}),
    ],
)
def test_messages_forced(server: Server, choice: dict[str, Any], names: set[str], seed: int) -> None:
    shown = ask_both(server, tool_choice=choice, seed=seed)
    calls = shown["content"]
    if shown["stop_reason"] == "max_tokens":
        calls = calls[:-1]
    else:
        assert shown["stop_reason"] == "tool_use"
        assert calls
    for block in calls:
        assert set(block) == {"type", "id", "name", "input"}
        assert block["type"] == "tool_use"
        assert block["id"].startswith("toolu_")
        assert block["name"] in names
        check_arguments(block["name"], block["input"])
    if choice != {"type": "any"}:
        assert len(shown["content"]) == 1


def test_messages_call_cut_short(server: Server) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    whole = ask_both(server, tool_choice=choice)
    (call,) = whole["content"]
    tokens = whole["usage"]["output_tokens"]
    inputs = []
    for max_tokens in range(tokens - 34, tokens, 4):
        cut = ask_both(server, tool_choice=choice, max_tokens=max_tokens)
        assert cut["stop_reason"] == "max_tokens"
        inputs += [block["input"] for block in cut["content"]]
    assert {} in inputs
    assert all(arguments in ({}, call["input"]) for arguments in inputs)


def test_messages_without_choice(server: Server) -> None:
    """Tools are explained to the model unless the choice is none."""
    plain = {name: value for name, value in ANTHROPIC.items() if name != "tools"} | {"max_tokens": 5}
    assert (
        ask_both(server, max_tokens=5, tool_choice={"type": "none"})["usage"]
        == (server.post(MESSAGES, plain).json()["usage"])
    )
    usage = ask_both(server, max_tokens=5)["usage"]
    counted = server.post(f"{MESSAGES}/count_tokens", ANTHROPIC).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    assert counted > server.post(f"{MESSAGES}/count_tokens", plain).json()["input_tokens"] + 50


def test_history_is_chats(server: Server) -> None:
    """Calls and results are the prompt that OpenAI's routes make of them."""
    chat = {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}},
                    {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "noon"},
            {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "user", "content": "and?"},
        ],
        "max_tokens": 6,
        "seed": 1,
    }
    anthropic = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "a", "name": "now", "input": {}},
                {"type": "tool_use", "id": "b", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "noon"}]},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                {"type": "text", "text": "an"},
                {"type": "text", "text": "d?"},
            ],
        },
    ]
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "a", "name": "now", "arguments": ""},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": '{"x":1}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
        {"type": "function_call_output", "call_id": "b", "output": ""},
        {"role": "user", "content": "and?"},
    ]
    expected = server.post(CHAT, chat).json()
    text = expected["choices"][0]["message"]["content"]
    message = server.post(MESSAGES, {"messages": anthropic, "max_tokens": 6, "seed": 1}).json()
    assert "".join(block["text"] for block in message["content"]) == text
    response = server.post(RESPONSES, {"input": items, "max_output_tokens": 6, "seed": 1}).json()
    assert response["output"][0]["content"][0]["text"] == text
    tokens = server.post("/tokenize", {"messages": chat["messages"]}).json()
    assert tokens["count"] == expected["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens"] == tokens["count"]


def test_tokenize_with_tools(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "the time"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    chat = server.post(CHAT, {**body, "max_tokens": 1}).json()
    assert server.post("/tokenize", body).json()["count"] == chat["usage"]["prompt_tokens"]
    assert "the time" in server.post("/apply-template", body).json()["prompt"]


@pytest.mark.parametrize("num_chars", [1, 3, 1000])
async def test_messages_find_calls_in_free_text(num_chars: int) -> None:
    pieces = [CALLED[start : start + num_chars] for start in range(0, len(CALLED), num_chars)]
    engine = ScriptedEngine(started(), *map(token, pieces), finished(9))
    async with running(app_of(engine)) as client:
        streamed = await client.post(MESSAGES, json={**ANTHROPIC, "stream": True})
        whole = (await client.post(MESSAGES, json=ANTHROPIC)).json()
    assert comparable(rebuilt(sse_events(streamed.text))) == comparable(whole)
    text, call = whole["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Rome", "unit": "c"})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [], "output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema"),
        ({"tools": [], "output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]}]}, "'image'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, {"role": "user", "content": "x"}]}, "input"),
    ],
)  # fmt: skip
def test_messages_refusals(server: Server, fields: dict[str, Any], said: str) -> None:
    check_error(server.post(MESSAGES, {**ANTHROPIC, **fields}), 400, "invalid_request_error", said)


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_a_given_form(server: Server, seed: int) -> None:
    form = {"type": "json_schema", "schema": {**PARAMETERS, "additionalProperties": False}}
    shown = ask_both(server, tools=None, output_config={"format": form}, seed=seed)
    if shown["stop_reason"] == "end_turn":
        check_arguments("get_weather", json.loads(shown["content"][0]["text"]))
    else:
        assert shown["content"][0]["text"].startswith("{")


@pytest.mark.parametrize("seed", range(4))
def test_calls_or_answers_of_a_given_form(server: Server, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    shown = ask_both(server, output_config={"format": {"type": "json_schema", "schema": schema}}, seed=seed)
    if shown["stop_reason"] == "end_turn":
        assert set(json.loads(shown["content"][0]["text"])) == {"sure"}
    elif shown["stop_reason"] == "tool_use":
        for block in shown["content"]:
            check_arguments(block["name"], block["input"])
    form = {"type": "json_schema", "name": "n", "schema": schema}
    response = respond_both(server, text={"format": form}, seed=seed)
    for item in response["output"] if response["status"] == "completed" else ():
        if item["type"] == "message":
            assert set(json.loads(item["content"][0]["text"])) == {"sure"}
        else:
            check_arguments(item["name"], json.loads(item["arguments"]))


# Responses ---------------------------------------------------------------------------------------------------------


def respond_both(server: Server, **fields: Any) -> dict[str, Any]:
    body = {**OPENAI, **fields}
    whole = server.post(RESPONSES, body)
    assert whole.status_code == 200, whole.text
    streamed = server.post(RESPONSES, {**body, "stream": True})
    final = checked([data for _, data in sse_events(streamed.text)])
    shown: dict[str, Any] = whole.json()
    assert comparable_response(final) == comparable_response(shown)
    return shown


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "name": "get_weather"}, {"get_weather"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, {"now"}),
    ],
)  # fmt: skip
def test_responses_forced(server: Server, choice: Any, names: set[str], seed: int) -> None:
    shown = respond_both(server, tool_choice=choice, seed=seed)
    assert shown["tool_choice"] == choice
    assert shown["output"]
    for item in shown["output"]:
        assert set(item) == {"id", "type", "call_id", "name", "arguments", "status"}
        assert item["type"] == "function_call"
        assert item["id"].startswith("fc_")
        assert item["name"] in names
        if item["status"] == "completed":
            check_arguments(item["name"], json.loads(item["arguments"]))
        else:
            assert shown["status"] == "incomplete"


def test_responses_one_call_only(server: Server) -> None:
    for seed in range(5):
        shown = respond_both(server, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert len(shown["output"]) == 1
        assert shown["parallel_tool_calls"] is False


def test_responses_continued_after_a_call(server: Server) -> None:
    choice = {"type": "function", "name": "get_weather"}
    first = respond_both(server, tool_choice=choice)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = server.post(RESPONSES, {**OPENAI, "input": [result], "previous_response_id": first["id"]}).json()
    turns = [{"role": "user", "content": OPENAI["input"]}, call, result]
    whole = server.post(RESPONSES, {**OPENAI, "input": turns}).json()
    assert comparable_response(whole)["output"] == comparable_response(second)["output"]
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"]


@pytest.mark.parametrize("num_chars", [1, 3, 1000])
async def test_responses_find_calls_in_free_text(num_chars: int) -> None:
    pieces = [CALLED[start : start + num_chars] for start in range(0, len(CALLED), num_chars)]
    engine = ScriptedEngine(started(), *map(token, pieces), finished(9))
    async with running(app_of(engine)) as client:
        streamed = await client.post(RESPONSES, json={**OPENAI, "stream": True})
        whole = (await client.post(RESPONSES, json=OPENAI)).json()
    final = checked([data for _, data in sse_events(streamed.text)])
    assert comparable_response(final) == comparable_response(whole)
    message, call = whole["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert json.loads(call["arguments"]) == {"city": "Rome", "unit": "c"}
    assert whole["status"] == "completed"


@pytest.mark.parametrize("seed", range(3))
def test_responses_of_a_given_form(server: Server, seed: int) -> None:
    form = {
        "type": "json_schema",
        "name": "weather",
        "schema": {**PARAMETERS, "additionalProperties": False},
        "strict": True,
    }
    shown = respond_both(server, tools=None, text={"format": form}, seed=seed)
    assert shown["text"]["format"] == form
    if shown["status"] == "completed":
        check_arguments("get_weather", json.loads(shown["output"][0]["content"][0]["text"]))
    loose = respond_both(server, tools=None, text={"format": {"type": "json_object"}}, seed=seed)
    text = loose["output"][0]["content"][0]["text"]
    assert text.startswith("{")
    if loose["status"] == "completed":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format.schema"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    ],
)  # fmt: skip
def test_responses_refusals(server: Server, fields: dict[str, Any], param: str) -> None:
    check_openai_error(server.post(RESPONSES, {**OPENAI, **fields, "stream": True}), 400, param)
