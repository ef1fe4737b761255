"""Connections: what a client may do before there is a request to refuse.

httptools, which parses the requests, sets no bounds: a head may grow for ever, and a connection may say nothing.
Uvicorn bounds only the time between requests; its `limit_concurrency` answers in plain text, and its bound on heads is
for its other parser.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from enginehouse.api.errors import (
    HeadersTooLargeError,
    HeaderTimeoutError,
    MalformedRequestError,
    TooManyConnectionsError,
    error_object,
)
from enginehouse.errors import EnginehouseError
from enginehouse.settings import ServerSettings


def guarded_protocol(limits: ServerSettings) -> Any:
    """What uvicorn makes a connection's protocol with."""
    return partial(GuardedProtocol, limits=limits)


class GuardedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with bounds on the number of connections, and on the size and duration of request heads.

    Refusals have the error shape of all others, and close the connection.
    """

    def __init__(self, *args: Any, limits: ServerSettings, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        """Between the end of one request and the end of the next one's head."""
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(
                TooManyConnectionsError(
                    f"All {self._limits.max_connections} connections of this server are in use. Try again later.",
                    retry_after_s=1.0,
                )
            )
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._head_timer is None:  # the first bytes after an idle time, which uvicorn bounds
                self._start_head_timer()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_header_bytes and not self._is_closing():
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        if self._is_closing():
            return
        self._stop_head_timer()
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._head_bytes = 0
        if size > self._limits.max_header_bytes:
            self._refuse(self._too_large())
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_closing():
            super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        if not self._is_closing():
            self._refuse(MalformedRequestError(msg))

    def _is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.header_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_closing():
            return
        if self._is_answering():  # reading may be paused until that is over
            self._start_head_timer()
            return
        if self._head_bytes:
            seconds = self._limits.header_timeout_s
            self._refuse(
                HeaderTimeoutError(f"The request's head was not complete within {seconds:g} seconds.")
            )
        else:
            self.transport.close()

    def _too_large(self) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            f"The request's head is larger than {self._limits.max_header_bytes} bytes."
        )

    def _refuse(self, error: EnginehouseError) -> None:
        """Answer without the application, which has not seen a request, and close."""
        self._stop_head_timer()
        self.logger.info("connection refused: %s", error)
        if self._is_answering():
            self.transport.close()  # in the middle of another answer there is no place for this one
            return
        body = msgspec.json.encode(error_object(error))
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n" % len(body),
            b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % error.retry_after_s,
            b"\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        self.transport.close()
