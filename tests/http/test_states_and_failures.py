"""What clients are told while the model loads, when it cannot be loaded, and when an answer fails half-way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from enginehouse.api.app import create_app
from enginehouse.errors import (
    CorruptModelError,
    DeadlineExceededError,
    EnginehouseError,
    QueueFullError,
    QueueTimeoutError,
    SequenceFailedError,
    ShuttingDownError,
    WorkerDiedError,
)
from enginehouse.settings import LogSettings, ModelSettings, Settings
from tests.http.scripted_engine import ScriptedEngine, finished, started, token
from tests.http.serving import sse_frames
from tests.http.test_errors import check_error

SETTINGS = Settings(model=ModelSettings(id="scripted"), log=LogSettings(access=False))
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


def app_of(engine: ScriptedEngine, **options: Any) -> FastAPI:
    async def start(_config: Any, _on_progress: Any) -> Any:
        return engine

    return create_app(SETTINGS, start_engine=start, **options)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_while_the_model_loads() -> None:
    loaded = asyncio.Event()
    ready: list[Any] = []
    report: list[Callable[[str, float], None]] = []

    async def start(_config: Any, on_progress: Callable[[str, float], None]) -> Any:
        report.append(on_progress)
        await loaded.wait()
        return ScriptedEngine(started(), token("ok"), finished(2))

    app = create_app(SETTINGS, start_engine=start, on_ready=ready.append)
    async with running(app) as client:
        await settle()
        report[0]("download", 0.25)
        health = await client.get("/health")
        assert (health.status_code, health.json()["state"]) == (200, "loading")
        assert (health.json()["stage"], health.json()["progress"]) == ("download", 0.25)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/version")).status_code == 200
        assert (
            'enginehouse_model_state{model="scripted",state="LOADING"} 1.0'
            in (await client.get("/metrics")).text
        )
        model = (await client.get("/v1/models")).json()["data"][0]
        assert (model["state"], model["progress"], model["max_model_len"]) == ("loading", 0.25, None)
        for stream in (False, True):
            refused = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert "download" in check_error(refused, 503, code="model_loading")
            assert int(refused.headers["retry-after"]) >= 1
        unknown = await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        check_error(unknown, 404, "model", "model_not_found")
        check_error(await client.post("/v1/chat/completions", json={}), 400, "messages")
        assert not ready
        loaded.set()
        await settle()
        assert len(ready) == 1
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CorruptModelError("model.gguf is cut short"), "model.gguf is cut short"),
        (KeyError("layer"), "KeyError"),
    ],
)
async def test_model_that_cannot_be_loaded(error: Exception, said: str) -> None:
    failures: list[EnginehouseError] = []

    async def start(_config: Any, _on_progress: Any) -> Any:
        raise error

    async with running(create_app(SETTINGS, start_engine=start, on_failed=failures.append)) as client:
        await settle()
        health = await client.get("/health")
        assert health.status_code == 503
        assert said in health.json()["reason"]
        assert (await client.get("/ready")).status_code == 503
        assert said in (await client.get("/v1/models/scripted")).json()["reason"]
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        assert said in check_error(refused, 503, code="model_load_failed")
        assert refused.headers["retry-after"]
        assert 'state="ERROR"} 1.0' in (await client.get("/metrics")).text
    assert len(failures) == 1


async def test_stopping_while_the_model_loads() -> None:
    cancelled = asyncio.Event()

    async def start(_config: Any, _on_progress: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with running(create_app(SETTINGS, start_engine=start)):
        await settle()
    assert cancelled.is_set()


async def test_stopping_closes_the_engine() -> None:
    engine = ScriptedEngine()
    async with running(app_of(engine)):
        await settle()
    assert engine.is_closed


@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("restarting", 200), ("failed", 503)])
async def test_health_tells_the_truth_about_the_worker(state: Any, status: int) -> None:
    engine = ScriptedEngine()
    async with running(app_of(engine)) as client:
        await settle()
        engine.state, engine.detail = state, "it died"
        health = await client.get("/health")
        assert (health.status_code, health.json()["state"]) == (status, state)
        assert (await client.get("/ready")).status_code == (200 if state == "ready" else 503)
        assert (await client.get("/metrics")).status_code == 200


FAILURES: list[tuple[Exception, int, str]] = [
    (QueueFullError("full", retry_after_s=3.2), 429, "queue_full"),
    (QueueTimeoutError("too long", retry_after_s=0.1), 429, "queue_timeout"),
    (DeadlineExceededError("too late"), 408, "deadline_exceeded"),
    (SequenceFailedError("NaN"), 500, "sequence_failed"),
    (WorkerDiedError("twice"), 500, "worker_died"),
    (ShuttingDownError("bye"), 503, "shutting_down"),
    (ZeroDivisionError("a secret of ours"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/completions", "/basic_generate", "/generate_stream"]
)
async def test_failure_before_the_first_token(
    route: str, error: Exception, status: int, code: str, stream: bool
) -> None:
    body = {**CHAT, "prompt": "a"}
    if route.startswith("/v1"):
        body["stream"] = stream
    for engine in (ScriptedEngine(error), ScriptedEngine()):
        if not engine.script:
            engine.refusal = error
        async with running(app_of(engine)) as client:
            await settle()
            answer = await client.post(route, json=body)
            check_error(answer, status, code=code)
            assert "secret" not in answer.text
            if isinstance(error, QueueFullError):
                assert answer.headers["retry-after"] == "4"
            if isinstance(error, QueueTimeoutError):
                assert answer.headers["retry-after"] == "1"
            if status == 500:
                assert answer.headers["x-request-id"]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
async def test_failure_in_the_middle(error: Exception, status: int, code: str) -> None:
    async with running(app_of(ScriptedEngine(started(), token("ab"), token("c"), error))) as client:
        await settle()
        whole = await client.post("/v1/chat/completions", json=CHAT)
        check_error(whole, status, code=code)
        for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})):
            streamed = await client.post(route, json={**body, "stream": True})
            assert streamed.status_code == 200
            frames = sse_frames(streamed.text)
            assert set(frames[-1]) == {"error"}
            assert frames[-1]["error"]["code"] == code
            assert all("error" not in frame for frame in frames[:-1])
            assert "secret" not in streamed.text
        taught = await client.post("/generate_stream", json={"prompt": "a"})
        name, data = taught.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
        assert name == "event: error"
        shown = json.loads(data.removeprefix("data: "))
        assert (shown["code"], shown["sequence_id"]) == (code, 7)
        metrics = (await client.get("/metrics")).text
        assert f'reason="{code}",route="/v1/completions",status="{status}"' in metrics


async def test_every_stream_is_released() -> None:
    """However a request ends, its engine stream is told that nobody listens any more."""
    engine = ScriptedEngine(started(), token("ab"), finished(2))
    async with running(app_of(engine)) as client:
        await settle()
        for stream in (False, True):
            await client.post("/v1/completions", json={"prompt": ["a", "b"], "stream": stream})
        assert engine.num_aborted == 4
        engine.script = (started(), SequenceFailedError("NaN"))
        await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert engine.num_aborted == 7
