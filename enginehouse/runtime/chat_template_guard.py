"""Keeps special tokens that users write apart from those that a chat template writes.

Before a template runs, every string from outside is copied with a *guard* character inside each special token's
text, and at each end where it could grow into one together with its neighbour. The guard is a character that
occurs nowhere in the conversation, so removing it from the rendered text gives back exactly what was written,
while a special token without a guard can only come from the template itself. The guard survives what templates do
with content: trimming, slicing, splitting, joining, comparing with ordinary words, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from enginehouse.errors import TemplateError

# Private use, planes 15 and 16: no font, no meaning, and hardly ever in a text.
_CANDIDATES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_TEMPLATE_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_TOO_DEEP = 100


class Guard:
    """Marks the special tokens in values from outside. `char` is the guard for this one conversation."""

    def __init__(self, special_texts: Iterable[str], char: str) -> None:
        texts = [text for text in special_texts if len(text) > 1]
        self.char = char
        self._pattern = _pattern(texts)
        self._heads = {text[:i].casefold() for text in texts for i in range(1, len(text))}
        self._tails = {text[i:].casefold() for text in texts for i in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def text(self, text: str) -> str:
        """A copy with guards where they are needed: for nearly every text, the text itself."""
        if self._pattern is None:
            return text
        marked = self._pattern.sub(lambda match: match[0][0] + self.char + match[0][1:], text)
        body = marked.strip()
        if not body:
            return marked
        start = marked.index(body)
        lead, trail = marked[:start], marked[start + len(body) :]
        if any(body[:i].casefold() in self._tails for i in range(1, min(len(body), self._longest) + 1)):
            lead += self.char
        if any(body[-i:].casefold() in self._heads for i in range(1, min(len(body), self._longest) + 1)):
            trail = self.char + trail
        return lead + body + trail

    def value(self, value: Any) -> Any:
        """A deep copy of JSON-like data with every string guarded, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                self.value(key): item if _is_role(key, item) else self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value


def plain_data(value: Any, depth: int = 0) -> Any:
    """A deep copy made of dict, list, str, int, float, bool and None only.

    Raises `TemplateError` for anything else, and for nesting no template can walk.
    """
    if depth > _TOO_DEEP:
        raise TemplateError(
            f"messages and tools may be nested {_TOO_DEEP} levels deep at most", param="messages"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        return {plain_data(key, depth + 1): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, depth + 1) for item in value]
    raise TemplateError(f"a chat template cannot be given a {type(value).__name__}", param="messages")


def unused_char(*values: Any) -> str:
    """A private-use character that occurs in none of the strings within `values`."""
    used = {char for text in _strings(values) if not text.isascii() for char in text if char >= "\U000f0000"}
    for plane in _CANDIDATES:
        for code in plane:
            if chr(code) not in used:
                return chr(code)
    raise TemplateError("the messages use every private-use character there is", param="messages")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _is_role(key: Any, item: Any) -> bool:
    return key == "role" and isinstance(item, str) and item in _TEMPLATE_ROLES


def _pattern(texts: list[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    # Case is ignored because a template may change it.
    return re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if texts else None
