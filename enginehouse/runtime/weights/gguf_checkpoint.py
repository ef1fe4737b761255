"""A GGUF file as a checkpoint: its metadata and tensor names translated into Hugging Face's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.sources.hashes import file_sha256
from enginehouse.runtime.weights.checkpoint import TokenizerFiles
from enginehouse.runtime.weights.gguf_file import GGUFFile

FloatArray = NDArray[np.float32]

ROPE_FACTORS: Final = "rope_freqs.weight"

_LLAMA_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}
_GPT2_NAMES: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "transformer.h.{}.ln_1",
    "attn_qkv": "transformer.h.{}.attn.c_attn",
    "attn_output": "transformer.h.{}.attn.c_proj",
    "ffn_norm": "transformer.h.{}.ln_2",
    "ffn_up": "transformer.h.{}.mlp.c_fc",
    "ffn_down": "transformer.h.{}.mlp.c_proj",
}
_NAMES_BY_ARCHITECTURE: Final = {
    "llama": _LLAMA_NAMES,
    "qwen2": _LLAMA_NAMES,
    "qwen3": _LLAMA_NAMES,
    "gpt2": _GPT2_NAMES,
}
_MODULE_NAME = re.compile(r"(?:blk\.(\d{1,4})\.)?([a-z0-9_]+)\.(weight|bias)")


class GGUFCheckpoint:
    """See `Checkpoint`. Architectures llama (and Mistral, which is published as llama), qwen2, qwen3, gpt2."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        try:
            metadata = _Metadata(path, self._file.metadata)
            self._architecture = metadata.architecture
            self._gguf_names = _hugging_face_names(path, self._architecture, list(self._file.tensors))
            translate = _gpt2_config if self._architecture == "gpt2" else _llama_config
            self._config = translate(metadata, self._file)
            self._check_heads(path)
        except BaseException:
            self._file.close()
            raise

    @property
    def config(self) -> dict[str, Any]:
        """The metadata as a Hugging Face config.json."""
        return self._config

    @property
    def source_hash(self) -> str:
        """SHA-256 of the file."""
        return file_sha256(self._file.path)

    def names(self) -> list[str]:
        """Hugging Face tensor names."""
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in Hugging Face's orientation."""
        shape = self._file.tensors[self._gguf_names[name]].shape
        return shape[::-1] if self._is_conv1d(name) else shape

    def read(self, name: str) -> FloatArray:
        """One tensor in Hugging Face's orientation and RoPE order."""
        values = self._file.read(self._gguf_names[name])
        if self._is_conv1d(name):
            return np.ascontiguousarray(values.T)
        if self._architecture == "llama":
            if ".q_proj." in name:
                return _half_rotation_order(values, self._config["num_attention_heads"])
            if ".k_proj." in name:
                return _half_rotation_order(values, self._config["num_key_value_heads"])
        return values

    def tokenizer_files(self) -> TokenizerFiles:
        """All metadata; the tokenizer's keys start with `tokenizer.`."""
        return TokenizerFiles(gguf_metadata=self._file.metadata)

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _is_conv1d(self, name: str) -> bool:
        """GPT-2's matrices are [in, out] for Hugging Face and [out, in] in GGUF."""
        return (
            self._architecture == "gpt2" and name.endswith("weight") and (".attn." in name or ".mlp." in name)
        )

    def _check_heads(self, path: Path) -> None:
        """Reordering q and k needs whole heads, and must fail here rather than in the middle of packing."""
        if self._architecture != "llama":
            return
        for module, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            for name in self._gguf_names:
                rows = self._file.tensors[self._gguf_names[name]].shape[0]
                if f".{module}." in name and rows % (2 * self._config[count]):
                    raise CorruptModelError(
                        f"{path}: {name} has {rows} rows, which {self._config[count]} heads do not share evenly"
                    )


