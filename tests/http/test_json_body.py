"""Bodies that are not what a route expects: what is said, and what is not looked for."""

from __future__ import annotations

import json

import msgspec
import pytest

from enginehouse.api import json_body
from enginehouse.api.json_body import MAX_EXPLAINED_BYTES, decode
from enginehouse.errors import InvalidRequestError


class _Part(msgspec.Struct):
    text: str


class _Body(msgspec.Struct):
    prompt: str
    parts: list[_Part] = []
    numbers: list[float] = []


_decoder = msgspec.json.Decoder(_Body)


def refusal(body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, _decoder)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "prompt"),
        (b'{"numbers": []}', "prompt"),
        (b'{"prompt": "a", "parts": [{"text": "b"}, {}]}', "parts[1].text"),
    ],
)
def test_a_missing_field_is_named_with_its_place(body: bytes, param: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert param in str(error)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_the_field_of_a_small_malformed_body_is_named(number: str) -> None:
    # 1e999 is a number to the parser, too large for a float: it names the field itself, without an index.
    param = refusal(f'{{"prompt": "a", "numbers": [1.0, {number}]}}'.encode()).param
    assert param is not None
    assert param.startswith("numbers")


@pytest.mark.parametrize("ending", ["NaN]}", "nan]}", "1.0", "1.0]} x"])
def test_a_large_malformed_body_is_not_walked(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Neither parsed by Python nor visited value by value: that would hold up everybody's answers."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a large body was parsed again")

    monkeypatch.setattr(json, "loads", forbidden)
    monkeypatch.setattr(json_body, "_non_finite_field", forbidden)
    body = b'{"prompt": "a", "numbers": [' + b"1.0," * (MAX_EXPLAINED_BYTES // 4) + ending.encode()
    error = refusal(body)
    assert error.param is None
    assert "not valid JSON" in str(error)
