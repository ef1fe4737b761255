"""The worker's loop, step by step in this process: what each command does, and faults that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.engine import SamplingParams
from enginehouse.engine.engine_loading import load_model, plan_worker
from enginehouse.engine.messages import (
    AbortSequences,
    AddSequence,
    Command,
    Heartbeat,
    Preempt,
    Report,
    SequenceFailed,
    SequenceId,
    Shutdown,
    StepReport,
)
from enginehouse.engine.sampler import Sampler
from enginehouse.engine.worker import ModelWorker
from tests.worker.conftest import engine_config

Script = Callable[[list[StepReport]], Iterable[Command]]


class ScriptedChannel:
    """Stands in for the socket: before each round of the loop, `script` says what has arrived by then."""

    def __init__(self) -> None:
        self.script: Script = lambda _steps: [Shutdown()]
        self.reports: list[Report] = []
        self.timeouts_s: list[float] = []

    def take(self, timeout_s: float) -> list[Command]:
        self.timeouts_s.append(timeout_s)
        return list(self.script(self.steps))

    def emit(self, report: Report) -> None:
        self.reports.append(report)

    def note_progress(self) -> None:
        pass

    def wake(self) -> None:
        pass

    @property
    def steps(self) -> list[StepReport]:
        return [report for report in self.reports if isinstance(report, StepReport)]


class Bench:
    """A worker and its scripted channel."""

    def __init__(self, packed: Path, **changes: Any) -> None:
        config = engine_config(packed, **changes)
        self.channel = ScriptedChannel()
        self.worker = ModelWorker(plan_worker(config, load_model(config, None)), self.channel)  # type: ignore[arg-type]

    def run(self, commands_by_step: dict[int, list[Command]], max_steps: int = 400) -> list[StepReport]:
        """Run with commands that arrive after so many steps, until there is nothing to do."""
        self.channel.reports.clear()
        pending = dict(commands_by_step)

        def script(steps: list[StepReport]) -> list[Command]:
            assert len(steps) < max_steps, "the loop does not come to an end"
            if len(steps) in pending:
                return pending.pop(len(steps))
            idle = not pending and self.channel.reports and isinstance(self.channel.reports[-1], Heartbeat)
            return [Shutdown()] if idle else []

        self.channel.script = script
        self.worker.run()
        return self.channel.steps


def add(number: int, prompt: list[int] | int = 20, **fields: Any) -> AddSequence:
    tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    siblings = [SequenceId(i) for i in fields.pop("siblings", [])]
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "seed": 1, **fields})
    return AddSequence(
        sequence_id=SequenceId(number), prompt_tokens=tokens, params=params, sibling_ids=siblings
    )


def tokens_of(steps: list[StepReport]) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for step in steps:
        for output in step.outputs:
            result.setdefault(output.sequence_id, []).extend(output.tokens)
    return result


def failures_of(steps: list[StepReport]) -> dict[int, SequenceFailed]:
    return {failure.sequence_id: failure for step in steps for failure in step.failed}


@pytest.fixture
def bench(tiny_int8: Path) -> Bench:
    return Bench(tiny_int8, prefix_cache=False, max_sequences=16)


def test_blocks_of_an_aborted_sequence_are_free_before_the_next_step_but_one(bench: Bench) -> None:
    steps = bench.run(
        {0: [add(1), add(2)], 4: [AbortSequences(sequence_ids=[SequenceId(1), SequenceId(99)])]}
    )
    used = [step.stats.blocks_used for step in steps]
    assert used[3] == 2
    assert used[4] == 1
    assert used[-1] == 0
    tokens = tokens_of(steps)
    assert (len(tokens[1]), len(tokens[2])) == (4, 12)


def test_abort_between_chunks_of_a_prompt(tiny_int8: Path) -> None:
    bench = Bench(tiny_int8, prefix_cache=False, token_budget=7, max_sequences=4)
    steps = bench.run({0: [add(1, 200), add(2, 3)], 5: [AbortSequences(sequence_ids=[SequenceId(1)])]})
    assert 1 not in tokens_of(steps)
    assert len(tokens_of(steps)[2]) == 12
    assert steps[4].stats.blocks_used > 2
    assert steps[6].stats.blocks_used <= 1
    assert steps[-1].stats.computed_tokens_total < 100


def test_abort_of_a_sequence_that_waits(tiny_int8: Path) -> None:
    bench = Bench(tiny_int8, prefix_cache=False, max_sequences=1)
    steps = bench.run({0: [add(1), add(2)], 3: [AbortSequences(sequence_ids=[SequenceId(2)])]})
    assert [step.stats.num_waiting for step in steps[1:4]] == [1, 1, 0]
    assert tokens_of(steps).keys() == {1}


def test_a_resumed_sequence_continues_with_the_same_tokens(bench: Bench) -> None:
    request = add(1, temperature=1.0, seed=5, max_tokens=20)
    whole = tokens_of(bench.run({0: [request]}))[1]
    for known in (1, 7, 19):
        resumed = AddSequence(
            sequence_id=request.sequence_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=whole[:known],
            params=request.params,
        )
        assert tokens_of(bench.run({0: [resumed]}))[1] == whole[known:]


def test_preempt_recomputes_and_changes_nothing(bench: Bench) -> None:
    plain = tokens_of(bench.run({0: [add(1), add(2, 50)]}))
    disturbed = bench.run({0: [add(1), add(2, 50)], 3: [Preempt()], 6: [Preempt()]})
    assert tokens_of(disturbed) == plain
    assert disturbed[-1].stats.preemptions_total == 4


def test_the_loop_waits_only_when_there_is_nothing_to_do(bench: Bench) -> None:
    bench.run({0: [add(1)]})
    waits = bench.channel.timeouts_s
    assert waits[0] > 0
    assert waits.count(0.0) == 12  # one look after each step
    assert isinstance(bench.channel.reports[-1], Heartbeat)


def poison(bench: Bench, is_poisoned: Callable[[int], bool]) -> None:
    """Make the model give NaN for the logit rows of sequences whose first prompt token is_poisoned."""
    runner, run = bench.worker._runner, bench.worker._runner.run
    workload = bench.worker._workload

    def poisoned_run(batch: Any) -> Any:
        logits = run(batch)
        step = workload._step
        assert step is not None
        for row in (*step.sample_rows, *step.prompt_rows):
            if is_poisoned(row.sequence.prompt_tokens[0]):
                logits[row.logit, 7] = np.nan
        return logits

    runner.run = poisoned_run  # type: ignore[method-assign]


def fifteen_and(special: AddSequence) -> list[Command]:
    return [special, *(add(i, [20 + i, 5, 6], temperature=i % 2, seed=i) for i in range(2, 17))]


def test_nan_logits_fail_their_sequence_and_the_other_fifteen_finish(bench: Bench) -> None:
    expected = tokens_of(bench.run({0: fifteen_and(add(1, [4, 5]))}))
    poison(bench, lambda first: first == 4)
    steps = bench.run({0: fifteen_and(add(1, [4, 5]))})
    assert failures_of(steps).keys() == {1}
    assert "not a number" in failures_of(steps)[1].message
    assert failures_of(steps)[1].code == "sequence_failed"
    del expected[1]
    assert tokens_of(steps) == expected
    assert steps[-1].stats.blocks_used == 0


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_nan_in_prompt_logprobs_fails_once_and_alone(bench: Bench, max_tokens: int) -> None:
    poison(bench, lambda first: first == 4)
    bad = add(1, [4, *range(5, 105)], prompt_logprobs=1, max_tokens=max_tokens)
    steps = bench.run({0: fifteen_and(bad)})
    assert [f.sequence_id for step in steps for f in step.failed] == [1]
    tokens = tokens_of(steps)
    assert 1 not in tokens
    assert all(len(tokens[i]) == 12 for i in range(2, 17))


def test_a_mistake_in_the_sampler_fails_its_sequence_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Sampler._draw

    def broken_draw(self: Sampler, params: SamplingParams, *rest: Any) -> int:
        if params.top_k == 13:
            raise ValueError("on purpose")
        return draw(self, params, *rest)

    monkeypatch.setattr(Sampler, "_draw", broken_draw)
    steps = bench.run({0: fifteen_and(add(1, [4], temperature=1.0, top_k=13))})
    assert failures_of(steps).keys() == {1}
    assert "on purpose" in failures_of(steps)[1].message
    assert all(len(tokens_of(steps)[i]) == 12 for i in range(2, 17))


def test_all_choices_of_a_family_with_nan_fail(bench: Bench) -> None:
    poison(bench, lambda first: first == 4)
    steps = bench.run({0: [add(1, [4, 5], siblings=[2, 3]), add(9, [6])]})
    assert failures_of(steps).keys() == {1, 2, 3}
    assert len(tokens_of(steps)[9]) == 12


def test_the_books_are_checked_when_the_worker_rests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check = bench.worker._workload.check_integrity
    monkeypatch.setattr(
        bench.worker._workload, "check_integrity", lambda: checks.append(len(bench.channel.steps)) or check()
    )
    bench.run({0: [add(1)]})
    assert checks == [12]
