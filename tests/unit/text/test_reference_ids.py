"""Ids and texts against Transformers (and SentencePiece itself), as scripts/reference_tokens.py stored them."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.runtime.chat_template import ChatTemplate
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights.prepare import prepare_model

from .conftest import DATA, StoredTokenizers, read_json

HARD_STRINGS: list[str] = read_json("hard_strings.json")
CHATS: dict[str, dict[str, Any]] = read_json("chats.json")
SMALL = [
    (path.name.removesuffix(".ids.json"), form)
    for path in sorted(DATA.glob("*.ids.json"))
    for form, source in (("hf", ""), ("gguf", "gguf.json"))
    if (path.parent / path.name.removesuffix(".ids.json") / source).exists()
]


def test_every_kind_is_covered() -> None:
    assert len(SMALL) == 14
    assert len(HARD_STRINGS) > 100


@pytest.mark.parametrize(("name", "form"), SMALL)
def test_hard_strings(stored: StoredTokenizers, name: str, form: str) -> None:
    check_strings(stored(name, form), read_json(f"{name}.ids.json"))


@pytest.mark.parametrize(("name", "form"), SMALL)
def test_chats(stored: StoredTokenizers, name: str, form: str) -> None:
    reference = read_json(f"{name}.ids.json")
    if "chats" not in reference:
        assert stored(name, form).chat_template is None
    else:
        check_chats(stored(name, form), reference["chats"])


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_sentencepiece_itself_agrees(stored: StoredTokenizers, form: str) -> None:
    tokenizer = stored("sentencepiece", form)
    for text, ids in zip(HARD_STRINGS, read_json("sentencepiece.ids.json")["sentencepiece"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text


@pytest.mark.model
def test_default_model() -> None:
    tokenizer = Tokenizer.load(prepare_model(DEFAULT_SOURCE, "int8", lambda _text, _fraction: None).path)
    reference = read_json("default-model.ids.json")
    check_strings(tokenizer, reference)
    check_chats(tokenizer, reference["chats"])
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))


def check_strings(tokenizer: Tokenizer, reference: dict[str, Any]) -> None:
    for i, text in enumerate(HARD_STRINGS):
        parsed = tokenizer.encode(text, add_special=False, parse_special=True)
        assert parsed == reference["parsed"][i], text
        assert tokenizer.encode(text, add_special=False) == reference["text"][i], text
        assert tokenizer.decode(parsed) == reference["decoded"][i], text
    for text, ids in zip(HARD_STRINGS, reference["with_special"], strict=False):
        assert tokenizer.encode(text, parse_special=True) == ids, text


def check_chats(tokenizer: Tokenizer, reference: dict[str, list[int] | None]) -> None:
    template = ChatTemplate.of(tokenizer)
    assert template is not None
    compared = 0
    for name, ids in reference.items():
        if ids is None:  # Transformers could not render it either
            continue
        arguments = dict(CHATS[name])
        messages = arguments.pop("messages")
        assert template.encode(tokenizer, messages, **arguments) == ids, name
        text = template.render(messages, **arguments)
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids, name
        compared += 1
    assert compared >= 5
