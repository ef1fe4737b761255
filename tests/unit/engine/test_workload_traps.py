"""Traps other engines fell into: memory that runs out, sequences that vanish at a bad moment, forks."""

from __future__ import annotations

import pytest

from enginehouse.engine.batching import Batching, Continuous, OneAtATime, Static
from enginehouse.engine.messages import SequenceId
from enginehouse.engine.queue_order import FairShare, Fifo, Order, PriorityWithAgeing
from enginehouse.engine.workload_manager import WorkloadConfig

from .simulated_worker import SimulatedWorker, endless, params

ORDERS = [Fifo(), PriorityWithAgeing(), FairShare()]


def worker_with(
    num_blocks: int = 32, batching: Batching | None = None, order: Order | None = None
) -> SimulatedWorker:
    config = WorkloadConfig(
        max_context=64,
        batching=batching or Continuous(token_budget=16, max_sequences=4),
        order=order or Fifo(),
    )
    return SimulatedWorker(config, num_blocks=num_blocks, block_size=4)


def assert_all_finished(worker: SimulatedWorker, *ids: SequenceId) -> None:
    worker.drain()
    worker.check_accounts()
    assert [worker.accounts[id_].finish_reason for id_ in ids] == ["length"] * len(ids)


def preempt_with_room_for_one(worker: SimulatedWorker) -> None:
    """Takes all blocks nobody uses; of those that ran, only the best-ranked finds room again."""
    worker.cache.reserve(worker.hostages, 0, worker.cache.num_available * 4, [])
    worker.manager.preempt_all()
    worker.step()


# --- the prefix cache ---


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_a_full_hit_still_computes_the_last_token(length: int) -> None:
    worker = worker_with()
    (cold,) = worker.add([2] * length, endless(4))
    worker.drain()
    (warm,) = worker.add([2] * length, endless(4))
    assert_all_finished(worker, cold, warm)
    assert worker.accounts[warm].cached_tokens == (length - 1) // 4 * 4
    assert worker.accounts[warm].tokens == worker.accounts[cold].tokens


def test_what_a_step_computes_is_found_only_by_later_steps() -> None:
    worker = worker_with()
    (a,) = worker.add([2] * 8, endless(4))
    (twin,) = worker.add([2] * 8, endless(4))
    step = worker.schedule()
    assert [(item.start, item.num_tokens) for item in step.items] == [(0, 8), (0, 8)]
    assert worker.cache.match_prefix([2] * 8, "") == []
    worker.finish(step)
    assert len(worker.cache.match_prefix([2] * 8, "")) == 1
    assert_all_finished(worker, a, twin)


def test_what_was_generated_is_found_by_the_next_turn() -> None:
    worker = worker_with()
    (a,) = worker.add([2] * 5, endless(8))
    worker.drain()
    conversation = [2] * 5 + worker.accounts[a].tokens + [3, 3]
    (b,) = worker.add(conversation, endless(4))
    assert_all_finished(worker, a, b)
    assert worker.accounts[b].cached_tokens == 12  # 13 tokens but the last were computed


@pytest.mark.parametrize("length", [3, 9])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_one_tenant_never_hits_what_another_computed(length: int, prompt_logprobs: int | None) -> None:
    worker = worker_with()
    (a,) = worker.add([2] * length, endless(8, prompt_logprobs=prompt_logprobs), tenant="a")
    worker.drain()
    conversation = [2] * length + worker.accounts[a].tokens
    others = [worker.add(conversation, endless(2), tenant=tenant)[0] for tenant in ("", "b")]
    (same,) = worker.add(conversation, endless(2), tenant="a")
    assert_all_finished(worker, a, *others, same)
    assert [worker.accounts[id_].cached_tokens for id_ in others] == [0, 0]
    assert worker.accounts[same].cached_tokens == (length + 7) // 4 * 4


# --- memory runs out ---


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_sequences_that_need_all_memory_do_not_preempt_each_other_for_ever(order: Order) -> None:
    worker = worker_with(num_blocks=8, order=order)
    ids = [worker.add([token] * 3, endless(28), tenant=str(token))[0] for token in (2, 3, 4, 5)]
    ends: list[SequenceId] = []
    while worker.manager.has_work:
        worker.step()
        ends += [id_ for id_ in ids if worker.accounts[id_].is_closed and id_ not in ends]
        assert worker.num_steps < 28 * len(ids) * 2
    assert_all_finished(worker, *ids)
    assert ends == ids, "the best-ranked one is never a victim"
    assert 0 < worker.manager.stats().preemptions_total <= 3 * len(ids)


