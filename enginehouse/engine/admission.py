"""The bound on what an engine takes on, and how soon a refused caller should come back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from enginehouse.errors import InvalidRequestError, QueueFullError

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 120.0
_RATE_WINDOW_S = 30.0
_MAX_MOMENTS = 256


class Admission:
    """Counts unfinished sequences; refuses those beyond what can run and wait."""

    def __init__(self, max_running: int, max_waiting: int, clock: Callable[[], float]) -> None:
        self._max_unfinished = max_running + max_waiting
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_MAX_MOMENTS)
        self.num_unfinished = 0

    def check(self, num_sequences: int) -> None:
        """Raise `QueueFullError`, with an estimate of when to try again, when there are not so many places now, and
        `InvalidRequestError` when there never are.
        """
        if num_sequences > self._max_unfinished:
            raise InvalidRequestError(
                f"{num_sequences} sequences were asked for at once, but at most {self._max_unfinished} may run "
                "and wait on this server. Ask for fewer choices or prompts.",
                param="n",
            )
        if self.num_unfinished + num_sequences > self._max_unfinished:
            missing = self.num_unfinished + num_sequences - self._max_unfinished
            raise QueueFullError(
                f"The queue is full: {self.num_unfinished} sequences are running or waiting and at most "
                f"{self._max_unfinished} may be; {num_sequences} more were asked for. Try again later.",
                retry_after_s=self.retry_after_s(missing),
            )

    def reserve(self, num_sequences: int) -> None:
        """Take places for a request. Raises what `check` raises."""
        self.check(num_sequences)
        self.num_unfinished += num_sequences

    def give_back(self, num_sequences: int) -> None:
        """Take a reservation back that nothing came of: it says nothing about how fast sequences end."""
        self.num_unfinished -= num_sequences

    def release(self, num_sequences: int = 1) -> None:
        """Free the places of sequences that ended, in whatever way."""
        self.num_unfinished -= num_sequences
        self._ends.extend([self._clock()] * num_sequences)

    def retry_after_s(self, num_places: int) -> float:
        """Whole seconds until `num_places` sequences will have ended, at the rate of the last half minute."""
        now = self._clock()
        while self._ends and self._ends[0] < now - _RATE_WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return _RATE_WINDOW_S / 2
        per_second = len(self._ends) / max(now - self._ends[0], 1.0)
        return float(math.ceil(min(max(num_places / per_second, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)))
