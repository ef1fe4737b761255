"""Keeps one worker alive: starts it, and starts it again when it dies, with patience."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from enginehouse.engine.encoder_config import EncoderWorkerConfig
from enginehouse.engine.engine_config import WorkerConfig
from enginehouse.engine.events import EngineState
from enginehouse.engine.executor import ModelExecutor, OnReport
from enginehouse.engine.messages import Command, Ready
from enginehouse.errors import EnginehouseError, WorkerDiedError

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 30.0


class Supervisor:
    """Owns the current `ModelExecutor` and the decision whether there will be another.

    The first death is followed by a start at once; deaths in a row wait longer and longer, and after
    `max_restarts` of them the state is "failed" for good. `note_progress` ends a row.
    """

    def __init__(
        self,
        config: WorkerConfig | EncoderWorkerConfig,
        *,
        heartbeat_timeout_s: float,
        load_timeout_s: float,
        max_restarts: int,
        on_report: OnReport,
        on_death: Callable[[WorkerDiedError], None],
        on_restarted: Callable[[], None],
        on_failed: Callable[[EnginehouseError], None],
    ) -> None:
        self._config = config
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._load_timeout_s = load_timeout_s
        self._max_restarts = max_restarts
        self._on_report = on_report
        self._on_death = on_death
        self._on_restarted = on_restarted
        self._on_failed = on_failed
        self._executor: ModelExecutor | None = None
        self._restart: asyncio.Task[None] | None = None
        self._deaths_in_a_row = 0
        self.state: EngineState = "loading"
        self.detail = ""
        self.restarts_total = 0
        self.ready: Ready | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the current worker."""
        return self._executor.pid if self._executor is not None else None

    @property
    def last_report_s(self) -> float | None:
        """`time.monotonic()` when the current worker was last heard of."""
        return self._executor.last_report_s if self._executor is not None else None

    async def start(self) -> Ready:
        """Start the first worker. Raises `ModelLoadFailedError`; there is no second try."""
        ready = await self._start_executor()
        self.state = "ready"
        return ready

    def send(self, command: Command) -> None:
        """Send a command to a ready worker; while there is none it is dropped (see `on_restarted`)."""
        if self.state == "ready" and self._executor is not None:
            self._executor.send(command)

    def note_progress(self) -> None:
        """A sequence finished: the worker does its work."""
        self._deaths_in_a_row = 0

    async def close(self) -> None:
        """End the worker and any restart under way."""
        self.state = "closed"
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._executor is not None:
            await self._executor.close()

    async def _start_executor(self) -> Ready:
        self._executor = ModelExecutor(
            on_report=self._on_report, on_death=self._died, heartbeat_timeout_s=self._heartbeat_timeout_s
        )
        self.ready = await self._executor.start(self._config, self._load_timeout_s)
        return self.ready

    def _died(self, error: WorkerDiedError) -> None:
        logger.error("%s", error)
        self.state, self.detail = "restarting", str(error)
        self._deaths_in_a_row += 1
        self._on_death(error)
        self._restart = asyncio.create_task(self._start_again(error))

    async def _start_again(self, error: EnginehouseError) -> None:
        while self._deaths_in_a_row <= self._max_restarts:
            if self._executor is not None:
                await self._executor.close()
            if self._deaths_in_a_row > 1:
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2**self._deaths_in_a_row, _MAX_BACKOFF_S))
            try:
                await self._start_executor()
            except EnginehouseError as start_error:
                logger.error("restart failed: %s", start_error)
                error = start_error
                self.detail = str(error)
                self._deaths_in_a_row += 1
                continue
            self.restarts_total += 1
            self.state, self.detail = "ready", ""
            logger.warning("worker restarted (%d so far), pid %s", self.restarts_total, self.pid)
            self._on_restarted()
            return
        self.state, self.detail = "failed", str(error)
        self._on_failed(error)
