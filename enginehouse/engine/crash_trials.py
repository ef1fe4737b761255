"""Who goes on after a worker died, and who is to blame for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from enginehouse.engine.active_request import ActiveRequest
from enginehouse.engine.messages import AddSequence, SequenceId


class CrashTrials:
    """After a death, lets the requests that may have caused it go one step alone, one after another.

    A request that takes the new worker with it while it is there alone is to blame; nobody else is. Whoever gets a
    token out of it is cleared, and waits until all have had their turn. A crash that does not depend on any request
    thus fails nobody, and one that does fails that request at its second crash. Nothing else must be sent to the
    worker while `is_on`. Pure: what is sent is returned.
    """

    def __init__(self, max_running: int, is_unfinished: Callable[[SequenceId], bool]) -> None:
        self._max_running = max_running
        self._is_unfinished = is_unfinished
        self._suspects: deque[ActiveRequest] = deque()
        self._owing: set[SequenceId] = set()
        """Sequences of the request on trial that have neither a new token nor an end."""
        self._on_trial: ActiveRequest | None = None

    @property
    def is_on(self) -> bool:
        """Whether requests have to wait for those that are tried."""
        return self._on_trial is not None or bool(self._suspects)

    def died(self, requests: list[ActiveRequest]) -> ActiveRequest | None:
        """The worker died with `requests` in it, in order of arrival; returns the one that is to blame, if known."""
        guilty, self._on_trial = self._on_trial, None
        self._owing.clear()
        if guilty is not None:
            return guilty
        for request in requests:
            request.num_crashes += 1
        # Those that had a token out surely ran. Of the others only some can have been in the last step; whoever is
        # left out now has more crashes than those cleared, should it come to another, and is tried before them.
        ranked = sorted(requests, key=lambda request: (-request.num_crashes, not request.is_started))
        self._suspects = deque(ranked[: self._max_running])
        return None

    def next(self) -> list[AddSequence]:
        """Start the next trial; empty when there is none left and everybody may go on."""
        self._on_trial = None
        while self._suspects:
            request = self._suspects.popleft()
            self._owing = {
                choice.sequence_id for choice in request.unfinished if self._is_unfinished(choice.sequence_id)
            }
            if self._owing:
                self._on_trial = request
                return request.resume_messages(max_new_tokens=1)
        return []

    def tries(self, sequence_id: SequenceId) -> bool:
        """Whether that sequence is on trial: the worker was told to end it after one more token."""
        return sequence_id in self._owing

    def settle(self, sequence_id: SequenceId) -> bool:
        """Note that a sequence got its token or ended; returns whether that was the last the trial waited for."""
        if sequence_id not in self._owing:
            return False
        self._owing.remove(sequence_id)
        return not self._owing
