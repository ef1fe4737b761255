"""Moments at which something must be done about a sequence."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from enginehouse.engine.sequence import Sequence


class DeadlineQueue:
    """Which sequences are due. Asking costs nothing while nobody is.

    Sequences that finished in time stay until their moment passes or until they are the most part of the queue.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_watched = 0
        self._sweep_at = 64

    def watch(self, sequence: Sequence, when_s: float) -> None:
        """Have `sequence` returned by `pop_due` once the time is `when_s`."""
        self._num_watched += 1
        heapq.heappush(self._heap, (when_s, self._num_watched, sequence))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._sweep_at = 64 + 2 * len(self._heap)

    def pop_due(self, now_s: float) -> Iterator[Sequence]:
        """Sequences whose moment has come, earliest first; some may have finished in the meantime."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)
