"""Tiny random models for tests: real files in the Hugging Face layout, made in milliseconds from a seed.

`write_tiny_llama` gives a directory that every part of Enginehouse can treat as a downloaded model:
config.json, model.safetensors (one file or sharded), tokenizer.json, tokenizer_config.json with a chat
template, generation_config.json. The weights are scaled so that activations keep unit size and greedy output
depends on the whole prompt: a model with weights near zero would hide mistakes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 320
MAX_CONTEXT = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>")
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Pairs are merged in this order; `_` is a space. Every later merge uses pieces that exist by then.
_MERGE_TEXT = (
    "_t th he in er an re on at en nd _a _s _w ou is it or ti to _o _b _c _f _h _m _p _d _n _l _g "
    "_the _in _an _and _to _of _is ing ion _th al es ed ar st le ve om as et ro ic ur ll ch ly us ent "
    "ter her hat _that for _for _be _re _it all ver ould ight 00 10 20 :: == ,_ ._ __ ____"
)


def byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level BPE uses for the bytes 0..255, in byte order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def tiny_vocabulary(vocab_size: int = VOCAB_SIZE) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary (special tokens, bytes, merged pieces) and merges; at most `vocab_size` entries."""
    if vocab_size < len(SPECIAL_TOKENS) + 256:
        raise ValueError("a byte-level vocabulary needs at least 260 entries")
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in byte_alphabet():
        vocab[character] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in (word.replace("_", "Ġ") for word in _MERGE_TEXT.split()):
        # The split whose left part is longest: "Ġthe" becomes ("Ġth", "e") or ("Ġt", "he").
        splits = [(word[:cut], word[cut:]) for cut in range(len(word) - 1, 0, -1)]
        pair = next((s for s in splits if s[0] in vocab and s[1] in vocab), None)
        if pair is not None and word not in vocab and len(vocab) < vocab_size:
            vocab[word] = len(vocab)
            merges.append(pair)
    return vocab, merges


def write_tiny_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write tokenizer.json (byte-level BPE: any text encodes) and tokenizer_config.json."""
    vocab, merges = tiny_vocabulary(vocab_size)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "add_bos_token": False,
            "model_max_length": MAX_CONTEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID})


def llama_config(
    *,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    intermediate_size: int = 160,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_context: int = MAX_CONTEXT,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """A Hugging Face config.json of a llama. The intermediate size is no multiple of 64 on purpose."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }


def llama_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names; linear layers are [out, in]."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]

    def linear(num_out: int, num_in: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((num_out, num_in)) * gain / np.sqrt(num_in)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden, gain=8.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": linear(q_width, hidden, gain=1.5),
            prefix + "self_attn.k_proj.weight": linear(kv_width, hidden, gain=1.5),
            prefix + "self_attn.v_proj.weight": linear(kv_width, hidden),
            prefix + "self_attn.o_proj.weight": linear(hidden, q_width, gain=2.0),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": linear(inner, hidden),
            prefix + "mlp.up_proj.weight": linear(inner, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, inner, gain=2.0),
        }
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden, gain=3.0)
    return tensors


def write_tiny_llama(
    directory: Path, *, seed: int = 0, dtype: str = "F32", num_shards: int = 1, **options: Any
) -> Path:
    """Write a complete tiny llama into `directory` (made if needed) and return it.

    `options` are those of `llama_config`. The same arguments always give the same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = llama_config(**options)
    _write_json(directory / "config.json", config)
    write_tiny_tokenizer(directory, config["vocab_size"])
    write_safetensors_model(directory, llama_tensors(config, seed), dtype=dtype, num_shards=num_shards)
    return directory


def write_safetensors_model(
    directory: Path, tensors: dict[str, np.ndarray], *, dtype: str = "F32", num_shards: int = 1
) -> None:
    """Write model.safetensors, or `num_shards` files with model.safetensors.index.json."""
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, dtype)
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        write_safetensors(directory / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """Write float32 arrays as one safetensors file of `dtype` F64, F32, F16 or BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        blob = encode_floats(tensor, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def encode_floats(tensor: np.ndarray, dtype: str) -> bytes:
    """Bytes of `tensor` as little-endian F64, F32, F16 or BF16 (round to nearest even)."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return np.ascontiguousarray(tensor, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
