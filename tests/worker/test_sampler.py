"""The sampler against exact probabilities, computed here in float64 from the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from enginehouse.engine.random_numbers import uniform
from enginehouse.engine.sampler import MIN_LOGPROB, Sampler, SamplingRow
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampledToken, SampleError

VOCAB = 300
# 99.9 % quantiles of the chi-square distribution by degrees of freedom (tables; Wilson-Hilferty above).
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def chi_square_limit(degrees: int) -> float:
    if degrees in CHI_SQUARE_999:
        return CHI_SQUARE_999[degrees]
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def random_logits(
    seed: int = 0, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0
) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def row(*, output: int | list[int] = 0, prompt: list[int] | None = None, **params: Any) -> SamplingRow:
    params.setdefault("max_tokens", 100_000)
    params.setdefault("seed", 1)
    output_tokens = [0] * output if isinstance(output, int) else output
    return SamplingRow(SamplingParams(**params), prompt or [1], output_tokens)


def draw(logits: np.ndarray[Any, Any], count: int, **params: Any) -> np.ndarray[Any, Any]:
    """How often each token is drawn from one row of logits, over `count` positions."""
    sampler = Sampler(logits.shape[1])
    counts = np.zeros(logits.shape[1], dtype=np.int64)
    for position in range(count):
        (result,) = sampler.sample(logits, [row(output=position, **params)])
        assert isinstance(result, SampledToken)
        counts[result.token] += 1
    return counts


def softmax(logits: np.ndarray[Any, Any], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def assert_distribution(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Chi-square at 99.9 %, with rare tokens pooled; what has no probability must never come."""
    total = counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected * total >= 8
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*(expected[common] * total), expected[~common].sum() * total]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0)
    degrees = int(common.sum()) - 1 + (wanted[-1] > 0)
    assert degrees >= 3, "the test would look at too little"
    assert statistic < chi_square_limit(degrees), (
        f"chi-square {statistic:.1f} with {degrees} degrees of freedom"
    )


