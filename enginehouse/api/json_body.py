"""Request bodies: bytes in, checked msgspec structs out, or a 400 that names the field.

msgspec rather than Pydantic: one pass in C decodes and checks, strictly (a bool is no int, "1" is no number),
at a tenth of the cost, and its messages carry the path of the field.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from enginehouse.api.errors import ClientGoneError, UnsupportedMediaTypeError
from enginehouse.errors import InvalidRequestError

T = TypeVar("T", bound=msgspec.Struct)

MAX_EXPLAINED_BYTES = 64 * 1024
"""Larger malformed bodies get the parser's own words: looking for the field visits every value, in the event loop."""
MAX_EXPLAINED_BYTES = 64 * 1024
"""Larger malformed bodies get the parser's own words: looking for the field visits every value, in the event loop."""
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")


async def read_body(request: Request) -> bytes:
    """The whole body, its size limited by the middleware.

    Raises `UnsupportedMediaTypeError` when it is not declared as JSON, and `ClientGoneError`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        said = f"not '{media_type[:100]}'" if media_type else "which this request does not say"
        raise UnsupportedMediaTypeError(f"The body must have content type application/json, {said}.")
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError from error


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises `InvalidRequestError` with `param` for any body that is not what `decoder` expects."""
    try:
        body.decode("utf-8")
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8 (byte {error.start}).") from error
    except RecursionError as error:
        raise InvalidRequestError("The body is nested too deeply.") from error
    except msgspec.ValidationError as error:
        _raise_validation(str(error))
    except msgspec.DecodeError as error:
        _raise_malformed(body, str(error))


def _raise_validation(said: str) -> NoReturn:
    found = _PATH.search(said)
    missing = _MISSING.match(said)
    if missing is not None:
        path = "" if found is None or not found.group(1) else found.group(1) + "."
        field = path + missing.group(1)
        raise InvalidRequestError(f"{field}: this field is required.", param=field)
    if found is None or not found.group(1):
        what = _PATH.sub("", said).replace("`", "")
        raise InvalidRequestError(f"The body is not as it should be: {_lower(what)}.")
    field = found.group(1).removesuffix("[...]")
    what = said[: found.start()].replace("`", "").replace(" | null", "")
    raise InvalidRequestError(f"{field}: {_lower(what)}.", param=field)


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _raise_malformed(body: bytes, said: str) -> NoReturn:
    """Python's parser takes NaN and Infinity, which JSON has not: then the field of a small body can be named."""
    field = None
    if len(body) <= MAX_EXPLAINED_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            field = _non_finite_field(json.loads(body), "")
    if field:
        raise InvalidRequestError(f"{field}: NaN and infinity are not numbers in JSON.", param=field)
    raise InvalidRequestError(f"The body is not valid JSON: {_lower(said)}.")


def _non_finite_field(value: Any, path: str) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path
    children: Any = ()
    if isinstance(value, dict):
        children = ((f"{path}.{key}" if path else key, child) for key, child in value.items())
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    for child_path, child in children:
        found = _non_finite_field(child, child_path)
        if found:
            return found
    return None
