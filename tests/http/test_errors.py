"""Every refusal has OpenAI's error shape, the right status, and names the field."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import httpx2
import pytest

from tests.http.conftest import TINY
from tests.http.serving import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def check_error(
    answer: httpx2.Response, status: int, param: str | None = None, code: str | None = None
) -> str:
    """Check status and shape, return the message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param, error
    assert error["code"] == code, error
    assert "Traceback" not in answer.text
    assert "detail" not in error
    message: str = error["message"]
    return message


COMMON: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", True), ("n", 1.5), ("n", "2"), ("n", 10**40),
    ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.0), ("max_tokens", 2**31), ("max_tokens", 10**30),
    ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", [1]),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", True), ("temperature", "1"), ("temperature", {}),
    ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_k", -2), ("top_k", 1.5), ("top_k", 10**20),
    ("min_p", -0.1), ("min_p", 1.1),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", False), ("seed", "x"),
    ("stop", ["a"] * 20), ("stop", ["a", "b", "c", "d", "e"]), ("stop", ""), ("stop", [""]), ("stop", 5),
    ("stop_token_ids", [320]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("min_tokens", -1), ("min_tokens", 17),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 11),
    ("logit_bias", {"320": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}), ("logit_bias", [1]), ("logit_bias", {"5": True}),
    ("priority", 2**40), ("timeout", 0), ("timeout", -1), ("timeout", "1"),
    ("ignore_eos", 1), ("stream", "yes"), ("stream", 1), ("user", 5), ("metadata", "x"),
    ("stream_options", {"include_usage": True}), ("model", 5),
    ("response_format", "text"), ("structured_outputs", {}), ("guided_json", 5), ("guided_json", "{"),
    ("guided_choice", []), ("guided_choice", ["a", ""]), ("guided_choice", [1]), ("guided_regex", "[a"),
    ("guided_regex", ""), ("guided_grammar", "a"), ("use_beam_search", True), ("length_penalty", 0.5), ("skip_special_tokens", False),
    ("include_stop_str_in_output", True), ("prompt_logprobs", 1), ("truncate_prompt_tokens", 5),
    ("allowed_token_ids", [1]), ("allowed_token_ids", []), ("bad_words", ["x"]), ("lora", "x"),
]  # fmt: skip


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), COMMON)
def test_common_field(server: Server, route: str, field: str, value: Any) -> None:
    prompt = {"messages": MESSAGES} if route == CHAT else {"prompt": "hi"}
    answer = server.post(route, {**prompt, "max_tokens": 16, field: value})
    param = answer.json()["error"]["param"]
    assert param.partition("[")[0] == field
    assert field in check_error(answer, 400, param)


COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("logprobs", 6), ("logprobs", True), ("logprobs", -1), ("best_of", 0), ("best_of", 129), ("echo", "yes"),
    ("suffix", "end"), ("prompt", []), ("prompt", ["a", 1]), ("prompt", [1, "a"]), ("prompt", [[1], "a"]),
    ("prompt", [320]), ("prompt", [[320]]), ("prompt", ["a"] * 1025), ("prompt", 5), ("prompt", None),
    ("prompt", {"a": 1}), ("prompt", ""), ("prompt", [[]]), ("prompt", ["a", ""]),
    ("prompt_embeds", "AAAA"), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("top_logprobs", 2),
    ("max_completion_tokens", 5),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), COMPLETION_FIELDS)
def test_completion_field(server: Server, field: str, value: Any) -> None:
    check_error(server.post(COMPLETIONS, {"prompt": "hi", field: value}), 400, field)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([-1], "prompt[0]"), ([1, 2**40], "prompt[1]"), ([1.5], "prompt[0]"), ([True], "prompt[0]")],
)
def test_prompt_item(server: Server, prompt: Any, param: str) -> None:
    check_error(server.post(COMPLETIONS, {"prompt": prompt}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"), ({"logit_bias": {"320": 1}}, "logit_bias")],
)  # fmt: skip
@pytest.mark.parametrize("echo", [False, True])
def test_completion_combination(server: Server, fields: dict[str, Any], param: str, echo: bool) -> None:
    check_error(server.post(COMPLETIONS, {"prompt": "hi", "echo": echo, **fields}), 400, param)


CHAT_FIELDS: list[tuple[str, Any]] = [
    ("tools", {"name": "f"}), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}), ("parallel_tool_calls", True), ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}), ("prediction", {"type": "content"}), ("web_search_options", {}), ("store", True),
    ("reasoning_effort", "high"), ("verbosity", "low"), ("max_completion_tokens", 0), ("top_logprobs", 5),
    ("max_completion_tokens", -1), ("logprobs", 5), ("messages", []), ("messages", "hi"), ("messages", None),
    ("continue_final_message", True), ("add_generation_prompt", False), ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"a": 1}), ("documents", [{"text": "x"}]), ("best_of", 2), ("echo", True),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CHAT_FIELDS)
