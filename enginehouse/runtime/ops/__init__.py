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
    if kernels == "native":
        raise KernelBuildError("the C kernels are not part of this build")
    return NumpyOps(num_threads)
