"""The command line as a shell user meets it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.terminal import CTRL_C, Terminal
from tests.support.tiny_models import write_tiny_llama

LIMIT_S = 60


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "enginehouse.cli.main", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("cli") / "tiny"))


def workers_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_help_and_version():
    listed = run("--help").stdout
    for command in ("serve", "chat", "generate", "models"):
        assert command in listed
        assert run(command, "--help").returncode == 0
    assert run("--version").stdout.startswith("enginehouse ")


def test_generate_writes_only_the_text_to_standard_output(tiny):
    plain = run("generate", "The cat", "-m", tiny, "-n", "6")
    assert plain.returncode == 0, plain.stderr
    as_json = run("generate", "-", "-m", tiny, "-n", "6", "--json", stdin="The cat\n")
    result = json.loads(as_json.stdout)
    assert result["text"] == plain.stdout.removesuffix("\n")
    assert result["output_tokens"] == 6
    assert result["finish_reason"] == "length"


def test_generate_stops_at_a_stop_string(tiny):
    text = run("generate", "The cat", "-m", tiny, "-n", "30").stdout
    stop = text[5:8]
    stopped = run("generate", "The cat", "-m", tiny, "-n", "30", "--stop", stop)
    assert stopped.stdout == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "-m", "nonsense:thing"), "nonsense"),
        (("generate", "x", "-m", "/no/such/model"), "/no/such/model"),
        (("generate", "x", "--set", "engine.max_waiting"), "NAME=VALUE"),
        (("generate", "x", "--set", "log.level="), "NAME=VALUE"),
        (("generate", "x", "--set", "engine.max_wating=3"), "max_waiting"),
        (("generate", "x", "--precision", "int5"), "int8"),
        (("generate", "x", "-t", "9"), "temperature"),
        (("generate", "x", "-n", "-3"), "max_tokens"),
        (("serve", "--set", "engine.batching.token_budget=1"), "token_budget"),
        (("serve", "--config", "/no/such/file.yaml"), "/no/such/file.yaml"),
        (("serve", "--host", "0.0.0.0"), "--insecure"),
        (("chat", "--url", "http://127.0.0.1:9"), "enginehouse serve"),
        (("chat", "--url", "127.0.0.1:9"), "enginehouse serve"),
    ],
)
def test_a_mistake_gets_one_clear_message_and_no_traceback(args, message):
    done = run(*args)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_prompt_that_is_too_long_ends_with_both_sizes(tiny):
    done = run("generate", "word " * 2000, "-m", tiny)
    assert done.returncode == 1
    assert "512" in done.stderr


def test_serve_names_a_taken_port(tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", tiny, "--port", str(port))
    assert done.returncode == 1
    assert f"Port {port} is in use" in done.stderr


def test_serve_exits_when_the_model_cannot_be_loaded(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(200))
    done = run("serve", str(broken), "--port", "0")
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_says_what_to_try_and_ends_on_ctrl_c_without_orphans(tiny):
    with Terminal("serve", tiny, "--port", "0", "--model-id", "tiny-one") as terminal:
        seen = terminal.wait_for("Ctrl-C stops")
        assert "/v1/chat/completions" in seen
        assert "tiny-one" in seen
        workers = workers_of(terminal.process.pid)
        assert workers
        terminal.type(CTRL_C)
        assert terminal.wait_exit() == 0
        _gone, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive


def test_chat_streams_and_ctrl_c_ends_the_answer_but_not_the_program(tiny):
    with Terminal("chat", tiny, "-t", "0") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for("tokens, first after", timeout_s=60)
        terminal.wait_for("> ")
        terminal.press(CTRL_C, shows="Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("/clear\n")
        terminal.wait_for("> ")
        terminal.type("Again\n")
        terminal.wait_for("tokens/s]", timeout_s=60)
        assert terminal.leave() == 0


@pytest.mark.model
def test_chat_with_the_default_model_survives_ctrl_c_in_an_answer():
    with Terminal("chat", "-t", "0", "-n", "400") as terminal:
        terminal.wait_for("> ", timeout_s=300)
        terminal.type("Write a very long story about a dragon and a lighthouse.\n")
        time.sleep(1.5)
        terminal.type(CTRL_C)
        assert "tokens, first after" not in terminal.wait_for("[stopped]")
        terminal.wait_for("> ")
        terminal.type("Say hello.\n")
        terminal.wait_for("tokens, first after", timeout_s=60)
        terminal.type("/exit\n")
        assert terminal.wait_exit() == 0


def test_chat_and_a_killed_program_leave_no_worker(tiny):
    with Terminal("chat", tiny) as terminal:
        terminal.wait_for("> ")
        workers = workers_of(terminal.process.pid)
        assert workers
        os.kill(terminal.process.pid, signal.SIGKILL)
        _gone, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


def test_ctrl_c_ends_a_fetch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("ENGINEHOUSE_CACHE", str(tmp_path / "cache"))
        for command in (("serve", "--port", "0"), ("chat",)):
            with Terminal(*command) as terminal:
                connection, _ = silent.accept()
                fetching = workers_of(terminal.process.pid)
                assert any("pip" in process.cmdline() for process in fetching), fetching
                terminal.type(CTRL_C)
                terminal.wait_exit(timeout_s=20)
                _gone, alive = psutil.wait_procs(fetching, timeout=5)
                assert not alive
                connection.close()
