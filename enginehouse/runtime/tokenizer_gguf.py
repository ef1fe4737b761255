"""Tokenizers from GGUF metadata (keys `tokenizer.ggml.*`, as llama.cpp's converters write them)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.tokenizer_bytelevel import IGNORE_MERGES, byte_level_document
from enginehouse.runtime.tokenizer_sentencepiece import PieceType, PieceVocabulary, sentencepiece_document
from enginehouse.runtime.tokenizer_writer import ImportedTokenizer, Json, added_token

_KEY = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn. Older files name only eos, which a chat model may never write.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_TEMPLATE_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer_from_gguf(
    metadata: Mapping[str, Any], out_dir: Path, *, vocab_size: int | None = None
) -> None:
    """Store the tokenizer that `metadata` describes in `out_dir`.

    Raises `UnsupportedModelError` naming a tokenizer model or pre-tokenizer kind we do not know, and
    `CorruptModelError` when the metadata contradicts itself.
    """
    fields = _Fields(metadata)
    model = fields.text("model")
    if model == "gpt2":
        imported = _byte_level(fields)
    elif model == "llama":
        imported = _sentencepiece(fields)
    elif model is None:
        raise CorruptModelError("the GGUF file holds no tokenizer (tokenizer.ggml.model is missing)")
    else:
        raise UnsupportedModelError(
            f"GGUF tokenizer model {model!r} is not supported; known are gpt2 and llama"
        )
    imported.vocab_size = max(vocab_size or 0, len(fields.tokens))
    _add_facts(imported, fields, metadata)
    imported.save(out_dir)


class _Fields:
    """Checked access to the tokenizer's metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = [str(token) for token in self._list("tokens")]
        types = self._list("token_type")
        self.types: list[int] = [int(kind) for kind in types] or [int(PieceType.NORMAL)] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise CorruptModelError(
                f"{len(self.types)} token types for {len(self.tokens)} tokens in the GGUF file"
            )

    def _list(self, key: str) -> list[Any]:
        value = self._metadata.get(_KEY + key)
        return [] if value is None else list(value)

    def text(self, key: str) -> str | None:
        value = self._metadata.get(_KEY + key)
        return None if value is None else str(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(_KEY + key)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        """A token's id; a value outside the vocabulary means there is none, as some converters write -1."""
        value = self._metadata.get(_KEY + key)
        if value is None or not 0 <= int(value) < len(self.tokens):
            return None
        return int(value)

    def scores(self) -> list[float]:
        scores = [float(score) for score in self._list("scores")]
        if len(scores) != len(self.tokens):
            raise CorruptModelError(
                f"{len(scores)} token scores for {len(self.tokens)} tokens in the GGUF file"
            )
        return scores

    def merges(self) -> list[list[str]]:
        pairs = [str(merge).split(" ") for merge in self._list("merges")]
        if not pairs:
            raise CorruptModelError("the GGUF file has a gpt2 tokenizer without tokenizer.ggml.merges")
        broken = next((pair for pair in pairs if len(pair) != 2), None)
        if broken is not None:
            raise CorruptModelError(f"tokenizer.ggml.merges has an entry that is no pair: {broken}")
        return pairs

    def bytes_(self, key: str) -> bytes:
        return bytes(int(byte) & 0xFF for byte in self._list(key))


def _byte_level(fields: _Fields) -> ImportedTokenizer:
    pre = fields.text("pre") or "default"
    document = byte_level_document(
        {text: i for i, text in enumerate(fields.tokens)},
        fields.merges(),
        pre=pre,
        added_tokens=_added_tokens(fields),
    )
    imported = ImportedTokenizer(document, "byte-level")
    # llama.cpp's default when the file does not say: bos for the families that were trained with it.
    _add_ends(imported, fields, add_bos=pre in IGNORE_MERGES)
    return imported


def _added_tokens(fields: _Fields) -> list[Json]:
    return [
        added_token(i, text, special=kind == PieceType.CONTROL)
        for i, (text, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
    ]


def _sentencepiece(fields: _Fields) -> ImportedTokenizer:
    pieces = PieceVocabulary(
        texts=fields.tokens,
        scores=fields.scores(),
        types=fields.types,
        add_space_prefix=fields.flag("add_space_prefix", default=True),
        remove_extra_whitespaces=fields.flag("remove_extra_whitespaces", default=False),
        charsmap=fields.bytes_("precompiled_charsmap"),
    )
    imported = ImportedTokenizer(sentencepiece_document(pieces), "sentencepiece")
    imported.strip_leading_space = pieces.add_space_prefix
    imported.unk_token_id = pieces.first(PieceType.UNKNOWN)
    _add_ends(imported, fields, add_bos=True)
    return imported


def _add_ends(imported: ImportedTokenizer, fields: _Fields, *, add_bos: bool) -> None:
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    if bos is not None and fields.flag("add_bos_token", default=add_bos):
        imported.prefix_ids = [bos]
    if eos is not None and fields.flag("add_eos_token", default=False):
        imported.suffix_ids = [eos]


def _add_facts(imported: ImportedTokenizer, fields: _Fields, metadata: Mapping[str, Any]) -> None:
    imported.bos_token_id = fields.token_id("bos_token_id")
    for name, key in _TEMPLATE_NAMES.items():
        token_id = fields.token_id(key)
        if token_id is not None:
            imported.special_tokens[name] = fields.tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        imported.chat_templates["default"] = str(template)
    for name in metadata.get("tokenizer.chat_templates") or []:
        imported.chat_templates[str(name)] = str(metadata[f"tokenizer.chat_template.{name}"])
    ends = [fields.token_id(key) for key in _END_KEYS]
    imported.eos_token_ids = [i for i in ends if i is not None] + [
        i
        for i, (text, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if kind == PieceType.CONTROL and text in _TURN_ENDS and template is not None and text in str(template)
    ]
