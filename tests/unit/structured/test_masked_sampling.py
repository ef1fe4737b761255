"""The sampler within a mask: nothing banned is ever chosen, whatever else a row asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine.sampler import Sampler, SamplingRow
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampledToken, SampleError

VOCAB = 150


def row(banned: np.ndarray[Any, np.dtype[np.bool_]] | None, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), [1, 2], [3, 4], banned)


SAMPLING = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**31), "temperature": st.sampled_from([0.0, 0.4, 1.0, 2.0])},
    optional={
        "top_k": st.integers(1, VOCAB),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100.0, 100.0), max_size=4),
        "logprobs": st.integers(0, 5),
    },
)


@given(sampling=SAMPLING, seed=st.integers(0, 1000), allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_only_allowed_tokens_are_chosen(sampling: dict[str, Any], seed: int, allowed: set[int]) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, VOCAB)).astype(np.float32) * 4
    before = logits.copy()
    banned = np.ones(VOCAB, np.bool_)
    banned[list(allowed)] = False
    (sample,) = Sampler(VOCAB).sample(logits, [row(banned, **sampling)])
    assert isinstance(sample, SampledToken)
    assert sample.token in allowed
    assert (logits == before).all()


def test_a_mask_that_bans_nothing_changes_nothing() -> None:
    logits = np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32)
    nothing = np.zeros(VOCAB, np.bool_)
    for seed in range(20):
        params = {"seed": seed, "logprobs": 3}
        sampler = Sampler(VOCAB)
        free, masked = (sampler.sample(logits, [row(banned, **params)]) for banned in (None, nothing))
        assert free == masked


def test_log_probabilities_are_those_before_the_mask() -> None:
    logits = np.arange(VOCAB, dtype=np.float32)[None]
    banned = np.ones(VOCAB, np.bool_)
    banned[5] = False
    (sample,) = Sampler(VOCAB).sample(logits, [row(banned, temperature=0.0, logprobs=2)])
    assert isinstance(sample, SampledToken)
    assert sample.token == 5
    assert [token for token, _ in sample.top] == [VOCAB - 1, VOCAB - 2]
    assert sample.logprob == pytest.approx(5 - (VOCAB - 1) - np.log(1 / (1 - np.exp(-1))), abs=1e-3)


def test_the_mask_decides_about_end_tokens_not_min_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    banned = np.ones(VOCAB, np.bool_)
    banned[7] = False
    masked = row(banned, temperature=0.0, min_tokens=10, max_tokens=20, eos_token_ids=(7,))
    (sample,) = Sampler(VOCAB).sample(logits, [masked])
    assert sample == SampledToken(7)


def test_a_mask_that_bans_everything_fails_its_row_alone() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    everything = np.ones(VOCAB, np.bool_)
    lost, other = Sampler(VOCAB).sample(logits, [row(everything), row(None)])
    assert isinstance(lost, SampleError)
    assert isinstance(other, SampledToken)
