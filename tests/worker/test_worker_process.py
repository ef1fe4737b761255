"""The worker as a process: how it starts, dies, hangs, is resumed, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from enginehouse.engine import LLMEngine, SamplingParams
from enginehouse.engine.engine_loading import load_model, plan_worker
from enginehouse.engine.messages import (
    AddSequence,
    Command,
    EngineStats,
    Fatal,
    FrameReader,
    Heartbeat,
    Loading,
    Ready,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    StepReport,
    decode_report,
)
from enginehouse.engine.worker_channel import WorkerChannel
from enginehouse.errors import EnginehouseError, ModelLoadFailedError, NoCapacityError, WorkerDiedError
from tests.worker.conftest import StartEngine, engine_config
from tests.worker.driving import SLOW, ask, ask_one, eventually, own_workers, read
from tests.worker.test_same_tokens import answer_all, outputs, questions

LONG = SamplingParams(max_tokens=400, temperature=1.0, seed=3, ignore_eos=True)


def worker_of(engine: LLMEngine) -> psutil.Process:
    pid = engine.health().worker_pid
    assert pid is not None
    return psutil.Process(pid)


# Death and resumption -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSEGV])
async def test_killed_worker_is_replaced_and_streams_go_on(start_engine: StartEngine, kill: int) -> None:
    engine = await start_engine()
    lone = await start_engine()
    work = questions()
    sampled = SamplingParams(max_tokens=120, temperature=1.0, seed=8, logprobs=1, ignore_eos=True)
    wanted = outputs(await answer_all(lone, work)) + outputs(await ask(lone, [5, 6, 7], sampled, n=3))
    first_pid = engine.health().worker_pid
    running = asyncio.gather(answer_all(engine, work), ask(engine, [5, 6, 7], sampled, n=3))
    await eventually(lambda: engine.stats().steps_total > 8, "streams are under way")
    worker_of(engine).send_signal(kill)
    await eventually(lambda: engine.health().state != "ready", "the death is noticed", timeout_s=2)
    assert engine.health().detail
    answers, choices = await running
    assert outputs(answers) + outputs(choices) == wanted
    health = engine.health()
    assert health.worker_pid != first_pid
    assert health.restarts_total == 1
    assert health.resumed_sequences_total > 0
    assert health.state == "ready"


class Murderer:
    """Kills the worker whenever it is about to compute what follows the first `num_tokens` tokens of an answer to
    `prompt`: as a fault in a kernel would, which one request's numbers bring about."""

    def __init__(self, engine: LLMEngine, *, prompt: list[int], num_tokens: int) -> None:
        self._engine = engine
        self._send, self._apply = engine._supervisor.send, engine._on_output
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._ids: set[SequenceId] = set()
        engine._supervisor.send = self._watch_send  # type: ignore[method-assign]
        engine._on_output = self._watch_output  # type: ignore[method-assign]

    def _watch_send(self, command: Command) -> None:
        self._send(command)
        if isinstance(command, AddSequence) and command.prompt_tokens == self._prompt:
            self._ids.update([command.sequence_id, *command.sibling_ids])
            if len(command.output_tokens) >= self._num_tokens:
                self._kill()

    def _watch_output(self, output: SequenceOutput) -> None:
        entry = self._engine._requests.get(output.sequence_id)
        self._apply(output)
        is_there = entry is not None and len(entry[1].output_tokens) == self._num_tokens
        if is_there and output.sequence_id in self._ids:
            self._kill()

    def _kill(self) -> None:
        if self._engine.health().state == "ready":
            worker_of(self._engine).kill()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 30], ids=["in its prompt", "in its answer"])
