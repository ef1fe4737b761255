"""Tokenizers as they are published, damaged ones, and those that are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from enginehouse.errors import CorruptModelError, SourceError, UnsupportedModelError
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.tokenizer_sentencepiece import read_sentencepiece_model
from enginehouse.runtime.tokenizer_writer import write_tokenizer

from .conftest import DATA, StoredTokenizers, read_json


def load_hf(directory: Path, out: Path, vocab_size: int | None = None) -> Tokenizer:
    write_tokenizer(out, directory=directory, vocab_size=vocab_size)
    return Tokenizer.load(out)


def load_gguf(out: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_tokenizer(out, gguf_metadata=metadata)
    return Tokenizer.load(out)


def edited(tmp_path: Path, name: str, file: str, edit: dict[str, Any]) -> Path:
    """A copy of a stored directory with some top-level keys of one file set."""
    directory = tmp_path / "edited"
    shutil.copytree(DATA / name, directory)
    path = directory / file
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **edit}))
    return directory


# --- facts -------------------------------------------------------------------------------------------------


def test_eos_ids_are_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    directory = edited(tmp_path, "smollm", "generation_config.json", {"eos_token_id": [0, 2, 300]})
    assert load_hf(directory, tmp_path / "out").eos_token_ids == (2, 0, 300)


def test_model_config_gives_eos_and_vocabulary_size_when_nothing_else_does(tmp_path: Path) -> None:
    directory = edited(tmp_path, "smollm", "config.json", {"eos_token_id": 2, "vocab_size": 768})
    (directory / "tokenizer_config.json").unlink()
    tokenizer = load_hf(directory, tmp_path / "out")
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((2,), 768)
    assert tokenizer.meta.special_tokens == {"eos_token": "<|im_end|>"}
    assert load_hf(directory, tmp_path / "out2", vocab_size=800).vocab_size == 800


def test_template_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    directory = edited(tmp_path, "smollm", "tokenizer_config.json", {})
    (directory / "chat_template.jinja").write_text("from the file")
    assert load_hf(directory, tmp_path / "out").chat_template == "from the file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    directory = edited(tmp_path, "smollm", "tokenizer_config.json", {"chat_template": named})
    tokenizer = load_hf(directory, tmp_path / "out")
    assert tokenizer.meta.chat_templates == {"default": "d", "tool_use": "t"}


def test_added_tokens_that_only_tokenizer_config_knows(tmp_path: Path) -> None:
    new = {"content": "<|new|>", "special": True, "lstrip": False, "rstrip": True}
    directory = edited(tmp_path, "smollm", "tokenizer_config.json", {"added_tokens_decoder": {"702": new}})
    tokenizer = load_hf(directory, tmp_path / "out")
    assert tokenizer.encode("<|new|>  a", parse_special=True)[0] == 702
    assert tokenizer.encode("<|new|>  a", parse_special=True)[1:] == tokenizer.encode("a")
    assert 702 in tokenizer.special_token_ids


def test_truncation_and_padding_are_not_taken_over(tmp_path: Path) -> None:
    settings = {
        "truncation": {"max_length": 3, "direction": "Right", "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    }
    directory = edited(tmp_path, "smollm", "tokenizer.json", settings)
    text = "one two three four five six"
    tokenizer = load_hf(directory, tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_end_of_turn_counts_as_eos(tmp_path: Path) -> None:
    metadata = read_json("smollm/gguf.json")
    metadata["tokenizer.ggml.eos_token_id"] = 0
    assert load_gguf(tmp_path / "a", metadata).eos_token_ids == (0, 2), "the template writes <|im_end|>"
    metadata["tokenizer.chat_template"] = "none"
    assert load_gguf(tmp_path / "b", metadata).eos_token_ids == (0,)
    metadata["tokenizer.ggml.eot_token_id"] = 2
    assert load_gguf(tmp_path / "c", metadata).eos_token_ids == (0, 2)


def test_gguf_flags(tmp_path: Path) -> None:
    metadata = read_json("sentencepiece/gguf.json")
    metadata["tokenizer.ggml.add_bos_token"] = False
    metadata["tokenizer.ggml.add_eos_token"] = True
    metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = load_gguf(tmp_path, metadata)
    ids = tokenizer.encode("hello")
    assert ids[-1] == 2
    assert b"".join(map(tokenizer.token_bytes, ids[:-1])) == b"hello"
    assert not tokenizer.strip_leading_space


def test_gguf_without_a_kind_uses_llama_cpps_default(tmp_path: Path) -> None:
    metadata = read_json("gpt2/gguf.json")
    del metadata["tokenizer.ggml.pre"]
    tokenizer = load_gguf(tmp_path, metadata)
    words = [tokenizer.token_bytes(i) for i in tokenizer.encode("x==12345")]
    assert b"".join(words) == b"x==12345"
    assert not any(b"=1" in word or b"34" in word for word in words), (
        "digits stay in threes, apart from signs"
    )


def test_sentencepiece_model_file_equals_gguf(stored: StoredTokenizers) -> None:
    from_model, from_gguf = stored("sentencepiece", "hf"), stored("sentencepiece", "gguf")
    assert from_model.meta == from_gguf.meta


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
    ],
)
def test_unsupported_gguf_kinds_are_named(tmp_path: Path, edit: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load_gguf(tmp_path, {**read_json("smollm/gguf.json"), **edit})


@pytest.mark.parametrize(
    "edit",
    [
        {"tokenizer.ggml.model": None},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.merges": ["a b c"]},
        {"tokenizer.ggml.merges": ["nowhere tobefound"]},
        {"tokenizer.ggml.token_type": [1, 1]},
    ],
)
def test_gguf_metadata_that_contradicts_itself(tmp_path: Path, edit: dict[str, Any]) -> None:
    with pytest.raises(CorruptModelError):
        load_gguf(tmp_path, {**read_json("smollm/gguf.json"), **edit})


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder of type WordPiece"),
        ({"decoder": None}, "decoder of type none"),
    ],
)
def test_unsupported_tokenizer_json_is_named(tmp_path: Path, edit: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        load_hf(edited(tmp_path, "smollm", "tokenizer.json", edit), tmp_path / "out")


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        load_hf(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("content", ["{", "[]", "\xff", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json"):
        load_hf(tmp_path, tmp_path / "out")


def test_damaged_merges(tmp_path: Path) -> None:
    directory = edited(tmp_path, "gpt2-files", "tokenizer_config.json", {})
    (directory / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(CorruptModelError, match=r"merges\.txt"):
        load_hf(directory, tmp_path / "out")


def test_every_cut_of_a_sentencepiece_model_is_noticed_or_whole() -> None:
    """A cut is either within a field, or between two, where fewer pieces are left."""
    data = (DATA / "sentencepiece" / "tokenizer.model").read_bytes()
    whole = len(read_sentencepiece_model(data).texts)
    for size in range(0, len(data) - 1, 37):
        try:
            pieces = read_sentencepiece_model(data[:size])
        except (CorruptModelError, UnsupportedModelError):
            continue
        assert len(pieces.texts) <= whole


def test_sentencepiece_unigram_is_refused_by_name() -> None:
    piece = b"\x0a\x03\x0a\x01a"
    with pytest.raises(UnsupportedModelError, match="unigram"):
        read_sentencepiece_model(piece + b"\x12\x02\x18\x01")
    assert read_sentencepiece_model(piece + b"\x12\x02\x18\x02").texts == ["a"]
