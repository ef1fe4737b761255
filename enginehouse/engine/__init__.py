"""The life of a sequence: queueing, batching, KV cache, worker process, streaming.

The names below load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse.engine.engine_config import BatchingConfig, EngineConfig
    from enginehouse.engine.events import (
        UNTIL_CONTEXT_END,
        ChatPrompt,
        EngineHealth,
        Event,
        Finished,
        Prompt,
        Started,
        Timing,
        TokenEvent,
    )
    from enginehouse.engine.llm_engine import LLMEngine
    from enginehouse.engine.request_stream import RequestStream
    from enginehouse.engine.sampling_params import SamplingParams
    from enginehouse.engine.structured_output import Grammar

__all__ = [
    "UNTIL_CONTEXT_END",
    "BatchingConfig",
    "ChatPrompt",
    "EngineConfig",
    "EngineHealth",
    "Event",
    "Finished",
    "Grammar",
    "LLMEngine",
    "Prompt",
    "RequestStream",
    "SamplingParams",
    "Started",
    "Timing",
    "TokenEvent",
]

_MODULE_OF = {
    "BatchingConfig": "engine_config",
    "EngineConfig": "engine_config",
    "Grammar": "structured_output",
    "LLMEngine": "llm_engine",
    "RequestStream": "request_stream",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'events')}")
    return getattr(module, name)
