"""The worker's loop around a simulated model, with a ledger of what every sequence was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from enginehouse.engine.batching import Continuous, Static
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import AddSequence, SequenceFailed, SequenceId, SequenceOutput, TokenLogprob
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import Sequence, SequenceState, sibling_params
from enginehouse.engine.step import ScheduledStep
from enginehouse.engine.workload_manager import WorkloadConfig, WorkloadManager

from .simulated_model import EOS, STOP, LoneRun, SimulatedModel, lone_run


def params(max_tokens: int = 6, **fields: object) -> SamplingParams:
    """Parameters under which outputs of the simulated model end in all the ways there are."""
    fields = {"seed": 1, "eos_token_ids": (EOS,), "stop_token_ids": (STOP,), **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def endless(max_tokens: int = 6, **fields: object) -> SamplingParams:
    """Parameters whose output has exactly `max_tokens` tokens."""
    return params(max_tokens, eos_token_ids=(), stop_token_ids=(), **fields)


@dataclass
class Account:
    """What one sequence asked for and has been given."""

    prompt: list[int]
    params: SamplingParams
    leads: bool
    resumed: list[int]
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int | None = None
    started_s: float | None = None
    num_outputs: int = 0
    finish_reason: str | None = None
    stop_token: int | None = None
    failure: SequenceFailed | None = None
    aborted: bool = False

    @property
    def is_closed(self) -> bool:
        return self.aborted or self.failure is not None or self.finish_reason is not None


class SimulatedWorker:
    """Adds, steps and aborts like `ModelWorker`, checking at every step what must always hold."""

    def __init__(
        self,
        config: WorkloadConfig | None = None,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        prefix_caching: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        config = config or WorkloadConfig(
            max_context=64, batching=Continuous(token_budget=16, max_sequences=4)
        )
        self.config = config
        self.cache = KVCache(num_blocks, block_size, prefix_caching=prefix_caching)
        self.manager = WorkloadManager(config, self.cache, clock)
        self.model = SimulatedModel(self.cache)
        self.accounts: dict[SequenceId, Account] = {}
        self.hostages: list[int] = []
        self.num_steps = 0
        self.ends: list[SequenceId] = []
        """Sequences whose output came to an end, in that order."""
        self._next_id = 0

    # --- what clients do ---

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        n: int = 1,
        output_tokens: list[int] | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[SequenceId]:
        ids = [SequenceId(self._next_id + i) for i in range(n)]
        self._next_id += n
        for index, sequence_id in enumerate(ids):
            self.accounts[sequence_id] = Account(
                prompt, sibling_params(params, index), index == 0, output_tokens or []
            )
        self.manager.add(
            AddSequence(
                sequence_id=ids[0],
                sibling_ids=ids[1:],
                prompt_tokens=prompt,
                output_tokens=output_tokens or [],
                params=params,
                tenant=tenant,
                priority=priority,
                deadline_s=deadline_s,
            )
        )
        return ids

    def abort(self, *sequence_ids: SequenceId) -> None:
        self.manager.abort(sequence_ids)
        for sequence_id in sequence_ids:
            account = self.accounts.get(sequence_id)
            if account is not None and not account.is_closed:
                account.aborted = True

    # --- the loop ---

    def schedule(self) -> ScheduledStep:
        before = [(sequence.sequence_id, sequence.num_remaining) for sequence in self.manager._running]
        num_preempted = self.manager.stats().preemptions_total
        step = self.manager.schedule()
        self._check_bounds(step)
        self._check_order(step, before, self.manager.stats().preemptions_total > num_preempted)
        return step

    def finish(self, step: ScheduledStep) -> None:
        samples, prompt_logprobs = self.model.run(step)
        self.complete(step, samples, prompt_logprobs)

    def complete(self, step: ScheduledStep, samples: list, prompt_logprobs: list) -> None:
        outcome = self.manager.complete(step, samples, prompt_logprobs)
        progressed = bool(step.items or outcome.outputs or outcome.failed)
        assert progressed or not self.manager.has_work, "a step with work to do did nothing"
        for output in outcome.outputs:
            self._book(output)
        for failed in outcome.failed:
            account = self.accounts[failed.sequence_id]
            assert not account.is_closed, f"{failed} for a sequence that had ended"
            account.failure = failed
        self.num_steps += 1
        self.check_integrity()

    def step(self) -> ScheduledStep:
        step = self.schedule()
        self.finish(step)
        return step

    def schedule_and_note(self, running: list[list[SequenceId]]) -> None:
        """One step; notes who was running in it."""
        step = self.schedule()
        running.append(self.running)
        self.finish(step)

    def drain(self, max_steps: int = 2000) -> None:
        """Run until nothing is left; a livelock is a failure."""
        for _ in range(max_steps):
            if not self.manager.has_work:
                break
            self.step()
        assert not self.manager.has_work, f"work is left after {max_steps} steps"
        assert self.cache.num_used == len(self.hostages)
        assert (self.manager.num_running, self.manager.num_waiting) == (0, 0)

    def check_integrity(self) -> None:
        tables = [sequence.block_table for sequence in self.sequences.values()]
        self.cache.check_integrity([*tables, self.hostages])
        for sequence in self.sequences.values():
            if sequence.state is SequenceState.WAITING:
                assert (sequence.num_computed, sequence.block_table) == (0, [])

    # --- what came of it ---

    @property
    def sequences(self) -> dict[SequenceId, Sequence]:
        return self.manager._sequences

    @property
    def running(self) -> list[SequenceId]:
        return [sequence.sequence_id for sequence in self.manager._running]

    def expected(self, sequence_id: SequenceId) -> LoneRun:
        account = self.accounts[sequence_id]
        return lone_run(account.prompt, account.params, self.manager.max_known)

    def check_accounts(self) -> None:
        """Every sequence was given what a lone run gives: all of it, or the beginning if it was cut short."""
        for sequence_id, account in self.accounts.items():
            lone = self.expected(sequence_id)
            tokens = account.resumed + account.tokens
            assert tokens == lone.tokens[: len(tokens)], f"sequence {sequence_id} was given other tokens"
            if account.prompt_logprobs is not None:
                assert account.prompt_logprobs == lone.prompt_logprobs
            if account.finish_reason is not None:
                assert (account.finish_reason, account.stop_token) == (lone.finish_reason, lone.stop_token)
                assert tokens == lone.tokens

    def _check_bounds(self, step: ScheduledStep) -> None:
        batching, running = self.config.batching, self.running
        assert step.num_tokens <= batching.token_budget
        assert len(running) <= batching.max_sequences
        assert running == [s.sequence_id for s in sorted(self.manager._running, key=lambda s: s.rank)]
        assert len(step.prompt_rows) <= self.config.max_prompt_rows
        assert len(step.logit_rows) <= self.config.max_logit_rows
        scheduled = [item.sequence.sequence_id for item in step.items]
        assert len(set(scheduled)) == len(scheduled)
        assert set(running).issuperset(scheduled)
        assert all(item.num_tokens > 0 for item in step.items)

    def _check_order(
        self, step: ScheduledStep, before: list[tuple[SequenceId, int]], has_preempted: bool
    ) -> None:
        """Streams first, prompts within their budget, and nobody joins a static batch."""
        batching, running = self.config.batching, set(self.running)
        scheduled = [item.sequence.sequence_id for item in step.items]
        streams = [id_ for id_, remaining in before if remaining == 1 and id_ in running]
        served = [sequence_id for sequence_id in streams if sequence_id in scheduled]
        if not has_preempted:
            assert scheduled[: len(served)] == served, "a prompt went before a stream"
            assert served == streams or self.cache.num_available == 0, "a stream was passed over"
            if isinstance(batching, Continuous) and served:
                assert step.num_tokens - len(served) <= batching.prefill_budget_while_decoding
            if isinstance(batching, Static) and running & {sequence_id for sequence_id, _ in before}:
                assert running <= {sequence_id for sequence_id, _ in before}, "one joined a static batch"

    def _book(self, output: SequenceOutput) -> None:
        account = self.accounts[output.sequence_id]
        assert not account.is_closed, f"{output} for a sequence that had ended"
        assert (output.cached_tokens is not None) == (account.num_outputs == 0)
        if output.prompt_logprobs is not None:
            assert account.num_outputs == 0
            account.prompt_logprobs = output.prompt_logprobs
        if account.num_outputs == 0:
            account.cached_tokens, account.started_s = output.cached_tokens, output.started_s
        wants_logprobs = account.params.logprobs is not None
        assert [entry.token for entry in output.logprobs] == (output.tokens if wants_logprobs else [])
        if output.finish_reason is not None:
            self.ends.append(output.sequence_id)
        account.num_outputs += 1
        account.tokens += output.tokens
        account.finish_reason, account.stop_token = output.finish_reason, output.stop_token
