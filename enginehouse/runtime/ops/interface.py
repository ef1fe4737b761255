"""What a set of operations offers; the numpy reference and the C kernels both implement it.

Buffers are preallocated with `max_rows`; an operation reads and writes their first `rows` rows. A row's result
never depends on the other rows, on `rows`, or on the number of threads: it is the same bit for bit.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from enginehouse.runtime.ops.layout import (
    Activation,
    AttentionBatch,
    KVDtype,
    KVLayer,
    KVMemory,
    LinearWeight,
    Tensor,
)
from enginehouse.runtime.quantization import FloatArray, Int32Array, Precision

Rope = tuple[FloatArray, FloatArray]
"""Cosines and sines, float32 [max_positions, rotary_dim / 2]."""


class Ops(Protocol):
    """The operations a model is made of."""

    name: str
    """`native (avx512vnni)`, `numpy`: for logs and reports."""
    num_threads: int

    def tensor(self, max_rows: int, width: int) -> Tensor:
        """A float32 buffer [max_rows, width]."""
        ...

    def activation(self, max_rows: int, width: int, precision: Precision) -> Activation:
        """The input buffer of linear layers with `width` inputs."""
        ...

    def kv_cache(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: KVDtype = "fp16"
    ) -> KVMemory:
        """KV blocks for all layers, committed by the system as they are written."""
        ...

    def copy_block(self, kv: KVMemory, source: int, destination: int) -> None:
        """Copy one block in every layer."""
        ...

    def embed(self, tokens: Int32Array, weight: LinearWeight | FloatArray, out: Tensor, rows: int) -> None:
        """out[i] = the embedding of tokens[i], from a table [V, H] or from the packed output matrix."""
        ...

    def add_rows(self, table: FloatArray, indices: Int32Array, out: Tensor, rows: int) -> None:
        """out[i] += table[indices[i]] (learned positions); table float32 [P, H]."""
        ...

    def gather_rows(self, x: Tensor, indices: Int32Array, out: Tensor, rows: int) -> None:
        """out[i] = x[indices[i]] for `rows` indices."""
        ...

    def rms_norm(
        self, x: Tensor, weight: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        """out = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019)."""
        ...

    def layer_norm(
        self, x: Tensor, weight: FloatArray, bias: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        """out = (x − mean) / sqrt(var + eps) · weight + bias (Ba et al. 2016)."""
        ...

    def prepare(self, x: Tensor, out: Activation, rows: int) -> None:
        """Turn plain values into the input of a linear layer."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Activation, rows: int) -> None:
        """out = silu(gate) · up, where gate_up is [rows, 2F] with the gate first (SwiGLU, Shazeer 2020)."""
        ...

    def relu(self, x: Tensor, out: Activation, rows: int) -> None:
        """out = max(x, 0)."""
        ...

    def gelu(self, x: Tensor, out: Activation, rows: int) -> None:
        """out = x · Φ(x), with the error function."""
        ...

    def gelu_new(self, x: Tensor, out: Activation, rows: int) -> None:
        """out = the tanh approximation of gelu (GPT-2's)."""
        ...

    def linear(
        self, a: Activation, weight: LinearWeight, out: Tensor, rows: int, accumulate: bool = False
    ) -> None:
        """out = a · weightᵀ + bias, or out += … with `accumulate` (residual)."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        positions: Int32Array,
        slots: npt.NDArray[np.int64],
        rope: Rope | None,
        q_norm: FloatArray | None,
        k_norm: FloatArray | None,
        eps: float,
        kv: KVLayer,
        num_heads: int,
        rows: int,
    ) -> None:
        """Normalise q and k per head when norms are given, rotate them (half rotation, Su et al. 2021) when `rope`
        is given, and write k and v into the cache at slot = block · 32 + offset. q stays in `qkv`, rotated;
        k in `qkv` is left unspecified. qkv is [rows, (num_heads + 2 · kv_heads) · head_dim].
        """
        ...

    def attention(
        self,
        qkv: Tensor,
        kv: KVLayer,
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        num_heads: int,
        rows: int,
    ) -> None:
        """Attention of each row's queries over its sequence's cached tokens up to the position the batch gives for
        the row (its own: causal; the sequence's last: both ways); out [rows, heads · head_dim].

        Online softmax over KV blocks in order (Milakov and Gimelshein 2018). Values beyond a row's position are
        never used, so a reused block may hold anything.
        """
        ...
