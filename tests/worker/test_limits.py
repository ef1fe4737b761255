"""Bounds: of the machine, of the queue, of a stream's backlog."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from enginehouse.engine import (
    BatchingConfig,
    EngineConfig,
    Event,
    Finished,
    RequestStream,
    Started,
    Timing,
    TokenEvent,
)
from enginehouse.engine.admission import Admission
from enginehouse.engine.engine_config import WorkerConfig
from enginehouse.engine.engine_loading import MAX_DEFAULT_KV_BYTES, load_model, plan_worker
from enginehouse.engine.machine_limits import available_cpus, available_memory_bytes
from enginehouse.engine.messages import SequenceId, TokenLogprob
from enginehouse.engine.request_stream import MAX_PENDING_EVENTS
from enginehouse.errors import InvalidRequestError, ModelError, QueueFullError, WorkerDiedError

# The machine ----------------------------------------------------------------------------------------------------


def cgroup(root: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "membership").write_text(membership)
    return root, root / "membership"


@pytest.mark.parametrize(
    ("files", "membership", "cpus"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", 64),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "20000 100000\n"}, "0::/\n", 1),
        ({"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 3),
        ({"a/b/cpu.max": "200000 100000\n", "cpu.max": "max 100000"}, "0::/a/b\n", 2),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 4),
        (
            {"cpu/pod/cpu.cfs_quota_us": "100000", "cpu/pod/cpu.cfs_period_us": "50000"},
            "4:cpu,cpuacct:/pod\n",
            2,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu:/\n", 64),
        ({}, "", 64),
    ],
)
def test_threads_follow_quota_and_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], membership: str, cpus: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    assert available_cpus(*cgroup(tmp_path, files, membership)) == cpus
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {5}, raising=False)
    assert available_cpus(*cgroup(tmp_path, files, membership)) == 1


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"memory.max": "1048576\n"}, "0::/\n", 1 << 20),
        ({"a/memory.max": "2097152\n", "a/b/memory.max": "max\n"}, "0::/a/b\n", 2 << 20),
        ({"memory/memory.limit_in_bytes": "3145728\n"}, "9:memory:/\n", 3 << 20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "9:memory:/\n", None),
    ],
)
def test_memory_follows_the_smallest_limit(
    tmp_path: Path, files: dict[str, str], membership: str, limit: int | None
) -> None:
    physical = available_memory_bytes(tmp_path / "none", tmp_path / "none")
    assert physical > 1 << 28
    assert available_memory_bytes(*cgroup(tmp_path, files, membership)) == (limit or physical)


def planned(
    source: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 1 << 40, **fields: object
) -> WorkerConfig:
    monkeypatch.setattr("enginehouse.engine.engine_loading.available_memory_bytes", lambda: memory_bytes)
    config = msgspec.structs.replace(EngineConfig(source=str(source)), **fields)
    return plan_worker(config, load_model(config, None))


def test_kv_memory_is_sized_by_need_within_caps(tiny_int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 32 * 2 * 2 * 2 * 16 * 2
    plan = planned(tiny_int8, monkeypatch)
    assert plan.num_blocks == 32 * 512 // 32, "32 sequences of 512 tokens"
    batching = BatchingConfig(max_sequences=512, token_budget=512)
    assert planned(tiny_int8, monkeypatch, batching=batching).num_blocks * block_bytes < MAX_DEFAULT_KV_BYTES
    assert planned(tiny_int8, monkeypatch, memory_bytes=400 * block_bytes).num_blocks == 100
    assert planned(tiny_int8, monkeypatch, kv_cache_bytes=7 * block_bytes + 5).num_blocks == 7
    assert planned(tiny_int8, monkeypatch, max_context=64).num_blocks == 64
    assert planned(tiny_int8, monkeypatch, kv_dtype="fp32", kv_cache_bytes=8 * block_bytes).num_blocks == 4
    with pytest.raises(ModelError, match="kv_cache_bytes"):
        planned(tiny_int8, monkeypatch, kv_cache_bytes=block_bytes - 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_threads": -1}, "num_threads"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_context": 0}, "max_context"),
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s"),
        ({"load_timeout_s": float("nan")}, "load_timeout_s"),
        ({"batching": BatchingConfig(token_budget=8, max_sequences=16)}, "batching"),
        ({"batching": BatchingConfig(strategy="static", static_size=0)}, "batching"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        msgspec.structs.replace(EngineConfig(), **fields).check()
    assert caught.value.param == param
    EngineConfig().check()


# The queue ------------------------------------------------------------------------------------------------------


def test_retry_after_follows_the_drain_rate() -> None:
    now_s = 1000.0
    admission = Admission(max_running=2, max_waiting=8, clock=lambda: now_s)
    admission.reserve(10)
    with pytest.raises(QueueFullError) as caught:
        admission.reserve(1)
    assert caught.value.retry_after_s == 15
    for _ in range(20):  # one every two seconds
        now_s += 2.0
        admission.release()
        admission.reserve(1)
    with pytest.raises(QueueFullError) as caught:
        admission.reserve(5)
    assert caught.value.retry_after_s == pytest.approx(10, abs=2)
    assert admission.retry_after_s(1000) == 120
    assert admission.num_unfinished == 10


def test_more_than_ever_fits_is_the_callers_mistake() -> None:
    admission = Admission(max_running=2, max_waiting=8, clock=lambda: 0.0)
    for num_unfinished in (0, 10):
        admission.reserve(num_unfinished)
        with pytest.raises(InvalidRequestError, match=r"11 sequences .* at most 10") as caught:
            admission.reserve(11)
        assert caught.value.param == "n"
    assert admission.num_unfinished == 10


@pytest.mark.parametrize("num_refused", [1, 7, 300])
def test_reservations_that_nothing_came_of_are_no_ends(num_refused: int) -> None:
    admission = Admission(max_running=2, max_waiting=8, clock=lambda: 0.0)
    unknown_s = admission.retry_after_s(5)
    for _ in range(num_refused):
        admission.reserve(2)
        admission.give_back(2)
    assert admission.num_unfinished == 0
    assert admission.retry_after_s(5) == unknown_s
    admission.reserve(1)
    admission.release()
    assert admission.retry_after_s(5) != unknown_s


# The backlog of a stream ----------------------------------------------------------------------------------------


def stream_of(n: int = 1) -> tuple[RequestStream, list[str]]:
    aborts: list[str] = []
    ids = [SequenceId(i + 1) for i in range(n)]
    stream = RequestStream(
        request_id="r", sequence_ids=ids, prompt_token_ids=[1], on_abort=lambda: aborts.append("abort")
    )
    return stream, aborts


def token(index: int, number: int) -> TokenEvent:
    return TokenEvent(
        index=index,
        sequence_id=SequenceId(index + 1),
        token_ids=[number],
        text=f"{number},",
        logprobs=[TokenLogprob(number, -0.5)],
    )


def end(index: int, count: int) -> Finished:
    timing = Timing(arrival_s=0, started_s=0, first_token_s=0, finished_s=0)
    return Finished(
        index=index,
        sequence_id=SequenceId(index + 1),
        reason="length",
        num_output_tokens=count,
        timing=timing,
    )


async def test_a_backlog_merges_tokens_of_the_same_choice_in_order() -> None:
    stream, _ = stream_of(2)
    for index in range(2):
        stream.push(
            Started(
                index=index,
                sequence_id=SequenceId(index + 1),
                prompt_tokens=1,
                cached_tokens=0,
                started_s=0.0,
            )
        )
    for number in range(1000):
        stream.push(token(number % 2, number))
    for index in range(2):
        stream.push(end(index, 500))
    events: list[Event] = [event async for event in stream]
    assert len(events) == MAX_PENDING_EVENTS + 2
    for index in range(2):
        mine = [e for e in events if isinstance(e, TokenEvent) and e.index == index]
        wanted = list(range(index, 1000, 2))
        assert [t for e in mine for t in e.token_ids] == wanted
        assert [entry.token for e in mine for entry in e.logprobs or []] == wanted
        assert "".join(e.text for e in mine) == "".join(f"{number}," for number in wanted)


async def test_a_failure_comes_after_what_was_there_and_once() -> None:
    stream, _ = stream_of()
    stream.push(token(0, 5))
    stream.fail(WorkerDiedError("gone"))
    assert isinstance(await anext(stream), TokenEvent)
    with pytest.raises(WorkerDiedError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_abort_wakes_the_reader_and_drops_the_rest() -> None:
    stream, aborts = stream_of()
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    stream.push(token(0, 1))
    stream.abort()
    assert await reader is None
    stream.push(token(0, 2))
    assert [event async for event in stream] == []
    assert aborts == ["abort"]
