"""A directory with config.json and safetensors, in one file or in shards, as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.models.pooling import KEY as SENTENCE_KEY
from enginehouse.runtime.sources.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    hash_source,
    read_json,
    single_weights_file,
    weight_files,
)
from enginehouse.runtime.weights.checkpoint import TokenizerFiles
from enginehouse.runtime.weights.safetensors_file import SafetensorsFile
from enginehouse.runtime.weights.sentence_files import read_sentence_files

FloatArray = NDArray[np.float32]


class SafetensorsCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = read_json(
            directory / CONFIG_FILE, missing=f"{directory} has no {CONFIG_FILE}: it is no model"
        )
        sentence_files = read_sentence_files(directory)
        self._config = {**config, SENTENCE_KEY: sentence_files} if sentence_files else config
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._file_of = self._open()
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, and of the sentence-transformers files beside it."""
        return self._config

    @property
    def source_hash(self) -> str:
        """SHA-256 over the hashes of all files that matter."""
        return hash_source(self._directory)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._files[self._file_of[name]].tensors[name].shape

    def read(self, name: str) -> FloatArray:
        """One tensor as it is stored, in fp32."""
        return self._files[self._file_of[name]].read(name)

    def tokenizer_files(self) -> TokenizerFiles:
        """The directory."""
        return TokenizerFiles(directory=self._directory)

    def close(self) -> None:
        """Unmap all files."""
        for file in self._files.values():
            file.close()

    def _open(self) -> dict[str, str]:
        file_of = weight_files(self._directory)
        if not file_of:
            name = single_weights_file(self._directory)
            self._files[name] = SafetensorsFile(self._directory / name)
            return dict.fromkeys(self._files[name].tensors, name)
        for name in sorted(set(file_of.values())):
            self._files[name] = SafetensorsFile(self._directory / name)
        for tensor, name in file_of.items():
            if tensor not in self._files[name].tensors:
                raise CorruptModelError(f"{self._directory / INDEX_FILE}: {name} has no tensor {tensor!r}")
        return file_of