def keep_top_k(p: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    kept = np.zeros_like(p)
    best = np.argsort(-p, kind="stable")[:k]
    kept[best] = p[best]
    return kept / kept.sum()


def keep_top_p(p: np.ndarray[Any, Any], top_p: float) -> np.ndarray[Any, Any]:
    order = np.argsort(-p, kind="stable")
    mass, kept = 0.0, np.zeros_like(p)
    for token in order:
        kept[token] = p[token]
        mass += p[token]
        if mass >= top_p:
            break
    return kept / kept.sum()


def keep_min_p(p: np.ndarray[Any, Any], min_p: float) -> np.ndarray[Any, Any]:
    kept = np.where(p >= min_p * p.max(), p, 0)
    return kept / kept.sum()


# Distribution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_plain_sampling_has_the_softmax_distribution(temperature: float) -> None:
    logits = random_logits()
    assert_distribution(draw(logits, 20_000, temperature=temperature), softmax(logits[0], temperature))


@pytest.mark.parametrize("k", [5, 40, VOCAB, VOCAB + 5])
def test_top_k(k: int) -> None:
    logits = random_logits(1, scale=1.0)
    assert_distribution(draw(logits, 15_000, top_k=k), keep_top_k(softmax(logits[0]), k))


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p(top_p: float) -> None:
    logits = random_logits(2)
    assert_distribution(draw(logits, 15_000, top_p=top_p), keep_top_p(softmax(logits[0]), top_p))


def test_top_p_of_a_flat_distribution_looks_at_all_tokens() -> None:
    logits = random_logits(3, scale=0.01)
    counts = draw(logits, 30_000, top_p=0.95)
    expected = keep_top_p(softmax(logits[0]), 0.95)
    assert (expected > 0).sum() > 0.9 * VOCAB
    assert_distribution(counts, expected)


@pytest.mark.parametrize("min_p", [0.05, 0.3])
def test_min_p(min_p: float) -> None:
    logits = random_logits(4, scale=1.0)
    assert_distribution(draw(logits, 15_000, min_p=min_p), keep_min_p(softmax(logits[0]), min_p))


def test_cuts_apply_in_order_top_k_then_top_p_then_min_p() -> None:
    logits = random_logits(5)
    p = keep_min_p(keep_top_p(keep_top_k(softmax(logits[0], 1.5), 30), 0.8), 0.1)
    assert_distribution(draw(logits, 15_000, temperature=1.5, top_k=30, top_p=0.8, min_p=0.1), p)


@pytest.mark.parametrize(("top_p", "min_p"), [(0.6, 0.01), (0.99, 0.2)])
def test_top_p_and_min_p_keep_what_both_keep(top_p: float, min_p: float) -> None:
    logits = random_logits(6, scale=1.5)
    expected = keep_min_p(keep_top_p(softmax(logits[0]), top_p), min_p)
    assert_distribution(draw(logits, 15_000, top_p=top_p, min_p=min_p), expected)


def test_large_vocabulary_top_k_is_exact() -> None:
    logits = random_logits(7, vocab=50_257)
    sampler = Sampler(50_257)
    best = set(np.argsort(-logits[0])[:10].tolist())
    drawn = {sampler.sample(logits, [row(output=i, top_k=10, temperature=2.0)])[0].token for i in range(400)}  # type: ignore[union-attr]
    assert drawn == best


def test_equal_logits_at_the_edge_of_top_k_give_the_lowest_ids() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    counts = draw(logits, 500, top_k=3)
    assert counts[:3].min() > 0
    assert counts[3:].sum() == 0


# Extremes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-300},
        {"temperature": 1e-4},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_p": 1e-300},
    ],
)
def test_extremes_take_the_best_token(params: dict[str, Any]) -> None:
    logits = random_logits(8, rows=6)
    results = Sampler(VOCAB).sample(logits, [row(output=i, **params) for i in range(6)])
    assert [r.token for r in results if isinstance(r, SampledToken)] == logits.argmax(axis=1).tolist()


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [17, 200]] = 3.0
    assert Sampler(VOCAB).sample(logits, [row(temperature=0.0)])[0] == SampledToken(17)


def test_bias_of_100_forces_and_minus_100_bans() -> None:
    logits = random_logits(9)
    best = int(logits.argmax())
    assert draw(logits, 50, logit_bias={7: 100.0})[7] == 50
    assert draw(logits, 300, logit_bias={best: -100.0})[best] == 0
    (greedy,) = Sampler(VOCAB).sample(logits, [row(temperature=0.0, logit_bias={best: -100.0})])
    assert isinstance(greedy, SampledToken)
    assert greedy.token == int(np.argsort(-logits[0])[1])


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.full((1, VOCAB), -np.inf, dtype=np.float32)
    logits[0, [3, 120, 299]] = [0.0, 0.0, 0.0]
    counts = draw(logits, 600)
    assert counts[[3, 120, 299]].min() > 100
    assert counts.sum() == counts[[3, 120, 299]].sum()


# Penalties ------------------------------------------------------------------------------------------------------


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.full((1, VOCAB), -50.0, dtype=np.float32)
    logits[0, :4] = [2.0, 1.0, -0.5, -1.0]
    penalised = logits[0].astype(np.float64).copy()
    penalised[[0, 2]] = [2.0 / 1.7, -0.5 * 1.7]  # 0 is in the prompt, 2 in the output
    counts = np.zeros(VOCAB, dtype=np.int64)
    sampler = Sampler(VOCAB)
    for seed in range(15_000):
        (r,) = sampler.sample(
            logits, [row(prompt=[0, 0], output=[2, 2, 2], repetition_penalty=1.7, seed=seed)]
        )
        assert isinstance(r, SampledToken)
        counts[r.token] += 1
    assert_distribution(counts, softmax(penalised))