async def test_who_kills_every_worker_fails_alone(start_engine: StartEngine, num_tokens: int, n: int) -> None:
    engine, lone = await start_engine(**SLOW), await start_engine(**SLOW)
    work = [[7, 8, 9 + i] for i in range(5)]
    wanted = outputs(await asyncio.gather(*(ask_one(lone, prompt, LONG) for prompt in work)))
    family = outputs(await ask(lone, [9, 9], LONG, n=3))
    innocents = [asyncio.create_task(ask_one(engine, prompt, LONG)) for prompt in work]
    choices = asyncio.create_task(ask(engine, [9, 9], LONG, n=3))
    await eventually(lambda: engine.stats().num_running == 8, "they run")
    Murderer(engine, prompt=[5, 6], num_tokens=num_tokens)
    guilty = asyncio.create_task(ask(engine, [5, 6], LONG, n=n))
    await eventually(lambda: engine.health().state == "restarting", "the first death")
    late = asyncio.create_task(ask_one(engine, work[0], LONG))
    with pytest.raises(WorkerDiedError, match="signal 9"):
        await guilty
    assert outputs(await asyncio.gather(*innocents)) == wanted
    assert outputs(await choices) == family
    assert (await late).output() == wanted[0]
    assert engine.health().restarts_total == 2


async def test_deaths_that_are_nobodys_fault_fail_nobody(start_engine: StartEngine) -> None:
    engine, lone = await start_engine(**SLOW), await start_engine(**SLOW)
    short = SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    wanted = (await ask_one(lone, [5, 6], LONG)).output()
    answer = asyncio.create_task(ask_one(engine, [5, 6], LONG))
    for num_deaths in range(4):
        await eventually(
            lambda: engine.health().state == "ready" and engine.stats().num_running > 0, "it runs"
        )
        await eventually(lambda: not engine._trials.is_on, "nobody is tried")
        worker_of(engine).kill()
        await eventually(
            lambda num_deaths=num_deaths: engine.health().restarts_total == num_deaths + 1,  # type: ignore[misc]
            "it is back",
        )
        assert len((await ask_one(engine, [8], short)).token_ids) == 1
    assert (await answer).output() == wanted


async def test_whoever_leaves_while_tried_makes_room_for_the_next(start_engine: StartEngine) -> None:
    engine = await start_engine(**SLOW)
    streams = {
        stream.sequence_ids[0]: stream for stream in [await engine.submit([5, 6 + i], LONG) for i in range(4)]
    }
    await eventually(lambda: engine.stats().num_running == 4, "they run")
    next_trial, tried = engine._trials.next, list[SequenceId | None]()

    def leave_at_once() -> list[AddSequence]:
        messages = next_trial()
        tried.append(messages[0].sequence_id if messages else None)
        if len(tried) in (1, 3) and tried[-1] is not None:
            asyncio.get_running_loop().call_soon(streams[tried[-1]].abort)
        return messages

    engine._trials.next = leave_at_once  # type: ignore[method-assign]
    worker_of(engine).kill()
    await eventually(lambda: len(tried) == 5, "all are tried")
    assert {*tried} == {*streams, None}
    for place in (1, 3):
        sequence_id = tried[place]
        assert sequence_id is not None
        assert len((await read(streams[sequence_id]))[0].token_ids) == LONG.max_tokens


async def test_requests_during_a_restart_wait_for_it(start_engine: StartEngine) -> None:
    engine = await start_engine()
    worker_of(engine).kill()
    await eventually(lambda: engine.health().state == "restarting", "the death is noticed")
    stream = await engine.submit([5, 6], LONG)
    aborted = await engine.submit([5, 7], LONG)
    aborted.abort()
    assert len((await read(stream))[0].token_ids) == 400


async def test_without_restarts_a_death_is_told_to_all(start_engine: StartEngine) -> None:
    engine = await start_engine(max_restarts=0, **SLOW)
    answers = [asyncio.create_task(ask_one(engine, [5, 6 + i], LONG)) for i in range(4)]
    await eventually(lambda: engine.stats().num_running == 4, "they run")
    worker_of(engine).kill()
    for answer in answers:
        with pytest.raises(WorkerDiedError, match="signal 9"):
            await answer
    assert engine.health().state == "failed"
    with pytest.raises(NoCapacityError):
        await engine.submit([5], LONG)


