"""`POST /tokenize`, `/detokenize` and `/apply-template`: what a prompt is to the model, without running it.

Bodies and answers are vLLM's; `/apply-template` is llama.cpp's. Texts are turned into the same tokens as
`/v1/completions` and `/v1/chat/completions` would use, of any length: a client may want to know by how much it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Struct
from starlette.responses import Response

from enginehouse.api.engine_host import EngineHost
from enginehouse.api.generation import GenerationCall
from enginehouse.api.json_body import decode, read_body
from enginehouse.api.openai.chat import Message, template_message
from enginehouse.api.openai.parameters import TokenId, encode_json
from enginehouse.api.openapi import request_body
from enginehouse.api.tools.calling import ToolCalling
from enginehouse.api.tools.definitions import Tool, ToolRequest, chat_tool_request
from enginehouse.engine.events import ChatPrompt
from enginehouse.engine.sampling_params import SamplingParams
from enginehouse.errors import InvalidRequestError
from enginehouse.settings import ModelSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine
    from enginehouse.runtime.chat_template import ChatTemplate
    from enginehouse.runtime.tokenizer import Tokenizer

T = TypeVar("T")

MAX_AT_ONCE = 2
"""Requests that are tokenised at the same time: the threads they run in are the ones that generating needs too."""
_MAX_TEMPLATES = 8


class TemplateFields(Struct, kw_only=True):
    """How messages become a prompt."""

    model: str | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    """Functions that the prompt tells the model about."""
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None


class TokenizeBody(TemplateFields, kw_only=True):
    """A prompt or messages to turn into token ids."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[TokenId]
    model: str | None = None


class ApplyTemplateBody(TemplateFields, kw_only=True):
    """Messages to write as the model's prompt."""

    messages: Annotated[list[Message], Meta(min_length=1)]


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
_template_decoder = msgspec.json.Decoder(ApplyTemplateBody)


def tokenize_router(host: EngineHost) -> APIRouter:
    """The three routes. All work on texts is done in threads, a few requests at a time."""
    router = APIRouter(tags=["tokens"])
    slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def in_thread(work: Callable[[], T]) -> T:
        async with slots:
            return await asyncio.to_thread(work)

    @router.post(
        "/tokenize", summary="Token ids of a prompt or of messages", openapi_extra=request_body(TokenizeBody)
    )
    async def tokenize(request: Request) -> Response:
        """`{prompt | messages}` → `{count, max_model_len, tokens, token_strs}`"""
        fields = decode(await read_body(request), _tokenize_decoder)
        engine = host.engine_for(fields.model)
        tokenizer, work = engine.tokenizer, tokenize_work(engine, host.model_settings, fields)
        max_context, wants_strs = engine.max_context, bool(fields.return_token_strs)

        def answer() -> bytes:
            tokens = work()
            strs = token_strs(tokenizer, tokens) if wants_strs else None
            shown = {
                "count": len(tokens),
                "max_model_len": max_context,
                "tokens": tokens,
                "token_strs": strs,
            }
            return encode_json(shown)

        return Response(await in_thread(answer), media_type="application/json")

    @router.post("/detokenize", summary="Text of token ids", openapi_extra=request_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """`{tokens}` → `{prompt}`; special tokens are shown by their names."""
        fields = decode(await read_body(request), _detokenize_decoder)
        tokenizer = host.engine_for(fields.model).tokenizer
        return Response(
            await in_thread(lambda: encode_json({"prompt": text_of(tokenizer, fields.tokens)})),
            media_type="application/json",
        )

    @router.post(
        "/apply-template",
        summary="Messages as the model's prompt",
        openapi_extra=request_body(ApplyTemplateBody),
    )
    async def apply_template(request: Request) -> Response:
        """`{messages}` → `{prompt}`, for people to read: the server never tokenises this text again."""
        fields = decode(await read_body(request), _template_decoder)
        engine = host.engine_for(fields.model)
        prompt = _prompt_of(fields, fields.messages, engine, host.model_settings)
        return Response(
            await in_thread(lambda: encode_json({"prompt": rendered(engine.tokenizer, prompt)})),
            media_type="application/json",
        )

    return router


def tokenize_work(
    engine: LLMEngine, settings: ModelSettings, fields: TokenizeBody
) -> Callable[[], list[int]]:
    """Check the fields and return what is left to do, which may take long. Raises `InvalidRequestError`."""
    tokenizer = engine.tokenizer
    if fields.messages is not None:
        if fields.prompt is not None:
            raise InvalidRequestError("Send prompt or messages, not both.", param="prompt")
        if fields.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens is not supported with messages: the chat template writes the special tokens.",
                param="add_special_tokens",
            )
        prompt = _prompt_of(fields, fields.messages, engine, settings)
        return lambda: chat_tokens(tokenizer, prompt)
    text = fields.prompt
    if text is None:
        raise InvalidRequestError("prompt or messages is missing.", param="prompt")
    add_special = fields.add_special_tokens is not False
    return lambda: tokenizer.encode(text, add_special=add_special, parse_special=True)


