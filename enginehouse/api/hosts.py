"""By which names the server may be addressed.

A page of any site can let its own name point to 127.0.0.1 (DNS rebinding); to the browser it then is of the same
origin as the server, and CORS does not hold it. What gives it away is the name in its requests' `Host`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from enginehouse.api.errors import HostNotAllowedError, send_error
from enginehouse.settings import ServerSettings, is_loopback

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PORT = re.compile(r":[0-9]*$")
_MAX_SHOWN = 100


def allowed_names(server: ServerSettings) -> frozenset[str] | None:
    """The names that requests may use, in lower case and without ports; None: any.

    Where a key is needed, or other machines shall come, names are not what keeps strangers out: there all are
    allowed unless the settings list some.
    """
    names = {name.lower() for name in server.allowed_hosts}
    is_private = is_loopback(server.host) and not server.api_keys
    if "*" in names or not (names or is_private):
        return None
    own = f"[{server.host}]" if ":" in server.host else server.host
    return frozenset({*_LOCAL_NAMES, *names, own.lower()})


def host_name(header: str) -> str:
    """The name in a `Host` header: lower case, without port and final dot."""
    name = _PORT.sub("", header.strip().lower())
    return name.removesuffix(".")


class HostMiddleware:
    """Refuses requests that address the server by a name not in `names`, with 403 and on every path. A request
    without `Host` passes: no browser sends one."""

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and host_name(value.decode("latin-1")) not in self._names:
                    shown = ascii(value.decode("latin-1")[:_MAX_SHOWN])
                    error = HostNotAllowedError(
                        f"This server does not answer to the name {shown}. If it should, add the name to its setting "
                        "server.allowed_hosts."
                    )
                    await send_error(error, scope, receive, send)
                    return
        await self._app(scope, receive, send)
