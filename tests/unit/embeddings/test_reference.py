"""Vectors and logits against sentence-transformers' (scripts/reference_embeddings.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_encoders import DATA, ENCODERS, QUERY, TEXTS, TinyEncoder
from tests.unit.embeddings.conftest import Load, Loaded

PROSE = Path(__file__).resolve().parents[3] / "bench" / "data" / "prose.txt"


def tokenized(loaded: Loaded, encoder: TinyEncoder) -> list:
    if encoder.is_cross_encoder:
        return loaded.tokenizer.encode_pairs(QUERY, TEXTS)
    return loaded.tokenizer.encode(TEXTS)


@pytest.mark.parametrize("kernels", ["native", "numpy"])
@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.name)
def test_tiny_encoders(load: Load, encoder: TinyEncoder, kernels: str) -> None:
    reference = np.load(DATA / f"{encoder.name}.npz")
    loaded = load(encoder.name, kernels=kernels)
    inputs = tokenized(loaded, encoder)
    assert [len(item.tokens) for item in inputs] == reference["lengths"].tolist()
    vectors = loaded.vectors(inputs)
    if encoder.is_cross_encoder:
        assert np.abs(vectors[:, 0] - reference["logits"]).max() < 1e-4
    else:
        assert np.abs(vectors - reference["vectors"]).max() < 1e-4


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.name)
def test_int8_stays_near(load: Load, encoder: TinyEncoder) -> None:
    reference = np.load(DATA / f"{encoder.name}.npz")
    loaded = load(encoder.name, precision="int8")
    vectors = loaded.vectors(tokenized(loaded, encoder))
    wanted = reference["logits"][:, None] if encoder.is_cross_encoder else reference["vectors"]
    assert 1e-6 < np.abs(vectors - wanted).max() < 0.15 * np.abs(wanted).max()


@pytest.mark.model
def test_the_default_model(load: Load) -> None:
    reference = np.load(DATA / "default-model.npz")
    loaded = load("all-minilm-l6-v2")
    inputs = loaded.tokenizer.encode(
        [*TEXTS, PROSE.read_text(encoding="utf-8")[:900], "日本語 and émojis 🙂 mixed"]
    )
    assert [len(item.tokens) for item in inputs] == reference["lengths"].tolist()
    assert np.abs(loaded.vectors(inputs) - reference["vectors"]).max() < 1e-4
