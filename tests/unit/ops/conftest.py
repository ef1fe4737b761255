from __future__ import annotations

import functools

import pytest

from enginehouse.runtime.ops import NativeOps, NumpyOps, build


@functools.cache
def native(isa: str, num_threads: int) -> NativeOps:
    return NativeOps(num_threads, isa=isa)


def fused_isas() -> list[str]:
    """Instruction sets of this machine that have fused multiply-add: they must agree bit for bit."""
    return [isa for isa in build.runnable_isas() if isa != "generic"]


@pytest.fixture(params=build.runnable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> NativeOps:
    return native(isa, 2)


@pytest.fixture
def reference() -> NumpyOps:
    return NumpyOps()