def _half_rotation_order(values: FloatArray, num_heads: int) -> FloatArray:
    """Rows of q or k from GGUF's llama order (pairs next to each other) to halves, as Hugging Face has them.

    values: [heads * head_dim, in] or a bias [heads * head_dim].
    """
    rows = values.shape[0]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hugging_face_names(path: Path, architecture: str, gguf_names: list[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name. A tensor we do not know changes the computation: refused by name."""
    modules = _NAMES_BY_ARCHITECTURE.get(architecture)
    if modules is None:
        known = ", ".join(sorted(_NAMES_BY_ARCHITECTURE))
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported are {known}"
        )
    names: dict[str, str] = {}
    for gguf_name in gguf_names:
        if gguf_name == ROPE_FACTORS and architecture != "gpt2":
            continue
        match = _MODULE_NAME.fullmatch(gguf_name)
        template = modules.get(match[2]) if match else None
        if match is None or template is None or ("{}" in template) != (match[1] is not None):
            raise UnsupportedModelError(
                f"{path}: tensor {gguf_name!r} is not part of a {architecture} model that Enginehouse supports"
            )
        names[f"{template.format(match[1])}.{match[3]}"] = gguf_name
    return names


class _Metadata:
    """Typed access to GGUF metadata of one architecture."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values
        self.architecture = self.text("general.architecture")

    def own(self, key: str) -> str:
        """The key in the architecture's namespace: `llama.block_count`."""
        return f"{self.architecture}.{key}"

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises `CorruptModelError` when it is missing and has no default, or is something else."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array of equal integers (one per layer) counts as one."""
        value = self._values.get(key, default)
        if isinstance(value, np.ndarray) and value.size and np.issubdtype(value.dtype, np.integer):
            if (value != value.flat[0]).any():
                raise UnsupportedModelError(
                    f"{self._path}: {key} differs between layers, which is not supported"
                )
            value = int(value.flat[0])
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def count(self, key: str) -> int:
        """A number of things, 0 when the file does not say."""
        value = self._values.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, value, "a number of things")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._values.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a positive number")
        # Stored as fp32: the shortest decimal that means the same fp32 is what the model's author wrote.
        return float(str(np.float32(value)))

    def token_id(self, key: str) -> int | None:
        """A token id, or None when the file does not name one."""
        value = self._values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _wrong(self, key: str, value: object, expected: str) -> CorruptModelError:
        if value is None:
            return CorruptModelError(f"{self._path} has no metadata {key!r}")
        return CorruptModelError(f"{self._path}: metadata {key} is {str(value)[:80]!r}, not {expected}")


def _shared_config(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """What every architecture's configuration has."""
    if metadata.count("split.count") > 1:
        raise UnsupportedModelError(f"{file.path} is one part of a split GGUF file; join the parts first")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptModelError(f"{file.path} has no tensor 'token_embd.weight'")
    if metadata.count(metadata.own("expert_count")) > 0:
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported")
    config: dict[str, Any] = {
        "model_type": metadata.architecture,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name in ("bos", "eos"):
        token_id = metadata.token_id(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _llama_config(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    own = metadata.own
    hidden = metadata.integer(own("embedding_length"))
    num_heads = metadata.integer(own("attention.head_count"))
    head_dim = metadata.integer(own("attention.key_length"), max(1, hidden // num_heads))
    if metadata.integer(own("attention.value_length"), head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: keys and values of different width are not supported")
    if metadata.integer(own("rope.dimension_count"), head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: RoPE on a part of each head is not supported")
    config = _shared_config(metadata, file) | {
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(own("feed_forward_length")),
        "num_hidden_layers": metadata.integer(own("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(own("attention.head_count_kv"), num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer(own("context_length")),
        "rms_norm_eps": metadata.number(own("attention.layer_norm_rms_epsilon"), 1e-6),
        "rope_theta": metadata.number(own("rope.freq_base"), 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    scaling = _rope_scaling(metadata, file)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if own("attention.sliding_window") in metadata:
        config["sliding_window"] = metadata.integer(own("attention.sliding_window"))
        config["use_sliding_window"] = True
        config["model_type"] = "mistral" if metadata.architecture == "llama" else metadata.architecture
    return config


def _rope_scaling(metadata: _Metadata, file: GGUFFile) -> dict[str, Any] | None:
    """`rope_scaling` of a Hugging Face configuration; kind `factors` where the file lists one per frequency."""
    own = metadata.own
    if ROPE_FACTORS in file.tensors:
        # How converters store Llama 3's scaling: the divisor of every frequency, already computed.
        return {"rope_type": "factors", "factors": file.read(ROPE_FACTORS).ravel().tolist()}
    kind = metadata.text(own("rope.scaling.type"), "none")
    if kind == "none":
        if own("rope.scale_linear") in metadata:  # before rope.scaling.* existed
            return {"rope_type": "linear", "factor": metadata.number(own("rope.scale_linear"))}
        return None
    return {"rope_type": kind, "factor": metadata.number(own("rope.scaling.factor"), 1.0)}


def _gpt2_config(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    own = metadata.own
    hidden = metadata.integer(own("embedding_length"))
    return _shared_config(metadata, file) | {
        "n_embd": hidden,
        "n_inner": metadata.integer(own("feed_forward_length"), 4 * hidden),
        "n_layer": metadata.integer(own("block_count")),
        "n_head": metadata.integer(own("attention.head_count")),
        "n_positions": metadata.integer(own("context_length")),
        "layer_norm_epsilon": metadata.number(own("attention.layer_norm_epsilon"), 1e-5),
        "activation_function": "gelu_new",
    }
