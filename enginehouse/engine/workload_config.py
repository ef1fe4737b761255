"""What bounds the work of one worker, and which sequences are refused because of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from enginehouse.engine.batching import BatchingStrategy, Continuous
from enginehouse.engine.messages import AddSequence
from enginehouse.engine.queue_order import Fifo, QueueOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What bounds the work. `max_context` is the model's, in tokens."""

    max_context: int
    batching: BatchingStrategy = field(default_factory=Continuous)
    order: QueueOrder = field(default_factory=Fifo)
    max_waiting: int = 1024
    """Sequences that may wait for their first turn; resumed ones are let in regardless."""
    max_wait_s: float | None = None
    """How long a sequence may wait for its first turn."""
    max_prompt_rows: int = 64
    """Most logit rows for prompt log-probabilities in one step: they bound the logits buffer to
    `max_prompt_rows + batching.max_sequences` rows."""

    def __post_init__(self) -> None:
        for name, value in (("max_context", self.max_context), ("max_prompt_rows", self.max_prompt_rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    @property
    def max_logit_rows(self) -> int:
        """Most rows of logits one step asks for."""
        return self.max_prompt_rows + self.batching.max_sequences

    def refusal(self, message: AddSequence, max_known: int, num_waiting: int) -> tuple[str, str] | None:
        """Code and text of the reason why `message` cannot be accepted, if there is one. Pure.

        `max_known` is what context and cache can hold of one sequence, in tokens.
        """
        num_prompt = len(message.prompt_tokens)
        if num_prompt == 0:
            return "sequence_failed", "The prompt is empty: there is no token to start from."
        if num_prompt + min(1, message.params.max_tokens) > max_known:
            what = "context" if max_known == self.max_context else "KV cache"
            return (
                "context_length_exceeded",
                f"The prompt has {num_prompt} tokens, and the {what} holds {max_known} for prompt and output.",
            )
        if num_waiting >= self.max_waiting and not message.output_tokens:
            return "queue_full", f"{self.max_waiting} sequences are waiting already."
        return None
