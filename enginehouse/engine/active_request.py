"""What the API process holds of a running request: enough to answer its client and to start it again."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from enginehouse.engine.detokenizer import Detokenizer
from enginehouse.engine.events import Event, Finished, Started, Timing, TokenEvent
from enginehouse.engine.messages import AddSequence, FinishReason, SequenceId, SequenceOutput, TokenLogprob
from enginehouse.engine.request_stream import RequestStream
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.engine.stop_strings import StopStringChecker


class Choice:
    """One of a request's n outputs: turns what the worker emits into events.

    Owns the tokens emitted so far and the text state that belongs to them (a partial character, a possible
    beginning of a stop string), so that nothing has to be repeated when the sequence moves to a new worker.
    """

    def __init__(
        self,
        *,
        index: int,
        sequence_id: SequenceId,
        params: SamplingParams,
        num_prompt_tokens: int,
        detokenizer: Detokenizer,
        stop_strings: StopStringChecker,
        arrival_s: float,
    ) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.params = params
        self.output_tokens: list[int] = []
        self.is_finished = False
        self._num_prompt_tokens = num_prompt_tokens
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._arrival_s = arrival_s
        self._started_s = arrival_s
        self._first_token_s: float | None = None
        self._prompt_logprobs_sent = False

    @property
    def is_started(self) -> bool:
        """Whether the caller has been told that this choice began."""
        return self._first_token_s is not None

    def apply(self, output: SequenceOutput, now_s: float) -> list[Event]:
        """Events for one step's output, in order. After a stop string the choice is finished although the
        worker does not know it yet; what the worker still emits must not be passed in."""
        events: list[Event] = []
        if self._first_token_s is None:
            events.append(self._start(output, now_s))
        num_kept, text, stop_string = self._take_text(output)
        tokens = output.tokens[:num_kept]
        self.output_tokens += tokens
        prompt_logprobs = None if self._prompt_logprobs_sent else output.prompt_logprobs
        if tokens or text or prompt_logprobs is not None:
            events.append(self._token_event(tokens, text, output.logprobs[:num_kept], prompt_logprobs))
        if stop_string is not None:
            events.append(self._finish("stop", stop_string, now_s))
        elif output.finish_reason is not None:
            events.append(self._finish(output.finish_reason, self._stop_reason(output), now_s))
        return events

    def _start(self, output: SequenceOutput, now_s: float) -> Started:
        self._first_token_s = now_s
        self._started_s = max(output.started_s if output.started_s is not None else now_s, self._arrival_s)
        return Started(
            index=self.index,
            sequence_id=self.sequence_id,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=output.cached_tokens or 0,
            started_s=self._started_s,
        )

    def _take_text(self, output: SequenceOutput) -> tuple[int, str, str | None]:
        """Number of tokens that count, text to show, and the stop string that was completed."""
        pieces: list[str] = []
        num_text_tokens = len(output.tokens) - (output.stop_token is not None)
        for position in range(num_text_tokens):
            piece = self._detokenizer.push(output.tokens[position : position + 1])
            shown, matched = self._stop_strings.push(piece)
            pieces.append(shown)
            if matched is not None:
                return position + 1, "".join(pieces), matched
        if output.finish_reason is not None:
            shown, matched = self._stop_strings.push(self._detokenizer.flush())
            pieces.append(shown)
            if matched is not None:
                return num_text_tokens, "".join(pieces), matched
            pieces.append(self._stop_strings.flush())
        return len(output.tokens), "".join(pieces), None

    def _token_event(
        self,
        tokens: list[int],
        text: str,
        logprobs: list[TokenLogprob],
        prompt_logprobs: list[TokenLogprob | None] | None,
    ) -> TokenEvent:
        self._prompt_logprobs_sent = self._prompt_logprobs_sent or prompt_logprobs is not None
        return TokenEvent(
            index=self.index,
            sequence_id=self.sequence_id,
            token_ids=tokens,
            text=text,
            logprobs=logprobs if self.params.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _stop_reason(self, output: SequenceOutput) -> int | None:
        if output.stop_token is None or output.stop_token not in self.params.stop_token_ids:
            return None
        return output.stop_token

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, now_s: float) -> Finished:
        self.is_finished = True
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        return Finished(
            index=self.index,
            sequence_id=self.sequence_id,
            reason=reason,
            stop_reason=stop_reason,
            num_output_tokens=len(self.output_tokens),
            timing=Timing(
                arrival_s=self._arrival_s,
                started_s=self._started_s,
                first_token_s=first_token_s,
                finished_s=now_s,
            ),
        )


@dataclass(slots=True)
class ActiveRequest:
    """An admitted request that has not ended, with its reader's end and its choices."""

    stream: RequestStream
    tenant: str
    priority: int
    deadline_s: float | None
    choices: list[Choice] = field(default_factory=list)
    num_crashes: int = 0
    """Worker deaths while it was in the worker, since its last token."""

    @property
    def is_started(self) -> bool:
        """Whether any of its choices began."""
        return any(choice.is_started for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        """Choices the worker still owes output for."""
        return [choice for choice in self.choices if not choice.is_finished]

    def first_message(self, max_new_tokens: int | None = None) -> AddSequence:
        """The message that starts all choices at once: the prompt is computed once and forked."""
        first, *siblings = self.choices
        return self._message(first, [choice.sequence_id for choice in siblings], max_new_tokens)

    def resume_messages(self, max_new_tokens: int | None = None) -> list[AddSequence]:
        """Messages that let a new worker go on where the last one ended, for at most `max_new_tokens` each."""
        if all(not choice.is_started and not choice.is_finished for choice in self.choices):
            return [self.first_message(max_new_tokens)]
        return [self._message(choice, [], max_new_tokens) for choice in self.unfinished]

    def _message(self, choice: Choice, siblings: list[SequenceId], max_new_tokens: int | None) -> AddSequence:
        params = choice.params
        if max_new_tokens is not None:
            max_tokens = min(params.max_tokens, len(choice.output_tokens) + max_new_tokens)
            params = msgspec.structs.replace(params, max_tokens=max_tokens)
        return AddSequence(
            sequence_id=choice.sequence_id,
            prompt_tokens=self.stream.prompt_token_ids,
            output_tokens=choice.output_tokens,
            params=params,
            sibling_ids=siblings,
            tenant=self.tenant,
            priority=self.priority,
            deadline_s=self.deadline_s,
        )
