"""How a server ends: answers are finished or say why not, newcomers are refused, nothing is left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from enginehouse.api import server as server_module
from enginehouse.settings import ServerSettings, Settings
from tests.http.conftest import tiny_overrides
from tests.http.serving import Server, sse_frames
from tests.http.test_errors import check_error
from tests.support.tiny_models import write_tiny_llama

FOR_EVER = {"prompt": "hi", "max_tokens": 100_000, "ignore_eos": True, "stop": ["never to be seen"]}
SHORT_GRACE_S, LONG_GRACE_S = 0.5, 3600.0


class Started:
    """A server with a slow model, its processes, and clients in threads."""

    def __init__(self, directory: Path, grace_s: float) -> None:
        overrides = tiny_overrides(
            directory, engine__kernels="numpy", server__shutdown_grace_s=grace_s, engine__max_waiting=0
        )
        model = write_tiny_llama(directory / "slow-model", num_layers=6, max_context=20_000)
        self.server = Server({**overrides, "model.source": str(model)}, directory / "log").start()
        self.server.wait_ready()
        self.family = psutil.Process(self.server.pid).children(recursive=True)
        assert self.family
        self.clients = ThreadPoolExecutor(8)

    def post(self, route: str, **fields: Any) -> Future[httpx2.Response]:
        return self.clients.submit(self.server.post, route, {**FOR_EVER, **fields})

    def wait_running(self, number: int) -> None:
        while self.server.metric("enginehouse_running_sequences") < number:
            time.sleep(0.02)

    def signal(self, *signals: int) -> None:
        for number in signals:
            self.server.process.send_signal(number)
            time.sleep(0.3)  # two at once may be taken for one

    def check_end(self) -> None:
        """It ended by itself or by the signal, without a traceback, and no process of it is left."""
        assert self.server.process.wait(60) in (0, -signal.SIGTERM)
        assert "Traceback" not in self.server.log()
        assert "CancelledError" not in self.server.log()
        _, alive = psutil.wait_procs(self.family, timeout=5)
        assert not alive

    def close(self) -> None:
        if self.server.process.poll() is None:
            self.server.process.kill()
        self.clients.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    opened: list[Started] = []

    def open_one(grace_s: float) -> Started:
        opened.append(Started(tmp_path, grace_s))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_running_answers_are_finished(start: Any) -> None:
    running = start(LONG_GRACE_S)
    whole = running.post("/v1/completions", max_tokens=400)
    streamed = running.post("/v1/completions", max_tokens=400, stream=True)
    with httpx2.Client(base_url=running.server.url, timeout=60) as early:
        assert early.get("/ready").status_code == 200
        running.wait_running(2)
        running.signal(signal.SIGTERM)
        # The connection was there before, so its requests get an answer; a new one is not accepted.
        for route in ("/v1/completions", "/basic_generate", "/tokenize", "/v1/embeddings", "/v1/models/x"):
            check_error(early.post(route, json={"prompt": "hi"}), 503, code="shutting_down")
        ready = early.get("/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "stopping")
        assert early.get("/health").status_code == 200
        with pytest.raises(httpx2.ConnectError):
            running.server.get("/health")
    (choice,) = whole.result().json()["choices"]
    frames = sse_frames(streamed.result().text)
    assert choice["finish_reason"] == "length"
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    running.check_end()


def check_cut(answers: list[Future[httpx2.Response]]) -> None:
    whole, streamed, events, message = (answer.result() for answer in answers)
    check_error(whole, 503, code="shutting_down")
    assert sse_frames(streamed.text)[-1]["error"]["code"] == "shutting_down"
    assert '"shutting_down"' in events.text.removesuffix("\n\n").rpartition("event: error")[2]
    assert (message.status_code, message.json()["type"]) == (503, "error")


def all_routes(running: Started) -> list[Future[httpx2.Response]]:
    answers = [
        running.post("/v1/completions"),
        running.post("/v1/completions", stream=True),
        running.post("/generate_stream"),
        running.clients.submit(
            running.server.post,
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9000, "ignore_eos": True},
        ),
    ]
    running.wait_running(len(answers))
    return answers


def test_answers_that_outlast_the_grace_say_why_they_end(start: Any) -> None:
    running = start(SHORT_GRACE_S)
    answers = all_routes(running)
    running.signal(signal.SIGTERM)
    check_cut(answers)
    running.check_end()


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_the_grace(start: Any, signals: tuple[int, ...]) -> None:
    running = start(LONG_GRACE_S)
    answers = all_routes(running)
    running.signal(*signals)
    check_cut(answers)
    running.check_end()


def test_a_client_that_takes_nothing_does_not_keep_the_server(start: Any) -> None:
    running = start(SHORT_GRACE_S)
    body = {**FOR_EVER, "stream": True}
    with (
        httpx2.Client(base_url=running.server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        running.signal(signal.SIGTERM)
        running.check_end()


@pytest.mark.parametrize(("seconds", "whole"), [(0.2, 1), (1.0, 1), (75.5, 76)])
def test_fractions_of_a_second_are_no_nothing(
    monkeypatch: pytest.MonkeyPatch, seconds: float, whole: int
) -> None:
    """Uvicorn counts whole seconds; cut off, half a second would be none."""
    made: list[Any] = []
    monkeypatch.setattr(server_module._Server, "run", lambda self, **_: made.append(self))
    monkeypatch.setattr(server_module, "configure_logging", lambda *_: None)
    times = ServerSettings(port=0, keep_alive_s=seconds, shutdown_grace_s=seconds)
    server_module.serve(Settings(server=times))
    assert made[0].config.timeout_keep_alive == whole
    assert made[0].config.timeout_graceful_shutdown >= 1
    assert made[0]._grace_s == seconds
