"""One step as the scheduler hands it to the model, and what came out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginehouse.engine.messages import SequenceFailed, SequenceOutput
from enginehouse.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `num_tokens` tokens of `sequence` from position `start`. Its block table covers them."""

    sequence: Sequence
    start: int
    num_tokens: int


@dataclass(slots=True)
class PromptRow:
    """The logits of `logit_rows[logit]` give the log-probability of `sequence.prompt_tokens[position]`."""

    sequence: Sequence
    position: int
    logit: int


@dataclass(slots=True)
class SampleRow:
    """Sample the next token of `sequence` from the logits of `logit_rows[logit]`. Siblings about to fork share
    one row of logits.
    """

    sequence: Sequence
    logit: int


@dataclass(slots=True)
class ScheduledStep:
    """One forward pass: first `copies` of whole blocks, in order, then `items` one after another as rows.

    `logit_rows` are the rows (counted over all items) whose logits are needed, ascending.
    """

    items: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRow] = field(default_factory=list)
    sample_rows: list[SampleRow] = field(default_factory=list)
    num_tokens: int = 0

    def put(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the next `num_tokens` tokens of `sequence`, and rows for what their logits are needed for."""
        start = sequence.num_computed
        end = start + num_tokens
        row = self.num_tokens
        self.items.append(ScheduledSequence(sequence, start, num_tokens))
        self.num_tokens += num_tokens
        sequence.in_flight = True
        if sequence.prompt_logprobs is not None:
            for position in range(max(start + 1, len(sequence.prompt_logprobs)), end + 1):
                if position < len(sequence.prompt_tokens):
                    self.prompt_rows.append(PromptRow(sequence, position, len(self.logit_rows)))
                    self.logit_rows.append(row + position - 1 - start)
        if end == len(sequence.tokens) and sequence.params.max_tokens > 0:
            logit = len(self.logit_rows)
            self.logit_rows.append(row + num_tokens - 1)
            self.sample_rows.append(SampleRow(sequence, logit))
            for sibling in sequence.siblings:
                self.sample_rows.append(SampleRow(sibling, logit))


@dataclass(slots=True)
class Outcome:
    """What happened since the last outcome: outputs in order, and sequences that ended without a result."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    failed: list[SequenceFailed] = field(default_factory=list)
