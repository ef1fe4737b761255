"""Grammars are refused here, in the API process, before anything runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_compile import (
    GrammarError,
    compile_grammar,
    large_stack_thread,
    without_special_tokens,
)
from enginehouse.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_VERDICTS: Final = 1024
_END: Final = 256


class GrammarChecker:
    """Says whether a grammar can be followed. Owns a thread, started with the first grammar, and the verdicts on
    the last `MAX_VERDICTS` ones.

    It compiles over a vocabulary of single bytes: what can be written at all does not depend on the model, and
    the API process is spared the model's vocabulary.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._bytes: LLTokenizer | None = None

    async def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` naming `grammar.param` when it is malformed or nothing satisfies it."""
        key = hashlib.sha256(f"{grammar.kind}:{grammar.special_tokens}:{grammar.text}".encode()).digest()
        if key not in self._verdicts:
            if self._thread is None:
                self._thread = large_stack_thread("grammar-check")
            await asyncio.get_running_loop().run_in_executor(self._thread, self._judge, key, grammar)
        error = self._verdicts.get(key)
        if error is not None:
            raise InvalidRequestError(f"{grammar.param}: {error}", param=grammar.param)

    def close(self) -> None:
        """End the thread after what it is doing. Nothing may be checked afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _judge(self, key: bytes, grammar: Grammar) -> None:
        if key in self._verdicts:  # somebody else asked while this one was queued
            return
        if self._bytes is None:
            self._bytes = _byte_tokenizer()
        try:
            compile_grammar(without_special_tokens(grammar), self._bytes)
            verdict = None
        except GrammarError as error:
            verdict = str(error)
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)


class _ByteVocabulary:
    """What llguidance asks of a tokenizer, for a vocabulary of the 256 bytes and an end."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()))
