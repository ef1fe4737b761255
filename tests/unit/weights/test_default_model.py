"""The default model, fetched and packed for real."""

from __future__ import annotations

import numpy as np
import pytest

from enginehouse.runtime.ops.layout import unpack_linear
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.sources import fetch_source, parse_source
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights import prepare_model
from enginehouse.runtime.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own cache: this model is fetched once, not once a test."""


def test_it_packs_to_what_its_file_says() -> None:
    checkpoint = open_checkpoint(fetch_source(parse_source("smollm2")))
    prepared = prepare_model("smollm2", "int8")
    model = open_packed(prepared.path)
    config = model.config
    assert (config.architecture, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.vocab_size, config.max_context, config.tie_word_embeddings) == (49152, 8192, True)
    assert prepared.packed_bytes < 150e6
    np.testing.assert_array_equal(
        model.tensor("layers.7.mlp_norm"), checkpoint.read("model.layers.7.post_attention_layernorm.weight")
    )
    for name, sources in {
        "layers.11.qkv": [f"model.layers.11.self_attn.{part}_proj.weight" for part in "qkv"],
        "layers.29.down": ["model.layers.29.mlp.down_proj.weight"],
        "embed": ["model.embed_tokens.weight"],
    }.items():
        exact = np.concatenate([checkpoint.read(source) for source in sources])
        found = unpack_linear(model.linear(name))
        # int8 steps of a group's largest value leave about 0.7 % of noise; a wrong row or column leaves over 100 %.
        error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert error.max() < 0.02


def test_its_tokenizer_comes_along() -> None:
    tokenizer = Tokenizer.load(prepare_model("smollm2", "int8").path)
    assert tokenizer.encode("Hello world", add_special=False, parse_special=False) == [19556, 905]
