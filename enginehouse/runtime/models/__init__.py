"""Architectures, one short file each, and the registry that finds the right one for a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime.models import bert, gpt2, llama, opt, qwen2, qwen3, roberta
from enginehouse.runtime.models.architecture import Architecture, no_generation
from enginehouse.runtime.models.tensors import TensorReader, TensorSpec, load_tensor

__all__ = [
    "Architecture",
    "TensorReader",
    "TensorSpec",
    "architecture_for",
    "architecture_named",
    "load_tensor",
    "supported_model_types",
]

_BY_MODEL_TYPE: dict[str, Architecture] = {
    "llama": llama.ARCHITECTURE,
    "mistral": llama.MISTRAL,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "opt": opt.ARCHITECTURE,
    "gpt2": gpt2.ARCHITECTURE,
    "bert": bert.ARCHITECTURE,
    "roberta": roberta.ARCHITECTURE,
    "xlm-roberta": roberta.XLM_ROBERTA,
}
_BY_NAME = {architecture.name: architecture for architecture in _BY_MODEL_TYPE.values()}


def supported_model_types() -> list[str]:
    """Values of `model_type` that `architecture_for` accepts."""
    return sorted(_BY_MODEL_TYPE)


def architecture_for(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture of a Hugging Face configuration, by its `model_type`.

    Raises `UnsupportedModelError`, which names what is not supported.
    """
    model_type = hf_config.get("model_type")
    architecture = _BY_MODEL_TYPE.get(str(model_type))
    if architecture is None:
        raise UnsupportedModelError(
            f"architecture {model_type!r} is not supported; supported: {', '.join(supported_model_types())}"
        )
    for name in hf_config.get("architectures") or ():
        if not str(name).endswith(architecture.heads):
            raise UnsupportedModelError(_wrong_head(str(name), architecture))
    if hf_config.get("quantization_config"):
        method = hf_config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"weights quantised with {method!r} are not supported; use the F32, F16 or BF16 weights, or a GGUF file"
        )
    return architecture


def _wrong_head(name: str, architecture: Architecture) -> str:
    if architecture.build is no_generation:
        return (
            f"{name} is not supported; of this family those that end in {', '.join(architecture.heads)} are"
        )
    return f"{name} does not generate text; a causal language model is needed"


def architecture_named(name: str) -> Architecture:
    """The architecture a packed model's configuration names. Raises `UnsupportedModelError`."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UnsupportedModelError(f"architecture {name!r} is not supported") from None
