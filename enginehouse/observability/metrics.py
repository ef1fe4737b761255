"""Prometheus metrics of the API process. Histograms and counters are ours; gauges are read at scrape time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from enginehouse.observability.records import RequestRecord

# Series of creation times double what a scrape costs and say nothing that the counters do not.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """One model at the moment of a scrape; counters are since its worker started."""

    model: str
    state: str
    load_s: float | None = None
    resident_bytes: int | None = None
    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    computed_tokens_total: int = 0
    worker_restarts_total: int = 0
    resumed_sequences_total: int = 0
    last_step_s: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that running sequences hold, 0 to 1."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


class Metrics:
    """Owns the registry. `snapshots` is called at each scrape and must be cheap."""

    def __init__(self, snapshots: Callable[[], Iterable[ModelSnapshot]]) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Inference requests that ended.", "status", "reason")
        self._refusals = self._counter("refusals", "Requests refused before they ran.", "reason")
        self._tokens = self._counter("tokens", "Tokens of ended requests.", "kind", route=False)
        self._request_s = self._histogram("request_seconds", "Seconds from arrival to the last byte.")
        self._queue_s = self._histogram("queue_seconds", "Seconds from arrival to the first step.")
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token."
        )
        self._inter_token_s = self._histogram(
            "inter_token_seconds", "Seconds between two deliveries of tokens of a choice.", _TOKEN_SECONDS
        )
        self.registry.register(_ModelCollector(snapshots))
        ProcessCollector(registry=self.registry)
        tasks = Gauge(
            "enginehouse_event_loop_tasks",
            "Tasks of the API process, the one that answers this scrape included.",
            registry=self.registry,
        )
        tasks.set_function(lambda: len(asyncio.all_tasks()))

    def _counter(self, name: str, text: str, *labels: str, route: bool = True) -> Counter:
        names = ("model", "route", *labels) if route else ("model", *labels)
        return Counter(f"enginehouse_{name}", text, names, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"enginehouse_{name}", text, ("model",), buckets=buckets, registry=self.registry)

    def inter_token(self, model: str) -> Callable[[float], None]:
        """A function that records the gap between two tokens; looked up once a stream, not once a token."""
        observe: Callable[[float], None] = self._inter_token_s.labels(model).observe
        return observe

    def record(self, record: RequestRecord) -> None:
        """Count an ended request."""
        model, reason = record.model, record.error_type or record.outcome
        self._requests.labels(model, record.route, str(record.status), reason).inc()
        if record.outcome == "refused":
            self._refusals.labels(model, record.route, reason).inc()
        for kind in ("input", "cached", "output"):
            self._tokens.labels(model, kind).inc(getattr(record, f"{kind}_tokens"))
        for histogram, seconds in (
            (self._request_s, record.e2e_s),
            (self._queue_s, record.queue_s),
            (self._first_token_s, record.time_to_first_token_s),
        ):
            if seconds is not None:
                histogram.labels(model).observe(seconds)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)


MODEL_STATES = ("UNLOADED", "LOADING", "READY", "ACTIVE", "EVICTING", "ERROR")

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("enginehouse_running_sequences", "Sequences in the running batch.", "num_running"),
    ("enginehouse_waiting_sequences", "Sequences in the queue.", "num_waiting"),
    ("enginehouse_last_step_seconds", "Seconds the latest step took.", "last_step_s"),
    ("enginehouse_model_load_seconds", "Seconds the latest load took.", "load_s"),
    ("enginehouse_model_resident_bytes", "Bytes of weights and KV cache.", "resident_bytes"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("enginehouse_steps", "Forward passes.", "steps_total"),
    ("enginehouse_computed_tokens", "Tokens that went through the model.", "computed_tokens_total"),
    ("enginehouse_prefix_hit_tokens", "Prompt tokens found in the cache.", "prefix_hit_tokens_total"),
    ("enginehouse_preemptions", "Sequences taken out of the cache to be recomputed.", "preemptions_total"),
    ("enginehouse_worker_restarts", "Times a dead worker was replaced.", "worker_restarts_total"),
    ("enginehouse_resumed_sequences", "Sequences that went on in a new worker.", "resumed_sequences_total"),
)
# Routers and dashboards made for vLLM look for these names.
_VLLM_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("vllm:num_requests_running", "Alias of enginehouse_running_sequences.", "num_running"),
    ("vllm:num_requests_waiting", "Alias of enginehouse_waiting_sequences.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
)


class _ModelCollector:
    def __init__(self, snapshots: Callable[[], Iterable[ModelSnapshot]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        models = list(self._snapshots())
        for label, table in (("model", _GAUGES), ("model_name", _VLLM_GAUGES)):
            for name, text, attribute in table:
                gauge = GaugeMetricFamily(name, text, labels=(label,))
                for model in models:
                    value = getattr(model, attribute)
                    if value is not None:
                        gauge.add_metric((model.model,), value)
                yield gauge
        for name, text, attribute in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model",))
            for model in models:
                counter.add_metric((model.model,), getattr(model, attribute))
            yield counter
        blocks = GaugeMetricFamily("enginehouse_kv_blocks", "KV blocks by state.", labels=("model", "state"))
        states = GaugeMetricFamily(
            "enginehouse_model_state", "1 for the state a model is in.", labels=("model", "state")
        )
        for model in models:
            free = model.blocks_total - model.blocks_used - model.blocks_cached
            for state, count in (
                ("free", free),
                ("used", model.blocks_used),
                ("cached", model.blocks_cached),
            ):
                blocks.add_metric((model.model, state), count)
            for state in MODEL_STATES:
                states.add_metric((model.model, state), float(state == model.state))
        yield blocks
        yield states
