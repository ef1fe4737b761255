"""Builds the C kernels for the platforms we support but do not stand on, and runs the Arm ones in an emulator.

    python scripts/cross_compile.py

Needs the `ziglang` package (the extra `compiler`), whose compiler carries the headers and libraries of every target.
The self-test program is run on this machine and, for Arm with and without the dot-product instructions, under
qemu-user, which is installed with apt where that is possible. All must print the same hash of their results.
Without an emulator the runs are skipped with a message; builds that fail, wrong results or a different hash end with
status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from enginehouse.runtime.ops import build

SELF_TEST = Path(__file__).with_name("cross_compile_selftest.c")
FLAGS = [flag for flag in build.COMMON_FLAGS if flag != "-pthread"]


@dataclass(frozen=True)
class Target:
    """A platform and processor, in zig's names."""

    triple: str
    cpu: str
    isa: str
    """The kernels this must give."""

    @property
    def baseline(self) -> str:
        """The processor libc is built for: the same for all of a platform, so that it is built once."""
        return "apple_m1" if "macos" in self.triple else "baseline"


# musl, because building it takes seconds and glibc's stubs take a minute; the kernels use nothing special of either.
X86 = Target("x86_64-linux-musl", "x86_64_v3", "avx2")
ARM = [
    Target("aarch64-linux-musl", "cortex_a72", "neon"),
    Target("aarch64-linux-musl", "cortex_a76", "neon-dotprod"),
]
MAC = Target("aarch64-macos", "apple_m1", "neon-dotprod")


def zig(*arguments: str) -> None:
    """Run zig's C compiler; a failure ends the script with the compiler's own words."""
    command = [sys.executable, "-m", "ziglang", "cc", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)}\n{answer.stderr}")


def compile_sources(target: Target, directory: Path) -> dict[str, str]:
    """Source's name to object file, for the kernels and the self-test."""
    sources = [*build.sources(), SELF_TEST]
    objects = {
        source.stem: str(directory / f"{target.triple}-{target.cpu}-{source.stem}.o") for source in sources
    }

    def compile_one(source: Path) -> None:
        zig(
            "-target", target.triple, f"-mcpu={target.cpu}", *FLAGS, "-c", str(source), "-o", objects[source.stem]
        )  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))
    return objects


def link_library(target: Target, objects: dict[str, str], directory: Path) -> None:
    kernels = [path for name, path in objects.items() if name != SELF_TEST.stem]
    output = directory / f"{target.triple}-{target.cpu}.library"
    zig("-target", target.triple, f"-mcpu={target.baseline}", "-shared", "-s", *kernels, "-o", str(output))
    print(f"built the library for {target.triple}, {target.cpu}: {output.stat().st_size} bytes")


def build_self_test(target: Target, directory: Path) -> Path:
    """The static self-test program of a platform, after its library."""
    objects = compile_sources(target, directory)
    link_library(target, objects, directory)
    output = directory / f"selftest-{target.cpu}"
    zig("-target", target.triple, "-mcpu=baseline", "-static", *objects.values(), "-lm", "-o", str(output))
    return output


def run_self_test(command: list[str]) -> tuple[str, str]:
    """(instruction set, hash) that the program reports; wrong results end the script."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    print("  " + answer.stdout.strip().replace("\n", "\n  "))
    if answer.returncode != 0:
        sys.exit(f"FAILED: {' '.join(command)} returned {answer.returncode}\n{answer.stderr}")
    isa, digest, _ = answer.stdout.split()
    return isa, digest


def find_emulator() -> str | None:
    """Path of qemu for 64-bit Arm, installing it if this machine lets us; None with a message otherwise."""
    if found := shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static"):
        return found
    if shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "qemu-user"], check=False, stdout=subprocess.DEVNULL
        )
    found = shutil.which("qemu-aarch64")
    if found is None:
        print("SKIPPED: the Arm kernels were built but NOT RUN, because qemu-user could not be installed")
    return found


def check(target: Target, command: list[str], expected: str | None) -> str:
    """Run a self-test and compare; returns its hash."""
    isa, digest = run_self_test(command)
    if isa != target.isa:
        sys.exit(f"FAILED: expected {target.isa} kernels, the program has {isa}")
    if expected is not None and digest != expected:
        sys.exit(f"FAILED: {isa} gives {digest}, not {expected}: results differ between processors")
    return digest


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    if importlib.util.find_spec("ziglang") is None:
        sys.exit("FAILED: no ziglang package: pip install 'enginehouse[compiler]'")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        link_library(MAC, compile_sources(MAC, directory), directory)
        host_program = build_self_test(X86, directory)
        arm_programs = [build_self_test(target, directory) for target in ARM]
        expected = None
        if "avx2" in build.runnable_isas() and sys.platform == "linux":
            expected = check(X86, [str(host_program)], None)
        emulator = find_emulator()
        if emulator is not None:
            for target, program in zip(ARM, arm_programs, strict=True):
                expected = check(target, [emulator, str(program)], expected)


if __name__ == "__main__":
    main()
