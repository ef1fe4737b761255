"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.errors import error_object
from enginehouse.api.generation import ChoiceAnswer, Delta, Generation, GenerationCall, Usage
from enginehouse.api.json_body import decode
from enginehouse.api.openai.logprobs import CompletionLogprobs, EncodedLists, join_lists
from enginehouse.api.openai.parameters import (
    OpenAIFields,
    TokenId,
    check_choices,
    check_stream_options,
    encode_json,
    finish_reason,
    openai_call,
    refuse_unsupported,
    sampling_params,
)
from enginehouse.api.openai.usage import usage_object
from enginehouse.api.sse import DONE_FRAME, data_frame
from enginehouse.api.token_texts import TokenText, TokenTexts
from enginehouse.engine.events import Prompt
from enginehouse.engine.messages import TokenLogprob
from enginehouse.errors import EnginehouseError, InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine
    from enginehouse.runtime.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAIFields, kw_only=True):
    """The body of a completion request."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None

    suffix: Any = None
    prompt_embeds: Any = None
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Any = None
    max_completion_tokens: Any = None


_REFUSED = (
    "suffix",
    "prompt_embeds",
    "tools",
    "tool_choice",
    "top_logprobs",
    "max_completion_tokens",
)
_decoder = msgspec.json.Decoder(CompletionBody)


class Completions:
    """The route's protocol: bodies to calls, deltas to answers."""

    route = "/v1/completions"
    id_prefix = "cmpl-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        refuse_unsupported(fields, _REFUSED)
        include_usage = check_stream_options(fields)
        n, num_candidates = _choices(fields, limits)
        max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        if max_tokens == 0 and not fields.echo:
            raise InvalidRequestError(
                "max_tokens: must be at least 1; 0 is only allowed with echo: true.", param="max_tokens"
            )
        # Candidates are ranked by their log-probability, also when nobody asked to see it.
        logprobs = fields.logprobs if fields.logprobs is not None or num_candidates == n else 0
        params = sampling_params(
            fields,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=fields.logprobs if fields.echo else None,
        )
        prompts = split_prompts(fields.prompt, limits.max_prompts)
        call = openai_call(fields, prompts, params, n=num_candidates, wants_tokens=logprobs is not None)
        return call, partial(_make_writer, n=n, fields=fields, include_usage=include_usage)


def _choices(fields: CompletionBody, limits: ServerSettings) -> tuple[int, int]:
    """How many choices the client gets, and how many are computed."""
    n = fields.n or 1
    num_candidates = n if fields.best_of is None else fields.best_of
    check_choices(n, limits.max_n)
    check_choices(num_candidates, limits.max_n, "best_of")
    if num_candidates < n:
        raise InvalidRequestError(
            f"best_of: {num_candidates} candidates are fewer than n, {n}.", param="best_of"
        )
    if num_candidates > n and fields.stream:
        raise InvalidRequestError("best_of: more candidates than n cannot be streamed.", param="best_of")
    return n, num_candidates


