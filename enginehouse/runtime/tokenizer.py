"""Text to token ids and back, for a tokenizer that was stored beside packed weights.

A packed model has `tokenizer.json` (the format of Hugging Face's `tokenizers` library, whatever the model was
published as) and `tokenizer_meta.json` (`TokenizerMeta`). `tokenizer_hf.py` and `tokenizer_gguf.py` write them.

Special tokens and untrusted text: the underlying tokenizer never matches special tokens in text. Where they are
wanted (`parse_special`, chat templates) each is first replaced by an *alias*, an added token of our own whose
text holds a random key made when the tokenizer was loaded; its id is mapped back afterwards. So text that a
user wrote can never become a special token, and everything else about added tokens (how text is split around
them, whether they swallow spaces) stays as the model's authors defined it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.tokenizer_backend import build_backend

if TYPE_CHECKING:
    from tokenizers import AddedToken

TOKENIZER_FILE = "tokenizer.json"
META_FILE = "tokenizer_meta.json"

TokenizerKind = Literal["byte-level", "sentencepiece"]

# A normalizer such as NFC can shorten text; no composition shrinks UTF-8 more than this.
_MAX_NORMALIZER_SHRINK = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ALIAS_KEY_CHARS = 12
_PLANE_15, _PLANE_16 = 0xF0000, 0x100000
_PLANE_SIZE = 0xFFFE


class TokenizerMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What `tokenizer.json` does not say, or says only between the lines."""

    kind: TokenizerKind
    """How token strings stand for bytes: GPT-2's byte alphabet, or ▁ for a space and <0x0A> for a byte."""
    vocab_size: int
    """Rows of the model's embedding; may exceed the number of tokens that have a text."""
    num_tokens: int
    """One more than the highest id that has a text."""
    max_token_bytes: int
    """UTF-8 length of the longest token; 0 when one token may stand for text of any length."""
    prefix_ids: list[int] = []
    """What `add_special` puts before a text (bos), and after it."""
    suffix_ids: list[int] = []
    bos_token_id: int | None = None
    eos_token_ids: list[int] = []
    """Any of them ends an answer, the tokenizer's own eos first."""
    unk_token_id: int | None = None
    strip_leading_space: bool = False
    """Decoding drops one leading space, the counterpart of the one that encoding put there."""
    special_tokens: dict[str, str] = {}
    """`bos_token`, `eos_token`, …: the names under which chat templates see them."""
    chat_templates: dict[str, str] = {}
    """Jinja sources by name; "default" is the one to use."""


