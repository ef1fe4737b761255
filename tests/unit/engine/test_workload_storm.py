"""A dense random workload under every strategy and order: shared prefixes, forks, little memory, rude clients."""

from __future__ import annotations

import random

import pytest

from enginehouse.engine.batching import Batching, Continuous, OneAtATime, Static
from enginehouse.engine.queue_order import FairShare, Fifo, Order, PriorityWithAgeing
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.workload_manager import WorkloadConfig

from .simulated_worker import SimulatedWorker, params

NUM_REQUESTS = 80


def random_params(rng: random.Random) -> SamplingParams:
    return params(
        rng.choice([1, 2, 8, 16, 24]),
        seed=rng.randrange(3),
        ignore_eos=rng.random() < 0.6,
        stop_token_ids=(),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=1 if rng.random() < 0.1 else None,
        presence_penalty=2.0 if rng.random() < 0.05 else 0.0,
    )


def random_prompt(rng: random.Random) -> list[int]:
    head = rng.choice([[2, 3, 4], [5, 6], [7]]) * 10
    return head[: rng.randrange(22)] + [rng.randrange(12) for _ in range(rng.randint(1, 4))]


def storm(worker: SimulatedWorker, rng: random.Random) -> None:
    num_added = 0
    while num_added < NUM_REQUESTS or worker.manager.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            if num_added < NUM_REQUESTS:
                num_added += 1
                worker.add(
                    random_prompt(rng),
                    random_params(rng),
                    n=rng.choice([1, 1, 1, 2, 4, 7]),
                    tenant=rng.choice("abc"),
                    priority=rng.randint(-1, 1),
                )
        if rng.random() < 0.01:
            worker.manager.preempt_all()
        if rng.random() < 0.05:
            abort_one(worker, rng)
        step = worker.schedule()
        samples, prompt_logprobs = worker.model.run(step)
        if rng.random() < 0.05:
            abort_one(worker, rng)
        worker.complete(step, samples, prompt_logprobs)
        assert worker.num_steps < 20_000


def abort_one(worker: SimulatedWorker, rng: random.Random) -> None:
    if worker.sequences:
        worker.abort(rng.choice(sorted(worker.sequences)))


@pytest.mark.parametrize("order", [Fifo(), PriorityWithAgeing(), FairShare()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(
    "batching",
    [
        Continuous(token_budget=24, max_sequences=6, prefill_budget_while_decoding=7),
        Continuous(token_budget=6, max_sequences=6, prefill_budget_while_decoding=1),
        Static(size=4, token_budget=24),
        OneAtATime(token_budget=24),
    ],
    ids=lambda b: f"{type(b).__name__}-{b.token_budget}",
)
@pytest.mark.parametrize("seed", range(3))
def test_everyone_is_given_a_lone_runs_tokens(batching: Batching, order: Order, seed: int) -> None:
    rng = random.Random(f"{batching} {order} {seed}")
    config = WorkloadConfig(max_context=60, batching=batching, order=order, max_prompt_rows=4)
    worker = SimulatedWorker(config, num_blocks=24, block_size=4)
    storm(worker, rng)
    worker.drain()
    worker.check_accounts()
    for sequence_id, account in worker.accounts.items():
        assert account.is_closed
        if account.failure is not None:
            assert account.failure.code == "sequence_failed"
            assert worker.expected(sequence_id).finish_reason is None
    stats = worker.manager.stats()
    assert stats.prefix_hit_tokens_total > 0
    assert stats.forks_total > 0
    assert worker.cache.evictions_total > 0
    if batching.max_sequences > 1:
        assert stats.copied_blocks_total > 0
        assert stats.preemptions_total > 0
    assert any(account.aborted for account in worker.accounts.values())