def chat_tokens(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    """Token ids of a conversation, of any length. CPU work. Raises `TemplateError` or `InvalidRequestError`."""
    return _template_of(tokenizer).encode(
        tokenizer,
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        **prompt.template_kwargs,
    )


def rendered(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    """A conversation as text. CPU work. Raises `TemplateError` or `InvalidRequestError`."""
    return _template_of(tokenizer).render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        **prompt.template_kwargs,
    )


def token_strs(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Each token's own text; bytes that are only a part of a character become U+FFFD."""
    return [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of `tokens`, special ones included. Raises `InvalidRequestError` for an id that is none."""
    size = tokenizer.vocab_size
    for position, token in enumerate(tokens):
        if token >= size:
            raise InvalidRequestError(
                f"tokens[{position}]: {token} is not a token id; they go from 0 to {size - 1}.",
                param=f"tokens[{position}]",
            )
    return tokenizer.decode(tokens, skip_special=False)


def _prompt_of(
    fields: TemplateFields, messages: list[Message], engine: LLMEngine, settings: ModelSettings
) -> ChatPrompt:
    for name in ("chat_template", "chat_template_kwargs", "continue_final_message"):
        if getattr(fields, name):
            raise InvalidRequestError(f"{name} is not supported by this server.", param=name)
    shown = [template_message(message, index) for index, message in enumerate(messages)]
    prompt = chat_prompt(shown, chat_tool_request(fields.tools, None, None), engine, settings)
    return msgspec.structs.replace(prompt, add_generation_prompt=fields.add_generation_prompt is not False)


def chat_prompt(
    messages: list[dict[str, Any]], tools: ToolRequest | None, engine: LLMEngine, settings: ModelSettings
) -> ChatPrompt:
    """What a generating route would give the engine for these messages and tools."""
    prompt = ChatPrompt(messages=messages)
    call = ToolCalling(messages, tools).attach(GenerationCall(prompts=[prompt], params=SamplingParams()))
    if call.bind is not None:
        (bound,) = call.bind(call, engine, settings).prompts
        assert isinstance(bound, ChatPrompt)
        return bound
    return prompt


def _template_of(tokenizer: Tokenizer) -> ChatTemplate:
    source = tokenizer.chat_template
    if source is None:
        raise InvalidRequestError(
            "This model has no chat template; send the whole prompt instead.", param="messages"
        )
    return _template(source, tuple(tokenizer.meta.special_tokens.items()))


@lru_cache(maxsize=_MAX_TEMPLATES)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    # Imported here: with it comes Jinja, which a server that is starting need not wait for.
    from enginehouse.runtime.chat_template import ChatTemplate

    return ChatTemplate(source, dict(special_tokens))
