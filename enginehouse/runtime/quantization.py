"""Symmetric int8 quantisation in rotated groups of 64, for weights (once, when packing) and activations (every step).

One scale a group keeps an outlier channel from ruining its whole row. Within the group the outlier would still
decide everyone's step, so both sides of a product are first multiplied by the same orthonormal matrix, which
spreads it and leaves the product as it was: (xH)(wH)ᵀ = xwᵀ. (The idea is QuaRot's, arXiv:2404.00456; a group at a
time it costs a few instructions.) docs/quality.md has what each step is worth. Values stay in [-127, 127]: -128
would overflow the `maddubs(abs(w), sign(a, w))` product of AVX2.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
UInt16Array = npt.NDArray[np.uint16]
Precision = Literal["int8", "fp32"]

GROUP = 64
"""Values along the input dimension that share a scale."""
MAX_INT8 = 127
_SIGN_BITS = 0x9E3779B97F4A7C15
SIGNS: FloatArray = np.array([-1 if _SIGN_BITS >> i & 1 else 1 for i in range(GROUP)], dtype=np.float32)
"""Random signs, fixed for ever (the golden ratio's digits): without them a group of equal values would be rotated
into a single outlier."""
_GROUPS_AT_ONCE = 1024
"""Their values fit into a processor's second cache."""
SMALLEST_MAXIMUM = np.float32(1e-30)
"""A group whose largest magnitude is below this is all zero: its inverse scale would not be finite."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def pad_last(values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Zeros appended along the last axis up to `width`."""
    missing = width - values.shape[-1]
    if missing == 0:
        return values
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])


def rotate(values: FloatArray) -> FloatArray:
    """Groups [..., 64] times the matrix that spreads outliers: `SIGNS`, then the Walsh-Hadamard matrix."""
    return _hadamard(values * SIGNS)


def unrotate(values: FloatArray) -> FloatArray:
    """The inverse of `rotate`; exact but for rounding."""
    return _hadamard(values) * SIGNS


def _hadamard(values: FloatArray) -> FloatArray:
    """Groups [..., 64] times the orthonormal Walsh-Hadamard matrix, which is its own inverse.

    Six rounds of sums and differences in the kernels' order, so that both give the same bits.
    """
    groups = np.asarray(values, dtype=np.float32).reshape(-1, GROUP)
    result = np.empty_like(groups)
    for start in range(0, len(groups), _GROUPS_AT_ONCE):
        columns = np.ascontiguousarray(groups[start : start + _GROUPS_AT_ONCE].T)
        for distance in (32, 16, 8, 4, 2, 1):
            pairs = columns.reshape(-1, 2, distance, columns.shape[1])
            combined = np.empty_like(pairs)
            np.add(pairs[:, 0], pairs[:, 1], out=combined[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=combined[:, 1])
            columns = combined.reshape(columns.shape)
        result[start : start + _GROUPS_AT_ONCE] = columns.T
    result *= np.float32(1 / math.sqrt(GROUP))
    return result.reshape(values.shape)


def to_bf16_up(values: FloatArray) -> UInt16Array:
    """Non-negative float32 to bfloat16 bits, rounded towards infinity, so a scale never gets smaller."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: UInt16Array) -> FloatArray:
    """bfloat16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize_weight(weight: FloatArray) -> tuple[Int8Array, UInt16Array]:
    """Weight [N, K] to int8 [N, Kpad] and bfloat16 scales [N, Kpad/64].

    The scale is rounded up to bfloat16 first and the values are quantised with the rounded one, so the largest
    value of a group still fits in 127 and the rounding of the scale adds no error.
    """
    num_outputs, width = weight.shape
    padded = round_up(width, GROUP)
    groups = rotate(pad_last(weight, padded).reshape(num_outputs, padded // GROUP, GROUP))
    maximum = np.abs(groups).max(axis=2)
    maximum[maximum < SMALLEST_MAXIMUM] = 0
    scale_bits = to_bf16_up(maximum / np.float32(MAX_INT8))
    scale = from_bf16(scale_bits)
    safe = np.where(scale > 0, scale, np.float32(np.inf))
    quantized = np.rint(groups / safe[:, :, None]).astype(np.int8)
    return quantized.reshape(num_outputs, padded), scale_bits


def dequantize_weight(quantized: Int8Array, scale_bits: UInt16Array) -> FloatArray:
    """The float32 values [N, Kpad] that int8 [N, Kpad] and bfloat16 scales [N, Kpad/64] stand for."""
    groups = quantized.astype(np.float32).reshape(len(quantized), -1, GROUP)
    return unrotate(groups * from_bf16(scale_bits)[:, :, None]).reshape(quantized.shape)


def quantize_activation(values: FloatArray) -> tuple[Int8Array, FloatArray, Int32Array]:
    """Rows [M, K] to int8 [M, Kpad], float32 scales [M, Kpad/64] and int32 group sums [M, Kpad/64].

    A group that holds a NaN or an infinity becomes zeros with a NaN scale, so the fault reaches the logits of
    its own row and nothing else.
    """
    num_rows, width = values.shape
    padded = round_up(width, GROUP)
    with np.errstate(invalid="ignore", over="ignore"):
        groups = rotate(pad_last(values, padded).reshape(num_rows, padded // GROUP, GROUP))
    maximum = np.abs(groups).max(axis=2)
    finite = np.isfinite(maximum)
    usable = finite & (maximum >= SMALLEST_MAXIMUM)
    safe = np.where(usable, maximum, np.float32(1))
    inverse = np.where(usable, np.float32(MAX_INT8) / safe, np.float32(0))
    scale = np.where(
        usable, safe * np.float32(1 / MAX_INT8), np.where(finite, np.float32(0), np.float32(np.nan))
    )
    with np.errstate(invalid="ignore"):
        scaled = np.where(usable[:, :, None], groups * inverse[:, :, None], np.float32(0))
    quantized = np.rint(scaled).astype(np.int8)
    sums = quantized.sum(axis=2, dtype=np.int32)
    return quantized.reshape(num_rows, padded), scale.astype(np.float32), sums
