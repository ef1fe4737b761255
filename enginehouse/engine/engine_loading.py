"""From settings to a model that a worker can open: fetch, pack, read the tokenizer, plan memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginehouse.engine.engine_config import BLOCK_SIZE, EngineConfig, WorkerConfig
from enginehouse.engine.machine_limits import available_cpus, available_memory_bytes
from enginehouse.errors import InvalidRequestError, ModelError, UnsupportedModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.sources import Progress, ignore_progress
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights import prepare_model

MAX_DEFAULT_KV_BYTES = 1 << 30
_KV_SHARE_OF_MEMORY = 0.25
ABANDON_TIMEOUT_S = 1.0
"""How long a cancelled load may take to clean up after itself."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the API process keeps of a model: no weights."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    max_context: int
    """Tokens of prompt and output."""


def load_model(config: EngineConfig, on_progress: Progress | None) -> LoadedModel:
    """Fetch and pack the model as far as that was not done before, and read its tokenizer. Blocks: call it in a
    thread. Raises `ModelError`.
    """
    prepared = prepare_model(config.source, config.precision, on_progress or ignore_progress)
    if prepared.config.encoder is not None:
        raise UnsupportedModelError(
            f"{config.source} is an encoder and generates no text; embedding.source or rerank.source is its place"
        )
    tokenizer = Tokenizer.load(prepared.path)
    limit = prepared.config.max_context
    if config.max_context is not None and config.max_context > limit:
        raise InvalidRequestError(
            f"max_context is {config.max_context}, but the model was made for {limit} tokens.",
            param="max_context",
        )
    return LoadedModel(
        path=prepared.path,
        config=prepared.config,
        tokenizer=tokenizer,
        max_context=config.max_context or limit,
    )


class _AbandonedError(Exception):
    """Raised inside the loading thread when nobody waits for it any more."""


async def load_model_in_background(config: EngineConfig, on_progress: Progress | None) -> LoadedModel:
    """`load_model` in a thread that a cancelled caller can leave behind.

    A fetch may hang in the network for minutes, and a thread cannot be interrupted: it ends at its next sign of
    progress, which the caller awaits for a moment, and it never keeps the process from ending.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[LoadedModel] = loop.create_future()
    abandoned = threading.Event()

    def progress(what: str, fraction: float) -> None:
        if abandoned.is_set():
            raise _AbandonedError
        (on_progress or ignore_progress)(what, fraction)

    def deliver(set_outcome: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending
            loop.call_soon_threadsafe(set_outcome, value)

    def run() -> None:
        try:
            model = load_model(config, progress)
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who raises it
            deliver(outcome.set_exception, error)
        else:
            deliver(outcome.set_result, model)

    threading.Thread(target=run, name="enginehouse-load", daemon=True).start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        abandoned.set()
        await asyncio.wait({outcome}, timeout=ABANDON_TIMEOUT_S)
        if outcome.done():
            outcome.exception()  # it is nobody's news any more
        raise


def plan_worker(config: EngineConfig, model: LoadedModel) -> WorkerConfig:
    """Settings of the worker, with threads counted and KV memory measured out.

    Raises `ModelError` when the memory allowed holds not even one block.
    """
    batching = config.batching.build()
    block_bytes = BLOCK_SIZE * model.config.kv_bytes_per_token(config.kv_dtype)
    return WorkerConfig(
        model_path=str(model.path),
        kv_dtype=config.kv_dtype,
        num_threads=config.num_threads or available_cpus(),
        kernels=config.kernels,
        num_blocks=_num_blocks(config, batching.max_sequences, model.max_context, block_bytes),
        max_context=model.max_context,
        batching=batching,
        queue_order=config.build_queue_order(),
        max_waiting=config.max_waiting + batching.max_sequences,
        max_queue_wait_s=config.max_queue_wait_s,
        prefix_cache=config.prefix_cache,
        check_integrity=config.check_integrity,
    )


def _num_blocks(config: EngineConfig, max_sequences: int, max_context: int, block_bytes: int) -> int:
    """Blocks of KV memory: what can be needed, within the cap."""
    needed = max_sequences * math.ceil(max_context / BLOCK_SIZE)
    cap_bytes = config.kv_cache_bytes
    if cap_bytes is None:
        cap_bytes = min(MAX_DEFAULT_KV_BYTES, int(available_memory_bytes() * _KV_SHARE_OF_MEMORY))
    affordable = cap_bytes // block_bytes
    if affordable < 1:
        raise ModelError(
            f"The KV cache may take {cap_bytes} bytes, but one block of {BLOCK_SIZE} tokens takes {block_bytes}. "
            "Raise kv_cache_bytes."
        )
    return min(needed, affordable)
