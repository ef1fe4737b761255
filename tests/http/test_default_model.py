"""The model that people meet first, through the API."""

from __future__ import annotations

import pytest

from tests.http.serving import Server, sse_frames

pytestmark = pytest.mark.model

CAPITAL = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def test_chat_streamed_and_not(default_server: Server) -> None:
    body = default_server.post("/v1/chat/completions", CAPITAL).json()
    assert len(body["choices"][0]["message"]["content"]) > 10
    frames = sse_frames(default_server.post("/v1/chat/completions", {**CAPITAL, "stream": True}).text)
    streamed = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
    assert streamed == body["choices"][0]["message"]["content"]


def test_it_ends_by_itself(default_server: Server) -> None:
    request = {**CAPITAL, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 200}
    body = default_server.post("/v1/chat/completions", request).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in body["choices"][0]["message"]["content"]
    assert 1 < body["usage"]["completion_tokens"] < 200


def test_it_knows_the_capital_of_france(default_server: Server) -> None:
    request = {
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 3,
        "logprobs": 3,
        "echo": True,
    }
    choice = default_server.post("/v1/completions", request).json()["choices"][0]
    assert "Paris" in choice["text"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_emoji_and_other_scripts_survive(default_server: Server) -> None:
    text = "Family: 👨‍👩‍👧‍👦 flag: 🇫🇷 हिन्दी 漢字 é"
    request = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = default_server.post("/v1/completions", request).json()["choices"][0]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == text


def test_prompt_longer_than_the_context(default_server: Server) -> None:
    answer = default_server.post("/v1/completions", {"prompt": "word " * 9000})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    model = default_server.get("/v1/models/smollm2").json()
    assert str(model["max_model_len"]) in answer.json()["error"]["message"]
