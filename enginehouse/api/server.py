"""Running the application: the socket, uvicorn, and how the process ends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from enginehouse.api.app import create_app
from enginehouse.errors import EnginehouseError
from enginehouse.observability.logs import configure_logging
from enginehouse.settings import Settings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

_BACKLOG = 2048


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
        timeout_keep_alive=int(settings.server.keep_alive_s),
        timeout_graceful_shutdown=int(settings.server.shutdown_grace_s),
    )
    server = _Server(config, lambda: on_listening(_url(listener)) if on_listening else None)
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
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()
