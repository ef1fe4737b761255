"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.llama import PREFIX, LlamaModel, decoder_config, tensors


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Qwen2 configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    options = HFOptions(hf_config)
    return decoder_config(
        options,
        architecture="qwen2",
        window=options.sliding_window(enabled=options.flag("use_sliding_window", False), default=4096),
        attention_bias=True,
        output_bias=False,
        default_context=32768,
    )


ARCHITECTURE = Architecture("qwen2", PREFIX, config_from_hf, tensors, LlamaModel)
