"""The worker process: one model, one step loop. `python -m enginehouse.engine.worker FD CONFIG` (see executor).

It imports numpy, msgspec and the parts of the engine that compute; text, HTTP and model formats stay outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from enginehouse.engine.engine_config import BLOCK_SIZE, WorkerConfig
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import (
    AbortSequences,
    AddSequence,
    Command,
    Fatal,
    Heartbeat,
    Loading,
    Preempt,
    Ready,
    SequenceFailed,
    SequenceId,
    Shutdown,
    StepReport,
    TokenLogprob,
)
from enginehouse.engine.model_runner import Batch, Chunk, ModelRunner, build_batch
from enginehouse.engine.sampler import Logits, Sampler, SamplingRow
from enginehouse.engine.sequence import SampledToken, SampleError
from enginehouse.engine.step import Outcome, SampleRow, ScheduledStep
from enginehouse.engine.structured_output_matchers import GrammarMatchers
from enginehouse.engine.worker_channel import HEARTBEAT_INTERVAL_S, WorkerChannel
from enginehouse.engine.workload_manager import WorkloadConfig, WorkloadManager
from enginehouse.errors import EnginehouseError
from enginehouse.runtime import ops
from enginehouse.runtime.packed import open_packed

logger = logging.getLogger("enginehouse.worker")

_FLUSH_S = 2.0
_SWITCH_INTERVAL_S = 0.0005
"""How long the step loop may keep the channel's threads waiting for the interpreter; Python's 5 ms are a step."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ModelWorker:
    """Owns everything that computes: model, KV cache, scheduler, sampler. `run` is the whole life of a token."""

    def __init__(self, config: WorkerConfig, channel: WorkerChannel) -> None:
        self._channel = channel
        self._check_integrity = config.check_integrity
        loading_since_s = time.monotonic()
        channel.emit(Loading(progress=0.0))
        packed = open_packed(config.model_path)
        channel.emit(Loading(progress=0.5))
        operations = ops.load(config.num_threads, config.kernels)
        _note_each_layer(operations, channel)
        self._runner = ModelRunner(
            packed,
            operations,
            num_blocks=config.num_blocks,
            kv_dtype=config.kv_dtype,
            max_rows=config.batching.token_budget,
            max_seqs=config.batching.max_sequences,
        )
        self._vocab_size = packed.config.vocab_size
        self._sampler = Sampler(self._vocab_size)
        self._grammars = GrammarMatchers(config.model_path, self._vocab_size, channel.wake)
        self._workload = WorkloadManager(
            WorkloadConfig(
                max_context=config.max_context,
                batching=config.batching,
                order=config.queue_order,
                max_waiting=config.max_waiting,
                max_wait_s=config.max_queue_wait_s,
            ),
            KVCache(config.num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_cache),
        )
        channel.emit(
            Ready(
                load_s=time.monotonic() - loading_since_s,
                num_blocks=config.num_blocks,
                block_size=BLOCK_SIZE,
                kv_bytes=self._runner.kv_bytes,
                weight_bytes=packed.manifest.weights_bytes,
                num_threads=operations.num_threads,
                kernels=operations.name,
            )
        )

    def run(self) -> None:
        """Serve until told to shut down."""
        workload, channel = self._workload, self._channel
        was_busy = False
        while True:
            timeout_s = 0.0 if workload.has_work or was_busy else HEARTBEAT_INTERVAL_S
            for command in channel.take(timeout_s):
                if isinstance(command, Shutdown):
                    return
                self._apply(command)
            self._add_prepared()
            if not workload.has_work:
                self._rest(was_busy)
                was_busy = False
                continue
            was_busy = True
            step_since_s = time.monotonic()
            step = workload.schedule()
            samples, prompt_logprobs = self._compute(step)
            outcome = workload.complete(step, samples, prompt_logprobs)
            self._grammars.forget(_ended(outcome))
            stats = workload.stats(time.monotonic() - step_since_s)
            channel.emit(StepReport(outputs=outcome.outputs, failed=outcome.failed, stats=stats))

    def _apply(self, command: Command) -> None:
        if isinstance(command, AddSequence):
            if command.params.grammar is None:
                self._workload.add(command)
            else:
                self._grammars.prepare(command)
        elif isinstance(command, AbortSequences):
            self._workload.abort(command.sequence_ids)
            self._grammars.forget(command.sequence_ids)
        elif isinstance(command, Preempt):
            self._workload.preempt_all()

    def _add_prepared(self) -> None:
        """Queue the sequences whose grammar has been compiled; a grammar never makes others wait."""
        for message, error, aborted in self._grammars.take_ready():
            ids = [message.sequence_id, *message.sibling_ids]
            if error is None:
                self._workload.add(message)
                self._workload.abort(aborted)
                self._grammars.forget(aborted)
            else:
                failed = [SequenceFailed(id_, "sequence_failed", error) for id_ in ids]
                self._channel.emit(StepReport(failed=failed, stats=self._workload.stats()))

    def _rest(self, was_busy: bool) -> None:
        """Nothing to do: say so, and use the moment to check the books."""
        if was_busy and self._check_integrity:
            self._workload.check_integrity()
        self._channel.emit(Heartbeat(stats=self._workload.stats()))

    def _compute(
        self, step: ScheduledStep
    ) -> tuple[list[SampledToken | SampleError], list[TokenLogprob | SampleError]]:
        """Samples for `step.sample_rows` and log-probabilities for `step.prompt_rows`."""
        self._runner.copy_blocks(step.copies)
        if not step.items:
            return [], []
        rows = step.sample_rows
        self._grammars.start(rows)
        logits = self._runner.run(_batch(step))
        indices = [row.logit for row in rows]
        sampled_logits = logits if indices == list(range(len(logits))) else logits[indices]
        samples = self._sample(sampled_logits, rows)
        prompt_logprobs = [
            self._sampler.logprob(
                logits[row.logit],
                row.sequence.prompt_tokens[row.position],
                row.sequence.params.prompt_logprobs or 0,
            )
            for row in step.prompt_rows
        ]
        return samples, prompt_logprobs

    def _sample(self, logits: Logits, rows: list[SampleRow]) -> list[SampledToken | SampleError]:
        """One result per row of `logits` [num_rows, vocab], within the rows' grammars."""
        masks = self._grammars.masks()
        sampling_rows = [
            SamplingRow(r.sequence.params, r.sequence.prompt_tokens, r.sequence.output_tokens) for r in rows
        ]
        if masks is None:
            return self._sampler.sample(logits, sampling_rows)
        masked = [
            row if mask is None or isinstance(mask, SampleError) else row._replace(banned=mask)
            for row, mask in zip(sampling_rows, masks, strict=True)
        ]
        samples = self._sampler.sample(logits, masked)
        checked = [
            mask if isinstance(mask, SampleError) else sample
            for sample, mask in zip(samples, masks, strict=True)
        ]
        return self._grammars.advance(rows, checked)


