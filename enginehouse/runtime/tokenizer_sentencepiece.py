"""SentencePiece BPE vocabularies (Llama 2, TinyLlama, Mistral) as `tokenizers` documents.

Sources: a GGUF file's pieces, scores and types, or a `tokenizer.model` file, a protocol buffer whose few fields
that matter here are read by hand (message ModelProto of sentencepiece_model.proto).
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.tokenizer_writer import Json, added_token


class PieceType(IntEnum):
    """Token types, the same numbers in SentencePiece and in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class PieceVocabulary:
    """A SentencePiece BPE model: piece i has `texts[i]`, `scores[i]` (higher merges first) and `types[i]`."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""

    def first(self, kind: PieceType) -> int | None:
        """Id of the first piece of this type."""
        return self.types.index(kind) if kind in self.types else None


def sentencepiece_document(pieces: PieceVocabulary) -> Json:
    """A `tokenizers` document that encodes as SentencePiece does, byte fallback and space prefix included."""
    vocab = {text: i for i, text in enumerate(pieces.texts)}
    unk_id = pieces.first(PieceType.UNKNOWN)
    decoder: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if pieces.add_space_prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(pieces),
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(pieces)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unk_id is None else pieces.texts[unk_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": PieceType.BYTE in pieces.types,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(pieces),
        },
    }


def _added_tokens(pieces: PieceVocabulary) -> list[Json]:
    special = (PieceType.CONTROL, PieceType.UNKNOWN)
    return [
        added_token(i, text, special=kind in special)
        for i, (text, kind) in enumerate(zip(pieces.texts, pieces.types, strict=True))
        if kind in special or kind == PieceType.USER_DEFINED
    ]


def _normalizers(pieces: PieceVocabulary) -> list[Json]:
    steps: list[Json] = []
    if pieces.charsmap:
        charsmap = base64.b64encode(pieces.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if pieces.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if pieces.add_space_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return steps


def _merges(pieces: PieceVocabulary) -> list[list[str]]:
    """Every way to join two normal pieces into a third, the best third first.

    Control and byte pieces take no part, so that text which looks like one stays text.
    """
    rank_of = {
        text: (-score, i)
        for i, (text, score, kind) in enumerate(zip(pieces.texts, pieces.scores, pieces.types, strict=True))
        if kind == PieceType.NORMAL
    }
    ranked = [
        (rank, split, text)
        for text, rank in rank_of.items()
        for split in range(1, len(text))
        if text[:split] in rank_of and text[split:] in rank_of
    ]
    ranked.sort()
    return [[text[:split], text[split:]] for _rank, split, text in ranked]


# --- tokenizer.model ---------------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def read_sentencepiece_model(data: bytes) -> PieceVocabulary:
    """Parse a `tokenizer.model` file.

    Raises `CorruptModelError` when it is damaged, `UnsupportedModelError` for another algorithm than BPE.
    """
    pieces = PieceVocabulary()
    model_type = 1
    try:
        for number, value in _fields(data):
            if number == 1:
                _read_piece(_as_bytes(value), pieces)
            elif number == 2:
                trainer = dict(_fields(_as_bytes(value)))
                model_type = _as_int(trainer.get(3, 1))
            elif number == 3:
                normalizer = dict(_fields(_as_bytes(value)))
                pieces.charsmap = _as_bytes(normalizer.get(2, b""))
                pieces.add_space_prefix = bool(normalizer.get(3, 1))
                pieces.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    except (IndexError, ValueError, struct.error) as error:
        raise CorruptModelError(f"tokenizer.model is damaged: {error}") from error
    if not pieces.texts:
        raise CorruptModelError("tokenizer.model holds no pieces")
    if model_type != 2:
        name = _MODEL_TYPES.get(model_type, str(model_type))
        raise UnsupportedModelError(
            f"tokenizer.model is a SentencePiece {name!r} model; only 'bpe' is supported"
        )
    return pieces


def _read_piece(message: bytes, pieces: PieceVocabulary) -> None:
    fields = dict(_fields(message))
    pieces.texts.append(_as_bytes(fields[1]).decode() if 1 in fields else "")
    pieces.scores.append(struct.unpack("<f", _as_bytes(fields[2]))[0] if 2 in fields else 0.0)
    pieces.types.append(_as_int(fields.get(3, PieceType.NORMAL)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) in order; fixed-size values stay bytes. Raises ValueError or IndexError when cut."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, position = _varint(message, position)
            yield tag >> 3, number
            continue
        if wire_type == _BYTES:
            size, position = _varint(message, position)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if position + size > len(message):
            raise ValueError("it ends within a field")
        yield tag >> 3, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number belongs")
    return value
