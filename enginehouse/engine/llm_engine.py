"""The engine as its callers see it: prompts in, events out, whatever happens to the worker in between."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from enginehouse.engine.active_request import ActiveRequest, Choice
from enginehouse.engine.admission import Admission
from enginehouse.engine.crash_trials import CrashTrials
from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.engine.engine_config import EngineConfig
from enginehouse.engine.engine_loading import LoadedModel, load_model_in_background, plan_worker
from enginehouse.engine.events import EngineHealth, Event, Prompt
from enginehouse.engine.messages import (
    AbortSequences,
    EngineStats,
    Heartbeat,
    Loading,
    Preempt,
    Ready,
    Report,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    StepReport,
)
from enginehouse.engine.prompt_encoder import PromptEncoder
from enginehouse.engine.request_stream import RequestStream
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.sequence import sibling_params
from enginehouse.engine.stop_strings import StopStringChecker, StopStrings, check_stop_strings
from enginehouse.engine.structured_output_check import GrammarChecker
from enginehouse.engine.supervisor import Supervisor
from enginehouse.errors import (
    EnginehouseError,
    InvalidRequestError,
    NoCapacityError,
    QueueTimeoutError,
    SequenceFailedError,
    ShuttingDownError,
    WorkerDiedError,
)
from enginehouse.runtime.config import ModelConfig
from enginehouse.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TEXT_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

OnProgress = Callable[[str, float], None]
"""Called with what is being done ("download", "pack", "load") and how far it is, 0 to 1."""


class LLMEngine:
    """Serves one model through one worker process. Build it with `await LLMEngine.start(config)`.

    Owns every admitted request until it has ended in exactly one way: finished, aborted by its caller, or
    failed with an error. Holds prompt, parameters and emitted tokens, so that a new worker can go on where a
    dead one ended. All methods belong to one event loop.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self.config = config
        self.model_config: ModelConfig = model.config
        self.tokenizer: Tokenizer = model.tokenizer
        self.max_context = model.max_context
        """Tokens of prompt and output that fit."""
        self._encoder = PromptEncoder(model.tokenizer, model.max_context)
        self._grammars = GrammarChecker()
        max_sequences = config.batching.build().max_sequences
        self._admission = Admission(max_sequences, config.max_waiting, time.monotonic)
        self._stats = EngineStats()
        self._requests: dict[SequenceId, tuple[ActiveRequest, Choice]] = {}
        self._trials = CrashTrials(max_sequences, self._requests.__contains__)
        self._nothing_left = asyncio.Event()
        self._nothing_left.set()
        self._is_closing = False
        self._next_id = itertools.count(1)
        self._resumed_total = 0
        self._supervisor = Supervisor(
            plan_worker(config, model),
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            load_timeout_s=config.load_timeout_s,
            max_restarts=config.max_restarts,
            on_report=self._on_report,
            on_death=self._on_death,
            on_restarted=self._on_restarted,
            on_failed=self._fail_all,
        )
        self._on_progress: OnProgress | None = None

    @classmethod
    async def start(cls, config: EngineConfig, *, on_progress: OnProgress | None = None) -> LLMEngine:
        """Fetch, pack and load the model, as far as that is not done yet, and return a ready engine.

        Raises `ModelError` for a model that cannot be used and `ModelLoadFailedError` for a worker that does not
        come up. Cancelling leaves no process behind.
        """
        config.check()
        model = await load_model_in_background(config, on_progress)
        engine = cls(config, model)
        engine._on_progress = on_progress
        try:
            await engine._supervisor.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def model_id(self) -> str:
        """The name callers know the model by."""
        return self.config.model_id

    @property
    def info(self) -> Ready:
        """What the worker said when it was ready: threads, kernels, KV memory."""
        if self._supervisor.ready is None:
            raise NoCapacityError("The model is not loaded.")
        return self._supervisor.ready

    # Requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop: tuple[str, ...] = (),
        n: int = 1,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[Event]:
        """`submit`, and yield the events. Leaving the iteration, or cancelling its task, aborts the request."""
        stream = await self.submit(
            prompt,
            params,
            stop=stop,
            n=n,
            request_id=request_id,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
        )
        async with stream:
            async for event in stream:
                yield event

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stop: tuple[str, ...] = (),
        n: int = 1,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        visible_special: frozenset[int] = frozenset(),
    ) -> RequestStream:
        """Admit a request; its events are in the stream that is returned.

        `stop`: strings that end the output and do not appear in it. `n`: choices, sharing the prompt's
        computation; choice 0 is what n = 1 gives with the same seed. `deadline_s`: `time.monotonic()` after
        which the answer is no longer wanted. `params.eos_token_ids` empty means the model's own. `visible_special`:
        special tokens whose name is part of the text.

        Raises `InvalidRequestError`, `ContextLengthExceededError`, `TemplateError`, `QueueFullError` (with
        `retry_after_s`), `NoCapacityError` or `ShuttingDownError` before anything is computed.
        """
        params.check(self.model_config.vocab_size)
        if n < 1:
            raise InvalidRequestError(f"n must be at least 1, not {n}.", param="n")
        check_stop_strings(stop)
        self._check_open()
        self._admission.reserve(n)
        try:
            if params.grammar is not None:
                await self._grammars.check(params.grammar)
            tokens = await self._encoder.encode(prompt)
            params = self._complete(params, num_prompt_tokens=len(tokens))
            self._check_open()
        except BaseException:
            self._admission.give_back(n)
            raise
        request = self._open_request(
            tokens, params, stop, n, request_id, tenant, priority, deadline_s, visible_special
        )
        if not self._trials.is_on:  # else it is sent when they are over
            self._supervisor.send(request.first_message())
        return request.stream

    def check_capacity(self, num_sequences: int) -> None:
        """Raise as `submit` would if `num_sequences` choices, of one prompt or of several, were submitted now:
        `QueueFullError`, or `InvalidRequestError` when so many never fit."""
        self._admission.check(num_sequences)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `submit` would compute them. Raises as `submit` does on a bad prompt."""
        return await self._encoder.encode(prompt)

    def _check_open(self) -> None:
        if self._is_closing:
            raise ShuttingDownError("The server is shutting down.")
        if self._supervisor.state == "failed":
            raise NoCapacityError(
                f"The model's worker is dead: {self._supervisor.detail}", retry_after_s=120.0
            )

    def _complete(self, params: SamplingParams, *, num_prompt_tokens: int) -> SamplingParams:
        """Fill in what the caller left open: end tokens, seed, and the room that the context leaves."""
        room = self.max_context - num_prompt_tokens
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return msgspec.structs.replace(
            params,
            max_tokens=min(params.max_tokens, room),
            min_tokens=min(params.min_tokens, room),
            eos_token_ids=params.eos_token_ids or tuple(self.tokenizer.eos_token_ids),
            seed=seed,
        )

    def _open_request(
        self,
        tokens: list[int],
        params: SamplingParams,
        stop: tuple[str, ...],
        n: int,
        request_id: str | None,
        tenant: str,
        priority: int,
        deadline_s: float | None,
        visible_special: frozenset[int],
    ) -> ActiveRequest:
        arrival_s = time.monotonic()
        ids = [SequenceId(next(self._next_id)) for _ in range(n)]
        stream = RequestStream(
            request_id=request_id or f"req-{secrets.token_hex(8)}",
            sequence_ids=ids,
            prompt_token_ids=tokens,
            on_abort=functools.partial(self._abort, ids),
        )
        request = ActiveRequest(stream=stream, tenant=tenant, priority=priority, deadline_s=deadline_s)
        stop_strings = StopStrings(stop)
        for index, sequence_id in enumerate(ids):
            choice = Choice(
                index=index,
                sequence_id=sequence_id,
                params=sibling_params(params, index),
                num_prompt_tokens=len(tokens),
                detokenizer=Detokenizer(
                    self.tokenizer, prompt_tokens=tokens, visible_special=visible_special
                ),
                stop_strings=StopStringChecker(stop_strings),
                arrival_s=arrival_s,
            )
            request.choices.append(choice)
            self._requests[sequence_id] = (request, choice)
            self._nothing_left.clear()
        return request

    # Ends -----------------------------------------------------------------------------------------------------

    def _abort(self, sequence_ids: list[SequenceId]) -> None:
        """Forget sequences and free what the worker holds for them; those that have ended are ignored."""
        known = [sequence_id for sequence_id in sequence_ids if sequence_id in self._requests]
        if known:
            self._supervisor.send(AbortSequences(sequence_ids=known))
            self._forget(known)

    def _forget(self, sequence_ids: list[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            del self._requests[sequence_id]
        self._admission.release(len(sequence_ids))
        if not self._requests:
            self._nothing_left.set()
        self._settle(sequence_ids)

    def _fail(self, request: ActiveRequest, error: EnginehouseError) -> None:
        self._abort([choice.sequence_id for choice in request.choices])
        request.stream.fail(error)

    def _fail_all(self, error: EnginehouseError) -> None:
        for request, choice in list(self._requests.values()):
            if choice.sequence_id in self._requests:
                self._fail(request, error)

    # Worker ---------------------------------------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self._stats = report.stats
            for output in report.outputs:
                self._on_output(output)
            for failure in report.failed:
                self._on_failure(failure)
        elif isinstance(report, Heartbeat):
            self._stats = report.stats
        elif isinstance(report, Loading) and self._on_progress is not None:
            self._on_progress("load", report.progress)

    def _on_output(self, output: SequenceOutput) -> None:
        entry = self._requests.get(output.sequence_id)
        if entry is None:  # aborted while the step was running
            return
        request, choice = entry
        request.num_crashes = 0
        is_cut = self._trials.tries(output.sequence_id) and output.finish_reason == "length"
        if is_cut and len(choice.output_tokens) + len(output.tokens) < choice.params.max_tokens:
            output = msgspec.structs.replace(output, finish_reason=None)
        try:
            events = choice.apply(output, time.monotonic())
        except _TEXT_FAULTS as error:
            # A mistake of ours that one output brought to light must not reach the other requests.
            logger.exception("request %s: turning tokens into text failed", request.stream.request_id)
            self._fail(request, SequenceFailedError(f"Turning tokens into text failed: {error}"))
            return
        for event in events:
            request.stream.push(event)
        if choice.is_finished:
            self._forget([output.sequence_id])
            self._supervisor.note_progress()
            if output.finish_reason is None:  # a stop string, which the worker knows nothing of
                self._supervisor.send(AbortSequences(sequence_ids=[output.sequence_id]))
        elif is_cut:
            self._settle([output.sequence_id])

    def _on_failure(self, failure: SequenceFailed) -> None:
        entry = self._requests.get(failure.sequence_id)
        if entry is not None:
            error = _ERROR_BY_CODE.get(failure.code, SequenceFailedError)(failure.message)
            if isinstance(error, QueueTimeoutError):
                error.retry_after_s = self._admission.retry_after_s(len(entry[0].choices))
            self._fail(entry[0], error)

    def _on_death(self, error: WorkerDiedError) -> None:
        guilty = self._trials.died(self._unfinished_requests())
        if guilty is not None:
            self._fail(guilty, error)

    def _on_restarted(self) -> None:
        """Give the new worker the next request to try, or, when none is left to try, all of them."""
        messages = self._trials.next()
        if not messages:
            messages = [message for one in self._unfinished_requests() for message in one.resume_messages()]
            self._resumed_total += sum(1 + len(message.sibling_ids) for message in messages)
        for message in messages:
            self._supervisor.send(message)

    def _settle(self, sequence_ids: list[SequenceId]) -> None:
        if any(self._trials.settle(sequence_id) for sequence_id in sequence_ids):
            self._on_restarted()

    def _unfinished_requests(self) -> list[ActiveRequest]:
        return list({id(request): request for request, _ in self._requests.values()}.values())

    # State ----------------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Make the worker drop what it has computed of the running sequences and compute it again."""
        self._supervisor.send(Preempt())

    def stats(self) -> EngineStats:
        """The worker's latest gauges and counters (counters start again with a new worker)."""
        return self._stats

    def health(self) -> EngineHealth:
        """The truth about the engine at this moment."""
        last_report_s = self._supervisor.last_report_s
        return EngineHealth(
            state=self._supervisor.state,
            detail=self._supervisor.detail,
            last_report_age_s=None if last_report_s is None else time.monotonic() - last_report_s,
            num_unfinished=self._admission.num_unfinished,
            worker_pid=self._supervisor.pid,
            restarts_total=self._supervisor.restarts_total,
            resumed_sequences_total=self._resumed_total,
        )

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `grace_s`, fail the rest with `ShuttingDownError`, and
        end the worker. Safe to call twice."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._nothing_left.wait()
        self._fail_all(ShuttingDownError("The server is shutting down."))
        await self._supervisor.close()
        self._grammars.close()


def _error_classes(base: type[EnginehouseError]) -> list[type[EnginehouseError]]:
    return [base, *(kind for child in base.__subclasses__() for kind in _error_classes(child))]


_ERROR_BY_CODE = {kind.code: kind for kind in _error_classes(EnginehouseError) if kind.code is not None}
