"""Request fields that completions and chat share, and the refusal of those that are not supported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from enginehouse.api.generation import GenerationCall
from enginehouse.api.openai.response_format import grammar_from
from enginehouse.engine.events import Prompt
from enginehouse.engine.sampling_params import SEED_MAX, SEED_MIN, SamplingParams
from enginehouse.errors import InvalidRequestError

INT_MAX = 2**31 - 1
MAX_STOP_STRINGS = 4

Count = Annotated[int, Meta(ge=0, le=INT_MAX)]
PositiveInt = Annotated[int, Meta(ge=1, le=INT_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT_MAX)]
Seed = Annotated[int, Meta(ge=SEED_MIN, le=SEED_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(Struct, kw_only=True):
    """Options of a streamed answer; fields not listed are ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Accepted for benchmark tools; usage comes once, at the end."""


class SamplingFields(Struct, kw_only=True):
    """How tokens are chosen and when they end. Every route that generates has these."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: (
        dict[Annotated[int, Meta(ge=0, le=INT_MAX)], Annotated[float, Meta(ge=-100, le=100)]] | None
    ) = None
    priority: Annotated[int, Meta(ge=-INT_MAX, le=INT_MAX)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=10_000_000)] | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """What both OpenAI routes take beside the prompt."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    # At most one of these decides about the form of the answer.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Known to the protocol or to other servers, and not supported: refused by `refuse_unsupported`.
    use_beam_search: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    lora: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None


HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": ("",),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "best_of": (1,),
    "n": (1,),
    "logprobs": (False,),
    "stream": (False,),
    "response_format": ({"type": "text"},),
}
"""Values of unsupported fields that ask for nothing."""

_COMMON_REFUSED = (
    "use_beam_search",
    "length_penalty",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "lora",
    "allowed_token_ids",
    "bad_words",
)


def refuse_unsupported(body: OpenAIFields, extra: tuple[str, ...]) -> None:
    """Raise `InvalidRequestError` naming the first field that asks for something this server cannot do.

    `extra`: the route's own unsupported fields. Null, and values that ask for nothing, pass.
    """
    refuse(body, (*_COMMON_REFUSED, *extra))


def refuse(body: Struct, names: Iterable[str], harmless: Mapping[str, tuple[Any, ...]] = HARMLESS) -> None:
    """Raise `InvalidRequestError` for the first of the fields `names` that is neither null nor `harmless`."""
    for name in names:
        value = getattr(body, name)
        # `1 == True` in Python, so the types are compared too.
        asks = value is not None and not any(
            type(value) is type(allowed) and value == allowed for allowed in harmless.get(name, ())
        )
        if asks:
            raise InvalidRequestError(f"{name} is not supported by this server with this value.", param=name)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple. Raises `InvalidRequestError` for more than four, or an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop: at most {MAX_STOP_STRINGS} strings are allowed, not {len(stops)}.", param="stop"
        )
    if not all(stops):
        raise InvalidRequestError("stop: a stop string must not be empty.", param="stop")
    return stops


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters; what the request leaves open gets OpenAI's defaults.

    Raises `InvalidRequestError` when `min_tokens` asks for more than `max_tokens` allows.
    """
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}.", param="min_tokens"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(0, fields.top_k or 0),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=fields.logit_bias or {},
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        seed=fields.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_choices(n: int, max_n: int, param: str = "n") -> None:
    """Raise `InvalidRequestError` when a request asks for more choices than `server.max_n`."""
    if n > max_n:
        raise InvalidRequestError(f"{param}: at most {max_n} choices are allowed, not {n}.", param=param)


def check_stream_options(fields: OpenAIFields) -> bool:
    """Whether the stream shall end with usage. Raises when there is no stream to have options."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true.", param="stream_options"
        )
    return bool(fields.stream_options and fields.stream_options.include_usage)


def openai_call(
    fields: OpenAIFields,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    n: int,
    wants_tokens: bool,
) -> GenerationCall:
    """The call that both OpenAI routes make, with the grammar that the request asks for.

    Raises `InvalidRequestError`.
    """
    grammar = grammar_from(fields)
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=grammar)
    return GenerationCall(
        prompts=prompts,
        params=params,
        stop=stop_strings(fields.stop),
        n=n,
        model=fields.model,
        stream=bool(fields.stream),
        priority=fields.priority or 0,
        timeout_s=fields.timeout,
        wants_tokens=wants_tokens,
    )


def finish_reason(reason: str) -> str:
    """The protocol knows no aborts; an abort that reaches a client ended the text early."""
    return "length" if reason == "length" else "stop"


encode_json = msgspec.json.Encoder().encode
