"""Reading configurations and tensors: what is understood, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.config import ModelConfig, RopeConfig
from enginehouse.runtime.models import (
    TensorSpec,
    architecture_for,
    architecture_named,
    load_tensor,
    supported_model_types,
)
from tests.unit.models.driving import DictReader
from tests.unit.models.variants import VARIANTS, Variant

BY_NAME = {variant.name: variant.config for variant in VARIANTS}
LLAMA, MISTRAL, QWEN2 = BY_NAME["llama-gqa"], BY_NAME["mistral-window"], BY_NAME["qwen2"]
QWEN3, OPT, GPT2 = BY_NAME["qwen3-wide-heads"], BY_NAME["opt"], BY_NAME["gpt2"]


def read(hf_config: dict[str, Any], **changes: Any) -> ModelConfig:
    changed = {**hf_config, **changes}
    return architecture_for(changed).config_from_hf(changed)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_config_survives_the_manifest(variant: Variant) -> None:
    config = read(variant.config)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
    assert architecture_named(config.architecture).name == config.architecture


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tensor_tables_use_every_tensor_of_the_checkpoint_once(variant: Variant) -> None:
    specs = architecture_for(variant.config).tensors(read(variant.config))
    used = [source for spec in specs for source in (*spec.sources, *spec.bias)]
    assert sorted(used) == sorted(variant.tensors())
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)


def test_smollm2() -> None:
    config = read(
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_theta": 100000,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "tie_word_embeddings": True,
        }
    )
    assert config.head_dim == 64
    assert config.kv_bytes_per_token("fp16") == 30 * 2 * 3 * 64 * 2
    assert config.kv_bytes_per_token("fp32") == 2 * config.kv_bytes_per_token("fp16")


def test_newer_rope_parameters_say_the_same_as_the_older_keys() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    older = read(LLAMA, rope_theta=500000.0, rope_scaling=scaling)
    newer = read(LLAMA, rope_theta=None, rope_parameters={**scaling, "rope_theta": 500000.0})
    assert older.rope == newer.rope
    assert older.rope is not None
    assert (older.rope.scaling, older.rope.factor, older.rope.theta) == ("llama3", 32.0, 500000.0)
    assert older.rope.original_max_context == 8192


def test_rope_factors_as_gguf_files_have_them() -> None:
    rope = read(LLAMA, rope_scaling={"rope_type": "factors", "factors": [1.0] * 4 + [8.0] * 4}).rope
    assert rope == RopeConfig(scaling="factors", factors=(1.0,) * 4 + (8.0,) * 4)
    with pytest.raises(CorruptModelError, match="3 factors"):
        read(LLAMA, rope_scaling={"rope_type": "factors", "factors": [1.0] * 3})


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_rope_scaling_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=kind):
        read(LLAMA, rope_scaling={"type": kind, "factor": 2.0})


def test_context_is_limited_to_a_sliding_window() -> None:
    assert read(MISTRAL).max_context == 96
    assert read(MISTRAL, sliding_window=None).max_context == 256
    assert read(MISTRAL, sliding_window=4096).max_context == 256
    absent = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert read(absent, max_position_embeddings=32768).max_context == 4096


def test_qwen_windows_count_only_when_switched_on() -> None:
    assert read(QWEN2, sliding_window=64, use_sliding_window=False).max_context == 256
    assert read(QWEN2, sliding_window=64, use_sliding_window=True).max_context == 64
    assert read(QWEN3, sliding_window=None, use_sliding_window=True).max_context == 256
    assert (
        read(QWEN3, sliding_window=64, layer_types=["full_attention", "sliding_attention"]).max_context == 64
    )
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        read(QWEN3, layer_types=["linear_attention", "full_attention"])


def test_families_differ_in_biases_and_norms() -> None:
    assert not read(LLAMA).attention_bias
    biased = read(LLAMA, attention_bias=True)
    assert (biased.attention_bias, biased.output_bias, biased.mlp_bias) == (True, True, False)
    assert (read(QWEN2).attention_bias, read(QWEN2).output_bias) == (True, False)
    assert read(QWEN3).qk_norm
    assert not read(QWEN2).qk_norm
    unbiased = read(OPT, enable_bias=False)
    assert not any(spec.bias for spec in architecture_for(OPT).tensors(unbiased))


@pytest.mark.parametrize(
    ("hf_config", "option", "value"),
    [
        (LLAMA, "model_type", "mamba"),
        (LLAMA, "architectures", ["LlamaForSequenceClassification"]),
        (LLAMA, "quantization_config", {"quant_method": "gptq"}),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "head_dim", 512),
        (OPT, "word_embed_proj_dim", 48),
        (OPT, "do_layer_norm_before", False),
        (OPT, "_remove_final_layer_norm", True),
        (OPT, "layer_norm_elementwise_affine", False),
        (OPT, "activation_function", "swish"),
        (GPT2, "scale_attn_weights", False),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "add_cross_attention", True),
        (GPT2, "activation_function", "tanh"),
    ],
)
def test_unsupported_options_are_named(hf_config: dict[str, Any], option: str, value: Any) -> None:
    shown = {"quantization_config": "gptq"}.get(option, value[0] if isinstance(value, list) else str(value))
    with pytest.raises(UnsupportedModelError, match=shown):
        read(hf_config, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", -64),
        ("num_hidden_layers", "two"),
        ("vocab_size", True),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "large"),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 6),
        ("head_dim", 15),
    ],
)
def test_nonsense_values_are_named(option: str, value: Any) -> None:
    named = "RoPE theta" if option == "rope_theta" else option
    with pytest.raises(CorruptModelError, match=named):
        read(LLAMA, **{option: value})


def test_too_many_query_heads_on_one_kv_head_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads=1"):
        read(LLAMA, num_attention_heads=32, num_key_value_heads=1)


def test_missing_model_type_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=", ".join(supported_model_types())):
        architecture_for({})


class TestLoadTensor:
    def reader(self) -> DictReader:
        rng = np.random.RandomState(0)
        return DictReader(
            {
                "model.a.weight": rng.standard_normal((3, 4)).astype(np.float32),
                "b.weight": rng.standard_normal((2, 4)).astype(np.float32),
                "model.a.bias": np.arange(3, dtype=np.float32),
                "b.bias": np.arange(2, dtype=np.float32),
            }
        )

    def load(self, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray | None]:
        reader = self.reader()
        return load_tensor(spec, reader, set(reader.names()), "model.")

    def test_sources_join_along_outputs_with_or_without_the_prefix(self) -> None:
        spec = TensorSpec(
            "ab",
            "linear",
            (5, 4),
            ("model.a.weight", "model.b.weight"),
            ("model.a.bias", "model.b.bias"),
        )
        weight, bias = self.load(spec)
        reader = self.reader()
        np.testing.assert_array_equal(weight[:3], reader.read("model.a.weight"))
        np.testing.assert_array_equal(weight[3:], reader.read("b.weight"))
        assert bias is not None
        assert bias.tolist() == [0, 1, 2, 0, 1]

    def test_transposed(self) -> None:
        weight, bias = self.load(TensorSpec("a", "linear", (4, 3), ("model.a.weight",), transpose=True))
        np.testing.assert_array_equal(weight, self.reader().read("model.a.weight").T)
        assert weight.flags.c_contiguous
        assert bias is None

    def test_missing_tensor_is_named(self) -> None:
        with pytest.raises(CorruptModelError, match=r"model\.c\.weight"):
            self.load(TensorSpec("c", "linear", (3, 4), ("model.c.weight",)))

    def test_wrong_shapes_are_named(self) -> None:
        with pytest.raises(CorruptModelError, match=r"\[3, 4\].*\[3, 5\]"):
            self.load(TensorSpec("a", "linear", (3, 5), ("model.a.weight",)))
        with pytest.raises(CorruptModelError, match=r"b\.bias"):
            self.load(TensorSpec("a", "linear", (3, 4), ("model.a.weight",), ("model.b.bias",)))