def test_chat_field(server: Server, field: str, value: Any) -> None:
    check_error(server.post(CHAT, {"messages": MESSAGES, field: value}), 400, field)


def test_top_logprobs_beyond_twenty(server: Server) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}
    check_error(server.post(CHAT, body), 400, "top_logprobs")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}, "messages[1].content[1].text"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0].type"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[1].role"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ("hi", "messages[1]"),
    ],
)  # fmt: skip
def test_message(server: Server, message: Any, param: str) -> None:
    check_error(server.post(CHAT, {"messages": [*MESSAGES, message]}), 400, param)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/basic_generate", {}, "prompt"),
        ("/basic_generate", {"prompt": 5}, "prompt"),
        ("/basic_generate", {"prompt": ""}, "prompt"),
        ("/basic_generate", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/basic_generate", {"prompt": "a", "temperature": 3}, "temperature"),
        ("/generate", {"prompts": []}, "prompts"),
        ("/generate", {"prompts": "a"}, "prompts"),
        ("/generate", {"prompts": ["a", 5]}, "prompts[1]"),
        ("/generate", {"prompts": ["a"] * 1025}, "prompts"),
        ("/generate", {"prompts": ["a"], "stop": ["x"] * 20}, "stop"),
        ("/generate_stream", {"prompt": ["a"]}, "prompt"),
        ("/generate_vllm", {"prompts": [5]}, "prompts[0]"),
    ],
)
def test_teaching_routes(server: Server, route: str, body: Any, param: str | None) -> None:
    check_error(server.post(route, body), 400, param)


TEACHING_FIELDS: list[tuple[str, Any]] = [
    ("n", 2), ("best_of", 2), ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}), ("guided_regex", "a"), ("guided_choice", ["a"]), ("guided_grammar", "a"), ("logprobs", True),
    ("logprobs", 0), ("top_logprobs", 1), ("prompt_logprobs", 1), ("echo", True), ("suffix", "x"), ("tools", [{}]),
    ("tool_choice", "required"), ("stream_options", {}), ("max_completion_tokens", 5), ("use_beam_search", True),
    ("length_penalty", 2), ("skip_special_tokens", False), ("include_stop_str_in_output", True),
    ("truncate_prompt_tokens", 1), ("lora", "x"), ("allowed_token_ids", [1]), ("bad_words", ["a"]),
]  # fmt: skip
TEACHING_ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/basic_generate", {"prompt": "hi"}),
    ("/generate", {"prompts": ["hi"]}),
    ("/generate_stream", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("route", "prompt"), TEACHING_ROUTES)
