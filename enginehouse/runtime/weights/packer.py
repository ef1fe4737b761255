"""Writing a packed model from a checkpoint, one tensor at a time."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models import Architecture, TensorSpec, architecture_for, load_tensor
from enginehouse.runtime.ops.layout import LAYOUT_VERSION, PANEL, pack_linear, packed_shapes
from enginehouse.runtime.packed import (
    ALIGNMENT_BYTES,
    FORMAT_VERSION,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    ArrayDtype,
    ArrayEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    checksum,
    encode_manifest,
)
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.sources.cache import Progress, require_space
from enginehouse.runtime.weights.checkpoint import Checkpoint

FloatArray = NDArray[np.float32]

# Rows packed at once are limited to about so many weights: packing needs several times their memory.
CHUNK_ELEMENTS = 1 << 22


def pack(
    checkpoint: Checkpoint, directory: Path, precision: Precision, *, source: str, progress: Progress
) -> Manifest:
    """Write the packed form of `checkpoint` into the empty `directory`, durably.

    Holds one fp32 tensor in memory at a time. Raises `UnsupportedModelError`, `CorruptModelError`, `SourceError`
    when the disk has too little space, and OSError.
    """
    from enginehouse.runtime.encoder_tokenizer import write_encoder_tokenizer
    from enginehouse.runtime.tokenizer_writer import write_tokenizer

    with _readable("configuration"):
        architecture = architecture_for(checkpoint.config)
        config = architecture.config_from_hf(checkpoint.config)
    specs = _wanted_tensors(checkpoint, architecture, config)
    require_space(directory, packed_bytes(specs, precision))
    # Before the weights: a tokenizer that cannot be read should not cost the time of packing them.
    tokenizer = checkpoint.tokenizer_files()
    with _readable("tokenizer"):
        if config.encoder is not None and tokenizer.directory is not None:
            write_encoder_tokenizer(tokenizer.directory, directory, vocab_size=config.vocab_size)
        else:
            write_tokenizer(
                directory,
                directory=tokenizer.directory,
                gguf_metadata=tokenizer.gguf_metadata,
                vocab_size=config.vocab_size,
            )
    tensors = _write_weights(checkpoint, architecture, specs, precision, directory / WEIGHTS_FILE, progress)
    words = np.memmap(directory / WEIGHTS_FILE, np.uint64, "r")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        layout_version=LAYOUT_VERSION,
        precision=precision,
        config=config,
        hf_config=checkpoint.config,
        source=source,
        source_hash=checkpoint.source_hash,
        tensors=tensors,
        weights_bytes=words.nbytes,
        weights_checksum=checksum(words),
        files={
            path.name: file_entry(path) for path in sorted(directory.iterdir()) if path.name != WEIGHTS_FILE
        },
    )
    with (directory / MANIFEST_FILE).open("wb") as file:
        file.write(encode_manifest(manifest))
        os.fsync(file.fileno())
    return manifest


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Readers of foreign JSON trip over values of another kind than they index: that is the file's fault."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        raise CorruptModelError(
            f"the model's {what} makes no sense ({type(error).__name__}: {error})"
        ) from error


def _wanted_tensors(
    checkpoint: Checkpoint, architecture: Architecture, config: ModelConfig
) -> list[TensorSpec]:
    """The tensors to pack. A configuration that asks for more weights than there are is refused here, before
    memory or disk is measured out by it."""
    names = checkpoint.names()
    if config.num_layers > len(names):
        raise CorruptModelError(
            f"the configuration claims {config.num_layers} layers; there are {len(names)} tensors"
        )
    specs = architecture.tensors(config)
    wanted = sum(math.prod(spec.shape) for spec in specs)
    found = sum(math.prod(checkpoint.shape(name)) for name in names)
    if wanted > found:
        raise CorruptModelError(f"the configuration asks for {wanted} weights; there are {found}")
    return specs


def packed_bytes(specs: list[TensorSpec], precision: Precision) -> int:
    """Bytes of weights.bin, without knowing the weights."""
    total = 0
    for spec in specs:
        for num_bytes in _array_bytes(spec, precision):
            total = _aligned(total) + num_bytes
    return _aligned(total)


def table_matches(manifest: Manifest, specs: list[TensorSpec]) -> bool:
    """Whether a packed model holds exactly the tensors that today's architecture asks for."""
    wanted = {spec.name: (spec.kind, tuple(spec.shape), bool(spec.bias)) for spec in specs}
    found = {
        name: (entry.kind, entry.shape, "bias" in entry.arrays) for name, entry in manifest.tensors.items()
    }
    return wanted == found


