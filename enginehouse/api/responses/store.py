"""Finished responses, kept in memory so that a later request can go on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation up to and including it, both as JSON."""

    body: bytes
    conversation: bytes
    expires_s: float

    @property
    def num_bytes(self) -> int:
        """What it counts against the store's limit."""
        return len(self.body) + len(self.conversation)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation, without the instructions, which hold for one request only."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self.conversation)
        return messages


class ResponseStore:
    """Holds at most `max_responses` of together `max_bytes`, each for `ttl_s` seconds; the oldest go first.

    Each entry holds its whole conversation, so that none needs another that may be gone. `clock` gives seconds that
    never go back. Belongs to one event loop.
    """

    def __init__(
        self, *, max_responses: int, max_bytes: int, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        """Oldest first; all live equally long, so this is the order in which they expire too."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, body: bytes, messages: list[dict[str, Any]]) -> None:
        """Keep a response; one that is larger than the whole store is not kept."""
        self._drop_expired()
        entry = StoredResponse(body, msgspec.json.encode(messages), self._clock() + self._ttl_s)
        if entry.num_bytes > self._max_bytes or not self._max_responses:
            return
        while len(self._entries) >= self._max_responses or self.num_bytes + entry.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[response_id] = entry
        self.num_bytes += entry.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """The response with this id, if it is still there."""
        self._drop_expired()
        return self._entries.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Forget a response; whether it was there."""
        self._drop_expired()
        if response_id not in self._entries:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= self._entries.pop(response_id).num_bytes

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].expires_s > now_s:
                return
            self._drop(oldest)
