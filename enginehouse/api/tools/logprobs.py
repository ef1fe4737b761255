"""Which tokens wrote an answer's content, when a parser takes parts of its text away."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from enginehouse.api.token_texts import TokenText
from enginehouse.api.tools.parsing import ContentPiece, OutputEvent


class ContentTokens:
    """Keeps the tokens of one choice until it is decided whether their text is content.

    Joined, the texts of the tokens it gives back are the content: a token whose text is only partly content is cut.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenText] = deque()
        self._start = 0
        """Where in the whole text the first of `_waiting` begins."""
        self._spans: deque[tuple[int, int]] = deque()
        """Content from `_start` on, as (begin, end) in the whole text."""

    def take(
        self, tokens: Iterable[TokenText], events: Iterable[OutputEvent], num_decided: int
    ) -> list[TokenText]:
        """Tokens that wrote content, now that `events` came and `num_decided` characters are decided.

        A token without text, which began a character, goes the way of the text that follows it.
        """
        self._waiting.extend(tokens)
        for event in events:
            if isinstance(event, ContentPiece):
                self._spans.append((event.start, event.start + len(event.text)))
        shown: list[TokenText] = []
        while self._waiting:
            token = self._waiting[0]
            end = self._start + len(token.text)
            if end > num_decided or (not token.text and end == num_decided):
                break
            shown += self._part(self._waiting.popleft(), end)
            self._start = end
        return shown

    def finish(self) -> list[TokenText]:
        """What is left when the text has ended: tokens without text behind the last that had some."""
        shown = []
        if self._spans and self._spans[-1][1] == self._start:
            shown = list(self._waiting)
        self._waiting.clear()
        return shown

    def _part(self, token: TokenText, end: int) -> list[TokenText]:
        begin = self._start
        while self._spans and self._spans[0][1] <= begin and len(self._spans) > 1:
            self._spans.popleft()
        if not token.text:
            return [token] if any(first <= begin < last for first, last in self._spans) else []
        pieces = [
            token.text[max(first, begin) - begin : max(min(last, end) - begin, 0)]
            for first, last in self._spans
            if first < end and last > begin
        ]
        text = "".join(pieces)
        if not text:
            return []
        if text != token.text:
            token.text, token.raw = text, text.encode()
        return [token]
