"""Tokenizers from a directory in Hugging Face's layout: tokenizer.json, or the older files it replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from enginehouse.errors import CorruptModelError, SourceError, UnsupportedModelError
from enginehouse.runtime.tokenizer import TokenizerKind
from enginehouse.runtime.tokenizer_backend import build_backend
from enginehouse.runtime.tokenizer_bytelevel import byte_level_document
from enginehouse.runtime.tokenizer_sentencepiece import (
    read_sentencepiece_model,
    sentencepiece_document,
)
from enginehouse.runtime.tokenizer_writer import ImportedTokenizer, Json, added_token, vocabulary

_MODEL_TYPES = ("BPE", "Unigram")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What GPT-2's tokenizer class assumes when a directory has only vocab.json and merges.txt.
_GPT2_END = "<|endoftext|>"


def write_tokenizer_from_hf(directory: Path, out_dir: Path, *, vocab_size: int | None = None) -> None:
    """Store the tokenizer found in `directory` in `out_dir`.

    Raises `SourceError` when there is none, `CorruptModelError` when a file is damaged, and
    `UnsupportedModelError` naming what we cannot read.
    """
    files = _Files(directory)
    document = _document(files)
    _add_missing_tokens(document, files)
    imported = ImportedTokenizer(document, _kind(document))
    model_config = files.json("config.json")
    imported.vocab_size = vocab_size or model_config.get("vocab_size")
    imported.strip_leading_space = _strips_space(document)
    _add_special_tokens(imported, files, model_config)
    _add_ends(imported, files)
    imported.chat_templates = _chat_templates(files)
    document["truncation"] = document["padding"] = None
    imported.save(out_dir)


class _Files:
    """The directory's files; missing ones read as empty."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = self.json("tokenizer_config.json")

    def has(self, name: str) -> bool:
        return (self.directory / name).is_file()

    def text(self, name: str) -> str:
        try:
            return (self.directory / name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CorruptModelError(f"{self.directory / name} is not UTF-8") from error

    def json(self, name: str) -> Json:
        if not self.has(name):
            return {}
        try:
            value = json.loads(self.text(name))
        except json.JSONDecodeError as error:
            raise CorruptModelError(f"{self.directory / name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CorruptModelError(f"{self.directory / name} is not a JSON object")
        return value


# --- the tokenizers document -------------------------------------------------------------------------------


def _document(files: _Files) -> Json:
    if files.has("tokenizer.json"):
        return _published_document(files)
    if files.has("vocab.json") and files.has("merges.txt"):
        return _gpt2_document(files)
    if files.has("tokenizer.model"):
        pieces = read_sentencepiece_model((files.directory / "tokenizer.model").read_bytes())
        return sentencepiece_document(pieces)
    raise SourceError(
        f"{files.directory} has no tokenizer: expected tokenizer.json, vocab.json with merges.txt, or tokenizer.model"
    )


def _published_document(files: _Files) -> Json:
    document = files.json("tokenizer.json")
    model = document.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise CorruptModelError(f"{files.directory / 'tokenizer.json'} has no model.vocab")
    # Files of the library's first versions do not name the type; merges say it.
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"tokenizer.json has a {kind!r} model; supported are {' and '.join(_MODEL_TYPES)}"
        )
    return document


def _gpt2_document(files: _Files) -> Json:
    lines = files.text("merges.txt").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    broken = next((merge for merge in merges if len(merge) != 2), None)
    if broken is not None:
        raise CorruptModelError(
            f"{files.directory / 'merges.txt'} has a line that is no pair: {' '.join(broken)!r}"
        )
    vocab = files.json("vocab.json")
    special = {text for name in _NAMED_TOKENS if (text := _token_text(files, name)) is not None}
    special = (special or {_GPT2_END}) & vocab.keys()
    return byte_level_document(
        vocab,
        merges,
        pre="gpt-2",
        added_tokens=[
            added_token(vocab[text], text, special=True) for text in sorted(special, key=vocab.__getitem__)
        ],
        add_prefix_space=bool(files.config.get("add_prefix_space", False)),
    )


def _add_missing_tokens(document: Json, files: _Files) -> None:
    """Add what tokenizer_config.json (or added_tokens.json) knows beyond the document."""
    added: list[Json] = list(document.get("added_tokens") or [])
    known = {token["content"] for token in added}
    for key, token in (files.config.get("added_tokens_decoder") or {}).items():
        if token["content"] not in known:
            known.add(token["content"])
            flags = {
                name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")
            }
            added.append(
                {**added_token(int(key), token["content"], special=bool(token.get("special"))), **flags}
            )
    for text, token_id in files.json("added_tokens.json").items():
        if text not in known:
            added.append(added_token(int(token_id), text, special=False))
    document["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))


def _steps(part: Any) -> Iterator[Json]:
    """The steps of a decoder or normalizer, sequences flattened."""
    if isinstance(part, dict):
        inner = part.get("decoders") or part.get("normalizers") or part.get("pretokenizers")
        if part.get("type") == "Sequence" and inner is not None:
            for step in inner:
                yield from _steps(step)
        else:
            yield part


def _kind(document: Json) -> TokenizerKind:
    types = [step.get("type") for step in _steps(document.get("decoder"))]
    if "ByteLevel" in types:
        return "byte-level"
    if {"ByteFallback", "Metaspace"} & set(types):
        return "sentencepiece"
    raise UnsupportedModelError(
        f"tokenizer.json has a decoder of type {'+'.join(map(str, types)) or 'none'}; supported are ByteLevel, "
        "ByteFallback and Metaspace"
    )


def _strips_space(document: Json) -> bool:
    for step in _steps(document.get("decoder")):
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme") or (
                "always" if step.get("add_prefix_space", True) else "never"
            )
            return bool(scheme != "never")
    return False


# --- special tokens ----------------------------------------------------------------------------------------


def _token_text(files: _Files, name: str) -> str | None:
    for source in (files.config, files.json("special_tokens_map.json")):
        value = source.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            return value
    return None


def _add_special_tokens(imported: ImportedTokenizer, files: _Files, model_config: Mapping[str, Any]) -> None:
    token_ids = vocabulary(imported.tokenizer_json)
    for name in _NAMED_TOKENS:
        text = _token_text(files, name)
        if text is None and name in ("bos_token", "eos_token"):
            text = _text_of(token_ids, model_config.get(f"{name}_id"))
        if text is not None:
            imported.special_tokens[name] = text
    named = imported.special_tokens
    imported.bos_token_id = token_ids.get(named.get("bos_token", ""))
    imported.unk_token_id = _unk_id(imported.tokenizer_json, token_ids)
    generation = files.json("generation_config.json")
    ends = generation.get("eos_token_id", model_config.get("eos_token_id"))
    eos = token_ids.get(named.get("eos_token", ""))
    listed = ends if isinstance(ends, list) else [ends]
    imported.eos_token_ids = [i for i in (eos, *listed) if isinstance(i, int)]
    _mark_special(imported, {eos, imported.bos_token_id} - {None})


def _text_of(token_ids: Mapping[str, int], token_id: Any) -> str | None:
    return next((text for text, i in token_ids.items() if i == token_id), None)


def _unk_id(document: Json, token_ids: Mapping[str, int]) -> int | None:
    model = document["model"]
    if model.get("type") == "Unigram":
        unk_id = model.get("unk_id")
        return unk_id if isinstance(unk_id, int) else None
    return token_ids.get(model.get("unk_token") or "")


def _mark_special(imported: ImportedTokenizer, ids: set[int | None]) -> None:
    """bos and eos are special even where the document forgot to say so, or to list them as added tokens."""
    added: list[Json] = imported.tokenizer_json["added_tokens"]
    for token in added:
        if token["id"] in ids:
            token["special"] = True
    listed = {token["id"] for token in added}
    texts = {i: text for text, i in vocabulary(imported.tokenizer_json).items() if i in ids - listed}
    added += [added_token(i, text, special=True) for i, text in texts.items()]
    added.sort(key=lambda token: int(token["id"]))


def _add_ends(imported: ImportedTokenizer, files: _Files) -> None:
    """What the model expects around a text: as tokenizer.json's post-processor says, where there is that file
    (Transformers lets it win over tokenizer_config.json), else as tokenizer_config.json says."""
    add_bos, add_eos = files.config.get("add_bos_token"), files.config.get("add_eos_token")
    if files.has("tokenizer.json"):
        imported.prefix_ids, imported.suffix_ids = _post_processor_ends(imported.tokenizer_json)
        return
    if add_bos is None:
        # SentencePiece models were trained with bos; GPT-2 was not.
        add_bos = imported.kind == "sentencepiece"
    if add_bos and imported.bos_token_id is not None:
        imported.prefix_ids = [imported.bos_token_id]
    eos = vocabulary(imported.tokenizer_json).get(imported.special_tokens.get("eos_token", ""))
    if add_eos and eos is not None:
        imported.suffix_ids = [eos]


def _post_processor_ends(document: Json) -> tuple[list[int], list[int]]:
    """Run the post-processor on a probe and see what it puts before and after."""
    probe = dict(document, truncation=None, padding=None)
    backend = build_backend(json.dumps(probe).encode())
    encoding = backend.encode("a", add_special_tokens=True)
    mask: list[int] = encoding.special_tokens_mask
    ids: list[int] = encoding.ids
    first = next((i for i, special in enumerate(mask) if not special), len(ids))
    last = next((i for i in range(len(mask), 0, -1) if not mask[i - 1]), first)
    return ids[:first], ids[last:]


# --- chat templates ----------------------------------------------------------------------------------------


def _chat_templates(files: _Files) -> dict[str, str]:
    templates: dict[str, str] = {}
    configured = files.config.get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates.update({str(entry["name"]): str(entry["template"]) for entry in configured})
    if "default" not in templates and isinstance(
        in_file := files.json("chat_template.json").get("chat_template"), str
    ):
        templates["default"] = in_file
    if files.has("chat_template.jinja"):
        templates["default"] = files.text("chat_template.jinja")
    for path in sorted((files.directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = files.text(f"additional_chat_templates/{path.name}")
    return templates
