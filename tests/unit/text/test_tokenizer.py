from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.tokenizer import META_FILE, TOKENIZER_FILE, Tokenizer
from enginehouse.runtime.tokenizer_writer import write_tokenizer

from .conftest import StoredTokenizers, read_json

NAMES = ["smollm", "qwen2", "llama3", "tekken", "gpt2", "sentencepiece"]
TRICKY = st.text(
    st.one_of(st.characters(), st.sampled_from("<|>im_end/s[]INST▁ \n\U000f0000\U00100000")), max_size=60
)


@pytest.mark.parametrize("name", NAMES)
def test_text_never_becomes_a_special_token(stored: StoredTokenizers, name: str) -> None:
    tokenizer = stored(name, "gguf")
    controls = tokenizer.special_token_ids - {tokenizer.meta.unk_token_id}
    assert controls
    for special in tokenizer.special_texts:
        for text in (special, f"a{special}b", f" {special} ", special * 3, f"{special[:-1]}{special}"):
            ids = tokenizer.encode(text, add_special=False)
            assert controls.isdisjoint(ids), text
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_of_any_text(stored: StoredTokenizers, name: str) -> None:
    tokenizer = stored(name, "hf")

    @settings(max_examples=150, deadline=None)
    @given(TRICKY)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if name == "qwen2":  # it composes characters
            import unicodedata

            clean = unicodedata.normalize("NFC", clean)
        if name == "sentencepiece":  # it writes spaces with this character, so it cannot tell the two apart
            clean = clean.replace("▁", " ")
        assert tokenizer.decode(ids) == clean
        assert tokenizer.special_token_ids.isdisjoint(ids)
        assert len(ids) >= tokenizer.min_num_tokens(text)

    check()


def test_special_tokens_are_parsed_where_asked_for(stored: StoredTokenizers) -> None:
    tokenizer = stored("smollm", "hf")
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special=False, parse_special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_bos_is_added_once_and_only_on_request(stored: StoredTokenizers) -> None:
    tokenizer = stored("llama3", "gguf")
    assert tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special=False)]
    assert tokenizer.encode("") == [0]
    assert stored("smollm", "gguf").encode("") == []


def test_a_special_token_that_merges_can_build_is_spelled(tmp_path: Path) -> None:
    """Nothing but the spelling stands between this vocabulary's merges and its end token."""
    metadata = read_json("gpt2/gguf.json")
    tokens = metadata["tokenizer.ggml.tokens"]
    end = tokens.index("he")
    metadata["tokenizer.ggml.token_type"][end] = 3
    write_tokenizer(tmp_path, gguf_metadata=metadata)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("he", add_special=False)
    assert ids == [tokens.index("h"), tokens.index("e")]
    assert tokenizer.encode("he", add_special=False, parse_special=True) == [end]


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_surrogates_and_nul(stored: StoredTokenizers, name: str) -> None:
    tokenizer = stored(name, "hf")
    high, low = chr(0xD83D), chr(0xDE00)
    for text, expected in ((high, "�"), (low + high, "��"), (high + low, "😀"), ("a\x00b", "a\x00b")):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == expected


def test_token_bytes(stored: StoredTokenizers) -> None:
    byte_level, pieces = stored("smollm", "hf"), stored("sentencepiece", "hf")
    emoji = byte_level.encode("👩‍👩‍👧", add_special=False)
    assert b"".join(map(byte_level.token_bytes, emoji)) == "👩‍👩‍👧".encode()
    rare = pieces.encode("𝕳", add_special=False)
    assert b"".join(map(pieces.token_bytes, rare)) == b" " + "𝕳".encode()
    assert pieces.token_bytes(rare[-1]) == "𝕳".encode()[-1:]
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    assert byte_level.token_bytes(-1) == b""


def test_padding_of_the_vocabulary_has_no_text(tmp_path: Path) -> None:
    """Rows of the embedding beyond the tokens may be sampled; the aliases' ids, which lie there, must not show."""
    write_tokenizer(tmp_path, gguf_metadata=read_json("smollm/gguf.json"), vocab_size=1024)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.meta.num_tokens < 1024
    padding = list(range(tokenizer.meta.num_tokens, 1024))
    assert tokenizer.decode(padding) == ""


def test_leading_space_is_stripped_once(stored: StoredTokenizers) -> None:
    tokenizer = stored("sentencepiece", "hf")
    assert tokenizer.strip_leading_space
    assert tokenizer.decode(tokenizer.encode("  two")) == "  two"
    assert not stored("smollm", "hf").strip_leading_space


@pytest.mark.parametrize("name", ["smollm", "llama3", "sentencepiece"])
@pytest.mark.parametrize("unit", ["a", " ", "\n", "ab ", "é", "<|im_end|>", "<", "\x00", "漢"])
def test_time_grows_linearly(stored: StoredTokenizers, name: str, unit: str) -> None:
    """A quadratic step would take minutes here, not a second."""
    tokenizer = stored(name, "hf")
    text = unit * (500_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert time.perf_counter() - start < 20
    assert len(ids) >= tokenizer.min_num_tokens(text) > 0


def test_encoding_leaves_other_threads_running(stored: StoredTokenizers) -> None:
    tokenizer = stored("smollm", "hf")
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    tokenizer.encode("Hello, wide world! " * 60_000)
    took = time.perf_counter() - start
    done.set()
    ticker.join()
    assert max(gaps) < took / 2


def test_threads_share_a_tokenizer(stored: StoredTokenizers) -> None:
    tokenizer = stored("smollm", "hf")
    texts = [f"<|im_start|>{i} text {i * 7} 😀" for i in range(200)]
    expected = [tokenizer.encode(text, parse_special=i % 2 == 0) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tokenizer.encode, t, parse_special=i % 2 == 0) for i, t in enumerate(texts)]
    assert [future.result() for future in futures] == expected


def test_damaged_files_are_named(stored: StoredTokenizers, tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="tokenizer"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path, gguf_metadata=read_json("smollm/gguf.json"))
    document = json.loads((tmp_path / TOKENIZER_FILE).read_text())
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(document)[:-100])
    with pytest.raises(CorruptModelError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
    (tmp_path / META_FILE).write_text("{}")
    with pytest.raises(CorruptModelError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)
