"""Which checkpoint tensors make up each tensor of a packed model.

An architecture describes its weights as `TensorSpec`s; the packer calls `load_tensor` for each and packs what it
gets. Checkpoint names are Hugging Face's, whatever file format the weights came in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError

FloatArray = NDArray[np.float32]

TensorKind = Literal["linear", "vector", "table"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the packed model.

    `linear` is a matrix [out, in] packed for the kernels in the model's precision (token embeddings too: a row of
    the packed matrix is dequantised on look-up). `vector` [n] and `table` [rows, width] stay fp32 as they are.
    """

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    """After concatenation and transposition."""
    sources: tuple[str, ...]
    """Checkpoint tensors, concatenated along the outputs (the first axis)."""
    bias: tuple[str, ...] = ()
    """Checkpoint tensors of the bias, concatenated in the same order; only of a `linear`."""
    transpose: bool = False
    """The checkpoint stores [in, out] (GPT-2's Conv1D)."""


class TensorReader(Protocol):
    """The part of a checkpoint that loading tensors needs."""

    def names(self) -> Collection[str]:
        """All tensor names in the checkpoint."""
        ...

    def read(self, name: str) -> FloatArray:
        """One tensor as fp32."""
        ...


def load_tensor(
    spec: TensorSpec, reader: TensorReader, available: Collection[str], prefix: str
) -> tuple[FloatArray, FloatArray | None]:
    """The tensor of `spec`, shaped `spec.shape`, and its bias [out] or None.

    `available` is the set of checkpoint names, `prefix` the architecture's, which checkpoints saved from the bare
    decoder leave out. Raises `CorruptModelError` when a tensor is missing or has another shape.
    """
    weight = _concatenate(spec.name, spec.sources, reader, available, prefix, spec.transpose)
    if weight.shape != spec.shape:
        raise CorruptModelError(
            f"tensor {spec.sources[0]!r} gives {spec.name} the shape {list(weight.shape)}; "
            f"the model's configuration asks for {list(spec.shape)}"
        )
    if not spec.bias:
        return weight, None
    bias = _concatenate(spec.name, spec.bias, reader, available, prefix, transpose=False)
    if bias.shape != spec.shape[:1]:
        raise CorruptModelError(
            f"bias {spec.bias[0]!r} has {list(bias.shape)} values; its matrix has {spec.shape[0]} outputs"
        )
    return weight, bias


def _concatenate(
    name: str,
    sources: tuple[str, ...],
    reader: TensorReader,
    available: Collection[str],
    prefix: str,
    transpose: bool,
) -> FloatArray:
    parts = []
    for source in sources:
        stored = source if source in available else source.removeprefix(prefix)
        if stored not in available:
            raise CorruptModelError(f"the checkpoint has no tensor {source!r}, which {name} needs")
        part = reader.read(stored)
        parts.append(part.T if transpose else part)
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
    return np.ascontiguousarray(joined, dtype=np.float32)
