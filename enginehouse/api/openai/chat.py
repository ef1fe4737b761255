"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from enginehouse.api.answering import AnswerHead, WriterFactory
from enginehouse.api.generation import Generation, GenerationCall
from enginehouse.api.json_body import decode
from enginehouse.api.openai.chat_messages import Message, template_message
from enginehouse.api.openai.chat_writer import ChatWriter, ParserFactory
from enginehouse.api.openai.parameters import (
    OpenAIFields,
    PositiveInt,
    check_choices,
    check_stream_options,
    openai_call,
    refuse_unsupported,
    sampling_params,
)
from enginehouse.api.tools.calling import ToolCalling
from enginehouse.api.tools.definitions import Tool, ToolChoice, chat_tool_request
from enginehouse.engine.events import UNTIL_CONTEXT_END, ChatPrompt
from enginehouse.errors import InvalidRequestError
from enginehouse.settings import ServerSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine

__all__ = ["ChatBody", "ChatCompletions", "Message", "template_message"]

_REFUSED = (
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "store",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "best_of",
    "echo",
)


class ChatBody(OpenAIFields, kw_only=True):
    """The body of a chat completion request."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    """Functions the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """Whether it may, must or must not call one, and which."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may hold several calls; it may unless this is false."""

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    best_of: Any = None
    echo: Any = None


_decoder = msgspec.json.Decoder(ChatBody)


class ChatCompletions:
    """The route's protocol: bodies to calls, deltas to answers."""

    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: bytes, limits: ServerSettings) -> tuple[GenerationCall, WriterFactory]:
        """Check a body. Raises `InvalidRequestError`."""
        fields = decode(body, _decoder)
        refuse_unsupported(fields, _REFUSED)
        include_usage = check_stream_options(fields)
        n = fields.n or 1
        check_choices(n, limits.max_n)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if fields.max_tokens == 0:
            raise InvalidRequestError("max_tokens: must be at least 1.", param="max_tokens")
        num_top = (fields.top_logprobs or 0) if fields.logprobs else None
        params = sampling_params(
            fields,
            max_tokens=fields.max_completion_tokens or fields.max_tokens or UNTIL_CONTEXT_END,
            logprobs=num_top,
        )
        messages = [template_message(message, index) for index, message in enumerate(fields.messages)]
        tools = chat_tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        calling = ToolCalling(messages, tools)
        prompt = ChatPrompt(messages=messages)
        call = openai_call(fields, [prompt], params, n=n, wants_tokens=num_top is not None)
        call = calling.attach(call)
        return call, partial(
            _make_writer, num_top=num_top, include_usage=include_usage, new_parser=calling.new_parser
        )


def _make_writer(
    head: AnswerHead,
    _generation: Generation,
    engine: LLMEngine,
    *,
    num_top: int | None,
    include_usage: bool,
    new_parser: ParserFactory,
) -> ChatWriter:
    return ChatWriter(head, engine.tokenizer, num_top, include_usage=include_usage, new_parser=new_parser)
