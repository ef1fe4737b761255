"""Every error Enginehouse raises on purpose: one class per meaning, each with its HTTP status and code.

The HTTP layer turns any `EnginehouseError` into the OpenAI error shape; the command line prints its message
and leaves with `exit_code`. Messages say what is wrong and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class EnginehouseError(Exception):
    """Base class. `str(error)` is fit for a user's eyes."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


# --- The caller's request is wrong -------------------------------------------------------------------------


class InvalidRequestError(EnginehouseError):
    """A field is missing, of the wrong type, out of range, or not supported; `param` names it."""

    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = None


class ContextLengthExceededError(InvalidRequestError):
    """Prompt (plus what must be generated) is longer than the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(EnginehouseError):
    """No such model, or not allowed to this caller: the same answer on purpose."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class DeadlineExceededError(EnginehouseError):
    """The request's own deadline passed."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


# --- The server cannot take the request now ----------------------------------------------------------------


class QueueFullError(EnginehouseError):
    """The waiting queue has no place left."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class QueueTimeoutError(EnginehouseError):
    """The request waited longer in the queue than allowed."""

    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"


class ModelLoadingError(EnginehouseError):
    """The model is not in memory yet."""

    status = 503
    type = "service_unavailable_error"
    code = "model_loading"


class ModelLoadFailedError(EnginehouseError):
    """The model could not be brought into memory."""

    status = 503
    type = "service_unavailable_error"
    code = "model_load_failed"


class NoCapacityError(EnginehouseError):
    """Nothing can serve this request now."""

    status = 503
    type = "service_unavailable_error"
    code = "no_capacity"


class ShuttingDownError(EnginehouseError):
    """The server is stopping."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"


# --- One request failed inside -----------------------------------------------------------------------------


class SequenceFailedError(EnginehouseError):
    """A sequence could not be computed (NaN logits, cannot fit in the cache, …); the others go on."""

    code = "sequence_failed"


class WorkerDiedError(EnginehouseError):
    """The worker process ended while it held this sequence."""

    code = "worker_died"


# --- Models and weights ------------------------------------------------------------------------------------


class ModelError(EnginehouseError):
    """A model cannot be used."""

    code = "model_error"


class SourceError(ModelError):
    """A model source is malformed, not found, or cannot be fetched."""


class ChecksumError(SourceError):
    """Fetched bytes are not the expected ones."""


class CorruptModelError(ModelError):
    """A weight file is truncated or damaged."""


class UnsupportedModelError(ModelError):
    """Architecture, tensor type or option that Enginehouse does not implement; the message names it."""


class TemplateError(InvalidRequestError):
    """The chat template refused the messages or failed on them."""

    code = "template_error"


class KernelBuildError(EnginehouseError):
    """The C kernels could not be compiled or loaded."""

    code = "kernel_build_failed"
