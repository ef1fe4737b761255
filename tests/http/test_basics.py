"""The teaching routes."""

from __future__ import annotations

import httpx2

from tests.http.serving import Server, sse_events

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_basic_generate(server: Server) -> None:
    body = server.post("/basic_generate", {"prompt": "hello the", **GREEDY}).json()
    assert set(body) == {"generated_text", "sequence_id", "finish_reason", "usage"}
    assert body["generated_text"]
    assert not body["generated_text"].startswith("hello the")
    assert isinstance(body["sequence_id"], int)
    assert body["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    again = server.post("/basic_generate", {"prompt": "hello the", **GREEDY}).json()
    assert again["generated_text"] == body["generated_text"]
    assert again["sequence_id"] > body["sequence_id"]


def test_generate_answers_in_the_order_of_the_prompts(server: Server) -> None:
    prompts = [f"prompt {'x' * number}" for number in range(8)]
    body = server.post("/generate", {"prompts": prompts, **GREEDY, "max_tokens": 6}).json()
    assert set(body) == {"generated_texts", "sequence_ids"}
    assert len(set(body["sequence_ids"])) == 8
    for prompt, text in zip(prompts, body["generated_texts"], strict=True):
        alone = server.post("/basic_generate", {"prompt": prompt, **GREEDY, "max_tokens": 6}).json()
        assert text == alone["generated_text"]


def test_generate_stream(server: Server) -> None:
    request = {"prompt": "hello the", **GREEDY, "max_tokens": 9}
    answer = server.post("/generate_stream", request)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = sse_events(answer.text)
    assert [name for name, _ in events] == ["start", *["token"] * 9, "done"]
    sequence_id = events[0][1]["sequence_id"]
    assert all(data["sequence_id"] == sequence_id for _, data in events)
    text = "".join(data["token"] for name, data in events if name == "token")
    assert text == server.post("/basic_generate", request).json()["generated_text"]
    done = events[-1][1]
    assert (done["output_tokens"], done["finish_reason"]) == (9, "length")
    timing = done["timing"]
    assert set(timing) == {"queue_s", "prefill_s", "decode_s", "total_s"}
    assert all(seconds >= 0 for seconds in timing.values())


def test_stream_has_an_event_for_every_token_also_when_it_stops(server: Server) -> None:
    full = server.post("/basic_generate", {"prompt": "abc", **GREEDY, "max_tokens": 40}).json()[
        "generated_text"
    ]
    stop = full[10:13]
    request = {"prompt": "abc", **GREEDY, "max_tokens": 40, "stop": stop}
    events = sse_events(server.post("/generate_stream", request).text)
    tokens = [data["token"] for name, data in events if name == "token"]
    done = events[-1][1]
    assert done["finish_reason"] == "stop"
    assert len(tokens) == done["output_tokens"]
    assert "".join(tokens) == full[: full.index(stop)]


def test_error_before_the_first_token_is_an_http_error(server: Server) -> None:
    assert server.post("/generate_stream", {"prompt": "a" * 5000}).status_code == 400


def test_sampling_parameters_work(server: Server) -> None:
    seeded = {"prompt": "hello", "seed": 5, "temperature": 1.3, "top_k": 50, "ignore_eos": True}
    texts = {server.post("/basic_generate", seeded).json()["generated_text"] for _ in range(3)}
    assert len(texts) == 1
    other = server.post("/basic_generate", {**seeded, "seed": 6}).json()["generated_text"]
    assert other not in texts


def test_unseeded_answers_differ(server: Server) -> None:
    with httpx2.Client(base_url=server.url) as client:
        body = {"prompt": "hello", "temperature": 1.5, "ignore_eos": True, "max_tokens": 12}
        texts = {client.post("/basic_generate", json=body).json()["generated_text"] for _ in range(5)}
    assert len(texts) > 1
