"""Long fields cost their length once a request, not once a token; and they are not that long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.sampler import Sampler, SamplingRow
from enginehouse.engine.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from enginehouse.engine.sequence import Sequence, check_finish
from enginehouse.errors import InvalidRequestError

VOCAB = 4096


class Walks:
    """How often a field was gone through."""

    count = 0


class CountedIds(tuple[int, ...]):
    def __iter__(self) -> Iterator[int]:
        Walks.count += 1
        return super().__iter__()

    def __contains__(self, token: object) -> bool:
        Walks.count += 1
        return super().__contains__(token)

    def __add__(self, other: Any) -> Any:
        Walks.count += 1
        return super().__add__(other)


class CountedBiases(dict[int, float]):
    def __iter__(self) -> Iterator[int]:
        Walks.count += 1
        return super().__iter__()

    def items(self) -> Any:
        Walks.count += 1
        return super().items()

    def values(self) -> Any:
        Walks.count += 1
        return super().values()


@pytest.fixture(autouse=True)
def no_walks() -> None:
    Walks.count = 0


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": CountedBiases({token: token / 7 for token in range(MAX_LOGIT_BIASES)})},
        {"stop_token_ids": CountedIds(range(MAX_STOP_TOKEN_IDS))},
        {"stop_token_ids": CountedIds(range(MAX_STOP_TOKEN_IDS)), "eos_token_ids": (7,), "min_tokens": 500},
    ],
)
def test_long_fields_are_gone_through_once(fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=2000, temperature=0.0, **fields)
    sequence = Sequence.from_message(
        AddSequence(sequence_id=SequenceId(1), prompt_tokens=[5], output_tokens=[], params=params), 0.0
    )
    sampler, logits = Sampler(VOCAB), np.zeros((1, VOCAB), np.float32)
    counts = set()
    for _ in range(100):
        sampler.sample(logits, [SamplingRow(params, [5], sequence.output_tokens)])
        sequence.append(VOCAB - 1)
        assert check_finish(sequence, 10_000) is None
        counts.add(Walks.count)
    assert 1 <= max(counts) <= 2


def test_biases_are_those_of_the_field() -> None:
    biases = {5: 3.25, 9: -100.0, 4000: 0.1}
    params = SamplingParams(temperature=0.0, logit_bias=biases)
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32)
    scores = Sampler(VOCAB)._adjust(logits, SamplingRow(params, [], []))
    expected = logits.copy()
    for token, bias in biases.items():
        expected[token] += bias
    assert np.array_equal(scores, expected)


def test_what_was_derived_belongs_to_one_value_and_crosses_no_process() -> None:
    params = SamplingParams(stop_token_ids=(5,), eos_token_ids=(7,), logit_bias={1: 2.0})
    assert params.end_token_ids == {5, 7}
    assert params.end_token_rows.tolist() == [5, 7]
    assert params.bias_rows[0].tolist() == [1]
    others = msgspec.structs.replace(params, eos_token_ids=(8,), logit_bias={})
    assert others.end_token_ids == {5, 8}
    assert others.end_token_rows.tolist() == [5, 8]
    assert others.bias_rows[0].tolist() == []
    assert msgspec.structs.replace(params, ignore_eos=True).end_token_ids == {5}
    fresh = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert fresh == params
    assert fresh.end_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
        ("stop_token_ids", (5,) * (MAX_STOP_TOKEN_IDS + 1)),
    ],
)
def test_longer_fields_are_refused_unread(name: str, value: Any) -> None:
    counted = CountedBiases(value) if isinstance(value, dict) else CountedIds(value)
    Walks.count = 0
    with pytest.raises(
        InvalidRequestError, match=f"{name} may have at most 1024 entries, not 1025"
    ) as caught:
        SamplingParams(**{name: counted}).check(VOCAB)
    assert caught.value.param == name
    assert Walks.count == 0


def test_as_long_as_is_allowed() -> None:
    SamplingParams(
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0),
        stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS)),
    ).check(VOCAB)
