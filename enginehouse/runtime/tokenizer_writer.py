"""Storing a tokenizer beside packed weights: the last step of every importer, and the choice among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from enginehouse.runtime.tokenizer import (
    META_FILE,
    TOKENIZER_FILE,
    TokenizerKind,
    TokenizerMeta,
    byte_level_bytes,
)
from enginehouse.runtime.tokenizer_backend import build_backend

Json = dict[str, Any]


@dataclass(slots=True)
class ImportedTokenizer:
    """A tokenizer in `tokenizers` format, and the facts around it, before it is stored."""

    tokenizer_json: Json
    kind: TokenizerKind
    vocab_size: int | None = None
    """The model's; None when only the tokens are known."""
    prefix_ids: list[int] = field(default_factory=list)
    suffix_ids: list[int] = field(default_factory=list)
    bos_token_id: int | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    unk_token_id: int | None = None
    strip_leading_space: bool = False
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)

    def save(self, out_dir: Path) -> None:
        """Write both files. Raises `CorruptModelError` when the `tokenizers` library refuses the result."""
        document = json.dumps(self.tokenizer_json, ensure_ascii=False).encode()
        build_backend(document)
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / TOKENIZER_FILE).write_bytes(document)
        (out_dir / META_FILE).write_bytes(msgspec.json.encode(self._meta()))

    def _meta(self) -> TokenizerMeta:
        token_ids = vocabulary(self.tokenizer_json)
        num_tokens = max(token_ids.values(), default=-1) + 1
        model = self.tokenizer_json["model"]
        any_length = model.get("fuse_unk") and model.get("unk_token") and not model.get("byte_fallback")
        return TokenizerMeta(
            kind=self.kind,
            vocab_size=max(self.vocab_size or 0, num_tokens),
            num_tokens=num_tokens,
            max_token_bytes=0
            if any_length or _swallows_space(self.tokenizer_json)
            else self._longest(token_ids),
            prefix_ids=self.prefix_ids,
            suffix_ids=self.suffix_ids,
            bos_token_id=self.bos_token_id,
            eos_token_ids=list(dict.fromkeys(self.eos_token_ids)),
            unk_token_id=self.unk_token_id,
            strip_leading_space=self.strip_leading_space,
            special_tokens=self.special_tokens,
            chat_templates=self.chat_templates,
        )

    def _longest(self, token_ids: Mapping[str, int]) -> int:
        if self.kind == "byte-level":
            return max(len(byte_level_bytes(text)) for text in token_ids)
        return max(len(text.encode()) for text in token_ids)


def vocabulary(tokenizer_json: Json) -> dict[str, int]:
    """Every token's text and id, the model's own and the added ones."""
    vocab = tokenizer_json["model"]["vocab"]
    token_ids: dict[str, int]
    if isinstance(vocab, dict):
        token_ids = dict(vocab)
    else:
        token_ids = {text: i for i, (text, _score) in enumerate(vocab)}
    for token in tokenizer_json.get("added_tokens") or []:
        token_ids[token["content"]] = token["id"]
    return token_ids


def _swallows_space(tokenizer_json: Json) -> bool:
    return any(
        token.get("lstrip") or token.get("rstrip") for token in tokenizer_json.get("added_tokens") or []
    )


def added_token(token_id: int, text: str, *, special: bool) -> Json:
    """An entry of `added_tokens`, matched literally."""
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def write_tokenizer(
    out_dir: Path,
    *,
    directory: Path | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Store the tokenizer of a checkpoint, given as a directory or as GGUF metadata, in `out_dir`.

    `vocab_size` is the number of the model's embedding rows. Raises `UnsupportedModelError` naming the kind of
    tokenizer that Enginehouse cannot read, `CorruptModelError` for a damaged one, `SourceError` for none.
    """
    if (directory is None) == (gguf_metadata is None):
        raise ValueError("exactly one of directory and gguf_metadata must be given")
    if directory is not None:
        from enginehouse.runtime.tokenizer_hf import write_tokenizer_from_hf

        write_tokenizer_from_hf(directory, out_dir, vocab_size=vocab_size)
        return
    from enginehouse.runtime.tokenizer_gguf import write_tokenizer_from_gguf

    assert gguf_metadata is not None
    write_tokenizer_from_gguf(gguf_metadata, out_dir, vocab_size=vocab_size)
