"""Tiny random models, one per architecture and option, made from a seed by numpy alone.

`scripts/reference_logits.py` gives them to Transformers and stores what it computes; the tests make the same
weights again and compare. The legacy `RandomState` is used because numpy promises never to change its stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_models import write_safetensors

DATA = Path(__file__).resolve().parents[2] / "data" / "logits"
NUM_GREEDY = 24
VOCAB_SIZE = 331
"""No multiple of the 16 outputs that kernels compute together."""

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model to compare: its Hugging Face configuration and the prompt length."""

    name: str
    config: dict[str, Any]
    prompt_tokens: int = 75
    salt: int = 0
    """Changed when a seed gives a greedy answer with near ties."""

    @property
    def seed(self) -> int:
        return zlib.crc32(f"{self.name} {self.salt}".encode())

    def prompt(self) -> list[int]:
        """Token ids; long enough for three KV blocks, where the context allows it."""
        rng = np.random.RandomState(self.seed ^ 1)
        return [int(token) for token in rng.randint(0, VOCAB_SIZE, self.prompt_tokens)]

    def logit_rows(self) -> list[int]:
        """Prompt positions whose logits are stored: both sides of a block boundary, the middle and the ends."""
        return [0, 1, 31, 32, 33, 47, self.prompt_tokens - 1]

    def tensors(self) -> dict[str, np.ndarray]:
        """fp32 weights under their Hugging Face names."""
        rng = np.random.RandomState(self.seed)
        return _TENSORS[self.config["model_type"]](self.config, _Random(rng))


VARIANTS = [
    Variant("llama-gqa", _LLAMA),
    Variant(
        "llama-tied-llama3-rope-mqa",
        {
            **_LLAMA,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "num_attention_heads": 2,
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA3_ROPE,
        },
    ),
    Variant(
        "llama-linear-rope-bias-mha",
        {
            **_LLAMA,
            "hidden_size": 160,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    Variant(
        "mistral-window",
        {
            **_LLAMA,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 96,
        },
        prompt_tokens=70,
    ),
    Variant(
        "qwen2",
        {
            **_LLAMA,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "qwen3-wide-heads",
        {
            **_LLAMA,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "hidden_size": 96,
        },
    ),
    Variant(
        "opt",
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "word_embed_proj_dim": 96,
            "ffn_dim": 200,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "max_position_embeddings": 128,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "gpt2",
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": VOCAB_SIZE,
            "n_embd": 192,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 128,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
]


class _Random:
    """Weights scaled so that activations keep about unit size and every part of the model is felt in the logits."""

    def __init__(self, rng: np.random.RandomState) -> None:
        self._rng = rng

    def matrix(self, num_out: int, num_in: int, gain: float = 1.0) -> np.ndarray:
        return (self._rng.standard_normal((num_out, num_in)) * gain / np.sqrt(num_in)).astype(np.float32)

    def around(self, centre: float, width: int, spread: float = 0.2) -> np.ndarray:
        return (centre + spread * self._rng.standard_normal(width)).astype(np.float32)


def _llama_tensors(config: dict[str, Any], random: _Random) -> dict[str, np.ndarray]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias = config.get("attention_bias", False)
    qkv_bias = attention_bias or config["model_type"] == "qwen2"
    # A large tied embedding would answer every token with itself.
    embedding_gain = 1.5 if config["tie_word_embeddings"] else 6.0
    tensors = {"model.embed_tokens.weight": random.matrix(vocab, hidden, embedding_gain)}

    def linear(name: str, num_out: int, num_in: int, gain: float, has_bias: bool) -> None:
        tensors[f"{name}.weight"] = random.matrix(num_out, num_in, gain)
        if has_bias:
            tensors[f"{name}.bias"] = random.around(0.0, num_out)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = random.around(1.0, hidden)
        linear(f"{layer}.self_attn.q_proj", q_width, hidden, 1.5, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_width, hidden, 1.5, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_width, hidden, 1.0, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q_width, 3.0, attention_bias)
        if config["model_type"] == "qwen3":
            tensors[f"{layer}.self_attn.q_norm.weight"] = random.around(1.5, head_dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = random.around(1.0, head_dim)
        tensors[f"{layer}.post_attention_layernorm.weight"] = random.around(1.0, hidden)
        mlp_bias = config.get("mlp_bias", False)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, 1.0, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, 1.0, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, 3.0, mlp_bias)
    tensors["model.norm.weight"] = random.around(1.0, hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random.matrix(vocab, hidden, 3.0)
    return tensors


def _opt_tensors(config: dict[str, Any], random: _Random) -> dict[str, np.ndarray]:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    num_positions = config["max_position_embeddings"] + 2
    tensors = {
        "model.decoder.embed_tokens.weight": random.matrix(config["vocab_size"], hidden, 1.5),
        "model.decoder.embed_positions.weight": random.matrix(num_positions, hidden, 1.0),
    }

    def add(name: str, weight: np.ndarray, bias_width: int) -> None:
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.bias"] = random.around(0.0, bias_width)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.decoder.layers.{index}"
        add(f"{layer}.self_attn_layer_norm", random.around(1.0, hidden), hidden)
        for part, gain in (("q", 1.5), ("k", 1.5), ("v", 1.0)):
            add(f"{layer}.self_attn.{part}_proj", random.matrix(hidden, hidden, gain), hidden)
        add(f"{layer}.self_attn.out_proj", random.matrix(hidden, hidden, 3.0), hidden)
        add(f"{layer}.final_layer_norm", random.around(1.0, hidden), hidden)
        add(f"{layer}.fc1", random.matrix(inner, hidden), inner)
        add(f"{layer}.fc2", random.matrix(hidden, inner, 3.0), hidden)
    add("model.decoder.final_layer_norm", random.around(1.0, hidden), hidden)
    return tensors


def _gpt2_tensors(config: dict[str, Any], random: _Random) -> dict[str, np.ndarray]:
    hidden, inner = config["n_embd"], 4 * config["n_embd"]
    tensors = {
        "transformer.wte.weight": random.matrix(config["vocab_size"], hidden, 1.5),
        "transformer.wpe.weight": random.matrix(config["n_positions"], hidden, 1.0),
    }

    def conv1d(name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"] = np.ascontiguousarray(random.matrix(num_out, num_in, gain).T)
        tensors[f"{name}.bias"] = random.around(0.0, num_out)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = random.around(1.0, hidden)
        tensors[f"{name}.bias"] = random.around(0.0, hidden)

    for index in range(config["n_layer"]):
        layer = f"transformer.h.{index}"
        norm(f"{layer}.ln_1")
        conv1d(f"{layer}.attn.c_attn", 3 * hidden, hidden, 1.3)
        conv1d(f"{layer}.attn.c_proj", hidden, hidden, 3.0)
        norm(f"{layer}.ln_2")
        conv1d(f"{layer}.mlp.c_fc", inner, hidden)
        conv1d(f"{layer}.mlp.c_proj", hidden, inner, 3.0)
    norm("transformer.ln_f")
    return tensors


_TENSORS: dict[str, Callable[[dict[str, Any], _Random], dict[str, np.ndarray]]] = {
    "llama": _llama_tensors,
    "mistral": _llama_tensors,
    "qwen2": _llama_tensors,
    "qwen3": _llama_tensors,
    "opt": _opt_tensors,
    "gpt2": _gpt2_tensors,
}


def write_weights(variant: Variant, path: Path) -> None:
    """Write the variant's weights as one fp32 safetensors file."""
    write_safetensors(path, variant.tensors())
