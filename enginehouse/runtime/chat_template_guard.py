"""Keeps special tokens that users write apart from those that a chat template writes.

Before a template runs, every string from outside is copied with a *guard* character inside each special token's
text, and at each end where it could grow into one together with its neighbour. The guard is a character that
occurs nowhere in the conversation, so removing it from the rendered text gives back exactly what was written,
while a special token without a guard can only come from the template itself. The guard survives what templates do
with content: trimming, slicing, splitting, joining, comparing with ordinary words, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from enginehouse.errors import TemplateError

# Private use, planes 15 and 16: no font, no meaning, and hardly ever in a text.
_CANDIDATES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_TEMPLATE_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_TOO_DEEP = 100


@dataclass(frozen=True, slots=True)
class _SpecialTexts:
    """What to look for, prepared once per tokenizer: whole texts, their proper beginnings and their proper ends.

    Case is ignored because a template may change it.
    """

    pattern: re.Pattern[str] | None
    heads: frozenset[str]
    tails: frozenset[str]
    longest: int


@lru_cache(maxsize=16)
def _special_texts(texts: tuple[str, ...]) -> _SpecialTexts:
    # A single character cannot be broken by a guard; `Tokenizer.encode_guarded` takes it as text throughout.
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return _SpecialTexts(
        re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if longest_first else None,
        frozenset(text[:i].casefold() for text in longest_first for i in range(1, len(text))),
        frozenset(text[i:].casefold() for text in longest_first for i in range(1, len(text))),
        max(map(len, longest_first), default=0),
    )


class Guard:
    """Marks the special tokens in values from outside. `char` is the guard for this one conversation."""

    def __init__(self, special_texts: tuple[str, ...], char: str) -> None:
        self.char = char
        self._special = _special_texts(special_texts)

    def text(self, text: str) -> str:
        """A copy with guards where they are needed: for nearly every text, the text itself."""
        special = self._special
        if special.pattern is None:
            return text
        marked = special.pattern.sub(lambda match: match[0][0] + self.char + match[0][1:], text)
        body = marked.strip()
        if not body:
            return marked
        start = marked.index(body)
        lead, trail = marked[:start], marked[start + len(body) :]
        lengths = range(1, min(len(body), special.longest) + 1)
        if any(body[:i].casefold() in special.tails for i in lengths):
            lead += self.char
        if any(body[-i:].casefold() in special.heads for i in lengths):
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
