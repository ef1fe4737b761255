"""A model's text to content and calls, in pieces of any size: the pieces never change what comes out.

A parser is fed text as it is generated and answers with events. Joined, the `ContentPiece`s of an answer are its
content, and each call is a `CallStart` with the `CallArguments` of its index. Offsets count characters of the
whole text fed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from enginehouse.api.tools.formats import ToolFormat
from enginehouse.api.tools.json_scan import JsonScan


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More content; `start` is where in the whole text it stood."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class CallStart:
    """A new call, and the function it names. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


OutputEvent = ContentPiece | CallStart | CallArguments


@dataclass(slots=True)
class Call:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """A whole answer; put together from the events of its parser."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Take events in, in order."""
        for event in events:
            if isinstance(event, ContentPiece):
                self.content += event.text
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.id, event.name))
            else:
                self.calls[event.index].arguments += event.text


class OutputParser(Protocol):
    """Reads one choice's text."""

    num_decided: int
    """Characters of the text that are known to be content, or not to be; the rest is held back."""
    num_calls: int
    """Calls that have begun."""
    is_free: bool
    """Whether the text might have been content."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Events that `text` brings."""

    def finish(self) -> list[OutputEvent]:
        """Events for what was held back, when no more text comes."""


def parse_output(parser: OutputParser, text: str) -> ParsedOutput:
    """What a new parser makes of a whole text: the same as of its pieces."""
    parsed = ParsedOutput()
    parsed.add(parser.feed(text))
    parsed.add(parser.finish())
    return parsed


def new_call_id() -> str:
    """A call's id, unique among all answers."""
    return f"call_{secrets.token_hex(12)}"


class _WrittenCall(msgspec.Struct):
    """A call as models write it, with either name for the arguments."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_calls_decoder = msgspec.json.Decoder(_WrittenCall | list[_WrittenCall])
_text_decoder = msgspec.json.Decoder(str)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _written_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """(name, arguments) of each call in a JSON object or array; None unless all of it is valid calls."""
    try:
        decoded = _calls_decoder.decode(text)
        written = decoded if isinstance(decoded, list) else [decoded]
        calls = [(call.name, _arguments(call)) for call in written]
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return calls if calls and all(name in names for name, _ in calls) else None


def _arguments(call: _WrittenCall) -> str:
    """The arguments as they were written. Some models write the object's text as a string. Raises `DecodeError`."""
    text = (bytes(call.arguments) or bytes(call.parameters)).decode()
    if text.startswith('"'):
        text = _text_decoder.decode(text)
    _object_decoder.decode(text)
    return text


_SPACE = re.compile(r"\s*")
_BEFORE_BARE_CALL = re.compile(r"\s*(?:;\s*)?")


