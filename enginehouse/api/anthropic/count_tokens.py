"""`POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from enginehouse.api.anthropic.conversation import ConversationFields, conversation
from enginehouse.api.anthropic.tools import tools_of
from enginehouse.api.engine_host import EngineHost
from enginehouse.api.json_body import decode, read_body
from enginehouse.api.openai.parameters import encode_json
from enginehouse.api.openapi import request_body
from enginehouse.api.tokenize import MAX_AT_ONCE, chat_prompt, chat_tokens


class CountTokensBody(ConversationFields, kw_only=True):
    """A conversation whose tokens are counted."""


_decoder = msgspec.json.Decoder(CountTokensBody)


def count_tokens_router(host: EngineHost) -> APIRouter:
    """The route; counting is done in threads, a few requests at a time."""
    router = APIRouter(tags=["Anthropic"])
    slots = asyncio.Semaphore(MAX_AT_ONCE)

    @router.post(
        "/v1/messages/count_tokens",
        summary="Tokens of a conversation",
        openapi_extra=request_body(CountTokensBody),
    )
    async def count_tokens(request: Request) -> Response:
        """`{input_tokens}`: what `/v1/messages` would count, also when it is more than the context holds."""
        fields = decode(await read_body(request), _decoder)
        engine = host.engine_for(fields.model)
        tools = tools_of(fields.tools, fields.tool_choice)
        prompt = chat_prompt(conversation(fields), tools, engine, host.model_settings)
        async with slots:
            tokens = await asyncio.to_thread(chat_tokens, engine.tokenizer, prompt)
        return Response(encode_json({"input_tokens": len(tokens)}), media_type="application/json")

    return router
