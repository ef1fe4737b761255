"""Draw docs/images/session.svg: a real session (`enginehouse serve`, then a streamed answer), as a terminal shows it.

.venv/bin/python scripts/readme_picture.py
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parent.parent / "docs" / "images" / "session.svg"
PORT, WIDTH, LIMIT_S = 8000, 104, 120
QUESTION = "Why do cats purr?"


def main() -> None:
    """Serve, ask, draw."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "enginehouse.cli.main", "serve", "--port", str(PORT)]
        server = subprocess.Popen(command, stderr=log, text=True)
        try:
            _wait_ready()
            answer = _ask()
        finally:
            server.terminate()
            server.wait(LIMIT_S)
        log.seek(0)
        lines = [line for line in log.read().splitlines() if not line.startswith(("{", "Loading"))]
    _draw(lines[: lines.index("") + 5], answer)


def _wait_ready() -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if httpx2.get(f"http://127.0.0.1:{PORT}/ready").is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def _ask() -> str:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 48,
        "stream": True,
    }
    url, pieces = f"http://127.0.0.1:{PORT}/v1/chat/completions", []
    with httpx2.stream("POST", url, json=body, timeout=LIMIT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    return "".join(pieces)


def _draw(lines: list[str], answer: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make serve", style="bold"))
    for line in lines:
        console.print(Text(line, style="cyan" if line.startswith("  ") else ""))
    console.print()
    console.print(Text("$ enginehouse chat --url http://127.0.0.1:8000", style="bold"))
    console.print(Text(f"> {QUESTION}", style="green"))
    console.print(Text(answer))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(TARGET), title="Enginehouse")


if __name__ == "__main__":
    main()
