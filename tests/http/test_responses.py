"""The Responses protocol: the object, the events that build it, what is stored, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.api.responses.store import ResponseStore
from enginehouse.errors import DeadlineExceededError, QueueFullError, SequenceFailedError
from tests.http.conftest import TINY, tiny_overrides
from tests.http.scripted_engine import ScriptedEngine, started, token
from tests.http.serving import Server, sse_events
from tests.http.test_errors import check_error
from tests.http.test_states_and_failures import app_of, running

PATH = "/v1/responses"
BODY: dict[str, Any] = {
    "model": TINY,
    "input": "hello the end",
    "temperature": 0,
    "max_output_tokens": 12,
    "ignore_eos": True,
}
KEYS = {
    "background", "completed_at", "created_at", "error", "id", "incomplete_details", "instructions", "max_output_tokens",
    "metadata", "model", "object", "output", "parallel_tool_calls", "previous_response_id", "reasoning", "service_tier",
    "status", "store", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "usage", "user",
}  # fmt: skip


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    assert set(shown) == KEYS
    return shown


def events(server: Server, **fields: Any) -> list[Any]:
    answer = server.post(PATH, {**BODY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    stream = sse_events(answer.text)
    assert all(name == data["type"] for name, data in stream)
    return [data for _, data in stream]


def checked(stream: list[Any]) -> dict[str, Any]:
    """The response that a stream ends with, every event before it checked against it."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    for event in stream[:2]:
        assert set(event["response"]) == KEYS
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["usage"] is None
    final: dict[str, Any] = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{final['status']}"
    items: list[Any] = []
    text = ""
    for event in stream[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text = ""
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        if kind == "response.output_item.done":
            assert event["item"] == final["output"][len(items) - 1]
            assert event["item"]["id"] == item["id"]
            continue
        assert event["item_id"] == item["id"]
        if item["type"] == "message":
            assert event["content_index"] == 0
        if kind == "response.content_part.added":
            assert event["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "response.output_text.done":
            assert event["text"] == text
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (text, item["name"])
        else:
            assert kind == "response.content_part.done"
            assert event["part"]["text"] == text
    assert len(items) == len(final["output"])
    return final


def comparable(shown: dict[str, Any]) -> dict[str, Any]:
    """Without ids, times, and how much of the prompt was cached."""
    output = [
        {**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in shown["output"]
    ]
    usage = {**shown["usage"], "input_tokens_details": None}
    return {**shown, "id": "", "created_at": 0, "completed_at": 0, "output": output, "usage": usage}


def text_of(shown: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in shown["output"] if item["type"] == "message" for part in item["content"]
    )


def test_response(server: Server) -> None:
    shown = respond(server, metadata={"a": "b"}, user="u", stop=[])
    assert shown["id"].startswith("resp_")
    assert (shown["object"], shown["model"], shown["error"]) == ("response", TINY, None)
    assert (shown["status"], shown["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (item,) = shown["output"]
    assert set(item) == {"id", "type", "status", "role", "content"}
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert (shown["metadata"], shown["user"], shown["store"]) == ({"a": "b"}, "u", True)
    assert (shown["tools"], shown["tool_choice"], shown["truncation"]) == ([], "auto", "disabled")
    assert shown["text"]["format"] == {"type": "text"}
    usage = shown["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (12, {"reasoning_tokens": 0})
    assert usage["input_tokens"] >= usage["input_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + 12


def test_completed(server: Server) -> None:
    whole = text_of(respond(server, max_output_tokens=40))
    stop = whole[10:13]
    shown = respond(server, max_output_tokens=40, stop=stop)
    assert (shown["status"], shown["incomplete_details"]) == ("completed", None)
    assert shown["completed_at"] >= shown["created_at"]
    assert shown["output"][0]["status"] == "completed"
    assert text_of(shown) == whole[: whole.index(stop)]


def test_the_same_as_chat(server: Server) -> None:
    shown = respond(
        server,
        instructions="be good",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hello "}, {"type": "input_text", "text": "the"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
            {"role": "developer", "content": "now"},
            {"role": "user", "content": "so"},
        ],
    )  # fmt: skip
    chat = server.post(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "be good"},
                {"role": "user", "content": "hello the"},
                {"role": "assistant", "content": "yes"},
                {"role": "system", "content": "now"},
                {"role": "user", "content": "so"},
            ],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        },
    ).json()
    assert text_of(shown) == chat["choices"][0]["message"]["content"]
    assert shown["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_events(server: Server) -> None:
    names = [event["type"].removeprefix("response.") for event in events(server)]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert len(names) > 14


PROPERTY = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@PROPERTY
@given(
    fields=st.fixed_dictionaries(
        {"max_output_tokens": st.integers(1, 30), "seed": st.integers(0, 2**63 - 1)},
        optional={
            "temperature": st.sampled_from([0, 0.4, 2]),
            "top_p": st.sampled_from([0.2, 1]),
            "ignore_eos": st.booleans(),
            "stop": st.lists(st.sampled_from(["a", "e", " ", "th", "�"]), min_size=1, max_size=4),
            "instructions": st.text(st.characters(codec="utf-8"), max_size=10),
            "store": st.booleans(),
        },
    )
)
def test_streamed_equals_whole(server: Server, fields: dict[str, Any]) -> None:
    streamed = checked(events(server, **fields))
    assert comparable(streamed) == comparable(respond(server, **fields))
    stored = server.get(f"{PATH}/{streamed['id']}")
    if fields.get("store", True):
        assert stored.json() == streamed
    else:
        check_error(stored, 404, None, "response_not_found")


def test_empty_answer_has_a_message(server: Server) -> None:
    first = text_of(respond(server, max_output_tokens=1))
    shown = respond(server, stop=first[0])
    assert text_of(shown) == ""
    assert len(shown["output"]) == 1
    assert comparable(checked(events(server, stop=first[0]))) == comparable(shown)


def test_conversation(server: Server) -> None:
    """A response that continues another has the prompt of the whole conversation, without earlier instructions."""
    first = respond(server, instructions="be good", max_output_tokens=5)
    second = respond(server, input="so", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    turns = [{"role": "user", "content": BODY["input"]}, *first["output"], {"role": "user", "content": "so"}]
    assert comparable(respond(server, input=turns))["output"] == comparable(second)["output"]
    third = checked(
        events(server, input=[{"role": "user", "content": "and"}], previous_response_id=second["id"])
    )
    turns += [*second["output"], {"role": "user", "content": "and"}]
    assert text_of(respond(server, input=turns)) == text_of(third)
    deleted = httpx2.delete(f"{server.url}{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    fourth = respond(server, input="and", previous_response_id=second["id"])
    assert text_of(fourth) == text_of(third), "a response needs no earlier one"
    refused = server.post(PATH, {**BODY, "previous_response_id": first["id"], "stream": True})
    check_error(refused, 400, "previous_response_id", "previous_response_not_found")


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"), ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_tokens": 5}, "max_tokens"), ({"temperature": 3}, "temperature"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"), ({"n": 2}, "n"), ({"messages": []}, "messages"),
    ({"response_format": {"type": "text"}}, "response_format"), ({"top_p": 0}, "top_p"), ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 3}, "max_tool_calls"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"), ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"), ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"metadata": {"a": 5}}, "metadata[...]"), ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"), ({"store": "yes"}, "store"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"), ({"tool_choice": "required"}, "tool_choice"),
    ({"stop": ["a"] * 5}, "stop"), ({"stop": [""]}, "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals(server: Server, fields: dict[str, Any], param: str | None) -> None:
    answer = server.post(PATH, {**BODY, **fields, "stream": True})
    if param == "metadata[...]":
        param = "metadata"
    check_error(answer, 400, param)


def test_other_refusals(server: Server) -> None:
    long = server.post(PATH, {**BODY, "input": "z" * 5000, "stream": True})
    check_error(long, 400, "input", "context_length_exceeded")
    tools = [{"type": "function", "name": "f", "description": "z" * 5000}]
    with_tools = server.post(PATH, {**BODY, "tools": tools})
    check_error(with_tools, 400, "input", "context_length_exceeded")
    check_error(server.post(PATH, {**BODY, "model": "gpt-17"}), 404, "model", "model_not_found")
    check_error(server.get(f"{PATH}/resp_none"), 404, None, "response_not_found")
    shown = respond(server)
    check_error(server.get(f"{PATH}/{shown['id']}?stream=true"), 400, "stream")


def test_harmless_values(server: Server) -> None:
    plain = comparable(respond(server))
    for fields in (
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"background": False},
        {"n": 1},
        {"tools": []},
        {"unknown": 1},
        {"stream_options": {"include_obfuscation": False}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"truncation": "disabled"},
        {"metadata": {}},
        {"service_tier": "auto"},
    ):
        assert comparable(respond(server, **fields)) == plain


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full", retry_after_s=3), 429, "rate_limit_exceeded"),
        (SequenceFailedError("failed"), 500, "server_error"),
        (DeadlineExceededError("late"), 408, "server_error"),
    ],
)
async def test_failures(error: Any, status: int, code: str) -> None:
    async with running(app_of(ScriptedEngine(error))) as client:
        for stream in (False, True):
            body = {**BODY, "model": "scripted", "stream": stream}
            check_error(await client.post(PATH, json=body), status, None, error.code)
    async with running(app_of(ScriptedEngine(started(), token("abc"), error))) as client:
        answer = await client.post(PATH, json={**BODY, "model": "scripted", "stream": True})
        stream = [data for _, data in sse_events(answer.text)]
        final = stream[-1]["response"]
        assert stream[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        assert (final["status"], final["error"]) == ("failed", {"code": code, "message": str(error)})
        assert text_of(final) == "abc"
        check_error(await client.get(f"{PATH}/{final['id']}"), 404, None, "response_not_found")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("small-store")
    options = {"server__max_stored_responses": 2}
    started_server = Server(tiny_overrides(directory, **options), directory / "log").start()
    try:
        yield started_server.wait_ready()
    finally:
        started_server.stop()


def test_bounds_from_settings(small: Server) -> None:
    ids = [respond(small, max_output_tokens=1)["id"] for _ in range(3)]
    assert [small.get(f"{PATH}/{one}").status_code for one in ids] == [404, 200, 200]


# The store ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def new_store(clock: Clock, **limits: Any) -> ResponseStore:
    return ResponseStore(**{"max_responses": 3, "max_bytes": 1000, "ttl_s": 10.0, **limits}, clock=clock)


def test_store_by_number() -> None:
    store = new_store(Clock())
    for number in range(5):
        store.put(str(number), b"x", [{"role": "user", "content": str(number)}])
    assert [number for number in range(5) if store.get(str(number))] == [2, 3, 4]
    found = store.get("3")
    assert found is not None
    assert found.messages() == [{"role": "user", "content": "3"}]


def test_store_by_bytes() -> None:
    store = new_store(Clock())
    store.put("a", b"x" * 400, [])
    store.put("b", b"x" * 400, [])
    store.put("c", b"x" * 400, [])
    assert [name for name in "abc" if store.get(name)] == ["b", "c"]
    assert store.num_bytes == 804
    store.put("d", b"x" * 2000, [])
    assert store.get("d") is None
    assert len(store) == 2, "one that does not fit drives nothing out"


def test_store_by_time_and_delete() -> None:
    clock = Clock()
    store = new_store(clock)
    store.put("a", b"x", [])
    clock.now_s = 6.0
    store.put("b", b"x", [])
    clock.now_s = 10.0
    assert store.get("a") is None
    assert store.get("b") is not None
    assert store.delete("b")
    assert not store.delete("b")
    assert (len(store), store.num_bytes) == (0, 0)
    nothing = new_store(clock, max_responses=0)
    nothing.put("a", b"x", [])
    assert len(nothing) == 0


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1200), st.integers(0, 5)), max_size=30))
def test_store_is_bounded(steps: list[tuple[int, int, int]]) -> None:
    clock = Clock()
    store = new_store(clock)
    for number, (name, size, wait_s) in enumerate(steps):
        store.put(f"{name}-{number}", b"x" * size, [])
        store.delete(f"{name}-{number - 3}")
        clock.now_s += wait_s
        kept = [store.get(f"{n}-{i}") for i, (n, _, _) in enumerate(steps)]
        assert store.num_bytes == sum(entry.num_bytes for entry in kept if entry) <= 1000
        assert len(store) == sum(entry is not None for entry in kept) <= 3


def test_stored_json_is_what_was_sent(server: Server) -> None:
    answer = server.post(PATH, {**BODY, "metadata": {"k": "ü"}})
    assert server.get(f"{PATH}/{answer.json()['id']}").content == answer.content
    assert json.loads(answer.content)["metadata"] == {"k": "ü"}
