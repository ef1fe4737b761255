"""Which part of a text each of its tokens wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
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
    num_open_bytes: int
    """Bytes of a character that has not ended with this token."""


class TokenTexts:
    """Cuts the text of one choice into its tokens' pieces, never ahead of what the engine has released.

    Special tokens have no text. Feed tokens with `push` and the text that the engine released with `release`;
    `finish` gives what is left.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int] = (),
        *,
        visible_special: Set[int] = frozenset(),
    ) -> None:
        """`prompt_tokens`: what the text continues, and `visible_special`: special tokens that have a text, as the
        engine's own detokenizer was told."""
        self._tokenizer = tokenizer
        self._textless = tokenizer.special_token_ids - visible_special
        self._detokenizer = Detokenizer(
            tokenizer, prompt_tokens=prompt_tokens, visible_special=visible_special
        )
        self._strip_space = tokenizer.strip_leading_space and all(
            token in self._textless for token in prompt_tokens
        )
        self._pending: deque[TokenText] = deque()
        """Tokens whose text is not released yet."""
        self._held: list[TokenText] = []
        """Tokens whose text is released, but which began a character that a later token may end."""
        self._released = ""
        """Released text that belongs to the first of `_pending`, which has more."""

    def push(self, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        """Add tokens, with their log-probabilities when there are any."""
        for position, token in enumerate(tokens):
            raw = b""
            if token not in self._textless:
                raw = self._tokenizer.token_bytes(token)
            if self._strip_space and raw:
                raw, self._strip_space = raw.removeprefix(b" "), False
            text = self._detokenizer.push((token,))
            num_open_bytes = self._detokenizer.num_pending_bytes
            logprob = logprobs[position] if logprobs else None
            self._pending.append(TokenText(token, text, raw, logprob, num_open_bytes))

    def release(self, text: str) -> list[TokenText]:
        """Tokens whose whole text may be shown, now that `text` more of the choice may.

        Tokens without text wait for the next that has some: it may be the end of their character, and a special
        token that ends the output is not shown at all.
        """
        self._released += text
        shown: list[TokenText] = []
        while self._pending and len(self._pending[0].text) <= len(self._released):
            token = self._pending.popleft()
            length = len(token.text)
            token.text, self._released = self._released[:length], self._released[length:]
            if token.text:
                shown += self._held
                self._held = []
            self._held.append(token)
            if token.text and not token.num_open_bytes:
                shown += self._held
                self._held = []
        if self._released and not self._pending:
            shown += self._end_character()
        return shown

    def finish(self) -> tuple[list[TokenText], list[TokenText]]:
        """What is left at the end: tokens that wrote the rest of the released text, and tokens that wrote nothing
        (the end of a stop string, the token that ended the output)."""
        rest = [*self._held, *self._pending]
        if self._released:  # a stop string begins inside the first token that is pending
            cut = self._pending[0]
            cut.text = self._released
            cut.raw = _cut_bytes(self._open_bytes(), cut.raw, cut.text)
            num_shown = len(self._held) + 1
        else:
            num_shown = max((n + 1 for n, token in enumerate(self._held) if token.text), default=0)
            for token in rest[:num_shown]:  # at most the last: its open character is not shown
                token.raw = token.raw[: len(token.raw) - token.num_open_bytes] if token.text else token.raw
        self._pending.clear()
        self._held, self._released = [], ""
        return rest[:num_shown], rest[num_shown:]

    def _open_bytes(self) -> bytes:
        """The beginning of a character that the held tokens left to the next."""
        num_open_bytes = self._held[-1].num_open_bytes if self._held else 0
        held = b"".join(token.raw for token in self._held)
        return held[len(held) - num_open_bytes :]

    def _end_character(self) -> list[TokenText]:
        """Text that no token wrote whole stands for a character that never ended; its last token gets it."""
        last = max(number for number, token in enumerate(self._held) if token.raw)
        self._held[last].text += self._released
        self._released = ""
        shown, self._held = self._held[: last + 1], self._held[last + 1 :]
        return shown


def _cut_bytes(before: bytes, raw: bytes, text: str) -> bytes:
    """The shortest beginning of `raw` that, after `before`, writes `text`."""
    for end in range(len(raw)):
        if (before + raw[:end]).decode("utf-8", "replace") == text:
            return raw[:end]
    return raw
