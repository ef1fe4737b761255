"""Tiny encoders, packed once for all tests here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from enginehouse.runtime import ops
from enginehouse.runtime.encoder_tokenizer import EncoderTokenizer, TokenizedInput
from enginehouse.runtime.models.encoder import Encoder, EncoderInput
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.weights import prepare_model
from tests.support.tiny_encoders import encoder_named, write_tiny_encoder


@dataclass
class Loaded:
    """A tokenizer and an encoder bound to some operations."""

    tokenizer: EncoderTokenizer
    encoder: Encoder

    def vectors(self, inputs: list[TokenizedInput]) -> np.ndarray:
        return self.encoder.encode([EncoderInput(item.tokens, item.types) for item in inputs])


Load = Callable[..., Loaded]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    cache = tmp_path_factory.mktemp("cache")

    def packed(source: str, precision: str = "fp32", kernels: str = "native", num_threads: int = 2) -> Loaded:
        with pytest.MonkeyPatch.context() as patch:
            if source != "all-minilm-l6-v2":
                directory = write_tiny_encoder(encoder_named(source), cache / source)
                patch.setenv("ENGINEHOUSE_CACHE", str(cache / "enginehouse"))
                prepared = prepare_model(str(directory), precision)
            else:
                prepared = prepare_model(source, precision)
        model = open_packed(prepared.path)
        operations = ops.load(num_threads, kernels)
        return Loaded(
            EncoderTokenizer.load(prepared.path, model.config),
            Encoder(model, operations, max_rows=1024, max_inputs=32),
        )

    return packed
