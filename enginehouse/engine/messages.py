"""What crosses the socket between the API process and a worker, and how it is framed.

Typed structs, msgpack, no pickle. A frame is a 4-byte little-endian length and that many bytes. The API process
sends `Command`s and the worker sends `Report`s; neither side ever waits for an answer to a particular message.
"""

from __future__ import annotations

import struct
from typing import Literal, NewType

import msgspec

from enginehouse.engine.sampling_params import SamplingParams

SequenceId = NewType("SequenceId", int)
FinishReason = Literal["stop", "length", "abort"]

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    pass


# --- API process → worker ----------------------------------------------------------------------------------


class AddSequence(_Message, frozen=True, kw_only=True):
    """Compute one prompt. With `sibling_ids` the prompt is computed once and forked into that many more
    sequences, which share its KV blocks; sibling i samples with its own seed.

    `output_tokens` are tokens that were already emitted in an earlier life (resume after a crash): they count
    as known, are computed like a prompt and are not emitted again.
    """

    sequence_id: SequenceId
    prompt_tokens: list[int]
    params: SamplingParams
    output_tokens: list[int] = []
    sibling_ids: list[SequenceId] = []
    tenant: str = ""
    priority: int = 0
    """Smaller is sooner."""
    deadline_s: float | None = None
    """`time.monotonic()` of this machine after which the sequence is no longer wanted."""


class AbortSequences(_Message, frozen=True, kw_only=True):
    """Forget these sequences and free their blocks. Unknown ids are ignored."""

    sequence_ids: list[SequenceId]


class Preempt(_Message, frozen=True, kw_only=True):
    """Take the running sequences out of the cache, to be recomputed (tests and operators)."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """Leave the loop and end the process."""


class AddInput(_Message, frozen=True, kw_only=True):
    """Encode one input, to an embedding or a score; for workers that have an encoder. `AbortSequences` takes it
    back."""

    input_id: SequenceId
    tokens: list[int]
    types: list[int] = []
    """Token types; empty where all are 0."""


Command = AddSequence | AddInput | AbortSequences | Preempt | Shutdown


# --- worker → API process ----------------------------------------------------------------------------------


class Loading(_Message, frozen=True, kw_only=True):
    """Progress while weights are brought into memory, 0 to 1."""

    progress: float


class Ready(_Message, frozen=True, kw_only=True):
    """The model is in memory; the worker accepts sequences."""

    load_s: float
    num_blocks: int
    block_size: int
    kv_bytes: int
    weight_bytes: int
    num_threads: int
    kernels: str
    """Which code computes, for people: "avx512-vnni", "avx2", "numpy", …"""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of the chosen token, and the best alternatives as (token, logprob), best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one sequence."""

    sequence_id: SequenceId
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One per prompt token, the first is None; sent once, before or with the first token."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The eos or stop token that ended the output (it is the last of `tokens`)."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; sent with the first token."""
    started_s: float | None = None
    """`time.monotonic()` when the sequence first ran; sent with the first token."""


class SequenceFailed(msgspec.Struct, frozen=True):
    """A sequence ended without a result; `code` is an `EnginehouseError` code."""

    sequence_id: SequenceId
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges after a step, and counters since the worker started."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    forks_total: int = 0
    copied_blocks_total: int = 0
    computed_tokens_total: int = 0
    last_step_s: float = 0.0
    last_step_tokens: int = 0


class StepReport(_Message, frozen=True, kw_only=True):
    """The outcome of one step."""

    outputs: list[SequenceOutput] = []
    failed: list[SequenceFailed] = []
    stats: EngineStats


class EncodedInput(msgspec.Struct, frozen=True):
    """One input's vector: little-endian fp32, its score alone for a cross-encoder."""

    input_id: SequenceId
    vector: bytes
    started_s: float
    """`time.monotonic()` when its batch began."""


class EncodeReport(_Message, frozen=True, kw_only=True):
    """The outcome of one batch of inputs."""

    outputs: list[EncodedInput] = []
    failed: list[SequenceFailed] = []
    stats: EngineStats


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent every second by the worker's step loop while it has nothing to do, and during a long step while layers
    get done."""

    stats: EngineStats


class Fatal(_Message, frozen=True, kw_only=True):
    """The worker cannot go on and is about to exit."""

    code: str
    message: str


Report = Loading | Ready | StepReport | EncodeReport | Heartbeat | Fatal

_encoder = msgspec.msgpack.Encoder()
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


def encode(message: Command | Report) -> bytes:
    """One frame, ready to be written. Raises `ValueError` when it would exceed `MAX_FRAME_BYTES`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes exceeds the frame limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Turns received bytes into message bodies. Owns the partial frame between two calls of `feed`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Complete message bodies in order. Raises `ValueError` on a frame length beyond the limit."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def decode_command(body: bytes) -> Command:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError` on anything but a command."""
    return _decode_command(body)


def decode_report(body: bytes) -> Report:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError` on anything but a report."""
    return _decode_report(body)
