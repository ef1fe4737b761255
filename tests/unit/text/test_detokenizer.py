from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.runtime.tokenizer import Tokenizer

from .conftest import StoredTokenizers, read_json

NAMES = ["smollm", "qwen2", "tekken", "gpt2", "sentencepiece"]


def pushed(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def interesting_ids(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    """All ids, padding included, with single bytes and special tokens more often than chance gives them."""
    ids = range(tokenizer.vocab_size + 3)
    single_bytes = [i for i in ids if len(tokenizer.token_bytes(i)) == 1]
    return st.one_of(
        st.sampled_from(ids),
        st.sampled_from(single_bytes),
        st.sampled_from(sorted(tokenizer.special_token_ids)),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip_special", [True, False])
def test_joined_pieces_are_the_full_text(stored: StoredTokenizers, name: str, skip_special: bool) -> None:
    tokenizer = stored(name, "hf")
    chunks = st.lists(st.lists(interesting_ids(tokenizer), max_size=4), max_size=25)

    @settings(max_examples=200, deadline=None)
    @given(chunks)
    def check(chunks: list[list[int]]) -> None:
        ids = [i for chunk in chunks for i in chunk]
        pieces = pushed(Detokenizer(tokenizer, skip_special=skip_special), chunks)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_no_piece_ends_within_a_character(stored: StoredTokenizers, name: str) -> None:
    """Valid text never shows a replacement character, however it is cut."""
    tokenizer = stored(name, "hf")
    for text in read_json("hard_strings.json"):
        if "�" in text:
            continue
        ids = tokenizer.encode(text, add_special=False)
        pieces = pushed(Detokenizer(tokenizer), [[i] for i in ids])
        assert not any("�" in piece for piece in pieces), text
        assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_output_continues_the_prompt(stored: StoredTokenizers, name: str) -> None:
    """Prompt text and output text together are the text of all tokens, spaces included."""
    tokenizer = stored(name, "hf")

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=10), st.lists(interesting_ids(tokenizer), max_size=12))
    def check(prompt: str, output: list[int]) -> None:
        prompt_ids = tokenizer.encode(prompt)
        pieces = pushed(Detokenizer(tokenizer, prompt_tokens=prompt_ids), [[i] for i in output])
        whole = tokenizer.decode([*prompt_ids, *output])
        assert tokenizer.decode(prompt_ids) + "".join(pieces) == whole

    check()


def test_sentencepiece_keeps_the_space_between_prompt_and_output(stored: StoredTokenizers) -> None:
    tokenizer = stored("sentencepiece", "hf")
    world = tokenizer.encode("world", add_special=False)
    hello = tokenizer.encode("hello")
    assert "".join(pushed(Detokenizer(tokenizer, prompt_tokens=hello), [world])) == " world"
    assert "".join(pushed(Detokenizer(tokenizer, prompt_tokens=[1]), [world])) == "world"
    assert "".join(pushed(Detokenizer(tokenizer), [world])) == "world"


def test_a_character_begun_by_the_prompt(stored: StoredTokenizers) -> None:
    tokenizer = stored("smollm", "hf")
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, second, third = (ids[bytes([b])] for b in "€".encode())
    detokenizer = Detokenizer(tokenizer, prompt_tokens=[first, second])
    assert detokenizer.push([third, ids[b"a"]]) == "€a"
    detokenizer = Detokenizer(tokenizer, prompt_tokens=[first, second])
    assert detokenizer.push([ids[b"a"]]) == "a"
    detokenizer = Detokenizer(tokenizer, prompt_tokens=[first, second])
    assert detokenizer.flush() == ""


def test_incomplete_characters_are_held_then_flushed(stored: StoredTokenizers) -> None:
    tokenizer = stored("smollm", "hf")
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = Detokenizer(tokenizer)
    for count, byte in enumerate("😀".encode()[:3], start=1):
        assert detokenizer.push([ids[bytes([byte])]]) == ""
        assert detokenizer.num_pending_bytes == count
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_cost_of_a_push_does_not_grow(stored: StoredTokenizers) -> None:
    tokenizer = stored("sentencepiece", "hf")
    ids = tokenizer.encode("some words to repeat", add_special=False) * 20_000
    detokenizer = Detokenizer(tokenizer)
    start = time.perf_counter()
    for token in ids:
        detokenizer.push([token])
    assert time.perf_counter() - start < 5
