"""Feeding parsers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from enginehouse.api.tools.formats import FORMATS
from enginehouse.api.tools.parsing import (
    CallArguments,
    CallStart,
    ContentPiece,
    OutputEvent,
    OutputParser,
    ParsedOutput,
    ToolCallParser,
)

NAMES = ("get_weather", "f")


def counted_ids() -> Callable[[], str]:
    """Ids that are the same for every parser: call_0, call_1, …"""
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def free_parser(name: str, names: Iterable[str] = NAMES, **options: Any) -> ToolCallParser:
    return ToolCallParser(FORMATS[name], tuple(names), new_id=counted_ids(), **options)


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


def all_events(parser: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def joined(events: Iterable[OutputEvent]) -> ParsedOutput:
    parsed = ParsedOutput()
    parsed.add(events)
    return parsed


def check_order(events: Iterable[OutputEvent], text: str) -> None:
    """A call starts before its arguments and behind the call before it; content pieces are where they say."""
    num_started = 0
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == num_started
            num_started += 1
        elif isinstance(event, CallArguments):
            assert event.index == num_started - 1
        else:
            assert isinstance(event, ContentPiece)
            assert event.text
            assert text[event.start : event.start + len(event.text)] == event.text


def calls_of(parsed: ParsedOutput) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.calls]
