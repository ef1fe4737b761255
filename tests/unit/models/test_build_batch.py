from __future__ import annotations

import numpy as np
import pytest

from enginehouse.engine.model_runner import Chunk, build_batch
from enginehouse.runtime.config import KVDtype
from enginehouse.runtime.ops import BLOCK
from tests.unit.models.driving import NUM_BLOCKS, make_runner
from tests.unit.models.variants import VARIANTS, Variant


def test_decode_prefill_and_continued_chunks_in_one_batch() -> None:
    batch = build_batch(
        [
            Chunk([7], 64, [4, 2, 9]),
            Chunk([10, 11, 12], 0, [3], "none"),
            Chunk([20, 21], 31, [6, 1, 5], "all"),
        ]
    )
    assert batch.tokens.tolist() == [7, 10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [64, 0, 1, 2, 31, 32]
    assert batch.row_seq.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.slots.tolist() == [9 * 32, 96, 97, 98, 6 * 32 + 31, 32]
    # Blocks beyond a chunk's last token are left out: attention never looks there.
    assert batch.block_tables.tolist() == [[4, 2, 9], [3, 0, 0], [6, 1, 0]]
    assert batch.logit_rows.tolist() == [0, 4, 5]
    assert (batch.tokens.dtype, batch.positions.dtype, batch.row_seq.dtype) == (np.int32,) * 3
    assert (batch.block_tables.dtype, batch.logit_rows.dtype, batch.slots.dtype) == (
        np.int32,
        np.int32,
        np.int64,
    )


def test_slots_of_high_blocks_do_not_overflow() -> None:
    block = 2**31 // 32 + 5
    assert build_batch([Chunk([1], 3, [block])]).slots.tolist() == [block * 32 + 3]


def test_chunk_that_ends_a_block_needs_no_further_block() -> None:
    batch = build_batch([Chunk(list(range(32)), 32, [8, 3])])
    assert batch.block_tables.tolist() == [[8, 3]]
    assert batch.slots.tolist() == list(range(96, 128))
    assert batch.logit_rows.tolist() == [31]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("kv_dtype", ["fp16", "fp32"])
def test_planned_cache_size_is_the_real_one(variant: Variant, kv_dtype: KVDtype) -> None:
    runner = make_runner(variant, kernels="numpy", kv_dtype=kv_dtype)
    assert runner.kv_bytes == NUM_BLOCKS * BLOCK * runner.config.kv_bytes_per_token(kv_dtype)
