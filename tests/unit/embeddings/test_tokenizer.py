"""Ends, pairs, cutting, and text that names special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginehouse.errors import CorruptModelError, SourceError
from enginehouse.runtime.encoder_tokenizer import _shares, write_encoder_tokenizer
from tests.support.tiny_encoders import encoder_named, write_tiny_encoder
from tests.unit.embeddings.conftest import Load

CLS, SEP = 2, 3


@pytest.mark.parametrize("name", ["bert-mean-norm", "roberta-mean"])
def test_ids_and_text_give_the_same_input(load: Load, name: str) -> None:
    tokenizer = load(name).tokenizer
    (item,) = tokenizer.encode(["the cat sat"])
    inner = item.tokens[len(tokenizer.prefix) : -len(tokenizer.suffix)]
    assert tokenizer.with_ends(inner).tokens == item.tokens
    assert tokenizer.with_ends(item.tokens).tokens == item.tokens
    assert tokenizer.with_ends(inner[:1]).tokens == [*tokenizer.prefix, inner[0], *tokenizer.suffix]
    for limit in range(3, 7):
        cut = tokenizer.with_ends(inner, limit)
        assert cut.tokens == tokenizer.encode(["the cat sat"], limit)[0].tokens
        assert (len(cut.tokens), cut.num_given) == (min(limit, 5), 5)


def test_pairs_have_types_where_the_model_has_them(load: Load) -> None:
    (bert,) = load("bert-cross").tokenizer.encode_pairs("cat", ["the mat"])
    assert (bert.tokens[0], bert.tokens[2], bert.tokens[-1]) == (CLS, SEP, SEP)
    assert bert.types == [0, 0, 0, 1, 1, 1]
    (roberta,) = load("xlm-roberta-cross").tokenizer.encode_pairs("cat", ["the mat"])
    assert roberta.types == []
    assert roberta.tokens.count(roberta.tokens[-1]) == 3


def test_only_pairs_that_are_too_long_are_cut(load: Load) -> None:
    tokenizer = load("bert-cross").tokenizer
    documents = ["cat", "the mat " * 30, "on"]
    whole, cut = (
        tokenizer.encode_pairs("the cat", documents),
        tokenizer.encode_pairs("the cat", documents, 12),
    )
    assert (cut[0], cut[2]) == (whole[0], whole[2])
    assert cut[1].tokens == [*whole[1].tokens[:11], SEP]
    assert (len(cut[1].types), cut[1].num_given) == (12, 65)


@pytest.mark.parametrize("room", range(12))
def test_the_longer_of_a_pair_gives_first(room: int) -> None:
    for first in range(9):
        for second in range(9):
            if first + second <= room:
                continue
            kept = _shares(first, second, room)
            assert sum(kept) == room
            assert kept[0] <= first
            assert kept[1] <= second
            for mine, other, all_mine in ((kept[0], kept[1], first), (kept[1], kept[0], second)):
                assert mine == all_mine or mine >= other - 1


def test_names_of_special_tokens_stay_text(load: Load) -> None:
    (item,) = load("bert-mean-norm").tokenizer.encode(["the [SEP] cat"])
    assert item.tokens.count(SEP) == 1
    assert len(item.tokens) > 5


def test_lone_surrogates_and_emptiness(load: Load) -> None:
    tokenizer = load("bert-mean-norm").tokenizer
    bad, blank = tokenizer.encode(["cat \ud800 mat", "   "])
    assert bad.tokens[0] == CLS
    assert blank.tokens == [CLS, SEP]


def test_stored_tokenizers(tmp_path: Path) -> None:
    directory = write_tiny_encoder(encoder_named("bert-cls"), tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    write_encoder_tokenizer(directory, out, vocab_size=131)
    stored = json.loads((out / "tokenizer.json").read_text())
    assert (stored["truncation"], stored["padding"]) == (None, None)
    with pytest.raises(CorruptModelError, match="tokens, the model 20"):
        write_encoder_tokenizer(directory, out, vocab_size=20)
    for text in ("[]", "{", "{}"):
        (directory / "tokenizer.json").write_text(text)
        with pytest.raises(CorruptModelError, match="is damaged"):
            write_encoder_tokenizer(directory, out, vocab_size=131)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        write_encoder_tokenizer(directory, out, vocab_size=131)
