"""How tensors, weights and the KV cache lie in memory. Numpy reference and C kernels read the same bytes.

A linear layer's weight is cut into panels of 16 outputs, because 16 fp32 accumulators are one AVX-512, two AVX2 or
four NEON registers:

* int8: `data` int8 [N/16, Kpad/4, 16, 4] (four inputs of each of 16 outputs are 64 bytes, what one dot-product
  instruction eats) and `scale` bfloat16 bits [N/16, Kpad/64, 16].
* fp32: `data` float32 [N/16, K, 16].

N is padded to 16 and, for int8, K to 64, with zeros.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from enginehouse.runtime.quantization import (
    GROUP,
    FloatArray,
    Precision,
    dequantize_weight,
    quantize_weight,
    round_up,
)

LAYOUT_VERSION = 3
"""Changes whenever the bytes `pack_linear` makes change; cached packed models carry it."""
PANEL = 16
"""Outputs of a linear layer that are computed together."""
BLOCK = 32
"""Tokens in one KV block."""
ALIGNMENT_BYTES = 64
KVDtype = Literal["fp16", "fp32"]

__all__ = [
    "BLOCK",
    "GROUP",
    "LAYOUT_VERSION",
    "PANEL",
    "Activation",
    "AttentionBatch",
    "KVLayer",
    "KVMemory",
    "LinearWeight",
    "Tensor",
    "pack_linear",
    "unpack_linear",
]


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros on a cache-line boundary."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of a C-contiguous array's first byte."""
    if not array.flags.c_contiguous:
        raise ValueError(f"array of shape {array.shape} is not C-contiguous")
    return int(array.ctypes.data)


class Tensor:
    """A float32 activation buffer [max_rows, width]; operations use its first `rows` rows."""

    __slots__ = ("array", "max_rows", "ptr", "width")

    def __init__(self, max_rows: int, width: int) -> None:
        self.array: FloatArray = aligned_zeros((max_rows, width), np.float32)
        self.max_rows = max_rows
        self.width = width
        self.ptr = address_of(self.array)


