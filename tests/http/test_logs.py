"""Log lines: both formats, both loggers, and nothing of what was said."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys, structlog
from enginehouse.observability.logs import configure_logging
configure_logging(sys.argv[1], sys.argv[2])
log = structlog.stdlib.get_logger("enginehouse.http")
log.info("first", status=200)
log.debug("quiet")
logging.getLogger("enginehouse.engine").warning("second %s", "line")
logging.getLogger("other.library").info("noise")
prompt = "the " + "secret"
try:
    prompt.index("missing")
except ValueError:
    log.exception("third", request_id="r1")
"""


def run(level: str, format: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, level, format], capture_output=True, text=True, check=True
    ).stderr


def test_json_lines() -> None:
    lines = [json.loads(line) for line in run("info", "json").splitlines()]
    assert [line["event"] for line in lines] == ["first", "second line", "third"]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert all("timestamp" in line for line in lines)
    assert lines[0]["status"] == 200
    assert "ValueError" in lines[2]["exception"]


def test_auto_is_json_when_nobody_watches() -> None:
    assert run("info", "auto").startswith("{")


@pytest.mark.parametrize("format", ["json", "console"])
def test_tracebacks_hold_no_values(format: str) -> None:
    output = run("info", format)
    assert "ValueError" in output
    assert "the secret" not in output


def test_level() -> None:
    assert "first" not in run("warning", "console")
    assert "quiet" in run("debug", "console")
