"""Numeric operations of the models: a numpy reference and C kernels with the same signatures."""

from __future__ import annotations

import logging
from typing import Literal

from enginehouse.errors import KernelBuildError
from enginehouse.runtime.ops.interface import Ops, Rope
from enginehouse.runtime.ops.layout import (
    BLOCK,
    GROUP,
    LAYOUT_VERSION,
    Activation,
    AttentionBatch,
    KVLayer,
    KVMemory,
    LinearWeight,
    Tensor,
    pack_linear,
    unpack_linear,
)
from enginehouse.runtime.ops.native import NativeOps
from enginehouse.runtime.ops.reference import NumpyOps

__all__ = [
    "BLOCK",
    "GROUP",
    "LAYOUT_VERSION",
    "Activation",
    "AttentionBatch",
    "KVLayer",
    "KVMemory",
    "Kernels",
    "LinearWeight",
    "NativeOps",
    "NumpyOps",
    "Ops",
    "Rope",
    "Tensor",
    "load",
    "pack_linear",
    "unpack_linear",
]

Kernels = Literal["auto", "numpy", "native"]
logger = logging.getLogger(__name__)


def load(num_threads: int, kernels: Kernels = "auto") -> Ops:
    """The operations to compute with.

    "native" compiles the C kernels for this machine (cached) and raises KernelBuildError when that fails; "auto"
    falls back to numpy then, with a warning; "numpy" is the reference.
    """
    if kernels == "numpy":
        return NumpyOps(num_threads)
    try:
        return NativeOps(num_threads)
    except KernelBuildError as error:
        if kernels == "native":
            raise
        logger.warning(
            "C kernels are not available, computing with numpy: EXPECT 10 TO 50 TIMES LESS SPEED. %s", error
        )
        return NumpyOps(num_threads)
