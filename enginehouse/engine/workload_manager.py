"""Which sequences the next step computes, how far, and what its results mean.

The worker's loop is `step = schedule()`, run the model, `complete(step, samples)`. Everything here is logic on
lists of integers: no arrays, no clock of its own, no IO.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from enginehouse.engine.deadlines import DeadlineQueue
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import (
    AddSequence,
    EngineStats,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    TokenLogprob,
)
from enginehouse.engine.sequence import (
    Finish,
    SampledToken,
    SampleError,
    Sequence,
    SequenceState,
    check_finish,
)
from enginehouse.engine.step import Outcome, ScheduledSequence, ScheduledStep
from enginehouse.engine.workload_config import WorkloadConfig

__all__ = ["WorkloadConfig", "WorkloadManager"]

_by_rank = attrgetter("rank")


class WorkloadManager:
    """Owns all sequences of a worker and their blocks.

    Promises: every sequence added ends exactly once, as a finished output, as a failure, or silently because it
    was aborted. What a sequence is given does not depend on the others. The best-ranked running sequence
    advances in every step, so work is never undone for ever. A user's request cannot make it raise.
    """

    def __init__(
        self, config: WorkloadConfig, kv_cache: KVCache, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.max_known = min(config.max_context, kv_cache.capacity_tokens)
        """Most tokens, prompt and output, that one sequence may come to."""
        self._clock = clock
        self._batching = config.batching
        self._waiting = config.order.new_queue()
        self._running: list[Sequence] = []  # sorted by rank
        self._sequences: dict[SequenceId, Sequence] = {}
        self._deadlines = DeadlineQueue()
        self._outcome = Outcome()
        self._step: ScheduledStep | None = None
        self._evict_all = False
        self._num_arrivals = 0
        self._steps_total = 0
        self._preemptions_total = 0
        self._forks_total = 0
        self._computed_tokens_total = 0
        self._last_step_tokens = 0

    # --- what callers may do at any time -------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `schedule()` and `complete()` have something to do or to tell."""
        return bool(self._sequences or self._outcome.outputs or self._outcome.failed)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not in the batch, siblings that were not forked yet included."""
        return len(self._sequences) - len(self._running)

    def add(self, message: AddSequence) -> None:
        """Accept a sequence (with its siblings), or note why it cannot be: that is told by the next `complete()`.

        Raises `ValueError` when an id is in use.
        """
        ids = [message.sequence_id, *message.sibling_ids]
        if len(set(ids)) != len(ids) or not self._sequences.keys().isdisjoint(ids):
            raise ValueError(f"sequence ids {ids} are not new")
        refusal = self.config.refusal(message, self.max_known, len(self._waiting))
        if refusal is not None:
            self._outcome.failed.extend(SequenceFailed(id_, *refusal) for id_ in ids)
            return
        leader = Sequence.from_message(message, self._clock())
        over = check_finish(leader, self.max_known)
        if over is not None and not leader.num_prompt_logprobs_missing:
            for sequence in (leader, *leader.siblings):
                self._emit(sequence, None, over)
            return
        self._num_arrivals += 1
        key, arrival, _ = self.config.order.rank(leader, self._num_arrivals)
        for index, sequence in enumerate((leader, *leader.siblings)):
            sequence.rank = (key, arrival, index)
            self._sequences[sequence.sequence_id] = sequence
            if sequence.deadline_s is not None:
                self._deadlines.watch(sequence, sequence.deadline_s)
            if self.config.max_wait_s is not None and not sequence.output_tokens:
                self._deadlines.watch(sequence, sequence.arrival_s + self.config.max_wait_s)
        self._waiting.push(leader)

    def abort(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Forget these sequences; unknown ids are ignored. Blocks are free at once, or after `complete()` for
        those the step in flight computes. Nothing more is told about them.
        """
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._end(sequence)

    def preempt_all(self) -> None:
        """Take every running sequence out of the cache when the next step is put together."""
        self._evict_all = True

    def stats(self, last_step_s: float = 0.0) -> EngineStats:
        """Gauges and counters; `last_step_s` is what the caller measured."""
        cache = self.kv_cache
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            blocks_total=cache.num_blocks,
            blocks_used=cache.num_used,
            blocks_cached=cache.num_cached,
            steps_total=self._steps_total,
            prefix_hit_tokens_total=cache.hit_tokens_total,
            preemptions_total=self._preemptions_total,
            forks_total=self._forks_total,
            copied_blocks_total=cache.copies_total,
            computed_tokens_total=self._computed_tokens_total,
            last_step_s=last_step_s,
            last_step_tokens=self._last_step_tokens,
        )

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless every block is accounted for. Not while a step is in flight."""
        self.kv_cache.check_integrity(sequence.block_table for sequence in self._sequences.values())

    # --- the step ------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Put the next step together. It may be empty; `complete()` must be called with it all the same."""
        if self._step is not None:
            raise RuntimeError("schedule() was called before the last step was completed")
        now = self._clock()
        self._expire(now)
        if self._evict_all:
            self._evict_all = False
            while self._running:
                self._preempt(self._running[-1])
        step = self._step = ScheduledStep()
        prompts = self._schedule_streams(step)
        budget = self._batching.prefill_budget(step.num_tokens)
        for sequence in prompts:
            budget -= self._schedule_chunk(step, sequence, budget)
        if self._waiting:
            self._admit(step, budget, now)
        return step

    def complete(
        self,
        step: ScheduledStep,
        samples: list[SampledToken | SampleError],
        prompt_logprobs: Iterable[TokenLogprob | SampleError] = (),
    ) -> Outcome:
        """Take in what the model computed: `samples` match `step.sample_rows`, `prompt_logprobs` match
        `step.prompt_rows`. Returns everything that was to be told since the last call.

        A `SampleError` fails that sequence alone; in a prompt, with all siblings that wait for it. Raises
        `ValueError` when the lists do not match.
        """
        if step is not self._step:
            raise RuntimeError("complete() was called with another step than the one in flight")
        self._step = None
        for prompt_row, logprob in zip(step.prompt_rows, prompt_logprobs, strict=True):
            self._learn_prompt(prompt_row.sequence.survivor, logprob)
        for item in step.items:
            self._advance(item)
        for row, sample in zip(step.sample_rows, samples, strict=True):
            self._learn(row.sequence, sample)
        if step.items:
            self._steps_total += 1
            self._computed_tokens_total += step.num_tokens
            self._last_step_tokens = step.num_tokens
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    # --- putting a step together ---------------------------------------------------------------------------

    def _schedule_streams(self, step: ScheduledStep) -> list[Sequence]:
        """Schedule the sequences that need one token more, best rank first, and return the others.

        Who finds no block takes those of the worst-ranked. The worst-ranked itself keeps its blocks and waits
        for a better step, unless nobody else runs: then it will never fit.
        """
        running, prompts, index = self._running, [], 0
        reserve = self.kv_cache.reserve
        while index < len(running):
            sequence = running[index]
            start = sequence.num_computed
            if len(sequence.tokens) - start != 1:
                prompts.append(sequence)
            elif reserve(sequence.block_table, start, start + 1, step.copies):
                step.put(sequence, 1)
                self._waiting.charge(sequence.tenant, 1)
            elif running[-1] is not sequence:
                self._preempt(running[-1])
                continue
            elif index == 0:
                self._fail_for_memory(sequence)
                continue
            index += 1
        return prompts

    def _schedule_chunk(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Schedule as much of `sequence` as budgets allow; its blocks are reserved. Returns the tokens."""
        rows_left = self.config.max_prompt_rows - len(step.prompt_rows)
        num_tokens = sequence.largest_chunk(budget, rows_left)
        if num_tokens > 0:
            step.put(sequence, num_tokens)
            self._waiting.charge(sequence.tenant, num_tokens)
        return num_tokens

    def _admit(self, step: ScheduledStep, budget: int, now: float) -> None:
        """Let waiting sequences join, in their order; the first that cannot makes all others wait, so that a
        big one is not passed for ever by small ones.
        """
        places = self._batching.places(sum(sequence.family_size for sequence in self._running))
        while places > 0 and self._batching.joins_with(budget):
            sequence = self._waiting.peek()
            if sequence is None:
                return
            # One place is enough for a family: whoever finds none at the fork waits for one like anybody else.
            if not self._give_blocks(sequence, now, places):
                if self._running:
                    return
                self._fail_for_memory(sequence)
                continue
            self._waiting.pop()
            sequence.state = SequenceState.RUNNING
            insort(self._running, sequence, key=_by_rank)
            places -= sequence.family_size
            budget -= self._schedule_chunk(step, sequence, budget)

    def _give_blocks(self, sequence: Sequence, now: float, places: int) -> bool:
        """Find or reserve blocks for all tokens `sequence` knows. False when they, and one more for each running
        sequence to grow into, are not there; of its siblings, those count that will find one of `places`.
        """
        cache, num_known = self.kv_cache, sequence.num_known
        missing = sequence.num_prompt_logprobs_missing
        limit = len(sequence.prompt_tokens) - missing - 1 if missing else None
        matched = cache.match_prefix(sequence.tokens, sequence.tenant, sequence.block_hashes, limit)
        num_new = cache.blocks_for(num_known) - len(matched)
        headroom = len(self._running) + min(sequence.family_size, places) if self._running else 0
        if cache.num_available_after(matched) < num_new + headroom:
            return False
        sequence.block_table = cache.acquire(matched)
        sequence.num_computed = len(matched) * cache.block_size
        cache.reserve(sequence.block_table, sequence.num_computed, num_known, [])
        if sequence.started_s is None:
            sequence.started_s = now
            sequence.cached_tokens = min(sequence.num_computed, len(sequence.prompt_tokens))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take its blocks; what it knows will be computed again."""
        self._running.remove(sequence)
        self.kv_cache.release(sequence.block_table)
        sequence.num_computed = 0
        sequence.state = SequenceState.WAITING
        self._waiting.requeue(sequence)
        self._preemptions_total += 1

    # --- taking results in ---------------------------------------------------------------------------------

    def _advance(self, item: ScheduledSequence) -> None:
        """Count the tokens of `item` as computed and make its full blocks findable."""
        cache, sequence = self.kv_cache, item.sequence.survivor
        sequence.in_flight = False
        if sequence.state is SequenceState.FINISHED:
            cache.release(sequence.block_table)
            return
        size = cache.block_size
        first, end = item.start // size, (item.start + item.num_tokens) // size
        sequence.num_computed = item.start + item.num_tokens
        if end > first and cache.prefix_caching:
            cache.extend_hashes(sequence.block_hashes, sequence.tokens, sequence.tenant, end)
            cache.register(sequence.block_table, sequence.block_hashes, first, end)
        if sequence.num_computed < len(sequence.tokens):
            return
        family = [sequence, *sequence.siblings]
        if sequence.siblings:
            self._fork(sequence)
        if sequence.params.max_tokens == 0:
            for member in family:
                self._emit(member, None, Finish("length"))
                self._end(member)

    def _fork(self, leader: Sequence) -> None:
        """Give each sibling a table of its own over the leader's blocks. Those without a place wait for one."""
        for sibling in leader.siblings:
            sibling.leader = None
            sibling.cached_tokens = leader.cached_tokens
            sibling.started_s = leader.started_s
            sibling.block_hashes = list(leader.block_hashes)
            self._forks_total += 1
            if len(self._running) < self._batching.max_sequences:
                sibling.block_table = self.kv_cache.fork(leader.block_table)
                sibling.num_computed = leader.num_computed
                sibling.state = SequenceState.RUNNING
                insort(self._running, sibling, key=_by_rank)
            else:
                self._waiting.push(sibling)
        leader.siblings = []

    def _learn_prompt(self, sequence: Sequence, logprob: TokenLogprob | SampleError) -> None:
        if sequence.state is SequenceState.FINISHED or sequence.prompt_logprobs is None:
            return
        if isinstance(logprob, SampleError):
            for member in (*sequence.siblings, sequence):
                self._fail_for_numbers(member, logprob)
        else:
            sequence.prompt_logprobs.append(logprob)

    def _learn(self, sequence: Sequence, sample: SampledToken | SampleError) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        if isinstance(sample, SampleError):
            self._fail_for_numbers(sequence, sample)
            return
        sequence.append(sample.token)
        finish = check_finish(sequence, self.max_known)
        if sample.ends:
            is_eos = sample.token in sequence.params.eos_token_ids
            finish = Finish("stop", sample.token if is_eos else None)
        self._emit(sequence, sample, finish)
        if finish is not None:
            self._end(sequence)

    def _emit(self, sequence: Sequence, sample: SampledToken | None, finish: Finish | None) -> None:
        first = not sequence.announced
        sequence.announced = True
        logprobs = []
        if sample is not None and sequence.params.logprobs is not None:
            logprobs.append(TokenLogprob(sample.token, sample.logprob, sample.top))
        self._outcome.outputs.append(
            SequenceOutput(
                sequence_id=sequence.sequence_id,
                tokens=[] if sample is None else [sample.token],
                logprobs=logprobs,
                prompt_logprobs=sequence.prompt_logprobs,
                finish_reason=None if finish is None else finish.reason,
                stop_token=None if finish is None else finish.stop_token,
                cached_tokens=sequence.cached_tokens if first else None,
                started_s=sequence.started_s if first else None,
            )
        )
        sequence.prompt_logprobs = None

    # --- endings -------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state. Work it did for siblings goes on under one of them."""
        del self._sequences[sequence.sequence_id]
        state, sequence.state = sequence.state, SequenceState.FINISHED
        if sequence.leader is not None:
            sequence.leader.siblings.remove(sequence)
            sequence.leader = None
        elif sequence.siblings:
            self._hand_over(sequence, state)
        elif state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            if not sequence.in_flight:  # else `complete()` does it: the step still writes to these blocks
                self.kv_cache.release(sequence.block_table)

    def _hand_over(self, leader: Sequence, state: SequenceState) -> None:
        """Let the first sibling take the place of `leader`, which ended before it could fork."""
        heir = leader.inherit()
        heir.state = state
        if state is SequenceState.RUNNING:
            self._running[self._running.index(leader)] = heir
            return
        self._waiting.remove(leader)
        if heir.started_s is None:
            self._waiting.push(heir)
        else:
            self._waiting.requeue(heir)

    def _fail(self, sequence: Sequence, code: str, message: str) -> None:
        self._outcome.failed.append(SequenceFailed(sequence.sequence_id, code, message))
        self._end(sequence)

    def _fail_for_numbers(self, sequence: Sequence, error: SampleError) -> None:
        # Whatever spoiled its logits may sit in its blocks: nobody else shall find them.
        self.kv_cache.forget(sequence.block_table)
        self._fail(sequence, "sequence_failed", error.message)

    def _fail_for_memory(self, sequence: Sequence) -> None:
        cache = self.kv_cache
        message = (
            f"A sequence of {sequence.num_known} tokens does not fit in the KV cache: it needs "
            f"{cache.blocks_for(sequence.num_known)} blocks of {cache.block_size} tokens, "
            f"{cache.num_available + len(sequence.block_table)} can be had."
        )
        self._fail(sequence, "sequence_failed", message)

    def _expire(self, now: float) -> None:
        max_wait_s = self.config.max_wait_s
        for sequence in self._deadlines.pop_due(now):
            if sequence.state is SequenceState.FINISHED:
                continue
            if sequence.deadline_s is not None and sequence.deadline_s <= now:
                self._fail(sequence, "deadline_exceeded", "The deadline of the request passed.")
            elif max_wait_s is not None and (sequence.leader or sequence).started_s is None:
                message = f"Waited {now - sequence.arrival_s:.1f} s without getting a turn."
                self._fail(sequence, "queue_timeout", message)
