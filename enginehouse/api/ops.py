"""Routes for those who run the server: health, readiness, metrics, version."""

from __future__ import annotations

import platform
import sys
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import enginehouse
from enginehouse.api.answering import ApiState
from enginehouse.api.openai.parameters import encode_json

router = APIRouter(tags=["operations"])


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as a JSON answer."""
    return Response(encode_json(value), status_code=status, media_type="application/json")


def _api(request: Request) -> ApiState:
    state = request.app.state.api
    assert isinstance(state, ApiState)
    return state


@router.get("/health", summary="Is the process all right?")
async def health(request: Request) -> Response:
    """200 while the server works or is on its way to (a model that loads, a worker that is being replaced); 503
    when the model cannot be served any more."""
    host = _api(request).host
    shown: dict[str, Any] = {"status": "ok", "model": host.model_id, "state": host.state}
    if host.engine is None:
        shown |= {"stage": host.stage, "progress": round(host.progress, 3)}
    else:
        engine_health = host.engine.health()
        age_s = engine_health.last_report_age_s
        shown |= {
            "worker_heartbeat_age_s": None if age_s is None else round(age_s, 3),
            "worker_restarts": engine_health.restarts_total,
        }
    if host.state in ("failed", "closed"):
        shown |= {"status": "failed", "reason": host.detail}
        return json_response(shown, 503)
    return json_response(shown)


@router.get("/ready", summary="Can it answer a request now?")
async def ready(request: Request) -> Response:
    """200 when the model is in memory and its worker answers, else 503."""
    host = _api(request).host
    is_ready = host.state == "ready"
    return json_response({"ready": is_ready, "state": host.state}, 200 if is_ready else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format; also the names that vLLM's dashboards and routers look for."""
    return Response(_api(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", summary="What is running?")
async def version(request: Request) -> Response:
    """Version of the server, and what computes."""
    host = _api(request).host
    shown: dict[str, Any] = {
        "version": enginehouse.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "model": host.model_id,
    }
    if host.engine is not None and host.state == "ready":
        info = host.engine.info
        shown |= {"kernels": info.kernels, "num_threads": info.num_threads}
    return json_response(shown)
