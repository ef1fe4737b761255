"""Which inputs are encoded together: first come, first served, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine.encoder_worker import InputQueue
from enginehouse.engine.messages import AbortSequences, AddInput, SequenceId

MAX_ROWS, MAX_INPUTS = 20, 4


def add(queue: InputQueue, number: int, length: int) -> None:
    queue.apply(AddInput(input_id=SequenceId(number), tokens=[1] * length))


@given(st.lists(st.integers(1, MAX_ROWS), max_size=40), st.sets(st.integers(0, 45)))
def test_everything_comes_once_in_order_and_batches_fit(lengths: list[int], taken_back: set[int]) -> None:
    queue = InputQueue(max_rows=MAX_ROWS, max_inputs=MAX_INPUTS)
    for number, length in enumerate(lengths):
        add(queue, number, length)
    queue.apply(AbortSequences(sequence_ids=[SequenceId(number) for number in taken_back]))
    left = [number for number in range(len(lengths)) if number not in taken_back]
    assert len(queue) == len(left)
    seen: list[int] = []
    while queue:
        batch = queue.next_batch()
        rows = sum(len(item.tokens) for item in batch)
        assert 1 <= len(batch) <= MAX_INPUTS
        assert rows <= MAX_ROWS
        seen += [item.input_id for item in batch]
        following = len(lengths) if len(seen) == len(left) else left[len(seen)]
        if following < len(lengths) and len(batch) < MAX_INPUTS:
            assert rows + lengths[following] > MAX_ROWS
    assert seen == left
    assert queue.next_batch() == []