def file_entry(path: Path) -> FileEntry:
    """Size and hash of a small file."""
    content = path.read_bytes()
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def _array_bytes(spec: TensorSpec, precision: Precision) -> list[int]:
    if spec.kind != "linear":
        return [4 * math.prod(spec.shape)]
    out_features, in_features = spec.shape
    shapes = packed_shapes(out_features, in_features, precision).values()
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    return [*sizes, 4 * out_features] if spec.bias else sizes


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _write_weights(
    checkpoint: Checkpoint,
    architecture: Architecture,
    specs: list[TensorSpec],
    precision: Precision,
    path: Path,
    progress: Progress,
) -> dict[str, TensorEntry]:
    what = f"packing weights ({precision})"
    available = frozenset(checkpoint.names())
    total = sum(math.prod(spec.shape) for spec in specs)
    done = 0
    tensors: dict[str, TensorEntry] = {}
    with path.open("wb") as file:
        writer = _ArrayWriter(file)
        for spec in specs:
            progress(what, done / total)
            weight, bias = load_tensor(spec, checkpoint, available, architecture.prefix)
            if spec.kind == "linear":
                arrays = writer.write_linear(weight, precision)
            else:
                arrays = {"data": writer.write([weight], weight.shape)}
            if bias is not None:
                arrays["bias"] = writer.write([bias], bias.shape)
            tensors[spec.name] = TensorEntry(spec.kind, tuple(spec.shape), arrays)
            done += math.prod(spec.shape)
        writer.align()
        file.flush()
        os.fsync(file.fileno())
    progress(what, 1.0)
    return tensors


class _ArrayWriter:
    """Appends arrays to weights.bin, each on a 64-byte boundary."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._position = 0

    def align(self) -> None:
        """Zeros up to the next boundary."""
        padding = _aligned(self._position) - self._position
        self._file.write(bytes(padding))
        self._position += padding

    def write(self, parts: Iterable[NDArray[Any]], shape: tuple[int, ...]) -> ArrayEntry:
        """One array of `shape`, given in parts along its first axis."""
        self.align()
        offset = self._position
        dtype = "f4"
        for part in parts:
            dtype = part.dtype.str[1:]
            self._file.write(np.ascontiguousarray(part).data)
            self._position += part.nbytes
        entry = ArrayEntry(offset, cast(ArrayDtype, dtype), shape)
        if entry.num_bytes != self._position - offset:
            raise ValueError(f"wrote {self._position - offset} bytes of an array of {entry.num_bytes}")
        return entry

    def write_linear(self, weight: FloatArray, precision: Precision) -> dict[str, ArrayEntry]:
        """A matrix [out, in], packed some panels of outputs at a time."""
        num_outputs, width = weight.shape
        packed_arrays = packed_shapes(num_outputs, width, precision)
        shapes = {name: shape for name, (shape, _) in packed_arrays.items()}
        small: dict[str, list[NDArray[Any]]] = {name: [] for name in shapes if name != "data"}

        def data_parts() -> Iterator[NDArray[Any]]:
            step = max(1, CHUNK_ELEMENTS // (width * PANEL)) * PANEL
            for start in range(0, num_outputs, step):
                packed = pack_linear(weight[start : start + step], precision)
                for name, parts in small.items():
                    parts.append(packed[name])
                yield packed["data"]

        arrays = {"data": self.write(data_parts(), shapes["data"])}
        return arrays | {name: self.write(parts, shapes[name]) for name, parts in small.items()}
