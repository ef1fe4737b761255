"""Schemas that must contain themselves for ever, and those that only may."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from enginehouse.engine.structured_output_finite import can_end
from tests.support.json_schemas import schemas

SELF = {"$ref": "#"}


def needing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        needing(name={"type": "string"}, child=SELF),
        needing(child={"type": "array", "items": SELF, "minItems": 1}),
        needing(child={"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2}),
        needing(child={"anyOf": [SELF, {"allOf": [{"type": "object"}, SELF]}]}),
        {"type": "object", "required": ["x"], "additionalProperties": SELF},
        {"$ref": "#/$defs/a", "$defs": {"a": needing(b={"$ref": "#/$defs/b"}), "b": needing(a={"$ref": "#/$defs/a"})}},
        {"$ref": "#/$defs/x~1y%20z", "$defs": {"x/y z": needing(x={"$ref": "#/$defs/x~1y%20z"})}},
        {"anyOf": [needing(x={"$ref": "#/anyOf/0"})]},
    ],
)  # fmt: skip
def test_endless(schema: Any) -> None:
    assert not can_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"child": SELF}},
        needing(child={"anyOf": [SELF, {"type": "null"}]}),
        needing(child={"type": "array", "items": SELF}),
        needing(child={"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 1}),
        {"type": ["object", "null"], "properties": {"child": SELF}, "required": ["child"]},
        needing(child={"$ref": "https://example.com/other"}),
        needing(child={"$ref": "#/nowhere"}),
        needing(child={"$ref": "#/$defs/a0"}) | {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(200)}},
        {"type": 5, "required": "x", "properties": [], "anyOf": {}, "$ref": 7},
        {"$ref": [], "type": [[]], "minItems": "x"},
    ],
)  # fmt: skip
def test_may_end(schema: Any) -> None:
    assert can_end(schema)


@given(schemas)
def test_schemas_without_references_end(schema: dict[str, Any]) -> None:
    assert can_end(schema)
