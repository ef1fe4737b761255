"""Tool calling through the API: forced calls by a model that knows nothing, free text, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from enginehouse.api.tools.formats import FORMATS
from tests.http.conftest import tiny_overrides
from tests.http.serving import Server, sse_frames
from tests.support.tiny_models import write_tiny_llama
from tests.unit.tools.templates import BY_FORMAT

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, NOW],
    "max_tokens": 160,
}


def check_call(call: dict[str, Any]) -> None:
    assert set(call) == {"id", "type", "function"}
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
        return
    assert call["function"]["name"] == "get_weather"
    assert set(arguments) <= {"city", "unit", "days"}
    assert isinstance(arguments["city"], str)
    assert len(arguments["city"]) <= 12
    assert arguments["unit"] in ("c", "f")
    assert arguments.get("days", 1) in range(1, 15)


def joined(frames: list[Any]) -> list[dict[str, Any]]:
    """Choices put together from a stream as clients do it; the shape of every delta is checked."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for chunk in frame["choices"]:
            delta = chunk["delta"]
            if chunk["index"] not in choices:
                assert delta == {"role": "assistant", "content": None, "refusal": None}
                choices[chunk["index"]] = {"content": None, "calls": [], "reason": None, "logprobs": []}
                continue
            choice = choices[chunk["index"]]
            assert choice["reason"] is None, "nothing comes after the finish reason"
            choice["reason"] = chunk["finish_reason"]
            choice["logprobs"] += chunk["logprobs"]["content"] if chunk["logprobs"] else []
            assert len(delta) == (chunk["finish_reason"] is None)
            if "content" in delta:
                choice["content"] = (choice["content"] or "") + delta["content"]
            for part in delta.get("tool_calls", []):
                if part["index"] == len(choice["calls"]):
                    assert set(part) == {"index", "id", "type", "function"}
                    assert set(part["function"]) == {"name", "arguments"}
                    choice["calls"].append({**part, "function": dict(part["function"])})
                else:
                    assert part["index"] == len(choice["calls"]) - 1
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    choice["calls"][-1]["function"]["arguments"] += part["function"]["arguments"]
    return [choices[index] for index in sorted(choices)]


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """An unstreamed choice in the shape of `joined`, without ids."""
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message.get("tool_calls") != []
    return {
        "content": message["content"],
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "reason": choice["finish_reason"],
        "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
    }


