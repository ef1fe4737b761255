from __future__ import annotations

import pytest

from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.sampling_params import SEED_MAX, SEED_MIN, SamplingParams
from enginehouse.engine.sequence import Finish, Sequence, check_finish, sibling_params

EOS, STOP, OTHER = 0, 1, 5


def make(output: list[int], prompt: list[int] | None = None, **fields: object) -> Sequence:
    fields = {"max_tokens": 4, "eos_token_ids": (EOS,), "stop_token_ids": (STOP,), **fields}
    message = AddSequence(
        sequence_id=SequenceId(1),
        prompt_tokens=prompt or [7, 8, 9],
        output_tokens=output,
        params=SamplingParams(**fields),  # type: ignore[arg-type]
    )
    return Sequence.from_message(message, arrival_s=0.0)


@pytest.mark.parametrize(
    ("output", "fields", "expected"),
    [
        ([], {}, None),
        ([OTHER], {}, None),
        ([OTHER, EOS], {}, Finish("stop", EOS)),
        ([OTHER, STOP], {}, Finish("stop", STOP)),
        ([OTHER, EOS], {"ignore_eos": True}, None),
        ([OTHER, STOP], {"ignore_eos": True}, Finish("stop", STOP)),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, Finish("stop", EOS)),
        ([EOS], {"min_tokens": 1}, None),
        ([OTHER, EOS], {"min_tokens": 1}, Finish("stop", EOS)),
        ([STOP, OTHER], {"min_tokens": 1}, None),
        ([OTHER] * 4, {}, Finish("length")),
        ([OTHER] * 4, {"min_tokens": 4}, Finish("length")),
        ([OTHER] * 3 + [EOS], {}, Finish("stop", EOS)),
        ([], {"max_tokens": 0}, Finish("length")),
        ([EOS, OTHER], {}, None),
    ],
)
def test_finish_rules(output: list[int], fields: dict[str, object], expected: Finish | None) -> None:
    assert check_finish(make(output, **fields), max_known=100) == expected


def test_output_ends_with_the_context() -> None:
    assert check_finish(make([OTHER], prompt=[7] * 8), max_known=10) is None
    assert check_finish(make([OTHER, OTHER], prompt=[7] * 8), max_known=10) == Finish("length")
    assert check_finish(make([OTHER, EOS], prompt=[7] * 8), max_known=10) == Finish("stop", EOS)


def test_end_tokens_are_offered_from_min_tokens_on() -> None:
    assert not make([OTHER], min_tokens=2).can_stop
    assert make([OTHER, OTHER], min_tokens=2).can_stop
    assert make([]).can_stop


def test_tokens_known_grow_with_output() -> None:
    sequence = make([4])
    sequence.num_computed = 4
    sequence.append(6)
    assert sequence.tokens == [7, 8, 9, 4, 6]
    assert (sequence.num_known, sequence.num_output, sequence.num_remaining) == (5, 2, 1)
    assert sequence.prompt_tokens == [7, 8, 9]


def test_messages_lists_are_not_shared_with_the_sequence() -> None:
    message = AddSequence(
        sequence_id=SequenceId(1),
        sibling_ids=[SequenceId(2)],
        prompt_tokens=[1, 2],
        output_tokens=[3],
        params=SamplingParams(),
    )
    leader = Sequence.from_message(message, 0.0)
    leader.append(9)
    assert (message.prompt_tokens, message.output_tokens) == ([1, 2], [3])
    assert leader.siblings[0].tokens == [1, 2, 3]


def test_siblings_have_their_own_seeds() -> None:
    params = SamplingParams(seed=SEED_MAX, top_k=3)
    assert sibling_params(params, 0) is params
    assert sibling_params(params, 1) == SamplingParams(seed=SEED_MIN, top_k=3)
    assert sibling_params(SamplingParams(seed=None), 5).seed is None
    assert len({sibling_params(SamplingParams(seed=3), i).seed for i in range(50)}) == 50


@pytest.mark.parametrize(
    ("budget", "rows", "computed", "known_logprobs", "expected"),
    [
        (100, 100, 0, 1, 10),
        (4, 100, 0, 1, 4),
        (100, 3, 0, 1, 3),
        (100, 9, 0, 1, 10),
        (100, 0, 0, 1, 0),
        (100, 2, 0, 5, 6),
        (100, 2, 4, 5, 2),
        (100, 0, 9, 10, 1),
    ],
)
def test_chunks_respect_tokens_and_logit_rows(
    budget: int, rows: int, computed: int, known_logprobs: int, expected: int
) -> None:
    sequence = make([], prompt=[7] * 10, prompt_logprobs=0)
    sequence.prompt_logprobs = [None] * known_logprobs
    sequence.num_computed = computed
    assert sequence.largest_chunk(budget, rows) == expected


def test_the_first_sibling_inherits() -> None:
    ids = [SequenceId(i) for i in range(4)]
    leader = Sequence.from_message(
        AddSequence(sequence_id=ids[0], sibling_ids=ids[1:], prompt_tokens=[1, 2], params=SamplingParams()),
        0.0,
    )
    leader.num_computed, leader.block_table = 2, [5]
    heir = leader.inherit()
    assert (heir.sequence_id, heir.num_computed, heir.block_table) == (ids[1], 2, [5])
    assert [(s.sequence_id, s.leader) for s in heir.siblings] == [(ids[2], heir), (ids[3], heir)]
    assert heir.inherit() is leader.survivor
    assert leader.survivor.sequence_id == ids[2]
