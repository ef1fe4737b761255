"""JSON schemas of function parameters: what is malformed in one, and the closed form that forced calls follow."""

from __future__ import annotations

from typing import Any

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAX_DEPTH = 64
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_OPENING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "dependentSchemas", "not")
"""Keywords through which an object may get properties that `properties` does not list."""


def schema_fault(parameters: dict[str, Any]) -> str | None:
    """What is wrong with the schema of a function's arguments, beginning with the place (`.required: …`).

    Checks the form of the keywords that every schema is made of. Whether a schema can be satisfied is found out
    when a grammar is made of it.
    """
    if parameters.get("type", "object") != "object":
        return ".type: arguments are an object, so this must be 'object'"
    return _fault(parameters, "", 0)


def _fault(schema: Any, at: str, depth: int) -> str | None:
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{at}: a schema is an object, not {type(schema).__name__}"
    if depth > _MAX_DEPTH:
        return f"{at}: nested more than {_MAX_DEPTH} deep"
    fault = _own_fault(schema, at)
    for key, child in _children(schema, at):
        fault = fault or _fault(child, key, depth + 1)
    return fault


def _own_fault(schema: dict[str, Any], at: str) -> str | None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in _TYPES:
            return f"{at}.type: {str(kind)[:40]!r} is no JSON type"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{at}.required: must be a list of names"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return f"{at}.enum: must be a list with at least one value"
    for key in _OF_NAMES:
        if not isinstance(schema.get(key, {}), dict):
            return f"{at}.{key}: must be an object"
    for key in _OF_LISTS:
        if key in schema and not (isinstance(schema[key], list) and schema[key]):
            return f"{at}.{key}: must be a list with at least one schema"
    return None


def _children(schema: dict[str, Any], at: str) -> list[tuple[str, Any]]:
    children: list[tuple[str, Any]] = [(f"{at}.{key}", schema[key]) for key in _OF_ONE if key in schema]
    for key in _OF_NAMES:
        named = schema.get(key)
        if isinstance(named, dict):
            children += [(f"{at}.{key}.{name[:64]}", child) for name, child in named.items()]
    for key in _OF_LISTS:
        listed = schema.get(key)
        if isinstance(listed, list):
            children += [(f"{at}.{key}[{index}]", child) for index, child in enumerate(listed)]
    return children


def closed_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema that forced arguments follow: what satisfies it satisfies `parameters`.

    Where an object lists its properties and says nothing about others, others are left out: a model that is made
    to write arguments should not make some up. No `parameters` mean an empty object.
    """
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    closed: dict[str, Any] = _closed({"type": "object", **parameters})
    return closed


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    if any(key in schema for key in _OPENING):
        return closed
    properties = schema.get("properties")
    if isinstance(properties, dict):
        closed["properties"] = {name: _closed(child) for name, child in properties.items()}
        names_all = set(schema.get("required", ())) <= properties.keys()
        if names_all and (properties or schema.get("type") == "object"):
            closed.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    return closed
