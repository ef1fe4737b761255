"""Log-probabilities in the two shapes of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from enginehouse.api.token_texts import TokenText

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token."""


def finite(logprob: float) -> float:
    """`logprob`, or `LOWEST_LOGPROB` when it is lower or not a number."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_content(tokens: Iterable[TokenText], num_top: int, tokenizer: TokenBytes) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one object per token, with the `num_top` best alternatives."""
    content = []
    for token in tokens:
        assert token.logprob is not None
        top = []
        for candidate, logprob in token.logprob.top[:num_top]:
            raw = tokenizer.token_bytes(candidate)
            text = raw.decode("utf-8", "replace")
            top.append({"token": text, "logprob": finite(logprob), "bytes": list(raw)})
        content.append(
            {
                "token": token.text,
                "logprob": finite(token.logprob.logprob),
                "bytes": list(token.raw),
                "top_logprobs": top,
            }
        )
    return content


ENCODED_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
EncodedLists = tuple[bytes, ...]
"""The lists of a completion's log-probabilities as JSON without their brackets, in the order of `ENCODED_LISTS`."""


def join_lists(*parts: EncodedLists) -> bytes:
    """The JSON object with all parts' lists, one after the other."""
    joined = (b",".join(filter(None, pieces)) for pieces in zip(*parts, strict=True))
    return b"{%b}" % b",".join(
        b'"%b":[%b]' % (name.encode(), items) for name, items in zip(ENCODED_LISTS, joined, strict=True)
    )


class CompletionLogprobs:
    """`choices[].logprobs` of completions: four parallel lists. Owns the running offset of one choice's text,
    which begins at `offset`, in characters."""

    def __init__(self, num_top: int, tokenizer: TokenBytes, *, offset: int = 0) -> None:
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._offset = offset

    def take_encoded(self, tokens: Iterable[TokenText]) -> EncodedLists:
        """The same as `take`, encoded, to be joined by `join_lists`."""
        lists = self.take(tokens)
        return tuple(msgspec.json.encode(lists[name])[1:-1] for name in ENCODED_LISTS)

    def take(self, tokens: Iterable[TokenText]) -> dict[str, list[Any]]:
        """The lists for the next tokens. A token without log-probability (the first of the prompt) has nulls."""
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            lists["tokens"].append(token.text)
            lists["token_logprobs"].append(None if token.logprob is None else finite(token.logprob.logprob))
            lists["top_logprobs"].append(self._top(token))
            lists["text_offset"].append(self._offset)
            self._offset += len(token.text)
        return lists

    def _top(self, token: TokenText) -> dict[str, float] | None:
        """The best tokens and the chosen one, by their text; of two with the same text the better stays."""
        if token.logprob is None:
            return None
        best: dict[str, float] = {}
        candidates = token.logprob.top[: self._num_top]
        for candidate, logprob in (*candidates, (token.token, token.logprob.logprob)):
            best.setdefault(self._name(candidate), finite(logprob))
        return best

    def _name(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
