"""Tiny random encoders in the Hugging Face and sentence-transformers layout, made from a seed by numpy alone.

`scripts/reference_embeddings.py` gives them to sentence-transformers and stores what it computes; the tests make the
same weights again and compare. The legacy `RandomState` is used because numpy promises never to change its stream.
"""

from __future__ import annotations

import json
import string
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_models import write_safetensors

DATA = Path(__file__).resolve().parents[1] / "data" / "embeddings"
WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "on",
    "cat",
    "sat",
    "mat",
    "what",
    "who",
    "where",
    "france",
    "paris",
    "city",
    "big",
    "red",
    "##s",
    "##ing",
    "##ed",
    "##er",
]
TEXTS = [
    "The cat sat on the mat.",
    "paris",
    "What is the big city in France?",
    "  Ünïcode, CAPITALS and numbers 12345  ",
    "a",
    "the city of paris is big and the cat is red " * 4,
]
QUERY = "where is paris"


@dataclass(frozen=True, slots=True)
class TinyEncoder:
    """One encoder: its configuration, and the sentence-transformers files beside it."""

    name: str
    config: dict[str, Any]
    modules: tuple[str, ...] = ()
    """Of Transformer, Pooling, Normalize; none: no modules.json."""
    pooling: dict[str, Any] = field(default_factory=dict)
    sentence: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cross_encoder(self) -> bool:
        return self.config["architectures"][0].endswith("SequenceClassification")

    @property
    def is_bert(self) -> bool:
        return bool(self.config["model_type"] == "bert")


_BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "max_position_embeddings": 80,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA = {
    **_BERT,
    "model_type": "roberta",
    "architectures": ["RobertaModel"],
    "max_position_embeddings": 82,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MEAN = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"word_embedding_dimension": 48, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}

ENCODERS = [
    TinyEncoder(
        "bert-mean-norm", _BERT, ("Transformer", "Pooling", "Normalize"), MEAN, {"max_seq_length": 64}
    ),
    TinyEncoder("bert-cls", {**_BERT, "num_attention_heads": 3}, ("Transformer", "Pooling"), CLS),
    TinyEncoder("bert-plain", {**_BERT, "hidden_act": "relu", "architectures": ["BertForMaskedLM"]}),
    TinyEncoder("roberta-mean", _ROBERTA, ("Transformer", "Pooling"), MEAN),
    TinyEncoder(
        "xlm-roberta-cls-norm",
        {**_ROBERTA, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
        ("Transformer", "Pooling", "Normalize"),
        CLS,
    ),
    TinyEncoder("bert-cross", {**_BERT, "architectures": ["BertForSequenceClassification"], **_ONE_LABEL}),
    TinyEncoder(
        "xlm-roberta-cross",
        {
            **_ROBERTA,
            "model_type": "xlm-roberta",
            "architectures": ["XLMRobertaForSequenceClassification"],
            **_ONE_LABEL,
        },
    ),
]


def encoder_named(name: str) -> TinyEncoder:
    return next(encoder for encoder in ENCODERS if encoder.name == name)


def write_tiny_encoder(encoder: TinyEncoder, directory: Path) -> Path:
    """A directory as it would be downloaded."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", encoder.config)
    write_safetensors(directory / "model.safetensors", tensors(encoder))
    _write_tokenizer(encoder, directory)
    if encoder.modules:
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [
            {"idx": i, "name": str(i), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(encoder.modules)
        ]
        _write(directory / "modules.json", modules)
        for kind in encoder.modules:
            (directory / paths[kind]).mkdir(exist_ok=True)
        _write(directory / "1_Pooling" / "config.json", encoder.pooling)
    if encoder.sentence:
        _write(directory / "sentence_bert_config.json", encoder.sentence)
    return directory


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


def tensors(encoder: TinyEncoder) -> dict[str, np.ndarray]:
    """fp32 weights under their Hugging Face names, scaled so that every part is felt in the result."""
    config = encoder.config
    rng = np.random.RandomState(zlib.crc32(encoder.name.encode()))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    family = "bert" if encoder.is_bert else "roberta"
    bare = encoder.config["architectures"][0].endswith("Model")
    prefix = "" if bare else f"{family}."
    made: dict[str, np.ndarray] = {}

    def table(name: str, rows: int) -> None:
        made[f"{name}.weight"] = rng.standard_normal((rows, hidden)).astype(np.float32)

    def linear(name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        weight = rng.standard_normal((num_out, num_in)) * gain / np.sqrt(num_in)
        made[f"{name}.weight"] = weight.astype(np.float32)
        made[f"{name}.bias"] = (0.2 * rng.standard_normal(num_out)).astype(np.float32)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
        made[f"{name}.bias"] = (0.2 * rng.standard_normal(hidden)).astype(np.float32)

    table(f"{prefix}embeddings.word_embeddings", config["vocab_size"])
    table(f"{prefix}embeddings.position_embeddings", config["max_position_embeddings"])
    table(f"{prefix}embeddings.token_type_embeddings", config["type_vocab_size"])
    norm(f"{prefix}embeddings.LayerNorm")
    for index in range(config["num_hidden_layers"]):
        layer = f"{prefix}encoder.layer.{index}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", hidden, hidden, 2.0)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, hidden)
        linear(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm")
    if encoder.is_cross_encoder and encoder.is_bert:
        linear(f"{prefix}pooler.dense", hidden, hidden)
        linear("classifier", 1, hidden)
    elif encoder.is_cross_encoder:
        linear("classifier.dense", hidden, hidden)
        linear("classifier.out_proj", 1, hidden)
    return made


def _write_tokenizer(encoder: TinyEncoder, directory: Path) -> None:
    """WordPiece over single characters and a few words, with the ends each family puts around texts and pairs."""
    if encoder.is_bert:
        special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
        pair = [
            ("special", "cls", 0),
            ("A", "", 0),
            ("special", "sep", 0),
            ("B", "", 1),
            ("special", "sep", 1),
        ]
    else:
        special = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>"}
        pair = [("special", "cls", 0), ("A", "", 0), ("special", "sep", 0), ("special", "sep", 0)]
        pair += [("B", "", 0), ("special", "sep", 0)]
    characters = string.ascii_lowercase + string.digits + ".,?!ü[]"
    pieces = [*special.values(), *characters, *(f"##{c}" for c in characters), *WORDS]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    assert len(vocab) <= encoder.config["vocab_size"]

    def step(kind: str, name: str, type_id: int) -> dict[str, Any]:
        if kind == "special":
            return {"SpecialToken": {"id": special[name], "type_id": type_id}}
        return {"Sequence": {"id": kind, "type_id": type_id}}

    single = [step("special", "cls", 0), step("A", "", 0), step("special", "sep", 0)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": {"max_length": 16, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": vocab[special["pad"]],
            "pad_type_id": 0,
            "pad_token": special["pad"],
        },
        "added_tokens": [{"id": vocab[text], "content": text, **flags} for text in special.values()],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [step(*item) for item in pair],
            "special_tokens": {
                special[name]: {"id": special[name], "ids": [vocab[special[name]]], "tokens": [special[name]]}
                for name in ("cls", "sep")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    _write(directory / "tokenizer.json", document)
    names = {f"{name}_token": text for name, text in special.items()}
    inputs = (
        ["input_ids", "token_type_ids", "attention_mask"]
        if encoder.is_bert
        else ["input_ids", "attention_mask"]
    )
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": inputs,
            "model_max_length": 80,
            **names,
        },
    )