async def test_a_silent_worker_is_killed_and_replaced(start_engine: StartEngine) -> None:
    engine = await start_engine(heartbeat_timeout_s=2.5, **SLOW)
    lone = await start_engine(**SLOW)
    answer = asyncio.create_task(ask_one(engine, [5, 6], LONG))
    await eventually(lambda: engine.stats().num_running == 1, "it runs")
    stopped = worker_of(engine)
    stopped.suspend()
    await eventually(lambda: engine.health().state == "restarting", "silence is noticed")
    assert "said nothing" in engine.health().detail
    assert (await answer).output() == (await ask_one(lone, [5, 6], LONG)).output()
    assert not stopped.is_running()


async def test_an_idle_worker_keeps_reporting(start_engine: StartEngine) -> None:
    engine = await start_engine(heartbeat_timeout_s=2.5)
    await asyncio.sleep(3)
    age_s = engine.health().last_report_age_s
    assert age_s is not None
    assert age_s < 2.4
    assert engine.health().restarts_total == 0


async def test_a_worker_that_talks_nonsense_is_replaced(start_engine: StartEngine) -> None:
    engine = await start_engine()
    executor = engine._supervisor._executor
    assert executor is not None
    executor.data_received(b"\x03\x00\x00\x00abc")
    await eventually(lambda: engine.health().restarts_total == 1, "it was replaced")
    assert len((await ask_one(engine, [5, 6], LONG)).token_ids) == 400


def channel_pair() -> tuple[WorkerChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(1.0)
    return WorkerChannel(theirs, on_disconnect=lambda: None), ours


def test_a_long_step_gives_signs_of_life_only_while_it_makes_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("enginehouse.engine.worker_channel.HEARTBEAT_INTERVAL_S", 0.05)
    channel, ours = channel_pair()
    with ours:
        stats = EngineStats(steps_total=3)
        channel.emit(StepReport(stats=stats))
        read_until(ours, StepReport)
        for _ in range(3):
            channel.note_progress()
            (heartbeat,) = read_until(ours, Heartbeat)
            assert heartbeat.stats == stats
        with pytest.raises(TimeoutError):
            ours.recv(1)


def test_the_outgoing_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse.engine.worker_channel.MAX_UNSENT_BYTES", 1 << 20)
    channel, ours = channel_pair()
    report = StepReport(failed=[SequenceFailed(SequenceId(1), "x", "m" * 100_000)], stats=EngineStats())
    emitted = 0

    def emit_all() -> None:
        nonlocal emitted
        for _ in range(100):
            channel.emit(report)
            emitted += 1

    sender = threading.Thread(target=emit_all)
    with ours:
        sender.start()
        time.sleep(0.3)
        assert 5 < emitted < 30, "a peer that does not read must hold the loop up, not fill the memory"
        frames, received = FrameReader(), 0
        while received < 100:
            received += len(frames.feed(ours.recv(1 << 20)))
        sender.join(5)
        assert not sender.is_alive()
        assert channel.flush(1.0)


async def test_an_idle_worker_does_not_spin(start_engine: StartEngine) -> None:
    engine = await start_engine(num_threads=2)
    await ask_one(engine, [5, 6], LONG)
    await asyncio.sleep(0.3)
    before = worker_of(engine).cpu_times()
    await asyncio.sleep(1.0)
    after = worker_of(engine).cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.1


# The end --------------------------------------------------------------------------------------------------------


async def test_close_ends_the_process(start_engine: StartEngine) -> None:
    engine = await start_engine()
    worker = worker_of(engine)
    await engine.close()
    assert not worker.is_running()


async def test_close_kills_a_worker_that_does_not_listen(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.engine.executor._SHUTDOWN_S", 0.2)
    monkeypatch.setattr("enginehouse.engine.executor._TERMINATE_S", 0.2)
    engine = await start_engine()
    worker = worker_of(engine)
    worker.suspend()
    await engine.close()
    assert not worker.is_running()


async def test_close_during_a_restart(start_engine: StartEngine) -> None:
    engine = await start_engine()
    worker_of(engine).kill()
    await eventually(lambda: engine.health().state == "restarting", "the death is noticed")
    await asyncio.sleep(0.02)
    await engine.close()
    assert engine.health().state == "closed"


async def test_sigterm_and_sigint(start_engine: StartEngine) -> None:
    """Ctrl-C reaches the whole process group but is the parent's business; SIGTERM ends the worker cleanly."""
    engine = await start_engine(max_restarts=0)
    worker_of(engine).send_signal(signal.SIGINT)
    assert len((await ask_one(engine, [5, 6], LONG)).token_ids) == 400
    worker_of(engine).terminate()
    await eventually(lambda: engine.health().state == "failed", "it ended")
    assert "exit code 0" in engine.health().detail


PARENT = textwrap.dedent(
    """
    import asyncio, sys
    from enginehouse.engine import LLMEngine, SamplingParams
    from tests.worker.conftest import engine_config

    async def main():
        engine = await LLMEngine.start(engine_config(sys.argv[1]))
        params = SamplingParams(max_tokens=480, ignore_eos=True)
        print(engine.health().worker_pid, flush=True)
        while True:
            async for _ in engine.generate([5, 6], params):
                pass
            if sys.argv[2] == "idle":
                await asyncio.sleep(60)

    asyncio.run(main())
    """
)


@pytest.mark.parametrize("activity", ["busy", "idle"])
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_the_worker_does_not_outlive_its_parent(tiny_int8: Path, activity: str, kill: int) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_int8), activity]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as parent:
        assert parent.stdout is not None
        try:
            worker = psutil.Process(int(parent.stdout.readline()))
            time.sleep(0.1)
            parent.send_signal(kill)
            parent.wait(10)
        finally:
            parent.kill()
        _, alive = psutil.wait_procs([worker], timeout=2)
        assert alive == []


