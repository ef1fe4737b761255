"""One encoder, seen from the API process: texts in, vectors or scores out. Keeps nothing of the model but its
tokenizer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginehouse.engine.encoder_config import EncoderEngineConfig, EncoderWorkerConfig
from enginehouse.engine.events import EngineState
from enginehouse.engine.machine_limits import available_cpus
from enginehouse.engine.messages import (
    AbortSequences,
    AddInput,
    EncodeReport,
    EngineStats,
    Heartbeat,
    Loading,
    Ready,
    Report,
    SequenceId,
)
from enginehouse.engine.supervisor import Supervisor
from enginehouse.errors import (
    EnginehouseError,
    NoCapacityError,
    QueueFullError,
    SequenceFailedError,
    ShuttingDownError,
    UnsupportedModelError,
    WorkerDiedError,
)
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.encoder_tokenizer import EncoderTokenizer, TokenizedInput
from enginehouse.runtime.sources import Progress, ignore_progress
from enginehouse.runtime.weights import prepare_model

logger = logging.getLogger(__name__)

MAX_INPUTS_IN_BATCH = 256
SENT_AT_ONCE = 64
QUEUE_RETRY_S = 1.0


@dataclass(slots=True)
class _Pending:
    """An input that the worker has been given and not yet answered."""

    message: AddInput
    result: asyncio.Future[Encoded]
    num_deaths: int = 0
    """Workers that died while they had it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One input's answer."""

    vector: bytes
    """Little-endian fp32; a cross-encoder's holds one logit."""
    started_s: float
    """`time.monotonic()` when its batch began."""


