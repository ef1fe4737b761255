"""RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): BERT with positions that begin after the padding
token's, and a cross-encoder's head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture, no_generation
from enginehouse.runtime.models.bert import HEADS, encoder_config, tensors

PREFIX = "roberta."


def config_from_hf(name: str, hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a RoBERTa configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    padding = hf_config.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise CorruptModelError(f"{name} configuration: pad_token_id is {padding!r}, not a token id")
    return encoder_config(name, hf_config, position_offset=padding + 1, head="dense")


ARCHITECTURE = Architecture(
    "roberta", PREFIX, partial(config_from_hf, "roberta"), tensors, no_generation, HEADS
)
XLM_ROBERTA = Architecture(
    "xlm-roberta", PREFIX, partial(config_from_hf, "xlm-roberta"), tensors, no_generation, HEADS
)
