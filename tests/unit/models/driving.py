"""Packs tiny models in memory and drives a ModelRunner as the engine does, in steps of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from enginehouse.engine.model_runner import Chunk, ModelRunner, build_batch
from enginehouse.runtime.config import KVDtype, ModelConfig
from enginehouse.runtime.models import architecture_for, load_tensor
from enginehouse.runtime.ops import BLOCK, Kernels, LinearWeight, load
from enginehouse.runtime.quantization import Precision
from tests.unit.models.variants import VARIANTS, Variant

NUM_BLOCKS = 40
KERNELS: list[Kernels] = ["numpy", "native"]


class DictReader:
    """A checkpoint that is a dictionary."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]


class MemoryWeights:
    """`PackedWeights` packed in memory from Hugging Face tensors."""

    def __init__(
        self, hf_config: dict[str, object], tensors: dict[str, np.ndarray], precision: Precision
    ) -> None:
        architecture = architecture_for(hf_config)
        self.config: ModelConfig = architecture.config_from_hf(hf_config)
        self.precision: Precision = precision
        self._vectors: dict[str, np.ndarray] = {}
        self._linears: dict[str, LinearWeight] = {}
        reader = DictReader(tensors)
        for spec in architecture.tensors(self.config):
            weight, bias = load_tensor(spec, reader, set(tensors), architecture.prefix)
            if spec.kind == "linear":
                self._linears[spec.name] = LinearWeight.from_float(weight, precision, bias)
            else:
                self._vectors[spec.name] = weight

    def tensor(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def linear(self, name: str) -> LinearWeight:
        return self._linears[name]


@lru_cache(maxsize=4)
def packed(variant_key: str, precision: Precision) -> MemoryWeights:
    """The packed weights of a variant, by name; packing is shared between tests."""
    variant = next(variant for variant in VARIANTS if variant.name == variant_key)
    return MemoryWeights(variant.config, variant.tensors(), precision)


def make_runner(
    variant: Variant,
    *,
    precision: Precision = "fp32",
    kernels: Kernels = "auto",
    num_threads: int = 1,
    kv_dtype: KVDtype = "fp32",
) -> ModelRunner:
    """A runner with dirty KV memory: what an earlier sequence left must never show."""
    runner = ModelRunner(
        packed(variant.name, precision),
        load(num_threads, kernels),
        num_blocks=NUM_BLOCKS,
        kv_dtype=kv_dtype,
        max_rows=128,
        max_seqs=8,
    )
    for layer in runner.kv.layers:
        layer.k[:] = np.nan
        layer.v[:] = np.nan
    return runner


class Lane:
    """One sequence of a test: its tokens, how many are computed, its own scattered blocks."""

    def __init__(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.blocks = list(blocks)
        self.num_computed = 0

    def next_chunk(self, size: int) -> Chunk:
        """The next `size` tokens (fewer at the end), all of whose logits are wanted."""
        start = self.num_computed
        self.num_computed = min(start + size, len(self.tokens))
        return Chunk(self.tokens[start : self.num_computed], start, self.blocks, "all")


def scattered_blocks(lane: int, num_tokens: int) -> list[int]:
    """Blocks of one of six lanes, in descending order, interleaved with those of the other lanes.

    Beyond six blocks the order wraps: such a lane must be alone.
    """
    count = -(-num_tokens // BLOCK)
    return [(NUM_BLOCKS - 1 - lane - 6 * index) % NUM_BLOCKS for index in range(count)]


def prompt_logits(runner: ModelRunner, tokens: Sequence[int], chunk_tokens: int, lane: int = 0) -> np.ndarray:
    """Logits [len(tokens), vocab] of a prompt computed alone, in chunks."""
    sequence = Lane(tokens, scattered_blocks(lane, len(tokens)))
    parts = []
    while sequence.num_computed < len(tokens):
        parts.append(runner.run(build_batch([sequence.next_chunk(chunk_tokens)])).copy())
    return np.concatenate(parts)


def greedy(runner: ModelRunner, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt in one chunk, then one token at a time, always the best one."""
    tokens = list(prompt)
    blocks = scattered_blocks(0, len(tokens) + num_tokens)
    logits = runner.run(build_batch([Chunk(tokens, 0, blocks)]))
    for _ in range(num_tokens):
        tokens.append(int(logits[0].argmax()))
        logits = runner.run(build_batch([Chunk(tokens[-1:], len(tokens) - 1, blocks)]))
    return tokens[len(prompt) :]
