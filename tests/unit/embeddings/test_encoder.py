"""What the forward pass promises: nothing but an input's own tokens decides its vector."""

from __future__ import annotations

import numpy as np
import pytest

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime import ops
from enginehouse.runtime.models import architecture_for
from enginehouse.runtime.models.encoder import Encoder, EncoderInput
from tests.support.tiny_encoders import ENCODERS
from tests.unit.embeddings.conftest import Load

LENGTHS = [1, 2, 31, 32, 33, 64, 7]


def inputs(seed: int = 0) -> list[EncoderInput]:
    rng = np.random.default_rng(seed)
    return [EncoderInput([int(token) for token in rng.integers(0, 100, length)]) for length in LENGTHS]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["bert-mean-norm", "roberta-mean", "bert-cross", "xlm-roberta-cross"])
def test_alone_together_in_any_order_and_with_any_threads_the_same_bits(
    load: Load, name: str, precision: str
) -> None:
    together = load(name, precision=precision).encoder.encode(inputs())
    alone = load(name, precision=precision, num_threads=1).encoder
    for item, vector in zip(inputs(), together, strict=True):
        assert (alone.encode([item])[0] == vector).all()
    assert (alone.encode(inputs()[::-1]) == together[::-1]).all()


def test_every_token_and_its_place_and_type_matter(load: Load) -> None:
    encoder = load("bert-mean-norm").encoder
    tokens = list(range(10, 50))
    whole = encoder.encode([EncoderInput(tokens)])[0]
    changed = [[*tokens[:i], tokens[i] + 50, *tokens[i + 1 :]] for i in range(len(tokens))]
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    others = [EncoderInput(other) for other in changed] + [
        EncoderInput(swapped),
        EncoderInput(tokens, [1] * 40),
    ]
    for start in range(0, len(others), 20):
        for vector in encoder.encode(others[start : start + 20]):
            assert np.abs(vector - whole).max() > 1e-4


def test_normalised_vectors_have_length_one(load: Load) -> None:
    for name, is_normalised in (("bert-mean-norm", True), ("bert-cls", False), ("roberta-mean", False)):
        lengths = np.linalg.norm(load(name).encoder.encode(inputs()), axis=1)
        assert (np.abs(lengths - 1) < 1e-6).all() == is_normalised


def test_too_large_batches_and_wrong_ids_raise(load: Load) -> None:
    encoder = load("bert-cls").encoder
    for batch in ([EncoderInput([1])] * 33, [EncoderInput([1] * 64)] * 17, [EncoderInput([])]):
        with pytest.raises(ValueError, match="inputs of"):
            encoder.encode(batch)
    for item in (EncoderInput([131]), EncoderInput([-1]), EncoderInput([1], [2])):
        with pytest.raises(IndexError):
            encoder.encode([item])


def test_a_model_that_generates_is_no_encoder() -> None:
    from tests.unit.models.variants import VARIANTS

    config = VARIANTS[0].config

    class Weights:
        def __init__(self) -> None:
            self.config = architecture_for(config).config_from_hf(config)

    with pytest.raises(UnsupportedModelError, match="is no encoder"):
        Encoder(Weights(), ops.load(1, "numpy"), max_rows=1, max_inputs=1)  # type: ignore[arg-type]


BERT = ENCODERS[0].config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering is not supported"),
        ({"architectures": ["BertForSequenceClassification"]}, "2 labels"),
        ({"hidden_size": 50}, "no multiple"),
        ({"sentence_transformers": {"modules": [{"type": "sentence_transformers.models.Dense"}]}}, "'Dense'"),
        (
            {"sentence_transformers": {"modules": [{"type": "x.Pooling"}], "pooling": [{"pooling_mode_max_tokens": True}]}},
            "pooling_mode_max_tokens",
        ),
        (
            {"sentence_transformers": {"modules": [{"type": "x.Pooling"}], "pooling": [{}]}},
            "pooling by nothing",
        ),
        ({"sentence_transformers": {"sentence": {"max_seq_length": 0}}}, "max_seq_length"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(change: dict, said: str) -> None:
    from enginehouse.errors import ModelError

    changed = {**BERT, **change}
    with pytest.raises(ModelError, match=said):
        architecture_for(changed).config_from_hf(changed)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
    ],
)
def test_both_spellings_of_pooling(pooling: dict, expected: str) -> None:
    files = {"modules": [{"type": "x.Transformer"}, {"type": "x.Pooling"}], "pooling": [pooling]}
    config = architecture_for(BERT).config_from_hf({**BERT, "sentence_transformers": files})
    assert config.encoder is not None
    assert (config.encoder.pooling, config.encoder.normalize) == (expected, False)
