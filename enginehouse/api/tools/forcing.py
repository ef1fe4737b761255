"""Grammars that leave a model nothing to write but calls, or calls and answers of one form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from enginehouse.api.tools.definitions import Function
from enginehouse.api.tools.formats import ToolFormat
from enginehouse.api.tools.schemas import closed_schema
from enginehouse.engine.structured_output_compile import bounded_json_schema

MAX_FORCED_CALLS = 8
"""So many calls fit into a forced answer: a model that sees no end would fill its context with calls."""

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How templates write the arguments of earlier calls, so that an answer and its repetition are the same text."""


def forcing_grammar(
    fmt: ToolFormat,
    functions: Sequence[Function],
    *,
    parallel: bool,
    special: Mapping[str, int] = MappingProxyType({}),
    answer_schema: dict[str, Any] | None = None,
) -> str:
    """A Lark grammar (llguidance's dialect) of exactly one call of one of `functions`; with `parallel` of one to
    `MAX_FORCED_CALLS`. `special` has the ids of those of the format's marks that are special tokens. With
    `answer_schema` JSON that satisfies it is allowed instead of calls."""
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = f" ({_text(fmt.separator, special)} call){{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""
    # A bare call begins as any JSON object does, so beside answers of that kind it needs its marker.
    is_marked = fmt.opening_is_marker or (fmt.is_bare and answer_schema is not None)
    parts = [
        _text(fmt.marker if is_marked else "", special),
        _text(fmt.opening, special),
        f"call{more}",
        _text(fmt.closing, special),
    ]
    lines = [f"start: {'calls' if answer_schema is None else 'calls | answer'}"]
    lines += [f"calls: {' '.join(part for part in parts if part)}", f"call: {calls}"]
    if answer_schema is not None:
        lines.append(f"answer: %json {json.dumps(bounded_json_schema(answer_schema), ensure_ascii=False)}")
    for index, function in enumerate(functions):
        before = _text(f"{fmt.before_name}{function.name}{fmt.before_arguments}", special)
        lines.append(f"call_{index}: {before} arguments_{index} {_text(fmt.after_arguments, special)}")
        lines.append(f"arguments_{index}: %json {arguments_schema(function)}")
    return "\n".join(lines) + "\n"


def arguments_schema(function: Function) -> str:
    """The JSON schema, as text, that forced arguments of `function` follow."""
    schema: dict[str, Any] = {**closed_schema(function.parameters), "x-guidance": _SPACING}
    return json.dumps(schema, ensure_ascii=False)


def _text(text: str, special: Mapping[str, int]) -> str:
    """Exactly `text`, with the special tokens in it as such; nothing for no text."""
    marks = "|".join(map(re.escape, special))
    parts = re.split(f"({marks})", text) if marks else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)