class ActivationStruct(ctypes.Structure):
    """`struct activation` of kernels/ops.h."""

    _fields_ = (
        ("quantized", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
    )


class Activation:
    """The input of a linear layer, in the form its kernels want.

    int8: `quantized` int8 [max_rows, Kpad], `scale` float32 and `sum` int32 [max_rows, Kpad/64] (`sum` is the sum
    of a group's int8 values: it undoes the +128 of unsigned dot-product instructions). `wide` is for AVX2 kernels:
    the int8 values again as int16, in another order; elsewhere it is never touched and takes no memory.
    fp32: `values` float32 [max_rows, K].
    """

    __slots__ = (
        "max_rows",
        "precision",
        "ptr",
        "quantized",
        "scale",
        "struct",
        "sum",
        "values",
        "wide",
        "width",
    )

    def __init__(self, max_rows: int, width: int, precision: Precision) -> None:
        self.max_rows = max_rows
        self.width = width
        self.precision = precision
        padded = round_up(width, GROUP)
        is_int8 = precision == "int8"
        rows = max_rows if is_int8 else 0
        self.quantized = aligned_zeros((rows, padded), np.int8)
        self.wide = aligned_zeros((rows, padded), np.int16)
        self.scale: FloatArray = aligned_zeros((rows, padded // GROUP), np.float32)
        self.sum = aligned_zeros((rows, padded // GROUP), np.int32)
        self.values: FloatArray = aligned_zeros((0 if is_int8 else max_rows, width), np.float32)
        self.struct = ActivationStruct(
            address_of(self.quantized) if is_int8 else None,
            address_of(self.wide),
            address_of(self.scale),
            address_of(self.sum),
            None if is_int8 else address_of(self.values),
            width,
            padded // GROUP,
        )
        self.ptr = ctypes.addressof(self.struct)


class LinearStruct(ctypes.Structure):
    """`struct linear_weight` of kernels/ops.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("is_int8", ctypes.c_int64),
    )


class LinearWeight:
    """A packed weight [out_features, in_features] with an optional bias. Holds views, copies only the bias.

    Raises ValueError when the arrays do not have the packed shapes and types.
    """

    __slots__ = (
        "bias",
        "data",
        "in_features",
        "out_features",
        "precision",
        "ptr",
        "scale",
        "struct",
        "unpacked",
    )

    def __init__(
        self,
        data: npt.NDArray[Any],
        scale: npt.NDArray[np.uint16] | None,
        bias: FloatArray | None,
        out_features: int,
        in_features: int,
        precision: Precision,
    ) -> None:
        expected = packed_shapes(out_features, in_features, precision)
        arrays = {"data": data} if scale is None else {"data": data, "scale": scale}
        found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if found != expected:
            raise ValueError(f"packed {precision} weight is {found}, expected {expected}")
        if bias is not None and bias.shape != (out_features,):
            raise ValueError(f"bias is {bias.shape}, expected ({out_features},)")
        self.data = data
        self.scale = scale
        self.out_features = out_features
        self.in_features = in_features
        self.precision = precision
        self.bias: FloatArray | None = None
        if bias is not None:
            self.bias = aligned_zeros((round_up(out_features, PANEL),), np.float32)
            self.bias[:out_features] = bias
        self.unpacked: FloatArray | None = None
        """The numpy reference's own unpacked copy, made at first use."""
        self.struct = LinearStruct(
            address_of(data),
            None if scale is None else address_of(scale),
            None if self.bias is None else address_of(self.bias),
            out_features,
            in_features,
            int(precision == "int8"),
        )
        self.ptr = ctypes.addressof(self.struct)

    @classmethod
    def from_float(
        cls, weight: FloatArray, precision: Precision, bias: FloatArray | None = None
    ) -> LinearWeight:
        """Pack a float32 weight [N, K] in memory."""
        arrays = pack_linear(weight, precision)
        return cls(arrays["data"], arrays.get("scale"), bias, weight.shape[0], weight.shape[1], precision)


def packed_shapes(
    out_features: int, in_features: int, precision: Precision
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Name to (shape, dtype) of the arrays `pack_linear` makes for a weight [out_features, in_features]."""
    num_panels = round_up(out_features, PANEL) // PANEL
    if precision == "fp32":
        return {"data": ((num_panels, in_features, PANEL), np.dtype(np.float32))}
    padded = round_up(in_features, GROUP)
    return {
        "data": ((num_panels, padded // 4, PANEL, 4), np.dtype(np.int8)),
        "scale": ((num_panels, padded // GROUP, PANEL), np.dtype(np.uint16)),
    }


def _pad_outputs(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    missing = -rows.shape[0] % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def pack_linear(weight: FloatArray, precision: Precision) -> dict[str, npt.NDArray[Any]]:
    """Weight [N, K] to the arrays to store: {"data", "scale"} for int8, {"data"} for fp32. Contiguous."""
    if precision == "fp32":
        panels = _pad_outputs(weight.astype(np.float32, copy=False)).reshape(-1, PANEL, weight.shape[1])
        return {"data": np.ascontiguousarray(panels.transpose(0, 2, 1))}
    quantized, scale = (_pad_outputs(part) for part in quantize_weight(weight))
    data = quantized.reshape(-1, PANEL, quantized.shape[1] // 4, 4).transpose(0, 2, 1, 3)
    scales = scale.reshape(-1, PANEL, scale.shape[1]).transpose(0, 2, 1)
    return {"data": np.ascontiguousarray(data), "scale": np.ascontiguousarray(scales)}


def unpack_quantized(weight: LinearWeight) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint16]]:
    """The int8 values [N, Kpad] and bfloat16 scales [N, Kpad/64] inside a packed int8 weight."""
    assert weight.scale is not None
    num_panels, quarters = weight.data.shape[:2]
    quantized = weight.data.transpose(0, 2, 1, 3).reshape(num_panels * PANEL, quarters * 4)
    scale = weight.scale.transpose(0, 2, 1).reshape(num_panels * PANEL, -1)
    return quantized[: weight.out_features], scale[: weight.out_features]


def unpack_linear(weight: LinearWeight) -> FloatArray:
    """The float32 weight [N, K] that a packed weight stands for."""
    if weight.precision == "fp32":
        rows = weight.data.transpose(0, 2, 1).reshape(-1, weight.in_features)[: weight.out_features]
        return np.ascontiguousarray(rows)
    quantized, scale = unpack_quantized(weight)
    return np.ascontiguousarray(dequantize_weight(quantized, scale)[:, : weight.in_features])


class KVStruct(ctypes.Structure):
    """`struct kv_layer` of kernels/ops.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("padded_dim", ctypes.c_int64),
        ("is_half", ctypes.c_int64),
    )


class KVLayer:
    """One layer's cache: `k` [num_blocks, kv_heads, head_dim, 32] and `v` [num_blocks, kv_heads, 32, padded_dim].

    Attention multiplies 32 keys by one query component, then one value row by one probability: these layouts
    let both run on whole vectors without a shuffle. `padded_dim` is head_dim rounded up to 16.
    """

    __slots__ = ("head_dim", "k", "num_blocks", "num_kv_heads", "padded_dim", "ptr", "struct", "v")

    def __init__(self, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        self.k = k
        self.v = v
        self.num_blocks, self.num_kv_heads, self.head_dim, _ = k.shape
        self.padded_dim = v.shape[3]
        self.struct = KVStruct(
            address_of(k),
            address_of(v),
            self.num_blocks,
            self.num_kv_heads,
            self.head_dim,
            self.padded_dim,
            int(k.dtype == np.float16),
        )
        self.ptr = ctypes.addressof(self.struct)


class KVMemory:
    """All layers' KV blocks, in one anonymous mapping: pages cost memory only once a block has been written."""

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: KVDtype = "fp16"
    ) -> None:
        element = np.dtype(np.float16 if dtype == "fp16" else np.float32)
        padded_dim = round_up(head_dim, 16)
        k_shape = (num_blocks, num_kv_heads, head_dim, BLOCK)
        v_shape = (num_blocks, num_kv_heads, BLOCK, padded_dim)
        k_bytes = round_up(int(np.prod(k_shape, dtype=np.int64)) * element.itemsize, ALIGNMENT_BYTES)
        v_bytes = round_up(int(np.prod(v_shape, dtype=np.int64)) * element.itemsize, ALIGNMENT_BYTES)
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.num_bytes = num_layers * (k_bytes + v_bytes)
        self._memory = np.frombuffer(mmap.mmap(-1, max(self.num_bytes, 1)), dtype=np.uint8)
        self.layers: list[KVLayer] = []
        for layer in range(num_layers):
            start = layer * (k_bytes + v_bytes)
            self.layers.append(
                KVLayer(self._view(start, k_shape, element), self._view(start + k_bytes, v_shape, element))
            )

    def _view(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._memory[start : start + size].view(dtype).reshape(shape)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block's keys and values in every layer (copy-on-write)."""
        for layer in self.layers:
            layer.k[destination] = layer.k[source]
            layer.v[destination] = layer.v[source]


class BatchStruct(ctypes.Structure):
    """`struct attention_batch` of kernels/ops.h."""

    _fields_ = (
        ("row_seq", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("max_blocks", ctypes.c_int64),
    )


@dataclass(slots=True, init=False)
class AttentionBatch:
    """Which tokens each query row sees: row i belongs to sequence `row_seq[i]` and attends to its positions
    0..`positions[i]` inclusive, found through `block_tables[row_seq[i]]`. Rows of one sequence that stand next
    to each other with positions that do not fall are computed together, which saves time and changes no bit.
    An encoder, whose tokens see each other both ways, gives all rows of a sequence its last position."""

    row_seq: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    struct: BatchStruct
    ptr: int

    def __init__(
        self,
        row_seq: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
    ) -> None:
        self.row_seq = np.ascontiguousarray(row_seq, dtype=np.int32)
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        self.block_tables = np.ascontiguousarray(block_tables, dtype=np.int32)
        self.struct = BatchStruct(
            address_of(self.row_seq),
            address_of(self.positions),
            address_of(self.block_tables),
            self.block_tables.shape[1],
        )
        self.ptr = ctypes.addressof(self.struct)
