"""What every model's forward pass is made of: the step it computes, its scratch buffers, and its output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from enginehouse.runtime.config import ModelConfig

if TYPE_CHECKING:
    from enginehouse.runtime.ops import Activation, AttentionBatch, KVMemory, LinearWeight, Ops, Tensor
    from enginehouse.runtime.quantization import Precision

FloatArray = NDArray[np.float32]


@dataclass(slots=True)
class Step:
    """One forward pass: `rows` tokens of any number of sequences, each row on its own.

    Rows are ordered so that a token stands after the tokens of its sequence that it must see and that are computed
    in the same step.
    """

    rows: int
    tokens: NDArray[np.int32]
    """Token ids [rows]."""
    positions: NDArray[np.int32]
    """Position of each row in its sequence [rows]."""
    slots: NDArray[np.int64]
    """Where each row's key and value go: block * BLOCK + offset [rows]."""
    attention: AttentionBatch
    logit_rows: NDArray[np.int32]
    """Rows whose logits are wanted [num_logits]."""
    num_logits: int


class Model(Protocol):
    """A bound model: weights, buffers and KV cache are fixed at construction."""

    def forward(self, step: Step) -> FloatArray:
        """Writes keys and values of all rows, and returns logits [num_logits, vocab].

        The result is a view of the model's own buffer, valid until the next call.
        """
        ...


class PackedWeights(Protocol):
    """A packed model as the runtime sees it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> Precision: ...

    def tensor(self, name: str) -> FloatArray:
        """A `vector` or `table`."""
        ...

    def linear(self, name: str) -> LinearWeight:
        """A `linear`."""
        ...


@dataclass(frozen=True, slots=True)
class Binding:
    """All that a model is built from."""

    weights: PackedWeights
    ops: Ops
    kv: KVMemory
    max_rows: int
    max_positions: int
    """No position reaches this one: the model's context, or less when the cache is smaller."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.weights.config


class Workspace:
    """Scratch buffers of one model, reused by all layers. Memory is touched only as far as rows are used."""

    def __init__(self, binding: Binding, mlp_width: int) -> None:
        config, ops, max_rows = binding.config, binding.ops, binding.max_rows
        precision = binding.weights.precision
        self.x: Tensor = ops.tensor(max_rows, config.hidden_size)
        """The residual stream."""
        self.normed: Activation = ops.activation(max_rows, config.hidden_size, precision)
        self.qkv: Tensor = ops.tensor(max_rows, config.q_size + 2 * config.kv_size)
        self.heads: Tensor = ops.tensor(max_rows, config.q_size)
        self.attended: Activation = ops.activation(max_rows, config.q_size, precision)
        self.mlp: Tensor = ops.tensor(max_rows, mlp_width)
        self.inner: Activation = ops.activation(max_rows, config.intermediate_size, precision)


class OutputHead:
    """Final norm and output projection, computed only for the rows whose logits are wanted."""

    def __init__(self, binding: Binding, norm: Callable[[Tensor, Activation, int], None]) -> None:
        config = binding.config
        self.ops = binding.ops
        self.norm = norm
        self.weight = binding.weights.linear("embed" if config.tie_word_embeddings else "lm_head")
        self.rows = self.ops.tensor(binding.max_rows, config.hidden_size)
        self.normed = self.ops.activation(binding.max_rows, config.hidden_size, binding.weights.precision)
        self.logits = self.ops.tensor(binding.max_rows, config.vocab_size)

    def forward(self, x: Tensor, step: Step) -> FloatArray:
        """Logits [num_logits, vocab], a view valid until the next call."""
        num_logits = step.num_logits
        if num_logits:
            self.ops.gather_rows(x, step.logit_rows, self.rows, num_logits)
            self.norm(self.rows, self.normed, num_logits)
            self.ops.linear(self.normed, self.weight, self.logits, num_logits)
        return self.logits.array[:num_logits]
