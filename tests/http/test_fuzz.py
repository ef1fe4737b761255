"""Hostile bodies never give a 5xx and never hurt a request beside them."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.serving import Server

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2,
        "temperature": 1, "top_p": 0.9, "n": 1, "stream": False, "stop": ["x"], "seed": 1, "logit_bias": {"5": 1},
        "logprobs": True, "top_logprobs": 2, "stream_options": None, "user": "u", "metadata": {"a": "b"},
        "max_completion_tokens": 2, "response_format": {"type": "text"}, "tools": [], "timeout": 20, "priority": 0,
    },
    "/v1/completions": {
        "model": "tiny", "prompt": ["hi", "there"], "max_tokens": 2, "temperature": 1, "top_k": 5, "min_p": 0.1, "n": 1,
        "best_of": 2, "stream": False, "stop": "x", "stop_token_ids": [5], "seed": 1, "logprobs": 2, "echo": True,
        "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
    },
    "/basic_generate": {"prompt": "hi", "max_tokens": 2, "temperature": 1, "stop": ["a"], "seed": 3},
    "/generate": {"prompts": ["hi", "there"], "max_tokens": 2, "top_p": 0.5},
    "/generate_stream": {"prompt": "hi", "max_tokens": 2, "logit_bias": {"7": 2.5}},
    "/tokenize": {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True, "model": "tiny"},
    "/detokenize": {"tokens": [5, 70, 300], "model": "tiny"},
    "/apply-template": {"messages": [{"role": "user", "content": "hi", "name": "n"}], "add_generation_prompt": True},
    "/v1/messages": {
        "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"], "top_k": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"b": [1]}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]}]},
        ],
        "tools": [], "tool_choice": {"type": "auto"}, "stream": False, "metadata": {"user_id": "u"}, "temperature": 1,
        "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {
        "messages": [{"role": "user", "content": "hi"}], "system": "s",
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"enum": [1]}}}}],
    },
    "/v1/responses": {
        "model": "tiny", "max_output_tokens": 2, "instructions": "i", "temperature": 1, "stream": False, "store": True,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"b\": 1}"},
            {"type": "function_call_output", "call_id": "a", "output": "r"},
        ],
        "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto", "user": "u",
        "truncation": "disabled", "include": [], "reasoning": {"effort": None}, "previous_response_id": None,
    },
}  # fmt: skip

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "tiny", "\ud800", "\x00", "auto", "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
SMALL = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += paths(child, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A valid body in which some values, anywhere, were replaced, removed or moved."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    body = copy.deepcopy(ROUTES[route])
    for _ in range(draw(st.integers(1, 3))):
        places = paths(body)
        if not places:
            break
        path = draw(st.sampled_from(places))
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.integers(0, 4)) == 0:
            del parent[path[-1]]
        else:
            parent[path[-1]] = draw(JSON_VALUES)
    return route, body


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as shared:
        yield shared


@pytest.fixture(scope="module", autouse=True)
def good_neighbour(server: Server) -> Iterator[None]:
    """A well-behaved client beside all of these tests: its answer never changes."""
    body = {"prompt": "a good neighbour", "max_tokens": 50, "temperature": 0, "ignore_eos": True}
    expected = server.post("/v1/completions", body).json()["choices"]
    ended = threading.Event()
    seen: list[Any] = []

    def ask() -> None:
        while not ended.is_set():
            answer = server.post("/v1/completions", body)
            seen.append(answer.json().get("choices") if answer.status_code == 200 else answer.text)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert len(seen) > 20
    assert [choices for choices in seen if choices != expected] == []
    server.wait_idle()
    assert not [line for line in server.log_lines() if line["level"] == "error"]


FUZZ = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check(answer: httpx2.Response) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code != 200:
        is_anthropic = answer.request.url.path.startswith("/v1/messages")
        keys = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == keys
    elif answer.headers["content-type"] == "application/json":
        assert "NaN" not in answer.text.replace('NaN"', "")
        answer.json()


def post(client: httpx2.Client, route: str, content: bytes) -> httpx2.Response:
    return client.post(route, content=content, headers={"content-type": "application/json"})


@settings(FUZZ, max_examples=400)
@given(case=mutated())
def test_mutated_bodies(client: httpx2.Client, case: tuple[str, dict[str, Any]]) -> None:
    route, body = case
    for name in SMALL:  # a lucky draw must not ask for the whole context
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 5)
    check(post(client, route, json.dumps(body).encode()))


@settings(FUZZ, max_examples=150)
@given(route=st.sampled_from(sorted(ROUTES)), value=JSON_VALUES)
def test_any_json(client: httpx2.Client, route: str, value: Any) -> None:
    check(post(client, route, json.dumps(value).encode()))


@settings(FUZZ, max_examples=150)
@given(route=st.sampled_from(sorted(ROUTES)), content=st.binary(max_size=60))
def test_any_bytes(client: httpx2.Client, route: str, content: bytes) -> None:
    check(post(client, route, content))


@settings(FUZZ, max_examples=150)
@given(
    route=st.sampled_from(sorted(ROUTES)),
    position=st.floats(0, 1),
    inserted=st.binary(max_size=4),
    num_removed=st.integers(0, 6),
)
def test_damaged_bodies(
    client: httpx2.Client, route: str, position: float, inserted: bytes, num_removed: int
) -> None:
    content = json.dumps(ROUTES[route]).encode()
    at = int(position * len(content))
    check(post(client, route, content[:at] + inserted + content[at + num_removed :]))
