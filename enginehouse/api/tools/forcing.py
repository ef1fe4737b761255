"""The grammar that leaves a model nothing to write but calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from enginehouse.api.tools.definitions import Function
from enginehouse.api.tools.formats import ToolFormat
from enginehouse.api.tools.schemas import closed_schema

MAX_FORCED_CALLS = 8
"""So many calls fit into a forced answer: a model that sees no end would fill its context with calls."""

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How templates write the arguments of earlier calls, so that an answer and its repetition are the same text."""


def forcing_grammar(
    fmt: ToolFormat, functions: Sequence[Function], *, parallel: bool, marker_token: int | None = None
) -> str:
    """A Lark grammar (llguidance's dialect) of exactly one call of one of `functions`; with `parallel` of one to
    `MAX_FORCED_CALLS`. `marker_token` is the id of the format's marker where it is a special token."""
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = f" ({_text(fmt.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    parts = [_marker(fmt, marker_token), _text(fmt.opening), f"call{more}", _text(fmt.closing)]
    lines = [f"start: {' '.join(part for part in parts if part)}", f"call: {calls}"]
    for index, function in enumerate(functions):
        before = _text(f"{fmt.before_name}{function.name}{fmt.before_arguments}")
        lines.append(f"call_{index}: {before} arguments_{index} {_text(fmt.after_arguments)}")
        lines.append(f"arguments_{index}: %json {arguments_schema(function)}")
    return "\n".join(lines) + "\n"


def arguments_schema(function: Function) -> str:
    """The JSON schema, as text, that forced arguments of `function` follow."""
    schema: dict[str, Any] = {**closed_schema(function.parameters), "x-guidance": _SPACING}
    return json.dumps(schema, ensure_ascii=False)


def _marker(fmt: ToolFormat, marker_token: int | None) -> str:
    if not fmt.opening_is_marker:
        return ""
    return _text(fmt.marker) if marker_token is None else f"<[{marker_token}]>"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