def test_the_latest_loses_its_blocks_and_the_others_go_on() -> None:
    worker = worker_with(num_blocks=6)
    first, last = (worker.add([token] * 7, endless(12))[0] for token in (2, 3))
    num_preempted = 0
    while not num_preempted:
        step = worker.step()
        num_preempted = worker.manager.stats().preemptions_total
    assert [item.sequence.sequence_id for item in step.items] == [first]
    assert worker.manager.num_waiting == 1
    assert_all_finished(worker, first, last)


def test_the_worst_ranked_waits_with_its_blocks_instead_of_being_thrown_out() -> None:
    worker = worker_with(num_blocks=6)
    first, last = worker.add([2] * 7, endless(3))[0], worker.add([3] * 8, endless(8))[0]
    worker.step()
    worker.cache.reserve(worker.hostages, 0, worker.cache.num_available * 4, [])
    step = worker.step()
    assert [item.sequence.sequence_id for item in step.items] == [first]
    assert worker.running == [first, last]
    worker.cache.release(worker.hostages)
    assert_all_finished(worker, first, last)
    assert worker.manager.stats().preemptions_total == 0


def test_the_only_running_sequence_that_cannot_grow_fails_with_a_reason() -> None:
    worker = worker_with(num_blocks=4)
    (a,) = worker.add([2] * 7, endless(8))
    worker.step()
    worker.cache.reserve(worker.hostages, 0, 8, [])
    for _ in range(2):
        worker.step()
    failure = worker.accounts[a].failure
    assert failure is not None
    assert failure.code == "sequence_failed"
    assert (
        "9 tokens does not fit in the KV cache: it needs 3 blocks of 4 tokens, 2 can be had"
        in failure.message
    )
    worker.cache.release(worker.hostages)
    (b,) = worker.add([2] * 7, endless(8))
    assert_all_finished(worker, b)


def test_a_waiting_sequence_that_finds_no_memory_though_nobody_runs_fails_with_a_reason() -> None:
    worker = worker_with(num_blocks=4)
    worker.cache.reserve(worker.hostages, 0, 12, [])
    ids = worker.add([2] * 7, endless(4), n=2)
    (small,) = worker.add([3] * 2, endless(2))
    worker.drain()
    assert all(worker.accounts[id_].failure is not None for id_ in ids)
    assert worker.accounts[small].finish_reason == "length"


def test_a_big_sequence_is_not_passed_for_ever_by_small_ones() -> None:
    worker = worker_with(num_blocks=8)
    worker.add([2] * 3, endless(10))
    worker.step()
    (big,) = worker.add([3] * 24, endless(4))
    (small,) = worker.add([4], endless(1))
    worker.step()
    assert not worker.accounts[small].is_closed
    worker.drain()
    assert worker.accounts[big].started_s is not None
    worker.check_accounts()


def test_preempted_by_force_in_the_middle_of_everything() -> None:
    worker = worker_with()
    ids = [*worker.add([2] * 6, endless(6), n=2), *worker.add([3] * 20, endless(6))]
    while worker.manager.has_work:
        worker.manager.preempt_all()
        worker.step()
        worker.step()
    assert_all_finished(worker, *ids)
    assert worker.manager.stats().preemptions_total > 6


# --- gone at a bad moment ---


def test_abort_between_two_chunks_of_a_prompt() -> None:
    worker = worker_with()
    (a,) = worker.add([2] * 30, endless())
    worker.step()
    assert worker.cache.num_used == 8
    worker.abort(a)
    assert worker.cache.num_used == 0
    assert not worker.manager.has_work


def test_abort_in_the_queue() -> None:
    worker = worker_with(batching=OneAtATime())
    a, b, c = (worker.add([token], endless(2))[0] for token in (2, 3, 4))
    worker.abort(b, SequenceId(999))
    assert_all_finished(worker, a, c)
    assert worker.accounts[b].num_outputs == 0


