"""The request record: what one request was, how long each part of it took, how it ended. Never what it said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import structlog

_log = structlog.stdlib.get_logger("enginehouse.requests")


@dataclass(slots=True)
class RequestRecord:
    """Facts about one inference request, filled in while it runs and written once, when it has ended.

    Moments ending in `_s` are `time.monotonic()`, except `arrival_unix_s`. A moment is None when the request
    never got there.
    """

    request_id: str
    route: str
    model: str
    arrival_unix_s: float
    arrival_s: float
    tenant: str = ""
    version: str = ""
    route_reason: str = "default"
    stream: bool = False
    num_choices: int = 1
    queue_start_s: float | None = None
    """Admitted to the queue (validated, tokenised)."""
    inference_start_s: float | None = None
    """The first step that computed a part of it."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    """The last byte was handed to the socket, or the request failed."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 200
    outcome: str = "finished"
    """finished, cancelled, refused or failed."""
    error_type: str | None = None
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the last byte."""
        return _between(self.arrival_s, self.finish_s)

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step, or to the end of a request that never ran."""
        return _between(self.arrival_s, self.inference_start_s or self.finish_s)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first step to the first token."""
        return _between(self.inference_start_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last."""
        return _between(self.first_token_s, self.last_token_s)

    @property
    def transfer_s(self) -> float | None:
        """Seconds from the last token to the last byte."""
        return _between(self.last_token_s, self.finish_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival_s, self.first_token_s)

    def fields(self) -> dict[str, Any]:
        """The record as one flat line: identity, outcome, tokens, and durations in milliseconds."""
        durations = ("e2e", "queue", "prefill", "decode", "transfer", "time_to_first_token")
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "model": self.model,
            "version": self.version,
            "route": self.route,
            "route_reason": self.route_reason,
            "arrival_unix_s": round(self.arrival_unix_s, 3),
            "stream": self.stream,
            "num_choices": self.num_choices,
            "status": self.status,
            "outcome": self.outcome,
            "error_type": self.error_type,
            "finish_reasons": self.finish_reasons,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            **{f"{name}_ms": _milliseconds(getattr(self, f"{name}_s")) for name in durations},
        }

    def write(self) -> None:
        """One log line, event `request`."""
        _log.info("request", **self.fields())


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
