from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.engine.stop_strings import (
    MAX_ALL_STOP_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    StopStringChecker,
    StopStrings,
    check_stop_strings,
)
from enginehouse.errors import InvalidRequestError


def brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_possible_start(text: str, stops: list[str]) -> int:
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )


ALPHABETS = st.sampled_from(["ab", "abc", "a\n#", "é😀a"])


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_against_brute_force(data: st.DataObject) -> None:
    letters = st.sampled_from(data.draw(ALPHABETS))
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=6), max_size=6))
    pieces = data.draw(st.lists(st.text(letters, max_size=5), max_size=15))
    checker = StopStringChecker(StopStrings(stops))
    expected, expected_match = brute_force("".join(pieces), stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        text, match = checker.push(piece)
        shown += text
        if match is None:
            # Nothing is held longer than it must be.
            assert len(seen) - len(shown) == checker.num_held == longest_possible_start(seen, stops)
        else:
            assert checker.num_held == 0
    if checker.matched is None:
        shown += checker.flush()
    assert (shown, checker.matched) == (expected, expected_match)


def test_nothing_comes_after_a_match() -> None:
    checker = StopStringChecker(StopStrings(["END"]))
    assert checker.push("one EN") == ("one ", None)
    assert checker.num_held == 2
    assert checker.push("D two END") == ("", "END")
    assert checker.push("more") == ("", "END")
    assert checker.flush() == ""


def test_held_text_comes_back_when_it_was_no_stop_string() -> None:
    checker = StopStringChecker(StopStrings(["\n\nUser:", "###"]))
    assert checker.push("a\n") == ("a", None)
    assert checker.push("\nUse") == ("", None)
    assert checker.push("d") == ("\n\nUsed", None)
    assert checker.push("##") == ("", None)
    assert checker.flush() == "##"


def test_overlaps() -> None:
    assert StopStringChecker(StopStrings(["b", "ab"])).push("xab") == ("x", "ab")
    assert StopStringChecker(StopStrings(["abcd", "c"])).push("abcd") == ("ab", "c")
    assert StopStringChecker(StopStrings(["aab"])).push("aaab") == ("a", "aab")
    assert StopStringChecker(StopStrings([])).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_time_does_not_grow_with_the_number_of_stop_strings() -> None:
    stops = ["a" * n + "b" for n in range(1, 100)]
    checker = StopStringChecker(StopStrings(stops))
    start = time.perf_counter()
    for _ in range(20_000):
        checker.push("aaaaa")
    assert time.perf_counter() - start < 5
    assert checker.num_held == 99


def test_choices_share_the_automaton_and_nothing_else() -> None:
    stops = StopStrings(["END"])
    one, other = StopStringChecker(stops), StopStringChecker(stops)
    assert one.push("EN") == ("", None)
    assert other.push("D") == ("D", None)
    assert one.push("D") == ("", "END")
    assert other.matched is None


@pytest.mark.parametrize(
    "stops",
    [
        [""],
        ["ok", ""],
        ["x" * (MAX_STOP_CHARS + 1)],
        ["x"] * (MAX_STOP_STRINGS + 1),
        ["x" * MAX_STOP_CHARS] * (MAX_ALL_STOP_CHARS // MAX_STOP_CHARS) + ["x"],
    ],
)
def test_what_would_make_a_large_automaton_is_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_stop_strings(stops)
    assert caught.value.param == "stop"


def test_as_much_as_is_allowed() -> None:
    check_stop_strings([])
    check_stop_strings(["x" * MAX_STOP_CHARS] * (MAX_ALL_STOP_CHARS // MAX_STOP_CHARS))
    check_stop_strings(["x" * 20] * MAX_STOP_STRINGS)
