from __future__ import annotations

import numpy as np
import pytest

from enginehouse.runtime.ops import KVMemory, LinearWeight, pack_linear, unpack_linear
from enginehouse.runtime.quantization import (
    dequantize_weight,
    from_bf16,
    pad_last,
    quantize_activation,
    quantize_weight,
    rotate,
    to_bf16_up,
    unrotate,
)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_bfloat16_scales_round_up_and_never_down():
    values = np.abs(random(1000)) * np.float32(1e-3)
    rounded = from_bf16(to_bf16_up(values))
    assert (rounded >= values).all()
    assert (rounded <= values * np.float32(1 + 2**-7)).all()
    exact = np.array([0.0, 1.0, 0.5, 2**-20], dtype=np.float32)
    assert (from_bf16(to_bf16_up(exact)) == exact).all()


def test_rotation_is_orthonormal_and_undone_by_its_inverse():
    matrix = rotate(np.eye(64, dtype=np.float32))
    assert (np.abs(matrix) == 0.125).all()
    assert (matrix @ matrix.T == np.eye(64)).all()
    values = random(5, 3, 64)
    assert np.allclose(rotate(values), values @ matrix, atol=1e-5)
    assert np.allclose(unrotate(rotate(values)), values, atol=1e-5)


@pytest.mark.parametrize("num_groups", [1, 1023, 1025, 3000])
def test_groups_are_rotated_on_their_own(num_groups):
    values = random(num_groups, 64)
    alone = np.concatenate([rotate(group) for group in (values[:1], values[-1:])])
    assert (rotate(values)[[0, -1]] == alone).all()


def test_equal_values_become_no_outlier():
    rotated = rotate(np.ones((1, 64), np.float32))
    assert np.abs(rotated).max() < 3
    assert (rotated**2).sum() == pytest.approx(64)


def test_rotated_weight_error_is_at_most_half_a_step_of_its_own_group():
    weight = random(20, 130)
    weight[3, 70] = 100  # an outlier must not touch the other groups of its row
    quantized, scale = quantize_weight(weight)
    assert quantized.min() >= -127
    exact = rotate(pad_last(weight, 192).reshape(20, 3, 64))
    step = from_bf16(scale)[:, :, None]
    assert (np.abs(quantized.reshape(20, 3, 64) * step - exact) <= step * 0.5001).all()
    assert step[3, 0] < 0.05
    restored = dequantize_weight(quantized, scale)
    assert np.abs(restored[:, :130] - weight).max() < 0.2
    assert np.abs(restored[:, 130:]).max() < 0.2


def test_an_outlier_costs_its_group_less_than_without_rotation():
    x = random(200, 64)
    x[:, 9] *= 20
    quantized, scale, _ = quantize_activation(x)
    error = unrotate(quantized * scale) - x
    plain_scale = np.abs(x).max(axis=1, keepdims=True) / 127
    plain_error = np.rint(x / plain_scale) * plain_scale - x
    assert (error**2).mean() < 0.3 * (plain_error**2).mean()


def test_zero_weights_and_zero_activations_stay_zero():
    quantized, scale = quantize_weight(np.zeros((2, 64), np.float32))
    assert not quantized.any()
    assert not scale.any()
    values, scale, sums = quantize_activation(np.zeros((2, 64), np.float32))
    assert not values.any()
    assert not scale.any()
    assert not sums.any()


def test_a_group_with_nan_or_infinity_gets_a_nan_scale_and_its_neighbours_do_not():
    x = random(3, 192)
    x[0, 70], x[1, 5] = np.nan, np.inf
    quantized, scale, sums = quantize_activation(x)
    assert np.isnan(scale).tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    assert not quantized[0, 64:128].any()
    assert sums[0, 1] == 0


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (40, 100), (1, 3), (17, 65)])
def test_packing_fp32_loses_nothing(outputs, inputs):
    weight = random(outputs, inputs)
    assert (unpack_linear(LinearWeight.from_float(weight, "fp32")) == weight).all()


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (40, 100), (1, 3), (17, 65)])
def test_packing_int8_keeps_exactly_the_quantised_values(outputs, inputs):
    weight = random(outputs, inputs)
    expected = dequantize_weight(*quantize_weight(weight))[:, :inputs]
    assert (unpack_linear(LinearWeight.from_float(weight, "int8")) == expected).all()


def test_packed_int8_bytes_are_sixteen_outputs_by_four_inputs():
    weight = np.zeros((32, 2, 64), np.float32)
    weight[18, 1, 6] = 1.0
    weight = unrotate(weight).reshape(32, 128)
    arrays = pack_linear(weight, "int8")
    assert arrays["data"].shape == (2, 32, 16, 4)
    assert arrays["data"][1, 17, 2, 2] > 100
    assert np.count_nonzero(arrays["data"]) == 1


def test_wrong_shapes_are_refused():
    arrays = pack_linear(random(16, 64), "int8")
    with pytest.raises(ValueError, match="expected"):
        LinearWeight(arrays["data"], arrays["scale"], None, 16, 128, "int8")
    with pytest.raises(ValueError, match="bias"):
        LinearWeight(arrays["data"], arrays["scale"], random(15), 16, 64, "int8")


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_kv_memory_starts_as_zeros_and_copies_blocks_in_every_layer(dtype):
    memory = KVMemory(3, 5, 2, 24, dtype)
    for index, layer in enumerate(memory.layers):
        assert layer.k.shape == (5, 2, 24, 32)
        assert layer.v.shape == (5, 2, 32, 32)
        assert not layer.k.any()
        layer.k[1], layer.v[1] = index + 1, -index - 1
    memory.copy_block(1, 4)
    for index, layer in enumerate(memory.layers):
        assert (layer.k[4] == index + 1).all()
        assert (layer.v[4] == -index - 1).all()
        assert not layer.k[3].any()
