"""What is spent outside the kernels: bookkeeping per step, opening packed weights, starting a worker.

python bench/overheads.py
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from enginehouse.engine import EngineConfig, LLMEngine, SamplingParams, TokenEvent
from enginehouse.engine.kv_cache import KVCache
from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.model_runner import Chunk, build_batch
from enginehouse.engine.sequence import SampledToken
from enginehouse.engine.workload_manager import WorkloadConfig, WorkloadManager
from enginehouse.runtime.packed import open_packed
from enginehouse.runtime.weights import prepare_model


def bookkeeping_s(num_streams: int) -> float:
    """Median seconds of `schedule` and `complete` for a step that decodes `num_streams` sequences."""
    manager = WorkloadManager(WorkloadConfig(max_context=2048), KVCache(1024))
    for i in range(num_streams):
        params = SamplingParams(max_tokens=300)
        manager.add(AddSequence(sequence_id=SequenceId(i), prompt_tokens=[i] * 8, params=params))
    times = []
    while manager.has_work:
        begin = time.perf_counter()
        step = manager.schedule()
        manager.complete(step, [SampledToken(5)] * len(step.sample_rows))
        if len(step.items) == num_streams:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def median_s(action: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of `action`, after one call that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def engine_start_s() -> tuple[float, float, float]:
    """Seconds from `LLMEngine.start` to ready, the worker's own load, and the first token of a short prompt."""
    begin = time.perf_counter()
    engine = await LLMEngine.start(EngineConfig())
    ready_s = time.perf_counter() - begin
    try:
        begin = time.perf_counter()
        async for event in engine.generate("Hello", SamplingParams(max_tokens=1)):
            if isinstance(event, TokenEvent):
                break
        return ready_s, engine.info.load_s, time.perf_counter() - begin
    finally:
        await engine.close()


def main() -> None:
    """Measure and print."""
    table = Table("what", "ms")
    path = prepare_model("smollm2", "int8").path
    for num_streams in (1, 8, 32):
        table.add_row(
            f"schedule + complete, {num_streams} streams", f"{bookkeeping_s(num_streams) * 1e3:.3f}"
        )
        chunks = [Chunk(tokens=[5], start=100, block_table=range(4)) for _ in range(num_streams)]
        table.add_row(
            f"build_batch, {num_streams} streams", f"{median_s(lambda c=chunks: build_batch(c)) * 1e3:.3f}"
        )
    table.add_row(
        "prepare_model, already packed", f"{median_s(lambda: prepare_model('smollm2', 'int8')) * 1e3:.1f}"
    )
    table.add_row("open_packed, every byte verified", f"{median_s(lambda: open_packed(path)) * 1e3:.1f}")
    starts = [asyncio.run(engine_start_s()) for _ in range(5)]
    names = ("LLMEngine.start to ready", "of that, the worker's load", "first token of a short prompt")
    for name, column in zip(names, zip(*starts, strict=True), strict=True):
        table.add_row(name, f"{statistics.median(column) * 1e3:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
