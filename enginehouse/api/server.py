"""Running the application: the socket, uvicorn, and how the process ends."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from enginehouse.api.app import create_app
from enginehouse.api.connection import guarded_protocol
from enginehouse.api.shutdown import Shutdown
from enginehouse.errors import EnginehouseError
from enginehouse.observability.logs import configure_logging
from enginehouse.settings import Settings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

_BACKLOG = 2048
_DELIVERY_S = 5.0
"""For clients to take their answers after the last request was ended."""
_LAST_S = 2
"""For tasks to notice that their connections are closed."""
_POLL_S = 0.05


class ListenError(EnginehouseError):
    """The address cannot be listened on: the port is taken, or it is not ours."""

    code = "cannot_listen"


def serve(
    settings: Settings,
    *,
    on_listening: Callable[[str], None] | None = None,
    on_ready: Callable[[LLMEngine], None] | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> None:
    """Serve until a signal says stop; blocks.

    `on_listening` gets the URL once requests are accepted, `on_ready` the engine once the model is in memory.
    Raises `SettingsError` when the address would be open to others without a key, `ListenError` when it is not
    to be had, and whatever error kept the model from loading (after closing the server).
    """
    settings.check_exposure()
    configure_logging(settings.log.level, settings.log.format)
    listener = listen(settings.server.host, settings.server.port)
    failures: list[EnginehouseError] = []
    server: uvicorn.Server

    def on_failed(error: EnginehouseError) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(settings, on_ready=on_ready, on_failed=on_failed, on_progress=on_progress)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=guarded_protocol(settings.server),
        # Whole seconds, to uvicorn; rounded up, because 0 would mean at once.
        timeout_keep_alive=math.ceil(settings.server.keep_alive_s),
        timeout_graceful_shutdown=_LAST_S,
    )
    server = _Server(
        config,
        on_started=lambda: on_listening(_url(listener)) if on_listening else None,
        shutdown=app.state.shutdown,
        grace_s=settings.server.shutdown_grace_s,
    )
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    if failures:
        raise failures[0]


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `ListenError` saying what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"Cannot listen on {host}: {error.strerror or error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ListenError(
                f"Port {port} is in use on {host}. Choose another one: --port {port + 1}"
            ) from error
        raise ListenError(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Uvicorn, with another end. Its own cancels the tasks that outlive the grace: answers end in plain-text 500s
    and tracebacks. Here the engines end the requests, each with its own error, before uvicorn closes connections.
    A second signal ends every patience."""

    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[], None], shutdown: Shutdown, grace_s: float
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._shutdown = shutdown
        self._grace_s = grace_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.force_exit or self.should_exit
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        self._shutdown.begin()
        await self._answered_within(self._grace_s)
        await self._shutdown.close()
        await self._answered_within(_DELIVERY_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a client that does not take its answer; idle ones too
        await super().shutdown(sockets)
        if self.force_exit:  # which uvicorn takes for a reason not to end the application
            await self.lifespan.shutdown()

    async def _answered_within(self, timeout_s: float) -> None:
        """Until no request is being answered, at most so long, and not at all after a second signal."""
        deadline_s = time.monotonic() + timeout_s
        # Uvicorn has no event for "no task is left".
        while self.server_state.tasks and not self.force_exit and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