class EncoderEngine:
    """Owns every admitted input: each ends in exactly one of a vector, a failure, or its caller's cancellation.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self, config: EncoderEngineConfig, path: Path, model: ModelConfig, tokenizer: EncoderTokenizer
    ) -> None:
        assert model.encoder is not None
        self.config, self.tokenizer = config, tokenizer
        self.max_input = model.encoder.max_input
        self.dimensions = model.hidden_size
        self._pending: dict[SequenceId, _Pending] = {}
        self._next_id = itertools.count(1)
        self._stats = EngineStats()
        self._on_progress: Progress = ignore_progress
        self._supervisor = Supervisor(
            EncoderWorkerConfig(
                model_path=str(path),
                num_threads=config.num_threads or available_cpus(),
                kernels=config.kernels,
                max_rows=max(config.token_budget, self.max_input),
                max_inputs=MAX_INPUTS_IN_BATCH,
            ),
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            load_timeout_s=config.load_timeout_s,
            max_restarts=config.max_restarts,
            on_report=self._on_report,
            on_death=self._on_death,
            on_restarted=self._send_again,
            on_failed=self._fail_all,
        )

    @classmethod
    async def start(
        cls, config: EncoderEngineConfig, on_progress: Progress = ignore_progress
    ) -> EncoderEngine:
        """Fetch, pack and load the model, as far as that is not done yet, and return a ready engine.

        Raises `ModelError` for a model that cannot be used and `ModelLoadFailedError` for a worker that does not
        come up. Cancelling leaves no process behind.
        """
        config.check()
        path, model, tokenizer = await asyncio.to_thread(_load, config, on_progress)
        engine = cls(config, path, model, tokenizer)
        engine._on_progress = on_progress
        try:
            await engine._supervisor.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def state(self) -> EngineState:
        """Of the worker."""
        return self._supervisor.state

    @property
    def detail(self) -> str:
        """Why the state is what it is, when there is something to say."""
        return self._supervisor.detail

    @property
    def info(self) -> Ready:
        """What the worker said when it was ready."""
        if self._supervisor.ready is None:
            raise NoCapacityError("The model is not loaded.")
        return self._supervisor.ready

    @property
    def stats(self) -> EngineStats:
        """Counters of the current worker after its latest batch."""
        return self._stats

    @property
    def worker_pid(self) -> int | None:
        """Process id of the current worker."""
        return self._supervisor.pid

    @property
    def num_pending(self) -> int:
        """Inputs that have no answer yet."""
        return len(self._pending)

    @property
    def restarts_total(self) -> int:
        """Times a dead worker was replaced."""
        return self._supervisor.restarts_total

    async def encode(self, inputs: Sequence[TokenizedInput]) -> list[Encoded]:
        """Vectors of all inputs, in order. Cancelling takes back those that were not computed yet.

        The inputs are the tokenizer's, at most `max_input` tokens each, with ids below the vocabulary's size.
        Raises `QueueFullError`, `NoCapacityError`, `ShuttingDownError`, `SequenceFailedError` or
        `WorkerDiedError`.
        """
        self._check_open(len(inputs))
        loop = asyncio.get_running_loop()
        added: dict[SequenceId, _Pending] = {}
        for item in inputs:
            message = AddInput(input_id=SequenceId(next(self._next_id)), tokens=item.tokens, types=item.types)
            added[message.input_id] = _Pending(message, loop.create_future())
        self._pending |= added
        try:
            for number, pending in enumerate(added.values(), start=1):
                self._supervisor.send(pending.message)
                if number % SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a request with thousands of inputs is not to stop the others
            return list(await asyncio.gather(*(pending.result for pending in added.values())))
        finally:
            left = [input_id for input_id in added if self._pending.pop(input_id, None) is not None]
            if left:
                self._supervisor.send(AbortSequences(sequence_ids=left))

    @staticmethod
    def floats(vector: bytes) -> list[float]:
        """The numbers of a vector."""
        numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
        return numbers

    @staticmethod
    def shortened(vector: bytes, dimensions: int) -> bytes:
        """The first `dimensions` numbers of a vector, scaled to length one (a vector of zeros stays)."""
        head = np.frombuffer(vector, "<f4")[:dimensions].astype(np.float64)
        norm = float(np.sqrt(np.square(head).sum()))
        return (head / norm if norm > 0 else head).astype("<f4").tobytes()

    async def close(self) -> None:
        """Refuse what is under way and end the worker."""
        self._fail_all(ShuttingDownError("The server is shutting down."))
        await self._supervisor.close()

    def _check_open(self, num_inputs: int) -> None:
        if self.state == "closed":
            raise ShuttingDownError("The server is shutting down.")
        if self.state == "failed":
            raise NoCapacityError(f"The model's worker is dead: {self.detail}", retry_after_s=120.0)
        if self._pending and len(self._pending) + num_inputs > self.config.max_waiting:
            raise QueueFullError(
                f"{len(self._pending)} inputs are waiting to be encoded, and {num_inputs} more would exceed "
                f"{self.config.max_waiting}. Try again soon.",
                retry_after_s=QUEUE_RETRY_S,
            )

    # Worker ---------------------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        if isinstance(report, EncodeReport):
            self._stats = report.stats
            self._supervisor.note_progress()
            for output in report.outputs:
                pending = self._pending.pop(output.input_id, None)
                if pending is not None and not pending.result.done():
                    pending.result.set_result(Encoded(output.vector, output.started_s))
            for failure in report.failed:
                self._fail(failure.sequence_id, SequenceFailedError(failure.message))
        elif isinstance(report, Heartbeat):
            self._stats = report.stats
        elif isinstance(report, Loading):
            self._on_progress("load", report.progress)

    def _on_death(self, error: WorkerDiedError) -> None:
        """An input that was there at two deaths may be what kills: it is not tried a third time."""
        for input_id, pending in list(self._pending.items()):
            pending.num_deaths += 1
            if pending.num_deaths > 1:
                self._fail(input_id, error)

    def _send_again(self) -> None:
        for pending in self._pending.values():
            self._supervisor.send(pending.message)

    def _fail(self, input_id: SequenceId, error: EnginehouseError) -> None:
        pending = self._pending.pop(input_id, None)
        if pending is not None and not pending.result.done():
            pending.result.set_exception(error)
            # `gather` hands on the first of a request's errors; the others have been said with it.
            pending.result.exception()

    def _fail_all(self, error: EnginehouseError) -> None:
        for input_id in list(self._pending):
            self._fail(input_id, error)


def _load(config: EncoderEngineConfig, on_progress: Progress) -> tuple[Path, ModelConfig, EncoderTokenizer]:
    """Blocks: call it in a thread. Raises `ModelError`."""
    prepared = prepare_model(config.source, config.precision, on_progress)
    encoder = prepared.config.encoder
    if encoder is None:
        raise UnsupportedModelError(f"{config.source} generates text; it is no encoder")
    if config.task == "embed" and encoder.head != "none":
        raise UnsupportedModelError(
            f"{config.source} is a cross-encoder: it scores pairs and has no embeddings. Set it as rerank.source"
        )
    if config.task == "rerank" and encoder.head == "none":
        raise UnsupportedModelError(
            f"{config.source} has no classification head: it gives embeddings. Set it as embedding.source"
        )
    return prepared.path, prepared.config, EncoderTokenizer.load(prepared.path, prepared.config)
