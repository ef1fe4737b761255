"""Engines with real worker processes, on a tiny random model and on the default one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from enginehouse.engine import BatchingConfig, EngineConfig, LLMEngine
from enginehouse.engine.engine_config import DEFAULT_SOURCE
from enginehouse.runtime.quantization import Precision
from enginehouse.runtime.sources import ignore_progress
from enginehouse.runtime.weights.checkpoint import open_checkpoint
from enginehouse.runtime.weights.packer import pack
from tests.support.tiny_models import write_tiny_llama
from tests.worker.driving import idle, own_workers

StartEngine = Callable[..., Awaitable[LLMEngine]]


def pack_tiny(directory: Path, precision: Precision) -> Path:
    source = write_tiny_llama(directory / "source")
    packed = directory / f"packed-{precision}"
    packed.mkdir()
    checkpoint = open_checkpoint(source)
    try:
        pack(checkpoint, packed, precision, source=str(source), progress=ignore_progress)
    finally:
        checkpoint.close()
    return packed


@pytest.fixture(scope="session")
def tiny_int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_tiny(tmp_path_factory.mktemp("tiny"), "int8")


@pytest.fixture(scope="session")
def tiny_fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_tiny(tmp_path_factory.mktemp("tiny"), "fp32")


def engine_config(source: Path | str, **changes: Any) -> EngineConfig:
    """A small engine whose cache is checked whenever it rests; BatchingConfig's fields may be given directly."""
    batching = {name: changes.pop(name) for name in BatchingConfig.__struct_fields__ if name in changes}
    if source == DEFAULT_SOURCE:
        changes.setdefault("max_context", 2048)
    return EngineConfig(
        source=str(source),
        model_id="tiny",
        check_integrity=True,
        batching=BatchingConfig(**batching),
        **{"num_threads": 1, **changes},
    )


@pytest.fixture
async def start_engine(tiny_int8: Path) -> AsyncIterator[StartEngine]:
    """Start engines with `engine_config`'s arguments. At the end each must be alive, idle and whole, and leave no
    process behind."""
    engines: list[LLMEngine] = []

    async def start(source: Path | str = tiny_int8, **changes: Any) -> LLMEngine:
        engines.append(await LLMEngine.start(engine_config(source, **changes)))
        return engines[-1]

    yield start
    for engine in engines:
        if engine.health().state == "ready":
            restarts = engine.health().restarts_total
            await idle(engine)
            await asyncio.sleep(0.05)  # the check of the cache follows the last report
            assert engine.health().restarts_total == restarts
            assert engine.health().state == "ready", engine.health().detail
        await engine.close()
    assert own_workers() == []
