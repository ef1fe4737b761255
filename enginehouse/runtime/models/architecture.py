"""What a model family gives the rest of the runtime: reading its configuration, its weights, its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.tensors import TensorSpec

if TYPE_CHECKING:
    from enginehouse.runtime.models.blocks import Binding, Model


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry of the registry.

    `config_from_hf` raises `UnsupportedModelError` or `CorruptModelError`, naming the option. `tensors` lists the
    packed model's tensors. `build` binds weights and buffers into a `Model`.
    """

    name: str
    prefix: str
    """Leading part of checkpoint tensor names that files saved from the bare decoder leave out."""
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Callable[[ModelConfig], list[TensorSpec]]
    build: Callable[[Binding], Model]
    heads: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "Model")
    """Endings of `architectures` entries whose weights this file can use (a bare model with tied embeddings can
    generate text)."""


def no_generation(binding: Binding) -> Model:
    """`build` of an encoder, which has no next token to predict; see `bert.Encoder`. Raises `UnsupportedModelError`."""
    raise UnsupportedModelError(f"{binding.config.architecture} is an encoder: it does not generate text")
