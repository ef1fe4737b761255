"""A model without arithmetic that notices every wrong block.

A slot of its KV memory holds a digest of all tokens up to that one, made from the slot before it as read through
the block table, just as a real K/V vector depends on everything attention saw. A step that reads a stale,
foreign, shared or not yet computed slot is caught on the spot, and would change the tokens as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import FinishReason, TokenLogprob
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampledToken, SampleError, Sequence, sibling_params
from enginehouse.engine.step import ScheduledSequence, ScheduledStep

VOCAB_SIZE = 12
EOS = 0
STOP = 1
ROOT_DIGEST = 7
NAN_AT = 2
"""Output position at which a sequence marked by `is_cursed` gets NaN logits."""


def digest(before: int, token: int) -> int:
    """Integers only: their hash is the same in every process."""
    return hash((before, token))


def digests(tokens: Items[int]) -> list[int]:
    result, last = [], ROOT_DIGEST
    for token in tokens:
        last = digest(last, token)
        result.append(last)
    return result


def is_cursed(params: SamplingParams) -> bool:
    return params.presence_penalty == 2.0


def sample(last_digest: int, params: SamplingParams, num_output: int) -> SampledToken | SampleError:
    """The next token: a function of the prefix, the seed and the position."""
    if is_cursed(params) and num_output == NAN_AT:
        return SampleError("NaN in the logits")
    token = hash((last_digest, params.seed or 0, num_output)) % VOCAB_SIZE
    if num_output < params.min_tokens and token in (EOS, STOP):
        token = 2
    return SampledToken(token, -float(token), [(token, -float(token))])


def prompt_logprob(digest_before: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(hash((digest_before, token)) % 1000))


@dataclass
class LoneRun:
    """What a sequence must be given, whatever else goes on."""

    tokens: list[int]
    finish_reason: FinishReason | None
    stop_token: int | None
    prompt_logprobs: list[TokenLogprob | None] | None


def lone_run(prompt: list[int], params: SamplingParams, max_known: int) -> LoneRun:
    """Computes one token after the other with nothing but the prompt; `finish_reason` None means it fails."""
    tokens: list[int] = []
    chain = digests(prompt)
    logprobs = None
    if params.prompt_logprobs is not None:
        logprobs = [None, *(prompt_logprob(chain[i - 1], prompt[i]) for i in range(1, len(prompt)))]
    while True:
        if len(tokens) == params.max_tokens or len(prompt) + len(tokens) >= max_known:
            return LoneRun(tokens, "length", None, logprobs)
        sampled = sample(chain[-1], params, len(tokens))
        if isinstance(sampled, SampleError):
            return LoneRun(tokens, None, None, logprobs)
        tokens.append(sampled.token)
        chain.append(digest(chain[-1], sampled.token))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
        if sampled.token in ends and len(tokens) > params.min_tokens:
            return LoneRun(tokens, "stop", sampled.token, logprobs)


def lone_runs(prompt: list[int], params: SamplingParams, max_known: int, num_sequences: int) -> list[LoneRun]:
    return [lone_run(prompt, sibling_params(params, i), max_known) for i in range(num_sequences)]


@dataclass
class SimulatedModel:
    """Executes steps like the worker: copies first, then all rows, then samples."""

    cache: KVCache
    memory: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [None] * (self.cache.num_blocks * self.cache.block_size)

    def run(self, step: ScheduledStep) -> tuple[list[SampledToken | SampleError], list[TokenLogprob]]:
        self._copy(step.copies)
        self._spoil_unheld_blocks()
        for item in step.items:
            self._check_prefix(item.sequence, item.start)
        written: set[int] = set()
        for item in step.items:
            self._write(item, written)
        for item in step.items:
            self._check_prefix(item.sequence, item.start + item.num_tokens)
        return self._read_out(step)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        size = self.cache.block_size
        for source, target in pairs:
            block = self.memory[source * size : (source + 1) * size]
            self.memory[target * size : (target + 1) * size] = block

    def _spoil_unheld_blocks(self) -> None:
        """What nobody holds and nobody can find may be anything."""
        size = self.cache.block_size
        for block in range(self.cache.num_blocks):
            if self.cache.num_refs(block) == 0 and not self.cache.is_findable(block):
                self.memory[block * size : (block + 1) * size] = [None] * size

    def _slot(self, sequence: Sequence, position: int) -> int:
        size = self.cache.block_size
        return sequence.block_table[position // size] * size + position % size

    def _check_prefix(self, sequence: Sequence, end: int) -> None:
        """Before anything is written: what a step needs must have been there when it began."""
        chain = digests(sequence.tokens[:end])
        found = [self.memory[self._slot(sequence, position)] for position in range(end)]
        assert found == chain, f"sequence {sequence.sequence_id} reads K/V that is not its own prefix's"

    def _write(self, item: ScheduledSequence, written: set[int]) -> None:
        sequence, size = item.sequence, self.cache.block_size
        for position in range(item.start, item.start + item.num_tokens):
            slot = self._slot(sequence, position)
            assert slot not in written, "two rows of one step write to the same slot"
            assert self.cache.num_refs(slot // size) == 1, "a block that others hold is written"
            assert not self.cache.is_findable(slot // size), "a block that others may find is written"
            written.add(slot)
            before = self.memory[self._slot(sequence, position - 1)] if position else ROOT_DIGEST
            assert before is not None
            self.memory[slot] = digest(before, sequence.tokens[position])

    def _read_out(self, step: ScheduledStep) -> tuple[list[SampledToken | SampleError], list[TokenLogprob]]:
        rows = [(item, item.start + i) for item in step.items for i in range(item.num_tokens)]
        assert len(rows) == step.num_tokens
        assert step.logit_rows == sorted(set(step.logit_rows)), "rows must be ascending"
        logits: list[tuple[Sequence, int, int]] = []
        for row in step.logit_rows:
            item, position = rows[row]
            value = self.memory[self._slot(item.sequence, position)]
            assert value is not None
            logits.append((item.sequence, position, value))
        samples = []
        for sample_row in step.sample_rows:
            computed, position, value = logits[sample_row.logit]
            wanted = sample_row.sequence
            assert computed.tokens[: position + 1] == wanted.tokens, "the row is not that of the last token"
            samples.append(sample(value, wanted.params, wanted.num_output))
        prompt_logprobs = []
        for prompt_row in step.prompt_rows:
            computed, position, value = logits[prompt_row.logit]
            assert computed is prompt_row.sequence
            assert position == prompt_row.position - 1
            prompt_logprobs.append(prompt_logprob(value, computed.prompt_tokens[prompt_row.position]))
        return samples, prompt_logprobs
