"""The encoders beside the served model: loaded when they are first asked for, shared by all who ask meanwhile."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import structlog

from enginehouse.engine.encoder_config import EncoderEngineConfig, EncoderTask
from enginehouse.errors import (
    EnginehouseError,
    InvalidRequestError,
    ModelLoadFailedError,
    ModelLoadingError,
    ModelNotFoundError,
    ShuttingDownError,
)
from enginehouse.observability.metrics import ModelSnapshot
from enginehouse.settings import EncoderSettings, Settings, SettingsError

if TYPE_CHECKING:
    from enginehouse.engine.encoder_engine import EncoderEngine

_log = structlog.stdlib.get_logger("enginehouse.models")

FAILED_RETRY_S = 60.0
LOADING_RETRY_S = 5.0

EncoderState = Literal["unloaded", "loading", "ready", "restarting", "failed", "closed"]
OnProgress = Callable[[str, float], None]
StartEncoder = Callable[[EncoderEngineConfig, OnProgress], Awaitable["EncoderEngine"]]

_WORDS: dict[EncoderTask, str] = {"embed": "embeddings", "rerank": "reranking"}
_HINTS: dict[EncoderTask, str] = {
    "embed": "embedding.enabled switches it on",
    "rerank": "rerank.source names one",
}
_SECTIONS: dict[EncoderTask, str] = {"embed": "embedding", "rerank": "rerank"}


async def start_encoder(config: EncoderEngineConfig, on_progress: OnProgress) -> EncoderEngine:
    """The real thing; its modules are imported in a thread, so that the server answers meanwhile."""
    module = await asyncio.to_thread(importlib.import_module, "enginehouse.engine.encoder_engine")
    engine: EncoderEngine = await module.EncoderEngine.start(config, on_progress)
    return engine


class EncoderHost:
    """Owns one encoder's engine. The first caller of `engine` starts the load and everybody shares it; nobody's
    leaving ends it. A failed load is remembered for `FAILED_RETRY_S` and then tried again."""

    def __init__(
        self, task: EncoderTask, settings: EncoderSettings, source: str, start: StartEncoder = start_encoder
    ) -> None:
        self.task: EncoderTask = task
        self.model_id = settings.id
        self.created_unix_s = int(time.time())
        self.stage, self.progress = "start", 0.0
        self.load_s: float | None = None
        self._config = EncoderEngineConfig(
            source=source,
            model_id=settings.id,
            task=task,
            precision=settings.precision,
            num_threads=settings.num_threads,
            token_budget=settings.token_budget,
            max_waiting=settings.max_waiting,
            load_timeout_s=settings.load_wait_s,
        )
        self._load_wait_s = settings.load_wait_s
        self._start = start
        self._loading: asyncio.Task[EncoderEngine] | None = None
        self._engine: EncoderEngine | None = None
        self._failure: EnginehouseError | None = None
        self._failed_at_s = 0.0
        self._is_closed = False

    @property
    def state(self) -> EncoderState:
        """What can be said to a client."""
        if self._is_closed:
            return "closed"
        if self._engine is not None:
            return self._engine.state
        if self._loading is not None:
            return "loading"
        return "unloaded" if self._failure is None else "failed"

    @property
    def detail(self) -> str:
        """Why the state is what it is, when there is something to say."""
        if self._engine is not None:
            return self._engine.detail
        return str(self._failure or "")

    @property
    def loaded(self) -> EncoderEngine | None:
        """The engine, once it is there."""
        return self._engine

    def begin(self) -> None:
        """Start to load, unless that has been done; returns at once."""
        if self._engine is None and self._loading is None:
            self._loading = asyncio.create_task(self._load())
            # A failure is kept in `_failure`; with nobody waiting, the task's own would be reported as lost.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def engine(self) -> EncoderEngine:
        """The engine, loaded first when it is not there yet.

        Raises `ModelLoadFailedError`, `ShuttingDownError`, and `ModelLoadingError` when the load takes longer than
        the wait allowed; it goes on then.
        """
        if self._is_closed:
            raise ShuttingDownError("The server is shutting down.")
        if self._engine is not None:
            return self._engine
        if self._failure is not None:
            rest_s = self._failed_at_s + FAILED_RETRY_S - time.monotonic()
            if rest_s > 0:
                raise self._load_failed(rest_s)
        self.begin()
        assert self._loading is not None
        done, _ = await asyncio.wait([self._loading], timeout=self._load_wait_s)
        if not done:
            raise ModelLoadingError(
                f"The model '{self.model_id}' is being loaded ({self.stage}, {self.progress:.0%}). Try again soon.",
                retry_after_s=LOADING_RETRY_S,
            )
        if self._engine is None:
            raise (
                ShuttingDownError("The server is shutting down.")
                if self._is_closed
                else self._load_failed(FAILED_RETRY_S)
            )
        return self._engine

    async def close(self) -> None:
        """Stop loading or serving; no process is left."""
        self._is_closed = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()

    def snapshot(self) -> ModelSnapshot:
        """For the metrics, at each scrape."""
        engine = self._engine
        if engine is None or engine.state in ("failed", "closed"):
            state = {"unloaded": "UNLOADED", "loading": "LOADING"}.get(self.state, "ERROR")
            return ModelSnapshot(model=self.model_id, state=state, load_s=self.load_s)
        active = "ACTIVE" if engine.num_pending else "READY"
        return ModelSnapshot(
            model=self.model_id,
            state=active if engine.state == "ready" else "LOADING",
            load_s=self.load_s,
            resident_bytes=engine.info.weight_bytes,
            num_waiting=engine.num_pending,
            steps_total=engine.stats.steps_total,
            computed_tokens_total=engine.stats.computed_tokens_total,
            worker_restarts_total=engine.restarts_total,
            last_step_s=engine.stats.last_step_s,
        )

    def _load_failed(self, retry_after_s: float) -> ModelLoadFailedError:
        return ModelLoadFailedError(
            f"The model '{self.model_id}' could not be loaded: {self._failure}", retry_after_s=retry_after_s
        )

    async def _load(self) -> EncoderEngine:
        start_s = time.monotonic()
        try:
            engine = await self._start(self._config, self._note_progress)
        except EnginehouseError as error:
            self._fail(error)
            raise
        except Exception as error:
            _log.exception("model load failed", model=self.model_id)
            self._fail(ModelLoadFailedError(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._loading = None
        self._engine, self._failure = engine, None
        self.load_s = time.monotonic() - start_s
        _log.info("model ready", model=self.model_id, load_s=round(self.load_s, 3))
        return engine

    def _fail(self, error: EnginehouseError) -> None:
        self._failure, self._failed_at_s = error, time.monotonic()
        _log.error("model load failed", model=self.model_id, code=error.code, message=str(error))

    def _note_progress(self, stage: str, progress: float) -> None:
        """Called from loader threads too: two plain assignments."""
        self.stage, self.progress = stage, progress


@dataclass(frozen=True, slots=True)
class Encoders:
    """The encoders of this server by task, and what is said when a task has none."""

    hosts: dict[EncoderTask, EncoderHost]
    generating_id: str
    """The served model's id, which is no encoder."""
    eager: frozenset[EncoderTask]

    @classmethod
    def of(cls, settings: Settings, start: StartEncoder = start_encoder) -> Encoders:
        """What the settings ask for; nothing is loaded yet. Raises `SettingsError` for ids that clash."""
        embedding, rerank = settings.embedding, settings.rerank
        wanted: list[tuple[EncoderTask, EncoderSettings, str | None]] = [
            ("embed", embedding, embedding.source if embedding.enabled else None),
            ("rerank", rerank, rerank.source),
        ]
        hosts: dict[EncoderTask, EncoderHost] = {}
        taken = {settings.model.id: "model.id"}
        for task, section, source in wanted:
            if source is None:
                continue
            if section.id in taken:
                raise SettingsError(
                    f"{_SECTIONS[task]}.id: {section.id!r} is {taken[section.id]} already; each of the models that are "
                    "served side by side needs an id of its own"
                )
            taken[section.id] = f"{_SECTIONS[task]}.id"
            hosts[task] = EncoderHost(task, section, source, start)
        eager = frozenset(task for task, section, _ in wanted if task in hosts and not section.lazy)
        return cls(hosts, settings.model.id, eager)

    def start(self) -> None:
        """Begin to load those that shall not wait for a request."""
        for task in self.eager:
            self.hosts[task].begin()

    async def close(self) -> None:
        """End all workers."""
        await asyncio.gather(*(host.close() for host in self.hosts.values()))

    def named(self, model_id: str) -> EncoderHost | None:
        """The encoder with this id."""
        return next((host for host in self.hosts.values() if host.model_id == model_id), None)

    def host_for(self, task: EncoderTask, model: str | None) -> EncoderHost:
        """The encoder that serves `model` (None: the task's own).

        Raises `ModelNotFoundError`, and `InvalidRequestError` for a model of this server made for something else.
        """
        host = self.hosts.get(task)
        if host is not None and model in (None, host.model_id):
            return host
        here = (
            f"This server has no model for {_WORDS[task]}; {_HINTS[task]}."
            if host is None
            else f"This server has '{host.model_id}' for {_WORDS[task]}."
        )
        if model is not None and (model == self.generating_id or self.named(model) is not None):
            raise InvalidRequestError(
                f"The model '{model}' is not made for {_WORDS[task]}. {here}", param="model"
            )
        if model is None:
            raise ModelNotFoundError(here, param="model")
        shown = model if len(model) <= 100 else model[:100] + "…"
        raise ModelNotFoundError(f"The model '{shown}' does not exist. {here}", param="model")

    def snapshots(self) -> list[ModelSnapshot]:
        """For the metrics, at each scrape."""
        return [host.snapshot() for host in self.hosts.values()]
