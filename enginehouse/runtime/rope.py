"""Rotary position embedding tables (arXiv:2104.09864) and the ways checkpoints stretch them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from enginehouse.runtime.config import RopeConfig

FloatArray = NDArray[np.float32]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> FloatArray:
    """Radians per token of each rotated pair, [head_dim / 2], fastest first."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.scaling == "factors":
        frequencies = frequencies / np.asarray(rope.factors)
    return frequencies.astype(np.float32)


def _llama3(frequencies: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    """Llama 3.1's stretching: full for waves longer than the old context / low_freq_factor, none for waves shorter
    than the old context / high_freq_factor, a linear ramp in turns per context between the two.
    """
    turns = rope.original_max_context * frequencies / (2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    return np.asarray(frequencies * (kept + (1 - kept) / rope.factor))


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin of every position's angles, each fp32 [num_positions, head_dim / 2].

    Angles are products of fp32 numbers, as in training: at far positions an exact product would differ from what
    the model has learned.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = (positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