class ToolCallParser:
    """Finds calls in text that a model wrote freely.

    A call is announced when all of it is there and proves to be one: a function that may be called, and an object
    as arguments. Whatever only looks like a call is content, to the last character; so is a call that the end of
    the text cuts short. White space before a call, and behind the last, is none of the content. After the first call, unless
    `parallel`, other calls are left out.
    """

    is_free = True

    def __init__(
        self,
        fmt: ToolFormat,
        names: Collection[str],
        *,
        parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = fmt
        self._names = frozenset(names)
        self._parallel = parallel
        self._new_id = new_id
        self.num_calls = 0
        self.num_decided = 0
        self._text = ""
        """What has not been decided, from `num_decided` on."""
        self._is_final = False
        self._events: list[OutputEvent] = []
        self._step: Callable[[], bool] = self._search
        self._is_fresh = fmt.is_bare
        """A call may begin here without its marker."""
        self._is_behind_call = False
        """Nothing but white space has come since a call."""
        self._body_start = 0
        """Where in `_text` the body of a possible call begins; `_json_start`: behind white space."""
        self._json_start = 0
        self._scan = JsonScan()
        self._num_scanned = 0

    def feed(self, text: str) -> list[OutputEvent]:
        """Events that `text` brings."""
        self._text += text
        return self._run()

    def finish(self) -> list[OutputEvent]:
        """Events for what was held back."""
        self._is_final = True
        return self._run()

    def _run(self) -> list[OutputEvent]:
        # Each step decides something and moves on, or needs more text.
        while self._text and self._step():
            pass
        events, self._events = self._events, []
        return events

    # Steps: True when something was decided -------------------------------------------------------------------

    def _search(self) -> bool:
        """Look for the beginning of a call."""
        text = self._text
        if self._is_fresh:
            found = _BEFORE_BARE_CALL.match(text)
            assert found is not None
            if found.end() == len(text) and not self._is_final:
                return False
            if text.startswith("{", found.end()):
                return self._begin_body(found.end())
        at = text.find(self._format.marker)
        if at >= 0:
            spaces = at - len(text[:at].rstrip())
            self._show(at - spaces)
            return self._begin_body(spaces + len(self._format.marker))
        if self._is_final:
            if self._is_behind_call and text.isspace():
                self._drop(len(text))
            self._show(len(self._text))
            return False
        held = _num_possible_beginning(text, self._format.marker)
        rest = text[: len(text) - held]
        self._show(len(rest.rstrip()))
        return False

    def _begin_body(self, start: int) -> bool:
        self._body_start = start
        self._scan, self._num_scanned = JsonScan(), 0
        self._step = self._read_body
        return True

    def _read_body(self) -> bool:
        """Read the JSON after a marker, to its end or to where it cannot be a call."""
        text = self._text
        if not self._num_scanned:
            found = _SPACE.match(text, self._body_start)
            assert found is not None
            self._num_scanned = found.end()
            if found.end() == len(text):
                self._num_scanned = 0
                return self._reject() if self._is_final else False
            if text[found.end()] not in "{[":
                return self._reject()
            self._json_start = found.end()
        end = self._scan.push(text, self._num_scanned)
        self._num_scanned = len(text)
        if end is None:
            return self._reject() if self._is_final else False
        calls = _written_calls(text[self._json_start : end], self._names)
        if calls is None:
            return self._reject()
        self._accept(calls)
        self._drop(end)
        self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        """Drop the end mark of a call, which small models forget at times."""
        end = self._format.end
        if end:
            found = _SPACE.match(self._text)
            assert found is not None
            rest = self._text[found.end() :]
            if rest.startswith(end):
                self._drop(found.end() + len(end))
            elif end.startswith(rest) and not self._is_final:
                return False
        self._is_fresh = self._format.is_bare
        self._is_behind_call = True
        self._step = self._search
        return True

    # What steps do --------------------------------------------------------------------------------------------

    def _reject(self) -> bool:
        """It was no call: its beginning is content, and what follows is searched again."""
        start = self._body_start
        is_marked = self._text[:start].endswith(self._format.marker)
        self._show(start if is_marked else start + 1)
        self._step = self._search
        return True

    def _accept(self, calls: list[tuple[str, str]]) -> None:
        for name, arguments in calls:
            if self.num_calls and not self._parallel:
                break
            self._events.append(CallStart(self.num_calls, self._new_id(), name))
            self._events.append(CallArguments(self.num_calls, arguments))
            self.num_calls += 1

    def _show(self, length: int) -> None:
        if length:
            self._events.append(ContentPiece(self._text[:length], self.num_decided))
            self._is_fresh = self._is_behind_call = False
            self._drop(length)

    def _drop(self, length: int) -> None:
        self._text = self._text[length:]
        self.num_decided += length


def _num_possible_beginning(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ForcedCallParser:
    """Reads text that a grammar of `forcing` shaped: nothing but calls, of which only the last may be cut short.

    Arguments are passed on as they come. A call is announced when its name and what stands between name and
    arguments are there.
    """

    is_free = False

    def __init__(self, fmt: ToolFormat, *, new_id: Callable[[], str] = new_call_id) -> None:
        before, between = re.escape(fmt.before_name), re.escape(fmt.before_arguments)
        self._header = re.compile(before + r"([a-zA-Z0-9_-]{1,64})" + between)
        self._new_id = new_id
        self.num_calls = 0
        self.num_decided = 0
        self._text = ""
        self._scan: JsonScan | None = None
        """While inside arguments."""

    def feed(self, text: str) -> list[OutputEvent]:
        """Events that `text` brings."""
        self.num_decided += len(text)
        self._text += text
        events: list[OutputEvent] = []
        while self._text:
            if self._scan is None:
                found = self._header.search(self._text)
                if found is None:
                    break
                self._text = self._text[found.end() :]
                self._scan = JsonScan()
                events.append(CallStart(self.num_calls, self._new_id(), found[1]))
                self.num_calls += 1
            else:
                end = self._scan.push(self._text)
                events.append(CallArguments(self.num_calls - 1, self._text[:end]))
                self._text = "" if end is None else self._text[end:]
                if end is not None:
                    self._scan = None
        return events

    def finish(self) -> list[OutputEvent]:
        """Nothing: what was held back is the beginning of a call that never came."""
        return []
