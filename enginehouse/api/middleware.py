"""Pure ASGI middleware, outermost first: request id, access log and last error boundary; key; body size.

None of it wraps the request in tasks or streams, so a client's disconnect reaches the route unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginehouse.api.errors import (
    CLIENT_GONE_STATUS,
    BodyTimeoutError,
    ClientGoneError,
    OriginNotAllowedError,
    PayloadTooLargeError,
    UnauthorizedError,
    error_response,
    internal_error,
    send_error,
    speaks_anthropic,
)

_log = structlog.stdlib.get_logger("enginehouse.http")
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SCOPE_KEY = "enginehouse.request"
_TENANT_KEY = "enginehouse.tenant"
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key."""
_PROBES = OPEN_PATHS | {"/metrics"}
"""Paths that machines ask for every few seconds; logged at level debug."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What every part of the API may know of a request."""

    request_id: str
    arrival_s: float
    """`time.monotonic()`"""
    arrival_unix_s: float


def request_context(scope: Scope) -> RequestContext:
    """The context that `RequestContextMiddleware` put into the scope."""
    context = scope[_SCOPE_KEY]
    assert isinstance(context, RequestContext)
    return context


class RequestContextMiddleware:
    """Gives each request its id (`x-request-id`, the client's own when it is a plain word), logs its end, and is
    the outermost loop: what nobody expected is logged with the id and answered with a 500."""

    def __init__(self, app: ASGIApp, *, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if _ACCEPTABLE_ID.fullmatch(offered) else f"req_{secrets.token_hex(12)}"
        context = RequestContext(request_id, time.monotonic(), time.time())
        scope[_SCOPE_KEY] = context
        headers = [(b"x-request-id", request_id.encode("ascii"))]
        if speaks_anthropic(scope["path"]):
            headers.append((b"request-id", request_id.encode("ascii")))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGoneError:
            status = CLIENT_GONE_STATUS
        except Exception:  # noqa: BLE001 - the outermost loop: logged with the id and answered
            _log.exception("unexpected error", request_id=request_id, path=scope["path"])
            if not status:
                await send_error(internal_error(request_id), scope, receive, send_with_id)
        finally:
            if self._access_log:
                self._log_access(scope, context, status)

    def _log_access(self, scope: Scope, context: RequestContext, status: int) -> None:
        client = scope.get("client")
        write = _log.debug if scope["path"] in _PROBES else _log.info
        write(
            "access",
            request_id=context.request_id,
            client=client[0] if client else None,
            method=scope["method"],
            path=scope["path"],
            status=status or CLIENT_GONE_STATUS,
            duration_ms=round((time.monotonic() - context.arrival_s) * 1000, 2),
        )


def _tenant(key: str) -> str:
    """A name for whoever has this key, that does not give the key away."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def tenant_of(scope: Scope) -> str:
    """Who asks: the holder of one key, or "" where no keys are needed. Tenants share nothing that could tell one
    what another has asked."""
    tenant = scope.get(_TENANT_KEY, "")
    assert isinstance(tenant, str)
    return tenant


class ApiKeyMiddleware:
    """Asks for one of `keys`, as a bearer token or as Anthropic's clients send it (`x-api-key`), except on
    `OPEN_PATHS` and for CORS preflights."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._tenants = {key.encode("ascii"): _tenant(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            offered = _offered_key(Headers(scope=scope)).encode("latin-1")
            # Every key is compared, so that the time says nothing about which one was close.
            tenants = [tenant for key, tenant in self._tenants.items() if hmac.compare_digest(offered, key)]
            if not tenants:
                what = "Wrong API key." if offered else "No API key: send it as 'Authorization: Bearer KEY'."
                await send_error(UnauthorizedError(what), scope, receive, send)
                return
            scope[_TENANT_KEY] = tenants[0]
        await self._app(scope, receive, send)


def _offered_key(headers: Headers) -> str:
    scheme, _, offered = headers.get("authorization", "").partition(" ")
    return offered.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


class BodyLimitMiddleware:
    """Refuses bodies that are too large with 413, at the header when it is honest, else while reading, and bodies
    that take too long with 408."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await send_error(self._too_large(), scope, receive, send)
            return
        num_bytes, has_more = 0, True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s

        async def limited_receive() -> Message:
            nonlocal num_bytes, has_more
            if not has_more:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError as error:
                said = f"The request's body was not complete within {self._timeout_s:g} seconds."
                raise BodyTimeoutError(said) from error
            has_more = message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"The body is larger than {self._max_body_bytes} bytes.")


class HeadMiddleware:
    """HEAD is what GET answers, without the body (which the HTTP server leaves out)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class PreflightMiddleware(CORSMiddleware):
    """Starlette's, whose refusals of preflights get the error shape of all others."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        said = bytes(response.body).decode()
        refusal = error_response(OriginNotAllowedError(f"{said}. server.cors_origins names origins."), "")
        for name in ("vary", "access-control-allow-origin"):
            if name in response.headers:
                refusal.headers[name] = response.headers[name]
        return refusal
