"""The operations in C, called through ctypes.

About 240 calls make a step of a small model, so a call must cost little: arguments are plain integers, buffers and
weights carry the address of a C structure that describes them, and addresses of other arrays are remembered.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from enginehouse.errors import KernelBuildError
from enginehouse.runtime.ops import build
from enginehouse.runtime.ops.interface import Rope
from enginehouse.runtime.ops.layout import (
    Activation,
    AttentionBatch,
    KVLayer,
    LinearWeight,
    Tensor,
    address_of,
)
from enginehouse.runtime.ops.reference import BufferFactory
from enginehouse.runtime.quantization import FloatArray, Int32Array

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "instruction_set": (ctypes.c_char_p, []),
    "stop_threads": (None, []),
    "linear": (None, [_P, _P, _P, _I, _I, _I]),
    "norm": (None, [_P, _P, _P, _F, _I, _P, _P, _I, _I]),
    "map": (None, [_I, _P, _I, _P, _I, _I]),
    "add_rows": (_I, [_P, _I, _P, _P, _I, _I]),
    "copy_rows": (_I, [_P, _I, _P, _P, _I, _I]),
    "embed": (_I, [_P, _P, _P, _I]),
    "rope_and_store": (_I, [_P, _P, _P, _P, _P, _I, _I, _P, _P, _F, _P, _I, _I, _I]),
    "attention": (_I, [_P, _P, _P, _F, _P, _I, _I, _I]),
}
_PREPARE, _SILU_MUL, _RELU, _GELU, _GELU_NEW = range(5)
_REMEMBERED_ARRAYS = 1024
MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV_HEAD = 24


class NativeOps(BufferFactory):
    """`Ops` in C. One thread may call at a time; `num_threads` counts it, so 1 means no other threads at all.

    Raises KernelBuildError when the library cannot be built or loaded.
    """

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, must be at least 1")
        path = build.build(isa)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"cannot load the compiled kernels: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"enginehouse_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self._linear = self._functions["linear"]
        self._norm = self._functions["norm"]
        self._map = self._functions["map"]
        self.num_threads = num_threads
        self.isa: str = self._functions["instruction_set"]().decode()
        self.name = f"native ({self.isa})"
        self._addresses: dict[int, tuple[npt.NDArray[Any], int]] = {}
        atexit.register(self.stop_threads)

    def stop_threads(self) -> None:
        """End the pool's threads; the next operation that wants them starts new ones."""
        self._functions["stop_threads"]()

    def _address(self, array: npt.NDArray[Any], dtype: npt.DTypeLike) -> int:
        """Address of an array's data, remembered together with the array, so that it stays valid."""
        known = self._addresses.get(id(array))
        if known is not None:
            return known[1]
        if array.dtype != dtype:
            raise TypeError(f"array is {array.dtype}, expected {np.dtype(dtype)}")
        if len(self._addresses) >= _REMEMBERED_ARRAYS:
            self._addresses.clear()
        address = address_of(array)
        self._addresses[id(array)] = (array, address)
        return address

    def embed(self, tokens: Int32Array, weight: LinearWeight | FloatArray, out: Tensor, rows: int) -> None:
        if isinstance(weight, np.ndarray):
            self._rows("copy_rows", weight, weight.shape[0], tokens, out, rows)
            return
        _check(rows, len(tokens), out.max_rows, widths=(weight.in_features, out.width))
        indices = self._address(tokens, np.int32)
        _check_range(self._functions["embed"](weight.ptr, indices, out.ptr, rows), tokens)

    def add_rows(self, table: FloatArray, indices: Int32Array, out: Tensor, rows: int) -> None:
        self._rows("add_rows", table, table.shape[0], indices, out, rows)

    def gather_rows(self, x: Tensor, indices: Int32Array, out: Tensor, rows: int) -> None:
        self._rows("copy_rows", x.array, x.max_rows, indices, out, rows)

    def _rows(
        self, name: str, table: FloatArray, table_rows: int, indices: Int32Array, out: Tensor, rows: int
    ) -> None:
        _check(rows, len(indices), out.max_rows, widths=(table.shape[1], out.width))
        source, wanted = self._address(table, np.float32), self._address(indices, np.int32)
        _check_range(self._functions[name](source, table_rows, wanted, out.ptr, out.width, rows), indices)

    def rms_norm(
        self, x: Tensor, weight: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        self._normalise(x, weight, None, eps, out, rows)

    def layer_norm(
        self, x: Tensor, weight: FloatArray, bias: FloatArray, eps: float, out: Activation | Tensor, rows: int
    ) -> None:
        self._normalise(x, weight, bias, eps, out, rows)

    def _normalise(
        self,
        x: Tensor,
        weight: FloatArray,
        bias: FloatArray | None,
        eps: float,
        out: Activation | Tensor,
        rows: int,
    ) -> None:
        _check(rows, x.max_rows, out.max_rows, widths=(x.width, out.width))
        is_tensor = isinstance(out, Tensor)
        self._norm(
            x.ptr,
            self._address(weight, np.float32),
            None if bias is None else self._address(bias, np.float32),
            eps,
            x.width,
            None if is_tensor else out.ptr,
            out.ptr if is_tensor else None,
            rows,
            self.num_threads,
        )

    def prepare(self, x: Tensor, out: Activation, rows: int) -> None:
        self._apply(_PREPARE, x, out, rows)

    def silu_mul(self, gate_up: Tensor, out: Activation, rows: int) -> None:
        self._apply(_SILU_MUL, gate_up, out, rows, inputs_per_output=2)

    def relu(self, x: Tensor, out: Activation, rows: int) -> None:
        self._apply(_RELU, x, out, rows)

    def gelu(self, x: Tensor, out: Activation, rows: int) -> None:
        self._apply(_GELU, x, out, rows)

    def gelu_new(self, x: Tensor, out: Activation, rows: int) -> None:
        self._apply(_GELU_NEW, x, out, rows)

    def _apply(
        self, function: int, x: Tensor, out: Activation, rows: int, inputs_per_output: int = 1
    ) -> None:
        _check(rows, x.max_rows, out.max_rows, widths=(x.width, out.width * inputs_per_output))
        self._map(function, x.ptr, out.width, out.ptr, rows, self.num_threads)

    def linear(
        self, a: Activation, weight: LinearWeight, out: Tensor, rows: int, accumulate: bool = False
    ) -> None:
        _check(rows, a.max_rows, out.max_rows, widths=(a.width, weight.in_features))
        if a.precision != weight.precision or out.width != weight.out_features:
            raise ValueError(
                f"linear layer {weight.precision} [{weight.out_features}, {weight.in_features}] "
                f"given {a.precision} input and output of width {out.width}"
            )
        self._linear(a.ptr, weight.ptr, out.ptr, rows, accumulate, self.num_threads)

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
        _check(rows, min(len(positions), len(slots)), qkv.max_rows, widths=_qkv_widths(qkv, kv, num_heads))
        cos, sin = (None, None) if rope is None else (self._address(table, np.float32) for table in rope)
        max_positions, half = (0, 0) if rope is None else rope[0].shape
        status = self._functions["rope_and_store"](
            qkv.ptr,
            self._address(positions, np.int32),
            self._address(slots, np.int64),
            cos,
            sin,
            half,
            max_positions,
            None if q_norm is None else self._address(q_norm, np.float32),
            None if k_norm is None else self._address(k_norm, np.float32),
            eps,
            kv.ptr,
            num_heads,
            rows,
            self.num_threads,
        )
        if status != 0:
            raise IndexError(f"position beyond {max_positions} or slot beyond {kv.num_blocks} blocks")

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
        _check(rows, len(batch.positions), out.max_rows, widths=_qkv_widths(qkv, kv, num_heads))
        if kv.head_dim > MAX_HEAD_DIM or num_heads > MAX_HEADS_PER_KV_HEAD * kv.num_kv_heads:
            raise ValueError(
                f"attention with head_dim {kv.head_dim} and {num_heads} query heads on {kv.num_kv_heads} KV heads: "
                f"at most {MAX_HEAD_DIM} and {MAX_HEADS_PER_KV_HEAD} query heads per KV head are supported"
            )
        status = self._functions["attention"](
            qkv.ptr, kv.ptr, batch.ptr, scale, out.ptr, num_heads, rows, self.num_threads
        )
        if status != 0:
            raise MemoryError(f"no memory to plan attention of {rows} rows")


def _qkv_widths(qkv: Tensor, kv: KVLayer, num_heads: int) -> tuple[int, int]:
    return qkv.width, (num_heads + 2 * kv.num_kv_heads) * kv.head_dim


def _check(rows: int, available: int, capacity: int, widths: tuple[int, int]) -> None:
    """The kernels trust their arguments: a wrong one must not get past here."""
    if rows < 0 or rows > available or rows > capacity or widths[0] != widths[1]:
        raise ValueError(f"{rows} rows of {available} into {capacity}, width {widths[0]} against {widths[1]}")


def _check_range(status: int, indices: Int32Array) -> None:
    if status != 0:
        raise IndexError(f"row index out of range among {indices.min()}..{indices.max()}")