class Tokenizer:
    """One model's tokenizer. Owns no mutable state but caches, so threads may share it.

    `encode` costs about a second per few megabytes, outside the GIL: call it in a thread.
    """

    def __init__(self, tokenizer_json: bytes, meta: TokenizerMeta) -> None:
        self.meta = meta
        self._backend = build_backend(tokenizer_json)
        self._added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in self._added.items() if token.special)
        """Ids that carry no text: control tokens such as bos, eos and turn markers."""
        self._not_from_text = self.special_token_ids - {meta.unk_token_id}
        self._pattern = _alternation(token.content for token in self._added.values())
        self._alias_by_text: dict[str, str] = {}
        self._id_by_alias_id: dict[int, int] = {}
        self._add_aliases()
        self._backend.encode_special_tokens = True
        self._bytes: dict[int, bytes] = {}
        self._spellings: dict[int, list[int]] = {}

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read a packed model's tokenizer, in less than 0.1 s for 49,000 tokens. Raises `CorruptModelError` when a file is missing or damaged."""
        root = Path(directory)
        try:
            meta = msgspec.json.decode((root / META_FILE).read_bytes(), type=TokenizerMeta)
            tokenizer_json = (root / TOKENIZER_FILE).read_bytes()
            return cls(tokenizer_json, meta)
        except (OSError, msgspec.DecodeError, CorruptModelError) as error:
            raise CorruptModelError(f"{root}: the stored tokenizer cannot be read: {error}") from error

    # --- facts -----------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The model's: every id below it may be sampled, though the last ones may have no text."""
        return self.meta.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Beginning of sequence, if the model has it."""
        return self.meta.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of these ends an answer."""
        return tuple(self.meta.eos_token_ids)

    @property
    def strip_leading_space(self) -> bool:
        """Whether decoding from the start of a text drops one leading space."""
        return self.meta.strip_leading_space

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the default chat template."""
        return self.meta.chat_templates.get("default")

    def min_num_tokens(self, text: str) -> int:
        """A lower bound for `len(encode(text))`, in microseconds: enough to refuse a 10 MB prompt unread."""
        if self.meta.max_token_bytes == 0:
            return 0
        return len(text) // (self.meta.max_token_bytes * _MAX_NORMALIZER_SHRINK)

    # --- text to ids -----------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special` adds what the model expects around a text (bos). With `parse_special` the texts of special
        tokens become those tokens; without it they are text like any other. Lone surrogates count as U+FFFD.
        """
        ids = self._encode(self._with_aliases(text) if parse_special else text)
        return [*self.meta.prefix_ids, *ids, *self.meta.suffix_ids] if add_special else ids

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Like `encode(parse_special=True, add_special=False)`, but a special token's text that is broken by
        `guard` somewhere stays text. `guard` itself is no part of the text (see `chat_template_guard`). A special
        token of one character, which nothing can break, stays text always."""
        return self._encode(self._with_aliases(text, min_chars=2).replace(guard, ""))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts that `parse_special` turns into special tokens."""
        return tuple(self._alias_by_text)

    def _encode(self, text: str) -> list[int]:
        if not text.isascii():
            text = _without_surrogates(text)
        # encode_batch_fast, unlike encode, releases the GIL.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if not self._not_from_text.isdisjoint(ids):
            ids = [part for i in ids for part in (self._spell(i) if i in self._not_from_text else (i,))]
        if self._id_by_alias_id.keys().isdisjoint(ids):
            return ids
        return [self._id_by_alias_id.get(i, i) for i in ids]

    def _with_aliases(self, text: str, *, min_chars: int = 1) -> str:
        def replacement(match: re.Match[str]) -> str:
            found = match[0]
            return self._alias_by_text.get(found, found) if len(found) >= min_chars else found

        return self._pattern.sub(replacement, text) if self._pattern else text

    def _add_aliases(self) -> None:
        from tokenizers import AddedToken

        key = "".join(chr(_PLANE_15 + secrets.randbelow(_PLANE_SIZE)) for _ in range(_ALIAS_KEY_CHARS))
        aliases: list[AddedToken] = []
        for token_id in sorted(self.special_token_ids):
            token = self._added[token_id]
            alias = key + chr(_PLANE_16 + token_id // _PLANE_SIZE) + chr(_PLANE_16 + token_id % _PLANE_SIZE)
            self._alias_by_text[token.content] = alias
            aliases.append(
                AddedToken(
                    alias,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
            )
        self._backend.add_tokens(aliases)
        for token_id, added in zip(sorted(self.special_token_ids), aliases, strict=True):
            alias_id = self._backend.token_to_id(added.content)
            assert alias_id is not None
            self._id_by_alias_id[alias_id] = token_id

    def _spell(self, token_id: int) -> list[int]:
        """Ids of a special token's text, letter by letter: for vocabularies whose merges happen to build it."""
        if token_id not in self._spellings:
            spelling: list[int] = []
            for char in self._added[token_id].content:
                whole = self._backend.token_to_id("▁" if char == " " else char)
                if self.meta.kind == "sentencepiece" and whole not in (None, token_id):
                    spelling.append(whole)
                    continue
                pieces = (self._byte_token(byte) for byte in char.encode())
                spelling += [i for i in pieces if i is not None]
            self._spellings[token_id] = spelling
        return self._spellings[token_id]

    def _byte_token(self, byte: int) -> int | None:
        text = _CHAR_BY_BYTE[byte] if self.meta.kind == "byte-level" else f"<0x{byte:02X}>"
        token_id: int | None = self._backend.token_to_id(text)
        return self.meta.unk_token_id if token_id is None else token_id

    # --- ids to text -----------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this token adds to the text; for a special token, those of its name.

        An id without a text (padding of the vocabulary) gives b"". The leading space that decoding may strip at
        the start of a text is included.
        """
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._token_bytes(token_id)
        return piece

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.meta.num_tokens:
            return b""
        text: str | None = self._backend.id_to_token(token_id)
        if text is None or token_id in self._id_by_alias_id:
            return b""
        if self.meta.kind == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        if token_id in self._added:
            return text.encode()
        return byte_level_bytes(text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD, one per maximal invalid part."""
        skipped = self.special_token_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token string in GPT-2's byte alphabet; a string with other characters is taken literally."""
    try:
        return bytes([_BYTE_BY_CHAR[char] for char in text])
    except KeyError:
        return text.encode()


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself when Latin-1 shows it, else the next from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    stand_in = {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


_CHAR_BY_BYTE = _byte_alphabet()
_BYTE_BY_CHAR = {char: byte for byte, char in enumerate(_CHAR_BY_BYTE)}


def _alternation(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest of `texts` at the leftmost place; None when there are none."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _without_surrogates(text: str) -> str:
    """Surrogate pairs joined to their character, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
