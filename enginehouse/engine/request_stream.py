"""The caller's end of one request: an asynchronous iterator over its events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from enginehouse.engine.events import Event, Finished, TokenEvent
from enginehouse.engine.messages import SequenceId

MAX_PENDING_EVENTS = 64
"""Events a reader may lag behind before tokens of the same choice are merged into one event."""


class RequestStream:
    """Events of one admitted request, for one reader.

    Iterate it (`async for event in stream`) until it ends, or leave it by `abort()` or by leaving
    `async with`; a reader that is cancelled while it waits for an event aborts the request too. A reader may be
    as slow as it likes: beyond `MAX_PENDING_EVENTS` events, tokens are merged, so memory is bounded by the
    answer itself.
    """

    def __init__(
        self,
        *,
        request_id: str,
        sequence_ids: list[SequenceId],
        prompt_token_ids: list[int],
        on_abort: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.sequence_ids = sequence_ids
        """One per choice, by index."""
        self.prompt_token_ids = prompt_token_ids
        self._on_abort = on_abort
        self._pending: deque[Event] = deque()
        self._num_open = len(sequence_ids)
        self._failure: Exception | None = None
        self._wakeup = asyncio.Event()
        self._aborted = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, as usage counts them."""
        return len(self.prompt_token_ids)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """Raises the request's `EnginehouseError` once, if it failed; `StopAsyncIteration` after the end."""
        while not self._pending:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self._num_open = 0
                raise failure
            if self._num_open == 0 or self._aborted:
                raise StopAsyncIteration
            self._wakeup.clear()
            try:
                await self._wakeup.wait()
            except asyncio.CancelledError:
                self.abort()
                raise
        return self._pending.popleft()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Stop computing this request and drop what was not read. Does nothing once the request has ended."""
        if self._aborted:
            return
        self._aborted = True
        self._pending.clear()
        self._wakeup.set()
        self._on_abort()

    def push(self, event: Event) -> None:
        """Add an event (the engine calls this, never blocking)."""
        if self._aborted:
            return
        if isinstance(event, Finished):
            self._num_open -= 1
        if not (len(self._pending) >= MAX_PENDING_EVENTS and self._merge(event)):
            self._pending.append(event)
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error, after the events that are already there (the engine calls this)."""
        self._failure = error
        self._wakeup.set()

    def _merge(self, event: Event) -> bool:
        if not isinstance(event, TokenEvent):
            return False
        for position in range(len(self._pending) - 1, -1, -1):
            earlier = self._pending[position]
            if earlier.index != event.index:
                continue
            if not isinstance(earlier, TokenEvent):
                return False
            self._pending[position] = _joined(earlier, event)
            return True
        return False


def _joined(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or []), *(second.logprobs or [])]
    return TokenEvent(
        index=first.index,
        sequence_id=first.sequence_id,
        token_ids=[*first.token_ids, *second.token_ids],
        text=first.text + second.text,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )
