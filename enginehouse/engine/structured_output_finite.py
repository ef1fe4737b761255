"""Whether a JSON schema has an instance that comes to an end.

`{"required": ["child"], "properties": {"child": {"$ref": "#"}}}` has none: every instance contains another one. A
model that follows it would write until something cuts it, so it is refused like other schemas that nothing satisfies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

_MAX_ROUNDS: Final = 50
"""Longer chains of references are let through: this is a courtesy, not what bounds an answer."""


def can_end(schema: Any) -> bool:
    """False when every instance of `schema` (decoded JSON) is endless. Pure; in doubt True.

    The least fixed point over the schema's references: at first none of them is known to end.
    """
    targets = {ref: _resolve(schema, ref) for ref in set(_references(schema))}
    ends = {ref: target is None for ref, target in targets.items()}
    for _ in range(_MAX_ROUNDS):
        found = [ref for ref, target in targets.items() if not ends[ref] and _ends(target, ends)]
        if not found:
            return _ends(schema, ends)
        ends.update(dict.fromkeys(found, True))
    return True


def _references(schema: Any) -> Iterator[str]:
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            nodes += node.values()


def _resolve(schema: Any, reference: str) -> Any:
    """What a reference within the document points to; None for others, and for those that lead nowhere."""
    if not reference.startswith("#"):
        return None
    node = schema
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _ends(node: Any, ends: dict[str, bool]) -> bool:
    """Whether `node` has an instance that ends, given which references have one."""
    if not isinstance(node, dict):
        return True
    reference = node.get("$ref")
    if isinstance(reference, str) and not ends.get(reference, True):
        return False
    if not all(_ends(part, ends) for part in _list(node, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        choices = _list(node, name)
        if choices and not any(_ends(choice, ends) for choice in choices):
            return False
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(_kind_ends(kind, node, ends) for kind in kinds)


def _kind_ends(kind: Any, node: dict[str, Any], ends: dict[str, bool]) -> bool:
    if kind == "object":
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        others = node.get("additionalProperties")
        required = [key for key in _list(node, "required") if isinstance(key, str)]
        return all(_ends(properties.get(key, others), ends) for key in required)
    if kind == "array" and isinstance(count := node.get("minItems"), int):
        items = [*_list(node, "prefixItems"), node.get("items")]
        return count < 1 or all(_ends(item, ends) for item in items[:count])
    return True


def _list(node: dict[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []
