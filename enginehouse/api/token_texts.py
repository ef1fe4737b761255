"""Which part of a text each of its tokens wrote."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.engine.messages import TokenLogprob

if TYPE_CHECKING:
    from enginehouse.runtime.tokenizer import Tokenizer


@dataclass(slots=True)
class TokenText:
    """One token as clients see it. `text` is what the token added to the text, "" when it only began a character
    that a later token ended; joined texts equal the text, joined `raw` bytes equal its bytes."""

    token: int
    text: str
    raw: bytes
    logprob: TokenLogprob | None


class TokenTexts:
    """Cuts the text of one choice into its tokens' pieces, never ahead of what the engine has released.

    Special tokens have no text. Feed tokens with `push` and the text that the engine released with `release`;
    `finish` gives what is left.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._pending: deque[TokenText] = deque()
        self._released = ""

    def push(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        """Add tokens, with their log-probabilities when there are any."""
        for position, token in enumerate(tokens):
            special = token in self._tokenizer.special_token_ids
            raw = b"" if special else self._tokenizer.token_bytes(token)
            text = self._detokenizer.push((token,))
            if raw.startswith(b" ") and not text.startswith(" "):
                raw = raw[1:]  # the space that decoding strips at the start of a text
            logprob = logprobs[position] if logprobs else None
            self._pending.append(TokenText(token, text, raw, logprob))

    def release(self, text: str) -> list[TokenText]:
        """Tokens whose whole text may be shown, now that `text` more of the choice may.

        Tokens without text wait for the next that has some: it may be the end of their character, and a special
        token that ends the output is not shown at all.
        """
        self._released += text
        shown: list[TokenText] = []
        waiting: list[TokenText] = []
        while self._pending and len(self._pending[0].text) <= len(self._released):
            token = self._pending.popleft()
            waiting.append(token)
            if token.text:
                token.text, self._released = self._cut(len(token.text))
                shown += waiting
                waiting = []
        if self._released and not self._pending and any(token.raw for token in waiting):
            shown += self._end_character(waiting)
        self._pending.extendleft(reversed(waiting))
        return shown

    def _end_character(self, waiting: list[TokenText]) -> list[TokenText]:
        """Text that no token wrote whole is a replacement for a character that never ended: the last token of it
        gets the text. `waiting` keeps what comes after."""
        last = max(number for number, token in enumerate(waiting) if token.raw)
        waiting[last].text, self._released = self._released, ""
        shown = waiting[: last + 1]
        del waiting[: last + 1]
        return shown

    def finish(self) -> tuple[list[TokenText], list[TokenText]]:
        """What is left at the end: tokens that wrote the rest of the released text, and tokens that wrote nothing
        (the end of a stop string, the token that ended the output)."""
        shown: list[TokenText] = []
        rest = list(self._pending)
        self._pending.clear()
        while rest and self._released:
            token = rest.pop(0)
            if token.text:  # a stop string begins inside this token
                token.text, self._released = self._released, ""
                token.raw = token.text.encode()
            shown.append(token)
        return shown, rest

    def _cut(self, length: int) -> tuple[str, str]:
        return self._released[:length], self._released[length:]
