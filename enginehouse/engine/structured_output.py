"""The grammar that an answer must follow, as a value that crosses from the API to the worker.

`structured_output_check` refuses bad ones before anything runs, `structured_output_matchers` follows them token
by token in the worker; both understand them through `structured_output_compile`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from enginehouse.errors import InvalidRequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_GRAMMAR_BYTES = 128 * 1024
"""UTF-8 length of a grammar's text. Larger ones are refused unread."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must look like, in full: nothing comes before it and nothing after it."""

    kind: GrammarKind
    text: str = ""
    """The JSON schema, the regular expression, a JSON list of strings, or the Lark grammar; empty for
    `json_object`."""
    special_tokens: tuple[int, ...] = ()
    """Special tokens that a Lark grammar of ours may name, as `<[id]>`. All others are never part of an answer."""
    param: str = "response_format"
    """The request's field it came from, which errors name."""

    def check(self) -> None:
        """Raise `InvalidRequestError` when the text is too large or cannot be encoded."""
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{self.param}: the text holds half of a surrogate pair.", param=self.param
            ) from None
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{self.param}: {num_bytes} bytes are more than the {MAX_GRAMMAR_BYTES} that are allowed.",
                param=self.param,
            )
