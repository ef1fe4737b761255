"""Whatever happens in whatever order, every sequence is given what it would be given alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from enginehouse.engine.batching import Batching, Continuous, OneAtATime, Static
from enginehouse.engine.messages import SequenceId
from enginehouse.engine.queue_order import FairShare, Fifo, Order, PriorityWithAgeing
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.workload_manager import WorkloadConfig

from .simulated_model import EOS, STOP
from .simulated_worker import SimulatedWorker

MAX_CONTEXT = 40
ALLOWED_FAILURES = {
    "sequence_failed",
    "deadline_exceeded",
    "queue_timeout",
    "queue_full",
    "context_length_exceeded",
}

continuous = st.builds(
    Continuous,
    token_budget=st.sampled_from([5, 9, 64]),
    max_sequences=st.integers(2, 5),
    prefill_budget_while_decoding=st.sampled_from([1, 3, 64]),
)
static = st.builds(Static, size=st.integers(1, 4), token_budget=st.sampled_from([4, 7, 64]))
one_at_a_time = st.builds(OneAtATime, token_budget=st.sampled_from([1, 3, 16]))
batchings = st.one_of(continuous, continuous, continuous, static, one_at_a_time)
orders = st.sampled_from([Fifo(), PriorityWithAgeing(ageing_s=2.0), FairShare()])

# Few tokens and few beginnings, so that prompts share prefixes that end inside and at the end of blocks.
prompts = st.builds(
    lambda head, length, tail: (head * 12)[:length] + tail,
    st.sampled_from([[2], [2, 3], [4, 5, 6]]),
    st.integers(0, 18),
    st.lists(st.integers(0, 11), min_size=1, max_size=3),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.one_of(st.integers(0, 3), st.integers(8, 20)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        seed=draw(st.integers(0, 2)),
        eos_token_ids=(EOS,),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (STOP,)])),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        presence_penalty=draw(st.sampled_from([0.0] * 9 + [2.0])),  # 2.0: see `is_cursed`
    )


Wish = tuple[list[int], SamplingParams, int, int]
crowds = st.lists(
    st.tuples(prompts, sampling_params(), st.sampled_from([1, 1, 2, 3]), st.integers(-2, 2)),
    min_size=2,
    max_size=5,
)


class WorkloadMachine(RuleBasedStateMachine):
    """Clients, operators and bad luck around one worker."""

    worker: SimulatedWorker

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.memory_was_taken = False

    @initialize(
        batching=batchings,
        order=orders,
        capacity_tokens=st.integers(16, 200),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_waiting=st.sampled_from([2, 100, 100, 100]),
        max_wait_s=st.sampled_from([None, None, None, 5.0]),
        max_prompt_rows=st.sampled_from([1, 4, 64]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        crowd=crowds,
    )
    def start(
        self,
        batching: Batching,
        order: Order,
        capacity_tokens: int,
        block_size: int,
        max_waiting: int,
        max_wait_s: float | None,
        max_prompt_rows: int,
        prefix_caching: bool,
        crowd: list[Wish],
    ) -> None:
        config = WorkloadConfig(
            max_context=MAX_CONTEXT,
            batching=batching,
            order=order,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            max_prompt_rows=max_prompt_rows,
        )
        self.worker = SimulatedWorker(
            config,
            num_blocks=max(2, capacity_tokens // block_size),
            block_size=block_size,
            prefix_caching=prefix_caching,
            clock=lambda: self.now_s,
        )
        self.add_a_crowd(crowd)

    @rule(
        prompt=prompts,
        params=sampling_params(),
        n=st.sampled_from([1, 1, 1, 2, 3, 6]),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-2, 2),
        patience_s=st.sampled_from([None] * 6 + [1.0, 10.0]),
    )
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        n: int,
        tenant: str,
        priority: int,
        patience_s: float | None,
    ) -> None:
        deadline_s = None if patience_s is None else self.now_s + patience_s
        self.worker.add(prompt, params, n=n, tenant=tenant, priority=priority, deadline_s=deadline_s)

    @rule(crowd=crowds)
    def add_a_crowd(self, crowd: list[Wish]) -> None:
        for prompt, params, n, priority in crowd:
            self.worker.add(prompt, params, n=n, priority=priority, tenant=str(priority))

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.worker.step()

    @rule(data=st.data(), when=st.sampled_from(["before the model ran", "after"]))
    def step_with_aborts_in_flight(self, data: st.DataObject, when: str) -> None:
        step = self.worker.schedule()
        if when == "after":
            samples, prompt_logprobs = self.worker.model.run(step)
            self._abort_some(data)
        else:
            self._abort_some(data)
            samples, prompt_logprobs = self.worker.model.run(step)
        self.worker.complete(step, samples, prompt_logprobs)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort_some(data)

    def _abort_some(self, data: st.DataObject) -> None:
        alive = list(self.worker.sequences)
        choices = [*alive, SequenceId(-1)]
        self.worker.abort(*data.draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)))

    @rule()
    def preempt(self) -> None:
        self.worker.manager.preempt_all()

    @rule(seconds=st.sampled_from([0.1, 3.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(data=st.data())
    def resume_one_that_was_cut_short(self, data: st.DataObject) -> None:
        """As after a crash: what was emitted is known, and must be continued seamlessly."""
        cut = [account for account in self.worker.accounts.values() if account.aborted and account.tokens]
        if cut:
            account = data.draw(st.sampled_from(cut))
            self.worker.add(
                account.prompt, account.params, output_tokens=account.resumed + account.tokens, tenant="a"
            )

    @precondition(lambda self: not self.worker.hostages)
    @rule(share=st.floats(0.0, 1.0))
    def take_memory(self, share: float) -> None:
        """Somebody else holds blocks: cached ones are evicted, running ones soon find none."""
        cache = self.worker.cache
        num_blocks = round(share * cache.num_available)
        if num_blocks:
            self.memory_was_taken = True
            assert cache.reserve(self.worker.hostages, 0, num_blocks * cache.block_size, [])

    @precondition(lambda self: self.worker.hostages)
    @rule()
    def give_memory_back(self) -> None:
        self.worker.cache.release(self.worker.hostages)

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        worker = self.worker
        worker.cache.release(worker.hostages)
        worker.drain()
        worker.check_accounts()
        for sequence_id, account in worker.accounts.items():
            assert account.is_closed
            if account.failure is None:
                continue
            assert account.failure.code in ALLOWED_FAILURES
            if account.failure.code == "sequence_failed":
                is_expected = worker.expected(sequence_id).finish_reason is None
                assert is_expected or self.memory_was_taken, account.failure


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_events_gives_everyone_a_lone_runs_tokens() -> None:
    run_state_machine_as_test(WorkloadMachine, settings=SETTINGS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_order_of_events_at_length() -> None:
    run_state_machine_as_test(
        WorkloadMachine, settings=settings(SETTINGS, max_examples=2000, stateful_step_count=60)
    )