def test_frequency_and_presence_penalties_count_output_tokens_only() -> None:
    logits = np.full((1, VOCAB), -50.0, dtype=np.float32)
    logits[0, :4] = [1.0, 1.0, 1.0, 1.0]
    penalised = logits[0].astype(np.float64).copy()
    penalised[1] -= 0.4 * 3 + 0.3
    penalised[2] -= 0.4 * 1 + 0.3
    counts = np.zeros(VOCAB, dtype=np.int64)
    sampler = Sampler(VOCAB)
    for seed in range(15_000):
        params = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": seed}
        (r,) = sampler.sample(logits, [row(prompt=[0, 0, 0], output=[1, 2, 1, 1], **params)])
        assert isinstance(r, SampledToken)
        counts[r.token] += 1
    assert_distribution(counts, softmax(penalised))


def test_negative_penalties_make_repetition_likelier() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    (r,) = Sampler(VOCAB).sample(logits, [row(output=[5], temperature=0.0, presence_penalty=-1.0)])
    assert r == SampledToken(5)


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [10, 20, 30]] = [9.0, 8.0, 7.0]
    common = {"temperature": 0.0, "eos_token_ids": (10,), "stop_token_ids": (20,), "min_tokens": 2}
    sampler = Sampler(VOCAB)
    assert sampler.sample(logits, [row(output=1, **common)])[0] == SampledToken(30)
    assert sampler.sample(logits, [row(output=2, **common)])[0] == SampledToken(10)
    # An eos that does not end the output is a token like any other.
    assert sampler.sample(logits, [row(output=1, ignore_eos=True, **common)])[0] == SampledToken(10)


# One row is nobody else's business ------------------------------------------------------------------------------


def mixed_rows(count: int) -> list[SamplingRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3},
        {"top_p": 0.8, "seed": -5},
        {"top_k": 7, "logprobs": 4, "seed": 11},
        {"min_p": 0.1, "repetition_penalty": 1.3, "seed": 2**63 - 1},
        {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 0},
        {"logit_bias": {3: 5.0}, "presence_penalty": 0.5, "seed": -(2**63)},
    ]
    return [row(output=[i % 5, i % 3], prompt=[i], **kinds[i % len(kinds)]) for i in range(count)]


def test_a_row_gives_the_same_alone_in_a_batch_and_in_another_order() -> None:
    # An odd vocabulary, so that rows start at every alignment.
    logits = random_logits(10, rows=28, vocab=4_097)
    rows = mixed_rows(28)
    together = Sampler(4_097).sample(logits, rows)
    alone = [Sampler(4_097).sample(logits[i : i + 1], [rows[i]])[0] for i in range(28)]
    backwards = Sampler(4_097).sample(logits[::-1], rows[::-1])[::-1]
    assert together == alone == backwards
    assert len({r.token for r in together if isinstance(r, SampledToken)}) > 10


@pytest.mark.parametrize(
    ("value", "reason"), [(np.nan, "not a number"), (np.inf, "infinite"), (-np.inf, "minus infinity")]
)
def test_broken_logits_fail_their_row_alone(value: float, reason: str) -> None:
    logits = random_logits(11, rows=14)
    rows = mixed_rows(14)
    expected = Sampler(VOCAB).sample(logits, rows)
    for broken in range(7):
        damaged = logits.copy()
        damaged[broken, slice(None) if value == -np.inf else 250] = value
        results = Sampler(VOCAB).sample(damaged, rows)
        failure = results.pop(broken)
        assert isinstance(failure, SampleError)
        assert reason in failure.message
        assert results == expected[:broken] + expected[broken + 1 :]


def test_a_row_whose_tokens_are_all_banned_fails_alone() -> None:
    logits = np.full((2, VOCAB), -np.inf, dtype=np.float32)
    logits[:, 10] = 1.0
    banned = row(temperature=0.0, eos_token_ids=(10,), min_tokens=5)
    results = Sampler(VOCAB).sample(logits, [banned, row(temperature=0.0)])
    assert isinstance(results[0], SampleError)
    assert results[1] == SampledToken(10)


