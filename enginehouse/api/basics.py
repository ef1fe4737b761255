"""The teaching routes: the smallest requests that show one answer, a batch, and a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.errors import VLLMBackendMissingError, error_object
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import decode
from enginehouse.api.openai.parameters import (
    HARMLESS,
    SamplingFields,
    encode_json,
    refuse,
    sampling_params,
    stop_strings,
)
from enginehouse.api.openai.usage import usage_object
from enginehouse.api.sse import event_frame
from enginehouse.engine.events import Finished
from enginehouse.engine.messages import SequenceId
from enginehouse.errors import EnginehouseError, InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

DEFAULT_MAX_TOKENS = 20


class TeachingFields(SamplingFields, kw_only=True):
    """What all teaching routes take beside prompts."""

    model: str | None = None

    # Of the OpenAI routes: refused by name, because a request with one of them was meant for such a route.
    n: Any = None
    best_of: Any = None
    stream: Any = None
    stream_options: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    suffix: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tools: Any = None
    tool_choice: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    lora: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None


_REFUSED = tuple(
    sorted(
        {field.name for field in msgspec.structs.fields(TeachingFields)}
        - {field.name for field in msgspec.structs.fields(SamplingFields)}
        - {"model"}
    )
)


class PromptBody(TeachingFields, kw_only=True):
    """One prompt and how to continue it."""

    prompt: str


class PromptsBody(TeachingFields, kw_only=True):
    """Several prompts and how to continue each."""

    prompts: Annotated[list[str], Meta(min_length=1)]


_prompt_decoder = msgspec.json.Decoder(PromptBody)
_prompts_decoder = msgspec.json.Decoder(PromptsBody)


def _call(
    fields: TeachingFields, prompts: list[str], *, stream: bool = False, wants_tokens: bool = False
) -> GenerationCall:
    # Whether an answer is streamed is the route's; to say the same in the body asks for nothing.
    refuse(fields, _REFUSED, {**HARMLESS, "stream": (stream,)})
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if max_tokens == 0:
        raise InvalidRequestError("max_tokens: must be at least 1.", param="max_tokens")
    return GenerationCall(
        prompts=list(prompts),
        prompts_field="prompts" if isinstance(fields, PromptsBody) else "prompt",
        params=sampling_params(fields, max_tokens=max_tokens),
        stop=stop_strings(fields.stop),
        model=fields.model,
        stream=stream,
        priority=fields.priority or 0,
        timeout_s=fields.timeout,
        wants_tokens=wants_tokens,
    )


def _parse_prompts(body: bytes, limits: ServerSettings) -> GenerationCall:
    fields = decode(body, _prompts_decoder)
    if len(fields.prompts) > limits.max_prompts:
        raise InvalidRequestError(
            f"prompts: at most {limits.max_prompts} are allowed, not {len(fields.prompts)}.", param="prompts"
        )
    return _call(fields, fields.prompts)


class BasicGenerate:
    """`POST /basic_generate`: one prompt, one answer."""

    route = "/basic_generate"
    id_prefix = "gen-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _prompt_decoder)
        return _call(fields, [fields.prompt]), BasicWriter


class Generate:
    """`POST /generate`: several prompts, computed together, answered in their order."""

    route = "/generate"
    id_prefix = "gen-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        return _parse_prompts(body, limits), BatchWriter


class GenerateStream:
    """`POST /generate_stream`: one prompt, an event for each token."""

    route = "/generate_stream"
    id_prefix = "gen-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _prompt_decoder)
        return _call(fields, [fields.prompt], stream=True, wants_tokens=True), TokenEventWriter


class GenerateVLLM:
    """`POST /generate_vllm`: the request of `/generate`, for the vLLM backend, which this server has not."""

    route = "/generate_vllm"
    id_prefix = "gen-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body, then raise `VLLMBackendMissingError`."""
        _parse_prompts(body, limits)
        raise VLLMBackendMissingError(
            "No vLLM backend is configured on this server. POST /generate serves the same request natively."
        )


class _BodyWriter:
    """For the routes that do not stream."""

    def __init__(self, _head: AnswerHead, _generation: Generation, _engine: LLMEngine) -> None:
        pass

    def frames(self, delta: Delta) -> Iterable[bytes]:
        raise AssertionError("this route does not stream")

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        raise AssertionError("this route does not stream")

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        raise AssertionError("this route does not stream")


class BasicWriter(_BodyWriter):
    """Writes the answer of `/basic_generate`: the continuation, without the prompt."""

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """`{generated_text, sequence_id, finish_reason, usage}`"""
        (choice,) = choices
        return encode_json(
            {
                "generated_text": choice.text,
                "sequence_id": choice.sequence_id,
                "finish_reason": choice.finish_reason,
                "usage": usage_object(usage),
            }
        )


class BatchWriter(_BodyWriter):
    """Writes the answer of `/generate`."""

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """`{generated_texts, sequence_ids}`, in the order of the prompts."""
        return encode_json(
            {
                "generated_texts": [choice.text for choice in choices],
                "sequence_ids": [choice.sequence_id for choice in choices],
            }
        )


class TokenEventWriter:
    """Writes the events `start`, `token`, `done` and `error`. Joined tokens are the answer; a token that only began
    a character, or wrote nothing that may be shown, is an event with an empty text."""

    def __init__(self, _head: AnswerHead, _generation: Generation, _engine: LLMEngine) -> None:
        self._sequence_id = SequenceId(0)

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """One frame for each token, in order."""
        self._sequence_id = delta.sequence_id
        if delta.started:
            yield event_frame("start", {"sequence_id": delta.sequence_id})
        for text in (*(token.text for token in delta.tokens), *[""] * delta.silent_tokens):
            yield event_frame("token", {"token": text, "sequence_id": delta.sequence_id})
        if delta.finished is not None:
            yield event_frame("done", _done(delta.finished))

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """Nothing: `done` was the last."""
        return ()

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """`{"message", "sequence_id", "type", "param", "code"}`"""
        fields = {**error_object(error)["error"], "sequence_id": self._sequence_id}
        return (event_frame("error", fields),)

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """This route only streams."""
        raise AssertionError("this route always streams")


def _done(finished: Finished) -> dict[str, Any]:
    timing = finished.timing
    return {
        "sequence_id": finished.sequence_id,
        "output_tokens": finished.num_output_tokens,
        "finish_reason": finished.reason,
        "timing": {
            "queue_s": round(timing.queue_s, 6),
            "prefill_s": round(timing.prefill_s, 6),
            "decode_s": round(timing.decode_s, 6),
            "total_s": round(timing.total_s, 6),
        },
    }
