"""Servers shared by the HTTP tests: one with a tiny random model, one with the default model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from enginehouse.observability.logs import configure_logging
from tests.http.serving import Server
from tests.support.tiny_models import write_tiny_llama

TINY = "tiny"


def tiny_overrides(directory: Path, **more: Any) -> dict[str, Any]:
    """Settings for a tiny random model; `a__b=1` sets `a.b`."""
    return {
        "model.source": str(write_tiny_llama(directory / "tiny-model")),
        "model.id": TINY,
        "model.precision": "fp32",
        "engine.num_threads": 1,
        "engine.check_integrity": True,
        "log.format": "json",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model, ready."""
    directory = tmp_path_factory.mktemp("server")
    running = Server(tiny_overrides(directory, engine__max_waiting=1000), directory / "log").start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, ready."""
    directory = tmp_path_factory.mktemp("default-server")
    running = Server({"log.format": "json"}, directory / "log").start()
    try:
        yield running.wait_ready(300)
    finally:
        running.stop()


@pytest.fixture(scope="package", autouse=True)
def _plain_logs() -> Iterator[None]:
    """Applications that run inside the test process log as a server does; other tests find logging as it was."""
    configure_logging("error", "json")
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    for handler in handlers:
        root.removeHandler(handler)
    logging.getLogger("enginehouse").setLevel(logging.NOTSET)
    structlog.reset_defaults()
