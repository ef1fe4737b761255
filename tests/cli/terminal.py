"""A command in a pseudo-terminal, driven like a person drives it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """Starts `enginehouse ARGS` with a terminal as its standard streams. Leave it as a context manager."""

    def __init__(self, *args: str) -> None:
        self._fd, child_fd = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse.cli.main", *args],
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling one
        )
        os.close(child_fd)
        self.screen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """What was printed up to and including `text`; a later call looks only at what comes after it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} did not appear in:\n{self.screen}"
            self._read()
        end = self.screen.index(text) + len(text)
        seen, self.screen = self.screen[:end], self.screen[end:]
        return seen

    def wait_exit(self, timeout_s: float = 20.0) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.screen}"
            self._read()
        return self.process.returncode

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0.1)[0]:
            try:
                self.screen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:  # the other end is closed: the program has ended
                time.sleep(0.01)
