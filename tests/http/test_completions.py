"""Completions, field by field, streamed and not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.conftest import TINY
from tests.http.serving import Server, sse_frames

BODY: dict[str, Any] = {
    "model": TINY,
    "prompt": "hello the",
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
}
COMMON_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def stream(server: Server, **fields: Any) -> list[Any]:
    answer = server.post("/v1/completions", {**BODY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    return sse_frames(answer.text)


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_answer(server: Server) -> None:
    body = complete(server)
    assert set(body) == COMMON_KEYS | {"usage"}
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", TINY)
    (choice,) = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert body["usage"]["completion_tokens"] == 8


def test_default_max_tokens_is_sixteen(server: Server) -> None:
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_stream_frames(server: Server) -> None:
    frames = stream(server, stream_options={"include_usage": True})
    assert {frame["id"] for frame in frames} == {frames[0]["id"]}
    for frame in frames:
        assert set(frame) == COMMON_KEYS | {"usage"}
        assert frame["object"] == "text_completion"
        assert all(
            set(choice) == {"index", "text", "logprobs", "finish_reason"} for choice in frame["choices"]
        )
    choices = [frame["choices"][0] for frame in frames[:-1]]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["text"] == ""
    assert "".join(choice["text"] for choice in choices) == texts(complete(server))[0]
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 8


def test_prompt_forms(server: Server) -> None:
    """Strings, token ids, and lists of both give the same answers."""
    ids = [4, 5, 6, 60, 61]
    alone = [texts(complete(server, prompt="hello the"))[0], texts(complete(server, prompt="other"))[0]]
    assert texts(complete(server, prompt=["hello the", "other"])) == alone
    by_ids = texts(complete(server, prompt=ids))
    assert texts(complete(server, prompt=[ids])) == by_ids
    assert texts(complete(server, prompt=[ids, ids[:3]]))[0] == by_ids[0]
    assert complete(server, prompt=ids)["usage"]["prompt_tokens"] == 5


def test_prompts_times_n(server: Server) -> None:
    prompts = ["alpha", "beta", "gamma"]
    fields = {"n": 2, "temperature": 1.1, "seed": 4}
    body = complete(server, prompt=prompts, **fields)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for number, prompt in enumerate(prompts):
        assert texts(complete(server, prompt=prompt, **fields)) == texts(body)[2 * number : 2 * number + 2]
    assert body["usage"]["completion_tokens"] == 48
    streamed = [""] * 6
    for frame in stream(server, prompt=prompts, **fields):
        for choice in frame["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts(body)


def test_echo(server: Server) -> None:
    plain = texts(complete(server))[0]
    assert texts(complete(server, echo=True)) == ["hello the" + plain]
    assert "".join(f["choices"][0]["text"] for f in stream(server, echo=True)) == "hello the" + plain
    both = complete(server, prompt=["hello the", "café 😀"], echo=True)
    assert texts(both)[1].startswith("café 😀")


def test_echo_without_output(server: Server) -> None:
    body = complete(server, echo=True, max_tokens=0, logprobs=2)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello the", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    frames = stream(server, echo=True, max_tokens=0, logprobs=2)
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "hello the"
    assert frames[-1]["choices"][0]["finish_reason"] == "length"


def check_logprobs(found: dict[str, list[Any]], text: str, num_top: int) -> None:
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in found.values()}) == 1
    assert "".join(found["tokens"]) == text
    offset = 0
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert start == offset
        offset += len(token)
    for logprob, tops in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        if logprob is None:
            assert tops is None
            continue
        assert -9999 <= logprob <= 0
        assert 1 <= len(tops) <= num_top + 1
        assert any(value == pytest.approx(logprob) for value in tops.values())


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.4])
def test_logprobs(server: Server, num_top: int, echo: bool, temperature: float) -> None:
    fields = {
        "logprobs": num_top,
        "echo": echo,
        "temperature": temperature,
        "seed": 11,
        "max_tokens": 30,
        "n": 2,
    }
    body = complete(server, prompt="café 😀 the", **fields)
    for choice in body["choices"]:
        check_logprobs(choice["logprobs"], choice["text"], num_top)
        nulls = [value for value in choice["logprobs"]["token_logprobs"] if value is None]
        assert len(nulls) == int(echo)
    streamed: list[dict[str, list[Any]]] = [
        {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(2)
    ]
    for frame in stream(server, prompt="café 😀 the", **fields):
        for choice in frame["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                streamed[choice["index"]][name] += values
    assert streamed == [choice["logprobs"] for choice in body["choices"]]


def test_prompt_logprobs_are_those_of_the_output(server: Server) -> None:
    """What a token cost as output, it costs as part of a prompt."""
    ids = [60, 61, 62]
    first = complete(server, prompt=ids, logprobs=1, max_tokens=1, logit_bias={"90": 100})
    biased = complete(server, prompt=[*ids, 90], logprobs=1, echo=True, max_tokens=0)
    plain = complete(server, prompt=ids, logprobs=5, max_tokens=1)
    assert first["choices"][0]["logprobs"]["tokens"] == biased["choices"][0]["logprobs"]["tokens"][-1:]
    best = plain["choices"][0]["logprobs"]
    rest = complete(server, prompt=[*ids, 90], logprobs=5, echo=True, max_tokens=0)
    top_of_prompt = rest["choices"][0]["logprobs"]["top_logprobs"][-1]
    assert max(top_of_prompt.values()) == pytest.approx(best["token_logprobs"][0], abs=1e-5)


def test_best_of(server: Server) -> None:
    fields = {"temperature": 1.3, "seed": 21, "max_tokens": 6}
    everything = complete(server, n=6, logprobs=0, **fields)
    means = [
        sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"])
        for c in everything["choices"]
    ]
    ranked = sorted(range(6), key=lambda index: means[index], reverse=True)
    best = complete(server, n=2, best_of=6, **fields)
    assert texts(best) == [texts(everything)[index] for index in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]
    per_prompt = complete(server, prompt=["hello the", "other"], n=1, best_of=6, **fields)
    assert texts(per_prompt)[0] == texts(best)[0]


def test_best_of_equal_to_n_is_n(server: Server) -> None:
    fields = {"temperature": 1.3, "seed": 21, "n": 2}
    assert texts(complete(server, best_of=2, **fields)) == texts(complete(server, **fields))
    assert stream(server, best_of=2, **fields)


def test_stop_across_prompts(server: Server) -> None:
    full = texts(complete(server, prompt=["aa", "bb"], max_tokens=40))
    stops = [text[15:18] for text in full]
    shown = texts(complete(server, prompt=["aa", "bb"], max_tokens=40, stop=stops))
    for whole, cut in zip(full, shown, strict=True):
        assert cut == whole[: min(whole.index(stop) for stop in stops if stop in whole)]


def test_cached_tokens_are_reported(server: Server) -> None:
    prompt = [7 + number % 200 for number in range(100)]
    first = complete(server, prompt=prompt, max_tokens=1)
    second = complete(server, prompt=prompt, max_tokens=1)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == 100
    assert texts(first) == texts(second)


def test_prompt_of_only_special_tokens(server: Server) -> None:
    assert complete(server, prompt=[1])["usage"]["prompt_tokens"] == 1
    assert complete(server, prompt=[1, 2, 0], echo=True, logprobs=1)["usage"]["prompt_tokens"] == 3


def test_full_context(server: Server) -> None:
    body = complete(server, prompt=[5] * 511, max_tokens=100)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
