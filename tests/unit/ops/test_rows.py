from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from enginehouse.runtime.ops import Activation, Ops, Tensor
from tests.unit.ops.conftest import fused_isas, native

WIDTHS = [1, 15, 16, 24, 64, 100, 576, 1530]
MAPS = ["prepare", "silu_mul", "relu", "gelu", "gelu_new"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 3


def filled(values: np.ndarray) -> Tensor:
    tensor = Tensor(*values.shape)
    tensor.array[:] = values
    return tensor


def contents(out: Activation | Tensor) -> np.ndarray:
    if isinstance(out, Tensor):
        return out.array
    if out.precision == "fp32":
        return out.values
    return (out.quantized.reshape(out.max_rows, -1, 64) * out.scale[:, :, None]).reshape(out.max_rows, -1)


Operation = Callable[[Ops, Activation | Tensor, np.ndarray], None]


def norm(kind: str, width: int) -> Operation:
    weight, bias = random(width, seed=5), random(width, seed=6)

    def run(ops: Ops, out: Activation | Tensor, values: np.ndarray) -> None:
        if kind == "rms_norm":
            ops.rms_norm(filled(values), weight, 1e-5, out, len(values))
        else:
            ops.layer_norm(filled(values), weight, bias, 1e-5, out, len(values))

    return run


def mapping(name: str) -> Operation:
    def run(ops: Ops, out: Activation | Tensor, values: np.ndarray) -> None:
        getattr(ops, name)(filled(values), out, len(values))

    return run


def operations(width: int) -> dict[str, tuple[Operation, int]]:
    """Name to (operation, width of its input)."""
    maps = {name: (mapping(name), 2 * width if name == "silu_mul" else width) for name in MAPS}
    return {
        "rms_norm": (norm("rms_norm", width), width),
        "layer_norm": (norm("layer_norm", width), width),
        **maps,
    }


NAMES = list(operations(16))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_fp32_results_match_the_reference(kernels, reference, name, width):
    run, inputs = operations(width)[name]
    mine, expected = kernels.activation(6, width, "fp32"), reference.activation(6, width, "fp32")
    values = random(6, inputs)
    run(kernels, mine, values)
    run(reference, expected, values)
    assert np.allclose(mine.values, expected.values, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_int8_results_are_the_fp32_results_quantised(kernels, reference, name, width):
    run, inputs = operations(width)[name]
    values = random(6, inputs)
    mine, plain = kernels.activation(6, width, "int8"), kernels.activation(6, width, "fp32")
    run(kernels, mine, values)
    run(kernels, plain, values)
    expected = reference.activation(6, width, "int8")
    reference.prepare(filled(plain.values), expected, 6)
    assert (mine.quantized == expected.quantized).all()
    assert (mine.scale == expected.scale).all()
    assert (mine.sum == expected.sum).all()


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms_write_plain_tensors_too(kernels, kind):
    values = random(5, 100)
    plain, activation = Tensor(5, 100), kernels.activation(5, 100, "fp32")
    norm(kind, 100)(kernels, plain, values)
    norm(kind, 100)(kernels, activation, values)
    assert (plain.array == activation.values).all()


@pytest.mark.parametrize("name", NAMES)
def test_extreme_inputs_give_no_nan_that_was_not_there(kernels, name):
    run, inputs = operations(64)[name]
    values = random(4, inputs)
    values[0, :8] = [1e4, -1e4, 100, -100, 88.5, -88.5, 1e-38, -0.0]
    values[1] = 0
    values[2, 3] = np.nan
    out = kernels.activation(4, 64, "fp32")
    run(kernels, out, values)
    assert np.isfinite(out.values[[0, 1, 3]]).all()
    assert np.isnan(out.values[2]).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_bits_depend_on_nothing_but_the_row(isa, name):
    width = 1530
    run, inputs = operations(width)[name]
    values = random(40, inputs)
    together, alone = (native(isa, 2).activation(rows, width, "int8") for rows in (40, 1))
    run(native(isa, 2), together, values)
    for row in (0, 1, 17, 39):
        run(native(isa, 1), alone, values[row : row + 1])
        assert (alone.quantized[0] == together.quantized[row]).all()
        assert (alone.scale[0] == together.scale[row]).all()


@pytest.mark.parametrize("name", NAMES)
def test_instruction_sets_agree_to_the_bit(name):
    run, inputs = operations(150)[name]
    results = []
    for isa in fused_isas():
        out = native(isa, 1).activation(5, 150, "fp32")
        run(native(isa, 1), out, random(5, inputs))
        results.append(out.values)
    for result in results[1:]:
        assert (result == results[0]).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_beyond_the_count_are_left_alone(kernels, name):
    run, inputs = operations(100)[name]
    out = kernels.activation(8, 100, "fp32")
    out.values[:] = 7
    run(kernels, out, random(3, inputs))
    assert (out.values[3:] == 7).all()
    assert not (out.values[:3] == 7).any()


def test_the_last_group_is_padded_with_zeros_before_it_is_rotated(kernels):
    values, padded = random(2, 100), np.zeros((2, 128), np.float32)
    padded[:, :100] = values
    out, whole = kernels.activation(2, 100, "int8"), kernels.activation(2, 128, "int8")
    out.quantized[:] = 99
    kernels.prepare(filled(values), out, 2)
    kernels.prepare(filled(padded), whole, 2)
    assert (out.quantized == whole.quantized).all()
    assert (out.scale == whole.scale).all()


def test_table_rows_are_added_and_gathered(kernels, reference):
    table, start, indices = random(9, 33), random(3, 33, seed=1), np.array([8, 0, 8], np.int32)
    mine, expected = filled(start), filled(start)
    kernels.add_rows(table, indices, mine, 3)
    reference.add_rows(table, indices, expected, 3)
    assert (mine.array == expected.array).all()
    kernels.gather_rows(filled(table), indices, mine, 3)
    assert (mine.array == table[indices]).all()
    kernels.embed(np.array([4, 2, 0], np.int32), table, mine, 3)
    assert (mine.array == table[[4, 2, 0]]).all()
