"""The forward pass of BERT and its relatives: a ragged batch of whole inputs in, one vector each out.

Nothing is padded. Rows are the tokens of all inputs one after another, and no row is computed from another input's,
so an input's vector is the same bit for bit whatever it is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime.models.blocks import FloatArray, PackedWeights
from enginehouse.runtime.ops import BLOCK, Activation, AttentionBatch, KVLayer, Ops, Tensor

_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input, its special tokens included."""

    tokens: Sequence[int]
    types: Sequence[int] = ()
    """Token types; empty where all are 0."""


class _Workspace:
    """Scratch buffers, reused by all layers. Memory is touched only as far as rows are used."""

    def __init__(self, weights: PackedWeights, ops: Ops, max_rows: int, max_inputs: int) -> None:
        config, precision = weights.config, weights.precision
        self.x: Tensor = ops.tensor(max_rows, config.hidden_size)
        self.input: Activation = ops.activation(max_rows, config.hidden_size, precision)
        self.qkv: Tensor = ops.tensor(max_rows, 3 * config.hidden_size)
        self.heads: Tensor = ops.tensor(max_rows, config.hidden_size)
        self.mlp: Tensor = ops.tensor(max_rows, config.intermediate_size)
        self.inner: Activation = ops.activation(max_rows, config.intermediate_size, precision)
        # Keys and values live for one layer only, so all layers share the blocks. An input's last block may be
        # filled in part.
        num_blocks = -(-max_rows // BLOCK) + max_inputs
        self.kv: KVLayer = ops.kv_cache(1, num_blocks, config.num_kv_heads, config.head_dim, "fp32").layers[0]


@dataclass(slots=True)
class _Step:
    rows: int
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    attention: AttentionBatch


class _Layer:
    """One encoder layer, bound to its weights and the shared buffers."""

    def __init__(self, weights: PackedWeights, ops: Ops, index: int, buffers: _Workspace) -> None:
        config, name = weights.config, f"layers.{index}"
        self.ops, self.buffers = ops, buffers
        self.activate = getattr(ops, config.activation)
        self.num_heads, self.eps, self.scale = config.num_heads, config.norm_eps, config.head_dim**-0.5
        self.qkv = weights.linear(f"{name}.qkv")
        self.attention_out = weights.linear(f"{name}.attention_out")
        self.attention_norm = _norm(weights, f"{name}.attention_norm")
        self.up = weights.linear(f"{name}.up")
        self.down = weights.linear(f"{name}.down")
        self.mlp_norm = _norm(weights, f"{name}.mlp_norm")

    def forward(self, step: _Step) -> None:
        """x = norm(x + attention(x)); x = norm(x + mlp(x))."""
        ops, b, rows = self.ops, self.buffers, step.rows
        ops.prepare(b.x, b.input, rows)
        ops.linear(b.input, self.qkv, b.qkv, rows)
        ops.rope_and_store(
            b.qkv, step.positions, step.slots, None, None, None, self.eps, b.kv, self.num_heads, rows
        )
        ops.attention(b.qkv, b.kv, step.attention, self.scale, b.heads, self.num_heads, rows)
        ops.prepare(b.heads, b.input, rows)
        ops.linear(b.input, self.attention_out, b.x, rows, accumulate=True)
        ops.layer_norm(b.x, *self.attention_norm, self.eps, b.x, rows)

        ops.prepare(b.x, b.input, rows)
        ops.linear(b.input, self.up, b.mlp, rows)
        self.activate(b.mlp, b.inner, rows)
        ops.linear(b.inner, self.down, b.x, rows, accumulate=True)
        ops.layer_norm(b.x, *self.mlp_norm, self.eps, b.x, rows)


class Encoder:
    """A bound encoder. Owns its buffers: a batch holds at most `max_rows` tokens in `max_inputs` inputs.

    `dimensions` is the length of the vectors: the hidden size, or 1 for a cross-encoder's score. Raises
    `UnsupportedModelError` for a model that is no encoder.
    """

    def __init__(self, weights: PackedWeights, ops: Ops, *, max_rows: int, max_inputs: int) -> None:
        config = weights.config
        if config.encoder is None:
            raise UnsupportedModelError(f"{config.architecture} is no encoder: it has no embeddings to give")
        self.config, self.encoder, self.ops = config, config.encoder, ops
        self.max_rows, self.max_inputs = max_rows, max_inputs
        self._embed = weights.tensor("embed")
        self._positions = weights.tensor("positions")[config.position_offset :]
        self._types = weights.tensor("types")
        self._embed_norm = _norm(weights, "embed_norm")
        self._buffers = _Workspace(weights, ops, max_rows, max_inputs)
        self._layers = [_Layer(weights, ops, index, self._buffers) for index in range(config.num_layers)]
        self._head = None if config.encoder.head == "none" else _Head(weights, ops, max_inputs)
        self.dimensions = config.hidden_size if self._head is None else 1

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        """Vectors fp32 [inputs, dimensions] of the caller's own, in order; a cross-encoder gives logits.

        Every input has 1 to `EncoderConfig.max_input` tokens of the vocabulary, and types below `num_token_types`.
        Raises IndexError for others and ValueError for too large a batch.
        """
        lengths = [len(item.tokens) for item in inputs]
        if sum(lengths) > self.max_rows or len(inputs) > self.max_inputs or not all(lengths):
            raise ValueError(
                f"{len(inputs)} inputs of {lengths} tokens; room for {self.max_inputs} of {self.max_rows}"
            )
        step = _step(lengths)
        self._embed_tokens(inputs, step)
        for layer in self._layers:
            layer.forward(step)
        ends = np.cumsum(lengths)
        if self._head is not None:
            return self._head.forward(self._buffers.x, (ends - lengths).astype(np.int32))
        hidden = self._buffers.x.array
        return np.stack([self._pooled(hidden[end - n : end]) for n, end in zip(lengths, ends, strict=True)])

    def _embed_tokens(self, inputs: Sequence[EncoderInput], step: _Step) -> None:
        ops, b, rows = self.ops, self._buffers, step.rows
        tokens = np.array([token for item in inputs for token in item.tokens], np.int32)
        types = np.array([kind for item in inputs for kind in item.types or [0] * len(item.tokens)], np.int32)
        ops.embed(tokens, self._embed, b.x, rows)
        ops.add_rows(self._types, types, b.x, rows)
        ops.add_rows(self._positions, step.positions, b.x, rows)
        ops.layer_norm(b.x, *self._embed_norm, self.config.norm_eps, b.x, rows)

    def _pooled(self, hidden: FloatArray) -> FloatArray:
        """One vector [hidden] of an input's last hidden states [tokens, hidden]."""
        if self.encoder.pooling == "cls":
            vector = hidden[0].astype(np.float64)
        else:
            vector = hidden.sum(axis=0, dtype=np.float64) / len(hidden)
        if self.encoder.normalize:
            vector /= max(float(np.sqrt(np.square(vector).sum())), _SMALLEST_NORM)
        pooled: FloatArray = vector.astype(np.float32)
        return pooled


class _Head:
    """A cross-encoder's last two layers on the first token: projection(tanh(dense(x)))."""

    def __init__(self, weights: PackedWeights, ops: Ops, max_inputs: int) -> None:
        hidden = weights.config.hidden_size
        self.ops = ops
        self.dense, self.out = weights.linear("head.dense"), weights.linear("head.out")
        self.rows = ops.tensor(max_inputs, hidden)
        self.input = ops.activation(max_inputs, hidden, weights.precision)
        self.logits = ops.tensor(max_inputs, 1)

    def forward(self, x: Tensor, first_rows: NDArray[np.int32]) -> FloatArray:
        """Logits [inputs, 1] from the hidden states at `first_rows`."""
        count = len(first_rows)
        self.ops.gather_rows(x, first_rows, self.rows, count)
        self.ops.prepare(self.rows, self.input, count)
        self.ops.linear(self.input, self.dense, self.rows, count)
        np.tanh(self.rows.array[:count], out=self.rows.array[:count])
        self.ops.prepare(self.rows, self.input, count)
        self.ops.linear(self.input, self.out, self.logits, count)
        return self.logits.array[:count].copy()


def _norm(weights: PackedWeights, name: str) -> tuple[FloatArray, FloatArray]:
    return weights.tensor(f"{name}.weight"), weights.tensor(f"{name}.bias")


def _step(lengths: list[int]) -> _Step:
    """Where each row stands; every input gets the next free blocks."""
    num_blocks = [-(-length // BLOCK) for length in lengths]
    tables = np.zeros((len(lengths), max(num_blocks)), np.int32)
    first = 0
    for line, count in zip(tables, num_blocks, strict=True):
        line[:count] = np.arange(first, first + count)
        first += count
    row_seq = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    slots = tables[row_seq, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    # Each row sees its whole input: up to the last position of it.
    last = np.repeat(np.array(lengths, np.int32) - 1, lengths).astype(np.int32)
    return _Step(len(positions), positions, slots, AttentionBatch(row_seq, last, tables))
