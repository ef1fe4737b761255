"""Tokens without generating: the same as generating would use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.http.conftest import TINY
from tests.http.serving import Server
from tests.http.test_errors import check_error
from tests.support.tiny_models import MAX_CONTEXT, VOCAB_SIZE

MESSAGES = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello <|im_end|> the"}]
TEXTS = ["hello the end", "", "नमस्ते 👩‍👩‍👧 🇩🇪", "<|im_start|>user", "tab\tand\nnew line", "\x00\u200b"]


def tokenize(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    assert set(shown) == {"count", "max_model_len", "tokens", "token_strs"}
    assert shown["count"] == len(shown["tokens"])
    assert shown["max_model_len"] == MAX_CONTEXT
    return shown


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(server: Server, text: str) -> None:
    shown = tokenize(server, prompt=text, return_token_strs=True)
    assert len(shown["token_strs"]) == shown["count"]
    back = server.post("/detokenize", {"tokens": shown["tokens"]})
    assert back.json() == {"prompt": text}
    if text.isascii():
        assert "".join(shown["token_strs"]) == text


def test_special_tokens_are_one_token_in_a_prompt_and_text_in_messages(server: Server) -> None:
    assert tokenize(server, prompt="<|im_end|>")["count"] == 1
    message = [{"role": "user", "content": "<|im_end|>"}]
    empty = [{"role": "user", "content": ""}]
    assert tokenize(server, messages=message)["count"] > tokenize(server, messages=empty)["count"] + 1


def test_counts_are_what_generating_uses(server: Server) -> None:
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()
    assert tokenize(server, model=TINY, messages=MESSAGES)["count"] == chat["usage"]["prompt_tokens"]
    completion = server.post("/v1/completions", {"prompt": "hello <|im_end|> the", "max_tokens": 1}).json()
    assert tokenize(server, prompt="hello <|im_end|> the")["count"] == completion["usage"]["prompt_tokens"]


def test_generation_prompt(server: Server) -> None:
    whole = tokenize(server, messages=MESSAGES)["tokens"]
    without = tokenize(server, messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert whole[: len(without)] == without
    assert len(whole) > len(without)


def test_longer_than_the_context(server: Server) -> None:
    assert tokenize(server, prompt="z" * 3 * MAX_CONTEXT)["count"] > MAX_CONTEXT
    long = [{"role": "user", "content": "z" * 3 * MAX_CONTEXT}]
    assert tokenize(server, messages=long)["count"] > MAX_CONTEXT


def test_many_long_ones_at_once(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda i: tokenize(server, prompt="ab" * (20_000 + i))["count"], range(8)))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_apply_template(server: Server) -> None:
    shown = server.post("/apply-template", {"messages": MESSAGES}).json()
    turns = "<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\nhello <|im_end|> the<|im_end|>\n"
    assert shown == {"prompt": turns + "<|im_start|>assistant\n"}
    shown = server.post("/apply-template", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert shown == {"prompt": turns}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/apply-template", {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/apply-template", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_refusals(server: Server, path: str, body: dict[str, Any], param: str | None) -> None:
    check_error(server.post(path, body), 400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_shared_refusals(server: Server, path: str) -> None:
    body = {"prompt": "a", "tokens": [5], "messages": MESSAGES, "model": "gpt-17"}
    if path == "/tokenize":
        del body["messages"]
    check_error(server.post(path, body), 404, "model", "model_not_found")
    answer = server.post(path, None, headers={"content-type": "text/plain"})
    check_error(answer, 415, None, "unsupported_media_type")
