"""An encoder with its real worker: cancelling, dying, refusing, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from enginehouse.engine.encoder_config import EncoderEngineConfig
from enginehouse.engine.encoder_engine import EncoderEngine
from enginehouse.errors import (
    InvalidRequestError,
    ModelLoadFailedError,
    NoCapacityError,
    QueueFullError,
    SequenceFailedError,
    ShuttingDownError,
    UnsupportedModelError,
    WorkerDiedError,
)
from enginehouse.runtime.encoder_tokenizer import TokenizedInput
from tests.support.tiny_encoders import TEXTS, encoder_named, tensors, write_tiny_encoder
from tests.support.tiny_models import write_safetensors, write_tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(encoder_named("bert-mean-norm"), tmp_path_factory.mktemp("encoder"))


def config(source: Path, **changes: Any) -> EncoderEngineConfig:
    return EncoderEngineConfig(source=str(source), model_id="tiny", num_threads=1, **changes)


@pytest.fixture
async def engine(source: Path) -> AsyncIterator[EncoderEngine]:
    running = await EncoderEngine.start(config(source, token_budget=64, max_restarts=2))
    pid = running.worker_pid
    yield running
    await running.close()
    assert running.num_pending == 0
    assert pid is None or not psutil.pid_exists(pid)


def some(engine: EncoderEngine, repeats: int = 1) -> list[TokenizedInput]:
    return engine.tokenizer.encode(TEXTS * repeats)


async def stopped(engine: EncoderEngine) -> None:
    """The worker, at a halt before it can answer."""
    assert engine.worker_pid is not None
    os.kill(engine.worker_pid, signal.SIGSTOP)


async def test_order_and_batches(engine: EncoderEngine) -> None:
    lone = [(await engine.encode([item]))[0].vector for item in some(engine)]
    together = await asyncio.gather(*(engine.encode(some(engine, repeats)) for repeats in (1, 2, 5)))
    for repeats, results in zip((1, 2, 5), together, strict=True):
        assert [result.vector for result in results] == lone * repeats
    assert engine.stats.computed_tokens_total == 9 * sum(len(item.tokens) for item in some(engine))


async def test_what_a_leaving_caller_asked_for_is_dropped(engine: EncoderEngine) -> None:
    await engine.encode(some(engine))
    before = engine.stats.computed_tokens_total
    await stopped(engine)
    # Few enough for the socket to hold them all, and the message that takes them back.
    task = asyncio.create_task(engine.encode(some(engine, 20)))
    await asyncio.sleep(0)
    assert engine.num_pending == 20 * len(TEXTS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_pending == 0
    assert engine.worker_pid is not None
    os.kill(engine.worker_pid, signal.SIGCONT)
    await engine.encode(some(engine)[:1])
    assert engine.stats.computed_tokens_total - before < 10 * sum(len(item.tokens) for item in some(engine))


async def test_inputs_survive_their_worker(engine: EncoderEngine) -> None:
    expected = await engine.encode(some(engine))
    first = engine.worker_pid
    await stopped(engine)
    task = asyncio.create_task(engine.encode(some(engine)))
    await asyncio.sleep(0)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert [result.vector for result in await task] == [result.vector for result in expected]
    assert (engine.restarts_total, engine.worker_pid == first) == (1, False)


async def test_an_input_the_worker_cannot_take_ends_alone(engine: EncoderEngine) -> None:
    """A fault of ours: an id that no check stopped kills the worker twice, and then it is the input's fault."""
    with pytest.raises(WorkerDiedError):
        await engine.encode([TokenizedInput([100_000], [], 1)])
    for _ in range(200):
        if engine.state == "ready":
            break
        await asyncio.sleep(0.05)
    assert len(await engine.encode(some(engine))) == len(TEXTS)


async def test_a_full_queue_refuses_but_an_empty_one_takes_anything(source: Path) -> None:
    engine = await EncoderEngine.start(config(source, max_waiting=4))
    try:
        assert len(await engine.encode(some(engine, 2))) == 12
        await stopped(engine)
        task = asyncio.create_task(engine.encode(some(engine)[:3]))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 inputs are waiting"):
            await engine.encode(some(engine)[:2])
        other = asyncio.create_task(engine.encode(some(engine)[:1]))
        await asyncio.sleep(0)
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGCONT)
        assert (len(await task), len(await other)) == (3, 1)
    finally:
        await engine.close()


async def test_closing_answers_those_who_wait(source: Path) -> None:
    engine = await EncoderEngine.start(config(source))
    await stopped(engine)
    task = asyncio.create_task(engine.encode(some(engine)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(ShuttingDownError):
        await task
    with pytest.raises(ShuttingDownError):
        await engine.encode(some(engine))


async def test_values_that_are_no_numbers_fail_their_own_input(tmp_path: Path) -> None:
    encoder = encoder_named("bert-mean-norm")
    source = write_tiny_encoder(encoder, tmp_path)
    weights = tensors(encoder)
    weights["embeddings.word_embeddings.weight"][130] = np.nan
    write_safetensors(source / "model.safetensors", weights)
    engine = await EncoderEngine.start(config(source))
    try:
        good, bad = some(engine), TokenizedInput([2, 130, 3], [], 3)
        expected = await engine.encode(good)
        both = await asyncio.gather(engine.encode([bad]), engine.encode(good), return_exceptions=True)
        assert isinstance(both[0], SequenceFailedError)
        assert not isinstance(both[1], BaseException)
        assert [result.vector for result in both[1]] == [result.vector for result in expected]
    finally:
        await engine.close()


async def test_models_for_something_else_are_refused(source: Path, tmp_path: Path) -> None:
    cross = write_tiny_encoder(encoder_named("bert-cross"), tmp_path / "cross")
    llama = write_tiny_llama(tmp_path / "llama")
    for wrong, task, said in (
        (cross, "embed", "is a cross-encoder"),
        (source, "rerank", "has no classification head"),
        (llama, "embed", "is no encoder"),
    ):
        with pytest.raises(UnsupportedModelError, match=said):
            await EncoderEngine.start(config(wrong, task=task))
    with pytest.raises(InvalidRequestError, match="token_budget"):
        await EncoderEngine.start(config(source, token_budget=0))


async def test_an_encoder_is_not_served_as_a_model_that_generates(source: Path) -> None:
    from enginehouse.engine import EngineConfig, LLMEngine

    with pytest.raises(UnsupportedModelError, match=r"embedding\.source"):
        await LLMEngine.start(EngineConfig(source=str(source)))


async def test_a_worker_that_cannot_come_back_is_said_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEHOUSE_CACHE", str(tmp_path))
    engine = await EncoderEngine.start(config(source, max_restarts=0))
    try:
        await stopped(engine)
        task = asyncio.create_task(engine.encode(some(engine)))
        await asyncio.sleep(0)
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        with pytest.raises((WorkerDiedError, ModelLoadFailedError)):
            await task
        with pytest.raises(NoCapacityError, match="is dead"):
            await engine.encode(some(engine))
    finally:
        await engine.close()
