"""OPT (arXiv:2205.01068) as facebook/opt-125m has it: learned positions, layer norm before each block, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.models.architecture import Architecture
from enginehouse.runtime.models.blocks import Binding, FloatArray, OutputHead, Step, Workspace
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.tensors import TensorSpec

PREFIX = "model."
POSITION_OFFSET = 2


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads an OPT configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    options = HFOptions(hf_config)
    hidden_size = options.integer("hidden_size")
    num_heads = options.integer("num_attention_heads")
    head_dim = options.divided("hidden_size", hidden_size, "num_attention_heads", num_heads)
    options.check_heads(head_dim, num_heads, num_heads)
    projected = options.integer("word_embed_proj_dim", hidden_size)
    if projected != hidden_size:
        raise UnsupportedModelError(
            f"opt with word_embed_proj_dim={projected} and hidden_size={hidden_size} is not supported "
            "(embeddings that are projected, as in opt-350m)"
        )
    options.require("do_layer_norm_before", True)
    options.require("_remove_final_layer_norm", False)
    options.require("layer_norm_elementwise_affine", True)
    activation = options.choice("activation_function", "relu", ["relu", "gelu"])
    has_bias = options.flag("enable_bias", True)
    return ModelConfig(
        architecture="opt",
        vocab_size=options.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=options.integer("ffn_dim"),
        num_layers=options.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_context=options.max_context(2048, window=None),
        norm_eps=1e-5,
        activation="relu" if activation == "relu" else "gelu",
        tie_word_embeddings=options.flag("tie_word_embeddings", True),
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        position_offset=POSITION_OFFSET,
    )


def tensors(config: ModelConfig) -> list[TensorSpec]:
    """The packed tensors of an OPT model."""
    hidden, vocab, inner = config.hidden_size, config.vocab_size, config.intermediate_size
    decoder = f"{PREFIX}decoder"
    num_positions = config.max_context + config.position_offset
    specs = [
        TensorSpec("embed", "linear", (vocab, hidden), (f"{decoder}.embed_tokens.weight",)),
        TensorSpec("positions", "table", (num_positions, hidden), (f"{decoder}.embed_positions.weight",)),
    ]
    for index in range(config.num_layers):
        name, source = f"layers.{index}", f"{decoder}.layers.{index}"
        qkv = tuple(f"{source}.self_attn.{part}_proj" for part in "qkv")
        specs += [
            *layer_norm(f"{name}.attention_norm", hidden, f"{source}.self_attn_layer_norm"),
            _linear(f"{name}.qkv", (3 * hidden, hidden), qkv, config.attention_bias),
            _linear(
                f"{name}.attention_out",
                (hidden, hidden),
                (f"{source}.self_attn.out_proj",),
                config.output_bias,
            ),
            *layer_norm(f"{name}.mlp_norm", hidden, f"{source}.final_layer_norm"),
            _linear(f"{name}.up", (inner, hidden), (f"{source}.fc1",), config.mlp_bias),
            _linear(f"{name}.down", (hidden, inner), (f"{source}.fc2",), config.mlp_bias),
        ]
    specs += layer_norm("final_norm", hidden, f"{decoder}.final_layer_norm")
    if not config.tie_word_embeddings:
        specs.append(TensorSpec("lm_head", "linear", (vocab, hidden), ("lm_head.weight",)))
    return specs


def layer_norm(name: str, width: int, source: str) -> list[TensorSpec]:
    """Weight and bias of one layer norm."""
    return [
        TensorSpec(f"{name}.{part}", "vector", (width,), (f"{source}.{part}",)) for part in ("weight", "bias")
    ]


def _linear(name: str, shape: tuple[int, int], modules: tuple[str, ...], has_bias: bool) -> TensorSpec:
    weights = tuple(f"{module}.weight" for module in modules)
    biases = tuple(f"{module}.bias" for module in modules) if has_bias else ()
    return TensorSpec(name, "linear", shape, weights, biases)


class OPTLayer:
    """One decoder layer, bound to its weights, its part of the KV cache and the shared buffers."""

    def __init__(self, binding: Binding, index: int, buffers: Workspace) -> None:
        config, weights, name = binding.config, binding.weights, f"layers.{index}"
        self.ops, self.buffers, self.kv = binding.ops, buffers, binding.kv.layers[index]
        self.activate = getattr(binding.ops, config.activation)
        self.num_heads, self.eps = config.num_heads, config.norm_eps
        self.scale = config.head_dim**-0.5
        self.attention_norm = weights.tensor(f"{name}.attention_norm.weight")
        self.attention_norm_bias = weights.tensor(f"{name}.attention_norm.bias")
        self.qkv = weights.linear(f"{name}.qkv")
        self.attention_out = weights.linear(f"{name}.attention_out")
        self.mlp_norm = weights.tensor(f"{name}.mlp_norm.weight")
        self.mlp_norm_bias = weights.tensor(f"{name}.mlp_norm.bias")
        self.up = weights.linear(f"{name}.up")
        self.down = weights.linear(f"{name}.down")

    def forward(self, step: Step) -> None:
        """Adds the layer's attention and MLP to the residual stream."""
        ops, b, rows = self.ops, self.buffers, step.rows

        ops.layer_norm(b.x, self.attention_norm, self.attention_norm_bias, self.eps, b.normed, rows)
        ops.linear(b.normed, self.qkv, b.qkv, rows)
        ops.rope_and_store(
            b.qkv, step.positions, step.slots, None, None, None, self.eps, self.kv, self.num_heads, rows
        )
        ops.attention(b.qkv, self.kv, step.attention, self.scale, b.heads, self.num_heads, rows)
        ops.prepare(b.heads, b.attended, rows)
        ops.linear(b.attended, self.attention_out, b.x, rows, accumulate=True)

        ops.layer_norm(b.x, self.mlp_norm, self.mlp_norm_bias, self.eps, b.normed, rows)
        ops.linear(b.normed, self.up, b.mlp, rows)
        self.activate(b.mlp, b.inner, rows)
        ops.linear(b.inner, self.down, b.x, rows, accumulate=True)


class OPTModel:
    """The whole decoder: embeddings and learned positions, layers, output head. `Model` protocol."""

    def __init__(self, binding: Binding) -> None:
        config, weights, ops = binding.config, binding.weights, binding.ops
        self.ops = ops
        self.embed = weights.linear("embed")
        self.positions = weights.tensor("positions")[config.position_offset :]
        self.buffers = Workspace(binding, mlp_width=config.intermediate_size)
        self.layers = [OPTLayer(binding, index, self.buffers) for index in range(config.num_layers)]
        norm, bias, eps = (
            weights.tensor("final_norm.weight"),
            weights.tensor("final_norm.bias"),
            config.norm_eps,
        )
        self.head = OutputHead(binding, lambda x, out, rows: ops.layer_norm(x, norm, bias, eps, out, rows))

    def forward(self, step: Step) -> FloatArray:
        """See `Model.forward`."""
        self.ops.embed(step.tokens, self.embed, self.buffers.x, step.rows)
        self.ops.add_rows(self.positions, step.positions, self.buffers.x, step.rows)
        for layer in self.layers:
            layer.forward(step)
        return self.head.forward(self.buffers.x, step)


ARCHITECTURE = Architecture("opt", PREFIX, config_from_hf, tensors, OPTModel)