@pytest.mark.parametrize("prompt_length", [3, 20], ids=["at its last token", "within its prompt"])
def test_abort_while_the_step_is_in_flight(prompt_length: int) -> None:
    worker = worker_with()
    (a,) = worker.add([2] * prompt_length, endless())
    (b,) = worker.add([3], endless(3))
    step = worker.schedule()
    worker.abort(a)
    assert worker.cache.num_used > 0, "the step still writes there"
    worker.finish(step)
    assert worker.accounts[a].num_outputs == 0
    assert worker.cache.num_used <= 1
    assert_all_finished(worker, b)


def test_abort_of_a_stream_in_flight_and_its_blocks_are_free_right_after() -> None:
    worker = worker_with()
    (a,) = worker.add([2] * 5, endless(20))
    worker.step()
    step = worker.schedule()
    worker.abort(a)
    worker.abort(a)
    worker.finish(step)
    assert worker.cache.num_used == 0
    assert worker.accounts[a].num_outputs == 1


def test_abort_of_a_preempted_sequence() -> None:
    for order in ORDERS:
        worker = worker_with(order=order)
        a, b = (worker.add([token] * 5, endless(6))[0] for token in (2, 3))
        worker.step()
        preempt_with_room_for_one(worker)
        assert worker.running == [a]
        worker.abort(b)
        worker.cache.release(worker.hostages)
        assert_all_finished(worker, a)


def test_an_id_may_be_used_again_after_its_end() -> None:
    worker = worker_with()
    (a,) = worker.add([2] * 5, endless(20), deadline_s=10.0)
    worker.step()
    worker.abort(a)
    worker._next_id = a
    (again,) = worker.add([3] * 5, endless(2))
    assert again == a
    assert_all_finished(worker, again)


# --- siblings ---


