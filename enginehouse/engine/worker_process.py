"""What every worker process does around its loop: signals, logging, the channel, the last words."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from enginehouse.engine.messages import Fatal
from enginehouse.engine.worker_channel import WorkerChannel
from enginehouse.errors import EnginehouseError
from enginehouse.runtime.ops import Ops

logger = logging.getLogger("enginehouse.worker")

FLUSH_S = 2.0
SWITCH_INTERVAL_S = 0.0005
"""How long the step loop may keep the channel's threads waiting for the interpreter; Python's 5 ms are a step."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def run_worker(socket_fd: int, serve: Callable[[WorkerChannel], None]) -> int:
    """Run `serve` to its end in this process, with the API process at the other end of `socket_fd`.

    Exit code 0 after `Shutdown`, SIGTERM or the end of the API process; 1 after a fault, which is reported.
    """
    _bind_to_parent()
    # The terminal sends Ctrl-C to the whole process group; the API process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    channel = WorkerChannel(socket.socket(fileno=socket_fd), on_disconnect=lambda: os._exit(0))
    try:
        serve(channel)
    except Exception as error:  # the outermost loop: say what happened, then end
        logger.exception("the worker cannot go on")
        code = error.code if isinstance(error, EnginehouseError) else None
        channel.emit(Fatal(code=code or "internal_error", message=str(error) or type(error).__name__))
        channel.flush(FLUSH_S)
        return 1
    channel.flush(FLUSH_S)
    return 0


def note_each_layer(operations: Ops, channel: WorkerChannel) -> None:
    """Tell the channel of every layer that is done: a step of a large model may take longer than the API process
    would wait for a sign of life."""
    attention = operations.attention

    def noted_attention(*arguments: Any) -> None:
        channel.note_progress()
        attention(*arguments)

    operations.attention = noted_attention  # type: ignore[method-assign, assignment]


def _bind_to_parent() -> None:
    """On Linux, let the kernel end this process with its parent, even while it is not reading its socket."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            prctl(_PR_SET_NAME, b"enginehouse-wkr", 0, 0, 0)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
