"""A row's logits are the same bits whatever runs beside it, however its prompt is cut, on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from enginehouse.engine.model_runner import Chunk, ModelRunner, build_batch
from enginehouse.runtime.config import KVDtype
from enginehouse.runtime.ops import BLOCK, Kernels
from enginehouse.runtime.quantization import Precision
from tests.unit.models.driving import KERNELS, Lane, make_runner, prompt_logits, scattered_blocks
from tests.unit.models.variants import VARIANTS, VOCAB_SIZE, Variant

MODES: list[tuple[Precision, KVDtype]] = [("int8", "fp16"), ("fp32", "fp16"), ("fp32", "fp32")]


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.fixture(params=MODES, ids=lambda mode: f"{mode[0]}-kv-{mode[1]}")
def mode(request: pytest.FixtureRequest) -> tuple[Precision, KVDtype]:
    return request.param


def runner_for(
    variant: Variant, mode: tuple[Precision, KVDtype], kernels: Kernels, num_threads: int = 1
) -> ModelRunner:
    precision, kv_dtype = mode
    return make_runner(
        variant, precision=precision, kv_dtype=kv_dtype, kernels=kernels, num_threads=num_threads
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunks_and_threads_change_no_bit(
    variant: Variant, mode: tuple[Precision, KVDtype], kernels: Kernels, num_threads: int
) -> None:
    prompt = variant.prompt()
    whole = prompt_logits(runner_for(variant, mode, kernels), prompt, 128)
    assert np.isfinite(whole).all()
    runner = runner_for(variant, mode, kernels, num_threads)
    for chunk_tokens in (1, 3, 7, 32, 33, 128):
        np.testing.assert_array_equal(prompt_logits(runner, prompt, chunk_tokens), whole)


@pytest.mark.parametrize("kernels", KERNELS)
def test_batch_mates_change_no_bit(
    variant: Variant, mode: tuple[Precision, KVDtype], kernels: Kernels
) -> None:
    """Five sequences of different lengths advance together by random chunks; each gets what it gets alone."""
    rng = np.random.RandomState(7)
    prompts = [list(rng.randint(0, VOCAB_SIZE, length)) for length in (1, 9, 32, 45, 70)]
    alone = runner_for(variant, mode, kernels)
    expected = [prompt_logits(alone, prompt, 128, lane) for lane, prompt in enumerate(prompts)]

    runner = runner_for(variant, mode, kernels, num_threads=2)
    lanes = [Lane(prompt, scattered_blocks(lane, len(prompt))) for lane, prompt in enumerate(prompts)]
    parts: list[list[np.ndarray]] = [[] for _ in lanes]
    mixed_steps = 0
    while True:
        active = [index for index, lane in enumerate(lanes) if lane.num_computed < len(lane.tokens)]
        if not active:
            break
        rng.shuffle(active)
        chunks = [lanes[index].next_chunk(int(rng.choice([1, 1, 2, 5, 20]))) for index in active]
        mixed_steps += len({len(chunk.tokens) for chunk in chunks}) > 1
        logits = runner.run(build_batch(chunks)).copy()
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        for index, rows in zip(active, np.split(logits, ends[:-1]), strict=True):
            parts[index].append(rows)
    assert mixed_steps > 3
    for rows, wanted in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(rows), wanted)


@pytest.mark.parametrize("kernels", KERNELS)
def test_unwanted_logits_change_no_bit(
    variant: Variant, mode: tuple[Precision, KVDtype], kernels: Kernels
) -> None:
    """Logits of chosen rows are the same as when all are computed; a chunk that wants none gives none."""
    prompt = variant.prompt()
    blocks = scattered_blocks(0, len(prompt))
    runner = runner_for(variant, mode, kernels)
    whole = prompt_logits(runner, prompt, 128)
    first = runner.run(build_batch([Chunk(prompt[:40], 0, blocks, "none")]))
    assert first.shape == (0, VOCAB_SIZE)
    rest = runner.run(build_batch([Chunk(prompt[40:], 40, blocks)]))
    np.testing.assert_array_equal(rest, whole[-1:])


@pytest.mark.parametrize("kernels", KERNELS)
def test_copied_block_continues_alike_and_apart(kernels: Kernels) -> None:
    """Two continuations of one prompt share its full block and copy the half-filled one, as a fork does."""
    variant = VARIANTS[0]
    runner = runner_for(variant, ("int8", "fp16"), kernels)
    prompt = variant.prompt()[: BLOCK + 8]
    first_blocks, second_blocks = [5, 9], [5, 20]
    runner.run(build_batch([Chunk(prompt, 0, first_blocks, "none")]))
    runner.copy_blocks([(9, 20)])
    position = len(prompt)
    steps = [
        Chunk([17], position, first_blocks),
        Chunk([18], position, second_blocks),
    ]
    runner.run(build_batch(steps))
    both = runner.run(
        build_batch([Chunk([3], position + 1, first_blocks), Chunk([3], position + 1, second_blocks)])
    ).copy()
    for row, middle in zip(both, (17, 18), strict=True):
        alone = prompt_logits(runner_for(variant, ("int8", "fp16"), kernels), [*prompt, middle, 3], 128)
        np.testing.assert_array_equal(row, alone[-1])
    assert not np.array_equal(both[0], both[1])
