"""Byte-level BPE tokenizers (GPT-2 and its descendants) as `tokenizers` documents, by pre-tokenizer kind.

The kinds are llama.cpp's names for how a family cuts text before the merges apply (`tokenizer.ggml.pre`). The
patterns are those of the families' own published tokenizer.json files.
"""

from __future__ import annotations

from enginehouse.errors import UnsupportedModelError
from enginehouse.runtime.tokenizer_writer import Json

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
)
_QWEN_2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_GPT_2 = _byte_level(use_regex=True)
_SINGLE_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
# llama.cpp's fallback for files written before the key existed: punctuation apart, digits in threes.
_DEFAULT = _sequence(
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _byte_level(use_regex=False),
)


def _pattern(pattern: str) -> Json:
    return _sequence(_split(pattern), _byte_level(use_regex=False))


PRE_TOKENIZERS: dict[str, Json] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SINGLE_DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), _pattern(_LLAMA_3)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _pattern(_QWEN_2)),
    "tekken": _pattern(_TEKKEN),
    "default": _DEFAULT,
}
# Families that take a pre-token found in the vocabulary as it is, without looking at the merges.
IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
# The family whose tokenizer composes characters (NFC) first.
_NFC = frozenset({"qwen2"})


def byte_level_document(
    vocab: dict[str, int],
    merges: list[list[str]],
    *,
    pre: str,
    added_tokens: list[Json],
    add_prefix_space: bool = False,
) -> Json:
    """A `tokenizers` document. Raises `UnsupportedModelError` for a kind we do not know."""
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer pre-tokenizer kind {pre!r} is not supported; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    pre_tokenizer = PRE_TOKENIZERS[pre]
    if add_prefix_space:
        pre_tokenizer = {**pre_tokenizer, "add_prefix_space": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in IGNORE_MERGES,
            "vocab": vocab,
            "merges": merges,
        },
    }
