"""Tokenizers of encoders: any model of Hugging Face's `tokenizers` format, for one text or a pair of them.

Encoders never write text, so nothing is decoded here, and WordPiece and Unigram vocabularies need no treatment of
their own. The special tokens around a text are the published post-processor's. Their names inside a text stay text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.errors import CorruptModelError, SourceError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """What the model is given for one text or pair."""

    tokens: list[int]
    types: list[int]
    num_given: int
    """Tokens before anything was cut off."""


class EncoderTokenizer:
    """One encoder's tokenizer. Owns no state that changes, so threads may share it."""

    def __init__(self, document: bytes, config: ModelConfig) -> None:
        from tokenizers import Tokenizer as Backend

        encoder = config.encoder
        assert encoder is not None
        self._backend = Backend.from_buffer(document)
        self._backend.no_truncation()
        self._backend.no_padding()
        _check_vocabulary(self._backend, config.vocab_size, "the stored tokenizer")
        self._num_types = encoder.num_token_types
        self._lowercase = encoder.lowercase
        self.vocab_size = config.vocab_size
        self.prefix, self.suffix = self._ends()
        self._backend.encode_special_tokens = True

    @classmethod
    def load(cls, directory: Path, config: ModelConfig) -> EncoderTokenizer:
        """The tokenizer of a packed model. Raises `CorruptModelError`."""
        try:
            return cls((directory / TOKENIZER_FILE).read_bytes(), config)
        # The tokenizers library reports a damaged document as ValueError.
        except (OSError, ValueError) as error:
            raise CorruptModelError(f"{directory}: the stored tokenizer cannot be read: {error}") from error

    def encode(self, texts: list[str], limit: int | None = None) -> list[TokenizedInput]:
        """Token ids of each text between the model's special tokens, cut to `limit` tokens in all.

        Takes about a second per few megabytes: call it in a thread for long texts.
        """
        room = None if limit is None else limit - self.num_special(pair=False)
        return [self._finish(encoding, None, room) for encoding in self._encode(texts)]

    def encode_pairs(self, first: str, seconds: list[str], limit: int | None = None) -> list[TokenizedInput]:
        """Token ids of `first` with each of `seconds`; the longer of a pair is cut first."""
        room = None if limit is None else limit - self.num_special(pair=True)
        query, *encodings = self._encode([first, *seconds])
        if room is None or len(query.ids) + max((len(e.ids) for e in encodings), default=0) <= room:
            return [self._finish(query, encoding, room) for encoding in encodings]
        # Cutting changes an encoding: each pair that is cut gets its own.
        pairs = (self._encode([first, second]) for second in seconds)
        return [self._finish(query, encoding, room) for query, encoding in pairs]

    def with_ends(self, token_ids: list[int], limit: int | None = None) -> TokenizedInput:
        """A text given as token ids, between the special tokens unless it has them already."""
        prefix, suffix = self.prefix, self.suffix
        has_ends = token_ids[: len(prefix)] == prefix and token_ids[-len(suffix) :] == suffix
        if has_ends and len(token_ids) >= len(prefix) + len(suffix) > 0:
            token_ids = token_ids[len(prefix) : len(token_ids) - len(suffix)]
        num_given = len(prefix) + len(token_ids) + len(suffix)
        if limit is not None:
            token_ids = token_ids[: max(0, limit - len(prefix) - len(suffix))]
        return TokenizedInput([*prefix, *token_ids, *suffix], [], num_given)

    def num_special(self, *, pair: bool) -> int:
        """Special tokens around a text, or around and between a pair."""
        count: int = self._backend.num_special_tokens_to_add(pair)
        return count

    def _encode(self, texts: list[str]) -> list[Encoding]:
        if self._lowercase:
            texts = [text.lower() for text in texts]
        # Lone surrogates cannot be handed to Rust. encode_batch_fast, unlike encode, releases the GIL.
        texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        return self._backend.encode_batch_fast(texts, add_special_tokens=False)

    def _finish(self, first: Encoding, second: Encoding | None, room: int | None) -> TokenizedInput:
        sizes = len(first.ids), 0 if second is None else len(second.ids)
        if room is not None and sum(sizes) > room:
            keep_first, keep_second = _shares(*sizes, max(0, room))
            first.truncate(keep_first)
            if second is not None:
                second.truncate(keep_second)
        whole = self._backend.post_process(first, second, True)
        types = [min(kind, self._num_types - 1) for kind in whole.type_ids] if any(whole.type_ids) else []
        num_given = sum(sizes) + self.num_special(pair=second is not None)
        return TokenizedInput(whole.ids, types, num_given)

    def _ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a single text, seen on a probe."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        mask, ids = encoding.special_tokens_mask, encoding.ids
        first = next((i for i, special in enumerate(mask) if not special), len(ids))
        last = next((i for i in range(len(mask), 0, -1) if not mask[i - 1]), first)
        return ids[:first], ids[last:]


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens each of a pair keeps: the longer one gives first, then both give alike."""
    shorter = min(first, second)
    if 2 * shorter <= room:
        longer = room - shorter
        return (longer, second) if first >= second else (first, longer)
    return ((room + 1) // 2, room // 2) if first >= second else (room // 2, (room + 1) // 2)


def _check_vocabulary(backend: Backend, vocab_size: int, name: str) -> None:
    """No text may become an id that the model has no embedding for: that would end the worker."""
    num_ids = max(backend.get_vocab().values(), default=-1) + 1
    if num_ids > vocab_size:
        raise CorruptModelError(f"{name} has {num_ids} tokens, the model {vocab_size}")


def write_encoder_tokenizer(directory: Path, out_dir: Path, *, vocab_size: int) -> None:
    """Store the tokenizer.json of a checkpoint directory in `out_dir`, without its truncation and padding.

    Raises `SourceError` when there is none and `CorruptModelError` when it cannot be read.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / TOKENIZER_FILE
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        document["truncation"] = document["padding"] = None
        encoded = json.dumps(document, ensure_ascii=False).encode()
        backend = Backend.from_buffer(encoded)
    except FileNotFoundError:
        raise SourceError(
            f"{directory} has no {TOKENIZER_FILE}; encoders are read from that file (save the tokenizer with a current "
            "version of transformers to get it)"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptModelError(f"{path} is damaged: {error}") from error
    _check_vocabulary(backend, vocab_size, str(path))
    (out_dir / TOKENIZER_FILE).write_bytes(encoded)
