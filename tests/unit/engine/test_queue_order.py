from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine import queue_order
from enginehouse.engine.deadlines import DeadlineQueue
from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.queue_order import FairQueue, FairShare, Fifo, Order, PriorityWithAgeing
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import Sequence, SequenceState


def make(
    number: int, order: Order, *, tenant: str = "", priority: int = 0, arrival_s: float = 0.0
) -> Sequence:
    message = AddSequence(
        sequence_id=SequenceId(number),
        prompt_tokens=[1],
        params=SamplingParams(),
        tenant=tenant,
        priority=priority,
    )
    sequence = Sequence.from_message(message, arrival_s)
    sequence.rank = order.rank(sequence, number)
    return sequence


def drained(queue: queue_order.WaitingQueue) -> list[int]:
    order = []
    while queue:
        assert queue.peek() is not None
        order.append(int(queue.pop().sequence_id))
    return order


ALL = [Fifo(), PriorityWithAgeing(), FairShare()]


@pytest.mark.parametrize("order", ALL, ids=lambda order: type(order).__name__)
def test_any_queue_gives_everything_once_and_forgets_what_is_removed(order: Order) -> None:
    queue = order.new_queue()
    sequences = [make(i, order, tenant=str(i % 3)) for i in range(300)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences[::2]:
        queue.remove(sequence)
    preempted = queue.pop()
    queue.requeue(preempted)
    assert queue.peek() is preempted
    assert len(queue) == 150
    assert {int(s.sequence_id) for s in queue} == set(range(1, 300, 2))
    assert sorted(drained(queue)) == list(range(1, 300, 2))
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.parametrize("order", ALL, ids=lambda order: type(order).__name__)
def test_a_preempted_sequence_can_be_removed(order: Order) -> None:
    queue = order.new_queue()
    a, b = make(1, order), make(2, order)
    queue.push(a)
    queue.push(b)
    queue.requeue(queue.pop())
    queue.remove(a)
    assert drained(queue) == [2]


def test_first_come_first_served_whatever_the_priority() -> None:
    queue = Fifo().new_queue()
    for number, priority in ((3, 0), (1, 9), (2, -9)):
        queue.push(make(number, Fifo(), priority=priority))
    assert drained(queue) == [1, 2, 3]


def test_priority_goes_first_until_waiting_made_up_for_it() -> None:
    order = PriorityWithAgeing(ageing_s=10.0)
    queue = order.new_queue()
    queue.push(make(1, order, priority=1, arrival_s=0.0))
    queue.push(make(2, order, priority=0, arrival_s=9.0))
    queue.push(make(3, order, priority=0, arrival_s=11.0))
    assert drained(queue) == [2, 1, 3]


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 100)), min_size=2, max_size=2),
    st.integers(100, 1000),
)
def test_the_order_by_age_and_priority_never_changes(wishes: list[tuple[int, int]], now: int) -> None:
    """The docstring's claim: comparing `priority - age / ageing_s` gives the same answer at any time."""
    order = PriorityWithAgeing(ageing_s=4.0)
    first, second = (make(i, order, priority=p, arrival_s=float(a)) for i, (p, a) in enumerate(wishes))
    standing = [s.priority - (now - s.arrival_s) / 4.0 for s in (first, second)]
    if standing[0] != standing[1]:
        assert (first.rank < second.rank) == (standing[0] < standing[1])


def test_the_tenant_served_least_goes_first() -> None:
    order, queue = FairShare(), FairQueue()
    for number in range(1, 5):
        queue.push(make(number, order, tenant="a"))
    for number in range(5, 8):
        queue.push(make(number, order, tenant="b"))
    taken = []
    for cost in (10, 3, 3, 3, 3, 1, 1):
        sequence = queue.pop()
        queue.charge(sequence.tenant, cost)
        taken.append(int(sequence.sequence_id))
    assert taken == [1, 5, 6, 7, 2, 3, 4]


def test_a_pause_saves_nothing_up() -> None:
    order, queue = FairShare(), FairQueue()
    queue.push(make(1, order, tenant="a"))
    queue.pop()
    queue.charge("a", 1000)
    queue.push(make(2, order, tenant="a"))
    queue.pop()
    for number in (3, 4, 5):
        queue.push(make(number, order, tenant="a"))
    for number in (6, 7, 8):
        queue.push(make(number, order, tenant="newcomer"))
    taken = []
    while queue:
        sequence = queue.pop()
        queue.charge(sequence.tenant, 10)
        taken.append(sequence.tenant)
    assert taken == ["a", "newcomer"] * 3


def test_preempted_sequences_go_before_all_tenants() -> None:
    order, queue = FairShare(), FairQueue()
    a, b = make(1, order, tenant="a"), make(2, order, tenant="b")
    queue.push(a)
    queue.charge("a", 1000)
    assert queue.pop() is a
    queue.push(b)
    queue.requeue(a)
    assert drained(queue) == [1, 2]


def test_accounts_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_order, "MAX_TENANTS", 10)
    order, queue = FairShare(), FairQueue()
    queue.push(make(0, order, tenant="waits"))
    queue.charge("waits", 7)
    for number in range(100):
        queue.charge(f"tenant {number}", number)
        assert len(queue._served) <= 10
    assert queue._served["waits"] == 7
    assert queue._served["tenant 99"] == 99


def test_ageing_must_be_positive() -> None:
    with pytest.raises(ValueError, match="ageing_s"):
        PriorityWithAgeing(ageing_s=0.0)


def test_deadlines_come_in_order_and_do_not_pile_up() -> None:
    queue = DeadlineQueue()
    late, soon = make(1, Fifo()), make(2, Fifo())
    queue.watch(late, 5.0)
    queue.watch(soon, 3.0)
    assert list(queue.pop_due(2.9)) == []
    assert list(queue.pop_due(5.0)) == [soon, late]
    for number in range(10_000):
        sequence = make(number, Fifo())
        queue.watch(sequence, 100.0)
        sequence.state = SequenceState.FINISHED
        assert len(queue) <= 70
