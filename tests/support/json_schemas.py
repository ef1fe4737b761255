"""Random JSON schemas, and a judge of what satisfies them that shares nothing with what is tested."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

KEYS = ("a", "name", "größe", "x y", 'q"uote')
PATTERNS = ("[a-f]{2,4}", "(yes|no|maybe)", "[0-9]{3}-[0-9]{2}", "a?b?c")

_scalars: st.SearchStrategy[Schema] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 5000),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 2),
        st.integers(0, 4),
    ),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": f"^{pattern}$"}),
    st.lists(
        st.one_of(st.text(max_size=5), st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
    st.one_of(st.text(max_size=5), st.integers(-9, 9)).map(lambda value: {"const": value}),
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def build(properties: dict[str, Schema], optional: set[str]) -> Schema:
        return {
            "type": "object",
            "properties": properties,
            "required": [key for key in properties if key not in optional],
            "additionalProperties": False,
        }

    properties = st.dictionaries(st.sampled_from(KEYS), inner, min_size=1, max_size=3)
    return st.builds(build, properties, st.sets(st.sampled_from(KEYS), max_size=2))


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 1),
    )


schemas: st.SearchStrategy[Schema] = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
    ),
    max_leaves=5,
)
"""Schemas that have an answer, of at most some hundred characters."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def satisfies(value: Any, schema: Schema) -> bool:
    """Whether `value` validates. Knows the keywords of `schemas`, and raises `KeyError` on another type."""
    if "anyOf" in schema:
        return any(satisfies(value, choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(item) and value == item for item in allowed)
    kind = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return False
    if kind == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if kind == "string":
        length_fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return length_fits and ("pattern" not in schema or bool(re.search(schema["pattern"], value)))
    if kind == "array":
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(satisfies(item, schema["items"]) for item in value)
    if kind == "object":
        properties = schema["properties"]
        return set(schema["required"]) <= value.keys() <= properties.keys() and all(
            satisfies(item, properties[key]) for key, item in value.items()
        )
    return True
