from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from enginehouse.runtime.ops import AttentionBatch, KVLayer, Ops, Rope, Tensor
from tests.unit.ops.conftest import fused_isas, native

# heads, KV heads, head_dim
SHAPES = [(9, 3, 64), (4, 4, 64), (8, 1, 128), (2, 2, 8), (6, 2, 24), (12, 2, 80)]
BLOCKS = 12


@dataclass
class Case:
    """Two sequences' tokens in scattered blocks, and all their rows as one batch."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...] = (70, 33)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.head_dim)
        self.positions = np.concatenate([np.arange(n, dtype=np.int32) for n in self.lengths])
        self.row_seq = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        order = rng.permutation(BLOCKS).astype(np.int32)
        self.tables = order.reshape(len(self.lengths), -1)
        self.slots = (
            self.tables[self.row_seq, self.positions // 32].astype(np.int64) * 32 + self.positions % 32
        )
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = rng.standard_normal((len(self.positions), width)).astype(np.float32)
        angle = np.outer(np.arange(100), 100.0 ** -np.linspace(0, 1, self.head_dim // 2))
        self.rope: Rope = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
        self.norms = tuple(rng.uniform(0.5, 1.5, self.head_dim).astype(np.float32) for _ in range(2))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def store(
        self, ops: Ops, kv: KVLayer, rows: slice, rope: Rope | None = None, norms: bool = False
    ) -> Tensor:
        qkv = Tensor(len(self.positions[rows]), self.qkv.shape[1])
        qkv.array[:] = self.qkv[rows]
        q_norm, k_norm = self.norms if norms else (None, None)
        positions, slots = self.positions[rows].copy(), self.slots[rows].copy()
        ops.rope_and_store(qkv, positions, slots, rope, q_norm, k_norm, 1e-6, kv, self.heads, len(positions))
        return qkv

    def attend(self, ops: Ops, kv: KVLayer, qkv: Tensor, rows: slice) -> np.ndarray:
        batch = AttentionBatch(self.row_seq[rows], self.positions[rows], self.tables)
        out = Tensor(qkv.max_rows, self.heads * self.head_dim)
        ops.attention(qkv, kv, batch, self.scale, out, self.heads, qkv.max_rows)
        return out.array

    def run(self, ops: Ops, kv: KVLayer, rows: slice = slice(None)) -> np.ndarray:
        return self.attend(ops, kv, self.store(ops, kv, rows, self.rope), rows)


def new_cache(ops: Ops, case: Case, dtype: str, fill: float = 0.0) -> KVLayer:
    layer = ops.kv_cache(1, BLOCKS, case.kv_heads, case.head_dim, dtype).layers[0]
    layer.k[:], layer.v[:] = fill, fill
    return layer


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rope_norms_and_cache_match_the_reference(kernels, reference, shape, norms, with_rope, dtype):
    case = Case(*shape)
    mine, expected = (new_cache(ops, case, dtype) for ops in (kernels, reference))
    rope = case.rope if with_rope else None
    my_qkv = case.store(kernels, mine, slice(None), rope, norms)
    expected_qkv = case.store(reference, expected, slice(None), rope, norms)
    queries = case.heads * case.head_dim
    assert np.allclose(my_qkv.array[:, :queries], expected_qkv.array[:, :queries], rtol=1e-5, atol=1e-6)
    tolerance = 2e-3 if dtype == "fp16" else 1e-5
    assert np.allclose(mine.k, expected.k, rtol=tolerance, atol=1e-6)
    assert (mine.v == expected.v).all()
    if not with_rope and not norms:
        assert (mine.k == expected.k).all()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_the_reference(kernels, reference, shape, dtype):
    case = Case(*shape)
    cache = new_cache(reference, case, dtype)
    qkv = case.store(reference, cache, slice(None), case.rope)
    expected = case.attend(reference, cache, qkv, slice(None))
    mine = case.attend(kernels, cache, qkv, slice(None))
    assert np.allclose(mine, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 5, 32, 64])
def test_chunks_give_the_same_bits_as_the_whole(isa, shape, dtype, chunk):
    case = Case(*shape)
    whole = case.run(native(isa, 2), new_cache(native(isa, 2), case, dtype))
    ops, total = native(isa, 1), len(case.positions)
    cache = new_cache(ops, case, dtype)
    for start in range(0, total, chunk):
        rows = slice(start, min(start + chunk, total))
        assert (case.run(ops, cache, rows) == whole[rows]).all()


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("stale", [np.nan, np.inf, 1e4])
def test_stale_cache_contents_are_harmless(kernels, dtype, stale):
    case = Case(6, 2, 24)
    clean = case.run(kernels, new_cache(kernels, case, dtype))
    cache = new_cache(kernels, case, dtype, fill=stale)
    assert (case.run(kernels, cache) == clean).all()
    cache = new_cache(kernels, case, dtype, fill=stale)
    for row in range(len(case.positions)):
        assert (case.run(kernels, cache, slice(row, row + 1)) == clean[row]).all()


def test_nan_in_one_sequence_stays_there(kernels):
    case = Case(6, 2, 24)
    clean = case.run(kernels, new_cache(kernels, case, "fp16"))
    case.qkv[10] = np.nan
    result = case.run(kernels, new_cache(kernels, case, "fp16"))
    assert (result[:10] == clean[:10]).all()
    assert np.isnan(result[10:70]).all()
    assert (result[70:] == clean[70:]).all()


def test_instruction_sets_agree_to_the_bit():
    case = Case(9, 3, 64)
    results = [case.run(native(isa, 2), new_cache(native(isa, 2), case, "fp16")) for isa in fused_isas()]
    for result in results[1:]:
        assert (result == results[0]).all()


def test_rows_of_a_sequence_may_come_in_any_order(kernels):
    case = Case(9, 3, 64)
    cache = new_cache(kernels, case, "fp16")
    whole = case.run(kernels, cache)
    order = np.random.default_rng(0).permutation(len(case.positions))
    shuffled = Case(9, 3, 64)
    shuffled.positions, shuffled.row_seq = case.positions[order].copy(), case.row_seq[order].copy()
    shuffled.slots, shuffled.qkv = case.slots[order].copy(), case.qkv[order].copy()
    assert (shuffled.run(kernels, new_cache(kernels, case, "fp16")) == whole[order]).all()


def test_attention_weights_are_exact_for_one_visible_token(kernels):
    case = Case(4, 4, 64, lengths=(1, 1))
    cache = new_cache(kernels, case, "fp32")
    values = case.qkv[:, 2 * 4 * 64 :]
    assert (case.run(kernels, cache) == values).all()


def test_half_precision_values_are_rounded_to_nearest_even(kernels, reference):
    case = Case(2, 2, 8, lengths=(12, 12))
    specials = [1e-8, 6e-8, 3e-5, 6.1e-5, 65504, 65519, 65520, 1e6, 1 + 2**-11, 1 + 3 * 2**-11, -2.5, -np.inf]
    case.qkv[:12] = np.array(specials, np.float32)[:, None]
    mine, expected = new_cache(kernels, case, "fp16"), new_cache(reference, case, "fp16")
    with np.errstate(over="ignore"):
        case.store(reference, expected, slice(None))
    case.store(kernels, mine, slice(None))
    assert (mine.k.view(np.uint16) == expected.k.view(np.uint16)).all()
    assert (mine.v.view(np.uint16) == expected.v.view(np.uint16)).all()


def test_all_half_precision_numbers_are_read_exactly(kernels):
    case = Case(2, 2, 8, lengths=(1, 1))
    cache = new_cache(kernels, case, "fp16")
    finite = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = finite[np.isfinite(finite)]
    qkv = Tensor(*case.qkv.shape)
    for start in range(0, len(finite), 32):
        # One visible token has weight one: what comes out is what was read.
        values = np.resize(finite[start : start + 32], (2, 2, 8))
        cache.v[case.tables[:, 0], :, 0, :8] = values
        out = case.attend(kernels, cache, qkv, slice(None))
        assert (out == values.astype(np.float32).reshape(2, -1)).all()


@pytest.mark.parametrize(("position", "slot"), [(100, 0), (-1, 0), (0, BLOCKS * 32), (0, -1)])
def test_positions_and_slots_out_of_range_are_refused(kernels, position, slot):
    case = Case(2, 2, 8, lengths=(1, 1))
    case.positions[1], case.slots[1] = position, slot
    cache = new_cache(kernels, case, "fp16")
    with pytest.raises(IndexError):
        case.store(kernels, cache, slice(None), case.rope)
    assert not cache.k.any()


def test_too_many_query_heads_are_refused(kernels):
    case = Case(25, 1, 8, lengths=(1, 1))
    with pytest.raises(ValueError, match="at most"):
        case.run(kernels, new_cache(kernels, case, "fp16"))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_see_the_whole_sequence_match_the_reference_alone_and_together(
    isa, reference, shape, dtype
):
    case = Case(*shape, lengths=(70, 33, 1))
    case.tables = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32).reshape(3, -1)
    case.slots = case.tables[case.row_seq, case.positions // 32].astype(np.int64) * 32 + case.positions % 32
    cache = new_cache(reference, case, dtype)
    qkv = case.store(reference, cache, slice(None))
    case.positions = np.repeat(np.array(case.lengths, np.int32) - 1, case.lengths)
    expected = case.attend(reference, cache, qkv, slice(None))
    together = case.attend(native(isa, 2), cache, qkv, slice(None))
    assert np.allclose(together, expected, rtol=1e-4, atol=2e-6)
    for row in range(len(case.positions)):
        lone = Tensor(1, qkv.width)
        lone.array[0] = qkv.array[row]
        assert (case.attend(native(isa, 1), cache, lone, slice(row, row + 1)) == together[row]).all()
