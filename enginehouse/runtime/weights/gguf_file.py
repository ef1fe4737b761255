"""Reading GGUF files: header, metadata, and tensors decoded to fp32.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, key-value pairs, tensor
descriptions, padding, tensor data. Nothing the file says is believed before it is checked against the file's
size, so a damaged or hostile file costs an error, never memory. Block types are decoded by the `gguf` package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError, UnsupportedModelError

FloatArray = NDArray[np.float32]

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_ARRAY_DEPTH: Final = 4
# Elements decoded at once: the decoder's temporaries stay around 10 MB whatever the tensor's size.
CHUNK_ELEMENTS: Final = 1 << 20

# Type number -> (name, elements per block, bytes per block); what docs/models.md lists as supported.
TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}

_STRING, _ARRAY = 8, 9
_SCALARS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    """numpy's order: the contiguous dimension last (GGUF writes it first)."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int

    @property
    def type_name(self) -> str:
        """For example Q4_1."""
        return TENSOR_TYPES[self.type_id][0]


class GGUFFile:
    """A GGUF file, mapped read-only. `metadata` and `tensors` are complete after construction.

    Raises `CorruptModelError` for a truncated or inconsistent file and `UnsupportedModelError` for a version or
    tensor type that cannot be read; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            if size_bytes < 24:
                raise CorruptModelError(f"{path} is no GGUF file: it has only {size_bytes} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors = _Header(path, self._map).parse()
        except BaseException:
            self._map.close()
            raise

    def read(self, name: str) -> FloatArray:
        """Decode one tensor to fp32; a new array in numpy's order. KeyError for an unknown name."""
        tensor = self.tensors[name]
        out = np.empty(int(np.prod(tensor.shape)), np.float32)
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        type_name, block_elements, block_bytes = TENSOR_TYPES[tensor.type_id]
        if type_name in ("F32", "F64"):
            out[:] = raw.view(f"<f{block_bytes}")
            return out.reshape(tensor.shape)

        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(tensor.type_id)
        blocks_at_once = CHUNK_ELEMENTS // block_elements
        for first in range(0, len(out) // block_elements, blocks_at_once):
            part = raw[first * block_bytes : (first + blocks_at_once) * block_bytes]
            # Blocks do not know rows: one long row spares the decoder a loop over short ones.
            start = first * block_elements
            with np.errstate(over="ignore", invalid="ignore"):
                decoded = dequantize(part.reshape(1, -1), kind).ravel()
            out[start : start + len(decoded)] = decoded
        return out.reshape(tensor.shape)

    def close(self) -> None:
        """Unmap the file; tensors read before stay valid."""
        self._map.close()


class _Header:
    """Parser of everything before the tensor data; `_position` never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size_bytes = len(data)
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._bytes(4, "the magic number") != MAGIC:
            raise CorruptModelError(f"{self._path} is no GGUF file: it does not start with 'GGUF'")
        self._check_version()
        num_tensors = self._count(min_item_bytes=24, what="tensors")
        num_pairs = self._count(min_item_bytes=13, what="metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("<I", f"the type of {key}"), key, depth=0)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return metadata, self._place(infos, metadata.get("general.alignment", DEFAULT_ALIGNMENT))

    def _check_version(self) -> None:
        version = self._number("<I", "the version")
        if version in (2, 3):
            return
        if version and version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self._path} is a big-endian GGUF file, which is not supported")
        raise UnsupportedModelError(f"{self._path} has GGUF version {version}; supported are 2 and 3")

    def _corrupt(self, problem: str) -> CorruptModelError:
        return CorruptModelError(f"{self._path} is damaged: {problem}; delete it and fetch it again")

    def _bytes(self, count: int, what: str) -> bytes:
        end = self._position + count
        if end > self._size_bytes:
            raise self._corrupt(f"it ends inside {what}")
        value = self._data[self._position : end]
        self._position = end
        return value

    def _number(self, form: str, what: str) -> int:
        value: int = struct.unpack(form, self._bytes(struct.calcsize(form), what))[0]
        return value

    def _count(self, *, min_item_bytes: int, what: str) -> int:
        """A count that the rest of the file has room for."""
        count = self._number("<Q", f"the number of {what}")
        if count * min_item_bytes > self._size_bytes - self._position:
            raise self._corrupt(f"it claims {count} {what}, more than the file can hold")
        return count

    def _string(self, what: str) -> str:
        length = self._number("<Q", what)
        try:
            return self._bytes(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self._corrupt(f"{what} is not UTF-8") from None

    def _value(self, type_id: int, key: str, depth: int) -> Any:
        if type_id == _STRING:
            return self._string(key)
        if type_id == _ARRAY:
            return self._array(key, depth + 1)
        dtype = _SCALARS.get(type_id)
        if dtype is None:
            raise self._corrupt(f"metadata {key!r} has the unknown type {type_id}")
        return np.frombuffer(self._bytes(np.dtype(dtype).itemsize, key), dtype)[0].item()

    def _array(self, key: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise self._corrupt(f"metadata {key!r} is nested too deeply")
        type_id = self._number("<I", key)
        dtype = _SCALARS.get(type_id)
        if dtype is not None:
            item_bytes = np.dtype(dtype).itemsize
            count = self._count(min_item_bytes=item_bytes, what=f"values in {key}")
            return np.frombuffer(self._bytes(count * item_bytes, key), dtype)
        if type_id == _STRING:
            return self._strings(key)
        count = self._count(min_item_bytes=12, what=f"values in {key}")
        return [self._value(type_id, key, depth) for _ in range(count)]

    def _strings(self, key: str) -> list[str]:
        """An array of strings; apart from `_string` because vocabularies have 100,000 and more."""
        count = self._count(min_item_bytes=8, what=f"strings in {key}")
        data, position, size_bytes = self._data, self._position, self._size_bytes
        length_of = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + length_of(data, position)[0] if start <= size_bytes else start
            if position > size_bytes:
                raise self._corrupt(f"it ends inside {key}")
            try:
                values.append(data[start:position].decode("utf-8"))
            except UnicodeDecodeError:
                raise self._corrupt(f"entry {len(values)} of {key} is not UTF-8") from None
        self._position = position
        return values

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        num_dims = self._number("<I", f"the shape of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} claims {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self._bytes(8 * num_dims, f"the shape of {name}"))
        type_id = self._number("<I", f"the type of {name}")
        offset = self._number("<Q", f"the offset of {name}")
        return name, dims[::-1], type_id, offset

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
    ) -> dict[str, GGUFTensor]:
        """Check every tensor's type, shape and place; tensors may not overlap or leave the file."""
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._corrupt(f"alignment {alignment!r} is no power of two between 8 and 1 MiB")
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} appears twice")
            num_bytes = self._tensor_bytes(name, shape, type_id)
            start = data_start + offset
            if offset % alignment or start + num_bytes > self._size_bytes:
                raise self._corrupt(f"tensor {name!r} lies outside the file (truncated download?)")
            tensors[name] = GGUFTensor(name, type_id, shape, start, num_bytes)
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise self._corrupt(f"tensors {previous!r} and {tensor.name!r} overlap")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
        return tensors

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        if type_id not in TENSOR_TYPES:
            known = ", ".join(sorted(entry[0] for entry in TENSOR_TYPES.values()))
            raise UnsupportedModelError(
                f"tensor {name!r} has type {_type_name(type_id)}, which is not supported; supported are {known}"
            )
        type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        if num_elements == 0 or shape[-1] % block_elements:
            raise self._corrupt(f"tensor {name!r} of type {type_name} has the shape {list(shape)}")
        return num_elements // block_elements * block_bytes


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"
