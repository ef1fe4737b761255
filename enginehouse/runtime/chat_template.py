"""Chat templates: messages to the text, and to the token ids, that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from enginehouse.errors import TemplateError
from enginehouse.runtime.chat_template_guard import Guard, plain_data, unused_char
from enginehouse.runtime.chat_template_sandbox import (
    MAX_VALUE_CHARS,
    ChatTemplateEnvironment,
    check_time,
    time_limit,
)

if TYPE_CHECKING:
    from enginehouse.runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]
T = TypeVar("T")

MAX_SOURCE_CHARS = 1_000_000
MAX_RENDER_S = 5.0
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
# Everything a template can make Python raise, beside Jinja's own errors.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    MemoryError,
)


class ChatTemplate:
    """One model's template. Immutable; several threads may render with it. Rendering is CPU work of milliseconds.

    `special_tokens` (bos_token, eos_token, …) are what the template may refer to by name.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "default") -> ChatTemplate | None:
        """The template of that name stored with a tokenizer, or None."""
        source = tokenizer.meta.chat_templates.get(name)
        return None if source is None else cls(source, tokenizer.meta.special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled at first use, so that a model whose template is broken still serves completions."""
        if len(self.source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        try:
            return ChatTemplateEnvironment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise TemplateError(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text, for people to read. Raises `TemplateError` (400)."""
        given = self._given(messages, tools, variables)
        return self._first_success(given, lambda data: self._run(data, add_generation_prompt))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The conversation as token ids. Raises `TemplateError` (400).

        Special tokens that the template writes are special tokens; their text in messages, tools or variables
        stays text. A conversation without such text gives the ids of Transformers' `apply_chat_template`.
        """
        given = self._given(messages, tools, variables)

        def encode(data: dict[str, Any]) -> list[int]:
            char = unused_char(data, self.source)
            guarded = Guard(tokenizer.special_texts, char).value(data)
            return tokenizer.encode_guarded(self._run(guarded, add_generation_prompt), char)

        return self._first_success(given, encode)

    def _given(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> dict[str, Any]:
        reserved = sorted((_RESERVED | self._special_tokens.keys()) & variables.keys())
        if reserved:
            raise TemplateError(
                f"template variable {reserved[0]!r} cannot be set", param="chat_template_kwargs"
            )
        return {
            "messages": [self._message(message) for message in messages],
            "tools": plain_data(list(tools)) if tools else None,
            **plain_data(variables),
        }

    def _message(self, message: Message) -> dict[str, Any]:
        """A copy without null fields, with text parts joined, and arguments of tool calls parsed."""
        plain: dict[str, Any] = plain_data(dict(message))
        copy = {key: value for key, value in plain.items() if value is not None}
        if isinstance(copy.get("content"), list):
            copy["content"] = _joined_parts(copy["content"])
        if copy.get("role") == "developer" and "developer" not in self.source:
            copy["role"] = "system"
        return copy

    def _first_success(self, given: dict[str, Any], run: Callable[[dict[str, Any]], T]) -> T:
        """Run on the first form of the messages that the template can take, and report the first error if none.

        Templates disagree about tool calls: most want arguments as objects, some the text they came as, and some
        want a content, though empty, beside them.
        """
        messages: list[dict[str, Any]] = given["messages"]
        forms = [[_with_parsed_arguments(message) for message in messages], messages]
        forms += [[{"content": "", **message} for message in form] for form in forms]
        first_error: TemplateError | None = None
        for i, form in enumerate(forms):
            if form in forms[:i]:
                continue
            try:
                return run({**given, "messages": form})
            except TemplateError as error:
                first_error = first_error or error
                if not isinstance(error.__cause__, TypeError | jinja2.UndefinedError):
                    break
        assert first_error is not None
        raise first_error

    def _run(self, given: dict[str, Any], add_generation_prompt: bool) -> str:
        context = {**self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
        pieces: list[str] = []
        size = 0
        try:
            with time_limit(MAX_RENDER_S):
                for piece in self._template.generate(context):
                    check_time()
                    size += len(piece)
                    if size > MAX_VALUE_CHARS:
                        raise TemplateError(f"the chat template wrote more than {MAX_VALUE_CHARS} characters")
                    pieces.append(piece)
        except _TEMPLATE_FAULTS as error:
            message = str(error) or type(error).__name__
            raise TemplateError(f"the chat template failed: {message}", param="messages") from error
        return "".join(pieces)


def _joined_parts(parts: list[Any]) -> str:
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if (
            not isinstance(part, dict)
            or kind not in ("text", "input_text")
            or not isinstance(part.get("text"), str)
        ):
            raise TemplateError(
                f"content part of type {kind!r} is not supported; only text is", param="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
