"""From what a caller asks to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from enginehouse.engine.events import ChatPrompt, Prompt
from enginehouse.errors import ContextLengthExceededError, InvalidRequestError, TemplateError
from enginehouse.runtime.chat_template import ChatTemplate
from enginehouse.runtime.tokenizer import Tokenizer

THREAD_ABOVE_CHARS = 2000
"""Longer texts are tokenised in a thread; for shorter ones the hand-over would cost more than the work."""
MAX_LONG_ENCODES = 4
"""Texts longer than `THREAD_ABOVE_CHARS` that are tokenised at a time, so that a crowd of them leaves the event loop
its share of the processor; the others wait."""

_TEXT_KEYS = ("role", "name", "content")
"""What templates write of a message. Names are counted although some templates leave them out: one that alone would
fill the context is a mistake."""


class PromptEncoder:
    """Turns prompts into token ids and refuses those the model cannot take."""

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate.of(tokenizer)
        self._max_context = max_context
        # A pool and not a semaphore: work whose caller has gone still counts until it is done.
        self._long_encodes = ThreadPoolExecutor(MAX_LONG_ENCODES, thread_name_prefix="encode")

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, at least one, leaving room for at least one more in the context.

        In a text prompt the names of special tokens become those tokens (the caller writes the whole prompt, as
        with token ids); in a chat only the template's own do.

        Raises `InvalidRequestError`, `ContextLengthExceededError` or `TemplateError`.
        """
        if isinstance(prompt, ChatPrompt):
            tokens = await self._encode_chat(prompt)
        elif isinstance(prompt, str):
            tokens = await self._encode_text(prompt)
        else:
            tokens = self._check_ids(prompt)
        if not tokens:
            raise InvalidRequestError("The prompt is empty: there is no token to start from.", param="prompt")
        if len(tokens) >= self._max_context:
            param = prompt.param if isinstance(prompt, ChatPrompt) else "prompt"
            raise self._too_long(f"{len(tokens)}", param=param)
        return tokens

    async def _encode_text(self, text: str) -> list[int]:
        if len(text) <= THREAD_ABOVE_CHARS:
            return self._tokenizer.encode(text, add_special=True, parse_special=True)
        at_least = self._tokenizer.min_num_tokens(text)
        if at_least >= self._max_context:
            raise self._too_long(f"at least {at_least}", param="prompt")
        return await self._in_turn(lambda: self._tokenizer.encode(text, add_special=True, parse_special=True))

    async def _in_turn(self, work: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._long_encodes, work)

    async def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        if len(prompt.messages) > self._max_context:  # each is marked off by at least one token
            raise self._too_long(f"at least {len(prompt.messages)}", param=prompt.param)
        fields = [message.get(key) for message in prompt.messages for key in _TEXT_KEYS]
        texts = [text for text in fields if isinstance(text, str)]
        at_least = sum(map(self._tokenizer.min_num_tokens, texts))
        if at_least >= self._max_context:
            raise self._too_long(f"at least {at_least}", param=prompt.param)
        has_tools = bool(prompt.tools) or any("tool_calls" in message for message in prompt.messages)
        if not has_tools and sum(map(len, texts)) <= THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(self._render_and_encode, prompt)
        return await self._in_turn(lambda: self._render_and_encode(prompt))

    def _render_and_encode(self, prompt: ChatPrompt) -> list[int]:
        if self._chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template; send a completion with the whole prompt instead.",
                param=prompt.param,
            )
        try:
            return self._chat_template.encode(
                self._tokenizer,
                prompt.messages,
                tools=prompt.tools,
                add_generation_prompt=prompt.add_generation_prompt,
                **prompt.template_kwargs,
            )
        except TemplateError as error:
            if error.param == "messages":  # the template's own word for them
                error.param = prompt.param
            raise

    def _check_ids(self, tokens: list[int]) -> list[int]:
        if len(tokens) >= self._max_context:
            raise self._too_long(f"{len(tokens)}", param="prompt")
        size = self._tokenizer.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequestError(
                    f"prompt: {token} is not a token id; they go from 0 to {size - 1}.", param="prompt"
                )
        return list(tokens)

    def _too_long(self, num_tokens: str, *, param: str) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"The prompt has {num_tokens} tokens, but this model's context holds {self._max_context} for prompt and "
            "answer together. Shorten the prompt.",
            param=param,
        )
