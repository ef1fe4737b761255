"""One worker process, seen from the API process: start it, talk to it, notice its end, end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec

from enginehouse.engine.encoder_config import EncoderWorkerConfig
from enginehouse.engine.engine_config import WorkerConfig
from enginehouse.engine.messages import (
    Command,
    Fatal,
    FrameReader,
    Loading,
    Ready,
    Report,
    Shutdown,
    decode_report,
    encode,
)
from enginehouse.errors import EnginehouseError, ModelLoadFailedError, WorkerDiedError

logger = logging.getLogger(__name__)

_ENCODER_WORKER = "enginehouse.engine.encoder_worker"
_STDERR_TAIL_LINES = 30
_SHUTDOWN_S, _TERMINATE_S = 2.0, 2.0
# One pool of threads a process: the kernels' own. BLAS would start a second one that fights it.
_SINGLE_THREADED_BLAS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}

OnReport = Callable[[Report], None]
OnDeath = Callable[[WorkerDiedError], None]


class ModelExecutor(asyncio.Protocol):
    """Owns a worker process and the socket to it.

    Promises: every report reaches `on_report` in order; after `start` has returned, the worker's death, by
    exit, by silence or by nonsense on the socket, calls `on_death` exactly once unless `close` came first; after
    `close` the process is gone and reaped. All methods belong to the event loop's thread.
    """

    def __init__(self, *, on_report: OnReport, on_death: OnDeath, heartbeat_timeout_s: float) -> None:
        self._on_report = on_report
        self._on_death = on_death
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._frames = FrameReader()
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._fatal: Fatal | None = None
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._disconnected = asyncio.Event()
        self.last_report_s = time.monotonic()

    async def start(self, config: WorkerConfig | EncoderWorkerConfig, load_timeout_s: float) -> Ready:
        """Start the process and wait until the model is in its memory.

        Raises `ModelLoadFailedError` with the last lines the worker wrote when it ends, fails or takes longer
        than `load_timeout_s`; the process is gone by then.
        """
        try:
            await self._spawn(config)
            async with asyncio.timeout(load_timeout_s):
                ready = await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise ModelLoadFailedError(
                f"The worker did not have the model in memory after {load_timeout_s:g} s.{self._tail()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._watch_heartbeat()))
        return ready

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid if self._process is not None else None

    def send(self, command: Command) -> None:
        """Queue a command; does nothing once the worker is gone. Raises `ValueError` when it is too large."""
        frame = encode(command)
        if self._transport is not None and not self._is_over:
            self._transport.write(frame)

    async def close(self) -> None:
        """End the worker: ask, then terminate, then kill, each with a bound. Safe to call twice."""
        self._is_over = True
        if self._process is not None and self._process.returncode is None:
            if self._transport is not None:
                self._transport.write(encode(Shutdown()))
            if not await self._exits_within(_SHUTDOWN_S):
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                if not await self._exits_within(_TERMINATE_S):
                    self._kill()
                    await self._process.wait()
        if self._transport is not None:
            self._transport.close()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()
        else:
            self._ready.cancel()

    # asyncio.Protocol -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Decode what the worker sent and hand it on."""
        self.last_report_s = time.monotonic()
        try:
            for body in self._frames.feed(data):
                self._receive(decode_report(body))
        except (ValueError, msgspec.MsgspecError) as error:
            self._kill()
            self._end(f"sent a message that is no report: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Everything the worker sent has been read."""
        self._disconnected.set()

    def _receive(self, report: Report) -> None:
        if isinstance(report, Fatal):
            self._fatal = report
        elif isinstance(report, Ready) and not self._ready.done():
            self._ready.set_result(report)
        if not self._is_over or isinstance(report, Loading | Ready):
            self._on_report(report)

    # Birth and death ------------------------------------------------------------------------------------------

    async def _spawn(self, config: WorkerConfig | EncoderWorkerConfig) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # what happens to lie in the current directory is not to be imported
                    "-m",
                    "enginehouse.engine.worker" if isinstance(config, WorkerConfig) else _ENCODER_WORKER,
                    str(theirs.fileno()),
                    msgspec.json.encode(config).decode(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_SINGLE_THREADED_BLAS},
                )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise ModelLoadFailedError(f"The worker process could not be started: {error}") from error
            raise
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        reader = asyncio.create_task(self._read_stderr())
        self._tasks += [reader, asyncio.create_task(self._watch_exit(reader))]

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # a line longer than the reader's limit; its rest follows
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr_tail.append(text)
            level = logging.getLevelNamesMapping().get(text.partition(" ")[0], logging.INFO)
            logger.log(level, "worker %s: %s", self.pid, text)

    async def _watch_exit(self, stderr_reader: asyncio.Task[None]) -> None:
        assert self._process is not None
        code = await self._process.wait()
        # What it said last is still on its way: the reason, and tokens that need not be computed again.
        disconnected = asyncio.create_task(self._disconnected.wait())
        await asyncio.wait([stderr_reader, disconnected], timeout=1.0)
        disconnected.cancel()
        self._end(f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}")

    async def _watch_heartbeat(self) -> None:
        while True:
            silent_s = time.monotonic() - self.last_report_s
            if silent_s >= self._heartbeat_timeout_s:
                break
            await asyncio.sleep(self._heartbeat_timeout_s - silent_s)
        self._kill()
        self._end(f"said nothing for {silent_s:.1f} s")

    def _end(self, what: str) -> None:
        """The worker is gone, or will be in a moment."""
        if self._is_over:
            return
        self._is_over = True
        if not self._ready.done():
            self._ready.set_exception(self._load_error(what))
            return
        reason = f": {self._fatal.message}" if self._fatal is not None else ""
        self._on_death(WorkerDiedError(f"The model's worker process {what}{reason}."))

    def _load_error(self, what: str) -> EnginehouseError:
        if self._fatal is not None:
            return ModelLoadFailedError(f"The model could not be loaded: {self._fatal.message}")
        return ModelLoadFailedError(f"The worker {what} before the model was in memory.{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self._stderr_tail)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _exits_within(self, limit_s: float) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True