def split_prompts(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[Prompt]:
    """One string, several, one list of token ids, or several, as prompts.

    Raises `InvalidRequestError` for an empty list, a mixed one, or more than `max_prompts`.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt: the list is empty.", param="prompt")
    if len({type(item) for item in prompt}) > 1:
        raise InvalidRequestError(
            "prompt: strings, token ids and lists of token ids must not be mixed.", param="prompt"
        )
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if len(prompt) > max_prompts:
        raise InvalidRequestError(
            f"prompt: at most {max_prompts} prompts are allowed, not {len(prompt)}.", param="prompt"
        )
    return [item for item in prompt if not isinstance(item, int)]


def _make_writer(
    head: AnswerHead,
    generation: Generation,
    engine: LLMEngine,
    *,
    n: int,
    fields: CompletionBody,
    include_usage: bool,
) -> CompletionWriter:
    echoes = None
    if fields.echo:
        prompts = zip(generation.streams, generation.call.prompts, strict=True)
        echoes = [
            Echo(stream.prompt_token_ids, prompt, engine.tokenizer, with_logprobs=fields.logprobs is not None)
            for stream, prompt in prompts
        ]
    return CompletionWriter(
        head,
        engine.tokenizer,
        n=n,
        num_candidates=generation.call.n,
        echoes=echoes,
        num_top=fields.logprobs,
        include_usage=include_usage,
    )


class Echo:
    """A prompt that is repeated before its choices. Whatever a long prompt costs is paid once: its choices share
    its log-probabilities, and the bytes that say them."""

    def __init__(
        self, token_ids: list[int], prompt: Prompt, tokenizer: Tokenizer, *, with_logprobs: bool
    ) -> None:
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprob | None] | None = None
        self._encoded: EncodedLists | None = None
        is_text = isinstance(prompt, str) and not with_logprobs
        # With log-probabilities the text is what its tokens say, so that their texts join to it.
        self.text = prompt if is_text and isinstance(prompt, str) else tokenizer.decode(token_ids)

    def offer(self, logprobs: list[TokenLogprob | None] | None) -> None:
        """Keep the prompt's log-probabilities, if this choice is the one that brought them."""
        self._logprobs = self._logprobs or logprobs

    def encoded(self, num_top: int) -> EncodedLists:
        """The prompt's part of every choice's log-probabilities, as JSON. Only after a choice has brought them."""
        if self._encoded is None:
            self._encoded = CompletionLogprobs(num_top, self._tokenizer).take_encoded(self.tokens())
        return self._encoded

    def tokens(self) -> list[TokenText]:
        """The prompt's tokens. Only after a choice has brought their log-probabilities."""
        assert self._logprobs is not None, "the engine sends a prompt's log-probabilities before its output"
        texts = TokenTexts(self._tokenizer)
        texts.push(self._token_ids)
        shown = texts.release(self.text)
        rest, silent = texts.finish()
        tokens = [*shown, *rest, *silent]
        for token, logprob in zip(tokens, self._logprobs, strict=True):
            token.logprob = logprob
        return tokens


class CompletionWriter:
    """Writes completion answers. `num_top` None leaves log-probabilities out, `echoes` None the prompts.

    Of `num_candidates` choices that were computed for a prompt, the best `n` are shown.
    """

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: Tokenizer,
        *,
        n: int,
        num_candidates: int,
        echoes: list[Echo] | None,
        num_top: int | None,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._n, self._num_candidates = n, num_candidates
        self._echoes = echoes
        self._num_top = num_top
        self._include_usage = include_usage
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        self._open = b"data: %b," % encode_json(self._shared())[:-1]
        self._close = (b',"usage":null' if include_usage else b"") + b"}\n\n"

    def frames(self, delta: Delta) -> Iterable[bytes]:
        """The prompt, if it is to be repeated, content chunks, and a chunk with the finish reason."""
        index = delta.index
        if self._echoes is not None and not delta.started and index not in self._echoed:
            self._echoed.add(index)
            echo = self._echo(index)
            echo.offer(delta.prompt_logprobs)
            yield self._chunk(index, echo.text, [], with_prompt=True)
        if delta.text or delta.tokens:
            yield self._chunk(index, delta.text, delta.tokens)
        if delta.finished is not None:
            yield self._chunk(index, "", None, encode_json(finish_reason(delta.finished.reason)))

    def last_frames(self, usage: Usage) -> Iterable[bytes]:
        """The usage chunk, if it was asked for, and the end."""
        if self._include_usage:
            yield b'%b"choices":[],"usage":%b}\n\n' % (self._open, encode_json(usage_object(usage)))
        yield DONE_FRAME

    def error_frames(self, error: EnginehouseError) -> Iterable[bytes]:
        """The error, and the end."""
        return data_frame(error_object(error)), DONE_FRAME

    def body(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        """A `text_completion` object."""
        for choice in choices if self._echoes is not None else ():
            self._echo(choice.index).offer(choice.prompt_logprobs)
        answer = self._shared()
        answer["choices"] = [
            {
                "index": index,
                "text": self._echoed_text(choice),
                "logprobs": self._logprobs_object(choice),
                "finish_reason": finish_reason(choice.finish_reason),
            }
            for index, choice in enumerate(self._best(choices))
        ]
        answer["usage"] = usage_object(usage)
        return encode_json(answer)

    def _best(self, choices: list[ChoiceAnswer]) -> list[ChoiceAnswer]:
        if self._n == self._num_candidates:
            return choices
        best: list[ChoiceAnswer] = []
        for start in range(0, len(choices), self._num_candidates):
            group = choices[start : start + self._num_candidates]
            group.sort(key=ChoiceAnswer.mean_logprob, reverse=True)
            best += group[: self._n]
        return best

    def _echo(self, index: int) -> Echo:
        assert self._echoes is not None
        return self._echoes[index // self._num_candidates]

    def _echoed_text(self, choice: ChoiceAnswer) -> str:
        return choice.text if self._echoes is None else self._echo(choice.index).text + choice.text

    def _logprobs_object(self, choice: ChoiceAnswer) -> msgspec.Raw | None:
        if self._num_top is None:
            return None
        own = self._lists_of(choice.index, self._num_top).take_encoded(choice.tokens)
        return msgspec.Raw(self._after_prompt(choice.index, self._num_top, own))

    def _lists_of(self, index: int, num_top: int) -> CompletionLogprobs:
        """The choice's own log-probabilities; their offsets go on after the prompt, if that is repeated."""
        if index not in self._logprobs:
            offset = 0 if self._echoes is None else len(self._echo(index).text)
            self._logprobs[index] = CompletionLogprobs(num_top, self._tokenizer, offset=offset)
        return self._logprobs[index]

    def _after_prompt(self, index: int, num_top: int, own: EncodedLists) -> bytes:
        """The JSON object of a choice's own lists, after those of the prompt if that is repeated."""
        return (
            join_lists(own) if self._echoes is None else join_lists(self._echo(index).encoded(num_top), own)
        )

    def _shared(self) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created_unix_s,
            "model": head.model,
            "system_fingerprint": None,
        }

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: list[TokenText] | None,
        reason: bytes = b"null",
        *,
        with_prompt: bool = False,
    ) -> bytes:
        logprobs = b"null"
        if self._num_top is not None and tokens is not None:
            own = self._lists_of(index, self._num_top).take_encoded(tokens)
            logprobs = self._after_prompt(index, self._num_top, own) if with_prompt else join_lists(own)
        return b'%b"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._open,
            index,
            encode_json(text),
            logprobs,
            reason,
            self._close,
        )
