"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm on every query and key head, and heads of their own width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.llama import PREFIX, LlamaModel, decoder_config, tensors


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Qwen3 configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    options = HFOptions(hf_config)
    attention_bias = options.flag("attention_bias", False)
    return decoder_config(
        options,
        architecture="qwen3",
        window=options.sliding_window(enabled=options.flag("use_sliding_window", False), default=4096),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        default_head_dim=128,
        default_context=32768,
    )


ARCHITECTURE = Architecture("qwen3", PREFIX, config_from_hf, tensors, LlamaModel)
