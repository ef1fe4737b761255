"""The one place where a `tokenizers` document becomes a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.errors import CorruptModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def build_backend(document: bytes) -> Tokenizer:
    """The tokenizer that `tokenizer.json` describes. Raises `CorruptModelError` for one that the library refuses.

    It refuses most damage with a ValueError, but on some contradictions its Rust code panics, which arrives as an
    exception that is no `Exception`.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(document)
    except ValueError as error:
        raise CorruptModelError(f"tokenizer.json is damaged: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CorruptModelError(f"tokenizer.json contradicts itself: {error}") from error
