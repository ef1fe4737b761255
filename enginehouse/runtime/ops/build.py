"""Compiles the C kernels for this machine at first use and keeps the result.

The library is cached under a hash of everything that decides its bytes: sources, flags, compiler version, processor
features. A file lock lets two processes start at once, an atomic rename keeps half-written files out, and a digest
beside the library catches damage before the loader would crash on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from enginehouse.errors import KernelBuildError

SOURCE_DIR = Path(__file__).parent / "kernels"
ISA_VARIABLE = "ENGINEHOUSE_KERNEL_ISA"
COMPILE_TIMEOUT_S = 300
COMMON_FLAGS = (
    "-std=gnu11",
    "-O3",
    # Multiply-adds are fused where the source says so and nowhere else: the same bits in every tile.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-pthread",
)
INSTALL_HINT = "install a C compiler (Debian, Ubuntu: `apt install gcc`; anywhere: `pip install ziglang`)"

_X86_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_X86_AVX512 = (*_X86_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
X86_ISAS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    # name: (compiler flags, features of /proc/cpuinfo it needs)
    "avx512vnni": (
        _X86_AVX512,
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c", "bmi2"}),
    ),
    "avxvnni": ((*_X86_AVX2, "-mavxvnni"), frozenset({"avx2", "fma", "f16c", "bmi2", "avx_vnni"})),
    "avx2": (_X86_AVX2, frozenset({"avx2", "fma", "f16c", "bmi2"})),
    "generic": ((), frozenset()),
}
ARM_ISAS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "neon-dotprod": (("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
    "neon": (("-march=armv8-a",), frozenset({"asimd"})),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: how to call it, and what it says its version is."""

    command: tuple[str, ...]
    version: str


def sources() -> list[Path]:
    """The C files to compile, in a fixed order."""
    return sorted(SOURCE_DIR.glob("*.c"))


def cpu_features() -> frozenset[str]:
    """The processor's feature names as Linux lists them; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def is_x86() -> bool:
    """Whether this interpreter runs on 64-bit x86."""
    return platform.machine().lower() in ("x86_64", "amd64")


def is_arm() -> bool:
    """Whether this interpreter runs on 64-bit Arm."""
    return platform.machine().lower() in ("aarch64", "arm64")


def runnable_isas() -> list[str]:
    """Instruction sets of the kernels that this processor can run, best first."""
    features = cpu_features()
    known = X86_ISAS if is_x86() else ARM_ISAS if is_arm() else {"generic": ((), frozenset())}
    return [name for name, (_, needed) in known.items() if needed <= features]


def isa_flags(isa: str) -> tuple[str, ...]:
    """Compiler flags for `isa`; "native" is whatever this processor offers."""
    if isa == "native":
        if is_x86():
            return ("-march=native",)
        # Apple's compiler targets the M1 when it is told nothing.
        return ("-mcpu=native",) if is_arm() and sys.platform != "darwin" else ()
    known = {**X86_ISAS, **ARM_ISAS}
    if isa not in known:
        raise KernelBuildError(f"unknown {ISA_VARIABLE} {isa!r}: use one of native, {', '.join(known)}")
    if isa not in runnable_isas():
        raise KernelBuildError(f"this processor cannot run {isa} kernels, only {', '.join(runnable_isas())}")
    return known[isa][0]


def compilers() -> Iterator[Compiler]:
    """C compilers of this machine: $CC alone if it is set, else cc, gcc, clang, and the `ziglang` package."""
    chosen = os.environ.get("CC")
    commands: list[tuple[str, ...]] = (
        [tuple(shlex.split(chosen))] if chosen else [("cc",), ("gcc",), ("clang",)]
    )
    if not chosen and importlib.util.find_spec("ziglang") is not None:
        commands.append((sys.executable, "-m", "ziglang", "cc"))
    for command in commands:
        if not command or shutil.which(command[0]) is None:
            continue
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            yield Compiler(command, answer.stdout)


def cache_dir() -> Path:
    """`$ENGINEHOUSE_CACHE` or ~/.cache/enginehouse; a private temporary folder where neither can be written."""
    base = Path(os.environ.get("ENGINEHOUSE_CACHE") or Path.home() / ".cache" / "enginehouse")
    directory = base / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("cannot write kernel cache %s (%s): compiling for this process only", directory, error)
        return Path(tempfile.mkdtemp(prefix="enginehouse-kernels-"))
    return directory


def build(isa: str | None = None) -> Path:
    """Path of the compiled library for `isa` (default: $ENGINEHOUSE_KERNEL_ISA, else "native").

    Raises KernelBuildError when there is no compiler or none of them succeeds; the message holds their output.
    """
    flags = (*COMMON_FLAGS, *isa_flags(isa or os.environ.get(ISA_VARIABLE) or "native"))
    directory = cache_dir()
    failures: list[str] = []
    for compiler in compilers():
        key = _cache_key(compiler, flags)
        library = directory / f"{key}.so"
        with _lock(directory / f"{key}.lock"):
            if _is_intact(library):
                return library
            try:
                _compile(compiler, flags, library)
            except KernelBuildError as error:
                failures.append(str(error))
                continue
            return library
    if not failures:
        raise KernelBuildError(f"no C compiler found: {INSTALL_HINT}")
    raise KernelBuildError("the C kernels did not compile:\n" + "\n".join(failures))


def _cache_key(compiler: Compiler, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    parts = [repr(compiler), repr(flags), platform.machine(), sys.platform, *sorted(cpu_features())]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_intact(library: Path) -> bool:
    try:
        expected = _digest_path(library).read_text()
        actual = hashlib.sha256(library.read_bytes()).hexdigest()
    except FileNotFoundError:
        return False
    if expected != actual:
        logger.warning("cached kernels %s are damaged: compiling them again", library)
    return expected == actual


def _compile(compiler: Compiler, flags: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        output = Path(temporary) / library.name
        command = [*compiler.command, *flags, "-shared", *map(str, sources()), "-o", str(output)]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise KernelBuildError(f"{shlex.join(command)} took over {COMPILE_TIMEOUT_S} s") from error
        if answer.returncode != 0:
            raise KernelBuildError(f"{shlex.join(command)}\n{answer.stderr[-4000:]}")
        # The digest goes first: a library without one is rebuilt, one with an old digest too.
        _digest_path(library).write_text(hashlib.sha256(output.read_bytes()).hexdigest())
        output.replace(library)
