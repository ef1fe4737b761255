"""What a model is, independent of where its weights came from: the shape every other part computes from.

A `ModelConfig` is made once from a Hugging Face style configuration (by the architecture's `config_from_hf`),
written into the packed model's manifest, and read back by the worker.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["silu", "relu", "gelu", "gelu_new"]
RopeScaling = Literal["none", "linear", "llama3", "factors"]
KVDtype = Literal["fp16", "fp32"]
Pooling = Literal["mean", "cls"]
EncoderHead = Literal["none", "pooler", "dense"]

_KV_ITEM_BYTES: dict[KVDtype, int] = {"fp16": 2, "fp32": 4}


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rotary position embedding in half-rotation order (arXiv:2104.09864), and how it is stretched.

    `linear` divides every frequency by `factor` (arXiv:2306.15595). `llama3` divides only the slow ones, with a
    ramp between two wavelengths (the Llama 3.1 release). `factors` divides frequency i by `factors[i]`, which is
    how GGUF files store `llama3` (tensor `rope_freqs.weight`).
    """

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_context: int = 0
    """Context of the unstretched model, in tokens; used by `llama3`."""
    factors: tuple[float, ...] = ()
    """One divisor per frequency, head_dim / 2 of them; used by `factors`."""


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an encoder has beyond its layers: token types, and how hidden states become the answer."""

    num_token_types: int
    max_input: int
    """Longest input in tokens, the special ones included: what sentence-transformers is told, or the positions."""
    pooling: Pooling = "mean"
    normalize: bool = False
    """Embeddings are scaled to length one."""
    lowercase: bool = False
    """Text is lowercased before it is tokenised (`do_lower_case` of sentence_bert_config.json)."""
    head: EncoderHead = "none"
    """A cross-encoder's: BERT's pooler and classifier, or RoBERTa's dense layer and projection. One output."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything the forward pass, the packer and the memory plan need to know of a model."""

    architecture: str
    """Key of the registry in `enginehouse.runtime.models`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP; gated MLPs have two matrices of this width."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Longest prompt plus output, in tokens. Already limited to a sliding window, where there is one."""
    norm_eps: float
    activation: Activation
    rope: RopeConfig | None = None
    """None where positions are learned."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have biases."""
    output_bias: bool = False
    """The attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """q and k pass an RMS norm per head before RoPE."""
    position_offset: int = 0
    """Row of the learned position table that belongs to position 0."""
    encoder: EncoderConfig | None = None
    """None for models that generate text."""

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """KV cache bytes one token takes, over all layers; values are padded to whole vectors of 16."""
        padded_dim = -(-self.head_dim // 16) * 16
        per_head = (self.head_dim + padded_dim) * _KV_ITEM_BYTES[kv_dtype]
        return self.num_layers * self.num_kv_heads * per_head
