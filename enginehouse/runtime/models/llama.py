"""Llama (arXiv:2302.13971) and what follows it: SmolLM2, TinyLlama, Llama 2 and 3, Mistral.

RMS norm before each block, rotary positions, grouped queries, gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture
from enginehouse.runtime.models.blocks import Binding, FloatArray, OutputHead, Step, Workspace
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.tensors import TensorSpec
from enginehouse.runtime.rope import rope_tables

RopeTables = tuple[FloatArray, FloatArray]

PREFIX = "model."


def decoder_config(
    options: HFOptions,
    *,
    architecture: str,
    window: int | None,
    attention_bias: bool,
    output_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_context: int = 2048,
) -> ModelConfig:
    """The configuration of a Llama-shaped decoder; the arguments are what families differ in."""
    hidden_size = options.integer("hidden_size")
    num_heads = options.integer("num_attention_heads")
    num_kv_heads = options.integer("num_key_value_heads", num_heads)
    if options.options.get("head_dim") is None and default_head_dim is None:
        head_dim = options.divided("hidden_size", hidden_size, "num_attention_heads", num_heads)
    else:
        head_dim = options.integer("head_dim", default_head_dim)
    options.check_heads(head_dim, num_heads, num_kv_heads)
    options.choice("hidden_act", "silu", ["silu"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=options.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=options.integer("intermediate_size"),
        num_layers=options.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=options.max_context(default_context, window),
        norm_eps=options.number("rms_norm_eps", 1e-6),
        activation="silu",
        rope=options.rope(head_dim, default_theta=10000.0),
        tie_word_embeddings=options.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def tensors(config: ModelConfig) -> list[TensorSpec]:
    """The packed tensors of a Llama-shaped decoder."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [TensorSpec("embed", "linear", (vocab, hidden), (f"{PREFIX}embed_tokens.weight",))]
    for index in range(config.num_layers):
        specs += _layer_tensors(config, f"layers.{index}", f"{PREFIX}layers.{index}")
    specs.append(TensorSpec("final_norm", "vector", (hidden,), (f"{PREFIX}norm.weight",)))
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head", "linear", (vocab, hidden), ("lm_head.weight",)))
    return specs


