"""The served model's engine inside the API process: started in the background, looked up by each request."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import structlog

from enginehouse.engine.engine_config import BatchingConfig, EngineConfig
from enginehouse.errors import (
    EnginehouseError,
    InvalidRequestError,
    ModelLoadFailedError,
    ModelLoadingError,
    ModelNotFoundError,
)
from enginehouse.observability.metrics import ModelSnapshot
from enginehouse.settings import Settings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine, OnProgress

_log = structlog.stdlib.get_logger("enginehouse.models")

LOADING_RETRY_S = 2.0
FAILED_RETRY_S = 60.0

HostState = Literal["loading", "ready", "restarting", "stopping", "failed", "closed"]
StartEngine = Callable[[EngineConfig, Callable[[str, float], None]], Awaitable["LLMEngine"]]


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's own configuration, from the settings tree."""
    fields = settings.engine.model_dump()
    batching = BatchingConfig(**fields.pop("batching"))
    model = settings.model
    return EngineConfig(
        source=model.source, model_id=model.id, precision=model.precision, batching=batching, **fields
    )


def encoder_ids(settings: Settings) -> frozenset[str]:
    """Ids of the models beside the served one, which give vectors or scores."""
    sections = (
        (settings.embedding.id, settings.embedding.enabled),
        (settings.rerank.id, settings.rerank.source is not None),
    )
    return frozenset(model_id for model_id, is_there in sections if is_there)


async def start_llm_engine(config: EngineConfig, on_progress: OnProgress) -> LLMEngine:
    """The real thing. Its modules (numpy, tokenizers, …) are imported here, in a thread, so that the server
    answers before they are."""
    module = await asyncio.to_thread(importlib.import_module, "enginehouse.engine.llm_engine")
    engine: LLMEngine = await module.LLMEngine.start(config, on_progress=on_progress)
    return engine


class EngineHost:
    """Owns the engine of the one served model, from `start` to `close`, and knows its state at every moment.

    Routes ask `engine_for`; it raises the refusal that fits (404, 503 with an estimate) when there is no engine to
    give. `on_ready` and `on_failed` tell the process around it; they run in the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        start_engine: StartEngine = start_llm_engine,
        on_ready: Callable[[LLMEngine], None] | None = None,
        on_failed: Callable[[EnginehouseError], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.model_settings = settings.model
        self.model_id = settings.model.id
        self.source = settings.model.source
        self._encoder_ids = encoder_ids(settings)
        self.created_unix_s = int(time.time())
        self.load_s: float | None = None
        self.stage, self.progress = "start", 0.0
        self.is_stopping = False
        """No request is taken any more; those that run may finish."""
        self._config = engine_config(settings)
        self._start_engine = start_engine
        self._on_ready, self._on_failed, self._on_progress = on_ready, on_failed, on_progress
        self._engine: LLMEngine | None = None
        self._failure: EnginehouseError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._task = asyncio.create_task(self._load())

    async def close(self) -> None:
        """Stop loading or serving; no process is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()

    @property
    def state(self) -> HostState:
        """What can be said to a client."""
        if self._failure is not None:
            return "failed"
        if self.is_stopping:
            return "stopping"
        return "loading" if self._engine is None else self._engine.health().state

    @property
    def engine(self) -> LLMEngine | None:
        """The engine, once it has been started; None before."""
        return self._engine

    @property
    def detail(self) -> str:
        """Why the state is what it is, when there is something to say."""
        if self._failure is not None:
            return str(self._failure)
        return "" if self._engine is None else self._engine.health().detail

    def check_model(self, model: str | None) -> None:
        """Raise `ModelNotFoundError` unless `model` is served here, `InvalidRequestError` for one of the encoders;
        None means the default."""
        if model is not None and model in self._encoder_ids:
            raise InvalidRequestError(
                f"The model '{model}' is an encoder and generates no text. This server generates with "
                f"'{self.model_id}'.",
                param="model",
            )
        if model is not None and model != self.model_id:
            shown = model if len(model) <= 100 else model[:100] + "…"
            raise ModelNotFoundError(
                f"The model '{shown}' does not exist. This server has '{self.model_id}'.", param="model"
            )

    def engine_for(self, model: str | None) -> LLMEngine:
        """The engine that serves `model` (None: the default).

        Raises `ModelNotFoundError`, `ModelLoadingError` or `ModelLoadFailedError`.
        """
        self.check_model(model)
        if self._failure is not None:
            raise ModelLoadFailedError(
                f"The model '{self.model_id}' could not be loaded: {self._failure}",
                retry_after_s=FAILED_RETRY_S,
            )
        if self._engine is None:
            raise ModelLoadingError(
                f"The model '{self.model_id}' is being loaded ({self.stage}, {self.progress:.0%}). Try again soon.",
                retry_after_s=LOADING_RETRY_S,
            )
        return self._engine

    def snapshots(self) -> list[ModelSnapshot]:
        """For the metrics, at each scrape."""
        if self._engine is None or self.state in ("failed", "closed"):
            state = "ERROR" if self.state == "failed" else "LOADING"
            return [ModelSnapshot(model=self.model_id, state=state, load_s=self.load_s)]
        stats, health, info = self._engine.stats(), self._engine.health(), self._engine.info
        active = "ACTIVE" if health.num_unfinished else "READY"
        return [
            ModelSnapshot(
                model=self.model_id,
                state=active if health.state == "ready" else "LOADING",
                load_s=self.load_s,
                resident_bytes=info.weight_bytes + info.kv_bytes,
                num_running=stats.num_running,
                num_waiting=max(stats.num_waiting, health.num_unfinished - stats.num_running),
                blocks_total=stats.blocks_total or info.num_blocks,
                blocks_used=stats.blocks_used,
                blocks_cached=stats.blocks_cached,
                steps_total=stats.steps_total,
                prefix_hit_tokens_total=stats.prefix_hit_tokens_total,
                preemptions_total=stats.preemptions_total,
                computed_tokens_total=stats.computed_tokens_total,
                worker_restarts_total=health.restarts_total,
                resumed_sequences_total=health.resumed_sequences_total,
                last_step_s=stats.last_step_s,
            )
        ]

    async def _load(self) -> None:
        start_s = time.monotonic()
        try:
            self._engine = await self._start_engine(self._config, self._note_progress)
        except EnginehouseError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the outermost loop of loading: logged and shown in /health
            _log.exception("model load failed", model=self.model_id)
            self._fail(ModelLoadFailedError(f"{type(error).__name__}: {error}"))
        else:
            self.load_s = time.monotonic() - start_s
            _log.info("model ready", model=self.model_id, load_s=round(self.load_s, 3))
            if self._on_ready is not None:
                self._on_ready(self._engine)

    def _fail(self, error: EnginehouseError) -> None:
        self._failure = error
        _log.error("model load failed", model=self.model_id, code=error.code, message=str(error))
        if self._on_failed is not None:
            self._on_failed(error)

    def _note_progress(self, stage: str, progress: float) -> None:
        """Called from loader threads too: two plain assignments."""
        self.stage, self.progress = stage, progress
        if self._on_progress is not None:
            self._on_progress(stage, progress)
