"""What a caller asks of the sampler: one immutable value per request, checked once at the edge."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from enginehouse.engine.structured_output import Grammar
from enginehouse.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Token-level parameters of one request. They cross to the worker; stop *strings* do not (text stays in
    the API process).

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 mean no cut. `seed` None draws a fresh one per request.
    `logprobs` n asks for the chosen token's log-probability and the n best; `prompt_logprobs` the same for the
    prompt. `eos_token_ids` end the output unless `ignore_eos`; `stop_token_ids` end it always.

    What every step needs to know of the long fields is derived once, where it is first asked for, and kept.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without drawing."""
        return self.temperature == 0.0

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the output once it has `min_tokens`."""
        return frozenset(self.stop_token_ids if self.ignore_eos else self.stop_token_ids + self.eos_token_ids)

    @cached_property
    def end_token_rows(self) -> npt.NDArray[np.intp]:
        """`end_token_ids` as indices into a row of logits [num_end_tokens]."""
        import numpy as np  # only the worker asks, and the API process starts without it

        return np.array(sorted(self.end_token_ids), dtype=np.intp)

    @cached_property
    def bias_rows(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """`logit_bias` as indices into a row of logits and what to add there, both [num_biases]."""
        import numpy as np

        tokens = np.array(list(self.logit_bias), dtype=np.intp)
        return tokens, np.array(list(self.logit_bias.values()), dtype=np.float32)

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first field that is out of range."""
        _check_range("max_tokens", self.max_tokens, 0, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("top_k", self.top_k, 0, None)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_range("seed", self.seed, SEED_MIN, SEED_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        for token, bias in self.logit_bias.items():
            _check_range("logit_bias", bias, -100.0, 100.0)
            _check_token("logit_bias", token, vocab_size)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for token in self.stop_token_ids:
            _check_token("stop_token_ids", token, vocab_size)
        if self.grammar is not None:
            self.grammar.check()


def _check_range(name: str, value: float, low: float, high: float | None, *, low_open: bool = False) -> None:
    too_low = value <= low if low_open else value < low
    if not math.isfinite(value) or too_low or (high is not None and value > high):
        upper = f" and at most {high}" if high is not None else ""
        lower = f"greater than {low}" if low_open else f"at least {low}"
        raise InvalidRequestError(f"{name} must be {lower}{upper}, not {value}.", param=name)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"{name} may have at most {most} entries, not {count}.", param=name)


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequestError(
            f"{name}: {token} is not a token id; they go from 0 to {vocab_size - 1}.", param=name
        )
