"""Every operation in numpy: the oracle of the C kernels' tests, and what runs where no compiler can be found.

int8 products are exact: a group's sum of products is below 2^24, so float32 matrix products of the integers hold
it exactly whatever order the BLAS adds in.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from enginehouse.runtime.ops.interface import Rope
from enginehouse.runtime.ops.layout import (
    BLOCK,
    Activation,
    AttentionBatch,
    KVDtype,
    KVLayer,
    KVMemory,
    LinearWeight,
    Tensor,
    unpack_linear,
    unpack_quantized,
)
from enginehouse.runtime.quantization import (
    GROUP,
    FloatArray,
    Int32Array,
    Precision,
    dequantize_weight,
    from_bf16,
    quantize_activation,
)

_ERF = np.frompyfunc(math.erf, 1, 1)


class BufferFactory:
    """The allocations that both sets of operations share."""

    def tensor(self, max_rows: int, width: int) -> Tensor:
        return Tensor(max_rows, width)

    def activation(self, max_rows: int, width: int, precision: Precision) -> Activation:
        return Activation(max_rows, width, precision)

    def kv_cache(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: KVDtype = "fp16"
    ) -> KVMemory:
        return KVMemory(num_layers, num_blocks, num_kv_heads, head_dim, dtype)

    def copy_block(self, kv: KVMemory, source: int, destination: int) -> None:
        kv.copy_block(source, destination)


class NumpyOps(BufferFactory):
    """`Ops` in numpy. Keeps a float32 copy of every int8 weight it has multiplied with: four times the memory."""

    name = "numpy"

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads

    def embed(self, tokens: Int32Array, weight: LinearWeight | FloatArray, out: Tensor, rows: int) -> None:
        tokens = tokens[:rows]
        if isinstance(weight, np.ndarray):
            out.array[:rows] = weight[tokens]
            return
        panel, lane = tokens // 16, tokens % 16
        values = weight.data[panel, :, lane].reshape(rows, -1)
        if weight.scale is None:
            out.array[:rows] = values
            return
        out.array[:rows] = dequantize_weight(values, weight.scale[panel, :, lane])[:, : weight.in_features]

    def add_rows(self, table: FloatArray, indices: Int32Array, out: Tensor, rows: int) -> None:
        out.array[:rows] += table[indices[:rows]]

    def gather_rows(self, x: Tensor, indices: Int32Array, out: Tensor, rows: int) -> None:
        out.array[:rows] = x.array[indices[:rows]]

    def rms_norm(
        self, x: Tensor, weight: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        _write(rms_normalised(x.array[:rows], weight, eps), out, rows)

    def layer_norm(
        self, x: Tensor, weight: FloatArray, bias: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        values = x.array[:rows]
        centred = values - values.mean(axis=1, keepdims=True)
        inverse = np.float32(1) / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(eps))
        _write(centred * inverse * weight + bias, out, rows)

    def prepare(self, x: Tensor, out: Activation, rows: int) -> None:
        _write(x.array[:rows], out, rows)

    def silu_mul(self, gate_up: Tensor, out: Activation, rows: int) -> None:
        gate, up = np.split(gate_up.array[:rows], 2, axis=1)
        _write(gate * _sigmoid(gate) * up, out, rows)

    def relu(self, x: Tensor, out: Activation, rows: int) -> None:
        _write(np.maximum(x.array[:rows], np.float32(0)), out, rows)

    def gelu(self, x: Tensor, out: Activation, rows: int) -> None:
        values = x.array[:rows].astype(np.float64)
        erf = np.asarray(_ERF(values / math.sqrt(2)), dtype=np.float64)
        _write((0.5 * values * (1 + erf)).astype(np.float32), out, rows)

    def gelu_new(self, x: Tensor, out: Activation, rows: int) -> None:
        values = x.array[:rows]
        inner = np.float32(2 * math.sqrt(2 / math.pi)) * (values + np.float32(0.044715) * values**3)
        _write(values * _sigmoid(inner), out, rows)

    def linear(
        self, a: Activation, weight: LinearWeight, out: Tensor, rows: int, accumulate: bool = False
    ) -> None:
        product = int8_product(a, weight, rows) if a.precision == "int8" else _fp32_product(a, weight, rows)
        if weight.bias is not None:
            product += weight.bias[: weight.out_features]
        if accumulate:
            out.array[:rows] += product
        else:
            out.array[:rows] = product

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
        heads = qkv.array[:rows].reshape(rows, num_heads + 2 * kv.num_kv_heads, kv.head_dim)
        query = heads[:, :num_heads]
        key = heads[:, num_heads : num_heads + kv.num_kv_heads]
        value = heads[:, num_heads + kv.num_kv_heads :]
        for part, norm in ((query, q_norm), (key, k_norm)):
            if norm is not None:
                part[:] = rms_normalised(part, norm, eps)
            if rope is not None:
                part[:] = _rotated(part, rope, positions[:rows])
        block, offset = slots[:rows] // BLOCK, slots[:rows] % BLOCK
        kv.k[block, :, :, offset] = key
        kv.v[block, :, offset, : kv.head_dim] = value

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
        group = num_heads // kv.num_kv_heads
        queries = qkv.array[:rows, : num_heads * kv.head_dim].reshape(
            rows, kv.num_kv_heads, group, kv.head_dim
        )
        result = out.array[:rows].reshape(rows, kv.num_kv_heads, group, kv.head_dim)
        for row in range(rows):
            length = int(batch.positions[row]) + 1
            blocks = batch.block_tables[batch.row_seq[row], : -(-length // BLOCK)]
            keys = kv.k[blocks].astype(np.float32).transpose(1, 2, 0, 3)
            keys = keys.reshape(kv.num_kv_heads, kv.head_dim, -1)[:, :, :length]
            values = kv.v[blocks][..., : kv.head_dim].astype(np.float32).transpose(1, 0, 2, 3)
            values = values.reshape(kv.num_kv_heads, -1, kv.head_dim)[:, :length]
            scores = (queries[row] * np.float32(scale)) @ keys
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            result[row] = (weights @ values) / weights.sum(axis=2, keepdims=True)


def int8_product(a: Activation, weight: LinearWeight, rows: int) -> FloatArray:
    """Σ over groups, in order, of (scale of a · scale of w) · exact integer dot product; float32 [rows, N]."""
    quantized, scale_bits = unpack_quantized(weight)
    if weight.unpacked is None:
        weight.unpacked = np.ascontiguousarray(quantized.astype(np.float32))
    scale = from_bf16(scale_bits)
    values = a.quantized[:rows].astype(np.float32)
    total = np.zeros((rows, weight.out_features), dtype=np.float32)
    for group in range(scale.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        dot = values[:, columns] @ weight.unpacked[:, columns].T
        total += (a.scale[:rows, group, None] * scale[None, :, group]) * dot
    return total


def _fp32_product(a: Activation, weight: LinearWeight, rows: int) -> FloatArray:
    if weight.unpacked is None:
        weight.unpacked = unpack_linear(weight)
    # A row at a time: a matrix product may add in another order when it has more rows.
    return np.stack([weight.unpacked @ a.values[row] for row in range(rows)])


def rms_normalised(values: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """values / sqrt(mean(values²) + eps) · weight along the last axis."""
    mean_square = (values * values).mean(axis=-1, keepdims=True)
    result: FloatArray = values * (np.float32(1) / np.sqrt(mean_square + np.float32(eps))) * weight
    return result


def _sigmoid(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):
        result: FloatArray = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def _rotated(heads: FloatArray, rope: Rope, positions: Int32Array) -> FloatArray:
    cos, sin = (table[positions][:, None, :] for table in rope)
    half = cos.shape[2]
    first, second = heads[:, :, :half], heads[:, :, half : 2 * half]
    rotated = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=2)
    return np.concatenate((rotated, heads[:, :, 2 * half :]), axis=2)


def _write(values: npt.NDArray[Any], out: Activation | Tensor, rows: int) -> None:
    if isinstance(out, Tensor):
        out.array[:rows] = values
    elif out.precision == "int8":
        out.quantized[:rows], out.scale[:rows], out.sum[:rows] = quantize_activation(values)
    else:
        out.values[:rows] = values
