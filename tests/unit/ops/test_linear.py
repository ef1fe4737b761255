from __future__ import annotations

import numpy as np
import pytest

from enginehouse.runtime.ops import Activation, LinearWeight, NumpyOps, Ops, Tensor
from enginehouse.runtime.quantization import quantize_activation, unrotate
from tests.unit.ops.conftest import fused_isas, native

SHAPES = [(16, 64), (48, 128), (37, 100), (5, 3), (576, 576), (130, 1536)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def prepared(ops: Ops, values: np.ndarray, precision: str) -> Activation:
    x = ops.tensor(*values.shape)
    x.array[:] = values
    activation = ops.activation(*values.shape, precision)
    ops.prepare(x, activation, len(values))
    return activation


def product(
    ops: Ops, a: Activation, weight: LinearWeight, rows: int, start: np.ndarray | None = None
) -> np.ndarray:
    out = Tensor(rows, weight.out_features)
    out.array[:] = np.nan if start is None else start
    ops.linear(a, weight, out, rows, accumulate=start is not None)
    return out.array.copy()


def unrotated(integers: np.ndarray) -> np.ndarray:
    """Floats [rows, width] that quantisation rotates into exactly these integers; width is a multiple of 64."""
    return unrotate(integers.astype(np.float32).reshape(len(integers), -1, 64)).reshape(integers.shape)


def integer_weight(outputs: int, inputs: int) -> LinearWeight:
    """A weight whose int8 values have scale 1, and every group of which reaches ±127."""
    values = np.random.default_rng(1).integers(-127, 128, (outputs, inputs))
    values[:, ::64] = 127
    weight = LinearWeight.from_float(unrotated(values), "int8")
    assert weight.scale is not None
    assert set(np.unique(weight.scale)) <= {0, 0x3F80}
    return weight


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_quantised_inputs_are_the_reference_s_to_the_bit(kernels, reference, outputs, inputs):
    values = random(9, inputs) * 10
    mine, expected = prepared(kernels, values, "int8"), prepared(reference, values, "int8")
    assert (mine.quantized == expected.quantized).all()
    assert (mine.scale == expected.scale).all()
    assert (mine.sum == expected.sum).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (37, 128), (130, 192)])
def test_integer_products_are_exact(kernels, rows, outputs, inputs):
    weight = integer_weight(outputs, inputs)
    values = np.random.default_rng(2).integers(-127, 128, (rows, inputs))
    values[:, ::64] = -127
    a = prepared(kernels, unrotated(values), "int8")
    assert (a.scale == 1).all()
    assert (a.quantized == values).all()
    exact = a.quantized.astype(np.int64) @ weight_values(weight).T
    assert (product(kernels, a, weight, rows) == exact.astype(np.float32)).all()


def weight_values(weight: LinearWeight) -> np.ndarray:
    panels, quarters = weight.data.shape[:2]
    rows = weight.data.transpose(0, 2, 1, 3).reshape(panels * 16, quarters * 4).astype(np.int64)
    return rows[: weight.out_features, : weight.in_features]


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_values_do_not_saturate(kernels, sign):
    weight = LinearWeight.from_float(unrotated(np.full((16, 64), 127)), "int8")
    a = prepared(kernels, unrotated(np.full((3, 64), sign * 127)), "int8")
    assert (a.quantized == sign * 127).all()
    assert product(kernels, a, weight, 3) == pytest.approx(sign * 64 * 127 * 127)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("rows", [1, 4, 7, 17])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_match_the_reference(kernels, reference, precision, rows, outputs, inputs):
    weight = LinearWeight.from_float(random(outputs, inputs, seed=1), precision, random(outputs, seed=2))
    a = prepared(kernels, random(rows, inputs, seed=3), precision)
    expected = product(reference, a, weight, rows)
    assert np.allclose(product(kernels, a, weight, rows), expected, rtol=1e-5, atol=2e-6 * inputs**0.5 * 8)
    start = random(rows, outputs, seed=4)
    added = product(kernels, a, weight, rows, start)
    assert (added == start + product(kernels, a, weight, rows)).all()


