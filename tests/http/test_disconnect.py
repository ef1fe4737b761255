"""A client that leaves, at any moment, ends its request at once and hurts nobody."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.conftest import tiny_overrides
from tests.http.serving import Server
from tests.http.test_framing import RawConnection
from tests.support.tiny_models import write_tiny_llama

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}

LONG_MESSAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1900,
    "ignore_eos": True,
}
LONG_RESPONSE: dict[str, Any] = {"input": "hi", "max_output_tokens": 1900, "ignore_eos": True}


def cancelled(server: Server) -> float:
    return server.metric("enginehouse_requests_total", status="499")


def reset(connection: RawConnection) -> None:
    """Close with RST instead of FIN."""
    linger = struct.pack("ii", 1, 0)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def half_close(connection: RawConnection) -> None:
    connection.socket.shutdown(socket.SHUT_WR)


LEAVING = {"close": RawConnection.close, "reset": reset, "half-close": half_close}


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model that takes its time: a long answer lasts seconds, so there is a middle to leave in."""
    directory = tmp_path_factory.mktemp("slow")
    overrides = tiny_overrides(directory, engine__kernels="numpy", engine__batching__max_sequences=8)
    model = write_tiny_llama(directory / "slow-model", num_layers=6, max_context=2048)
    running = Server({**overrides, "model.source": str(model)}, directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def busy(slow_server: Server) -> Iterator[Server]:
    """The slow server, idle before and after."""
    slow_server.wait_idle()
    yield slow_server
    slow_server.wait_idle(2.0)


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/completions", {**LONG, "stream": False}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": False}),
        ("/generate_stream", LONG),
        ("/basic_generate", LONG),
        ("/v1/messages", {**LONG_MESSAGE, "stream": True}),
        ("/v1/messages", {**LONG_MESSAGE, "stream": False}),
        ("/v1/responses", {**LONG_RESPONSE, "stream": True}),
        ("/v1/responses", {**LONG_RESPONSE, "stream": False}),
    ],
)
def test_leaving_while_it_computes(busy: Server, leave: str, path: str, body: dict[str, Any]) -> None:
    before, computed = cancelled(busy), busy.metric("enginehouse_tokens_total", kind="output")
    connection = RawConnection(busy)
    connection.send(path, body)
    if path == "/generate_stream" or body.get("stream"):
        connection.read_until(b"data: ")
    else:
        wait_for(lambda: busy.metric("enginehouse_running_sequences") > 0)
    LEAVING[leave](connection)
    wait_for(lambda: cancelled(busy) == before + 1)
    busy.wait_idle(2.0)
    produced = busy.metric("enginehouse_tokens_total", kind="output") - computed
    assert produced < 1900 * body.get("n", 1) * (3 if isinstance(body.get("prompt"), list) else 1)
    connection.close()


def test_leaving_before_the_body_is_complete(busy: Server) -> None:
    before = cancelled(busy)
    connection = RawConnection(busy)
    connection.socket.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    time.sleep(0.05)
    connection.close()
    wait_for(lambda: cancelled(busy) == before + 1)


def test_leaving_while_queued(busy: Server) -> None:
    """More clients than can run at once: those that wait are forgotten without having run."""
    before = cancelled(busy)
    connections = [RawConnection(busy) for _ in range(40)]
    for connection in connections:
        connection.send("/v1/completions", {**LONG, "stream": True})
    wait_for(lambda: busy.metric("enginehouse_waiting_sequences") >= 30)
    for connection in reversed(connections):
        connection.close()
    wait_for(lambda: cancelled(busy) == before + 40)


def test_the_others_lose_nothing(busy: Server) -> None:
    body = {**LONG, "max_tokens": 120, "prompt": "the one who stays"}
    alone = busy.post("/v1/completions", body).json()["choices"][0]["text"]
    leavers = [RawConnection(busy) for _ in range(10)]
    stayer = RawConnection(busy)
    for number, leaver in enumerate(leavers):
        leaver.send("/v1/completions", {**LONG, "prompt": f"leaver {number}", "stream": True})
        if number == 5:
            stayer.send("/v1/completions", body)
    for leaver in leavers:
        leaver.read_until(b"data: ")
        leaver.close()
    raw = stayer.read_until(b'"total_tokens"')
    text = json.JSONDecoder().raw_decode(raw.decode().partition('"text":')[2])[0]
    assert text == alone
    stayer.close()


def test_record_of_a_cancelled_request(busy: Server) -> None:
    connection = RawConnection(busy)
    connection.send("/v1/completions", {**LONG, "stream": True}, headers="x-request-id: leaver-1\r\n")
    connection.read_until(b"data: ")
    connection.close()

    def records() -> list[dict[str, Any]]:
        return [line for line in busy.log_lines() if line.get("request_id") == "leaver-1"]

    wait_for(lambda: len(records()) == 2)
    (record,) = [line for line in records() if line["event"] == "request"]
    assert (record["status"], record["outcome"], record["error_type"]) == (499, "cancelled", "client_gone")
    assert 0 < record["output_tokens"] < 1900
    assert record["queue_ms"] <= record["time_to_first_token_ms"] <= record["e2e_ms"]
    assert record["prefill_ms"] is not None
    assert record["decode_ms"] is not None
    (access,) = [line for line in records() if line["event"] == "access"]
    assert access["status"] in (200, 499)
