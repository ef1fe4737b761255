"""Streamed and unstreamed answers are equal, whatever is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.serving import Server, sse_events, sse_frames

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 30), "seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0, 0.3, 1, 1.7]),
        "top_p": st.sampled_from([0.1, 0.8, 1]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 1000]),
        "min_p": st.sampled_from([0, 0.05]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, 319).map(str), st.floats(-100, 100), max_size=3),
        "n": st.integers(1, 4),
        "stop": st.lists(st.sampled_from(["a", "e", " ", "the", "�", "th", "1"]), min_size=1, max_size=4),
        "stop_token_ids": st.lists(st.integers(0, 319), max_size=4),
        "ignore_eos": st.booleans(),
        "min_tokens": st.just(1),
    },
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(st.builds(lambda text: {"role": "user", "content": text}, TEXT), min_size=1, max_size=3)},
    optional={"logprobs": st.booleans()},
)  # fmt: skip
COMPLETION = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(TEXT, min_size=1, max_size=3) | st.lists(st.integers(0, 319), min_size=1, max_size=40)},
    optional={"echo": st.booleans(), "logprobs": st.integers(0, 5)},
)  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as shared:
        yield shared


def joined_chat(frames: list[Any]) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for chunk in frame["choices"]:
            choice = choices.setdefault(chunk["index"], {"text": "", "logprobs": [], "reason": None})
            assert choice["reason"] is None, "nothing comes after the finish reason"
            choice["text"] += chunk["delta"].get("content", "")
            choice["logprobs"] += chunk["logprobs"]["content"] if chunk["logprobs"] else []
            choice["reason"] = chunk["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def joined_completion(frames: list[Any], wants_logprobs: bool) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for chunk in frame["choices"]:
            choice = choices.setdefault(chunk["index"], {"text": "", "logprobs": None, "reason": None})
            assert choice["reason"] is None
            if wants_logprobs and choice["logprobs"] is None:
                choice["logprobs"] = {name: [] for name in LISTS}
            choice["text"] += chunk["text"]
            for name, values in (chunk["logprobs"] or {}).items():
                choice["logprobs"][name] += values
            choice["reason"] = chunk["finish_reason"]
    return [choices[index] for index in sorted(choices)]


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def totals(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def ask(client: httpx2.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.status_code == 200, streamed.text
    frames = sse_frames(streamed.text)
    assert totals(frames[-1]["usage"]) == totals(whole.json()["usage"])
    return whole.json(), frames


PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@PROPERTY
@given(body=st.builds(lambda sampling, chat: sampling | chat, SAMPLING, CHAT))
def test_chat(client: httpx2.Client, body: dict[str, Any]) -> None:
    whole, frames = ask(client, "/v1/chat/completions", body)
    expected = [
        {
            "text": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"] if choice["logprobs"] else [],
            "reason": choice["finish_reason"],
        }
        for choice in whole["choices"]
    ]
    assert joined_chat(frames) == expected
    for choice in expected:
        if body.get("logprobs"):
            assert "".join(entry["token"] for entry in choice["logprobs"]) == choice["text"]
        if "stop" in body:
            assert not any(stop in choice["text"] for stop in body["stop"])


@PROPERTY
@given(body=st.builds(lambda sampling, completion: sampling | completion, SAMPLING, COMPLETION))
def test_completions(client: httpx2.Client, body: dict[str, Any]) -> None:
    whole, frames = ask(client, "/v1/completions", body)
    expected = [
        {"text": choice["text"], "logprobs": choice["logprobs"], "reason": choice["finish_reason"]}
        for choice in whole["choices"]
    ]
    assert joined_completion(frames, "logprobs" in body) == expected
    for choice in expected:
        if "logprobs" in body:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@PROPERTY
@given(body=st.builds(lambda sampling, text: sampling | {"prompt": text}, SAMPLING, TEXT))
def test_teaching_routes(client: httpx2.Client, body: dict[str, Any]) -> None:
    body.pop("n", None)
    whole = client.post("/basic_generate", json=body).json()
    streamed = client.post("/generate_stream", json=body).text
    events = sse_events(streamed)
    assert "".join(data["token"] for name, data in events if name == "token") == whole["generated_text"]
    done = events[-1][1]
    assert done["finish_reason"] == whole["finish_reason"]
    assert done["output_tokens"] == whole["usage"]["completion_tokens"]
    assert done["output_tokens"] == sum(name == "token" for name, _ in events)