def _note_each_layer(operations: ops.Ops, channel: WorkerChannel) -> None:
    """Tell the channel of every layer that is done: a step of a large model may take longer than the API process
    would wait for a sign of life."""
    attention = operations.attention

    def noted_attention(*arguments: Any) -> None:
        channel.note_progress()
        attention(*arguments)

    operations.attention = noted_attention  # type: ignore[method-assign, assignment]


def _ended(outcome: Outcome) -> list[SequenceId]:
    ended = [output.sequence_id for output in outcome.outputs if output.finish_reason is not None]
    return ended + [failure.sequence_id for failure in outcome.failed]


def _batch(step: ScheduledStep) -> Batch:
    chunks = [
        Chunk(
            tokens=item.sequence.tokens[item.start : item.start + item.num_tokens],
            start=item.start,
            block_table=item.sequence.block_table,
            logits="none",
        )
        for item in step.items
    ]
    return dataclasses.replace(build_batch(chunks), logit_rows=np.array(step.logit_rows, np.int32))


def _bind_to_parent() -> None:
    """On Linux, let the kernel end this process with its parent, even while it is not reading its socket."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            prctl(_PR_SET_NAME, b"enginehouse-wkr", 0, 0, 0)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(arguments: list[str]) -> int:
    """Exit code 0 after `Shutdown`, SIGTERM or the end of the API process; 1 after a fault, which is reported."""
    _bind_to_parent()
    # The terminal sends Ctrl-C to the whole process group; the API process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    np.seterr(all="ignore")  # infinities are part of sampling; NaN is looked for where it matters
    config = msgspec.json.decode(arguments[1], type=WorkerConfig)
    channel = WorkerChannel(socket.socket(fileno=int(arguments[0])), on_disconnect=lambda: os._exit(0))
    try:
        ModelWorker(config, channel).run()
    except Exception as error:  # the outermost loop: say what happened, then end
        logger.exception("the worker cannot go on")
        code = error.code if isinstance(error, EnginehouseError) else None
        channel.emit(Fatal(code=code or "internal_error", message=str(error) or type(error).__name__))
        channel.flush(_FLUSH_S)
        return 1
    channel.flush(_FLUSH_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
