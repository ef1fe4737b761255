"""What the worker's matchers take tokens for is what the detokenizer makes of them, for every kind of tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from enginehouse.engine import structured_output_matchers
from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampledToken, SampleError, Sequence
from enginehouse.engine.step import SampleRow
from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_matchers import MAX_SLOW_MASKS, GrammarMatchers
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.tokenizer_writer import write_tokenizer

DATA = Path(__file__).parents[2] / "data" / "text"
KINDS = ["smollm", "qwen2", "tekken", "gpt2", "sentencepiece"]
PADDING = 40


@pytest.fixture(params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, directory=DATA / request.param)
    return tmp_path


def test_every_token_has_the_same_bytes(stored: Path) -> None:
    ours = Tokenizer.load(stored)
    theirs = GrammarMatchers(str(stored), ours.vocab_size + PADDING, lambda: None)._load_vocabulary()
    differing = [
        token
        for token in range(ours.meta.num_tokens)
        if theirs.is_text[token] and theirs.tokenizer.decode_bytes([token]) != ours.token_bytes(token)
    ]
    assert differing == []
    special = sorted(ours.special_token_ids | set(ours.eos_token_ids))
    assert not theirs.is_text[special].any()
    assert not theirs.is_text[ours.meta.num_tokens :].any()
    assert theirs.is_text.sum() > 200


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(kind="regex", text="[a-z]{2} ?[0-9]{3}(é|日本|🎉)x"), "[a-z]{2} ?[0-9]{3}(é|日本|🎉)x"),
        (Grammar(kind="choice", text='[" leading space","tab\\there"]'), " leading space|tab\there"),
        (
            Grammar(kind="json_schema", text=json.dumps({"type": "array", "items": {"enum": ["a b", 1]}, "minItems": 3})),
            r"\[.*\]",
        ),
    ],
)  # fmt: skip
def test_a_walk_that_takes_any_allowed_token(stored: Path, grammar: Grammar, pattern: str) -> None:
    tokenizer = Tokenizer.load(stored)
    vocab_size = tokenizer.vocab_size + PADDING
    matchers = GrammarMatchers(str(stored), vocab_size, lambda: None)
    rng = np.random.default_rng(5)
    eos = (tokenizer.eos_token_ids or (0,))[0]
    prompt = tokenizer.encode("Say", add_special=False)
    for number in range(4):
        params = SamplingParams(max_tokens=500, grammar=grammar, eos_token_ids=(eos,))
        message = AddSequence(sequence_id=SequenceId(number), prompt_tokens=prompt, params=params)
        matchers.prepare(message)
        while not (ready := matchers.take_ready()):
            pass
        assert ready[0].error is None
        sequence = Sequence.from_message(message, 0.0)
        text = walk(matchers, sequence, tokenizer, rng)
        assert re.fullmatch(pattern, text), text


def walk(
    matchers: GrammarMatchers, sequence: Sequence, tokenizer: Tokenizer, rng: np.random.Generator
) -> str:
    """Take random tokens until the grammar or an end token ends the sequence; the text."""
    rows = [SampleRow(sequence, 0)]
    detokenizer = Detokenizer(tokenizer, prompt_tokens=sequence.prompt_tokens)
    pieces = []
    for _ in range(400):
        matchers.start(rows)
        masks = matchers.masks()
        assert masks is not None
        banned = masks[0]
        assert isinstance(banned, np.ndarray)
        token = int(rng.choice(np.flatnonzero(~banned)))
        if token in sequence.params.eos_token_ids:
            break
        assert token not in tokenizer.special_token_ids
        (sample,) = matchers.advance(rows, [SampledToken(token)])
        sequence.append(token)
        pieces.append(detokenizer.push([token]))
        assert isinstance(sample, SampledToken)
        if sample.ends:
            break
    return "".join([*pieces, detokenizer.flush()])


def test_a_mistake_fails_its_row_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, directory=DATA / "smollm")
    matchers = GrammarMatchers(str(tmp_path), Tokenizer.load(tmp_path).vocab_size, lambda: None)
    sequences = []
    for number in range(3):
        params = SamplingParams(grammar=Grammar(kind="regex", text="a+") if number else None)
        message = AddSequence(sequence_id=SequenceId(number), prompt_tokens=[5], params=params)
        sequences.append(Sequence.from_message(message, 0.0))
        if number:
            matchers.prepare(message)
            while not matchers.take_ready():
                pass
    sequences[1].append(7)  # which its matcher was not told
    matchers.start([SampleRow(sequence, 0) for sequence in sequences])
    masks = matchers.masks()
    assert masks is not None
    assert masks[0] is None
    assert isinstance(masks[1], SampleError)
    assert isinstance(masks[2], np.ndarray)


def test_a_grammar_that_is_slow_every_time_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output_matchers, "SLOW_MASK_S", -1.0)
    write_tokenizer(tmp_path, directory=DATA / "smollm")
    tokenizer = Tokenizer.load(tmp_path)
    matchers = GrammarMatchers(str(tmp_path), tokenizer.vocab_size, lambda: None)
    params = SamplingParams(grammar=Grammar(kind="regex", text="a+"))
    message = AddSequence(sequence_id=SequenceId(1), prompt_tokens=[5], params=params)
    matchers.prepare(message)
    while not matchers.take_ready():
        pass
    sequence = Sequence.from_message(message, 0.0)
    (letter,) = tokenizer.encode("a", add_special=False)
    for _ in range(MAX_SLOW_MASKS - 1):
        assert isinstance(mask_of(matchers, sequence), np.ndarray)
        matchers.advance([SampleRow(sequence, 0)], [SampledToken(letter)])
        sequence.append(letter)
    assert isinstance(mask_of(matchers, sequence), SampleError)


def mask_of(matchers: GrammarMatchers, sequence: Sequence) -> object:
    matchers.start([SampleRow(sequence, 0)])
    masks = matchers.masks()
    assert masks is not None
    return masks[0]
