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

    def press(self, key: str, shows: str) -> None:
        """Press a control key until `shows` appears. Once is not enough: a key that comes while the program turns
        from an answer to its prompt belongs to neither. A person presses again."""
        for _ in range(20):
            self.type(key)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and shows not in self.screen:
                self._read()
            if shows in self.screen:
                self.wait_for(shows)
                return
        raise AssertionError(f"{shows!r} did not appear in:\n{self.screen}")

    def leave(self) -> int:
        """Press Ctrl-D until the program ends; its exit code."""
        for _ in range(20):
            if self.process.poll() is None:
                self.type(CTRL_D)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and self.process.poll() is None:
                self._read()
        return self.wait_exit()

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