def _layer_tensors(config: ModelConfig, name: str, source: str) -> list[TensorSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(to: str, shape: tuple[int, int], modules: tuple[str, ...], has_bias: bool) -> TensorSpec:
        weights = tuple(f"{source}.{module}.weight" for module in modules)
        biases = tuple(f"{source}.{module}.bias" for module in modules) if has_bias else ()
        return TensorSpec(f"{name}.{to}", "linear", shape, weights, biases)

    def vector(to: str, width: int, module: str) -> TensorSpec:
        return TensorSpec(f"{name}.{to}", "vector", (width,), (f"{source}.{module}.weight",))

    qkv_shape = (config.q_size + 2 * config.kv_size, hidden)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    specs = [
        vector("attention_norm", hidden, "input_layernorm"),
        linear("qkv", qkv_shape, qkv, config.attention_bias),
        linear("attention_out", (hidden, config.q_size), ("self_attn.o_proj",), config.output_bias),
        vector("mlp_norm", hidden, "post_attention_layernorm"),
        linear("gate_up", (2 * inner, hidden), ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        linear("down", (hidden, inner), ("mlp.down_proj",), config.mlp_bias),
    ]
    if config.qk_norm:
        specs.append(vector("q_norm", config.head_dim, "self_attn.q_norm"))
        specs.append(vector("k_norm", config.head_dim, "self_attn.k_norm"))
    return specs


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Llama configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    options = HFOptions(hf_config)
    attention_bias = options.flag("attention_bias", False)
    return decoder_config(
        options,
        architecture="llama",
        window=None,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=options.flag("mlp_bias", False),
    )


def mistral_config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Mistral configuration: Llama's shape, its context limited to the sliding window."""
    options = HFOptions(hf_config)
    return decoder_config(
        options,
        architecture="llama",
        window=options.sliding_window(enabled=True, default=4096),
        attention_bias=False,
        output_bias=False,
        default_context=4096 * 32,
    )


class LlamaLayer:
    """One decoder layer, bound to its weights, its part of the KV cache and the shared buffers."""

    def __init__(self, binding: Binding, index: int, buffers: Workspace, rope: RopeTables) -> None:
        config, weights, name = binding.config, binding.weights, f"layers.{index}"
        self.ops, self.buffers, self.rope = binding.ops, buffers, rope
        self.kv = binding.kv.layers[index]
        self.num_heads, self.eps = config.num_heads, config.norm_eps
        self.scale = config.head_dim**-0.5
        self.attention_norm = weights.tensor(f"{name}.attention_norm")
        self.qkv = weights.linear(f"{name}.qkv")
        self.q_norm = weights.tensor(f"{name}.q_norm") if config.qk_norm else None
        self.k_norm = weights.tensor(f"{name}.k_norm") if config.qk_norm else None
        self.attention_out = weights.linear(f"{name}.attention_out")
        self.mlp_norm = weights.tensor(f"{name}.mlp_norm")
        self.gate_up = weights.linear(f"{name}.gate_up")
        self.down = weights.linear(f"{name}.down")

    def forward(self, step: Step) -> None:
        """Adds the layer's attention and MLP to the residual stream."""
        ops, b, rows = self.ops, self.buffers, step.rows

        ops.rms_norm(b.x, self.attention_norm, self.eps, b.normed, rows)
        ops.linear(b.normed, self.qkv, b.qkv, rows)
        ops.rope_and_store(
            b.qkv, step.positions, step.slots, self.rope, self.q_norm, self.k_norm, self.eps, self.kv,
            self.num_heads, rows,
        )  # fmt: skip
        ops.attention(b.qkv, self.kv, step.attention, self.scale, b.heads, self.num_heads, rows)
        ops.prepare(b.heads, b.attended, rows)
        ops.linear(b.attended, self.attention_out, b.x, rows, accumulate=True)

        ops.rms_norm(b.x, self.mlp_norm, self.eps, b.normed, rows)
        ops.linear(b.normed, self.gate_up, b.mlp, rows)
        ops.silu_mul(b.mlp, b.inner, rows)
        ops.linear(b.inner, self.down, b.x, rows, accumulate=True)


class LlamaModel:
    """The whole decoder: embeddings, layers, output head. `Model` protocol."""

    def __init__(self, binding: Binding) -> None:
        config = binding.config
        if config.rope is None:
            raise CorruptModelError(
                f"{config.architecture} needs rotary positions, and its configuration has none"
            )
        self.ops = binding.ops
        self.embed = binding.weights.linear("embed")
        self.buffers = Workspace(binding, mlp_width=2 * config.intermediate_size)
        rope = rope_tables(config.rope, config.head_dim, binding.max_positions)
        self.layers = [LlamaLayer(binding, index, self.buffers, rope) for index in range(config.num_layers)]
        final_norm, eps, rms_norm = (
            binding.weights.tensor("final_norm"),
            config.norm_eps,
            binding.ops.rms_norm,
        )
        self.head = OutputHead(binding, lambda x, out, rows: rms_norm(x, final_norm, eps, out, rows))

    def forward(self, step: Step) -> FloatArray:
        """See `Model.forward`."""
        self.ops.embed(step.tokens, self.embed, self.buffers.x, step.rows)
        for layer in self.layers:
            layer.forward(step)
        return self.head.forward(self.buffers.x, step)


ARCHITECTURE = Architecture("llama", PREFIX, config_from_hf, tensors, LlamaModel)
MISTRAL = Architecture("llama", PREFIX, mistral_config_from_hf, tensors, LlamaModel)
