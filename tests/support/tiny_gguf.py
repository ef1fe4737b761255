"""Tiny random GGUF files for tests, as llama.cpp's converters write them: their names, order of q and k, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    SPECIAL_TOKENS,
    llama_config,
    llama_tensors,
    tiny_vocabulary,
)

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> Path:
    """A llama, qwen2 or qwen3 with the weights of `llama_tensors(llama_config(**options), seed)`.

    `quantization` applies to matrices. `metadata` adds keys or replaces values (None leaves a key out);
    `extra_tensors` are added under their GGUF names.
    """
    config = llama_config(**options)
    tensors = llama_tensors(config, seed)
    if architecture == "qwen2":
        tensors |= qkv_biases(config, seed)
    if architecture == "qwen3":
        tensors |= head_norms(config, seed)
    named = {}
    for name, tensor in tensors.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
        named[gguf_name(name)] = tensor
    values = (
        llama_metadata(architecture, config) | tokenizer_metadata(config["vocab_size"]) | (metadata or {})
    )
    return write_gguf(path, architecture, values, named | (extra_tensors or {}), quantization)


def qkv_biases(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Biases of q, k and v, as qwen2 has them."""
    rng = np.random.default_rng((seed, 1))
    widths = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    widths["v_proj"] = widths["k_proj"]
    return {
        f"model.layers.{layer}.self_attn.{module}.bias": rng.standard_normal(
            heads * config["head_dim"]
        ).astype("f4")
        for layer in range(config["num_hidden_layers"])
        for module, heads in widths.items()
    }


def head_norms(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Norms of q and k heads, as qwen3 has them."""
    rng = np.random.default_rng((seed, 2))
    return {
        f"model.layers.{layer}.self_attn.{module}.weight": (
            1 + 0.1 * rng.standard_normal(config["head_dim"])
        ).astype("f4")
        for layer in range(config["num_hidden_layers"])
        for module in ("q_norm", "k_norm")
    }


def gguf_name(name: str) -> str:
    """Hugging Face name of a llama's tensor to GGUF's."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{LLAMA_NAMES[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LLAMA_NAMES[inner]}.{kind}"


def interleave(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k: from Hugging Face's halves to GGUF's pairs, one row at a time to be plainly right."""
    head_dim = tensor.shape[0] // num_heads
    out = np.empty_like(tensor)
    for head in range(num_heads):
        for index in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * index] = tensor[start + index]
            out[start + 2 * index + 1] = tensor[start + head_dim // 2 + index]
    return out


def llama_metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a llama-shaped model, from its Hugging Face configuration."""
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    return {f"{architecture}.{key}": value for key, value in own.items()}


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """The byte-level tokenizer of `write_tiny_tokenizer` in GGUF's keys."""
    vocab, merges = tiny_vocabulary(vocab_size)
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.token_type": [control if token in SPECIAL_TOKENS else normal for token in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quantization: str = "F32",
) -> Path:
    """Write a GGUF file; matrices in `quantization`, vectors in F32. None values of the metadata are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or quantization == "F32":
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        raise TypeError(f"cannot write {value!r} into GGUF metadata")
