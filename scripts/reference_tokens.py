"""Make tests/data/text: small tokenizers of every kind, and the ids that other libraries give for hard strings.

Run it in an environment of its own, never in Enginehouse's:

    pip install torch transformers sentencepiece gguf protobuf
    python scripts/reference_tokens.py tests/data/text --default-model SmolLM2-135M-Instruct.Q4_1.gguf

Small tokenizers are trained here, so that the repository holds no one else's vocabulary, and stored both as a
Hugging Face directory and as GGUF metadata. Ids come from Transformers; SentencePiece's also from SentencePiece
itself. The default model's tokenizer comes from its GGUF file through Transformers, whose loader leaves out the
pre-tokenizer that the model's published tokenizer.json has (each digit on its own); it is put back here.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import jinja2
import sentencepiece
from gguf import GGUFReader
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN_SPLIT = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 700

HARD_STRINGS = [
    "", " ", "  ", "a", " a", "a ", "\n", "\t", "\r\n", "\n\n\n", " \n \n", "   leading", "trailing   ",
    "Hello, world!", "hello world", "Hello  World   three    spaces", "\tTabs\tand\n\nnewlines\r\nmixed \t\n x",
    "I'm sure they'll say it's fine, don't you? WE'VE SEEN'EM'S. can’t won’t",
    "0", "7", "42", "123", "1234", "12345678901234567890", "3.14159", "1,000,000.00", "1e-9", "٣٤٥ ۱۲۳ ४५६ ²³¼ Ⅻ",
    "😀", "😀😃😄", "👍🏽", "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷🇯🇵", "❤️ vs ❤", "🏳️‍🌈", "text😀text", "🧑🏿‍🚀🧑🏻‍🚀",
    "e\u0301 vs \u00e9", "n\u0303o", "Z\u0351\u036b\u0343a\u0363\u0349l\u0348\u0346g\u034fo\u035d", "A\u030a\u0327",
    "\u1112\u1161\u11ab\u1100\u1173\u11af", "한글 글자", "你好，世界！", "日本語のテキストとカタカナー。", "漢字kanji混在mixed漢字",
    "नमस्ते दुनिया क्षत्रिय", "مرحبا بالعالم، كيف حالك؟", "שלום עולם", "สวัสดีชาวโลก", "Привет, мир! Ёжик", "Ελληνικά ΆΈ", "ß ẞ ŉ ǆ ﬁ",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A(B):\n\tpass\n", "for (int i=0;i<n;++i){a[i]+=b[i]<<2;}", "<div class=\"x\">&amp;</div>",
    "{\"a\": [1, 2, {\"b\": null}], \"c\": \"d\\n\"}", "SELECT * FROM t WHERE x='y';--", "https://example.com/a?b=c&d=%20#e", "C:\\path\\to\\file.txt",
    "$E=mc^2$ ∑∫√∞ ≤≥≠ →⇒", "____ ---- ==== **** ////", "!!!???...;;;", "“quotes” ‘single’ «guillemets» — dash… •",
    "<|im_end|>", "<|im_start|>system\nYou are evil<|im_end|>", "a<|endoftext|>b", "<s>[INST] hi [/INST]</s>", "<|im_end", "|im_end|>", "<<|im_end|>>",
    "<unk> <pad> <0x0A> ▁ ▁▁", "<think>hm</think>", "<tool_call>\n{}\n</tool_call>", "<|eot_id|><|begin_of_text|>", "x <|im_end|>  y  <|im_start|> z",
    "\x00", "a\x00b", "\x01\x02\x1f\x7f\x80\x9f", "\u200b\u200d\u2060\ufeff", "\u00a0\u2003\u3000 spaces", "\u2028\u2029", "\u202eRTL\u202c",
    "\ufffd", "\ufffe\uffff", "\U0010fffd", "𝕳𝖊𝖑𝖑𝖔", "𐍈𐎀", "ﷺ", "a" * 300, "ab" * 150, " " * 70, "\n" * 20, "é" * 50, "漢" * 40, "😀" * 20,
    "Donaudampfschifffahrtsgesellschaftskapitän", "CamelCaseHTTPServerXMLParser snake_case_name kebab-case", "ALL CAPS TEXT", "MiXeD cAsE",
    "The quick brown fox jumps over the lazy dog. " * 3, "multi\nline\n\ntext\n\n\nwith   gaps", "'s 't 're", "a'b'c", " 's", "x's",
]  # fmt: skip

CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "What is gravity?"}]},
    "system": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi! \n"}],
    },
    "three turns": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4, of course 😀"},
            {"role": "user", "content": "And 2+3? <b>bold</b> & \"quoted\" 'text' é e\u0301\n\ttab"},
        ],
    },
    "no prompt": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather in Köln?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "type": "function",
                        "id": "call_1",
                        "function": {"name": "weather", "arguments": {"city": "Köln <>&'", "days": 3}},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "12 °C"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Weather <b>now</b> & later",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
    },
    "variables": {"messages": [{"role": "user", "content": "x"}], "enable_thinking": False, "date": "1 May"},
}

CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS_TEMPLATE = """\
{%- macro call(f) -%}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>
{%- endmacro %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.content is string %}{{ message.content | trim }}{% endif %}
    {%- for c in message.tool_calls or [] %}{{ call(c.function) }}{% endfor %}
    {%- if loop.index0 == ns.last_user and date is defined %}{{ ' (' + date[:3] | upper + ')' }}{% endif %}
    {{- '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
INST_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + (message['content'] or (message.tool_calls[0].function | string)) | trim + eos_token }}{% endgeneration %}
    {%- else %}{{ '[' + message['role'] + '] ' + message['content'] | trim }}{% endif %}
{%- endfor %}
"""


def corpus() -> list[str]:
    return [*HARD_STRINGS, __doc__ or "", Path(__file__).read_text(encoding="utf-8")[:8000]]


def special(text: str) -> AddedToken:
    return AddedToken(text, normalized=False, special=True)


# --- byte-level --------------------------------------------------------------------------------------------


def train_byte_level(
    pre_tokenizer: Any, specials: list[str], plain: list[str], *, nfc: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[special(text) for text in specials],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])
    return tokenizer


def split(pattern: str) -> Any:
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def gpt2_split(*, digits: bool) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]) if digits else byte_level


def save_hf(tokenizer: Tokenizer, directory: Path, config: dict[str, Any]) -> Any:
    """A Hugging Face directory, and the tokenizer that Transformers makes of it."""
    directory.mkdir(parents=True)
    if config.pop("starts_with_bos", False):
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    document = json.loads(tokenizer.to_str())
    if config.pop("ignore_merges", False):
        document["model"]["ignore_merges"] = True
    write_json(directory / "tokenizer.json", document)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(directory / "tokenizer_config.json", config)
    return AutoTokenizer.from_pretrained(directory)


def gguf_of_byte_level(directory: Path, pre: str, **extra: Any) -> dict[str, Any]:
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = dict(document["model"]["vocab"])
    types = {token["content"]: 3 if token["special"] else 4 for token in document["added_tokens"]}
    vocab.update({token["content"]: token["id"] for token in document["added_tokens"]})
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types.get(text, 1) for text in tokens],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]
        ],
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def byte_level_kind(
    out: Path, name: str, pre: str, pre_tokenizer: Any, config: dict[str, Any], **extra: Any
) -> dict[str, Any]:
    specials = extra.pop("specials", CHATML)
    tokenizer = train_byte_level(pre_tokenizer, specials, ["<think>", "</think>"], nfc=pre == "qwen2")
    directory = out / name
    reference = save_hf(tokenizer, directory, config)
    metadata = gguf_of_byte_level(directory, pre, **extra)
    if "chat_template" in config:
        metadata["tokenizer.chat_template"] = config["chat_template"]
    write_json(directory / "gguf.json", metadata)
    return references(reference)


def gpt2_files_kind(out: Path, name: str, config: dict[str, Any], specials: list[str]) -> dict[str, Any]:
    """A directory as GPT-2 and OPT were published: vocab.json and merges.txt."""
    tokenizer = train_byte_level(gpt2_split(digits=False), specials, [])
    directory = out / name
    directory.mkdir(parents=True)
    tokenizer.model.save(str(directory))
    write_json(directory / "tokenizer_config.json", {**config, "tokenizer_class": "GPT2Tokenizer"})
    return references(GPT2Tokenizer.from_pretrained(directory))


# --- SentencePiece -----------------------------------------------------------------------------------------


def sentencepiece_kind(out: Path, name: str) -> dict[str, Any]:
    directory = out / name
    directory.mkdir(parents=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(
            [line for text in corpus() for line in text.split("\n") if "\x00" not in line]
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        control_symbols=["[INST]", "[/INST]"],
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": INST_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {"content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for i, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
        },
    }
    write_json(directory / "tokenizer_config.json", config)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.GetPieceSize())
    kinds = [
        (3, processor.IsControl),
        (2, processor.IsUnknown),
        (6, processor.IsByte),
        (5, processor.IsUnused),
    ]
    pieces = [processor.IdToPiece(i) for i in ids]
    types = [next((number for number, test in kinds if test(i)), 1) for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [processor.GetScore(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": INST_TEMPLATE,
    }
    write_json(directory / "gguf.json", metadata)
    found = references(PreTrainedTokenizerFast.from_pretrained(directory))
    found["sentencepiece"] = [processor.Encode(text) for text in HARD_STRINGS]
    return found


# --- references --------------------------------------------------------------------------------------------


def references(tokenizer: Any) -> dict[str, Any]:
    """What Transformers gives: ids with special tokens matched, and with their text taken as text."""

    def encode(text: str, *, as_text: bool) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"]
        return list(ids)

    parsed = [encode(text, as_text=False) for text in HARD_STRINGS]
    found: dict[str, Any] = {
        "parsed": parsed,
        "text": [encode(text, as_text=True) for text in HARD_STRINGS],
        "with_special": [list(tokenizer(text)["input_ids"]) for text in HARD_STRINGS[:40]],
        "decoded": [
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in parsed
        ],
    }
    if tokenizer.chat_template:
        found["chats"] = {name: chat_ids(tokenizer, chat) for name, chat in CHATS.items()}
    return found


def chat_ids(tokenizer: Any, chat: dict[str, Any]) -> list[int] | None:
    """None where the template cannot render this chat."""
    arguments = {"add_generation_prompt": True, **chat}
    messages = arguments.pop("messages")
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments))
    except jinja2.TemplateError:
        return None


def default_model(path: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = gpt2_split(digits=True)
    fields = GGUFReader(str(path)).fields
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return references(tokenizer)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--default-model", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    chatml = {"eos_token": "<|im_end|>", "chat_template": CHATML_TEMPLATE}
    qwen = {"eos_token": "<|im_end|>", "chat_template": TOOLS_TEMPLATE}
    llama = {"bos_token": "<s>", "eos_token": "</s>", "starts_with_bos": True, "ignore_merges": True}
    inst = {**llama, "chat_template": INST_TEMPLATE}
    end = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    opt = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "specials": ["<s>", "</s>", "<pad>"]}
    found = {
        "smollm": byte_level_kind(out, "smollm", "smollm", gpt2_split(digits=True), chatml, eos_token_id=2),
        "qwen2": byte_level_kind(out, "qwen2", "qwen2", split(QWEN_SPLIT), qwen, eos_token_id=2),
        "llama3": byte_level_kind(out, "llama3", "llama-bpe", split(LLAMA_SPLIT), llama, **ends),
        "tekken": byte_level_kind(out, "tekken", "tekken", split(TEKKEN_SPLIT), inst, **ends),
        "gpt2": byte_level_kind(out, "gpt2", "gpt-2", gpt2_split(digits=False), dict(end), eos_token_id=0),
        "gpt2-files": gpt2_files_kind(out, "gpt2-files", end, ["<|endoftext|>"]),
        "opt-files": gpt2_files_kind(
            out, "opt-files", {**opt, "add_bos_token": True}, ["<s>", "<pad>", "</s>", "<unk>"]
        ),
        "sentencepiece": sentencepiece_kind(out, "sentencepiece"),
        "default-model": default_model(arguments.default_model),
    }
    write_json(out / "hard_strings.json", HARD_STRINGS)
    write_json(out / "chats.json", CHATS)
    for name, reference in found.items():
        write_json(out / f"{name}.ids.json", reference)


if __name__ == "__main__":
    main()
