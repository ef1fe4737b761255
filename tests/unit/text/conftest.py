import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.tokenizer_writer import write_tokenizer

DATA = Path(__file__).parents[2] / "data" / "text"

StoredTokenizers = Callable[[str, str], Tokenizer]


def read_json(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredTokenizers:
    """The small tokenizer of that name, imported from its Hugging Face files ("hf") or GGUF metadata ("gguf")."""
    made: dict[tuple[str, str], Tokenizer] = {}

    def load(name: str, form: str = "hf") -> Tokenizer:
        if (name, form) not in made:
            out = tmp_path_factory.mktemp(f"{name}-{form}")
            if form == "hf":
                write_tokenizer(out, directory=DATA / name)
            else:
                write_tokenizer(out, gguf_metadata=read_json(f"{name}/gguf.json"))
            made[name, form] = Tokenizer.load(out)
        return made[name, form]

    return load
