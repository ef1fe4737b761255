"""From logits to tokens, row by row.

The order of operations on a row: repetition penalty (Keskar et al. 2019: positive logits divided, negative ones
multiplied, for every token of prompt and output), frequency and presence penalty (OpenAI: subtracted per
occurrence, and once, for tokens of the output), `logit_bias`, tokens that the grammar bans, or without one end
tokens before `min_tokens`, temperature, top_k, top_p (Holtzman et al. 2019: the smallest set of best tokens that
holds at least that probability), min_p (at least that share of the best token's probability), and a draw by
inversion of the cumulative distribution. Log-probabilities are those of the model's own logits, before any of it.

Everything is computed in one row's scratch buffer, so a row's result cannot depend on the others, and a random
number is a function of (seed, position) only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from enginehouse.engine.messages import TokenLogprob
from enginehouse.engine.random_numbers import uniform
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampledToken, SampleError

logger = logging.getLogger(__name__)

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Below it, every token but the best would underflow anyway."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's value for "very unlikely"."""
_STRIPE = 64
_FIRST_NUCLEUS = 256

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]


class SamplingRow(NamedTuple):
    """What decides about one row besides its logits."""

    params: SamplingParams
    prompt_tokens: list[int]
    output_tokens: list[int]
    """Its length is the position of the random number."""
    banned: npt.NDArray[np.bool_] | None = None
    """True for the tokens that the row's grammar does not allow now [vocab]; None without a grammar."""


