"""Reading safetensors files (https://github.com/huggingface/safetensors#format), every number checked first.

Layout: header length (8 bytes), JSON header with dtype, shape and byte range of every tensor, tensor data.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError, UnsupportedModelError

FloatArray = NDArray[np.float32]

MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMS: Final = 8
_NUMPY_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where one tensor lies in the file."""

    dtype: str
    """As the file names it: F32, BF16, I64, …"""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class SafetensorsFile:
    """One safetensors file, mapped read-only; `tensors` is complete after construction.

    Raises `CorruptModelError` for a truncated or inconsistent file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            if size_bytes < 10:
                raise CorruptModelError(f"{path} is no safetensors file: it has only {size_bytes} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.tensors = self._parse()
        except BaseException:
            self._map.close()
            raise

    def read(self, name: str) -> FloatArray:
        """One tensor as a new fp32 array. KeyError for an unknown name.

        Raises `UnsupportedModelError` for a dtype other than F64, F32, F16 and BF16, naming it.
        """
        entry = self.tensors[name]
        dtype = _NUMPY_DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which is not supported; "
                f"supported are {', '.join(_NUMPY_DTYPES)}"
            )
        raw = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.offset).view(dtype)
        if entry.dtype == "BF16":
            values = raw.astype(np.uint32)
            values <<= np.uint32(16)
            return values.view(np.float32).reshape(entry.shape)
        with np.errstate(over="ignore"):
            return raw.astype(np.float32).reshape(entry.shape)

    def close(self) -> None:
        """Unmap the file; tensors read before stay valid."""
        self._map.close()

    def _corrupt(self, problem: str) -> CorruptModelError:
        return CorruptModelError(f"{self.path} is damaged: {problem}; delete it and fetch it again")

    def _parse(self) -> dict[str, SafetensorsEntry]:
        header_bytes = int.from_bytes(self._map[:8], "little")
        data_start = 8 + header_bytes
        if header_bytes > MAX_HEADER_BYTES or data_start > len(self._map):
            raise self._corrupt(f"its header of {header_bytes} bytes does not fit in {len(self._map)} bytes")
        header = self._json(self._map[8:data_start])
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, value, data_start) for name, value in header.items()}
        end, previous = data_start, "the header"
        for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if entry.offset < end:
                raise self._corrupt(f"tensor {name!r} overlaps {previous!r}")
            if entry.offset > end:
                raise self._corrupt(f"there is a hole before tensor {name!r}")
            end, previous = entry.offset + entry.num_bytes, name
        if end != len(self._map):
            raise self._corrupt(f"it has {len(self._map)} bytes and its tensors end at {end}")
        return tensors

    def _json(self, text: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            members = dict(pairs)
            if len(members) != len(pairs):
                raise self._corrupt("a name appears twice in its header")
            return members

        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._corrupt("its header is no JSON object")
        return header

    def _entry(self, name: str, value: Any, data_start: int) -> SafetensorsEntry:
        if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
            raise self._corrupt(f"tensor {name!r} has no dtype")
        shape, offsets = _naturals(value.get("shape")), _naturals(value.get("data_offsets"))
        if shape is None or len(shape) > MAX_DIMS or offsets is None or len(offsets) != 2:
            raise self._corrupt(f"tensor {name!r} has no proper shape and data_offsets")
        start, end = offsets
        if not start <= end <= len(self._map) - data_start:
            raise self._corrupt(f"tensor {name!r} lies outside the file (truncated download?)")
        dtype = _NUMPY_DTYPES.get(value["dtype"])
        if dtype is not None:
            expected = np.dtype(dtype).itemsize
            for dim in shape:
                expected *= dim
            if expected != end - start:
                raise self._corrupt(f"tensor {name!r} of shape {shape} takes {end - start} bytes")
        return SafetensorsEntry(value["dtype"], tuple(shape), data_start + start, end - start)


def _naturals(value: Any) -> list[int] | None:
    """`value` if it is a list of natural numbers."""
    is_list = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return value if is_list else None
