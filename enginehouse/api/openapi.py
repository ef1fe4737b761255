"""The OpenAPI description: FastAPI's, with the schemas of our msgspec bodies and our errors put in."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from enginehouse.api.errors import speaks_anthropic

_REF = "#/components/schemas/{name}"

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_bodies: dict[str, type[msgspec.Struct]] = {}


def request_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `body`."""
    _bodies[body.__name__] = body
    schema = {"$ref": _REF.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> None:
    """Make `app.openapi` give the full description; it is built when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _build(app: FastAPI) -> dict[str, Any]:
    description = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, components = msgspec.json.schema_components(list(_bodies.values()), ref_template=_REF)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(components)
    schemas["Error"] = _ERROR_SCHEMA
    schemas["AnthropicError"] = _ANTHROPIC_ERROR_SCHEMA
    for path, operations in description["paths"].items():
        error = _error_answer("AnthropicError" if speaks_anthropic(path) else "Error")
        for operation in operations.values():
            responses = operation["responses"]
            # FastAPI announces its own validation errors, which this server never gives.
            responses.pop("422", None)
            responses["default"] = error
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return description


def _error_answer(schema: str) -> dict[str, Any]:
    reference = {"$ref": _REF.format(name=schema)}
    return {"description": "Error", "content": {"application/json": {"schema": reference}}}