def ask(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of `body`, after checking that the stream says the same."""
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    streamed = server.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.status_code == 200, streamed.text
    frames = sse_frames(streamed.text)
    whole: list[dict[str, Any]] = answer.json()["choices"]
    got = joined(frames[:-1])
    assert [{**choice, "calls": [call["function"] for call in choice["calls"]]} for choice in got] == [
        plain(choice) for choice in whole
    ]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert frames[-1]["usage"][name] == answer.json()["usage"][name]
    return whole


def roomy_overrides(directory: Path, **more: Any) -> dict[str, Any]:
    """A tiny model in whose context the descriptions of tools leave some room."""
    model = write_tiny_llama(directory / "roomy-model", max_context=2048)
    return {**tiny_overrides(directory, **more), "model.source": str(model)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model whose template knows no tools."""
    directory: Path = tmp_path_factory.mktemp("tools")
    running = Server(roomy_overrides(directory), directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral", "generic"])
def server_of_format(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The tiny model with the template of each format; two have their marker as a special token, as Mistral has."""
    directory: Path = tmp_path_factory.mktemp(f"tools-{request.param}")
    overrides = roomy_overrides(directory)
    model = Path(overrides["model.source"])
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = BY_FORMAT[request.param]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    if request.param in ("mistral", "hermes"):
        text = (model / "tokenizer.json").read_text()
        marker = FORMATS[request.param].marker
        (model / "tokenizer.json").write_text(text.replace("<|reserved|>", marker))
    running = Server(overrides, directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_forced_calls_are_valid_whatever_the_model_likes(server_of_format: Server, choice: Any) -> None:
    finished = 0
    for seed in range(6):
        body = {**BODY, "tool_choice": choice, "seed": seed, "n": 4, "parallel_tool_calls": False}
        for got in ask(server_of_format, body):
            message, calls = got["message"], got["message"].get("tool_calls", [])
            assert message["content"] is None
            if got["finish_reason"] == "length":
                continue
            finished += 1
            assert got["finish_reason"] == "tool_calls"
            assert len(calls) == 1
            check_call(calls[0])
            if choice is NAMED:
                assert calls[0]["function"]["name"] == "get_weather"
    assert finished >= 12


def test_several_forced_calls(server_of_format: Server) -> None:
    numbers = set()
    for seed in range(5):
        body = {**BODY, "tools": [NOW], "tool_choice": "required", "seed": seed, "n": 4, "max_tokens": 400}
        for got in ask(server_of_format, body):
            calls = got["message"]["tool_calls"]
            numbers.add(len(calls))
            assert len({call["id"] for call in calls}) == len(calls)
            if got["finish_reason"] == "tool_calls":
                for call in calls:
                    check_call(call)
    assert max(numbers) > 1
    assert max(numbers) <= 8


def test_forced_call_goes_back_into_the_conversation(server_of_format: Server) -> None:
    got = ask(
        server_of_format, {**BODY, "tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False}
    )[0]
    message = got["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
    conversation = [*BODY["messages"], message, result]
    for fields in ({}, {"tools": [NOW]}, {"tools": [NOW], "tool_choice": "none"}):
        answer = server_of_format.post(CHAT, {"messages": conversation, "max_tokens": 4, **fields})
        assert answer.status_code == 200, answer.text
    several = [{**message["tool_calls"][0], "id": call_id} for call_id in ("call_a", "call_b")]
    conversation = [*BODY["messages"], {"role": "assistant", "tool_calls": several}]
    conversation += [{**result, "tool_call_id": call_id} for call_id in ("call_a", "call_b")]
    answer = server_of_format.post(CHAT, {"messages": conversation, "max_tokens": 4})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("max_tokens", [1, 12, 40, 60])
def test_a_forced_call_that_is_cut(server: Server, max_tokens: int) -> None:
    for got in ask(server, {**BODY, "tool_choice": NAMED, "max_tokens": max_tokens, "n": 3, "seed": 5}):
        assert got["finish_reason"] == "length"
        assert got["message"]["content"] is None
        assert got["message"].get("tool_calls", []) == [] or max_tokens > 12


def test_neither_stops_nor_biases_hurt_forced_calls(server: Server) -> None:
    body = {**BODY, "tool_choice": "required", "tools": [NOW], "parallel_tool_calls": False}
    for fields in (
        {"stop": ["{", "\n", "call"]},
        {"stop_token_ids": list(range(4, 320))},
        {"ignore_eos": True},
        {"min_tokens": 100},
        {"logit_bias": {str(token): -100 for token in range(4, 320)}},
        {"repetition_penalty": 10, "frequency_penalty": 2},
    ):
        (got,) = ask(server, {**body, **fields})
        assert got["finish_reason"] == "tool_calls"
        check_call(got["message"]["tool_calls"][0])


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e", "th"]}])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_stream_equals_unstreamed(server: Server, fields: dict[str, Any], choice: str) -> None:
    for seed in range(4):
        body = {**BODY, "tool_choice": choice, "seed": seed, "n": 2, "max_tokens": 50, **fields}
        if choice == "none":
            answer = server.post(CHAT, body).json()["choices"]
            assert all(isinstance(got["message"]["content"], str) for got in answer)
            continue
        for got in ask(server, body):
            content = got["message"]["content"]
            if choice == "auto":
                assert isinstance(content, str)
            if "logprobs" in fields:
                assert "".join(entry["token"] for entry in got["logprobs"]["content"]) == (content or "")


def test_tools_that_must_not_be_called_are_not_shown(server: Server) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = server.post(CHAT, {"messages": BODY["messages"], "max_tokens": 1, **fields})
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    without = prompt_tokens()
    assert prompt_tokens(tools=[NOW], tool_choice="none") == without
    assert prompt_tokens(tools=[NOW]) > without + 50
    assert prompt_tokens(tools=[NOW, WEATHER]) > prompt_tokens(tools=[NOW])


def test_setting_wins_over_template(tmp_path: Path) -> None:
    overrides = roomy_overrides(tmp_path, model__tool_format="llama3")
    running = Server(overrides, tmp_path / "log").start()
    try:
        running.wait_ready()
        body = {
            **BODY,
            "tools": [NOW],
            "tool_choice": "required",
            "logprobs": True,
            "parallel_tool_calls": False,
        }
        answer = running.post(CHAT, body).json()
        # {"name": "now", "parameters": {}} is all there is to write, and an end token
        assert answer["usage"]["completion_tokens"] <= len('{"name": "now", "parameters": {}}') + 1
        assert answer["choices"][0]["logprobs"]["content"] == []
        check_call(answer["choices"][0]["message"]["tool_calls"][0])
    finally:
        running.stop()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [function(name=f"f{index}") for index in range(129)]}, "tools"),
        ({"tools": [function(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"properties": {"a": {"type": "word"}}})]}, "tools[0].function.parameters"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [NOW], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        (
            {"tools": [NOW, function(parameters={"properties": {"a": False}, "required": ["a"]})], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [NOW, function(parameters={"properties": {"a": {"pattern": "("}}})], "tool_choice": "required"},
            "tools",
        ),
        (
            {"tools": [function(parameters={"properties": {"a": {"type": "string", "pattern": "("}}})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = server.post(CHAT, {"messages": BODY["messages"], "stream": stream, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "call_0" not in error["message"], "the grammar is nobody's business"
    assert "failed to compile" not in error["message"]


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def with_a(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


HOSTILE: list[tuple[Any, int]] = [
    (deep_schema(60), 200), (deep_schema(300), 400), (with_a({"$ref": "#/nope"}), 400), (with_a({"$ref": "http://x/y"}), 400),
    (with_a({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"$ref": "#/$defs/x"}}}), 200),
    (with_a({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}), 200), (with_a({"type": "string", "minLength": 10**9}), 200),
    (with_a({"type": "array", "minItems": 10**6}), 200), (with_a({"minimum": 5, "maximum": 1, "type": "integer"}), 400),
    (with_a({"const": 10**40}), 200), (with_a({"type": "string", "enum": [1, 2]}), 400), ({"not": {}}, 400),
    ({"type": "object", "properties": {'a" }\nstart: "x"\n': {}}, "required": ['a" }\nstart: "x"\n']}, 200),
    (with_a({"type": "string"}, **{"x-guidance": {"whitespace_pattern": ".*"}}), 200),
    (with_a({"enum": [str(number) for number in range(20_000)]}), 400),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "status"), HOSTILE)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_hostile_schemas_hurt_nobody(server: Server, schema: Any, status: int, choice: str) -> None:
    body = {**BODY, "tools": [function(parameters=schema)], "tool_choice": choice, "max_tokens": 5}
    answer = server.post(CHAT, body)
    allowed = (status,) if choice == "required" else (200, 400)
    assert answer.status_code in allowed, answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] in ("tools[0].function.parameters", "messages")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "messages[1].content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[1].role"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(server: Server, message: Any, param: str) -> None:
    answer = server.post(CHAT, {"messages": [*BODY["messages"], message], "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x", "tool_call_id": "c"}],
        [{"role": "assistant", "content": "so", "tool_calls": [CALL]}, {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c"}],
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]}],
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "no json"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": None}],
        [{"role": "tool", "content": "a result that nobody asked for", "tool_call_id": "c"}],
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, [NOW]])
def test_histories_that_are_taken(server: Server, history: list[Any], tools: Any) -> None:
    messages = [*BODY["messages"], *history, {"role": "user", "content": "and?"}]
    answer = server.post(CHAT, {"messages": messages, "tools": tools, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_calls_and_results_reach_the_prompt(server: Server) -> None:
    def tokens(*history: Any) -> list[int]:
        answer = server.post("/apply-template", {"messages": [*BODY["messages"], *history]})
        assert answer.status_code == 200, answer.text
        return list(answer.json().get("tokens", answer.json().get("prompt")))

    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert tokens(call) != tokens()


ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ANSWER_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": True}}


def test_answers_of_a_form_or_calls(server_of_format: Server) -> None:
    kinds = set()
    for seed in range(8):
        body = {**BODY, "response_format": ANSWER_FORMAT, "parallel_tool_calls": False, "seed": seed, "n": 4}
        for got in ask(server_of_format, {**body, "tools": [NOW], "temperature": 2}):
            calls = got["message"].get("tool_calls", [])
            kinds.add(got["finish_reason"])
            if calls:
                assert got["message"]["content"] is None
                check_call(calls[0])
            else:
                assert isinstance(json.loads(got["message"]["content"])["ok"], bool)
    assert kinds <= {"stop", "tool_calls"}


def test_forms_beside_tools(server: Server) -> None:
    forced = {**BODY, "tools": [NOW], "parallel_tool_calls": False, "response_format": ANSWER_FORMAT}
    (got,) = ask(server, {**forced, "tool_choice": "required"})
    check_call(got["message"]["tool_calls"][0])
    answer = server.post(CHAT, {**forced, "tool_choice": "none"}).json()["choices"][0]["message"]
    assert set(json.loads(answer["content"])) == {"ok"}
    refused = server.post(CHAT, {**BODY, "structured_outputs": {"regex": "a+"}})
    assert refused.json()["error"]["param"] == "structured_outputs.regex"


@pytest.mark.model
def test_default_model_is_forced(default_server: Server) -> None:
    question = {"role": "user", "content": "What is the weather in Paris, in degrees Celsius?"}
    body = {"messages": [question], "tools": [WEATHER, NOW], "tool_choice": NAMED, "temperature": 0}
    (got,) = ask(default_server, body)
    (call,) = got["message"]["tool_calls"]
    check_call(call)
    assert got["finish_reason"] == "tool_calls"
    assert "Paris" in json.loads(call["function"]["arguments"])["city"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "17 degrees, rain"}
    second = {**body, "messages": [question, got["message"], result], "tool_choice": "none", "max_tokens": 40}
    answer = default_server.post(CHAT, second).json()["choices"][0]["message"]
    assert "17" in answer["content"] or "rain" in answer["content"]


@pytest.mark.model
def test_default_model_may_choose(default_server: Server) -> None:
    for content in ("What time is it? Call now.", "Say hello."):
        body = {
            "messages": [{"role": "user", "content": content}],
            "tools": [NOW],
            "temperature": 0,
            "max_tokens": 60,
        }
        (got,) = ask(default_server, body)
        for call in got["message"].get("tool_calls", []):
            check_call(call)


def test_server_is_well_after_all_that(server: Server) -> None:
    server.wait_idle()
    assert httpx2.get(f"{server.url}/health").json()["status"] == "ok"
    assert not [line for line in server.log_lines() if line["level"] == "error"]
