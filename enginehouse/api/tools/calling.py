"""One request's way through tool calling, whatever its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from enginehouse.api.generation import GenerationCall
from enginehouse.api.tools.definitions import ToolRequest
from enginehouse.api.tools.forcing import forcing_grammar
from enginehouse.api.tools.formats import ToolFormat, choose_format
from enginehouse.api.tools.history import adapt_messages, template_tools
from enginehouse.api.tools.parsing import (
    ForcedCallParser,
    OutputParser,
    ParsedOutput,
    ToolCallParser,
    parse_output,
)
from enginehouse.engine.events import ChatPrompt
from enginehouse.engine.structured_output import Grammar
from enginehouse.errors import InvalidRequestError
from enginehouse.settings import ModelSettings

if TYPE_CHECKING:
    from enginehouse.engine.llm_engine import LLMEngine
    from enginehouse.runtime.tokenizer import Tokenizer


class ToolCalling:
    """The tools of one request, from the messages to the parsed answer.

    A protocol makes one in `parse`, attaches it to its call (the model, and with it the format, is only known
    later), and then reads each choice with a `new_parser`. `messages` are in the shape of
    chat completions (`role`, `content`, `name`, `tool_calls`, `tool_call_id`).
    """

    def __init__(self, messages: Sequence[dict[str, Any]], tools: ToolRequest | None) -> None:
        self._messages = messages
        self.tools = tools
        self._format: ToolFormat | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer is calls and nothing else, made so by a grammar."""
        return self.tools is not None and self.tools.mode == "required"

    @property
    def is_parsed(self) -> bool:
        """Whether the answer may hold calls."""
        return self.tools is not None and self.tools.is_offered

    def attach(self, call: GenerationCall) -> GenerationCall:
        """`call`, to be bound when its model is known. Conversations without a trace of tools stay as they are."""
        has_history = any("tool_calls" in message or message["role"] == "tool" for message in self._messages)
        return dataclasses.replace(call, bind=self.bind) if self.is_parsed or has_history else call

    def bind(self, call: GenerationCall, engine: LLMEngine, settings: ModelSettings) -> GenerationCall:
        """`call` for the model that will serve it: its prompt, the grammar of forced calls, what may be seen.

        Stop strings and stop tokens do not apply to forced calls: they would cut them. A form that the request asks for applies to
        answers that are no calls. Raises `InvalidRequestError` when the two do not go together.
        """
        fmt = self._format = choose_format(engine.tokenizer.chat_template, settings.tool_format)
        tools = self.tools if self.is_parsed else None
        functions = tools.functions if tools is not None else ()
        (given,) = call.prompts
        assert isinstance(given, ChatPrompt)
        prompt = msgspec.structs.replace(
            given,
            messages=adapt_messages(self._messages, fmt, functions),
            tools=template_tools(functions) if functions and fmt.in_template else None,
        )
        if tools is None:
            return dataclasses.replace(call, prompts=[prompt])
        special = special_marks(engine.tokenizer, fmt)
        call = dataclasses.replace(call, prompts=[prompt], visible_special=frozenset(special.values()))
        answer = call.params.grammar
        if not self.is_forced and answer is None:
            return call
        text = forcing_grammar(
            fmt,
            tools.callable_functions,
            parallel=tools.parallel,
            special=special,
            answer_schema=None if self.is_forced or answer is None else _schema_of(answer),
        )
        grammar = Grammar(
            kind="lark",
            text=text,
            param=tools.grammar_param,
            special_tokens=tuple(special.values()),
        )
        params = msgspec.structs.replace(call.params, grammar=grammar)
        if not self.is_forced:
            return dataclasses.replace(call, params=params)
        params = msgspec.structs.replace(params, stop_token_ids=())
        return dataclasses.replace(call, params=params, stop=())

    def new_parser(self) -> OutputParser | None:
        """A parser for one choice's text; None when the text is content as it is. Only after `bind`."""
        if not self.is_parsed:
            return None
        assert self.tools is not None
        assert self._format is not None
        if self.is_forced:
            return ForcedCallParser(self._format)
        return ToolCallParser(self._format, self.tools.callable_names, parallel=self.tools.parallel)

    def parse(self, text: str) -> ParsedOutput:
        """Content and calls of a whole choice."""
        parser = self.new_parser()
        return ParsedOutput(text) if parser is None else parse_output(parser, text)


def _schema_of(answer: Grammar) -> dict[str, Any]:
    """The schema of answers that a request with tools may ask for beside calls."""
    if answer.kind == "json_object":
        return {"type": "object"}
    schema = msgspec.json.decode(answer.text) if answer.kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            f"{answer.param}: with tools that may be called, only JSON schemas are supported.",
            param=answer.param,
        )
    return schema


def special_marks(tokenizer: Tokenizer, fmt: ToolFormat) -> dict[str, int]:
    """Marks of the format that are special tokens, which would not be seen in an answer otherwise, and their ids."""
    marks = {mark.encode(): mark for mark in (fmt.marker, fmt.end) if mark}
    ids = {tokenizer.token_bytes(token): token for token in tokenizer.special_token_ids}
    return {mark: ids[raw] for raw, mark in marks.items() if raw in ids}
