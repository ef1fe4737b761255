"""The real default model: fp32 against Transformers, int8 against fp32, and the same bits in every chunking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest

from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.engine.model_runner import Chunk, ModelRunner, build_batch
from enginehouse.runtime.config import KVDtype
from enginehouse.runtime.ops import load
from enginehouse.runtime.packed import PackedModel, open_packed
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.weights import prepare_model
from tests.unit.models.driving import greedy, prompt_logits
from tests.unit.models.variants import DATA

pytestmark = pytest.mark.model
NUM_BLOCKS = 48


@lru_cache(maxsize=2)
def weights(precision: Precision) -> PackedModel:
    return open_packed(prepare_model(DEFAULT_SOURCE, precision).path)


def make_runner(precision: Precision, kv_dtype: KVDtype = "fp16", num_threads: int = 2) -> ModelRunner:
    return ModelRunner(
        weights(precision),
        load(num_threads),
        num_blocks=NUM_BLOCKS,
        kv_dtype=kv_dtype,
        max_rows=256,
        max_seqs=4,
    )


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(DATA / "default-model.npz") as stored:
        return dict(stored)


def log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_fp32_equals_transformers(reference: dict[str, np.ndarray]) -> None:
    logits = prompt_logits(make_runner("fp32", "fp32"), reference["tokens"].tolist(), 100)[reference["rows"]]
    best = np.take_along_axis(logits, reference["ids"], axis=1)
    np.testing.assert_allclose(best, reference["logits"], rtol=0, atol=1e-3)
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(log_sum, reference["log_sum"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_greedy_answer_is_that_of_transformers(
    reference: dict[str, np.ndarray], precision: Precision
) -> None:
    wanted = reference["greedy"].tolist()
    assert greedy(make_runner(precision), reference["prompt"].tolist(), len(wanted)) == wanted


def test_int8_stays_close_to_fp32(reference: dict[str, np.ndarray]) -> None:
    """docs/quality.md has the figures on whole texts; this notices when something breaks."""
    tokens = reference["tokens"].tolist()
    exact = log_probs(prompt_logits(make_runner("fp32"), tokens, 128))
    int8 = log_probs(prompt_logits(make_runner("int8"), tokens, 128))
    divergence = (np.exp(exact) * (exact - int8)).sum(axis=1)
    assert 0 < divergence.mean() < 0.004


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_chunks_batches_and_threads_change_no_bit(
    reference: dict[str, np.ndarray], precision: Precision
) -> None:
    tokens = reference["tokens"].tolist()[:90]
    whole = prompt_logits(make_runner(precision), tokens, 128)
    one_thread = make_runner(precision, num_threads=1)
    for chunk_tokens in (7, 33):
        np.testing.assert_array_equal(prompt_logits(one_thread, tokens, chunk_tokens), whole)
    np.testing.assert_array_equal(decoded_beside_others(make_runner(precision), tokens, 80), whole[80:])


def decoded_beside_others(runner: ModelRunner, tokens: Sequence[int], start: int) -> np.ndarray:
    """Logits of tokens[start:], computed one a step while a second sequence is read and a third decodes."""
    blocks, reader, decoder = range(0, 8), range(8, 24), range(24, 40)
    runner.run(build_batch([Chunk(tokens[:start], 0, blocks, "none"), Chunk([9], 0, decoder)]))
    rows = []
    for step, position in enumerate(range(start, len(tokens))):
        chunks = [
            Chunk(list(range(50, 65)), 15 * step, reader, "none"),
            Chunk(tokens[position : position + 1], position, blocks),
            Chunk([100 + step], 1 + step, decoder),
        ]
        rows.append(runner.run(build_batch(chunks))[0].copy())
    return np.stack(rows)
