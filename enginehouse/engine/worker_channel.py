"""The worker's end of the socket: two threads move bytes, so that the step loop never waits for a peer."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from enginehouse.engine.messages import (
    Command,
    EngineStats,
    FrameReader,
    Heartbeat,
    Report,
    StepReport,
    decode_command,
    encode,
)

HEARTBEAT_INTERVAL_S = 1.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Beyond it `emit` does wait: tokens must not be lost, and an API process this far behind is stuck anyway."""
_RECEIVE_BYTES = 1 << 18


class WorkerChannel:
    """Commands in, reports out.

    Owns the socket. `take`, `emit` and `note_progress` are for the step loop's thread. When the API process is
    gone, `on_disconnect` is called from the reading thread, whatever the step loop is doing.

    A long step is no silence: while it makes progress, a heartbeat goes out every `HEARTBEAT_INTERVAL_S`. A step
    that hangs makes none, and the API process hears nothing.
    """

    def __init__(self, sock: socket.socket, on_disconnect: Callable[[], None]) -> None:
        self._socket = sock
        self._on_disconnect = on_disconnect
        self._commands: deque[Command] = deque()
        self._garbled: Exception | None = None
        self._arrived = threading.Condition()
        self._woken = False
        self._unsent: deque[bytes] = deque()
        self._num_unsent_bytes = 0
        self._unsent_changed = threading.Condition()
        self._stats = EngineStats()
        self._progress = 0
        self._progress_told = 0
        for name, target in (("reader", self._read), ("writer", self._write)):
            threading.Thread(target=target, name=f"channel-{name}", daemon=True).start()

    def take(self, timeout_s: float) -> list[Command]:
        """All commands that have arrived; waits up to `timeout_s` for the first one, or for `wake`.

        Raises `ValueError` when something has arrived that is no command.
        """
        with self._arrived:
            if not self._commands and timeout_s > 0 and self._garbled is None and not self._woken:
                self._arrived.wait(timeout_s)
            self._woken = False
            if self._garbled is not None:
                raise ValueError(
                    f"the API process sent what is no command: {self._garbled}"
                ) from self._garbled
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def wake(self) -> None:
        """Let `take` return at once, now or the next time. For any thread."""
        with self._arrived:
            self._woken = True
            self._arrived.notify()

    def emit(self, report: Report) -> None:
        """Hand over a report to be sent."""
        if isinstance(report, StepReport | Heartbeat):
            self._stats = report.stats
        frame = encode(report)
        with self._unsent_changed:
            while self._num_unsent_bytes > MAX_UNSENT_BYTES:
                self._unsent_changed.wait()
            self._unsent.append(frame)
            self._num_unsent_bytes += len(frame)
            self._unsent_changed.notify_all()

    def note_progress(self) -> None:
        """Something inside a step is done."""
        self._progress += 1

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything emitted has been sent; False when that takes longer than `timeout_s`."""
        with self._unsent_changed:
            return self._unsent_changed.wait_for(lambda: self._num_unsent_bytes == 0, timeout_s)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                commands = [decode_command(body) for body in frames.feed(data)]
                with self._arrived:
                    self._commands.extend(commands)
                    self._arrived.notify()
        except (ValueError, msgspec.MsgspecError) as error:
            with self._arrived:
                self._garbled = error
                self._arrived.notify()
            return
        except OSError:
            pass  # a reset connection is as gone as a closed one
        self._on_disconnect()

    def _write(self) -> None:
        while True:
            with self._unsent_changed:
                self._wait_for_report()
                frames = b"".join(self._unsent)
                self._unsent.clear()
            try:
                self._socket.sendall(frames)
            except OSError:
                self._on_disconnect()
                return
            with self._unsent_changed:
                self._num_unsent_bytes -= len(frames)
                self._unsent_changed.notify_all()

    def _wait_for_report(self) -> None:
        """Until there is something to send; that may be a heartbeat of the step in progress."""
        while not self._unsent:
            reported = self._unsent_changed.wait(HEARTBEAT_INTERVAL_S)
            if not reported and self._progress != self._progress_told:
                self._progress_told = self._progress
                frame = encode(Heartbeat(stats=self._stats))
                self._unsent.append(frame)
                self._num_unsent_bytes += len(frame)