# Loading --------------------------------------------------------------------------------------------------------


def copy_of(packed: Path, directory: Path) -> Path:
    return Path(shutil.copytree(packed, directory / "copy"))


async def test_damage_after_the_check_is_named_by_the_worker(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copy_of(tiny_int8, tmp_path)

    def load_then_damage(*arguments: Any) -> Any:
        model = load_model(*arguments)
        weights = bytearray((copy / "weights.bin").read_bytes())
        weights[1000] ^= 1
        (copy / "weights.bin").write_bytes(weights)
        return model

    monkeypatch.setattr("enginehouse.engine.engine_loading.load_model", load_then_damage)
    with pytest.raises(ModelLoadFailedError, match="damaged"):
        await LLMEngine.start(engine_config(copy))
    assert own_workers() == []


async def test_a_crash_while_loading_shows_what_the_worker_wrote(
    tiny_int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # which knows no -m
    with pytest.raises(ModelLoadFailedError) as caught:
        await LLMEngine.start(engine_config(tiny_int8))
    assert "exit code" in str(caught.value)
    assert "\n  " in str(caught.value), "the worker's own words are missing"
    assert own_workers() == []


async def test_a_worker_that_cannot_be_started_at_all(
    tiny_int8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ModelLoadFailedError, match="could not be started"):
        await LLMEngine.start(engine_config(tiny_int8))


async def test_restarts_that_fail_end_in_failed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(max_restarts=2, **SLOW)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    answer = asyncio.create_task(ask_one(engine, [5, 6], LONG))
    await eventually(lambda: engine.stats().num_running == 1, "it runs")
    worker_of(engine).kill()
    with pytest.raises(ModelLoadFailedError, match="could not be started"):
        await answer
    assert engine.health().state == "failed"


async def test_a_load_that_takes_too_long(tiny_int8: Path) -> None:
    with pytest.raises(ModelLoadFailedError, match=r"0\.001 s"):
        await LLMEngine.start(engine_config(tiny_int8, load_timeout_s=0.001))
    assert own_workers() == []


async def test_a_cancelled_start_leaves_no_process(tiny_int8: Path) -> None:
    task = asyncio.create_task(LLMEngine.start(engine_config(tiny_int8)))
    await eventually(lambda: own_workers() != [], "the worker was started")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert own_workers() == []


async def test_an_unknown_model_is_named() -> None:
    with pytest.raises(EnginehouseError, match="nowhere"):
        await LLMEngine.start(engine_config("/nowhere/at/all"))


async def test_progress_is_told(tiny_int8: Path) -> None:
    told: list[tuple[str, float]] = []
    engine = await LLMEngine.start(engine_config(tiny_int8), on_progress=lambda *what: told.append(what))
    await engine.close()
    loading = [done for what, done in told if what == "load"]
    assert loading == sorted(loading)
    assert len(loading) >= 2


def test_the_worker_imports_nothing_that_reads_models_or_speaks_http() -> None:
    code = "import sys, enginehouse.engine.worker, enginehouse.engine.encoder_worker; print(*sys.modules)"
    modules = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    heavy = {
        "tokenizers",
        "jinja2",
        "gguf",
        "huggingface_hub",
        "fastapi",
        "pydantic",
        "typer",
        "asyncio",
        "httpx2",
    }
    assert heavy & modules == set()
    assert "numpy" in modules


def start_by_hand(packed: Path, **changes: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A worker without an executor: its socket is ours."""
    config = engine_config(packed, **changes)
    worker_config = plan_worker(config, load_model(config, None))
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), msgspec.json.encode(worker_config).decode()]
        command = [sys.executable, "-m", "enginehouse.engine.worker", *arguments]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    ours.settimeout(20)
    return process, ours


def read_until(sock: socket.socket, kind: type[Any]) -> list[Any]:
    frames, reports = FrameReader(), []
    while not any(isinstance(report, kind) for report in reports):
        data = sock.recv(1 << 16)
        assert data, f"the worker left without a {kind.__name__}: {reports}"
        reports += [decode_report(body) for body in frames.feed(data)]
    return reports


def test_the_worker_speaks_the_protocol_and_ends_with_its_socket(tiny_int8: Path) -> None:
    process, ours = start_by_hand(tiny_int8)
    with process, ours:
        reports = read_until(ours, Heartbeat)
        assert [type(report) for report in reports] == [Loading, Loading, Ready, Heartbeat]
        assert reports[2].block_size == 32
        assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "enginehouse-wkr"
        ours.close()
        assert process.wait(2) == 0


def test_nonsense_from_the_parent_ends_the_worker_loudly(tiny_int8: Path) -> None:
    process, ours = start_by_hand(tiny_int8)
    with process, ours:
        read_until(ours, Ready)
        ours.sendall(b"\x02\x00\x00\x00\xff\xff")
        (fatal,) = [report for report in read_until(ours, Fatal) if isinstance(report, Fatal)]
        assert "command" in fatal.message
        assert process.wait(5) == 1
        assert process.stderr is not None
        assert b"Traceback" in process.stderr.read()


def test_a_fault_of_the_loop_is_fatal_and_told(tiny_int8: Path) -> None:
    from enginehouse.engine.messages import AddSequence, SequenceId, encode

    process, ours = start_by_hand(tiny_int8)
    with process, ours:
        read_until(ours, Ready)
        # The same id twice is a mistake of the API process, no user's: the worker must not guess.
        add = AddSequence(sequence_id=SequenceId(1), prompt_tokens=[5], params=LONG)
        ours.sendall(encode(add) + encode(add))
        (fatal,) = [report for report in read_until(ours, Fatal) if isinstance(report, Fatal)]
        assert "not new" in fatal.message
        assert process.wait(5) == 1


def test_blas_of_a_started_worker_has_one_thread(tiny_int8: Path) -> None:
    async def run() -> tuple[int, dict[str, str]]:
        engine = await LLMEngine.start(engine_config(tiny_int8, num_threads=1))
        try:
            worker = worker_of(engine)
            return worker.num_threads(), worker.environ()
        finally:
            await engine.close()

    num_threads, environment = asyncio.run(run())
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    assert num_threads <= 4, "main, reader, writer and at most one of the kernels' own"
    assert os.environ.get("OPENBLAS_NUM_THREADS") is None
