"""What goes over the wire, byte by byte: one frame a send, nothing held back, connections that stay usable."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from tests.http.serving import Server


class RawConnection:
    """HTTP by hand over one socket."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(server.address, timeout=30)
        self.received = b""

    def send(self, path: str, body: Any, *, headers: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
        self.socket.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`; the rest stays for the next read."""
        while mark not in self.received:
            data = self.socket.recv(65536)
            assert data, self.received
            self.received += data
        found, _, self.received = self.received.partition(mark)
        return found + mark

    def close(self) -> None:
        self.socket.close()


BODY = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "temperature": 0, "stream": True}


def chunks(raw: bytes) -> list[bytes]:
    """Decode HTTP chunks."""
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return parts


def test_every_chunk_is_one_frame(server: Server) -> None:
    connection = RawConnection(server)
    connection.send("/v1/completions", BODY)
    head = connection.read_until(b"\r\n\r\n").lower()
    assert b"http/1.1 200" in head
    assert b"transfer-encoding: chunked" in head
    parts = chunks(connection.read_until(b"0\r\n\r\n"))
    assert parts.pop() == b""
    assert len(parts) > 20
    for part in parts:
        assert part.startswith(b"data: ")
        assert part.endswith(b"\n\n")
        assert part.count(b"\n\n") == 1
        part.decode("utf-8")
    assert parts[-1] == b"data: [DONE]\n\n"
    connection.send("/v1/completions", {**BODY, "stream": False})
    assert b"200 ok" in connection.read_until(b"\r\n\r\n").lower(), "the connection is used again"
    connection.close()


def test_frames_arrive_while_the_answer_is_computed(server: Server) -> None:
    connection = RawConnection(server)
    connection.send("/v1/completions", {**BODY, "max_tokens": 400})
    connection.read_until(b"data: ")
    first_s = time.monotonic()
    connection.read_until(b"[DONE]")
    assert time.monotonic() - first_s > 0.02
    connection.close()


def test_slow_reader_gets_everything(server: Server) -> None:
    """About two megabytes, more than the sockets hold, read after the model has long finished."""
    connection = RawConnection(server)
    connection.send("/v1/completions", {**BODY, "max_tokens": 450, "logprobs": 5, "n": 8})
    connection.read_until(b"\r\n\r\n")
    time.sleep(2.0)
    raw = b"".join(chunks(connection.read_until(b"\r\n0\r\n\r\n")))
    frames = [frame.removeprefix(b"data: ") for frame in raw.split(b"\n\n")]
    assert frames[-2:] == [b"[DONE]", b""]
    choices = [json.loads(frame)["choices"][0] for frame in frames[:-2]]
    for index in range(8):
        tokens = [c["logprobs"]["tokens"] for c in choices if c["index"] == index and c["logprobs"]]
        assert sum(map(len, tokens)) == 450
    connection.close()


def test_pipelined_requests(server: Server) -> None:
    """The next request on the same connection is no sign that the client has gone."""
    connection = RawConnection(server)
    connection.send("/v1/completions", {**BODY, "max_tokens": 300})
    connection.send("/v1/completions", {**BODY, "max_tokens": 3, "stream": False})
    assert b"[DONE]" in connection.read_until(b"0\r\n\r\n")
    answer = connection.read_until(b"\r\n\r\n")
    assert b"200 ok" in answer.lower()
    connection.close()


def test_expect_continue(server: Server) -> None:
    data = json.dumps({**BODY, "stream": False}).encode()
    connection = RawConnection(server)
    connection.socket.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
        b"content-length: %d\r\n\r\n" % len(data)
    )
    assert b"100 continue" in connection.read_until(b"\r\n\r\n").lower()
    connection.socket.sendall(data)
    assert b"200 ok" in connection.read_until(b"\r\n\r\n").lower()
    connection.close()


def test_malformed_http_does_not_hurt(server: Server) -> None:
    for raw in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        connection = RawConnection(server)
        connection.socket.sendall(raw)
        connection.socket.recv(1000)
        connection.close()
    assert server.get("/health").status_code == 200
