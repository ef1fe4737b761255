"""Runs the model on one step's work: turns scheduled tokens into arrays, and arrays into logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginehouse.runtime.config import KVDtype
from enginehouse.runtime.models import architecture_named
from enginehouse.runtime.models.blocks import Binding, FloatArray, PackedWeights, Step
from enginehouse.runtime.ops import BLOCK, AttentionBatch, Ops

LogitsWanted = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, to be computed in one step."""

    tokens: Sequence[int]
    """The chunk's own token ids, at least one."""
    start: int
    """Position of the first of them."""
    block_table: Sequence[int]
    """The sequence's KV blocks, at least up to the chunk's last token."""
    logits: LogitsWanted = "last"
    """`last` to sample the next token, `none` for a prompt that goes on, `all` for logprobs of the prompt."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one step. A row is one token; rows of one sequence stand together, in order."""

    tokens: NDArray[np.int32]
    """Token ids [rows]."""
    positions: NDArray[np.int32]
    """Positions within the sequences [rows]."""
    slots: NDArray[np.int64]
    """Where keys and values go, block * BLOCK + offset [rows]."""
    row_seq: NDArray[np.int32]
    """Which line of `block_tables` a row belongs to [rows]."""
    block_tables: NDArray[np.int32]
    """KV blocks of each sequence [num_seqs, max_blocks], zero beyond a sequence's end."""
    logit_rows: NDArray[np.int32]
    """Rows whose logits are wanted, ascending [num_logits]."""


def build_batch(chunks: Sequence[Chunk]) -> Batch:
    """Arrays for `chunks`, which are computed together; the logits come in the chunks' order."""
    num_tokens = [len(chunk.tokens) for chunk in chunks]
    counts = np.array(num_tokens, np.int32)
    ends = counts.cumsum(dtype=np.int32)
    rows = int(ends[-1])
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    tokens = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int32, rows)
    row_seq = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
    positions = np.arange(rows, dtype=np.int32) + np.repeat(starts + counts - ends, counts)
    block_tables = _block_tables(chunks, num_tokens)
    slots = block_tables[row_seq, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    return Batch(tokens, positions, slots, row_seq, block_tables, _logit_rows(chunks, num_tokens))


def _block_tables(chunks: Sequence[Chunk], num_tokens: list[int]) -> NDArray[np.int32]:
    num_blocks = [-(-(chunk.start + count) // BLOCK) for chunk, count in zip(chunks, num_tokens, strict=True)]
    tables = np.zeros((len(chunks), max(num_blocks)), np.int32)
    for line, chunk, count in zip(tables, chunks, num_blocks, strict=True):
        line[:count] = chunk.block_table[:count]
    return tables


def _logit_rows(chunks: Sequence[Chunk], num_tokens: list[int]) -> NDArray[np.int32]:
    wanted: list[int] = []
    end = 0
    for chunk, count in zip(chunks, num_tokens, strict=True):
        end += count
        if chunk.logits == "last":
            wanted.append(end - 1)
        elif chunk.logits == "all":
            wanted.extend(range(end - count, end))
    return np.array(wanted, np.int32)


class ModelRunner:
    """Owns the bound model, its scratch buffers and the memory of the KV cache; lives in the worker.

    Decides nothing: which sequences run, and which blocks they own, is the caller's business. Input arrays are
    copied into buffers that never move, so that the kernels can be given their addresses once.
    """

    def __init__(
        self,
        packed: PackedWeights,
        ops: Ops,
        *,
        num_blocks: int,
        kv_dtype: KVDtype = "fp16",
        max_rows: int,
        max_seqs: int,
    ) -> None:
        config = packed.config
        self.config = config
        self.ops = ops
        self.max_rows = max_rows
        self.kv = ops.kv_cache(config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, kv_dtype)
        max_positions = min(config.max_context, num_blocks * BLOCK)
        self.max_blocks_per_seq = -(-max_positions // BLOCK)
        binding = Binding(packed, ops, self.kv, max_rows, max_positions)
        self.model = architecture_named(config.architecture).build(binding)
        row_seq = np.zeros(max_rows, np.int32)
        positions = np.zeros(max_rows, np.int32)
        block_tables = np.zeros((max_seqs, self.max_blocks_per_seq), np.int32)
        self._attention = AttentionBatch(row_seq, positions, block_tables)
        self._step = Step(
            rows=0,
            tokens=np.zeros(max_rows, np.int32),
            positions=positions,
            slots=np.zeros(max_rows, np.int64),
            attention=self._attention,
            logit_rows=np.zeros(max_rows, np.int32),
            num_logits=0,
        )

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache when every block has been written."""
        return self.kv.num_bytes

    def run(self, batch: Batch) -> FloatArray:
        """Computes the batch and returns logits fp32 [num_logits, vocab], in the order of `logit_rows`.

        The result is a view of the runner's buffer, valid until the next call. A batch must have at most
        `max_rows` rows and `max_seqs` sequences, and no two rows may share a slot.
        """
        step, attention = self._step, self._attention
        rows, num_logits = len(batch.tokens), len(batch.logit_rows)
        num_seqs, num_blocks = batch.block_tables.shape
        step.rows, step.num_logits = rows, num_logits
        step.tokens[:rows] = batch.tokens
        step.positions[:rows] = batch.positions
        step.slots[:rows] = batch.slots
        step.logit_rows[:num_logits] = batch.logit_rows
        attention.row_seq[:rows] = batch.row_seq
        attention.block_tables[:num_seqs, :num_blocks] = batch.block_tables
        return self.model.forward(step)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks (source, destination) in every layer, before the step that writes to a destination."""
        for source, destination in pairs:
            self.ops.copy_block(self.kv, source, destination)
