"""The fields that ask for an answer of a given form, and the grammar they mean.

OpenAI's `response_format`, and vLLM's `structured_outputs` with its older names `guided_json`, `guided_regex`,
`guided_choice` and `guided_grammar`. A request may use one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from enginehouse.engine.structured_output import Grammar, GrammarKind
from enginehouse.errors import InvalidRequestError

MAX_CHOICES: Final = 1000
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FormatFields(Protocol):
    """The fields as the request's JSON had them; None when they were missing or null."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


def grammar_from(fields: FormatFields) -> Grammar | None:
    """The grammar a request asks for, None for free text. Its own text is checked by the engine.

    Raises `InvalidRequestError` naming the part that is malformed, or when two fields ask for a form.
    """
    asked: dict[str, Grammar] = {}
    for name, read in _READERS.items():
        value = getattr(fields, name)
        grammar = None if value is None else read(value, name)
        if grammar is not None:
            asked[name] = grammar
    if len(asked) > 1:
        raise InvalidRequestError(
            f"Only one of {' and '.join(asked)} can decide about the form of the answer.",
            param=list(asked)[1],
        )
    return next(iter(asked.values()), None)


def _response_format(value: Any, param: str) -> Grammar | None:
    kind = _object(value, param).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object", param=param)
    if kind == "json_schema":
        return _named_schema(value.get("json_schema"), f"{param}.json_schema")
    raise InvalidRequestError(
        f"{param}.type must be text, json_object or json_schema, not {kind!r}.", param=f"{param}.type"
    )


def _named_schema(value: Any, param: str) -> Grammar:
    wrapper = _object(value, param)
    name = wrapper.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{param}.name must be 1 to 64 letters, digits, underscores and dashes.", param=f"{param}.name"
        )
    # Every schema is followed to the letter here, so `strict` asks for nothing that is not done anyway.
    for field, kind in (("strict", bool), ("description", str)):
        if not isinstance(wrapper.get(field), kind | None):
            raise InvalidRequestError(f"{param}.{field} must be a {kind.__name__}.", param=f"{param}.{field}")
    schema = wrapper.get("schema")
    if schema is None:
        return Grammar(kind="json_object", param=param)
    return _schema(schema, f"{param}.schema")


def _structured_outputs(value: Any, param: str) -> Grammar | None:
    options = {name: option for name, option in _object(value, param).items() if option is not None}
    options = {name: option for name, option in options.items() if option is not False}
    for name in options:
        if name not in _STRUCTURED:
            raise InvalidRequestError(
                f"{param}.{name} is not supported by this server; {', '.join(_STRUCTURED)} are.",
                param=f"{param}.{name}",
            )
    if len(options) != 1:
        raise InvalidRequestError(f"{param} needs exactly one of {', '.join(_STRUCTURED)}.", param=param)
    ((name, option),) = options.items()
    return _STRUCTURED[name](option, f"{param}.{name}")


def _schema(value: Any, param: str) -> Grammar:
    """A schema as an object, or as text that holds one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"{param} must be a JSON schema, an object.", param=param)
    return Grammar(kind="json_schema", text=msgspec.json.encode(value).decode(), param=param)


def _json_object(value: Any, param: str) -> Grammar:
    if value is not True:
        raise InvalidRequestError(f"{param} must be true or false.", param=param)
    return Grammar(kind="json_object", param=param)


def _choice(value: Any, param: str) -> Grammar:
    is_list = isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)
    if not is_list or len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{param} must be a list of 1 to {MAX_CHOICES} strings that are not empty.", param=param
        )
    return Grammar(kind="choice", text=msgspec.json.encode(value).decode(), param=param)


def _text(kind: GrammarKind) -> Callable[[Any, str], Grammar]:
    def read(value: Any, param: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{param} must be a string that is not empty.", param=param)
        return Grammar(kind=kind, text=value, param=param)

    return read


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object.", param=param)
    return value


_Reader = Callable[[Any, str], Grammar | None]
_STRUCTURED: Final[Mapping[str, _Reader]] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("lark"),
    "json_object": _json_object,
}
_READERS: Final[Mapping[str, _Reader]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("lark"),
}
