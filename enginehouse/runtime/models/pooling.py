"""How an encoder's hidden states become one vector, read from the files sentence-transformers puts beside a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.config import Pooling

KEY: Final = "sentence_transformers"
"""Under this key a checkpoint's configuration holds what the sentence-transformers files beside it say."""

_POOLING: Final[Mapping[str, Pooling]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "mean": "mean",
    "cls": "cls",
}


@dataclass(frozen=True, slots=True)
class SentencePooling:
    """Mean pooling without normalisation is what sentence-transformers does with a model that says nothing."""

    pooling: Pooling = "mean"
    normalize: bool = False
    max_input: int | None = None
    """Tokens, the special ones included; None: as many as the model has positions."""
    lowercase: bool = False


def pooling_of(hf_config: Mapping[str, Any]) -> SentencePooling:
    """Reads what `weights.sentence_files` put into a configuration.

    Raises `UnsupportedModelError` for a module or a way of pooling that is not implemented, `CorruptModelError`.
    """
    files = hf_config.get(KEY)
    if not files:
        return SentencePooling()
    pooling: Pooling = "mean"
    normalize = False
    configs = iter(files.get("pooling", ()))
    for module in files.get("modules", ()):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling_mode(next(configs))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"the sentence-transformers module {kind!r} is not supported; supported: Transformer, Pooling, Normalize"
            )
    sentence = files.get("sentence", {})
    return SentencePooling(
        pooling, normalize, _max_input(sentence.get("max_seq_length")), bool(sentence.get("do_lower_case"))
    )


def _pooling_mode(config: Mapping[str, Any]) -> Pooling:
    named = config.get("pooling_mode")
    asked = [named] if isinstance(named, str) else list(named or ())
    asked += [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in _POOLING:
        raise UnsupportedModelError(
            f"pooling by {' and '.join(map(str, asked)) or 'nothing'} is not supported; by mean or by the first token is"
        )
    return _POOLING[asked[0]]


def _max_input(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptModelError(
            f"sentence_bert_config.json: max_seq_length is {value!r}, not a positive integer"
        )
    return value
