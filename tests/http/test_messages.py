"""Anthropic's messages: answers, events, errors, and that all of them say the same."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from enginehouse.api.app import create_app
from enginehouse.errors import DeadlineExceededError, QueueFullError, SequenceFailedError, ShuttingDownError
from enginehouse.settings import LogSettings, ModelSettings, ServerSettings, Settings
from tests.http.conftest import TINY
from tests.http.scripted_engine import ScriptedEngine, finished, started, token
from tests.http.serving import Server, sse_events
from tests.http.test_states_and_failures import app_of, running

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": TINY,
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "hello the end"}],
    "temperature": 0,
    "ignore_eos": True,
}
MESSAGE_KEYS = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
USAGE_KEYS = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
}


def message(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    assert set(shown) == MESSAGE_KEYS
    assert set(shown["usage"]) == USAGE_KEYS
    return shown


def events(server: Server, **fields: Any) -> list[tuple[str, Any]]:
    answer = server.post(PATH, {**BODY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return sse_events(answer.text)


def rebuilt(stream: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from the events, every rule of the protocol checked on the way."""
    assert all(name == data["type"] for name, data in stream)
    stream = [(name, data) for name, data in stream if name != "ping"]
    assert [name for name, _ in stream[:1]] == ["message_start"]
    assert [name for name, _ in stream[-2:]] == ["message_delta", "message_stop"]
    shown: dict[str, Any] = stream[0][1]["message"]
    assert shown["content"] == []
    assert shown["stop_reason"] is None
    pieces: list[str] = []
    for name, data in stream[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(shown["content"])
            shown["content"].append(data["content_block"])
            pieces = []
        elif name == "content_block_delta":
            assert data["index"] == len(shown["content"]) - 1
            kind = data["delta"]["type"]
            assert kind in ("text_delta", "input_json_delta")
            pieces.append(data["delta"]["text" if kind == "text_delta" else "partial_json"])
        else:
            assert (name, data["index"]) == ("content_block_stop", len(shown["content"]) - 1)
            block = shown["content"][-1]
            if block["type"] == "text":
                assert block["text"] == ""
                block["text"] = "".join(pieces)
            else:
                assert block["input"] == {}
                block["input"] = _parsed_or_empty("".join(pieces))
    ending = stream[-2][1]
    return {**shown, **ending["delta"], "usage": {**shown["usage"], **ending["usage"]}}


def _parsed_or_empty(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def comparable(shown: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next: the id, and how much of the prompt was cached. Calls
    are numbered instead of named."""
    usage = shown["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    content = [
        {**block, "id": number} if "id" in block else block for number, block in enumerate(shown["content"])
    ]
    return {**shown, "id": "", "content": content, "usage": (total, usage["output_tokens"])}


def text_of(shown: dict[str, Any]) -> str:
    return "".join(block["text"] for block in shown["content"])


def check_error(answer: httpx2.Response, status: int, kind: str, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert said in body["error"]["message"], body
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_message(server: Server) -> None:
    shown = message(server)
    assert shown["id"].startswith("msg_")
    assert (shown["type"], shown["role"], shown["model"]) == ("message", "assistant", TINY)
    assert [block["type"] for block in shown["content"]] == ["text"]
    assert (shown["stop_reason"], shown["stop_sequence"]) == ("max_tokens", None)
    assert shown["usage"]["output_tokens"] == 12


def test_the_same_as_chat(server: Server) -> None:
    """System text, blocks and history make the prompt that OpenAI's route makes."""
    shown = message(
        server,
        system=[
            {"type": "text", "text": "be "},
            {"type": "text", "text": "good", "cache_control": {"type": "x"}},
        ],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "the"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
            {"role": "user", "content": "so"},
        ],
    )
    chat = server.post(
        "/v1/chat/completions",
        {
            **{name: BODY[name] for name in ("max_tokens", "temperature", "ignore_eos")},
            "messages": [
                {"role": "system", "content": "be good"},
                {"role": "user", "content": "hello the"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "so"},
            ],
        },
    ).json()
    assert text_of(shown) == chat["choices"][0]["message"]["content"]
    usage = shown["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert text_of(shown) != text_of(message(server))


def test_cached_tokens(server: Server) -> None:
    messages = [{"role": "user", "content": "a long beginning that is known already " * 6}]
    first, second = (message(server, messages=messages)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] >= 32
    assert second["input_tokens"] + second["cache_read_input_tokens"] == (
        first["input_tokens"] + first["cache_read_input_tokens"]
    )


def test_events(server: Server) -> None:
    names = [name for name, _ in events(server)]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert len(names) > 8


def test_stop_sequence(server: Server) -> None:
    whole = text_of(message(server, max_tokens=40))
    stop = whole[10:13]
    for shown in (message(server, max_tokens=40, stop_sequences=["never such", stop]),
                  rebuilt(events(server, max_tokens=40, stop_sequences=["never such", stop]))):  # fmt: skip
        assert (shown["stop_reason"], shown["stop_sequence"]) == ("stop_sequence", stop)
        assert text_of(shown) == whole[: whole.index(stop)]


def test_empty_answer(server: Server) -> None:
    first = text_of(message(server, max_tokens=1))
    assert first
    shown = message(server, stop_sequences=[first[0]])
    assert shown["content"] == []
    stream = events(server, stop_sequences=[first[0]])
    assert [name for name, _ in stream] == ["message_start", "message_delta", "message_stop"]


PROPERTY = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@PROPERTY
@given(
    fields=st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 30), "seed": st.integers(0, 2**63 - 1)},
        optional={
            "temperature": st.sampled_from([0, 0.4, 1]),
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([0.2, 1]),
            "ignore_eos": st.booleans(),
            "stop_sequences": st.lists(st.sampled_from(["a", "e", " ", "th", "�"]), min_size=1, max_size=5),
            "system": st.text(st.characters(codec="utf-8"), max_size=10),
        },
    )
)
def test_streamed_equals_whole(server: Server, fields: dict[str, Any]) -> None:
    assert comparable(rebuilt(events(server, **fields))) == comparable(message(server, **fields))