def test_int8_product_is_close_to_the_float_product(kernels):
    values, weight = random(8, 576), random(64, 576, seed=1)
    exact = values @ weight.T
    mine = product(kernels, prepared(kernels, values, "int8"), LinearWeight.from_float(weight, "int8"), 8)
    assert np.abs(mine - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 100), (576, 1536), (3000, 64)])
def test_a_row_s_bits_depend_on_nothing_but_the_row(isa, precision, outputs, inputs):
    values = random(19, inputs)
    weight = LinearWeight.from_float(random(outputs, inputs, seed=1), precision, random(outputs, seed=2))
    one, two = native(isa, 1), native(isa, 2)
    together = product(one, prepared(one, values, precision), weight, 19)
    assert (product(two, prepared(two, values, precision), weight, 19) == together).all()
    for rows in (1, 2, 3, 6, 8, 13):
        for start in range(0, 19 - rows + 1, 5):
            a = prepared(one, values[start : start + rows], precision)
            assert (product(one, a, weight, rows) == together[start : start + rows]).all()


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_instruction_sets_agree_to_the_bit(precision):
    values = random(19, 300)
    weight = LinearWeight.from_float(random(70, 300, seed=1), precision, random(70, seed=2))
    results = []
    for isa in fused_isas():
        ops = native(isa, 2)
        results.append(product(ops, prepared(ops, values, precision), weight, 19))
    for result in results[1:]:
        assert (result == results[0]).all()


def test_nan_stays_in_its_own_row(kernels):
    values = random(6, 128)
    values[2, 100] = np.nan
    weight = LinearWeight.from_float(random(32, 128, seed=1), "int8")
    result = product(kernels, prepared(kernels, values, "int8"), weight, 6)
    assert np.isnan(result[2]).all()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_embedding_reads_single_rows_of_a_packed_matrix(kernels, reference, precision):
    weight = LinearWeight.from_float(random(50, 100), precision)
    tokens = np.array([0, 49, 17, 17, 16], np.int32)
    mine, expected = Tensor(5, 100), Tensor(5, 100)
    kernels.embed(tokens, weight, mine, 5)
    reference.embed(tokens, weight, expected, 5)
    assert (mine.array == expected.array).all()


def test_out_of_range_indices_are_refused_and_touch_nothing(kernels):
    weight, out = LinearWeight.from_float(random(50, 64), "int8"), Tensor(2, 64)
    for token in (-1, 50):
        with pytest.raises(IndexError):
            kernels.embed(np.array([3, token], np.int32), weight, out, 2)
        with pytest.raises(IndexError):
            kernels.add_rows(random(50, 64), np.array([3, token], np.int32), out, 2)
    assert not out.array.any()


def test_mismatched_arguments_are_refused(kernels):
    weight, a = LinearWeight.from_float(random(32, 64), "int8"), kernels.activation(4, 64, "int8")
    with pytest.raises(ValueError, match="5 rows"):
        kernels.linear(a, weight, Tensor(8, 32), 5)
    with pytest.raises(ValueError, match="width"):
        kernels.linear(a, weight, Tensor(4, 33), 4)
    with pytest.raises(ValueError, match="fp32"):
        kernels.linear(kernels.activation(4, 64, "fp32"), weight, Tensor(4, 32), 4)
    with pytest.raises(TypeError, match="float64"):
        kernels.rms_norm(Tensor(4, 64), np.ones(64), 1e-5, a, 4)


def test_numpy_int8_product_is_the_sum_over_groups_in_order():
    values, weight = random(3, 192), LinearWeight.from_float(random(20, 192, seed=1), "int8")
    quantized, scale, _ = quantize_activation(values)
    weights = weight_values(weight)
    assert weight.scale is not None
    weight_scale = (
        (weight.scale.astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 1).reshape(-1, 3)[:20]
    )
    expected = np.zeros((3, 20), np.float32)
    for group in range(3):
        part = slice(group * 64, group * 64 + 64)
        dot = quantized[:, part].astype(np.int64) @ weights[:, part].T
        expected += scale[:, group, None] * weight_scale[None, :, group] * dot.astype(np.float32)
    ops = NumpyOps()
    assert (product(ops, prepared(ops, values, "int8"), weight, 3) == expected).all()
