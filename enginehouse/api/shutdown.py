"""How the server stops: new requests are refused, those that run may finish, the rest is told why it does not."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginehouse.api.encoder_host import Encoders
from enginehouse.api.engine_host import EngineHost
from enginehouse.api.errors import send_error
from enginehouse.errors import ShuttingDownError

_ALWAYS_ANSWERED = frozenset({"/health", "/ready", "/metrics", "/version"})


class Shutdown:
    """Whether the server is on its way out, and the engines to close then; `app.state.shutdown`."""

    def __init__(self, host: EngineHost, encoders: Encoders) -> None:
        self._host, self._encoders = host, encoders
        self.has_begun = False

    def begin(self) -> None:
        """Refuse requests from now on; what runs goes on."""
        self.has_begun = True
        self._host.is_stopping = True

    async def close(self) -> None:
        """Fail what still runs with `ShuttingDownError` and end the workers. Safe to call twice."""
        self.begin()
        await asyncio.gather(self._host.close(), self._encoders.close())


class ShutdownMiddleware:
    """Answers 503 `shutting_down` once the server stops, to requests that come then and to those that are
    cancelled at last. Routes for those who run the server are answered to the end."""

    def __init__(self, app: ASGIApp, *, shutdown: Shutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._shutdown.has_begun and scope["path"] not in _ALWAYS_ANSWERED:
            await send_error(_refusal(), scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            # The HTTP server cancels what outlives every patience; as an exception it would log a traceback and
            # answer in plain text.
            if not self._shutdown.has_begun:
                raise
            if not started:
                await send_error(_refusal(), scope, receive, send)


def _refusal() -> ShuttingDownError:
    return ShuttingDownError("The server is shutting down.")
