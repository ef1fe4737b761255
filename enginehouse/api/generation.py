"""One generation request on the engine: prompts in, deltas out, the same for streamed and unstreamed answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from enginehouse.api.token_texts import TokenText, TokenTexts
from enginehouse.engine.events import Event, Finished, Prompt, Started, TokenEvent
from enginehouse.engine.messages import FinishReason, SequenceId, TokenLogprob
from enginehouse.engine.request_stream import RequestStream
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.errors import InvalidRequestError
from enginehouse.observability.records import RequestRecord
from enginehouse.settings import ModelSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

Bind = Callable[["GenerationCall", "LLMEngine", ModelSettings], "GenerationCall"]

_NO_SEQUENCE = SequenceId(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """What a route asks of the engine. Choices are numbered `prompt * n + i`."""

    prompts: list[Prompt]
    prompts_field: str = "prompt"
    """Where a request has them, for errors."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    model: str | None = None
    stream: bool = False
    priority: int = 0
    timeout_s: float | None = None
    wants_tokens: bool = False
    """Whether deltas say which token wrote which part of the text."""
    visible_special: frozenset[int] = frozenset()
    """Special tokens whose name is part of the text."""
    bind: Bind | None = None
    """Makes the final call, for routes whose prompt or parameters depend on the model that serves it."""


class Delta(msgspec.Struct):
    """News of one choice. The first delta of a choice has `started`, the last has `finished`."""

    index: int
    sequence_id: SequenceId
    text: str = ""
    tokens: list[TokenText] = []
    """With `wants_tokens`: the tokens whose text is now complete."""
    silent_tokens: int = 0
    """With `wants_tokens`, in the last delta: tokens that count but wrote nothing that may be shown."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    started: bool = False
    finished: Finished | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request: each prompt once, every choice's output."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice put together from its deltas."""

    index: int
    sequence_id: SequenceId = _NO_SEQUENCE
    parts: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None
    num_output_tokens: int = 0

    @property
    def text(self) -> str:
        """The joined text."""
        return "".join(self.parts)

    def mean_logprob(self) -> float:
        """Log-probability per token, by which candidates are compared; the tokens must have theirs."""
        values = [token.logprob.logprob for token in self.tokens if token.logprob is not None]
        return sum(values) / len(values) if values else 0.0

    def add(self, delta: Delta) -> None:
        """Take one delta in, in order."""
        self.sequence_id = delta.sequence_id
        self.parts.append(delta.text)
        self.tokens += delta.tokens
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finished is not None:
            self.finish_reason = delta.finished.reason
            self.stop_reason = delta.finished.stop_reason
            self.num_output_tokens = delta.finished.num_output_tokens


class Generation:
    """A running request. `submit` admits it, then `deltas` is read once to its end; leaving early, by any way,
    aborts what is left. Keeps `usage` and the moments of `record` up to date."""

    def __init__(
        self, engine: LLMEngine, call: GenerationCall, record: RequestRecord, *, tenant: str = ""
    ) -> None:
        self.engine = engine
        self.call = call
        self.usage = Usage()
        self.streams: list[RequestStream] = []
        """One per prompt."""
        self._record = record
        self._tenant = tenant
        self._texts: dict[int, TokenTexts] = {}

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self.call.prompts) * self.call.n

    @property
    def num_described_tokens(self) -> int:
        """Tokens whose log-probabilities the whole answer says, each time it says them."""
        num_tokens = self.usage.completion_tokens if self.call.wants_tokens else 0
        if self.call.params.prompt_logprobs is not None:
            num_tokens += self.usage.prompt_tokens * self.call.n
        return num_tokens

    def _check_capacity(self) -> None:
        try:
            self.engine.check_capacity(self.num_choices)
        except InvalidRequestError as error:
            error.param = "n" if self.call.n > 1 else self.call.prompts_field
            raise

    async def submit(self) -> None:
        """Admit every prompt or none. Raises what `LLMEngine.submit` raises."""
        call = self.call
        deadline_s = None if call.timeout_s is None else self._record.arrival_s + call.timeout_s
        self._check_capacity()
        try:
            for prompt in call.prompts:
                stream = await self.engine.submit(
                    prompt,
                    call.params,
                    stop=call.stop,
                    n=call.n,
                    request_id=self._record.request_id,
                    tenant=self._tenant,
                    priority=call.priority,
                    deadline_s=deadline_s,
                    visible_special=call.visible_special,
                )
                self.streams.append(stream)
                self.usage.prompt_tokens += stream.num_prompt_tokens
        except BaseException:
            self.abort()
            raise
        self._record.input_tokens = self.usage.prompt_tokens
        self._record.queue_start_s = time.monotonic()

    def abort(self) -> None:
        """Stop what still runs; harmless when nothing does."""
        for stream in self.streams:
            stream.abort()

    async def deltas(self, observe_gap: Callable[[float], None]) -> AsyncGenerator[Delta]:
        """Deltas of all choices, interleaved. `observe_gap` gets the seconds between two tokens of a choice.

        Raises the engine's error when the request fails.
        """
        last_s: dict[int, float] = {}
        try:
            async with aclosing(_merged(self.streams)) as events:
                async for prompt_index, event in events:
                    index = prompt_index * self.call.n + event.index
                    if isinstance(event, TokenEvent):
                        now_s = time.monotonic()
                        if index in last_s:
                            observe_gap(now_s - last_s[index])
                        last_s[index] = self._record.last_token_s = now_s
                        yield self._token_delta(index, event)
                    elif isinstance(event, Started):
                        yield self._start_delta(index, event)
                    else:
                        yield self._finish_delta(index, event)
        finally:
            self.abort()

    def _start_delta(self, index: int, event: Started) -> Delta:
        if event.index == 0:
            self.usage.cached_tokens += event.cached_tokens
            self._record.cached_tokens = self.usage.cached_tokens
        if self.call.wants_tokens:
            prompt_tokens = self.streams[index // self.call.n].prompt_token_ids
            self._texts[index] = TokenTexts(
                self.engine.tokenizer, prompt_tokens, visible_special=self.call.visible_special
            )
        record = self._record
        record.inference_start_s = min(record.inference_start_s or event.started_s, event.started_s)
        record.first_token_s = record.first_token_s or time.monotonic()
        return Delta(index, event.sequence_id, started=True)

    def _token_delta(self, index: int, event: TokenEvent) -> Delta:
        self._record.output_tokens += len(event.token_ids)
        delta = Delta(index, event.sequence_id, event.text, prompt_logprobs=event.prompt_logprobs)
        if self.call.wants_tokens:
            texts = self._texts[index]
            texts.push(event.token_ids, event.logprobs)
            delta.tokens = texts.release(event.text)
        return delta

    def _finish_delta(self, index: int, event: Finished) -> Delta:
        self.usage.completion_tokens += event.num_output_tokens
        record, timing = self._record, event.timing
        record.output_tokens = max(record.output_tokens, self.usage.completion_tokens)
        record.first_token_s = min(record.first_token_s or timing.first_token_s, timing.first_token_s)
        record.last_token_s = max(record.last_token_s or 0.0, timing.finished_s)
        record.finish_reasons.append(event.reason)
        delta = Delta(index, event.sequence_id, finished=event)
        if self.call.wants_tokens:
            delta.tokens, silent = self._texts[index].finish()
            delta.silent_tokens = len(silent)
        return delta


async def _merged(streams: list[RequestStream]) -> AsyncGenerator[tuple[int, Event]]:
    """Events of several prompts as they come, each with its prompt's number."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(number: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                await queue.put((number, event))
        except Exception as error:  # noqa: BLE001 - carried to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