def test_a_bias_beyond_the_vocabulary_fails_its_row_alone() -> None:
    logits = random_logits(12, rows=2)
    results = Sampler(VOCAB).sample(logits, [row(logit_bias={VOCAB + 200: 1.0}), row(temperature=0.0)])
    assert isinstance(results[0], SampleError)
    assert results[1] == SampledToken(int(logits[1].argmax()))


def test_sampling_leaves_the_logits_alone() -> None:
    logits = random_logits(13, rows=14)
    before = logits.copy()
    Sampler(VOCAB).sample(logits, mixed_rows(14))
    assert np.array_equal(before, logits)


# Log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_logprobs_are_those_of_the_untouched_logits(scale: float) -> None:
    logits = random_logits(14, scale=scale).clip(-50, 45)
    wide = logits[0].astype(np.float64)
    exact = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    params = {"temperature": 0.5, "top_k": 1, "logit_bias": {5: 100.0, 6: -100.0}, "logprobs": 6}
    (r,) = Sampler(VOCAB).sample(logits, [row(**params)])
    assert isinstance(r, SampledToken)
    assert r.token == 5
    assert r.logprob == pytest.approx(exact[5], abs=1e-5, rel=1e-6)
    order = np.argsort(-exact, kind="stable")[:6]
    assert [token for token, _ in r.top] == order.tolist()
    assert [value for _, value in r.top] == pytest.approx(exact[order].tolist(), abs=1e-5, rel=1e-6)


def test_logprobs_zero_gives_the_chosen_token_only() -> None:
    (r,) = Sampler(VOCAB).sample(random_logits(15), [row(temperature=0.0, logprobs=0)])
    assert isinstance(r, SampledToken)
    assert r.top == []
    assert r.logprob < 0


def test_logprob_of_a_given_token() -> None:
    logits = random_logits(16)
    result = Sampler(VOCAB).logprob(logits[0], 42, 2)
    exact = np.log(softmax(logits[0]))
    assert not isinstance(result, SampleError)
    assert result.token == 42
    assert result.logprob == pytest.approx(exact[42], abs=1e-5)
    assert [token for token, _ in result.top] == np.argsort(-exact)[:2].tolist()
    logits[0, 9] = np.nan
    assert isinstance(Sampler(VOCAB).logprob(logits[0], 42, 2), SampleError)


def test_log_probabilities_are_always_numbers_that_json_can_say() -> None:
    logits = np.full((1, VOCAB), -np.inf, dtype=np.float32)
    logits[0, :2] = 1.0
    result = Sampler(VOCAB).logprob(logits[0], 42, 4)
    assert not isinstance(result, SampleError)
    assert result.logprob == MIN_LOGPROB
    assert [value for _, value in result.top] == pytest.approx([math.log(0.5)] * 2 + [MIN_LOGPROB] * 2)


# Random numbers -------------------------------------------------------------------------------------------------


def test_random_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    by_position = [uniform(7, position) for position in range(20_000)]
    by_seed = [uniform(seed, 3) for seed in range(-10_000, 10_000)]
    for numbers in (by_position, by_seed):
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < chi_square_limit(49)
        assert min(numbers) >= 0
        assert max(numbers) < 1


def test_streams_of_neighbouring_seeds_are_unrelated() -> None:
    first = np.array([uniform(100, position) for position in range(5_000)])
    for seed in (101, 99, -100, 100 + 2**32):
        second = np.array([uniform(seed, position) for position in range(5_000)])
        for lag in (0, 1, 2):
            correlation = np.corrcoef(first[lag:], second[: len(second) - lag])[0, 1]
            assert abs(correlation) < 4.5 / math.sqrt(5_000)


def test_random_numbers_do_not_change_between_releases() -> None:
    # A resumed or repeated request must get the same tokens: these values are part of the contract.
    assert [uniform(seed, position) for seed, position in ((0, 0), (0, 1), (1, 0), (-1, 5))] == pytest.approx(
        PINNED, abs=0
    )


PINNED = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.15403342580516755]
