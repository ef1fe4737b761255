"""From settings to a model that a worker can open: fetch, pack, read the tokenizer, plan memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from enginehouse.engine.engine_config import BLOCK_SIZE, EngineConfig, WorkerConfig
from enginehouse.engine.machine_limits import available_cpus, available_memory_bytes
from enginehouse.errors import InvalidRequestError, ModelError, UnsupportedModelError
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.sources import Progress, ignore_progress
from enginehouse.runtime.tokenizer import Tokenizer
from enginehouse.runtime.weights import prepare_model

MAX_DEFAULT_KV_BYTES = 1 << 30
_KV_SHARE_OF_MEMORY = 0.25


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
