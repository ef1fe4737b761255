"""From what a caller asks to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio

from enginehouse.engine.events import ChatPrompt, Prompt
from enginehouse.errors import ContextLengthExceededError, InvalidRequestError
from enginehouse.runtime.chat_template import ChatTemplate
from enginehouse.runtime.tokenizer import Tokenizer

THREAD_ABOVE_CHARS = 2000
"""Longer texts are tokenised in a thread; for shorter ones the hand-over would cost more than the work."""


class PromptEncoder:
    """Turns prompts into token ids and refuses those the model cannot take."""

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate.of(tokenizer)
        self._max_context = max_context

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
            raise self._too_long(
                f"{len(tokens)}", param="messages" if isinstance(prompt, ChatPrompt) else "prompt"
            )
        return tokens

    async def _encode_text(self, text: str) -> list[int]:
        if len(text) <= THREAD_ABOVE_CHARS:
            return self._tokenizer.encode(text, add_special=True, parse_special=True)
        at_least = self._tokenizer.min_num_tokens(text)
        if at_least >= self._max_context:
            raise self._too_long(f"at least {at_least}", param="prompt")
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special=True, parse_special=True)

    async def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        contents = [message.get("content") for message in prompt.messages]
        at_least = sum(self._tokenizer.min_num_tokens(text) for text in contents if isinstance(text, str))
        if at_least >= self._max_context:
            raise self._too_long(f"at least {at_least}", param="messages")
        return await asyncio.to_thread(self._render_and_encode, prompt)

    def _render_and_encode(self, prompt: ChatPrompt) -> list[int]:
        if self._chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template; send a completion with the whole prompt instead.",
                param="messages",
            )
        return self._chat_template.encode(
            self._tokenizer,
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=prompt.add_generation_prompt,
            **prompt.template_kwargs,
        )

    def _check_ids(self, tokens: list[int]) -> list[int]:
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
