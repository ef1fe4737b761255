"""The worker process: one model, one step loop. `python -m enginehouse.engine.worker FD CONFIG` (see executor).

It imports numpy, msgspec and the parts of the engine that compute; text, HTTP and model formats stay outside.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import msgspec
import numpy as np

from enginehouse.engine.engine_config import BLOCK_SIZE, WorkerConfig
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import (
    AbortSequences,
    AddSequence,
    Command,
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
from enginehouse.engine.worker_process import note_each_layer, run_worker
from enginehouse.engine.workload_manager import WorkloadConfig, WorkloadManager
from enginehouse.runtime import ops
from enginehouse.runtime.packed import open_packed


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
        note_each_layer(operations, channel)
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


def main(arguments: list[str]) -> int:
    """See `run_worker` for the exit codes."""
    np.seterr(all="ignore")  # infinities are part of sampling; NaN is looked for where it matters
    config = msgspec.json.decode(arguments[1], type=WorkerConfig)
    return run_worker(int(arguments[0]), lambda channel: ModelWorker(config, channel).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
