"""Health, readiness, metrics, version, models, CORS, keys, the API description."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import pytest

import enginehouse
from tests.http.conftest import TINY, tiny_overrides
from tests.http.serving import Server, parse_metrics
from tests.http.test_errors import check_error


def test_health(server: Server) -> None:
    body = server.get("/health").json()
    assert body["status"] == "ok"
    assert body["state"] == "ready"
    assert body["worker_heartbeat_age_s"] < 5


def test_ready(server: Server) -> None:
    answer = server.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "state": "ready"})


def test_version(server: Server) -> None:
    body = server.get("/version").json()
    assert body["version"] == enginehouse.__version__
    assert body["model"] == TINY
    assert body["num_threads"] == 1
    assert body["kernels"]


def test_models(server: Server) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    model, encoder = listed["data"]
    assert (encoder["task"], encoder["object"]) == ("embed", "model")
    assert encoder["state"] in ("unloaded", "ready")  # whether another test has asked for it
    assert server.get(f"/v1/models/{encoder['id']}").json() == encoder
    assert model["id"] == model["root"] == TINY
    assert (model["object"], model["owned_by"], model["parent"]) == ("model", "enginehouse", None)
    assert model["max_model_len"] == 512
    assert (model["state"], model["progress"]) == ("ready", 1.0)
    assert abs(model["created"] - time.time()) < 3600
    assert server.get(f"/v1/models/{TINY}").json() == model


def test_metrics(server: Server) -> None:
    before = server.metric("enginehouse_tokens_total", model=TINY, kind="output")
    finished = server.metric("enginehouse_requests_total", route="/basic_generate", status="200")
    body = {"prompt": "hello", "max_tokens": 7, "ignore_eos": True}
    assert server.post("/basic_generate", body).status_code == 200
    assert server.metric("enginehouse_tokens_total", model=TINY, kind="output") == before + 7
    assert server.metric("enginehouse_requests_total", route="/basic_generate", status="200") == finished + 1
    refused = server.metric("enginehouse_refusals_total", reason="model_not_found")
    server.post("/v1/completions", {"prompt": "a", "model": "none"})
    assert server.metric("enginehouse_refusals_total", reason="model_not_found") == refused + 1
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {name for name, _, _ in parse_metrics(answer.text)}
    for name in (
        "requests_total", "request_seconds_bucket", "queue_seconds_count", "time_to_first_token_seconds_sum",
        "inter_token_seconds_bucket", "refusals_total", "running_sequences", "waiting_sequences", "kv_blocks",
        "prefix_hit_tokens_total", "preemptions_total", "worker_restarts_total", "resumed_sequences_total",
        "model_state", "model_load_seconds", "model_resident_bytes", "steps_total",
    ):  # fmt: skip
        assert f"enginehouse_{name}" in names
    assert {"process_resident_memory_bytes", "process_open_fds", "enginehouse_event_loop_tasks"} <= names
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in names


def test_unknown_models_make_no_new_series(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "a", "model": "series-bomb"})
    assert "series-bomb" not in server.get("/metrics").text


def test_request_record(server: Server) -> None:
    body = {"prompt": "the secret prompt", "max_tokens": 5, "ignore_eos": True}
    text = server.post("/basic_generate", body, headers={"x-request-id": "record-1"}).json()["generated_text"]
    record = server.wait_log_line(request_id="record-1", event="request")
    assert (record["route"], record["model"], record["status"]) == ("/basic_generate", TINY, 200)
    assert (record["outcome"], record["finish_reasons"]) == ("finished", ["length"])
    assert record["input_tokens"] > 5
    assert record["output_tokens"] == 5
    parts = [record[f"{name}_ms"] for name in ("queue", "prefill", "decode", "transfer")]
    assert sum(parts) == pytest.approx(record["e2e_ms"], abs=0.1)
    assert record["time_to_first_token_ms"] <= record["e2e_ms"]
    assert "secret prompt" not in server.log()
    assert len(text) < 4 or text not in server.log()


def test_access_log(server: Server) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/no/such/route"):
        server.get(path, headers={"x-request-id": "access-1"})
    lines = [line for line in server.log_lines() if line.get("request_id") == "access-1"]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/models", 200),
        ("/no/such/route", 404),
    ]
    assert all(line["event"] == "access" and line["duration_ms"] >= 0 for line in lines)


def test_openapi_describes_every_route(server: Server) -> None:
    description = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/basic_generate", "/generate", "/generate_stream", "/health"} <= set(
        description["paths"]
    )  # fmt: skip
    assert "422" not in str(description["paths"])
    chat = description["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert schema.rpartition("/")[2] in description["components"]["schemas"]
    assert server.get("/docs").status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"])
def test_pages_of_this_machine_may_call(server: Server, origin: str) -> None:
    url = f"{server.url}/v1/chat/completions"
    answer = httpx2.options(url, headers={"origin": origin, **PREFLIGHT})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    refused = httpx2.post(url, content=b"x", headers={"origin": origin})
    assert refused.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost.evil.example", "null"])
def test_other_pages_may_not(server: Server, origin: str) -> None:
    answer = httpx2.options(f"{server.url}/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
    assert "server.cors_origins" in check_error(answer, 400, code="origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


def test_preflight_for_another_method_is_refused(server: Server) -> None:
    headers = {"origin": "http://localhost:3000", "access-control-request-method": "PATCH"}
    answer = httpx2.options(f"{server.url}/v1/models", headers=headers)
    assert "method" in check_error(answer, 400, code="origin_not_allowed")
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/v1/models",
        f"/v1/models/{TINY}",
        "/openapi.json",
        "/docs",
    ],
)
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    with httpx2.Client(
        base_url=server.url, timeout=60
    ) as client:  # one connection: what follows shows its end
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert set(head.headers) == set(got.headers)
        assert head.headers["content-type"] == got.headers["content-type"]
        assert client.get("/version").status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 405), ("/no/such/route", 404)])
def test_head_on_other_routes(server: Server, path: str, status: int) -> None:
    answer = httpx2.head(server.url + path)
    assert (answer.status_code, answer.content) == (status, b"")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("guarded")
    options = {
        "server__api_keys": ["open-sesame", "another-key"],
        "server__cors_origins": ["https://app.example"],
    }
    running = Server(tiny_overrides(directory, **options), directory / "log").start()
    yield running.wait_ready()
    running.stop()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer wrong",
        "Bearer",
        "Basic open-sesame",
        "open-sesame",
        "Bearer open-sesamé",
        "Bearer open-sesame2",
    ],
)
def test_wrong_key(guarded: Server, header: str | None) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    answer = httpx2.get(f"{guarded.url}/v1/models", headers=headers)
    check_error(answer, 401, code="invalid_api_key")
    check_error(httpx2.get(f"{guarded.url}/metrics", headers=headers), 401, code="invalid_api_key")
    check_error(httpx2.get(f"{guarded.url}/no/such/route", headers=headers), 401, code="invalid_api_key")


def test_right_key(guarded: Server) -> None:
    for key in ("open-sesame", "another-key"):
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
        assert TINY in [model.id for model in client.models.list()]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="no", max_retries=0).models.list()


def test_holders_of_different_keys_share_no_computation(guarded: Server) -> None:
    """How soon an answer comes, and `cached_tokens`, say nothing about what others have asked."""
    body = {"prompt": "a prompt of more than one block of tokens, " * 3, "max_tokens": 1}

    def cached_tokens(key: str) -> int:
        answer = guarded.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    assert cached_tokens("open-sesame") == 0
    assert cached_tokens("open-sesame") > 0
    assert cached_tokens("another-key") == 0
    assert cached_tokens("another-key") > 0


def test_health_and_preflight_need_no_key(guarded: Server) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/ready").status_code == 200
    origin = {"origin": "https://app.example", **PREFLIGHT}
    answer = httpx2.options(f"{guarded.url}/v1/chat/completions", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_keys_are_not_logged(guarded: Server) -> None:
    assert "sesame" not in guarded.log()


def test_port_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"Port {port} is in use on 127.0.0.1"):
            Server({**tiny_overrides(tmp_path), "server.port": port}, tmp_path / "log").start()


def test_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    overrides = {**tiny_overrides(tmp_path), "model.source": str(tmp_path / "nowhere")}
    failing = Server(overrides, tmp_path / "log").start()
    assert failing.process.wait(30) == 1
    assert "nowhere" in failing.log().splitlines()[-1]
    assert "Traceback" not in failing.log()


def test_stopping_leaves_no_process(tmp_path: Path) -> None:
    running = Server(tiny_overrides(tmp_path), tmp_path / "log").start().wait_ready()
    family = [running.pid, *(child.pid for child in psutil.Process(running.pid).children(recursive=True))]
    assert len(family) >= 2
    assert running.stop() in (0, -signal.SIGTERM)
    assert not [pid for pid in family if psutil.pid_exists(pid)]


def test_health_answers_about_a_second_after_the_start(tmp_path: Path) -> None:
    start = time.monotonic()
    running = Server(tiny_overrides(tmp_path), tmp_path / "log").start()
    try:
        assert running.get("/health").status_code == 200
        # A second on a quiet machine; the limit leaves room for one that runs other tests.
        assert time.monotonic() - start < 5
    finally:
        running.stop()


def test_import_of_the_api_brings_no_model_code() -> None:
    code = "import sys, enginehouse.api.server; print([m for m in ('numpy', 'tokenizers', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
