"""GGUF metadata and tensor names in Hugging Face terms."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.errors import CorruptModelError, ModelError, UnsupportedModelError
from enginehouse.runtime.models import architecture_for, load_tensor
from enginehouse.runtime.weights.gguf_checkpoint import GGUFCheckpoint
from tests.support.tiny_gguf import head_norms, qkv_biases, write_gguf, write_tiny_gguf
from tests.support.tiny_models import llama_config, llama_tensors

SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32}]
)
def test_a_llama_is_what_its_converter_was_given(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", seed=5, **options))
    config = llama_config(**options)
    assert checkpoint.config["model_type"] == "llama"
    assert {key: checkpoint.config[key] for key in SHARED_KEYS} == {key: config[key] for key in SHARED_KEYS}
    assert architecture_for(checkpoint.config).config_from_hf(checkpoint.config) == architecture_for(
        config
    ).config_from_hf(config)
    tensors = llama_tensors(config, seed=5)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.shape(name) == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


@pytest.mark.parametrize(("architecture", "extra"), [("qwen2", qkv_biases), ("qwen3", head_norms)])
def test_qwen_keeps_its_row_order(tmp_path: Path, architecture: str, extra: Any) -> None:
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, seed=6))
    config = llama_config()
    tensors = llama_tensors(config, seed=6) | extra(config, seed=6)
    assert checkpoint.config["model_type"] == architecture
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


def test_llama_biases_of_q_and_k_are_reordered_too(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    extra = {f"blk.{layer}.attn_{part}.bias": bias for layer in range(2) for part in ("q", "output")}
    extra |= {f"blk.{layer}.attn_{part}.bias": bias[:32] for layer in range(2) for part in ("k", "v")}
    checkpoint = GGUFCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", extra_tensors=extra))
    assert checkpoint.config["attention_bias"] is True
    head = [*range(0, 16, 2), *range(1, 16, 2)]
    expected = [16 * index + row for index in range(4) for row in head]
    assert checkpoint.read("model.layers.0.self_attn.q_proj.bias").tolist() == expected
    assert checkpoint.read("model.layers.1.self_attn.k_proj.bias").tolist() == expected[:32]
    assert checkpoint.read("model.layers.1.self_attn.v_proj.bias").tolist() == bias[:32].tolist()


def test_gpt2_matrices_are_in_out_again(tmp_path: Path) -> None:
    hidden, rng = 8, np.random.default_rng(7)
    shapes = {
        "token_embd.weight": (20, hidden),
        "position_embd.weight": (16, hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_norm.bias": (hidden,),
        "blk.0.attn_qkv.weight": (3 * hidden, hidden),
        "blk.0.attn_qkv.bias": (3 * hidden,),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.attn_output.bias": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_norm.bias": (hidden,),
        "blk.0.ffn_up.weight": (4 * hidden, hidden),
        "blk.0.ffn_up.bias": (4 * hidden,),
        "blk.0.ffn_down.weight": (hidden, 4 * hidden),
        "blk.0.ffn_down.bias": (hidden,),
        "output_norm.weight": (hidden,),
        "output_norm.bias": (hidden,),
    }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    metadata = {
        "gpt2.block_count": 1,
        "gpt2.context_length": 16,
        "gpt2.embedding_length": hidden,
        "gpt2.feed_forward_length": 4 * hidden,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
    }
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "gpt2", metadata, tensors))
    config = architecture_for(checkpoint.config).config_from_hf(checkpoint.config)
    assert (config.num_heads, config.max_context, config.vocab_size) == (2, 16, 20)
    assert config.tie_word_embeddings
    assert checkpoint.shape("transformer.h.0.attn.c_attn.weight") == (hidden, 3 * hidden)
    stored = {
        "transformer.wte.weight": tensors["token_embd.weight"],
        "transformer.wpe.weight": tensors["position_embd.weight"],
        "transformer.h.0.attn.c_attn.weight": tensors["blk.0.attn_qkv.weight"].T,
        "transformer.h.0.attn.c_proj.weight": tensors["blk.0.attn_output.weight"].T,
        "transformer.h.0.mlp.c_fc.weight": tensors["blk.0.ffn_up.weight"].T,
        "transformer.h.0.mlp.c_proj.weight": tensors["blk.0.ffn_down.weight"].T,
        "transformer.h.0.mlp.c_fc.bias": tensors["blk.0.ffn_up.bias"],
        "transformer.ln_f.bias": tensors["output_norm.bias"],
    }
    for name, tensor in stored.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)
    assert load_all(checkpoint) == sum(tensor.size for tensor in tensors.values())


def test_llama3_scaling_comes_as_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8).astype(np.float32)
    path = write_tiny_gguf(tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    checkpoint = GGUFCheckpoint(path)
    assert "rope_freqs.weight" not in checkpoint.names()
    rope = architecture_for(checkpoint.config).config_from_hf(checkpoint.config).rope
    assert rope is not None
    assert rope.scaling == "factors"
    np.testing.assert_allclose(rope.factors, factors)


def test_linear_scaling(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = GGUFCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_mistral_is_limited_to_its_window(tmp_path: Path) -> None:
    config = GGUFCheckpoint(
        write_tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 100})
    ).config
    assert architecture_for(config).config_from_hf(config).max_context == 100


def test_one_number_per_layer_is_one_number(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": [2, 2]})
    assert GGUFCheckpoint(path).config["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"architecture": "qwen2", "metadata": {"qwen2.block_count": None}},
            CorruptModelError,
            "qwen2.block_count",
        ),
        (
            {"metadata": {"llama.embedding_length": "64"}},
            CorruptModelError,
            "embedding_length.*positive integer",
        ),
        ({"metadata": {"llama.rope.freq_base": -1.0}}, CorruptModelError, "freq_base"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, CorruptModelError, "share evenly"),
        (
            {"metadata": {"llama.attention.head_count_kv": [1, 2]}},
            UnsupportedModelError,
            "differs between layers",
        ),
        ({"metadata": {"llama.expert_count": 8}}, UnsupportedModelError, "mixture-of-experts"),
        ({"metadata": {"split.count": 3}}, UnsupportedModelError, "split"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, UnsupportedModelError, "part of each head"),
        ({"metadata": {"llama.attention.value_length": 8}}, UnsupportedModelError, "different width"),
        (
            {"extra_tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 64), "f4")}},
            UnsupportedModelError,
            "'blk.0.ffn_gate_inp.weight' is not part of a llama",
        ),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelError], said: str
) -> None:
    with pytest.raises(error, match=said):
        GGUFCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", **changes))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {"token_embd.weight": np.ones((2, 2), "f4")})
    with pytest.raises(
        UnsupportedModelError, match="'mamba' is not supported; supported are gpt2, llama, qwen2, qwen3"
    ):
        GGUFCheckpoint(path)


def load_all(checkpoint: GGUFCheckpoint) -> int:
    """Load every tensor the architecture asks for; the number of weights."""
    architecture = architecture_for(checkpoint.config)
    config = architecture.config_from_hf(checkpoint.config)
    if config.num_layers > len(checkpoint.names()):
        raise CorruptModelError("more layers than tensors")
    available = frozenset(checkpoint.names())
    total = 0
    for spec in architecture.tensors(config):
        weight, bias = load_tensor(spec, checkpoint, available, architecture.prefix)
        total += weight.size + (0 if bias is None else bias.size)
    return total


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_metadata_does_worse_than_a_named_error(tmp_path: Path, data: st.DataObject) -> None:
    """Wrong values under the right keys, of every type: read, or refused by a model error."""
    keys = [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.attention.sliding_window",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scale_linear",
        "llama.expert_count",
        "llama.vocab_size",
        "split.count",
        "general.alignment",
        "tokenizer.ggml.eos_token_id",
    ]
    values = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(0, 0xFFFFFFFF),
        st.integers(0, 130),
        st.floats(width=32),
        st.text(max_size=8),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.lists(st.text(max_size=3), min_size=1, max_size=2),
    )
    metadata = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, num_layers=1, metadata=metadata)
    with contextlib.suppress(CorruptModelError, UnsupportedModelError):
        load_all(GGUFCheckpoint(path))
