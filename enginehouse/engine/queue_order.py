"""The order in which waiting sequences get their turn.

An order is a value chosen by settings; `new_queue()` makes the queue that follows it. `rank()` gives a
sequence its fixed place among those that run: when memory is short, the highest rank number loses its blocks.
Ranks never change, so the best-ranked sequence is never a victim and always advances.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

import msgspec

from enginehouse.engine.messages import SequenceId
from enginehouse.engine.sequence import Rank, Sequence

MAX_TENANTS = 4096


class WaitingQueue(Protocol):
    """Sequences that wait. `remove` and `push` cost O(log n)."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that has not run yet."""

    def requeue(self, sequence: Sequence) -> None:
        """Put back one that ran and lost its place."""

    def peek(self) -> Sequence | None:
        """The next one, left where it is."""

    def pop(self) -> Sequence:
        """The next one, taken out. Raises `IndexError` when empty."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands."""

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Say that `num_tokens` were computed for `tenant`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class QueueOrder(Protocol):
    """A way to order waiting sequences."""

    def rank(self, sequence: Sequence, arrival_number: int) -> Rank:
        """Its fixed place among running sequences, smaller is better; asked once, when it arrives."""

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""


class RankedQueue:
    """Smallest rank first; a preempted sequence keeps its rank and so its place."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, SequenceId]] = []
        self._waiting: dict[SequenceId, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        self._waiting[sequence.sequence_id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence.sequence_id))

    requeue = push

    def peek(self) -> Sequence | None:
        """See `WaitingQueue`."""
        while self._heap:
            sequence = self._waiting.get(self._heap[0][1])
            if sequence is not None:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """See `WaitingQueue`."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._waiting[sequence.sequence_id]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        del self._waiting[sequence.sequence_id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(waiting.rank, id_) for id_, waiting in self._waiting.items()]
            heapq.heapify(self._heap)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Rank does not depend on what was served."""

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())


class FairQueue:
    """The tenant that was served least goes first; within a tenant, first come.

    Start-time fair queueing (Goyal, Vin, Cheng 1996) with computed tokens as cost: a tenant that comes back
    after a pause starts from the present, it has saved nothing up. Preempted sequences go before all others.
    """

    def __init__(self) -> None:
        self._resumed = RankedQueue()
        self._tenants: dict[str, RankedQueue] = {}
        self._served: dict[str, float] = {}
        self._now_served = 0.0

    def push(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        tenant = sequence.tenant
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = RankedQueue()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._now_served)
            self._forget_idle_tenants()
        queue.push(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        self._resumed.push(sequence)

    def peek(self) -> Sequence | None:
        """See `WaitingQueue`."""
        queue = self._next_queue()
        return None if queue is None else queue.peek()

    def pop(self) -> Sequence:
        """See `WaitingQueue`."""
        queue = self._next_queue()
        if queue is None:
            raise IndexError("pop from an empty queue")
        sequence = queue.pop()
        if queue is not self._resumed:
            self._now_served = max(self._now_served, self._served[sequence.tenant])
            if not queue:
                del self._tenants[sequence.tenant]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """See `WaitingQueue`."""
        queue = self._tenants.get(sequence.tenant)
        if queue is None or sequence not in queue:
            self._resumed.remove(sequence)
            return
        queue.remove(sequence)
        if not queue:
            del self._tenants[sequence.tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """See `WaitingQueue`."""
        self._served[tenant] = self._served.get(tenant, self._now_served) + num_tokens
        self._forget_idle_tenants()

    def __len__(self) -> int:
        return len(self._resumed) + sum(len(queue) for queue in self._tenants.values())

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed
        for queue in self._tenants.values():
            yield from queue

    def _next_queue(self) -> RankedQueue | None:
        if self._resumed:
            return self._resumed
        if not self._tenants:
            return None
        return min(self._tenants.items(), key=lambda item: (self._served[item[0]], _head_rank(item[1])))[1]

    def _forget_idle_tenants(self) -> None:
        """Keep the table bounded: idle tenants with the smallest account lose least by being forgotten."""
        if len(self._served) <= MAX_TENANTS:
            return
        idle = [tenant for tenant in self._served if tenant not in self._tenants]
        idle.sort(key=self._served.__getitem__)
        for tenant in idle[: len(idle) // 2 + 1]:
            del self._served[tenant]


def _head_rank(queue: RankedQueue) -> Rank:
    head = queue.peek()
    return (float("inf"), 0, 0) if head is None else head.rank


class Fifo(msgspec.Struct, frozen=True, tag="fifo"):
    """First come, first served."""

    def rank(self, sequence: Sequence, arrival_number: int) -> Rank:
        """By arrival."""
        return (0.0, arrival_number, 0)

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""
        return RankedQueue()


class PriorityWithAgeing(msgspec.Struct, frozen=True, tag="priority"):
    """Smaller priority first, but every `ageing_s` of waiting is worth one step of priority, so nobody starves.

    At time t a sequence stands at `priority - (t - arrival_s) / ageing_s`. Comparing two of them, t cancels out:
    the order is that of `arrival_s + priority * ageing_s`, which never changes.
    """

    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.ageing_s > 0:
            raise ValueError(f"ageing_s must be more than 0, not {self.ageing_s}")

    def rank(self, sequence: Sequence, arrival_number: int) -> Rank:
        """By arrival, moved by priority."""
        return (sequence.arrival_s + sequence.priority * self.ageing_s, arrival_number, 0)

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""
        return RankedQueue()


class FairShare(msgspec.Struct, frozen=True, tag="fair-share"):
    """Between tenants by tokens served, within a tenant first come, first served."""

    def rank(self, sequence: Sequence, arrival_number: int) -> Rank:
        """By arrival."""
        return (0.0, arrival_number, 0)

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""
        return FairQueue()


Order = Fifo | PriorityWithAgeing | FairShare
