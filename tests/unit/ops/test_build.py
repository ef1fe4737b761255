from __future__ import annotations

import concurrent.futures
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginehouse.errors import KernelBuildError
from enginehouse.runtime import ops
from enginehouse.runtime.ops import LinearWeight, NativeOps, NumpyOps, Tensor, build
from tests.unit.ops.conftest import native


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINEHOUSE_CACHE", str(tmp_path))
    monkeypatch.delenv(build.ISA_VARIABLE, raising=False)
    # What is built does not matter here, only when: optimising takes most of the time.
    flags = tuple("-O0" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)
    monkeypatch.setattr(build, "COMMON_FLAGS", flags)
    return tmp_path / "kernels"


def product(kernels: NativeOps, seed: int = 0) -> np.ndarray:
    """A linear layer large enough to be shared between threads."""
    rng = np.random.default_rng(seed)
    weight = LinearWeight.from_float(rng.standard_normal((800, 128), dtype=np.float32), "int8")
    x, a, out = Tensor(8, 128), kernels.activation(8, 128, "int8"), Tensor(8, 800)
    x.array[:] = rng.standard_normal((8, 128))
    kernels.prepare(x, a, 8)
    kernels.linear(a, weight, out, 8)
    return out.array


def test_the_second_build_compiles_nothing(cache, monkeypatch):
    library = build.build("generic")
    assert library.parent == cache
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.build("generic") == library


def test_instruction_sets_have_libraries_of_their_own(cache):
    assert len({build.build(isa) for isa in build.runnable_isas()}) == len(build.runnable_isas())


def test_a_damaged_library_is_compiled_again(cache, caplog):
    library = build.build("generic")
    good = library.read_bytes()
    library.write_bytes(good[: len(good) // 2])
    with caplog.at_level(logging.WARNING):
        assert build.build("generic") == library
    assert library.read_bytes() == good
    assert "damaged" in caplog.text


def test_two_processes_may_build_at_once(cache):
    command = [
        sys.executable,
        "-c",
        "from enginehouse.runtime.ops import build; print(build.build('generic'))",
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [answer.returncode for answer in answers] == [0, 0]
    assert len({answer.stdout for answer in answers}) == 1
    assert len(list(cache.glob("*.so"))) == 1


def test_the_environment_chooses_the_instruction_set(cache, monkeypatch):
    monkeypatch.setenv(build.ISA_VARIABLE, build.runnable_isas()[-1])
    assert NativeOps(1).isa == build.runnable_isas()[-1]
    monkeypatch.setenv(build.ISA_VARIABLE, "sse9")
    with pytest.raises(KernelBuildError, match="unknown"):
        NativeOps(1)


def test_an_instruction_set_the_processor_lacks_is_refused(cache):
    foreign = "neon" if build.is_x86() else "avx2"
    with pytest.raises(KernelBuildError, match="cannot run"):
        NativeOps(1, isa=foreign)


def test_without_a_compiler_numpy_computes_and_says_so(cache, monkeypatch, caplog):
    monkeypatch.setattr(build, "compilers", lambda: iter(()))
    with caplog.at_level(logging.WARNING):
        assert isinstance(ops.load(1, "auto"), NumpyOps)
    assert "pip install ziglang" in caplog.text
    with pytest.raises(KernelBuildError, match="no C compiler"):
        ops.load(1, "native")


def test_a_failing_compiler_is_quoted(cache, monkeypatch):
    monkeypatch.setattr(build, "compilers", lambda: iter([build.Compiler(("false",), "broken 1.0")]))
    with pytest.raises(KernelBuildError, match="did not compile"):
        ops.load(1, "native")


def test_the_next_compiler_is_tried_when_one_fails(cache, monkeypatch):
    compilers = [build.Compiler(("false",), "broken"), *build.compilers()]
    monkeypatch.setattr(build, "compilers", lambda: iter(compilers))
    assert build.build("generic").exists()


def test_cc_is_used_alone_when_it_is_set(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O7")
    assert list(build.compilers()) == []


def test_numpy_can_be_asked_for():
    assert isinstance(ops.load(2, "numpy"), NumpyOps)


# --- The thread pool ---------------------------------------------------------------------------------------


def test_threads_can_be_stopped_and_start_again(isa):
    kernels = native(isa, 2)
    expected = product(kernels)
    for _ in range(20):
        kernels.stop_threads()
        assert (product(kernels) == expected).all()


def test_more_threads_than_processors_give_the_same_bits(isa):
    kernels = native(isa, 7)
    expected = product(native(isa, 1))
    for _ in range(50):
        assert (product(kernels) == expected).all()
    kernels.stop_threads()


def test_two_python_threads_at_once_do_not_disturb_each_other(isa):
    kernels = native(isa, 2)
    expected = [product(native(isa, 1), seed) for seed in range(4)]

    def work(seed: int) -> bool:
        return all((product(kernels, seed) == expected[seed]).all() for _ in range(30))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own(isa):
    kernels = native(isa, 2)
    expected = product(kernels)
    child = os.fork()
    if child == 0:
        os._exit(0 if (product(kernels) == expected).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_idle_threads_use_no_processor_time():
    script = (
        "import time, numpy as np\n"
        "from tests.unit.ops.test_build import product\n"
        "from enginehouse.runtime.ops import NativeOps\n"
        "ops = NativeOps(2, isa='generic'); product(ops); time.sleep(0.1)\n"
        "start = time.process_time(); time.sleep(0.5)\n"
        "print(time.process_time() - start)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 0.02
