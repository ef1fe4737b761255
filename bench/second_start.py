"""Seconds from typing `enginehouse serve` (everything cached) to `/health`, `/ready` and the first token; memory.

python bench/second_start.py
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time

import httpx2
import psutil
from rich.console import Console
from rich.table import Table

LIMIT_S = 120


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, since_s: float) -> float:
    """Seconds since `since_s` until `url` answers 200."""
    while time.perf_counter() - since_s < LIMIT_S:
        try:
            if httpx2.get(url).status_code == httpx2.codes.OK:
                return time.perf_counter() - since_s
        except httpx2.TransportError:
            pass
        time.sleep(0.005)
    raise SystemExit(f"{url} did not answer within {LIMIT_S} s")


def first_token_s(url: str, since_s: float) -> float:
    """Seconds since `since_s` until the first streamed token of a short chat."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 8,
        "model": "smollm2",
    }
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - since_s
    raise SystemExit("no token came")


def one_start() -> dict[str, float]:
    """Start a server, ask it once, stop it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    since_s = time.perf_counter()
    command = [sys.executable, "-m", "enginehouse.cli.main", "serve", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        figures = {
            "seconds to /health": wait_for(f"{url}/health", since_s),
            "seconds to /ready": wait_for(f"{url}/ready", since_s),
            "seconds to the first token": first_token_s(url, since_s),
        }
        process = psutil.Process(server.pid)
        (worker,) = process.children()
        figures["API process, resident MB"] = process.memory_info().rss / 1e6
        figures["worker, resident MB"] = worker.memory_info().rss / 1e6
        figures["of that, shared weights MB"] = worker.memory_info().shared / 1e6
        return figures
    finally:
        server.terminate()
        server.wait(LIMIT_S)


def main() -> None:
    """Measure and print medians of five starts."""
    starts = [one_start() for _ in range(5)]
    table = Table("what", "median")
    for name in starts[0]:
        table.add_row(name, f"{statistics.median(start[name] for start in starts):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
