"""BERT (arXiv:1810.04805) as an encoder: MiniLM, BGE, E5 and their like, and cross-encoders of the same shape.

Every token sees every other one of its input, norms follow the residual sums, positions and token types are tables.
`roberta.py` shares all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.config import EncoderConfig, EncoderHead, ModelConfig
from enginehouse.runtime.models.architecture import Architecture, no_generation
from enginehouse.runtime.models.hf_options import HFOptions
from enginehouse.runtime.models.opt import layer_norm
from enginehouse.runtime.models.pooling import pooling_of
from enginehouse.runtime.models.tensors import TensorSpec

PREFIX = "bert."
HEADS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")
_CROSS_ENCODER = "ForSequenceClassification"


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a BERT configuration. Raises `UnsupportedModelError` or `CorruptModelError`, naming the option."""
    return encoder_config("bert", hf_config, position_offset=0, head="pooler")


def encoder_config(
    name: str, hf_config: Mapping[str, Any], *, position_offset: int, head: EncoderHead
) -> ModelConfig:
    """What BERT and RoBERTa have in common; `head` is that of a cross-encoder of the family."""
    options = HFOptions(hf_config)
    hidden_size, num_heads = options.integer("hidden_size"), options.integer("num_attention_heads")
    head_dim = options.divided("hidden_size", hidden_size, "num_attention_heads", num_heads)
    options.check_heads(head_dim, num_heads, num_heads)
    options.require("position_embedding_type", "absolute")
    options.require("is_decoder", False)
    options.require("add_cross_attention", False)
    options.require("embedding_size", hidden_size)
    activation = options.choice("hidden_act", "gelu", ["gelu", "gelu_new", "relu"])
    num_positions = options.integer("max_position_embeddings", 512) - position_offset
    if num_positions < 1:
        raise CorruptModelError(f"{name} configuration: max_position_embeddings leaves no position")
    is_cross_encoder = any(
        str(entry).endswith(_CROSS_ENCODER) for entry in hf_config.get("architectures") or ()
    )
    if is_cross_encoder:
        _require_one_output(hf_config)
    pooling = pooling_of(hf_config)
    return ModelConfig(
        architecture=name,
        vocab_size=options.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=options.integer("intermediate_size"),
        num_layers=options.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_context=num_positions,
        norm_eps=options.number("layer_norm_eps", 1e-12),
        activation="gelu" if activation == "gelu" else "gelu_new" if activation == "gelu_new" else "relu",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        position_offset=position_offset,
        encoder=EncoderConfig(
            num_token_types=options.integer("type_vocab_size", 2),
            max_input=min(num_positions, pooling.max_input or num_positions),
            pooling=pooling.pooling,
            normalize=pooling.normalize,
            lowercase=pooling.lowercase,
            head=head if is_cross_encoder else "none",
        ),
    )


def _require_one_output(hf_config: Mapping[str, Any]) -> None:
    labels = hf_config.get("id2label")
    num_labels = hf_config.get("num_labels") or (len(labels) if labels else 2)
    if num_labels != 1:
        raise UnsupportedModelError(
            f"a classifier with {num_labels} labels is not supported; a cross-encoder has one, its relevance score"
        )


def tensors(config: ModelConfig) -> list[TensorSpec]:
    """The packed tensors of an encoder, with checkpoint names that begin like the architecture's prefix."""
    prefix = _PREFIXES[config.architecture]
    encoder = config.encoder
    assert encoder is not None
    hidden, inner = config.hidden_size, config.intermediate_size
    source = f"{prefix}embeddings"
    num_positions = config.max_context + config.position_offset
    specs = [
        TensorSpec("embed", "table", (config.vocab_size, hidden), (f"{source}.word_embeddings.weight",)),
        TensorSpec("positions", "table", (num_positions, hidden), (f"{source}.position_embeddings.weight",)),
        TensorSpec(
            "types", "table", (encoder.num_token_types, hidden), (f"{source}.token_type_embeddings.weight",)
        ),
        *layer_norm("embed_norm", hidden, f"{source}.LayerNorm"),
    ]
    for index in range(config.num_layers):
        name, source = f"layers.{index}", f"{prefix}encoder.layer.{index}"
        qkv = tuple(f"{source}.attention.self.{part}" for part in ("query", "key", "value"))
        specs += [
            _linear(f"{name}.qkv", (3 * hidden, hidden), *qkv),
            _linear(f"{name}.attention_out", (hidden, hidden), f"{source}.attention.output.dense"),
            *layer_norm(f"{name}.attention_norm", hidden, f"{source}.attention.output.LayerNorm"),
            _linear(f"{name}.up", (inner, hidden), f"{source}.intermediate.dense"),
            _linear(f"{name}.down", (hidden, inner), f"{source}.output.dense"),
            *layer_norm(f"{name}.mlp_norm", hidden, f"{source}.output.LayerNorm"),
        ]
    if encoder.head == "pooler":
        specs += [
            _linear("head.dense", (hidden, hidden), f"{prefix}pooler.dense"),
            _linear("head.out", (1, hidden), "classifier"),
        ]
    elif encoder.head == "dense":
        specs += [
            _linear("head.dense", (hidden, hidden), "classifier.dense"),
            _linear("head.out", (1, hidden), "classifier.out_proj"),
        ]
    return specs


def _linear(name: str, shape: tuple[int, int], *modules: str) -> TensorSpec:
    weights = tuple(f"{module}.weight" for module in modules)
    return TensorSpec(name, "linear", shape, weights, tuple(f"{module}.bias" for module in modules))


_PREFIXES = {"bert": PREFIX, "roberta": "roberta.", "xlm-roberta": "roberta."}

ARCHITECTURE = Architecture("bert", PREFIX, config_from_hf, tensors, no_generation, HEADS)
