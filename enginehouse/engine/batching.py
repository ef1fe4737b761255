"""Batching strategies: who may join the batch, and how many tokens one step computes.

A strategy is a value without state, chosen by settings and sent to the worker. It decides about speed only:
the tokens a sequence gets are the same under every strategy.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class BatchingStrategy(Protocol):
    """What `WorkloadManager` asks when it puts a step together."""

    @property
    def max_sequences(self) -> int:
        """Most sequences that run at once."""

    @property
    def token_budget(self) -> int:
        """Most tokens in one step; the model's scratch buffers have this many rows."""

    def places(self, num_running: int) -> int:
        """How many sequences may join a batch of `num_running`."""

    def prefill_budget(self, num_decoding: int) -> int:
        """Tokens of not yet computed prompts in a step that also serves `num_decoding` streams."""

    def joins_with(self, budget: int) -> bool:
        """Whether a sequence may join although only `budget` prefill tokens are left in this step."""


class OneAtATime(msgspec.Struct, frozen=True, tag="one-at-a-time"):
    """One sequence, start to end, then the next: the baseline the others are measured against."""

    token_budget: int = 512

    def __post_init__(self) -> None:
        _check_at_least("token_budget", self.token_budget, 1)

    @property
    def max_sequences(self) -> int:
        """One."""
        return 1

    def places(self, num_running: int) -> int:
        """One when nothing runs."""
        return 1 - num_running

    def prefill_budget(self, num_decoding: int) -> int:
        """The whole budget."""
        return self.token_budget - num_decoding

    def joins_with(self, budget: int) -> bool:
        """Always: there is nobody to share with."""
        return True


class Static(msgspec.Struct, frozen=True, tag="static"):
    """Up to `size` sequences that start together; nobody joins until all of them are done.

    A batch is formed from whatever waits when the previous one is done, it does not wait to be full. A member
    that was preempted leads the next batch.
    """

    size: int = 4
    token_budget: int = 512

    def __post_init__(self) -> None:
        _check_at_least("size", self.size, 1)
        _check_at_least("token_budget", self.token_budget, self.size)

    @property
    def max_sequences(self) -> int:
        """The size of a batch."""
        return self.size

    def places(self, num_running: int) -> int:
        """All when the previous batch is done, else none."""
        return self.size if num_running == 0 else 0

    def prefill_budget(self, num_decoding: int) -> int:
        """What decoding leaves."""
        return self.token_budget - num_decoding

    def joins_with(self, budget: int) -> bool:
        """Always: members are chosen at once, even those whose prompt has to wait for a later step."""
        return True


class Continuous(msgspec.Struct, frozen=True, tag="continuous"):
    """Sequences join and leave at every step. Streams that run are served first; prompts are computed in chunks
    with what is left, and with at most `prefill_budget_while_decoding` tokens a step, so that a long prompt
    slows running streams by a bounded amount instead of stopping them.
    """

    token_budget: int = 512
    max_sequences: int = 32
    prefill_budget_while_decoding: int = 128

    def __post_init__(self) -> None:
        _check_at_least("max_sequences", self.max_sequences, 1)
        # A budget of one token for each place: then a prompt advances even while all the others decode.
        _check_at_least("token_budget", self.token_budget, self.max_sequences)
        _check_at_least("prefill_budget_while_decoding", self.prefill_budget_while_decoding, 1)

    def places(self, num_running: int) -> int:
        """Whatever is left of `max_sequences`."""
        return self.max_sequences - num_running

    def prefill_budget(self, num_decoding: int) -> int:
        """All of the budget when nobody decodes."""
        if num_decoding == 0:
            return self.token_budget
        return min(self.token_budget - num_decoding, self.prefill_budget_while_decoding)

    def joins_with(self, budget: int) -> bool:
        """Only one that can begin: joining early would hold memory for nothing and miss prefix hits."""
        return budget > 0


Batching = OneAtATime | Static | Continuous


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")