def test_count_tokens(server: Server) -> None:
    body = {
        "model": TINY,
        "system": "be good",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }
    counted = server.post(f"{PATH}/count_tokens", body).json()
    usage = message(server, **body)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    long = {**body, "messages": [{"role": "user", "content": "z" * 5000}]}
    assert server.post(f"{PATH}/count_tokens", long).json()["input_tokens"] > 512


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": 1.1}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"),
    ({"top_k": -1}, "top_k"), ({"stop_sequences": "a"}, "stop_sequences"), ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 129}, "stop_sequences"), ({"stop": ["a"]}, "stop_sequences"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "content"), ({"system": 5}, "system"), ({"metadata": "x"}, "metadata"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}]}, "prefill"),
    (user({"type": "image", "source": {}}), "'image'"), (user({"type": "document"}), "'document'"),
    (user({"type": "thinking", "thinking": "x"}), "'thinking'"), (user({"type": "text"}), "messages[0].content[0].text"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"), ({"container": "c"}, "container"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"), ({"output_format": {"type": "json_schema"}}, "output_format"),
    (user({"type": "text", "text": "z" * 5000}), "512"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Server, fields: dict[str, Any], said: str, stream: bool) -> None:
    answer = server.post(PATH, {**BODY, **fields, "stream": stream})
    check_error(answer, 400, "invalid_request_error", said)


def test_harmless_values(server: Server) -> None:
    plain = comparable(message(server))
    for fields in (
        {"thinking": {"type": "disabled"}},
        {"tools": []},
        {"metadata": {"user_id": "u", "x": 1}},
        {"service_tier": "auto"},
        {"unknown": {"a": 1}},
        {"system": ""},
        {"stop_sequences": []},
    ):
        assert comparable(message(server, **fields)) == plain


def test_other_errors(server: Server) -> None:
    check_error(server.post(PATH, {**BODY, "model": "claude"}), 404, "not_found_error", "claude")
    check_error(server.post(f"{PATH}/count_tokens", {**BODY, "model": "x"}), 404, "not_found_error", "'x'")
    check_error(server.get(PATH), 405, "invalid_request_error", "GET")
    check_error(server.get(f"{PATH}/batches"), 404, "not_found_error")
    plain = httpx2.post(server.url + PATH, content="{}", headers={"content-type": "text/plain"})
    check_error(plain, 415, "invalid_request_error")
    large = httpx2.post(
        server.url + PATH, content=b" " * 9_000_000, headers={"content-type": "application/json"}
    )
    check_error(large, 413, "request_too_large")
    broken = httpx2.post(server.url + PATH, content=b"{", headers={"content-type": "application/json"})
    check_error(broken, 400, "invalid_request_error", "JSON")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full", retry_after_s=3), 429, "rate_limit_error"),
        (ShuttingDownError("stopping"), 503, "overloaded_error"),
        (SequenceFailedError("failed"), 500, "api_error"),
        (DeadlineExceededError("late"), 408, "timeout_error"),
    ],
)
async def test_failures(error: Exception, status: int, kind: str) -> None:
    engine = ScriptedEngine(error)
    async with running(app_of(engine)) as client:
        for stream in (False, True):
            body = {**BODY, "model": "scripted", "stream": stream}
            check_error(await client.post(PATH, json=body), status, kind, str(error))
    engine = ScriptedEngine(started(), token("abc"), error)
    async with running(app_of(engine)) as client:
        answer = await client.post(PATH, json={**BODY, "model": "scripted", "stream": True})
    assert answer.status_code == 200
    last = sse_events(answer.text)[-1]
    assert last == ("error", {"type": "error", "error": {"type": kind, "message": str(error)}})


async def test_keys() -> None:
    async def start(_config: Any, _on_progress: Any) -> Any:
        return ScriptedEngine(started(), token("abc"), finished(3))

    options = Settings(
        model=ModelSettings(id="scripted"),
        log=LogSettings(access=False),
        server=ServerSettings(api_keys=(SecretStr("open-sesame"),)),
    )
    body = {**BODY, "model": "scripted"}
    async with running(create_app(options, start_engine=start)) as client:
        for headers in ({"x-api-key": "open-sesame"}, {"authorization": "Bearer open-sesame"}):
            assert (await client.post(PATH, json=body, headers=headers)).status_code == 200
        for headers in ({"x-api-key": "wrong"}, {}, {"x-api-key": ""}, {"authorization": "Bearer x"}):
            refused = await client.post(PATH, json=body, headers=headers)
            check_error(refused, 401, "authentication_error", "API key")
