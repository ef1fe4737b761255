"""Which files of a model directory matter, and a hash over them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from enginehouse.errors import CorruptModelError, SourceError, UnsupportedModelError
from enginehouse.runtime.sources.hashes import file_sha256

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files a tokenizer is made from, whichever of them are there."""
MODULES_FILE: Final = "modules.json"
SENTENCE_FILE: Final = "sentence_bert_config.json"
POOLING_FILE: Final = "1_Pooling/config.json"
SENTENCE_FILES: Final = (MODULES_FILE, SENTENCE_FILE, POOLING_FILE)
"""What sentence-transformers puts beside an encoder: how its hidden states become one vector."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """A model's modules.json, and the pooling configurations it names, relative to the model's directory."""

    modules: list[dict[str, Any]]
    configs: list[str]


def pooling_files(directory: Path) -> SentenceModules | None:
    """The sentence-transformers modules of a model directory, or None when it has no modules.json.

    Raises `CorruptModelError` when that makes no sense or points outside the directory.
    """
    path = directory / MODULES_FILE
    if not path.is_file():
        return None
    try:
        modules = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptModelError(f"{path} is no list of modules")
    configs = []
    for module in modules:
        if str(module.get("type", "")).endswith(".Pooling"):
            folder = module.get("path")
            if not isinstance(folder, str) or Path(folder).name != folder or not folder:
                raise CorruptModelError(f"{path}: {folder!r} is no folder beside it")
            configs.append(f"{folder}/{CONFIG_FILE}")
    return SentenceModules(modules, configs)


def hash_source(path: Path, progress: Callable[[float], None] | None = None) -> str:
    """Hex SHA-256 that identifies a .gguf file, or a directory's weights, configuration and tokenizer.

    Files that have not changed since a former call are not read again. `progress` gets fractions. Raises
    `SourceError`, `CorruptModelError` or `UnsupportedModelError` for a directory that is no model.
    """
    if not path.is_dir():
        return file_sha256(path, progress)
    names = [CONFIG_FILE, *(name for name in TOKENIZER_FILES if (path / name).is_file())]
    if (path / INDEX_FILE).is_file():
        names.append(INDEX_FILE)
    modules = pooling_files(path)
    if modules is not None:
        names += [MODULES_FILE, *modules.configs]
    if (path / SENTENCE_FILE).is_file():
        names.append(SENTENCE_FILE)
    names += sorted(set(weight_files(path).values()) or {single_weights_file(path)})
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise SourceError(f"{path} has no {missing[0]}: it is no model")
    sizes = {name: (path / name).stat().st_size for name in names}
    total_bytes = max(1, sum(sizes.values()))
    digest = hashlib.sha256()
    before_bytes = 0
    for name in names:
        report = _part_of(progress, before_bytes / total_bytes, sizes[name] / total_bytes)
        digest.update(f"{name}\0{file_sha256(path / name, report)}\n".encode())
        before_bytes += sizes[name]
    return digest.hexdigest()


def _part_of(
    progress: Callable[[float], None] | None, start: float, share: float
) -> Callable[[float], None] | None:
    return None if progress is None else lambda fraction: progress(start + share * fraction)


def weight_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name from the index of a sharded model; empty when there is no index.

    Raises `CorruptModelError` for an index that makes no sense.
    """
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        return {}
    weight_map = read_json(index_path, missing=f"{index_path} is missing").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModelError(f"{index_path} has no weight_map")
    for name, file_name in weight_map.items():
        # A plain file name: an index must not reach files outside its directory.
        if (
            not isinstance(file_name, str)
            or not file_name
            or Path(file_name).name != file_name
            or "\0" in file_name
        ):
            raise CorruptModelError(f"{index_path}: {name!r} points to {file_name!r}, which is no file name")
        if not (directory / file_name).is_file():
            raise CorruptModelError(f"{index_path} names {file_name}, which is missing")
    return weight_map


def single_weights_file(directory: Path) -> str:
    """The name of the only safetensors file. Raises `SourceError` or `UnsupportedModelError`."""
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if WEIGHTS_FILE in found:
        return WEIGHTS_FILE
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(
            f"{directory} has several safetensors files ({', '.join(found[:4])}) and no {INDEX_FILE}"
        )
    pickles = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickles:
        raise UnsupportedModelError(pickled_only(str(directory), pickles[0]))
    raise SourceError(
        f"{directory} has no {WEIGHTS_FILE}; a model is a directory with safetensors or a .gguf file"
    )


def pickled_only(place: str, file_name: str) -> str:
    """Why pickled weights are refused."""
    return (
        f"{place} has only pickled weights ({file_name}), which can run code when they are read; "
        "convert them to safetensors, or use a revision that has them"
    )


def read_json(path: Path, *, missing: str) -> dict[str, Any]:
    """A JSON object from a file. Raises `SourceError` with the text `missing`, or `CorruptModelError`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SourceError(missing) from None
    except (ValueError, RecursionError) as error:
        raise CorruptModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path} is no JSON object")
    return value
