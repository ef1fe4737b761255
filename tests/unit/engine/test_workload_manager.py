"""What the scheduler does in the ordinary course of things, one behaviour at a time."""

from __future__ import annotations

import pytest

from enginehouse.engine.batching import Continuous, OneAtATime, Static
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.queue_order import FairShare, PriorityWithAgeing
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import SampleError
from enginehouse.engine.step import ScheduledStep
from enginehouse.engine.workload_manager import WorkloadConfig, WorkloadManager

from .simulated_model import EOS
from .simulated_worker import SimulatedWorker, endless, params


def chunks(step: ScheduledStep) -> list[tuple[int, int, int]]:
    return [(item.sequence.sequence_id, item.start, item.num_tokens) for item in step.items]


def continuous(
    token_budget: int = 16, max_sequences: int = 4, prefill: int = 16, **config: object
) -> WorkloadConfig:
    batching = Continuous(
        token_budget=token_budget, max_sequences=max_sequences, prefill_budget_while_decoding=prefill
    )
    return WorkloadConfig(max_context=64, batching=batching, **config)  # type: ignore[arg-type]


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    worker = SimulatedWorker(continuous(token_budget=4))
    (a,) = worker.add([3] * 10, endless(3))
    assert [chunks(worker.step()) for _ in range(5)] == [
        [(a, 0, 4)],
        [(a, 4, 4)],
        [(a, 8, 2)],
        [(a, 10, 1)],
        [(a, 11, 1)],
    ]
    worker.drain(0)
    worker.check_accounts()


def test_streams_go_first_and_a_long_prompt_gets_its_budget() -> None:
    worker = SimulatedWorker(continuous(token_budget=12, prefill=3))
    (a,) = worker.add([3], endless(9))
    worker.step()
    (b,) = worker.add(list(range(8)), endless(2))
    assert chunks(worker.step()) == [(a, 1, 1), (b, 0, 3)]
    assert chunks(worker.step()) == [(a, 2, 1), (b, 3, 3)]
    assert chunks(worker.step()) == [(a, 3, 1), (b, 6, 2)]
    assert chunks(worker.step()) == [(a, 4, 1), (b, 8, 1)]


def test_several_prompts_share_a_step() -> None:
    worker = SimulatedWorker(continuous(token_budget=10))
    a, b, c = (worker.add([token] * 4, endless())[0] for token in (2, 3, 4))
    assert chunks(worker.step()) == [(a, 0, 4), (b, 0, 4), (c, 0, 2)]


def test_static_batches_are_fixed_until_all_are_done() -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=64, batching=Static(size=2, token_budget=16)))
    a, b, c = (worker.add([token] * 4, endless(n))[0] for token, n in ((2, 1), (3, 4), (4, 1)))
    running = []
    while worker.manager.has_work:
        worker.schedule_and_note(running)
    assert running == [[a, b], [b], [b], [b], [c]]
    worker.check_accounts()


def test_a_static_batch_takes_members_whose_prompt_must_wait() -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=64, batching=Static(size=3, token_budget=4)))
    ids = [worker.add([token] * 4, endless(1))[0] for token in (2, 3, 4, 5)]
    worker.step()
    worker.manager.schedule()
    assert worker.running == ids[1:3]


def test_one_at_a_time_runs_siblings_one_after_the_other() -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=64, batching=OneAtATime()))
    ids = worker.add([2] * 6, endless(3), n=3)
    while worker.manager.has_work:
        assert len(worker.step().items) <= 1
    worker.check_accounts()
    assert all(worker.accounts[id_].finish_reason == "length" for id_ in ids)
    assert worker.manager.stats().prefix_hit_tokens_total == 8


def test_the_queue_order_decides_who_is_next() -> None:
    worker = SimulatedWorker(
        WorkloadConfig(max_context=64, batching=OneAtATime(), order=PriorityWithAgeing(ageing_s=10.0))
    )
    late = worker.add([2], endless(1), priority=5)[0]
    soon = worker.add([3], endless(1), priority=-5)[0]
    assert [chunks(worker.step())[0][0] for _ in range(2)] == [soon, late]


