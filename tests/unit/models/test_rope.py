from __future__ import annotations

import numpy as np
import pytest

from enginehouse.runtime.config import RopeConfig
from enginehouse.runtime.rope import inverse_frequencies, rope_tables


def test_plain_frequencies_fall_from_one_by_powers_of_theta() -> None:
    np.testing.assert_allclose(
        inverse_frequencies(RopeConfig(theta=10000.0), 8), [1.0, 0.1, 0.01, 0.001], rtol=1e-6
    )


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(), 64)
    stretched = inverse_frequencies(RopeConfig(scaling="linear", factor=4.0), 64)
    np.testing.assert_allclose(stretched, plain / 4, rtol=1e-6)


def test_llama3_keeps_fast_waves_and_divides_slow_ones() -> None:
    rope = RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_context=8192,
    )
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    stretched = inverse_frequencies(rope, 128)
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(stretched[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(stretched[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (np.diff(stretched) < 0).all()
    ramp = (turns[between] - 1) / 3
    np.testing.assert_allclose(stretched[between], plain[between] * (ramp + (1 - ramp) / 8), rtol=1e-5)


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(), 4)
    stretched = inverse_frequencies(RopeConfig(scaling="factors", factors=(1.0, 8.0)), 4)
    np.testing.assert_allclose(stretched, plain / [1.0, 8.0], rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 31, 999])
def test_tables_hold_cosine_and_sine_of_position_times_frequency(position: int) -> None:
    cos, sin = rope_tables(RopeConfig(), 16, 1000)
    assert cos.shape == sin.shape == (1000, 8)
    assert cos.dtype == sin.dtype == np.float32
    angles = position * inverse_frequencies(RopeConfig(), 16).astype(np.float64)
    np.testing.assert_allclose(cos[position], np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin[position], np.sin(angles), atol=1e-4)
