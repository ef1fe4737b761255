"""The worker process of an encoder: `python -m enginehouse.engine.encoder_worker FD CONFIG` (see executor).

Like the worker that generates it imports numpy, msgspec and what computes. There is no cache and no step but the
whole input: inputs are taken in the order they came, as many at once as the token budget holds.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict

import msgspec
import numpy as np

from enginehouse.engine.encoder_config import EncoderWorkerConfig
from enginehouse.engine.messages import (
    AbortSequences,
    AddInput,
    Command,
    EncodedInput,
    EncodeReport,
    EngineStats,
    Heartbeat,
    Loading,
    Ready,
    SequenceFailed,
    SequenceId,
    Shutdown,
)
from enginehouse.engine.worker_channel import HEARTBEAT_INTERVAL_S, WorkerChannel
from enginehouse.engine.worker_process import note_each_layer, run_worker
from enginehouse.runtime import ops
from enginehouse.runtime.models.encoder import Encoder, EncoderInput
from enginehouse.runtime.packed import open_packed


class InputQueue:
    """Inputs that wait, first come, first served. Pure: no IO, no clock."""

    def __init__(self, *, max_rows: int, max_inputs: int) -> None:
        self._max_rows, self._max_inputs = max_rows, max_inputs
        self._waiting: OrderedDict[SequenceId, AddInput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def apply(self, command: Command) -> None:
        """Take an input in, or take inputs back; unknown ids are ignored."""
        if isinstance(command, AddInput):
            self._waiting[command.input_id] = command
        elif isinstance(command, AbortSequences):
            for input_id in command.sequence_ids:
                self._waiting.pop(input_id, None)

    def next_batch(self) -> list[AddInput]:
        """The first inputs that fit together, removed from the queue; at least one when there is any.

        None is passed over for a smaller one behind it, so nobody waits longer than those before him take.
        """
        batch: list[AddInput] = []
        rows = 0
        while self._waiting and len(batch) < self._max_inputs:
            first = next(iter(self._waiting.values()))
            rows += len(first.tokens)
            if batch and rows > self._max_rows:
                break
            batch.append(self._waiting.pop(first.input_id))
        return batch


class EncoderWorker:
    """Owns the bound encoder and the queue of inputs."""

    def __init__(self, config: EncoderWorkerConfig, channel: WorkerChannel) -> None:
        self._channel = channel
        loading_since_s = time.monotonic()
        channel.emit(Loading(progress=0.0))
        packed = open_packed(config.model_path)
        channel.emit(Loading(progress=0.5))
        operations = ops.load(config.num_threads, config.kernels)
        note_each_layer(operations, channel)
        self._encoder = Encoder(packed, operations, max_rows=config.max_rows, max_inputs=config.max_inputs)
        self._queue = InputQueue(max_rows=config.max_rows, max_inputs=config.max_inputs)
        self._num_batches, self._num_tokens, self._last_step_s = 0, 0, 0.0
        channel.emit(
            Ready(
                load_s=time.monotonic() - loading_since_s,
                num_blocks=0,
                block_size=0,
                kv_bytes=0,
                weight_bytes=packed.manifest.weights_bytes,
                num_threads=operations.num_threads,
                kernels=operations.name,
            )
        )

    def run(self) -> None:
        """Serve until told to shut down."""
        while True:
            for command in self._channel.take(0.0 if self._queue else HEARTBEAT_INTERVAL_S):
                if isinstance(command, Shutdown):
                    return
                self._queue.apply(command)
            if self._queue:
                self._channel.emit(self._encode(self._queue.next_batch()))
            else:
                self._channel.emit(Heartbeat(stats=self._stats(num_running=0)))

    def _encode(self, batch: list[AddInput]) -> EncodeReport:
        started_s = time.monotonic()
        vectors = self._encoder.encode([EncoderInput(item.tokens, item.types) for item in batch])
        self._num_batches += 1
        self._num_tokens += sum(len(item.tokens) for item in batch)
        self._last_step_s = time.monotonic() - started_s
        outputs, failed = [], []
        for item, vector in zip(batch, vectors, strict=True):
            if np.isfinite(vector).all():
                outputs.append(EncodedInput(item.input_id, vector.astype("<f4").tobytes(), started_s))
            else:
                said = "The model gave values that are no numbers."
                failed.append(SequenceFailed(item.input_id, "sequence_failed", said))
        return EncodeReport(outputs=outputs, failed=failed, stats=self._stats(num_running=0))

    def _stats(self, num_running: int) -> EngineStats:
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._queue),
            steps_total=self._num_batches,
            computed_tokens_total=self._num_tokens,
            last_step_s=self._last_step_s,
        )


def main(arguments: list[str]) -> int:
    """See `run_worker` for the exit codes."""
    np.seterr(all="ignore")  # what is no number is looked for in the vectors
    config = msgspec.json.decode(arguments[1], type=EncoderWorkerConfig)
    return run_worker(int(arguments[0]), lambda channel: EncoderWorker(config, channel).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