def test_tenants_share_by_tokens() -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=64, batching=OneAtATime(), order=FairShare()))
    greedy = [worker.add([2] * 8, endless(1), tenant="greedy")[0] for _ in range(3)]
    modest = [worker.add([3], endless(1), tenant="modest")[0] for _ in range(3)]
    order = [chunks(worker.step())[0][0] for _ in range(6)]
    assert order == [greedy[0], *modest, *greedy[1:]]


# --- beginnings and endings ---


def test_max_tokens_zero_ends_at_once_without_a_step() -> None:
    worker = SimulatedWorker()
    (a,) = worker.add([2, 3], params(0))
    assert worker.manager.has_work
    assert worker.step().items == []
    account = worker.accounts[a]
    assert (account.finish_reason, account.tokens, account.num_outputs) == ("length", [], 1)
    assert not worker.manager.has_work


def test_max_tokens_zero_with_prompt_logprobs_computes_the_prompt() -> None:
    worker = SimulatedWorker(continuous(token_budget=4))
    ids = worker.add(list(range(9)), params(0, prompt_logprobs=0), n=2)
    steps = []
    while worker.manager.has_work:
        steps.append(worker.step())
    assert [step.num_tokens for step in steps] == [4, 4, 1]
    assert not any(step.sample_rows for step in steps)
    assert worker.accounts[ids[0]].prompt_logprobs == worker.expected(ids[0]).prompt_logprobs
    assert [worker.accounts[id_].finish_reason for id_ in ids] == ["length", "length"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_of_a_single_token(max_tokens: int) -> None:
    worker = SimulatedWorker()
    (a,) = worker.add([5], endless(max_tokens, prompt_logprobs=1))
    worker.drain()
    assert worker.accounts[a].prompt_logprobs == [None]
    assert len(worker.accounts[a].tokens) == max_tokens


def test_prompt_logprobs_are_sent_once_by_the_leader() -> None:
    worker = SimulatedWorker(continuous(max_prompt_rows=3))
    ids = worker.add(list(range(10)), endless(4, prompt_logprobs=1), n=2)
    worker.drain()
    assert worker.accounts[ids[0]].prompt_logprobs == worker.expected(ids[0]).prompt_logprobs
    assert worker.accounts[ids[1]].prompt_logprobs is None
    worker.check_accounts()


def test_prompt_logprobs_need_every_row_in_spite_of_hits() -> None:
    worker = SimulatedWorker()
    worker.add([2] * 12, endless(1))
    worker.drain()
    (a,) = worker.add([2] * 12, endless(1, prompt_logprobs=1))
    (b,) = worker.add([2] * 12, endless(1))
    worker.drain()
    worker.check_accounts()
    assert (worker.accounts[a].cached_tokens, worker.accounts[b].cached_tokens) == (0, 8)


def test_prompt_logprobs_survive_preemption_without_being_computed_twice() -> None:
    worker = SimulatedWorker(continuous(token_budget=6))
    (a,) = worker.add(list(range(12)), endless(2, prompt_logprobs=1))
    steps = [worker.step()]
    worker.manager.preempt_all()
    while worker.manager.has_work:
        steps.append(worker.step())
    assert sum(len(step.prompt_rows) for step in steps) == 11
    assert worker.manager.stats().preemptions_total == 1
    assert worker.manager.stats().prefix_hit_tokens_total == 4
    assert worker.accounts[a].prompt_logprobs == worker.expected(a).prompt_logprobs


def test_a_resumed_sequence_goes_on_where_it_was() -> None:
    worker = SimulatedWorker()
    lone = worker.expected(worker.add([2, 3, 4], endless(10))[0])
    worker.drain()
    (a,) = worker.add([2, 3, 4], endless(10, prompt_logprobs=1), output_tokens=lone.tokens[:6])
    worker.drain()
    assert worker.accounts[a].tokens == lone.tokens[6:]
    assert worker.accounts[a].prompt_logprobs is None, (
        "they were sent with the first token of the earlier life"
    )
    worker.check_accounts()


def test_a_resumed_sequence_that_was_complete_only_ends() -> None:
    worker = SimulatedWorker()
    (a,) = worker.add([2, 3], params(4), output_tokens=[5, EOS])
    (b,) = worker.add([2, 3], endless(2), output_tokens=[5, 6])
    assert worker.step().items == []
    assert (worker.accounts[a].finish_reason, worker.accounts[a].stop_token) == ("stop", EOS)
    assert (worker.accounts[b].finish_reason, worker.accounts[b].tokens) == ("length", [])


@pytest.mark.parametrize(
    ("num_blocks", "max_context", "prompt", "code", "what"),
    [
        (32, 10, [2] * 10, "context_length_exceeded", "10 tokens, and the context holds 10"),
        (2, 64, [2] * 8, "context_length_exceeded", "8 tokens, and the KV cache holds 8"),
        (2, 64, [], "sequence_failed", "empty"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    num_blocks: int, max_context: int, prompt: list[int], code: str, what: str
) -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=max_context), num_blocks=num_blocks, block_size=4)
    ids = worker.add(prompt, endless(3), n=2)
    worker.drain(1)
    for id_ in ids:
        failure = worker.accounts[id_].failure
        assert failure is not None
        assert failure.code == code
        assert what in failure.message


@pytest.mark.parametrize(("num_blocks", "max_context"), [(32, 10), (2, 64)])
def test_output_ends_where_context_or_cache_end(num_blocks: int, max_context: int) -> None:
    worker = SimulatedWorker(WorkloadConfig(max_context=max_context), num_blocks=num_blocks, block_size=4)
    limit = worker.manager.max_known
    (a,) = worker.add([2] * (limit - 1), endless(50))
    (b,) = worker.add([2] * 4, endless(50))
    worker.drain()
    assert (len(worker.accounts[a].tokens), worker.accounts[a].finish_reason) == (1, "length")
    assert (len(worker.accounts[b].tokens), worker.accounts[b].finish_reason) == (limit - 4, "length")


def test_the_queue_is_bounded_but_lets_resumed_sequences_in() -> None:
    worker = SimulatedWorker(continuous(max_waiting=2))
    ids = [worker.add([2 + i], endless(2))[0] for i in range(3)]
    (resumed,) = worker.add([9], endless(2), output_tokens=[4])
    worker.drain()
    failures = [worker.accounts[id_].failure for id_ in [*ids, resumed]]
    assert [failure and failure.code for failure in failures] == [None, None, "queue_full", None]


def test_deadlines_end_waiting_and_running_sequences() -> None:
    now = 0.0
    worker = SimulatedWorker(WorkloadConfig(max_context=64, batching=OneAtATime()), clock=lambda: now)
    (running,) = worker.add([2], endless(40), deadline_s=5.0)
    (waiting,) = worker.add([3], endless(40), deadline_s=4.0)
    (patient,) = worker.add([4], endless(2))
    worker.step()
    now = 4.0
    worker.step()
    assert worker.accounts[waiting].failure is not None
    assert not worker.accounts[running].is_closed
    now = 6.0
    worker.step()
    codes = [account.failure and account.failure.code for account in worker.accounts.values()]
    assert codes == ["deadline_exceeded", "deadline_exceeded", None]
    assert worker.accounts[running].tokens == worker.expected(running).tokens[:2]
    worker.drain()
    assert worker.accounts[patient].finish_reason == "length"


def test_only_those_that_never_ran_wait_too_long() -> None:
    now = 0.0
    worker = SimulatedWorker(
        WorkloadConfig(max_context=64, batching=OneAtATime(), max_wait_s=3.0), clock=lambda: now
    )
    family = worker.add([2], endless(6), n=2)
    (waiting,) = worker.add([3], endless(2))
    worker.step()
    now = 3.0
    worker.drain()
    failure = worker.accounts[waiting].failure
    assert failure is not None
    assert failure.code == "queue_timeout"
    assert [worker.accounts[id_].finish_reason for id_ in family] == ["length", "length"]


def test_what_the_first_output_tells() -> None:
    now = 7.5
    worker = SimulatedWorker(clock=lambda: now)
    worker.add([2] * 9, endless(2))
    worker.drain()
    ids = worker.add([2] * 9, endless(2), n=2)
    worker.drain()
    for id_ in ids:
        assert (worker.accounts[id_].cached_tokens, worker.accounts[id_].started_s) == (8, 7.5)


def test_a_hit_on_generated_tokens_counts_only_as_far_as_the_prompt() -> None:
    worker = SimulatedWorker()
    (first,) = worker.add([2] * 5, endless(12))
    worker.drain()
    (again,) = worker.add([2] * 5, endless(12), output_tokens=worker.accounts[first].tokens[:11])
    worker.drain()
    assert worker.accounts[again].cached_tokens == 5
    assert worker.manager.stats().prefix_hit_tokens_total == 12


# --- wrong numbers, wrong callers ---


def test_nan_in_one_row_fails_that_sequence_alone_and_leaves_nothing_behind() -> None:
    worker = SimulatedWorker()
    (bad,) = worker.add([2] * 9, endless(8, presence_penalty=2.0))
    (good,) = worker.add([3] * 9, endless(8))
    worker.drain()
    failure = worker.accounts[bad].failure
    assert failure is not None
    assert (failure.code, failure.message) == ("sequence_failed", "NaN in the logits")
    assert worker.accounts[good].finish_reason == "length"
    worker.check_accounts()
    assert worker.cache.match_prefix([2] * 9, "") == []
    assert len(worker.cache.match_prefix([3] * 9, "")) == 2


def test_nan_in_a_prompt_fails_the_whole_family() -> None:
    worker = SimulatedWorker()
    ids = worker.add([2] * 9, endless(8, prompt_logprobs=1), n=3)
    (other,) = worker.add([3] * 5, endless(3))
    step = worker.schedule()
    samples, prompt_logprobs = worker.model.run(step)
    worker.complete(step, samples, [SampleError("NaN"), *prompt_logprobs[1:]])
    assert [worker.accounts[id_].failure is not None for id_ in ids] == [True] * 3
    worker.drain()
    assert worker.accounts[other].finish_reason == "length"


def test_misuse_is_an_error_of_the_caller() -> None:
    manager = WorkloadManager(WorkloadConfig(max_context=64), KVCache(8, 4))
    message = AddSequence(sequence_id=SequenceId(1), prompt_tokens=[2, 3], params=SamplingParams())
    manager.add(message)
    with pytest.raises(ValueError, match="not new"):
        manager.add(message)
    with pytest.raises(ValueError, match="not new"):
        manager.add(
            AddSequence(
                sequence_id=SequenceId(2),
                sibling_ids=[SequenceId(2)],
                prompt_tokens=[2],
                params=SamplingParams(),
            )
        )
    step = manager.schedule()
    with pytest.raises(RuntimeError, match="before the last step was completed"):
        manager.schedule()
    with pytest.raises(RuntimeError, match="another step"):
        manager.complete(ScheduledStep(), [])
    with pytest.raises(ValueError, match="zip"):
        manager.complete(step, [])


@pytest.mark.parametrize("fields", [{"max_context": 0}, {"max_context": 8, "max_prompt_rows": 0}])
def test_config_is_checked(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        WorkloadConfig(**fields)  # type: ignore[arg-type]


def test_statistics() -> None:
    worker = SimulatedWorker(continuous(token_budget=8, max_sequences=2))
    worker.add([2] * 6, endless(4), n=2)
    worker.add([3] * 4, endless(2))
    stats = worker.manager.stats()
    assert (stats.num_running, stats.num_waiting, stats.steps_total) == (0, 3, 0)
    worker.step()
    stats = worker.manager.stats(last_step_s=0.5)
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.steps_total, stats.computed_tokens_total, stats.last_step_tokens) == (1, 6, 6)
    assert (stats.forks_total, stats.blocks_used, stats.blocks_total, stats.last_step_s) == (1, 2, 32, 0.5)
    worker.drain()
    stats = worker.manager.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_cached > 0
    assert stats.copied_blocks_total == 1
