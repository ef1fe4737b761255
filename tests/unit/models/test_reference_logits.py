"""Every architecture against what Transformers computed from the same weights (scripts/reference_logits.py)."""

from __future__ import annotations

import numpy as np
import pytest

from enginehouse.runtime.ops import Kernels
from tests.unit.models.driving import KERNELS, greedy, make_runner, prompt_logits
from tests.unit.models.variants import DATA, NUM_GREEDY, VARIANTS, Variant

TOLERANCE = 1e-4


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture
def reference(variant: Variant) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{variant.name}.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 32, 33, 128])
def test_logits_equal_transformers(
    variant: Variant, reference: dict[str, np.ndarray], chunk_tokens: int, kernels: Kernels
) -> None:
    runner = make_runner(variant, kernels=kernels)
    logits = prompt_logits(runner, variant.prompt(), chunk_tokens)[reference["rows"]]
    assert logits.shape == reference["logits"].shape
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_decoding_equals_transformers(
    variant: Variant, reference: dict[str, np.ndarray], kernels: Kernels
) -> None:
    runner = make_runner(variant, kernels=kernels)
    assert greedy(runner, variant.prompt(), NUM_GREEDY) == reference["greedy"].tolist()


def test_half_precision_cache_stays_close(variant: Variant, reference: dict[str, np.ndarray]) -> None:
    exact = prompt_logits(make_runner(variant), variant.prompt(), 128)
    half = prompt_logits(make_runner(variant, kv_dtype="fp16"), variant.prompt(), 128)
    assert not np.array_equal(half, exact), "the fp16 cache was not used"
    np.testing.assert_allclose(half[reference["rows"]], reference["logits"], rtol=0, atol=0.03)


def test_int8_weights_stay_close(variant: Variant, reference: dict[str, np.ndarray]) -> None:
    """Random weights have no outliers, so int8 must explain nearly all of the logits' variance."""
    logits = prompt_logits(make_runner(variant, precision="int8"), variant.prompt(), 128)
    error = logits[reference["rows"]] - reference["logits"]
    assert 0 < np.sqrt((error**2).mean()) < 0.1 * reference["logits"].std()
