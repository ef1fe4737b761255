"""Tokens of content, when calls are taken out of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.api.token_texts import TokenText
from enginehouse.api.tools.logprobs import ContentTokens
from tests.unit.tools.reading import free_parser, joined, pieces_of
from tests.unit.tools.test_parsing import HERMES_1, TEXTS


def token(number: int, text: str) -> TokenText:
    return TokenText(number, text, text.encode(), None, 0)


def read(tokens: list[TokenText], lag: int) -> tuple[str, list[TokenText]]:
    """Content, and its tokens, of an answer whose tokens come `lag` steps after their text."""
    parser, kept = free_parser("hermes"), ContentTokens()
    shown: list[TokenText] = []
    events = []
    for step in range(len(tokens) + lag):
        fed = parser.feed(tokens[step].text) if step < len(tokens) else []
        events += fed
        shown += kept.take(
            tokens[step - lag : step - lag + 1] if step >= lag else [], fed, parser.num_decided
        )
    last = parser.finish()
    shown += kept.take([], last, parser.num_decided) + kept.finish()
    return joined([*events, *last]).content, shown


@given(TEXTS, st.lists(st.integers(0, 300), max_size=40), st.integers(0, 3))
def test_tokens_join_to_the_content(text: str, cuts: list[int], lag: int) -> None:
    tokens = [token(number, piece) for number, piece in enumerate(pieces_of(text, cuts)) if piece]
    content, shown = read(tokens, lag)
    assert "".join(part.text for part in shown) == content
    assert b"".join(part.raw for part in shown) == content.encode()
    assert [part.token for part in shown] == sorted(part.token for part in shown)


def test_a_token_that_is_partly_content_is_cut() -> None:
    content, shown = read([token(1, "Well"), token(2, ".\n<"), token(3, HERMES_1[1:] + "!")], 0)
    assert content == "Well.!"
    assert [(part.token, part.text, part.raw) for part in shown] == [
        (1, "Well", b"Well"),
        (2, ".", b"."),
        (3, "!", b"!"),
    ]


def test_tokens_that_began_a_character_go_with_it() -> None:
    half = TokenText(1, "", b"\xc3", None, 1)
    rest = TokenText(2, "é", b"\xa9", None, 0)
    assert [part.token for part in read([half, rest, token(3, "x")], 0)[1]] == [1, 2, 3]
    in_call = [token(4, HERMES_1.split("Paris")[0]), half, rest, token(5, '"}}\n</tool_call>')]
    content, shown = read(in_call, 0)
    assert (content, shown) == ("", [])
