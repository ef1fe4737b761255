"""Packed models: weights laid out for the kernels, mapped into memory as they are.

A packed model is a directory: `weights.bin` (arrays on 64-byte boundaries), `manifest.json` (what is where, and the
model's configuration), `tokenizer.json` and `tokenizer_meta.json`. Workers of one model share its pages. This
module is all that a worker needs of the weights: it imports numpy and msgspec and nothing that reads other formats.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.ops.layout import LinearWeight
from enginehouse.runtime.quantization import Precision

FloatArray = NDArray[np.float32]

FORMAT_VERSION: Final = 1
"""Changes with the manifest's fields or with what goes into a packed model."""
WEIGHTS_FILE: Final = "weights.bin"
MANIFEST_FILE: Final = "manifest.json"
ALIGNMENT_BYTES: Final = 64
CHECKSUM_CHUNK_BYTES: Final = 1 << 20
_CHECKSUM_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD_MASK: Final = (1 << 64) - 1
_DTYPES: Final = {"f4": np.float32, "i1": np.int8, "u2": np.uint16}

ArrayDtype = Literal["f4", "i1", "u2"]


class ArrayEntry(msgspec.Struct, frozen=True):
    """One array inside weights.bin."""

    offset: int
    """Bytes from the start of the file; a multiple of 64."""
    dtype: ArrayDtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes the array takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the model: a `linear` has arrays data and perhaps scale and bias, the others have data."""

    kind: Literal["linear", "vector", "table"]
    shape: tuple[int, ...]
    arrays: dict[str, ArrayEntry]


class FileEntry(msgspec.Struct, frozen=True):
    """Another file of the directory."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The table of contents of a packed model."""

    format_version: int
    layout_version: int
    precision: Precision
    config: ModelConfig
    hf_config: dict[str, Any]
    """What `config` was read from."""
    source: str
    """Where the weights came from, as the user wrote it."""
    source_hash: str
    tensors: dict[str, TensorEntry]
    weights_bytes: int
    weights_checksum: str
    files: dict[str, FileEntry]


class _SealedManifest(msgspec.Struct, frozen=True):
    """How the manifest is stored: with a hash of its own bytes."""

    sha256: str
    manifest: msgspec.Raw


class PackedModel:
    """A packed model mapped read-only. Arrays are views of the mapping and must not outlive `close`.

    Fulfils `PackedWeights`, which the architectures bind to.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.config = manifest.config
        self.precision: Precision = manifest.precision
        self._words = _map(path / WEIGHTS_FILE, manifest.weights_bytes)

    def tensor(self, name: str) -> FloatArray:
        """A `vector` [n] or `table` [rows, width], read-only. Raises `CorruptModelError` when it is not there."""
        entry = self._entry(name)
        return self._array(name, entry.arrays, "data").reshape(entry.shape)

    def linear(self, name: str) -> LinearWeight:
        """A packed matrix with its bias, if it has one. Raises `CorruptModelError` when it is not there."""
        entry = self._entry(name)
        data = self._array(name, entry.arrays, "data")
        scale = self._array(name, entry.arrays, "scale") if "scale" in entry.arrays else None
        bias = self._array(name, entry.arrays, "bias") if "bias" in entry.arrays else None
        try:
            out_features, in_features = entry.shape
            return LinearWeight(data, scale, bias, out_features, in_features, self.precision)
        except ValueError as error:
            raise CorruptModelError(f"{self.path}: {name!r} is no packed matrix ({error})") from error

    def verify(self) -> None:
        """Compare the weights with their checksum. Raises `CorruptModelError`."""
        if checksum(self._words) != self.manifest.weights_checksum:
            raise CorruptModelError(f"{self.path / WEIGHTS_FILE} is damaged: its checksum is wrong")

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CorruptModelError(f"{self.path} has no tensor {name!r}") from None

    def _array(self, name: str, arrays: dict[str, ArrayEntry], part: str) -> NDArray[Any]:
        entry = arrays[part]
        end = entry.offset + entry.num_bytes
        if entry.offset % ALIGNMENT_BYTES or not 0 <= entry.offset <= end <= self.manifest.weights_bytes:
            raise CorruptModelError(f"{self.path}: array {part} of {name!r} lies outside {WEIGHTS_FILE}")
        raw = self._words.view(np.uint8)[entry.offset : end]
        return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def open_packed(path: Path | str) -> PackedModel:
    """Map a packed model and check its weights (about 10 GB/s).

    Raises `CorruptModelError` when a file is missing, cut short or changed.
    """
    path = Path(path)
    model = PackedModel(path, read_manifest(path))
    model.verify()
    return model


def read_manifest(path: Path) -> Manifest:
    """The manifest of a packed model. Raises `CorruptModelError`."""
    try:
        sealed = msgspec.json.decode((path / MANIFEST_FILE).read_bytes(), type=_SealedManifest)
        body = bytes(sealed.manifest)
        if hashlib.sha256(body).hexdigest() != sealed.sha256:
            raise CorruptModelError(f"{path / MANIFEST_FILE} is damaged: its checksum is wrong")
        return msgspec.json.decode(body, type=Manifest)
    except FileNotFoundError:
        raise CorruptModelError(f"{path} is no packed model: it has no {MANIFEST_FILE}") from None
    except msgspec.MsgspecError as error:
        raise CorruptModelError(f"{path / MANIFEST_FILE} is damaged: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_SealedManifest(hashlib.sha256(body).hexdigest(), msgspec.Raw(body)))


def checksum(words: NDArray[np.uint64]) -> str:
    """Checksum of uint64 words, as fast as memory: sum and xor per MiB, chained in order.

    Finds truncation, lost pages and flipped bits; it is no defence against somebody who means harm.
    """
    step = CHECKSUM_CHUNK_BYTES // 8
    total = len(words)
    for start in range(0, len(words), step):
        chunk = words[start : start + step]
        # Both passes find the chunk in the CPU's cache after the first.
        part = int(np.add.reduce(chunk)) ^ (int(np.bitwise_xor.reduce(chunk)) << 1)
        total = ((total * _CHECKSUM_FACTOR) ^ part) & _WORD_MASK
    return f"{total:016x}"


def _map(path: Path, expected_bytes: int) -> NDArray[np.uint64]:
    """The file as uint64 words, shared with every process that maps it. Raises `CorruptModelError`."""
    try:
        with path.open("rb") as file:
            found_bytes = path.stat().st_size
            if found_bytes != expected_bytes or expected_bytes % 8 or not expected_bytes:
                raise CorruptModelError(f"{path} has {found_bytes} bytes; {expected_bytes} were packed")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CorruptModelError(f"{path} is missing") from None
    if hasattr(mmap, "MADV_WILLNEED"):
        mapping.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapping, dtype=np.uint64)