@pytest.mark.parametrize("length", [4, 6, 8, 11])
def test_a_fork_copies_no_full_block(length: int) -> None:
    worker = worker_with(batching=Continuous(token_budget=16, max_sequences=8))
    ids = worker.add([2] * length, endless(3), n=5)
    worker.step()
    tables = [worker.sequences[id_].block_table for id_ in ids]
    assert all(table == tables[0] for table in tables)
    assert worker.cache.num_used == -(-length // 4)
    assert_all_finished(worker, *ids)
    stats = worker.manager.stats()
    assert stats.copied_blocks_total == (4 if length % 4 else 0)
    assert stats.computed_tokens_total == length + 5 * 2
    assert len({tuple(worker.accounts[id_].tokens) for id_ in ids}) > 1, "each has a seed of its own"


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
@pytest.mark.parametrize("n", [2, 4, 30])
def test_a_large_family_makes_nobody_wait_for_streams_to_end(n: int, order: Order) -> None:
    """Whatever its size, it begins as soon as one place is free, and so do those behind it."""
    worker = worker_with(order=order)
    streams = [worker.add([token] * 3, endless(40), tenant="a")[0] for token in (2, 3)]
    worker.step()
    family = worker.add([4] * 3, endless(2), n=n, tenant="b")
    (after,) = worker.add([5] * 3, endless(2), tenant="c")
    worker.step()
    assert {*streams, *family[:2]} == set(worker.running), "it takes the places there are"
    while not all(worker.accounts[id_].is_closed for id_ in (*family, after)):
        worker.step()
        assert not any(worker.accounts[id_].is_closed for id_ in streams)
    assert_all_finished(worker, *streams, *family, after)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_siblings_without_a_place_wait_in_the_order_of_the_queue(order: Order) -> None:
    worker = worker_with(order=order)
    family = worker.add([4] * 3, endless(2), n=40, tenant="b")
    worker.step()
    (after,) = worker.add([5] * 3, endless(2), tenant="c")
    worker.drain()
    ends = list(worker.ends)
    assert_all_finished(worker, *family, after)
    if isinstance(order, FairShare):
        assert ends.index(after) < len(family) // 4, "a tenant with one request does not wait for all of them"
    else:
        assert ends.index(after) >= len(family) - 4, "first come, first served"


def test_a_large_family_asks_for_memory_only_for_those_that_can_run() -> None:
    worker = worker_with(num_blocks=12)
    (a,) = worker.add([2] * 3, endless(20))
    worker.step()
    family = worker.add([3] * 3, endless(2), n=30)
    worker.step()
    assert len(worker.running) == 4
    assert worker.running[0] == a
    assert_all_finished(worker, a, *family)


def test_places_are_kept_for_siblings_that_are_not_forked_yet() -> None:
    worker = worker_with()
    family = worker.add([3] * 30, endless(4), n=3)
    others = [worker.add([token] * 3, endless(9))[0] for token in (4, 5)]
    worker.step()
    worker.step()
    worker.step()
    assert worker.running == [*family, others[0]]
    assert_all_finished(worker, *family, *others)


@pytest.mark.parametrize(
    "batching", [Continuous(token_budget=16, max_sequences=3), Static(size=2), OneAtATime()]
)
def test_a_family_larger_than_any_batch_is_served_all_the_same(batching: Batching) -> None:
    worker = worker_with(batching=batching)
    family = worker.add([3] * 9, endless(4), n=7)
    (after,) = worker.add([4] * 3, endless(2))
    assert_all_finished(worker, *family, after)
    stats = worker.manager.stats()
    assert stats.forks_total == 6
    assert stats.preemptions_total == 0
    assert stats.prefix_hit_tokens_total >= 8 * (7 - batching.max_sequences)


@pytest.mark.parametrize("when", ["waiting", "between chunks", "in flight", "at the fork", "preempted"])
def test_siblings_outlive_their_leader(when: str) -> None:
    worker = worker_with(order=PriorityWithAgeing())
    leader, *siblings = worker.add([2] * 20, endless(5, prompt_logprobs=1), n=3)
    (other,) = worker.add([3] * 20, endless(5), priority=-1 if when == "preempted" else 1)
    if when == "waiting":
        worker.abort(leader)
    elif when == "between chunks":
        worker.step()
        worker.abort(leader)
    elif when == "preempted":
        worker.step()
        preempt_with_room_for_one(worker)
        assert worker.running == [other]
        worker.abort(leader)
        worker.cache.release(worker.hostages)
    else:
        if when == "at the fork":
            worker.step()
        step = worker.schedule()
        worker.abort(leader)
        worker.finish(step)
    assert_all_finished(worker, *siblings, other)
    assert worker.accounts[leader].num_outputs == 0
    assert worker.accounts[siblings[0]].prompt_logprobs == worker.expected(siblings[0]).prompt_logprobs
    assert worker.manager.stats().forks_total == 1


def test_two_leaders_in_a_row_leave_in_flight() -> None:
    worker = worker_with()
    first, second, third = worker.add([2] * 20, endless(5, prompt_logprobs=1), n=3)
    step = worker.schedule()
    worker.abort(first)
    worker.abort(second)
    worker.finish(step)
    assert_all_finished(worker, third)
    assert worker.accounts[third].prompt_logprobs == worker.expected(third).prompt_logprobs


def test_a_whole_family_leaves_in_flight() -> None:
    worker = worker_with()
    family = worker.add([2] * 5, endless(5), n=3)
    step = worker.schedule()
    worker.abort(*family)
    worker.finish(step)
    assert worker.cache.num_used == 0
    assert not worker.manager.has_work


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_sibling_that_leaves_before_the_fork_is_not_forked(in_flight: bool) -> None:
    worker = worker_with()
    leader, gone, other = worker.add([2] * 10, endless(3), n=3)
    if in_flight:
        step = worker.schedule()
        worker.abort(gone)
        worker.finish(step)
    else:
        worker.abort(gone)
    assert_all_finished(worker, leader, other)
    assert worker.manager.stats().forks_total == 1
    assert worker.accounts[gone].num_outputs == 0


def test_a_leader_that_ends_with_its_first_token_leaves_the_blocks_to_its_siblings() -> None:
    worker = worker_with()
    num_first_only = 0
    for seed in range(60):
        family = worker.add([2, 3, 4, 5, 6], params(4, seed=seed), n=3)
        worker.drain()
        lengths = [len(worker.accounts[id_].tokens) for id_ in family]
        num_first_only += lengths[0] == 1 < lengths[1]
    worker.check_accounts()
    assert num_first_only > 0


def test_a_familys_deadline_ends_all_of_it() -> None:
    now = 0.0
    worker = SimulatedWorker(WorkloadConfig(max_context=64), clock=lambda: now)
    family = worker.add([2] * 5, endless(9), n=3, deadline_s=1.0)
    waiting = worker.add([2] * 5, endless(9), n=2, deadline_s=1.0)
    worker.step()
    now = 1.0
    worker.drain()
    assert {worker.accounts[id_].failure.code for id_ in family + waiting} == {"deadline_exceeded"}  # type: ignore[union-attr]