class Sampler:
    """Draws tokens. Owns scratch memory of one row; keeps nothing between calls."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        padded = -(-vocab_size // _STRIPE) * _STRIPE
        self._padded_scores = np.full(padded, -np.inf, dtype=np.float32)
        self._scores = self._padded_scores[:vocab_size]
        self._weights = np.zeros(padded, dtype=np.float32)

    def sample(self, logits: Logits, rows: Items[SamplingRow]) -> list[SampledToken | SampleError]:
        """One result per row of `logits` [num_rows, vocab], which stay as they are."""
        best = logits.argmax(axis=1).tolist()
        return [self._sample_alone(logits[i], best[i], row) for i, row in enumerate(rows)]

    def logprob(self, logits: Logits, token: int, num_top: int) -> TokenLogprob | SampleError:
        """Log-probability of `token` under one row of logits [vocab], with the `num_top` best tokens."""
        best = float(logits.max())
        if not math.isfinite(best):
            return SampleError(_not_finite(best))
        chosen = self._logprob(logits, best, token, num_top)
        return TokenLogprob(token, chosen.logprob, chosen.top)

    def _sample_alone(self, logits: Logits, best_token: int, row: SamplingRow) -> SampledToken | SampleError:
        try:
            return self._sample_row(logits, best_token, row)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A mistake of ours that one row brought to light must not reach the others.
            logger.exception("sampling failed")
            return SampleError(f"sampling failed: {error}")

    def _sample_row(self, logits: Logits, best_token: int, row: SamplingRow) -> SampledToken | SampleError:
        # argmax stops at the first NaN, so a look at the best value tells about the whole row.
        best = float(logits[best_token])
        if not math.isfinite(best):
            return SampleError(_not_finite(best))
        params = row.params
        token, scores = best_token, logits
        if _changes_logits(row):
            scores = self._adjust(logits, row)
            token = int(scores.argmax())
            if not math.isfinite(scores[token]):
                return SampleError("biases and bans leave no token to choose")
        if not _is_greedy(params):
            np.subtract(scores, scores[token], out=self._scores)
            token = self._draw(params, uniform(params.seed or 0, len(row.output_tokens)))
        if params.logprobs is None:
            return SampledToken(token)
        return self._logprob(logits, best, token, params.logprobs)

    # Logits ---------------------------------------------------------------------------------------------------

    def _adjust(self, logits: Logits, row: SamplingRow) -> Logits:
        """The scratch row, filled with logits after penalties, biases and bans."""
        scores, params = self._scores, row.params
        np.copyto(scores, logits)
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(row.prompt_tokens + row.output_tokens, dtype=np.intp))
            values = scores[seen]
            penalty = np.float32(params.repetition_penalty)
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if row.output_tokens and (params.frequency_penalty or params.presence_penalty):
            seen, counts = np.unique(np.asarray(row.output_tokens, dtype=np.intp), return_counts=True)
            scores[seen] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
        if params.logit_bias:
            tokens, biases = params.bias_rows
            scores[tokens] += biases
        if row.banned is not None:
            np.copyto(scores, -np.inf, where=row.banned)
        elif len(row.output_tokens) < params.min_tokens:
            scores[params.end_token_rows] = -np.inf
        return scores

    # Drawing --------------------------------------------------------------------------------------------------

    def _draw(self, params: SamplingParams, number: float) -> int:
        """A token drawn from the scratch row, whose best score is 0, with the random `number` in [0, 1)."""
        scores = self._padded_scores
        if params.temperature != 1.0:
            scores *= np.float32(1.0 / params.temperature)
        if 0 < params.top_k < self._vocab_size:
            ids = _top_ids(scores, params.top_k)
            weights = np.exp(scores[ids].astype(np.float64))
            total = float(weights.sum())
        else:
            np.exp(scores, out=self._weights)
            if params.top_p == 1.0 and params.min_p == 0.0:
                return _draw_from_all(self._weights, number)
            total = float(self._weights.sum(dtype=np.float64))
            ids, weights = self._likely(params, total)
        if params.top_p < 1.0:
            ids, weights = _nucleus(ids, weights, params.top_p * total)
        if params.min_p > 0.0:
            keep = weights >= params.min_p * weights.max()
            ids, weights = ids[keep], weights[keep]
        cumulative = np.cumsum(weights)
        chosen = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
        return int(ids[min(chosen, len(ids) - 1)])

    def _likely(self, params: SamplingParams, total: float) -> tuple[Ids, Weights]:
        """A superset of what top_p and min_p keep: without sorting, everything is left out that cannot be in it.

        Tokens below (1 - top_p) / vocab_size of the total hold less than 1 - top_p of it together, so the tokens
        above hold more than top_p; the nucleus is among them.
        """
        floor = max(params.min_p, 0.999 * (1.0 - params.top_p) * total / self._vocab_size)
        ids = np.flatnonzero(self._weights >= floor)
        return ids, self._weights[ids].astype(np.float64)

    # Log-probabilities ----------------------------------------------------------------------------------------

    def _logprob(self, logits: Logits, best: float, token: int, num_top: int) -> SampledToken:
        scores, weights = self._padded_scores, self._weights
        np.subtract(logits, np.float32(best), out=self._scores)
        np.exp(scores, out=weights)
        log_total = math.log(float(weights.sum(dtype=np.float64)))
        top: list[tuple[int, float]] = []
        if num_top:
            ids = _top_ids(scores, min(num_top, self._vocab_size))
            order = np.argsort(-scores[ids], kind="stable")
            top = [(int(i), max(float(scores[i]) - log_total, MIN_LOGPROB)) for i in ids[order]]
        return SampledToken(token, max(float(scores[token]) - log_total, MIN_LOGPROB), top)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW_TEMPERATURE


def _changes_logits(row: SamplingRow) -> bool:
    params = row.params
    return bool(
        row.banned is not None
        or params.repetition_penalty != 1.0
        or ((params.presence_penalty or params.frequency_penalty) and row.output_tokens)
        or params.logit_bias
        or (len(row.output_tokens) < params.min_tokens and params.end_token_ids)
    )


def _not_finite(best: float) -> str:
    found = "not a number" if math.isnan(best) else "infinite" if best > 0 else "all minus infinity"
    return f"the model's logits are {found}"


def _top_ids(scores: Logits, k: int) -> Ids:
    """Ids of the k best scores, ascending; among equals the lowest ids. len(scores) is a multiple of `_STRIPE`.

    Each of the k best maxima of stripes is a score, so the k-th of them bounds the k-th best score from below:
    only what reaches it has to be looked at closely.
    """
    maxima = _stripes(scores).max(axis=0)
    if k < len(maxima):
        floor = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        ids = np.flatnonzero(scores >= floor)
    else:
        ids = np.arange(len(scores))
    if len(ids) == k:
        return ids
    values = scores[ids]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = ids[values > threshold]
    equal = ids[values == threshold][: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(ids: Ids, weights: Weights, mass: float) -> tuple[Ids, Weights]:
    """The fewest best tokens whose weights reach `mass`, best first; among equals the lowest ids.

    Few tokens hold the mass most of the time, so sorting starts with the best `_FIRST_NUCLEUS` alone.
    """
    size = _FIRST_NUCLEUS
    while size < len(weights):
        likely = weights >= np.partition(weights, len(weights) - size)[len(weights) - size]
        if weights[likely].sum() >= mass:
            ids, weights = ids[likely], weights[likely]
            break
        size *= 4
    order = np.argsort(-weights, kind="stable")
    sorted_weights = weights[order]
    count = int(np.searchsorted(np.cumsum(sorted_weights), mass, side="left")) + 1
    return ids[order[:count]], sorted_weights[:count]


def _draw_from_all(weights: Logits, number: float) -> int:
    """Inversion over the whole vocabulary: a stripe first, then a token of it, which is cheaper than one long
    cumulative sum."""
    stripes = _stripes(weights)
    cumulative = np.cumsum(stripes.sum(axis=0), dtype=np.float64)
    target = number * float(cumulative[-1])
    stripe = min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)
    before = float(cumulative[stripe - 1]) if stripe else 0.0
    inner = np.cumsum(stripes[:, stripe], dtype=np.float64)
    position = int(np.searchsorted(inner, target - before, side="right"))
    # Rounding may point behind the last token that has any weight.
    position = min(position, int(np.flatnonzero(stripes[:, stripe])[-1]))
    return position * len(cumulative) + stripe


def _stripes(values: Logits) -> Logits:
    """The same memory as [_STRIPE, n]: column j is a stripe of tokens, n apart. Reductions over columns run at
    the speed of memory."""
    return values.reshape(_STRIPE, -1)
