"""What a caller of the engine sees of a request: prompts go in, events come out, errors are raised.

For every choice (`index` 0 to n - 1) a request gives exactly one `Started`, any number of `TokenEvent`s and one
`Finished`, in this order; choices are interleaved. When the request fails, the iterator raises an
`EnginehouseError` instead of going on.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from enginehouse.engine.messages import FinishReason, SequenceId, TokenLogprob

UNTIL_CONTEXT_END = 2**31 - 1
"""As `SamplingParams.max_tokens`: go on until the model's context is full. Any larger value than the room that
the prompt leaves means the same."""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in OpenAI's shape (`role`, `content`), turned into a prompt by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}
    param: str = "messages"
    """The request's field that the messages came from, which errors name."""


Prompt = str | list[int] | ChatPrompt


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Moments of one sequence, as `time.monotonic()`."""

    arrival_s: float
    started_s: float
    """First step that computed a part of it."""
    first_token_s: float
    finished_s: float

    @property
    def queue_s(self) -> float:
        """Seconds between admission and the first step."""
        return self.started_s - self.arrival_s

    @property
    def prefill_s(self) -> float:
        """Seconds between the first step and the first token."""
        return self.first_token_s - self.started_s

    @property
    def decode_s(self) -> float:
        """Seconds between the first token and the last."""
        return self.finished_s - self.first_token_s

    @property
    def total_s(self) -> float:
        """Seconds between admission and the last token."""
        return self.finished_s - self.arrival_s


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The sequence has left the queue and its first token is there (its `TokenEvent` follows)."""

    index: int
    sequence_id: SequenceId
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose K/V came from the prefix cache."""
    started_s: float
    """First step that computed a part of it, as `time.monotonic()`."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice: usually one token, several when the reader is slow.

    `text` is what may be shown now; it is "" while a character is incomplete or a stop string may have begun,
    and the joined texts of a choice are its answer. Tokens count towards usage, also the eos or stop token
    that ends the output (it has no text).
    """

    index: int
    sequence_id: SequenceId
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    """One per token, when `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token (the first is None), once, with the first event of a choice that asked for them."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of one choice."""

    index: int
    sequence_id: SequenceId
    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop string or the entry of `stop_token_ids` that ended the output; None for eos and for length."""
    num_output_tokens: int
    timing: Timing


Event = Started | TokenEvent | Finished

EngineState = Literal["loading", "ready", "restarting", "failed", "closed"]


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said about the engine right now."""

    state: EngineState
    detail: str = ""
    """Why, when the state is neither ready nor loading."""
    last_report_age_s: float | None = None
    """Seconds since the worker was last heard of."""
    num_unfinished: int = 0
    """Sequences admitted and not ended."""
    worker_pid: int | None = None
    restarts_total: int = 0
    resumed_sequences_total: int = 0
