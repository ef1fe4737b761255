"""Errors on the wire: every answer that is not a success is made here, in OpenAI's error shape, or in Anthropic's
below `/v1/messages`.

| raised | status |
|---|---|
| any `EnginehouseError` | its class's `status` and `code`, `Retry-After` when it knows one |
| `RouteNotFoundError`, `MethodNotAllowedError` | 404, 405 |
| `UnauthorizedError` | 401 |
| `ResponseNotFoundError` | 404 |
| `PayloadTooLargeError`, `UnsupportedMediaTypeError` | 413, 415 |
| `HostNotAllowedError`, `OriginNotAllowedError` | 403, 400 |
| `HeaderTimeoutError`, `BodyTimeoutError`, `HeadersTooLargeError`, `TooManyConnectionsError` | 408, 408, 431, 503 |
| anything else | 500 without a word about the inside; the log has the traceback and the request id |
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginehouse.errors import EnginehouseError, InvalidRequestError

CLIENT_GONE_STATUS = 499
"""Only ever logged: the client left before the answer was complete."""


class RouteNotFoundError(InvalidRequestError):
    """No route has this path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, for other methods."""

    status = 405
    code = "method_not_allowed"


class PayloadTooLargeError(InvalidRequestError):
    """The body is larger than `server.max_body_bytes`."""

    status = 413
    code = "body_too_large"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class MalformedRequestError(InvalidRequestError):
    """No HTTP request at all."""

    code = "malformed_request"


class HostNotAllowedError(InvalidRequestError):
    """The request addresses the server by a name that it does not answer to."""

    status = 403
    code = "host_not_allowed"


class OriginNotAllowedError(InvalidRequestError):
    """A page of this origin, or with this method or header, may not call the API."""

    code = "origin_not_allowed"


class HeadersTooLargeError(InvalidRequestError):
    """The request's head is larger than `server.max_header_bytes`."""

    status = 431
    code = "headers_too_large"


class HeaderTimeoutError(EnginehouseError):
    """The request's head took longer than `server.header_timeout_s`."""

    status = 408
    type = "timeout_error"
    code = "header_timeout"


class BodyTimeoutError(EnginehouseError):
    """The request's body took longer than `server.body_timeout_s`."""

    status = 408
    type = "timeout_error"
    code = "body_timeout"
    closes = True
    """The rest of the body is not waited for: the connection ends with the answer."""


class TooManyConnectionsError(EnginehouseError):
    """`server.max_connections` are open."""

    status = 503
    type = "service_unavailable_error"
    code = "too_many_connections"


class UnauthorizedError(EnginehouseError):
    """No key, or a key that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class VLLMBackendMissingError(EnginehouseError):
    """The route needs the vLLM backend; waiting will not bring it."""

    status = 503
    type = "service_unavailable_error"
    code = "no_capacity"
    retry = False


class ResponseNotFoundError(InvalidRequestError):
    """No such response is stored, or not any more."""

    status = 404
    code = "response_not_found"


class PreviousResponseNotFoundError(InvalidRequestError):
    """`previous_response_id` names no stored response."""

    code = "previous_response_not_found"


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


def error_object(error: EnginehouseError) -> dict[str, Any]:
    """The `{"error": …}` object of an answer or of an SSE frame."""
    return {
        "error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code},
    }


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_object(error: EnginehouseError) -> dict[str, Any]:
    """The same in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def speaks_anthropic(path: str) -> bool:
    """Whether answers below this path are in Anthropic's protocol."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def error_response(error: EnginehouseError, path: str) -> Response:
    """The whole answer for `error` to a request for `path`."""
    shape = anthropic_error_object if speaks_anthropic(path) else error_object
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if not getattr(error, "retry", True):
        headers["x-should-retry"] = "false"
    if getattr(error, "closes", False):
        headers["connection"] = "close"
    return Response(
        msgspec.json.encode(shape(error)),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def internal_error(request_id: str) -> EnginehouseError:
    """What a client is told about a mistake of ours."""
    return EnginehouseError(f"Internal error. The server's log has it under request id {request_id}.")


async def send_error(error: EnginehouseError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer from a middleware, where nothing has been sent yet."""
    await error_response(error, scope["path"])(scope, receive, send)


def install_handlers(app: FastAPI) -> None:
    """Route every error that reaches FastAPI through this module."""

    async def on_enginehouse_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EnginehouseError)
        return error_response(error, request.url.path)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_from_http_exception(request, error), request.url.path)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(EnginehouseError, on_enginehouse_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _from_http_exception(request: Request, error: HTTPException) -> EnginehouseError:
    """The router raises these for paths and methods it does not know, and for nothing else."""
    if error.status_code == 405:
        return MethodNotAllowedError(f"{request.method} is not allowed on {request.url.path}.")
    if error.status_code == 404:
        return RouteNotFoundError(f"No route {request.method} {request.url.path}. /docs lists the routes.")
    return InvalidRequestError(str(error.detail))
