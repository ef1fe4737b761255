"""One interface for published weights, whatever the file format: Hugging Face names, fp32, Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import SourceError

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Where a checkpoint's tokenizer is: exactly one of the two fields is set."""

    directory: Path | None = None
    """Has tokenizer.json or what the tokenizer was published as, and possibly tokenizer_config.json,
    special_tokens_map.json, generation_config.json, chat_template.jinja."""
    gguf_metadata: Mapping[str, Any] | None = None
    """GGUF keys (`tokenizer.ggml.*`, `tokenizer.chat_template`) to values: str, int, float, bool, list[str],
    or a numpy array of numbers."""


class Checkpoint(Protocol):
    """A model as published. Reads tensors one at a time; holds no weights in memory itself."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json (GGUF metadata is translated into it)."""
        ...

    @property
    def source_hash(self) -> str:
        """Hex digest that identifies everything packing depends on: weights, config and tokenizer."""
        ...

    def names(self) -> list[str]:
        """Hugging Face names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that `read` gives, without reading. KeyError for an unknown name."""
        ...

    def read(self, name: str) -> FloatArray:
        """One tensor, fp32, in Hugging Face's orientation.

        Linear layers are [out, in], GPT-2's Conv1D [in, out]; q and k are in half-rotation RoPE order. Raises
        KeyError for an unknown name, `CorruptModelError` for damaged bytes.
        """
        ...

    def tokenizer_files(self) -> TokenizerFiles:
        """What the tokenizer is made from."""
        ...

    def close(self) -> None:
        """Unmap the files."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a directory with config.json and safetensors.

    Raises `SourceError` when there is no such model, `CorruptModelError` for damaged files,
    `UnsupportedModelError` for tensor types or architectures that Enginehouse does not read.
    """
    from enginehouse.runtime.weights.gguf_checkpoint import GGUFCheckpoint
    from enginehouse.runtime.weights.safetensors_checkpoint import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    raise SourceError(
        f"{path} does not exist; give a .gguf file or a directory with config.json and safetensors"
    )
