"""Tokens to text as they arrive, without ever giving away half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse.runtime.tokenizer import Tokenizer

_MAX_PARTIAL_BYTES = 3
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one output, in pieces.

    Owns the bytes of a character that has not arrived completely (at most three). Promises that the pieces,
    joined, are the output's text as a continuation of the prompt: `decode(prompt + output)` without the text of
    the prompt. With no prompt (or one of special tokens only) that is `decode(output)`. Each push costs the
    length of what is pushed, whatever came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_tokens: Sequence[int] = (),
        skip_special: bool = True,
        visible_special: Set[int] = frozenset(),
    ) -> None:
        """`visible_special`: special tokens whose name is text all the same."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids - visible_special if skip_special else frozenset()
        self._decoder = _new_decoder("replace")
        tail = self._last_bytes(prompt_tokens)
        self._strip_space = tokenizer.strip_leading_space and not tail
        self._decoder.decode(tail)
        self._prompt_owes_bytes = self.num_pending_bytes > 0

    @property
    def num_pending_bytes(self) -> int:
        """Bytes held back because their character is incomplete."""
        return len(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; may be empty."""
        data = b"".join(self._token_bytes(i) for i in token_ids if i not in self._skipped)
        return self._trim(self._decoder.decode(data)) if data else ""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if not text:
            return text
        if self._prompt_owes_bytes:
            # The prompt's text already ends in U+FFFD for the bytes that the output did not complete.
            self._prompt_owes_bytes = False
            text = text.removeprefix("�")
        if self._strip_space:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to hold any incomplete character."""
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                tail = self._token_bytes(token_id) + tail
            if len(tail) > _MAX_PARTIAL_BYTES:
                break
        return tail
