"""GPT-2 (Radford et al., 2019): OPT's shape with GELU, q, k and v in one matrix, and matrices stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.opt import OPTModel, layer_norm
from enginehouse.runtime.models.tensors import TensorSpec

PREFIX = "transformer."


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a GPT-2 configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    options = HFOptions(hf_config)
    hidden_size = options.integer("n_embd")
    num_heads = options.integer("n_head")
    head_dim = options.divided("n_embd", hidden_size, "n_head", num_heads)
    options.check_heads(head_dim, num_heads, num_heads)
    options.require("scale_attn_weights", True)
    options.require("scale_attn_by_inverse_layer_idx", False)
    options.require("add_cross_attention", False)
    activation = options.choice("activation_function", "gelu_new", ["gelu_new", "gelu", "relu"])
    return ModelConfig(
        architecture="gpt2",
        vocab_size=options.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=options.integer("n_inner", 4 * hidden_size),
        num_layers=options.integer("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_context=options.integer("n_positions", 1024),
        norm_eps=options.number("layer_norm_epsilon", 1e-5),
        activation="gelu_new" if activation == "gelu_new" else "gelu" if activation == "gelu" else "relu",
        tie_word_embeddings=options.flag("tie_word_embeddings", True),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def tensors(config: ModelConfig) -> list[TensorSpec]:
    """The packed tensors of a GPT-2 model."""
    hidden, vocab, inner = config.hidden_size, config.vocab_size, config.intermediate_size
    specs = [
        TensorSpec("embed", "linear", (vocab, hidden), (f"{PREFIX}wte.weight",)),
        TensorSpec("positions", "table", (config.max_context, hidden), (f"{PREFIX}wpe.weight",)),
    ]
    for index in range(config.num_layers):
        name, source = f"layers.{index}", f"{PREFIX}h.{index}"
        specs += [
            *layer_norm(f"{name}.attention_norm", hidden, f"{source}.ln_1"),
            _conv1d(f"{name}.qkv", (3 * hidden, hidden), f"{source}.attn.c_attn"),
            _conv1d(f"{name}.attention_out", (hidden, hidden), f"{source}.attn.c_proj"),
            *layer_norm(f"{name}.mlp_norm", hidden, f"{source}.ln_2"),
            _conv1d(f"{name}.up", (inner, hidden), f"{source}.mlp.c_fc"),
            _conv1d(f"{name}.down", (hidden, inner), f"{source}.mlp.c_proj"),
        ]
    specs += layer_norm("final_norm", hidden, f"{PREFIX}ln_f")
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head", "linear", (vocab, hidden), ("lm_head.weight",)))
    return specs


def _conv1d(name: str, shape: tuple[int, int], module: str) -> TensorSpec:
    return TensorSpec(name, "linear", shape, (f"{module}.weight",), (f"{module}.bias",), transpose=True)


ARCHITECTURE = Architecture("gpt2", PREFIX, config_from_hf, tensors, OPTModel)
