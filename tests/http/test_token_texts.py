"""Cutting a text into its tokens' pieces, against every way of stopping and every way of releasing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.api.token_texts import TokenTexts
from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.engine.stop_strings import StopStringChecker, StopStrings

EOS = 0
PIECES: list[bytes] = [
    b"", b"a", b"b", b" the", b"ab", b"STOP", b"ST", b"OP", "é".encode(), "😀".encode(),
    "😀".encode()[:2], "😀".encode()[2:], b"\xe2", b"\x80", b"\xff", b"x\xf0\x9f", b"\x98\x80y", b" ",
]  # fmt: skip


class Spelling:
    """A tokenizer whose tokens are the pieces above; token 0 is special."""

    special_token_ids = frozenset({EOS})

    def __init__(self, strip_leading_space: bool) -> None:
        self.strip_leading_space = strip_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else PIECES[token_id]


@given(
    tokens=st.lists(st.integers(1, len(PIECES) - 1), max_size=12),
    stops=st.lists(st.sampled_from(["STOP", "ab", "é", "�", "y", " t"]), max_size=2, unique=True),
    ends_with_eos=st.booleans(),
    strip=st.booleans(),
    group=st.integers(1, 3),
    prompt=st.lists(st.sampled_from([EOS, 1, 3, 9]), max_size=2),
)
def test_pieces_join_to_the_text(
    tokens: list[int], stops: list[str], ends_with_eos: bool, strip: bool, group: int, prompt: list[int]
) -> None:
    """Feeds tokens as the engine does: one at a time through detokenizer and stop check, delivered in groups."""
    tokenizer = Spelling(strip)
    detokenizer = Detokenizer(tokenizer, prompt_tokens=prompt)  # type: ignore[arg-type]
    checker = StopStringChecker(StopStrings(stops))
    texts = TokenTexts(tokenizer, prompt)  # type: ignore[arg-type]
    visible, shown, used = "", [], []
    queue: list[tuple[list[int], str]] = []
    matched = None
    for token in tokens:
        text, matched = checker.push(detokenizer.push((token,)))
        queue.append(([token], text))
        if matched is not None:
            break
    if matched is None:
        tail, matched = checker.push(detokenizer.flush())
        if matched is None:
            tail += checker.flush()
        last_tokens, last_text = queue.pop() if queue else ([], "")
        if ends_with_eos:
            queue.append((last_tokens, last_text))
            queue.append(([EOS], tail))
        else:
            queue.append((last_tokens, last_text + tail))
    for start in range(0, len(queue), group):
        batch = queue[start : start + group]
        batch_tokens = [token for part, _ in batch for token in part]
        text = "".join(part for _, part in batch)
        used += batch_tokens
        visible += text
        texts.push(batch_tokens)
        shown += texts.release(text)
        assert visible.startswith("".join(piece.text for piece in shown))
    rest, silent = texts.finish()
    shown += rest
    assert "".join(piece.text for piece in shown) == visible
    assert [piece.token for piece in (*shown, *silent)] == used
    assert all(piece.token != EOS for piece in shown)
    joined = b"".join(piece.raw for piece in shown)
    assert joined.decode("utf-8", "replace") == visible
