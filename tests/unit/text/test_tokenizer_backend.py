"""Whatever the library does with a document, the caller gets a tokenizer or a named error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginehouse.errors import CorruptModelError
from enginehouse.runtime.tokenizer_backend import build_backend
from tests.support.tiny_models import write_tiny_llama

ODD = [None, True, -1, 3, 2**63, 0.5, "", "silu", [], {}, [1], {"a": 1}, [{}]]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document; of long lists and vocabularies the first dozen."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    for key in keys[:12]:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places(node[key])


def test_one_odd_value_anywhere(tmp_path: Path) -> None:
    document = json.loads((write_tiny_llama(tmp_path / "m") / "tokenizer.json").read_text())
    refused = 0
    for node, key in list(places(document)):
        original = node[key]
        for odd in ODD:
            node[key] = odd
            try:
                build_backend(json.dumps(document).encode())
            except CorruptModelError:
                refused += 1
        node[key] = original
    assert refused > 100


def test_a_contradiction_that_makes_the_library_panic(tmp_path: Path) -> None:
    document = json.loads((write_tiny_llama(tmp_path / "m") / "tokenizer.json").read_text())
    document["model"]["continuing_subword_prefix"] = "longer than any token"
    with pytest.raises(CorruptModelError, match="contradicts itself"):
        build_backend(json.dumps(document).encode())
