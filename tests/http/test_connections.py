"""Clients that send too slowly, too much, or too often: an answer in the usual shape, and the connection ends."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.http.conftest import tiny_overrides
from tests.http.serving import Server

MAX_CONNECTIONS = 12
MAX_HEADER_BYTES = 4096
BODY = b'{"prompt": "hi", "max_tokens": 1}'
HEAD = b"POST /basic_generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("strict")
    limits = {
        "server__header_timeout_s": 0.5,
        "server__body_timeout_s": 0.5,
        "server__max_header_bytes": MAX_HEADER_BYTES,
        "server__max_connections": MAX_CONNECTIONS,
    }
    running = Server(tiny_overrides(directory, **limits), directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(server.address, timeout=30)


def read_to_end(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer after which the server closes the connection; (0, {}) when it says nothing."""
    received = b""
    while True:
        try:
            data = connection.recv(65536)
        except ConnectionResetError:
            break
        if not data:
            break
        received += data
    if not received:
        return 0, {}
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)


def check(answer: tuple[int, dict[str, Any]], status: int, code: str) -> None:
    assert answer[0] == status, answer
    assert set(answer[1]) == {"error"}
    assert set(answer[1]["error"]) == {"message", "type", "param", "code"}
    assert answer[1]["error"]["code"] == code


@pytest.mark.parametrize("sent", [b"P", b"POST /basic_generate HTTP/1.1\r\n", HEAD])
def test_a_head_that_does_not_end(strict: Server, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        check(read_to_end(connection), 408, "header_timeout")


def test_a_connection_that_says_nothing_is_closed(strict: Server) -> None:
    with connect(strict) as connection:
        assert read_to_end(connection) == (0, {})


def test_a_second_request_has_its_own_time(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(HEAD)
        check(read_to_end(connection), 408, "header_timeout")


@pytest.mark.parametrize(
    "declared", [b"content-length: 33\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_a_body_that_does_not_end(strict: Server, declared: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(HEAD + declared)
        check(read_to_end(connection), 408, "body_timeout")
    assert strict.get("/health").status_code == 200


def test_an_answer_may_take_longer_than_a_body(strict: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 10_000, "ignore_eos": True, "timeout": 1.0}
    # 200 when the tiny model fills its context before that; never body_timeout.
    answer = strict.post("/basic_generate", body)
    assert answer.status_code == 200 or answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "filler",
    [
        b"x-long: " + b"a" * MAX_HEADER_BYTES + b"\r\n",
        b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADER_BYTES // 8)),
    ],
    ids=["one long header", "many headers"],
)
def test_a_head_that_is_too_large(strict: Server, filler: bytes, ends: bool) -> None:
    with connect(strict) as connection:
        connection.sendall(HEAD + filler + (b"content-length: 33\r\n\r\n" + BODY if ends else b""))
        check(read_to_end(connection), 431, "headers_too_large")


def test_a_long_path_counts(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n" % (b"a" * MAX_HEADER_BYTES))
        check(read_to_end(connection), 431, "headers_too_large")


def test_no_http_at_all(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        check(read_to_end(connection), 400, "malformed_request")


def test_a_large_body_is_no_large_head(strict: Server) -> None:
    with connect(strict) as connection:
        body = BODY[:-1] + b', "user": "%b"}' % (b"u" * 8 * MAX_HEADER_BYTES)
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert b"\r\n\r\n" in connection.recv(65536)


def test_connections_are_counted_and_given_back(strict: Server) -> None:
    def ask(connection: socket.socket) -> bytes:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        return received

    for _ in range(2):  # the second time shows that closed ones are forgotten
        with ExitStack() as stack:
            opened = [stack.enter_context(connect(strict)) for _ in range(MAX_CONNECTIONS)]
            for connection in opened:
                assert ask(connection).startswith(b"HTTP/1.1 200")
            check(read_to_end(stack.enter_context(connect(strict))), 503, "too_many_connections")
            assert ask(opened[0]).startswith(b"HTTP/1.1 200")
        strict.wait_ready()
