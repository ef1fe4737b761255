"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from enginehouse.api.encoder_host import EncoderHost, Encoders
from enginehouse.api.engine_host import EngineHost


def model_object(host: EngineHost) -> dict[str, Any]:
    """The served model in OpenAI's shape, with what routers and benchmark tools look for (`root`,
    `max_model_len`) and how far a load is."""
    engine = host.engine
    shown: dict[str, Any] = {
        "id": host.model_id,
        "object": "model",
        "created": host.created_unix_s,
        "owned_by": "enginehouse",
        "root": host.model_id,
        "parent": None,
        "max_model_len": None if engine is None else engine.max_context,
        "state": host.state,
        "progress": host.progress if engine is None else 1.0,
    }
    if host.detail:
        shown["reason"] = host.detail
    return shown


def encoder_object(host: EncoderHost) -> dict[str, Any]:
    """An encoder in the same shape; `max_model_len` is the longest input."""
    engine = host.loaded
    shown: dict[str, Any] = {
        "id": host.model_id,
        "object": "model",
        "created": host.created_unix_s,
        "owned_by": "enginehouse",
        "root": host.model_id,
        "parent": None,
        "max_model_len": None if engine is None else engine.max_input,
        "task": host.task,
        "state": host.state,
        "progress": host.progress if engine is None else 1.0,
    }
    if host.detail:
        shown["reason"] = host.detail
    return shown


def model_list(host: EngineHost, encoders: Encoders) -> dict[str, Any]:
    """All models: the one that generates first, because tools take the first for theirs."""
    others = [encoder_object(encoder) for encoder in encoders.hosts.values()]
    return {"object": "list", "data": [model_object(host), *others]}