def test_teaching_routes_refuse_what_they_do_not_do(
    server: Server, route: str, prompt: dict[str, Any]
) -> None:
    streams = route == "/generate_stream"
    for field, value in [*TEACHING_FIELDS, ("stream", not streams)]:
        assert field in check_error(server.post(route, {**prompt, field: value}), 400, field)
    nothing = {field: None for field, _ in TEACHING_FIELDS}
    harmless = {"n": 1, "echo": False, "logprobs": False, "tools": [], "stream": streams, "model": TINY}
    for fields in (nothing, harmless):
        answer = server.post(route, {**prompt, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("route", "prompt"), TEACHING_ROUTES)
def test_teaching_routes_know_one_model(server: Server, route: str, prompt: dict[str, Any]) -> None:
    answer = server.post(route, {**prompt, "model": "gpt-17"})
    assert TINY in check_error(answer, 404, "model", "model_not_found")


def test_generate_vllm_says_that_it_cannot(server: Server) -> None:
    answer = server.post("/generate_vllm", {"prompts": ["a"]})
    assert "vLLM" in check_error(answer, 503, code="no_capacity")
    assert answer.headers["x-should-retry"] == "false"


BODIES: list[tuple[bytes, str | None]] = [
    (b"", None), (b"{", None), (b"[]", None), (b"null", None), (b'"x"', None), (b"5", None), (b"{}", "prompt"),
    (b'{"prompt":"a"} x', None), (b"\xef\xbb\xbf{}", None), (b'{"prompt":"\xff"}', None),
    (b'{"unknown":"\xed\xa0\x80","prompt":"a"}', None), (b'{"\xff":1,"prompt":"a"}', None),
    (b'{"prompt":"\\ud800"}', None), (b'{"prompt":"a\nb"}', None), (b"{'prompt':'a'}", None),
    (b'{"prompt":"a","temperature":NaN}', "temperature"), (b'{"prompt":"a","top_p":Infinity}', "top_p"),
    (b'{"prompt":"a","min_p":-Infinity}', "min_p"), (b'{"prompt":"a","temperature":1e999}', "temperature"),
    (b'{"prompt":"a","logit_bias":{"5":NaN}}', "logit_bias.5"), (b'{"prompt":"a","timeout":1e999}', "timeout"),
    (b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", "max_tokens"),
    (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "prompt[0][0]"), (b"[" * 100_000, None),
    (b'{"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"prompt":"a"}', None),
    (b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b',"prompt":"a"}', None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BODIES, ids=range(len(BODIES)))
def test_malformed_body(server: Server, body: bytes, param: str | None) -> None:
    check_error(httpx2.post(server.url + COMPLETIONS, content=body, headers=JSON), 400, param)


def test_unknown_model(server: Server) -> None:
    for route, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        for stream in (False, True):
            answer = server.post(route, {**body, "model": "gpt-17", "stream": stream})
            assert TINY in check_error(answer, 404, "model", "model_not_found")
    check_error(server.get("/v1/models/gpt-17"), 404, "model", "model_not_found")
    check_error(server.get("/v1/models/org/name"), 404, "model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"prompt": "12345678 " * 400}),
        (COMPLETIONS, {"prompt": [5] * 513}),
        (COMPLETIONS, {"prompt": [[5], [5] * 513]}),
        (CHAT, {"messages": [{"role": "user", "content": "12345678 " * 400}]}),
    ],
)
def test_prompt_too_long(server: Server, route: str, body: dict[str, Any], stream: bool) -> None:
    answer = server.post(route, {**body, "stream": stream})
    param = "prompt" if route == COMPLETIONS else "messages"
    message = check_error(answer, 400, param, "context_length_exceeded")
    assert "512" in message
    server.wait_idle()


def test_body_too_large(server: Server) -> None:
    ten_megabytes = b'{"prompt":"' + b"a" * 10_000_000 + b'"}'
    answer = httpx2.post(server.url + COMPLETIONS, content=ten_megabytes, headers=JSON)
    check_error(answer, 413, code="body_too_large")

    def chunks() -> Any:
        for start in range(0, len(ten_megabytes), 100_000):
            yield ten_megabytes[start : start + 100_000]

    answer = httpx2.post(server.url + COMPLETIONS, content=chunks(), headers=JSON)
    check_error(answer, 413, code="body_too_large")


def test_long_prompt_below_the_body_limit_is_refused_quickly(server: Server) -> None:
    start = time.monotonic()
    answer = server.post(COMPLETIONS, {"prompt": "a" * 7_000_000})
    check_error(answer, 400, "prompt", "context_length_exceeded")
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"],
)
def test_content_type(server: Server, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = httpx2.post(server.url + COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)
    check_error(answer, 415, code="unsupported_media_type")


def test_content_type_with_charset_is_accepted(server: Server) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    headers = {"content-type": "application/json; charset=utf-8"}
    assert httpx2.post(server.url + COMPLETIONS, content=body, headers=headers).status_code == 200


def test_compressed_body_is_no_json(server: Server) -> None:
    body = gzip.compress(b'{"prompt":"a"}')
    headers = {**JSON, "content-encoding": "gzip"}
    check_error(httpx2.post(server.url + COMPLETIONS, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nope", "/v1/completions/", "/v2/models", "/../etc/passwd", "/%00"]
)
def test_unknown_route(server: Server, path: str) -> None:
    check_error(server.get(path), 404, code="route_not_found")
    check_error(server.post(path, {}), 404, code="route_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("DELETE", COMPLETIONS),
        ("PUT", "/basic_generate"),
        ("POST", "/health"),
        ("POST", "/v1/models"),
    ],
)
def test_wrong_method(server: Server, method: str, path: str) -> None:
    answer = httpx2.request(method, server.url + path)
    message = check_error(answer, 405, code="method_not_allowed")
    assert method in message
    assert answer.headers["allow"]


def test_harmless_values_of_unsupported_fields_pass(server: Server) -> None:
    harmless = {
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"], "store": False,
        "parallel_tool_calls": None, "use_beam_search": False, "functions": None, "audio": None, "stop": None,
        "stream_options": None, "logit_bias": None, "logprobs": None, "top_logprobs": None, "n": None, "seed": None,
        "continue_final_message": False, "add_generation_prompt": True, "chat_template": None, "documents": [],
        "chat_template_kwargs": {}, "echo": False, "best_of": 1, "bad_words": [], "allowed_token_ids": None,
        "max_tokens": 2, "something_new": {"deep": [1]}, "user": "me", "metadata": {"a": "b"}, "top_k": -1,
    }  # fmt: skip
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": "hi", "novel": 1}], **harmless})
    assert answer.status_code == 200, answer.text


def test_request_id_is_the_clients_when_it_is_a_plain_word(server: Server) -> None:
    assert (
        server.get("/health", headers={"x-request-id": "abc-1.2_3:4"}).headers["x-request-id"]
        == "abc-1.2_3:4"
    )
    for bad in ("a b", "x" * 129, "é", "a\tb"):
        got = server.get("/health", headers=[(b"x-request-id", bad.encode())]).headers["x-request-id"]
        assert got.startswith("req_")


def test_server_is_well_after_all_that(server: Server) -> None:
    assert server.get("/health").json()["status"] == "ok"
    assert (
        server.post("/basic_generate", {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}).status_code
        == 200
    )
    assert not [line for line in server.log_lines() if line["level"] == "error"]
