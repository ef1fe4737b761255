"""One sequence of tokens on its way through the engine, and the rules that end it.

There is a single idea here: *tokens known* against *tokens computed*. A new prompt knows many tokens and has
computed none; a decoding sequence knows exactly one more than it has computed; a prefix hit raises the number
computed without work; preemption sets it back to zero; a resumed sequence simply knows more from the start.
Nothing in the engine asks which phase a sequence is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from enginehouse.engine.messages import AddSequence, FinishReason, SequenceId, TokenLogprob
from enginehouse.engine.sampling_params import SEED_MAX, SEED_MIN, SamplingParams


class SequenceState(Enum):
    """Where a sequence is. A preempted one is `WAITING` again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SampledToken(NamedTuple):
    """What the sampler chose for one sequence. `logprob` and `top` (best first) matter only when asked for."""

    token: int
    logprob: float = math.nan
    top: list[tuple[int, float]] = []  # noqa: RUF012  (a NamedTuple default is never written to)
    ends: bool = False
    """Whether it completes the sequence's grammar, so that nothing may follow."""


class SampleError(NamedTuple):
    """Why nothing could be sampled for one sequence; it fails alone."""

    message: str


class Finish(NamedTuple):
    """How an output ended; `stop_token` is the eos or stop token that ended it."""

    reason: FinishReason
    stop_token: int | None = None


Rank = tuple[float, int, int]
"""Who deserves memory more: smaller first. Fixed for the life of a sequence, which is what rules out livelock."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known, tokens computed, and the blocks that hold the K/V of the computed ones.

    Owned by `WorkloadManager`; the worker and the sampler read it. `block_table[i]` holds the K/V of tokens
    `i * block_size` up to the next block; slots below `num_computed` are valid. `tokens` is
    `prompt_tokens + output_tokens`, kept joined because the model is fed slices of it.

    Until its first sample a sequence may lead `siblings` that want the same prompt; they hold no blocks and
    have `leader` set. A leader that is aborted before leaves its work to its `heir`.
    """

    sequence_id: SequenceId
    prompt_tokens: list[int]
    params: SamplingParams
    tokens: list[int]
    output_tokens: list[int]
    arrival_s: float
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    rank: Rank = (0.0, 0, 0)

    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `tokens`, as far as they were needed."""
    in_flight: bool = False
    """Whether the step between `schedule()` and `complete()` computes it."""

    siblings: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None
    heir: Sequence | None = None

    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    started_s: float | None = None
    announced: bool = False
    """Whether `cached_tokens` and `started_s` were sent."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """As far as they are known; None when they are not wanted, or were sent."""

    @classmethod
    def from_message(cls, message: AddSequence, arrival_s: float) -> Sequence:
        """The sequence and its siblings as the API process asked for them, waiting."""
        ids = [message.sequence_id, *message.sibling_ids]
        family = [
            cls(
                sequence_id=sequence_id,
                prompt_tokens=message.prompt_tokens,
                params=sibling_params(message.params, index),
                tokens=message.prompt_tokens + message.output_tokens,
                output_tokens=list(message.output_tokens),
                arrival_s=arrival_s,
                tenant=message.tenant,
                priority=message.priority,
                deadline_s=message.deadline_s,
            )
            for index, sequence_id in enumerate(ids)
        ]
        leader = family[0]
        leader.siblings = family[1:]
        if message.params.prompt_logprobs is not None and not message.output_tokens:
            leader.prompt_logprobs = [None]  # nothing predicts the first token
        for sibling in leader.siblings:
            sibling.leader = leader
        return leader

    @property
    def num_known(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Tokens generated so far, earlier lives included: the position of the random number to draw next."""
        return len(self.output_tokens)

    @property
    def num_remaining(self) -> int:
        """Tokens known but not computed."""
        return len(self.tokens) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether it ended, for whatever reason."""
        return self.state is SequenceState.FINISHED

    @property
    def family_size(self) -> int:
        """Sequences that will run once this one has forked."""
        return 1 + len(self.siblings)

    @property
    def can_stop(self) -> bool:
        """Whether the next token may be an end token; before `min_tokens` the sampler must not offer one."""
        return len(self.output_tokens) >= self.params.min_tokens

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt tokens whose log-probability was asked for and is not known yet."""
        if self.prompt_logprobs is None:
            return 0
        return len(self.prompt_tokens) - len(self.prompt_logprobs)

    @property
    def survivor(self) -> Sequence:
        """The sequence that goes on with this one's work: itself unless it left an heir."""
        sequence = self
        while sequence.heir is not None:
            sequence = sequence.heir
        return sequence

    def largest_chunk(self, budget: int, prompt_rows: int) -> int:
        """How many of the remaining tokens fit in `budget` tokens and in `prompt_rows` rows of logits for
        prompt log-probabilities; may be 0.
        """
        missing = self.num_prompt_logprobs_missing
        if missing > prompt_rows:
            first_row = len(self.prompt_tokens) - missing - 1  # the row before a token predicts it
            budget = min(budget, first_row + prompt_rows - self.num_computed)
        return min(self.num_remaining, budget)

    def append(self, token: int) -> None:
        """Learn one more token."""
        self.tokens.append(token)
        self.output_tokens.append(token)

    def inherit(self) -> Sequence:
        """Hand blocks and progress to the first sibling, which leads the others from now on, and return it.

        This one still sees the block table, because a step in flight may be reading it.
        """
        heir, *others = self.siblings
        heir.leader, heir.siblings = None, others
        for sibling in others:
            sibling.leader = heir
        heir.num_computed = self.num_computed
        heir.block_table = self.block_table
        heir.block_hashes = self.block_hashes
        heir.in_flight = self.in_flight
        heir.cached_tokens, heir.started_s = self.cached_tokens, self.started_s
        heir.prompt_logprobs = self.prompt_logprobs
        self.siblings, self.heir = [], heir
        return heir


def sibling_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sibling `index` (0 is the leader): the same with the seed moved on by `index`, wrapped
    to int64. A seed of None stays None.
    """
    if index == 0 or params.seed is None:
        return params
    span = SEED_MAX - SEED_MIN + 1
    seed = (params.seed + index - SEED_MIN) % span + SEED_MIN
    return msgspec.structs.replace(params, seed=seed)


def check_finish(sequence: Sequence, max_known: int) -> Finish | None:
    """Whether the output ends with the last token of `sequence`, and how. Pure.

    `max_known` is the most tokens (prompt and output) that context and cache can hold. A stop token wins over
    a limit reached by the same token; one that comes among the first `min_tokens` is an ordinary token.
    """
    params, output = sequence.params, sequence.output_tokens
    if output and len(output) > params.min_tokens:
        token = output[-1]
        if token in params.end_token_ids:
            return Finish("stop", token)
    if len(output) >= params.max_tokens or len(sequence.tokens) >= max_known:
        return Finish("length")
    return None
