"""An engine that does what a test says: for states and failures that a real one is rarely in."""

from __future__ import annotations

from typing import Any

from enginehouse.engine.events import EngineHealth, EngineState, Event, Finished, Started, Timing, TokenEvent
from enginehouse.engine.messages import EngineStats, Ready, SequenceId
from enginehouse.engine.request_stream import RequestStream
from enginehouse.errors import EnginehouseError

ID = SequenceId(7)


class PlainTokenizer:
    """Token i is the character with that code."""

    special_token_ids: frozenset[int] = frozenset()
    strip_leading_space = False
    chat_template: str | None = None

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def started() -> Event:
    return Started(index=0, sequence_id=ID, prompt_tokens=3, cached_tokens=0, started_s=0.0)


def token(text: str) -> Event:
    return TokenEvent(index=0, sequence_id=ID, token_ids=[ord(char) for char in text], text=text)


def finished(num_output_tokens: int) -> Event:
    timing = Timing(arrival_s=0.0, started_s=0.0, first_token_s=0.0, finished_s=0.0)
    return Finished(
        index=0, sequence_id=ID, reason="stop", num_output_tokens=num_output_tokens, timing=timing
    )


class ScriptedEngine:
    """Gives every request `script`: events in order, an exception to fail with; without a `Finished` it hangs."""

    def __init__(self, *script: Event | Exception) -> None:
        self.script = script
        self.refusal: Exception | None = None
        self.state: EngineState = "ready"
        self.detail = ""
        self.num_aborted = 0
        self.is_closed = False
        self.max_context = 64
        self.tokenizer = PlainTokenizer()
        self.info = Ready(
            load_s=0.1,
            num_blocks=4,
            block_size=32,
            kv_bytes=100,
            weight_bytes=50,
            num_threads=1,
            kernels="scripted",
        )

    def check_capacity(self, _num_sequences: int) -> None:
        """There is always room."""

    async def submit(self, _prompt: Any, _params: Any, **_options: Any) -> RequestStream:
        if self.refusal is not None:
            raise self.refusal
        stream = RequestStream(
            request_id="r", sequence_ids=[ID], prompt_token_ids=[97, 98, 99], on_abort=self._note_abort
        )
        for step in self.script:
            if isinstance(step, Exception):
                stream.fail(step)
            else:
                stream.push(step)
        return stream

    def health(self) -> EngineHealth:
        return EngineHealth(state=self.state, detail=self.detail, last_report_age_s=0.0)

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        self.is_closed = True

    def _note_abort(self) -> None:
        self.num_aborted += 1


class UnexpectedError(EnginehouseError):
    """Stands for a mistake of ours that has a class."""
