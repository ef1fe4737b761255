"""A real server in a process of its own, for black-box tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import json, sys
from enginehouse.api.server import serve
from enginehouse.errors import EnginehouseError
from enginehouse.settings import Settings
try:
    settings = Settings.load(overrides=json.loads(sys.argv[1]))
    serve(settings, on_listening=lambda url: print(url, flush=True))
except EnginehouseError as error:
    sys.exit(f"error: {error}")
"""


@dataclass
class Server:
    """A running server. `overrides` are settings by dotted name."""

    overrides: dict[str, Any]
    log_path: Path
    url: str = ""
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> Server:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGINEHOUSE_SERVER")}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, json.dumps({"server.port": 0, **self.overrides})],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=_ROOT,
                env=environment,
            )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http"), self.log()
        return self

    def wait_ready(self, timeout_s: float = 120.0) -> Server:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            if httpx2.get(f"{self.url}/ready").status_code == 200:
                return self
            time.sleep(0.05)
        raise AssertionError("the server did not become ready:\n" + self.log())

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text()

    def log_lines(self) -> list[dict[str, Any]]:
        """Complete lines; the server may be writing the next one."""
        return [json.loads(line) for line in self.log().split("\n")[:-1] if line.startswith("{")]

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=60, **options)

    def wait_log_line(self, timeout_s: float = 10.0, **fields: Any) -> dict[str, Any]:
        """The one line with these values; it may follow the answer it is about."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [line for line in self.log_lines() if fields.items() <= line.items()]
            if found:
                (line,) = found
                return line
            time.sleep(0.02)
        raise AssertionError(f"no line with {fields} in the log:\n{self.log()}")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that carry these labels."""
        return sum(
            value
            for sample, sample_labels, value in parse_metrics(self.get("/metrics").text)
            if sample == name and labels.items() <= sample_labels.items()
        )

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Until no sequence is running or waiting and no block is in use."""
        names = ("running_sequences", "waiting_sequences")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            busy = [name for name in names if self.metric(f"enginehouse_{name}")]
            if not busy and not self.metric("enginehouse_kv_blocks", state="used"):
                return
            time.sleep(0.05)
        raise AssertionError("still busy:\n" + self.get("/metrics").text)


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample in Prometheus' text format."""
    samples = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            found = _SAMPLE.match(line)
            assert found, line
            samples.append((found[1], dict(_LABEL.findall(found[2] or "")), float(found[3])))
    return samples


def sse_frames(text: str) -> list[Any]:
    """Data of the frames of an OpenAI stream, JSON decoded; the last must be `[DONE]`, which is left out."""
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), frames
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert payloads[-1] == "[DONE]"
    assert payloads.count("[DONE]") == 1
    return [json.loads(payload) for payload in payloads[:-1]]


def sse_events(text: str) -> list[tuple[str, Any]]:
    """(event, data) of the frames of a teaching stream."""
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        first, second = frame.split("\n")
        events.append((first.removeprefix("event: "), json.loads(second.removeprefix("data: "))))
    return events
