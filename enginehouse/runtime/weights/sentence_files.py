"""The files sentence-transformers puts beside a model, read into its configuration; `models.pooling` explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginehouse.runtime.sources.model_files import MODULES_FILE, SENTENCE_FILE, pooling_files, read_json


def read_sentence_files(directory: Path) -> dict[str, Any]:
    """The content of the sentence-transformers files in a model directory; empty when there are none.

    Raises `CorruptModelError` for one that is no JSON object.
    """
    found: dict[str, Any] = {}
    modules = pooling_files(directory)
    if modules is not None:
        found["modules"] = modules.modules
        found["pooling"] = [
            read_json(directory / name, missing=f"{directory} has no {name}, which {MODULES_FILE} names")
            for name in modules.configs
        ]
    if (directory / SENTENCE_FILE).is_file():
        found["sentence"] = read_json(directory / SENTENCE_FILE, missing="")
    return found
