"""Stop strings in a stream of text pieces (an Aho-Corasick automaton over the characters)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from enginehouse.errors import InvalidRequestError

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 1000
MAX_ALL_STOP_CHARS = 4000


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raise `InvalidRequestError` for an empty stop string, and for more or longer ones than an automaton is built
    for: it has a state for each character.
    """
    if len(stops) > MAX_STOP_STRINGS:
        problem = f"stop: at most {MAX_STOP_STRINGS} strings are allowed, not {len(stops)}."
    elif not all(stops):
        problem = "stop must not contain an empty string."
    elif (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        problem = f"stop: a string may have at most {MAX_STOP_CHARS} characters, not {longest}."
    elif (total := sum(map(len, stops))) > MAX_ALL_STOP_CHARS:
        problem = f"stop: all strings together may have at most {MAX_ALL_STOP_CHARS} characters, not {total}."
    else:
        return
    raise InvalidRequestError(problem, param="stop")


class StopStrings:
    """The automaton of a request's stop strings. Fixed once it is built; all choices share it."""

    __slots__ = ("_children", "_fail", "depth", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `ValueError` when a stop string is empty."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._children: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]
        """For each state, the characters of a stop string's beginning that the text ends with."""
        self.match: list[str | None] = [None]
        """For each state, the longest stop string that the text ends with."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self._children[0])

    def next(self, state: int, char: str) -> int:
        """The state after one more character; 0 is the state at the start."""
        while state and char not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._children[state][char]
        self.match[state] = stop

    def _link(self) -> None:
        """Set each state's link to its longest proper suffix, and inherit that suffix's match."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                queue.append(child)
                fallback = self._fail[state]
                while fallback and char not in self._children[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._children[fallback].get(char, 0)
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]


class StopStringChecker:
    """Passes text on and ends it before the first stop string.

    Owns the held-back text: the longest end of the text so far that a stop string could begin with. Promises
    that no character of a match is ever emitted, that everything else is, as early as possible, and that the
    outcome does not depend on how the text was cut into pieces. The match that is complete first wins; of two
    that end at the same character, the longer. A push costs the length of its text, however many stop strings
    there are.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def num_held(self) -> int:
        """Characters held back because a stop string may begin with them."""
        return len(self._held)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that ended it or None).

        After a match nothing is emitted any more.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        known = len(self._held)
        buffer = self._held + text
        for position, char in enumerate(text, start=known + 1):
            self._state = self._stops.next(self._state, char)
            match = self._stops.match[self._state]
            if match is not None:
                self._matched, self._held = match, ""
                return buffer[: position - len(match)], match
        shown = len(buffer) - self._stops.depth[self._state]
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """The held-back text, when the output ended otherwise: it was no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held
